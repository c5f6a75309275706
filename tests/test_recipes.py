"""The recipes of CONTRIBUTING.md, followed literally in a copy of the package: only the files that they name change."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEW = ""  # in place of an anchor: a new file

# Title -> (file, the text to insert before, the insertion). Of a new file the recipe names the folder.
RECIPES = {
    "A loss": [
        (
            "oxrl/algorithms/preference.py",
            "def ipo(",
            'def push(pairs: Pairs, *, beta: float = 0.1) -> Tensor:\n    """-beta (log p_w - log p_l)."""\n'
            "    return -beta * (pairs.chosen - pairs.rejected)\n\n\n",
        ),
        ("oxrl/algorithms/table.py", "    preference(p.tdpo", "    preference(p.push),\n"),
    ],
    "A reward": [
        (
            "oxrl/rewards/polite.py",
            NEW,
            "from oxrl.types import Rollout\n\n\n"
            'def polite(rollout: Rollout) -> float:\n    """1 if the response has a please."""\n'
            '    return float("please" in rollout.response)\n',
        ),
        ("oxrl/rewards/table.py", "\n_TABLE:", "from oxrl.rewards.polite import polite\n"),
        ("oxrl/rewards/table.py", "    contains,\n", "    polite,\n"),
    ],
    "A dataset": [
        (
            "oxrl/data/prepare/capitals.py",
            NEW,
            "from oxrl.data.prepare.recipe import Dataset, text_of, user_prompt\nfrom oxrl.types import Sample\n\n\n"
            "def convert(row):\n"
            '    return [Sample("", user_prompt(text_of(row, "country")), answer=text_of(row, "capital"))]\n\n\n'
            'CAPITALS = Dataset("capitals", "capitals of countries", "CC0", convert)\n',
        ),
        ("oxrl/data/prepare/table.py", "\n_TABLE", "from oxrl.data.prepare.capitals import CAPITALS\n"),
        ("oxrl/data/prepare/table.py", "    GSM8K, SVAMP", "    CAPITALS,\n"),
    ],
    "An engine": [
        (
            "oxrl/config/registry.py",
            '    "vllm": EngineRecord(',
            '    "echo": EngineRecord("oxrl.run.engines:open_embedded", "for this test"),\n',
        ),
    ],
    "A backend": [
        (
            "oxrl/config/registry.py",
            '    "fsdp": BackendRecord(',
            '    "mine": BackendRecord("oxrl.run.backends:open_local", "for this test"),\n',
        ),
    ],
    "A command": [
        (
            "oxrl/cli/hello.py",
            NEW,
            'import typer\n\n\ndef hello() -> None:\n    """Say hello."""\n    typer.echo("hello from a recipe")\n',
        ),
        ("oxrl/cli/__init__.py", "app = typer.Typer(", "from oxrl.cli import hello\n\n"),
        ("oxrl/cli/__init__.py", "    plan.plan,\n", "    hello.hello,\n"),
    ],
}
USE = """
from typer.testing import CliRunner

from oxrl.algorithms import algorithm
from oxrl.cli import app
from oxrl.config import check_config
from oxrl.data.prepare import find_dataset
from oxrl.testing import fake_rollout
from oxrl.rewards.table import find_reward

assert algorithm("push", beta=0.5).parameters["beta"] == 0.5
assert find_reward("polite")(fake_rollout("yes, please")) == 1.0
assert find_dataset("capitals").licence == "CC0"
rows = {"model": {"name": "tiny"}, "data": {"train_files_path": "rows.jsonl"}}
config = check_config({**rows, "run": {"backend": "mine"}, "inference_engine": {"name": "echo"}})
assert (config.engine, config.ranks) == ("echo", 1)
commands = {"hello": "hello from a recipe", "algorithms": "push", "rewards list": "polite", "data list": "capitals"}
for command, shown in commands.items():
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0 and shown in done.output, (command, done.output)
"""


@pytest.mark.engine
def test_each_recipe_works_and_names_the_files_that_it_changes(tmp_path):
    shutil.copytree(ROOT / "oxrl", tmp_path / "oxrl", ignore=shutil.ignore_patterns("__pycache__"))
    sections = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##)", (ROOT / "CONTRIBUTING.md").read_text(), re.S | re.M))
    for title, edits in RECIPES.items():
        for file, anchor, text in edits:
            named = re.findall(r"`(oxrl/[^`]+)`", sections[title])
            in_folder = anchor == NEW and f"{Path(file).parent}/" in named
            assert file in named or in_folder, f"{title} does not name {file}"
            path = tmp_path / file
            before = "" if anchor == NEW else path.read_text()
            assert before.count(anchor) == 1 or anchor == NEW, f"{title}: {anchor!r} in {file}"
            path.write_text(before.replace(anchor, text + anchor) if anchor else text)
    done = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

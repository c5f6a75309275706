"""`oxrl eval --env`: episodes in the environment of a config, with the success that it reports and its interval."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from tests.rows import write_jsonl

pytest.importorskip("gymnasium")

ENVIRONMENT = """
from oxrl.rollouts.envs import single_turn
from oxrl.types import Score

async def env(sample, policy):
    number = sample.metadata["number"]
    if number == 7:
        raise ConnectionError("the environment is gone")
    episode = await single_turn(sample, policy)
    return episode._replace(score=Score(2.0 * number, {"success": float(number < 3)}))
"""


def evaluated(*options: str) -> Any:
    result = CliRunner().invoke(app, ["eval", *options])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout) if "--json" in options else result.stdout


def config(folder: Path, **rollout: Any) -> str:
    file = folder / "env.yaml"
    sections = {
        "model": {"name": "tiny", "dtype": "float32"},
        "train": {"alg_name": "grpo"},
        "rollout": {"max_tokens": 2, **rollout},
    }
    if "gym:" not in rollout["env"]:
        rows = str(write_jsonl(folder / "rows.jsonl", [{"prompt": "Go.", "number": n} for n in range(8)]))
        sections["data"] = {"train_files_path": rows, "val_files_path": rows}
    file.write_text(json.dumps(sections))
    return str(file)


def wilson(wins: int, count: int) -> tuple[float, float]:
    z, p = 1.959964, wins / count
    centre = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return centre - half, centre + half


def test_the_success_that_a_world_reports_has_an_interval_and_failed_episodes_are_left_out(tmp_path):
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    file, answers = config(tmp_path, env=f"{tmp_path / 'env.py'}:env"), tmp_path / "answers.jsonl"
    found = evaluated("tiny", "--env", file, "--json", "--output", str(answers))
    (result,) = found["results"]
    success, returned = result["marks"]["success"]["reward"], result["marks"]["return"]["reward"]
    assert (success["low"], success["high"]) == pytest.approx(wilson(3, 7))
    assert success["mean"] == pytest.approx(3 / 7) and returned["mean"] == pytest.approx(6.0)
    assert result["marks"]["success"]["graded"] == 7 and "the environment is gone" in result["failure"]
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["rewards"].get("success") for line in lines] == [1.0] * 3 + [0.0] * 4 + [None]
    text = evaluated("tiny", "--env", file, "--episodes", "3")
    assert "success      100.0% (43.9% to 100.0%)" in text and "0 ungraded" in text


def test_a_world_makes_its_held_out_rows_and_the_return_is_reported(tmp_path):
    file = config(tmp_path, env="gym:tests.rollouts.example_environments:Vowels-v0", max_turns=2)
    found = evaluated("tiny", "--env", file, "--episodes", "3", "--json", "--set", "rollout.max_tokens=1")
    assert found["rows"] == 3 and found["max_tokens"] == 1 and found["temperature"] == 0
    assert list(found["results"][0]["marks"]) == ["return"]
    named = evaluated(
        "tiny", "--env", "gym:tests.rollouts.example_environments:Vowels-v0", "--episodes", "2", "--max-tokens", "2"
    )
    assert named.startswith("gym:tests.rollouts.example_environments:Vowels-v0: 2 rows")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--env", "gym:Nowhere-v0"], "gymnasium cannot make Nowhere-v0"),
        (["--env", "gym:Nowhere-v0", "--data", "x.jsonl"], "give --data FILE or NAME, --env CONFIG, or --harness"),
        (["--data", "x.jsonl", "--episodes", "3"], "--episodes is for --env"),
        (["--env", "gym:Nowhere-v0", "--reward", "x"], "--reward has no effect with --env"),
        (["--env", "gym:Nowhere-v0", "--set", "train.alg_name=sft"], "rollout.env"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(options, message):
    result = CliRunner().invoke(app, ["eval", "tiny", *options])
    assert result.exit_code == 2 and message in result.stderr

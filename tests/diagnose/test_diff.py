"""Two runs with one planted difference each: the step and field in which they part, and the cause."""

import json
import shutil
from itertools import count

import pytest
import yaml
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import check_config
from oxrl.diagnose.diff import diff_runs
from oxrl.run.train import train_run
from tests.rows import sums, write_jsonl

SECTIONS = {
    "model": {"name": "tiny"},
    "train": {"alg_name": "grpo", "lr": 1e-2, "train_steps_per_epoch": 3, "train_batch_size_per_gpu": 2},
    "reward": {"reward_func": "oxrl.diagnose.verify_model:any_difference"},
    "rollout": {"n_samples": 4, "max_tokens": 8, "record": "full"},
}
OTHER = {"oxrl.diagnose.verify_model:any_difference": 0.5}


class Runs:
    def __init__(self, folder):
        self.folder, self.numbers = folder, count()
        self.base = self.train()

    def train(self, rows=None, **changes):
        home = self.folder / f"run{next(self.numbers)}"
        home.mkdir()
        data = {"train_files_path": str(write_jsonl(home / "rows.jsonl", rows or sums(8)))}
        sections = {name: {**keys, **changes.get(name, {})} for name, keys in SECTIONS.items()}
        config = check_config({**sections, "data": data, "run": changes.get("run", {})})
        return train_run(config, home / "run").folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, complete_run):
    return Runs(tmp_path_factory.mktemp("diff"))


PLANTED = {
    "data order": ({"rows": sums(8)[::-1]}, 1, "prompt", "data order"),
    "seed": ({"run": {"seed": 7}}, 1, ..., "seed"),
    "version": ({"rollout": {"lag": 1}}, 2, "version", "version"),
    "reward": ({"reward": {"reward_func": OTHER}}, 1, "reward", "reward"),
    "weights": ({"model": {"name": "{base}"}}, 1, "weights before the step", "weights"),
    "learning rate": ({"train": {"lr": 2e-2}}, 1, "loss", "learning rate"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_named(name, runs):
    changes, step, stage, cause = PLANTED[name]
    if name == "weights":
        changes = {"model": {"name": str(runs.base)}}
    found = diff_runs(runs.base, runs.train(**changes))
    assert found.difference is not None
    assert (found.step, found.cause.partition(":")[0]) == (step, cause)
    assert stage in (..., found.difference.stage)
    for section, keys in changes.items():
        if section != "rows":
            assert {f"{section}.{key}" for key in keys} <= found.config.keys()


def test_a_run_is_equal_to_its_repetition(runs):
    again = runs.train()
    found = diff_runs(runs.base, again)
    assert found.difference is None and found.compared == 3
    assert found.config.keys() == {"data.train_files_path"}
    for file in (again / "record").glob("step_*"):
        file.unlink()
    assert diff_runs(runs.base, again).difference is None, "by the lines of the index"
    command = CliRunner().invoke(app, ["diff", str(runs.base), str(again), "--json"])
    assert command.exit_code == 0 and json.loads(command.stdout)["compared"] == 3


def test_keys_and_versions_that_only_one_run_has_are_named(runs, tmp_path):
    one, other = (shutil.copytree(runs.base, tmp_path / name) for name in ("one", "other"))
    config = yaml.safe_load((one / "config.yaml").read_text())
    (one / "config.yaml").write_text(yaml.safe_dump(config | {"train": config["train"] | {"former": 1}}))
    seed = config["run"].pop("seed")
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    last = other / "record" / "step_000003.jsonl"
    header, answers = last.read_text().split("\n", 1)
    step = json.loads(header)
    step["environment"] |= {"torch": "0.1", "former": "2"}
    last.write_text(json.dumps(step) + "\n" + answers)
    for first, second, order in ((one, other, 1), (other, one, -1)):
        found = diff_runs(first, second)
        assert found.config == {"train.former": (1, None)[::order], "run.seed": (seed, None)[::order]}
        assert found.environment["former"] == (None, "2")[::order] and set(found.environment) == {"former", "torch"}
        assert "train.former: " in str(found) and "torch: " in str(found) and found.difference is None
    answer, rest = answers.split("\n", 1)
    last.write_text("\n".join([header, json.dumps(json.loads(answer) | {"reward": 9.0}), rest]))
    found = diff_runs(one, other)
    assert (found.step, found.difference.stage) == (3, "reward")
    assert found.cause.startswith("reward: "), "the seed differs, but not what it decides"


@pytest.mark.parametrize("command", [["replay"], ["diff"], ["explain", "--step", "1"], ["check"]])
def test_a_folder_without_a_run_is_named(command, runs, tmp_path):
    second = [str(runs.base)] if command == ["diff"] else []
    missing = CliRunner().invoke(app, [*command, str(tmp_path / "nowhere"), *second])
    assert missing.exit_code == 2 and "pass the folder that `oxrl train` wrote" in missing.stderr
    (tmp_path / ".lock").touch()
    waiting = CliRunner().invoke(app, [*command, str(tmp_path), *second])
    assert waiting.exit_code == 2 and str(tmp_path) in waiting.stderr and "damaged" not in waiting.stderr


def test_steps_whose_files_were_removed_are_compared_by_digest(runs):
    other = runs.train(reward={"reward_func": OTHER}, rollout={"record_steps": 1})
    found = diff_runs(runs.base, other)
    assert (found.step, found.difference.stage) == (1, "reward")
    assert "digest" in str(found)
    faster = diff_runs(runs.base, runs.train(train={"lr": 2e-2}, rollout={"record_steps": 1}))
    assert (faster.step, faster.difference.where) == (1, "lr") and faster.cause.startswith("learning rate")
    command = CliRunner().invoke(app, ["diff", str(runs.base), str(other)])
    assert command.exit_code == 1 and "likely cause: reward" in command.stdout

"""Recorded steps are trained again bit for bit; an edited record is found, and its first difference named."""

import json
import shutil

import pytest
import yaml
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import check_config
from oxrl.diagnose.replay import replay
from oxrl.run.train import train_run
from oxrl.tracking.step_files import read_step, recorded_steps
from tests.rows import sums, write_jsonl

TRAIN = {"lr": 1e-2, "checkpoint_every": 3, "keep_last": 2, "train_batch_size_per_gpu": 2}
GRPO = {
    "train": {**TRAIN, "alg_name": "grpo", "train_steps_per_epoch": 20, "checkpoint_every": 6, "keep_last": 5},
    "reward": {"reward_func": "oxrl.diagnose.verify_model:any_difference"},
    "rollout": {"n_samples": 4, "max_tokens": 8, "over_sampling_factor": 1.5},
}
PAIRS = [{"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": "no"} for i in range(12)]


def trained(folder, rows, **sections):
    data = {"train_files_path": str(write_jsonl(folder / "rows.jsonl", rows))}
    config = check_config({"model": {"name": "tiny"}, "data": data, **sections})
    return train_run(config, folder / "run").folder


@pytest.fixture(scope="module")
def grpo(tmp_path_factory, complete_run):
    return trained(tmp_path_factory.mktemp("grpo"), sums(16), **GRPO)


@pytest.mark.trains
def test_every_step_of_a_grpo_run_is_repeated_to_the_bit(grpo):
    found = replay(grpo)
    assert [(each.step, each.difference) for each in found.steps] == [(step, None) for step in range(1, 21)]
    assert (found.equal, found.start, found.trained, found.environment) == (True, "the initial model", 20, {})
    assert str(found) == "20 steps trained again from the initial model\nsteps 1 to 20: bit-equal (20 steps)"
    assert sum(read_step(grpo, step).step["totals"]["gradient"] > 0 for step in range(1, 21)) > 10, "it learned"
    assert recorded_steps(grpo) == list(range(1, 21)), "the run itself is as it was"


@pytest.mark.trains
@pytest.mark.parametrize(
    ("name", "rows", "sections"),
    [
        ("dpo", PAIRS, {"lora": {"enabled": True, "dropout": 0.1}}),
        ("sft", sums(12), {"rollout": {"record": "full"}}),
    ],
)
def test_runs_on_rows_are_repeated_to_the_bit_from_a_checkpoint(name, rows, sections, tmp_path):
    steps = 10 if name == "dpo" else 5
    train = {**TRAIN, "alg_name": name, "train_steps_per_epoch": steps, "keep_last": 5}
    run = trained(tmp_path, rows, train=train, **sections)
    assert replay(run).equal
    late = replay(run, [steps])
    assert late.equal and (late.start, late.trained) == (f"step_{steps - 1 - (steps - 1) % 3:04d}", 1 + (steps - 1) % 3)


def reward(lines):
    lines[2]["reward"] += 0.5


def token(lines):
    ids = lines[3]["tokens"]["ids"]
    ids[-1] = (ids[-1] + 1) % 256


def advantage(lines):
    lines[1]["tokens"]["advantage"][-1] += 1e-6


def log_prob(lines):
    lines[1]["tokens"]["policy_logprob"][-1] *= 1 + 1e-6


def loss(lines):
    lines[0]["metrics"]["loss"] += 1e-9


def weights(lines):
    lines[0]["digests"]["weights"] = "0" * 16


def unrecorded(lines):
    lines[0]["digests"]["tokens"] = "0" * 16


def message(lines):
    lines[1]["messages"][-1]["content"] += "!"


def log_prob_of_a_turn(lines):
    lines[1]["turns"] = 2
    lines[1]["tokens"]["sampler_logprob"][-1] *= 1 + 1e-6


def test_a_difference_in_episodes_of_several_turns_names_what_makes_them_depend_on_time(grpo, tmp_path):
    copy = shutil.copytree(grpo, tmp_path / "run")
    edit_step(copy, 19, log_prob_of_a_turn)
    found = replay(copy, [19])
    assert found.steps[0].difference.stage == "sampler log-prob"
    assert str(found).splitlines()[-1] == found.note and "rollout.mode fixed" in found.note
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["rollout"]["mode"] = "fixed"
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    assert replay(copy, [19]).note == ""


def edit_step(run, step, edit):
    file = run / "record" / f"step_{step:06d}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    edit(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


EDITS = {
    reward: ("reward", 0.5),
    token: ("sampling", ...),
    advantage: ("advantage", ...),
    log_prob: ("log-prob", ...),
    loss: ("loss", 1e-9),
    weights: ("weights", None),
    unrecorded: ("sampling", None),
    message: ("conversation", None),
}


@pytest.fixture(scope="module")
def edited(grpo, tmp_path_factory):
    """The run with its steps 13 to 20 edited, one by each function, and what a replay of them finds."""
    copy = shutil.copytree(grpo, tmp_path_factory.mktemp("edited") / "run")
    for step, edit in enumerate(EDITS, 13):
        edit_step(copy, step, edit)
    found = replay(copy, [12, 12, *range(13, 21)])
    return copy, dict(zip(EDITS, found.steps[1:], strict=True)), found


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edited_record_is_found(edit, edited):
    stage, gap = EDITS[edit]
    found = edited[1][edit].difference
    assert found is not None and found.stage == stage
    assert gap is ... or found.gap == (None if gap is None else pytest.approx(gap, rel=1e-3))


def test_the_first_difference_is_named_with_its_token(edited):
    run, found, _ = edited
    answer = read_step(run, 14).answers[2]
    last = len(answer["tokens"]["ids"]) - 1
    place = f"group {answer['group']}, answer {answer['index']}, ids {last}"
    assert str(found[token]).startswith(f"step 14: sampling: {place}: {answer['tokens']['ids'][-1]} and ")
    assert "(digest" in str(found[unrecorded])


def test_one_step_that_differs_makes_the_run_another_and_is_named_beside_its_gap(edited):
    found = edited[2]
    assert [each.difference is None for each in found.steps] == [True, *[False] * len(EDITS)]
    assert found.note == "", "every answer has one turn"
    assert not found.equal and found.earlier is None, "step 12 was asked for, once, and is as it was"
    assert (found.start, found.trained) == ("step_0006", 14)
    first, explained, equal, reward, *_ = str(found).splitlines()
    assert (first, explained) == ("14 steps trained again from step_0006", "of two values, the first is the record's")
    assert equal == "step 12: bit-equal" and reward.startswith("step 13: reward: ") and "a gap of 0.5" in reward


def test_the_command_says_what_differs_by_its_exit_code(edited, grpo):
    run = CliRunner().invoke(app, ["replay", str(edited[0]), "--step", "20", "--json"])
    assert run.exit_code == 1
    found = json.loads(run.stdout)
    assert found["steps"][0]["difference"]["stage"] == "conversation" and found["earlier"]["step"] == 19
    assert found["earlier"]["equal"] is found["equal"] is found["steps"][0]["equal"] is False
    assert CliRunner().invoke(app, ["replay", str(grpo), "--step", "20"]).exit_code == 0
    missing = CliRunner().invoke(app, ["replay", str(grpo), "--step", "21"])
    assert missing.exit_code == 2 and "it has 20 steps from 1 to 20" in missing.stderr


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("rollout", {"lag": 1}, "rollout.lag is 1"),
        ("run", {"backend": "fsdp"}, "run.backend is fsdp"),
        ("inference_engine", {"name": "vllm"}, "the engine is vllm"),
    ],
)
def test_a_run_whose_repetition_would_be_another_is_refused(section, value, message, grpo, tmp_path):
    config = yaml.safe_load((grpo / "config.yaml").read_text())
    config[section] |= value
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=message):
        replay(tmp_path)

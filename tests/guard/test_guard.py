"""The table of checks, the states in a run's folder, and healthy runs, which have no finding."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oxrl.algorithms import algorithm
from oxrl.cli import app
from oxrl.guard.findings import Finding, FindingsFile, read_findings, states_of
from oxrl.guard.monitor import Guard
from oxrl.guard.table import CHECKS, actions_of, document
from oxrl.tracking.health import CheckError
from tests.guard.test_faults import VARIED, offline, online
from tests.loops.test_online import Setting
from tests.rows import sums, write_jsonl


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs/checks.md"
    assert page.read_text() == document(), "run: python -m oxrl.guard.table > docs/checks.md"


def test_actions_are_chosen_by_name_or_for_all():
    assert actions_of({})["mask"] == "stop" and actions_of({})["entropy"] == "warn"
    chosen = actions_of({"all": "off", "entropy": "stop"})
    assert {name for name, action in chosen.items() if action != "off"} == {"entropy", "finite", "logprob_gap"}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"entropi": "stop"}, "'entropi' is no check; did you mean entropy?"),
        ({"entropy": "halt"}, "the action of entropy is 'halt'; it must be one of stop, warn, off"),
        ({"finite": "off"}, "finite cannot be set to off: it always stops a run"),
    ],
)
def test_wrong_names_and_actions_are_refused(chosen, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        actions_of(chosen)


def test_a_check_warns_once_or_stops_as_chosen(caplog):
    def collapse(guard):
        for step, entropy in enumerate([2.0, *[0.001] * 6], 1):
            guard.logged(step, {"loss": 0.1, "grad_norm": 1.0, "entropy": entropy})
        return [(each.check, each.state, each.step) for each in guard.findings]

    assert collapse(Guard()) == [("entropy", "warned", 6)]
    assert len(caplog.records) == 1 and "lower train.lr" in caplog.text
    with pytest.raises(CheckError, match="the check entropy failed: the entropy fell from 2 to 0.001"):
        collapse(Guard({"entropy": "stop"}))
    assert collapse(Guard({"entropy": "off"})) == []


def test_states_survive_a_torn_line_and_a_resume_drops_what_it_repeats(tmp_path):
    write = FindingsFile(tmp_path)
    for finding in (
        Finding(1, "mask", "passed", "no fault found"),
        Finding(4, "entropy", "warned", "it fell", "lower train.lr"),
        Finding(6, "entropy", "passed", "after a resume"),
        Finding(9, "kl", "warned", "it grew"),
    ):
        write(finding)
    with write.path.open("a") as file:
        file.write('{"step": 10, "check": "length", "sta')
    states = {each.check: each for each in states_of(tmp_path)}
    assert list(states) == list(CHECKS) and states["length"] == Finding(0, "length", "skipped", "not reached yet")
    assert states["entropy"].state == "warned", "what was found stays"
    FindingsFile(tmp_path, keep_until=5)
    assert [each.check for each in read_findings(tmp_path)] == ["mask", "entropy"]


@pytest.mark.trains
def test_a_run_prints_a_line_per_check_and_exits_with_1_after_a_failed_one(tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", sums(8))
    command = ["train", "--model", "tiny", "--algorithm", "sft", "--data", str(data), "--steps", "3", "--batch-size"]
    fine = [*command, "4", "--output", str(tmp_path / "fine")]
    assert CliRunner().invoke(app, fine).exit_code == 0
    done = CliRunner().invoke(app, ["check", str(tmp_path / "fine")])
    assert done.exit_code == 0 and len(done.stdout.splitlines()) == len(CHECKS)
    assert "passed   mask" in done.stdout and "skipped  tokens" in done.stdout and "warned" not in done.stdout
    broken = [*command, "4", "--lr", "1", "--set", "run.checks={diverged: stop}", "--output"]
    ended = CliRunner().invoke(app, [*broken, str(tmp_path / "broken"), "--set", "train.train_steps_per_epoch=6"])
    assert ended.exit_code == 1 and "the check diverged failed" in ended.output
    shown = CliRunner().invoke(app, ["check", str(tmp_path / "broken"), "--json"])
    (failed,) = (each for each in json.loads(shown.stdout)["checks"] if each["state"] == "failed")
    assert shown.exit_code == 1 and failed["check"] == "diverged" and "lower train.lr" in failed["remedy"]
    missing = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert missing.exit_code == 2 and "there is no run in" in missing.output
    (tmp_path / "fine" / "checks.jsonl").unlink()
    unchecked = CliRunner().invoke(app, ["check", str(tmp_path / "fine")])
    assert unchecked.exit_code == 2 and "fine has no checks.jsonl" in unchecked.output


@pytest.mark.parametrize("name", ["grpo", "ppo", "rloo"])
def test_a_healthy_run_that_samples_has_no_finding_and_proves_what_it_can(name):
    setting, guard = Setting(name, lr=1e-3), Guard(all_trained=True)
    setting.sampler.sampling = VARIED
    assert online(setting, 3, guard=guard, log=guard.logged) == {}
    passed = {name for name, found in guard.states.items() if found.state == "passed"}
    proofs = {"tokens", "mask", "advantages", "packed_rows", "loss_split", "finite", "trained_parameters"}
    assert proofs | {"sampler_weights", "logprob_gap", "reward_errors"} <= passed


def test_a_healthy_run_on_rows_has_no_finding():
    assert offline("sft", steps=4) == {}


def test_checks_do_not_change_what_is_trained():
    def digits(guard):
        setting = Setting(lr=1e-2)
        history = setting.run(3, setting.manager(batch_size=4, n_samples_per_prompt=4), guard=guard)
        return [(line["loss"], line["reward"], line["grad_norm"]) for line in history]

    assert digits(Guard()) == digits(Guard({"all": "off"}))


def test_a_loss_without_a_gradient_proves_nothing_and_raises_no_alarm():
    setting = Setting(lr=1e-3)
    assert online(setting, 2, algorithm=algorithm("grpo"), manager={"reward_fn": lambda rollout: 1.0}) == {}

"""Warnings about runs that diverge, collapse or learn nothing, on sequences of metrics and on real runs."""

import json
import math

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.tracking.health import CHECKS, HealthMonitor, find_warnings
from tests.rows import sums, write_jsonl


def rows(**series):
    """`rows(nll=[5, 4])`: a history; metrics that stay the same are given as one number."""
    length = max(len(values) for values in series.values() if isinstance(values, list))
    columns = {name: values if isinstance(values, list) else [values] * length for name, values in series.items()}
    return [
        {"step": step + 1, "loss": 0.1, "grad_norm": 1.0, **{name: values[step] for name, values in columns.items()}}
        for step in range(length)
    ]


SICK = {  # name: a history, the step at which it is noticed
    "diverged": (rows(nll=[5.0, 9.0, 30.0, 40.0, 11.0, 50.0]), 5),
    "chosen_falls": (rows(chosen_logprob=[-30.0, -40.0, -70.0, -80.0, -90.0, -99.0]), 5),
    "entropy": (rows(entropy=[2.0, 0.5, *[0.005] * 6], reward=0.5), 7),
    "truncated": (rows(truncated=[0.9, *[1.0] * 7], reward=0.5), 6),
    "empty": (rows(longest=[9, 1, 1, 1, 1], length=1.0), 4),
    "constant_reward": (rows(reward=[0.5, *[0.0] * 6], reward_std=[0.2, *[0.0] * 6]), 6),
    "worse_than_before": ([{"step": 0, "eval_loss": 5.0}, *rows(eval_loss=[6.0, 5.5, 5.2, 5.3])], 3),
    "length": (rows(length=[40.0, 20.0, *[3.0] * 6], reward=[0.5, 0.5, *[0.52] * 6]), 7),
    "kl": (rows(kl=[0.01, 0.1, 0.6, 0.8, 1.5, 3.0, 7.0], reward=0.5), 7),
    "held_out": (
        [
            {"step": 0, "eval_reward": 0.6, "eval_reward_low": 0.5, "eval_reward_high": 0.7},
            *rows(
                eval_reward=[0.6, 0.4, 0.3, 0.2],
                eval_reward_low=[0.5, 0.3, 0.2, 0.1],
                eval_reward_high=[0.7, 0.55, 0.45, 0.3],
                reward=[0.6, 0.7, 0.8, 0.9],
                length=9.0,
            ),
        ],
        4,
    ),
    "no_gradient": (rows(grad_norm=[1.0, 0.0, 0.0, 0.0, 0.0]), 4),
}


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_noticed_once_at_its_step_with_a_remedy(name, caplog):
    history, step = SICK[name]
    (warning,) = find_warnings(history)
    assert (warning.name, warning.step) == (name, step)
    assert warning.remedy in str(warning) and f"step {step}: " in str(warning)
    monitor = HealthMonitor()
    for row in history:
        monitor(row["step"], {key: value for key, value in row.items() if key != "step"})
    assert [record.getMessage() for record in caplog.records] == [str(warning)]


def test_every_check_has_a_sick_run():
    assert set(SICK) == {check.name for check in CHECKS}


HEALTHY = {
    "no worse than before": [{"step": 0, "eval_reward": 0.5}, *rows(eval_reward=[0.4, 0.495, 0.3, 0.2])],
    "no worse than before, as far as its interval tells": [
        {"step": 0, "eval_reward": 0.4, "eval_reward_low": 0.3, "eval_reward_high": 0.5},
        *rows(eval_reward=[0.33, 0.32, 0.31, 0.33]),
    ],
    "no evaluation before training": rows(eval_loss=[1.0, 2.0, 3.0, 4.0, 5.0]),
    "falling loss": rows(nll=[6.0 / step + 0.1 * (step % 3) for step in range(1, 30)]),
    "one bad step": rows(nll=[1.0, 0.9, 9.0, 9.0, 0.8, 0.7, 0.7]),
    "memorised rows, then others": rows(nll=[0.01, 0.5, 1.9, 1.7, 1.9, 1.5]),
    "a surrogate has any value": rows(policy=[0.0, 5.0, 6.0, 7.0, 8.0], reward=0.5, reward_std=0.1),
    "chosen falls slowly": rows(chosen_logprob=[-60.0 - step for step in range(30)]),
    "shorter responses that earn more": rows(length=[40.0, 20.0, *[3.0] * 6], reward=[0.1, 0.2, *[0.9] * 6]),
    "a KL term that settles": rows(kl=[0.01, 0.3, 0.9, 0.8, 0.8, 0.7, 0.6], reward=0.5),
    "held-out rewards that vary within their intervals": [
        {"step": 0, "eval_reward": 0.6, "eval_reward_low": 0.4, "eval_reward_high": 0.8},
        *rows(
            eval_reward=[0.7, 0.59, 0.6, 0.595], eval_reward_low=0.4, eval_reward_high=0.8, reward=[0.5, 0.6, 0.7, 0.8]
        ),
    ],
    "greedy from the start": rows(entropy=[0.001] * 9, reward=0.4, reward_std=0.3),
    "most are truncated": rows(truncated=[0.98] * 9, reward=0.4, reward_std=0.3),
    "some flat steps": rows(reward=[1.0] * 8, reward_std=[0, 0, 0, 0.1, 0, 0, 0, 0]),
    "values that are not finite": rows(nll=[math.nan, 5.0, None, math.inf, 5.0], entropy=None),
    "an evaluation before the first step": [{"step": 0, "eval_loss": 9.0}, *rows(nll=[1.0, 0.9, 0.8, 0.7])],
    "nothing": [],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_warning(name):
    assert find_warnings(HEALTHY[name]) == []


def test_a_resumed_run_repeats_no_warning_and_remembers_its_start(caplog):
    history, _ = SICK["diverged"]
    resumed = HealthMonitor(history[:4])  # one step before it would be noticed
    resumed(5, history[4])
    assert [warning.step for warning in resumed.warnings] == [5]
    again = HealthMonitor(history[:5])
    caplog.clear()
    again(6, history[5])
    assert not caplog.records and len(again.warnings) == 1


@pytest.mark.trains
@pytest.mark.parametrize(("lr", "names"), [(1.0, ["diverged"]), (1e-3, [])])
def test_a_run_with_a_learning_rate_of_1_does_not_end_like_a_success(tmp_path, caplog, lr, names):
    data = write_jsonl(tmp_path / "rows.jsonl", sums(24))
    command = ["train", "--model", "tiny", "--algorithm", "sft", "--data", data, "--lr", lr, "--steps", 6, "--output"]
    done = CliRunner().invoke(app, [*map(str, command), str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert caplog.text.count("the run diverges") == len(names), "once, while it trains"
    assert ("warning: step" in done.stdout) == bool(names)
    assert ("(see the warnings)" in done.stdout) == bool(names)
    assert ("the run diverges; lower train.lr" in done.stdout) == bool(names)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [warning.name for warning in find_warnings([json.loads(line) for line in lines])] == names

"""Complete runs from YAML: whole sequences that are left out off-policy, and a judge that compares a group."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from oxrl.config import load_config
from oxrl.run.train import train_run
from tests.rewards.test_http_judge import Judge, completion
from tests.rows import write_jsonl
from tests.web import serving

pytestmark = pytest.mark.trains

BASE = """
model: {name: tiny, dtype: float32}
run: {training_gpus: 0}
train: {alg_name: grpo, lr: 1.0e-2, warmup_steps_ratio: 0, lr_scheduler: constant, train_batch_size_per_gpu: 2}
rollout: {n_samples: 4, max_tokens: 4}
data: {train_files_path: rows.jsonl}
"""


def history(folder: Path, steps: int, *overrides: str) -> list[dict[str, float]]:
    write_jsonl(folder / "rows.jsonl", [{"prompt": f"Say {number}."} for number in range(4)])
    (folder / "config.yaml").write_text(BASE)
    data = f"data.train_files_path={folder / 'rows.jsonl'}"
    config = load_config(folder / "config.yaml", [f"train.train_steps_per_epoch={steps}", data, *overrides])
    train_run(config, folder / "run")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "reward" in line]


@pytest.mark.parametrize(("rejection", "bound"), [("geometric", 0.02), ("k3", 0.002)])
def test_sequences_that_drifted_are_left_out_and_counted(tmp_path, rejection, bound):
    (tmp_path / "rewards.py").write_text("def length(rollout):\n    return float(len(rollout.response) % 5)\n")
    params = json.dumps({"rejection": rejection, "rejection_bound": bound})
    off_policy = (f"train.alg_params={params}", "rollout.lag=1")
    steps = history(tmp_path, 4, *off_policy, f"reward.reward_func={tmp_path / 'rewards.py'}:length")
    rejected = [line["rejected"] for line in steps]
    assert rejected[0] == 0 and 0 < max(rejected) <= 1, "the first step has the weights that it was sampled with"
    assert all((8 * share).is_integer() for share in rejected), "whole sequences of eight"
    assert steps[0]["grad_norm"] > 0 and all(line["grad_norm"] == 0 for line in steps if line["rejected"] == 1)


def compare(judge: Any) -> None:
    """The more characters, the better; one line of scores for each request."""
    answers = judge.server.seen[-1][2]["messages"][1]["content"].split("<answer ")[1:]
    lengths = [len(each.split("\n")[1].encode()) for each in answers]
    judge.server.compared.append(len(answers))
    judge.reply(200, completion("Scores: " + ", ".join(str(min(10, length)) for length in lengths)))


def test_a_judge_that_compares_grades_a_group_by_one_request(tmp_path):
    with serving(Judge, script=[compare], seen=[], lock=threading.Lock(), compared=[]) as server:
        params = json.dumps({"base_url": f"{server.url}/v1", "model": "judge", "compare": True, "concurrency": 1})
        steps = history(tmp_path, 2, "reward.reward_func=llm_judge", f"reward.params={params}")
        assert server.compared == [4] * 4, "two steps of two prompts, all completions of a prompt at once"
    assert [line["ungraded"] for line in steps] == [0, 0]
    assert all(0 < line["reward"] <= 1 and line["reward_std"] > 0 and line["grad_norm"] > 0 for line in steps)

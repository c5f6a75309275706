"""The table of metrics against what real runs log."""

from pathlib import Path

import pytest

from oxrl.config import load_config
from oxrl.run.train import train_run
from oxrl.tracking.catalogue import FAMILIES, document, headlines, is_known, most_informative_first, of_family, results
from tests.rows import sums, write_jsonl

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
STEPS = ("model.name=tiny", "train.train_steps_per_epoch=1", "train.train_batch_size_per_gpu=4")
SAMPLED = ("rollout.n_samples=4", "rollout.max_tokens=6")
REWARD = (*SAMPLED, 'reward.reward_func={"oxrl.diagnose.verify_model:any_difference": 1.0, "exact_match": 0.5}')
RUNS = {  # algorithm: families, rows, settings
    "sft": (["supervised"], "sums", ()),
    "kd": (["supervised"], "sums", ("model.teacher=tiny",)),
    "dpo": (["pairs"], "pairs", ()),
    "cpo": (["pairs"], "pairs", ()),
    "bco": (["pairs"], "pairs", ()),
    "kto": (["labels"], "labels", ()),
    "rm": (["rm"], "pairs", ()),
    "grpo": (["rl"], "sums", (*REWARD, 'train.alg_params={"kl_coef": 0.1, "entropy_coef": 0.1}', "rollout.top_p=0.9")),
    "ppo": (["rl"], "sums", REWARD),
    "online_dpo": (["rl", "pairs"], "sums", REWARD),
    "rft": (["rl", "supervised"], "sums", (*REWARD, 'train.alg_params={"threshold": -1.0}')),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    pairs = [{"prompt": f"{i}?", "chosen": "yes it is", "rejected": "no"} for i in range(4)]
    labels = [{"prompt": f"{i}?", "completion": "yes", "label": i % 2 == 0} for i in range(4)]
    rows = {"sums": [{**row, "answer": row["response"]} for row in sums(4)], "pairs": pairs, "labels": labels}
    return {name: write_jsonl(folder / f"{name}.jsonl", each) for name, each in rows.items()}


@pytest.mark.trains
@pytest.mark.parametrize("name", RUNS)
def test_the_table_has_every_metric_that_a_run_logs_and_no_other(name, files, tmp_path):
    families, rows, settings = RUNS[name]
    data = (f"data.train_files_path={files[rows]}", f"data.val_files_path={files[rows]}")
    history = train_run(load_config(None, [*STEPS, f"train.alg_name={name}", *data, *settings]), tmp_path).history
    logged = {metric for line in history for metric in line} - {"step"}
    assert not [metric for metric in logged if not is_known(metric, families)]
    expected = {metric.name for metric in of_family(families[0], rare=False)}
    assert expected - logged == ({"chosen_reward", "rejected_reward"} if name == "cpo" else set()), (
        "it has no reference"
    )
    assert list(history[-1])[1:] == most_informative_first(logged & set(history[-1]))


def test_the_page_is_generated():
    assert PAGE.read_text() == document(), "run: python -m oxrl.tracking.catalogue > docs/metrics.md"
    assert all(f"## {family.title}" in document() for family in FAMILIES.values())


def test_the_console_shows_results_before_speed_and_evaluations_before_all():
    rl = ["lr", "loss", "reward_std", "truncated", "reward_format", "reward", "generated_per_second", "eval_reward"]
    assert list(headlines(dict.fromkeys([*rl, "eval_reward_low"], 0.0))) == [
        "eval_reward", "reward", "reward_format", "truncated", "loss", "lr", "generated_per_second",
    ]  # fmt: skip
    pairs = ["grad_norm", "lr", "rejected_reward", "chosen_reward", "margin", "accuracy", "loss", "memory_gib"]
    assert results(pairs) == ["loss", "accuracy", "margin", "chosen_reward", "rejected_reward"]
    assert results(["token_accuracy", "nll", "tokens", "perplexity", "loss"]) == [
        "loss",
        "perplexity",
        "token_accuracy",
    ]

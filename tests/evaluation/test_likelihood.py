"""`oxrl eval` without sampling: perplexity and preferences, against formulas in float64 and what a run reports."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from oxrl import evaluate
from oxrl.cli import app
from oxrl.data.render import Renderer
from oxrl.evaluation.likelihood import kind_of
from oxrl.loops.statistics import Z95, confidence_interval, ratio_estimate
from oxrl.models.load import load_model, load_tokenizer
from oxrl.types import Message, Sample
from tests.rows import sums, write_jsonl

PAIRS = [{"prompt": f"{i}?", "chosen": "no" if i % 4 else "yes it is", "rejected": "a b c d"} for i in range(8)]


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def response_logprob(prompt, response):
    """Summed log-prob of a response under `tiny` and its number of tokens, from full logits in float64."""
    (row,) = Renderer(load_tokenizer("tiny")).conversation(
        [Message("user", prompt), Message("assistant", response)], id="row"
    )
    with torch.no_grad():
        logits = load_model("tiny", is_trainable=False)(torch.tensor(row.tokens)[None]).logits[0].double().numpy()
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    trained = np.flatnonzero(row.mask)
    hits = (log_p[trained - 1].argmax(-1) == row.tokens[trained]).sum()
    return log_p[trained - 1, row.tokens[trained]].sum(), len(trained), hits


def test_perplexity_is_that_of_the_formula(tmp_path):
    rows = sums(6)
    evaluation = evaluate("tiny", str(write_jsonl(tmp_path / "rows.jsonl", rows)))
    scores = [response_logprob(row["prompt"], row["response"]) for row in rows]
    logprobs, tokens, hits = map(np.array, zip(*scores, strict=True))
    nll = -logprobs.sum() / tokens.sum()
    spread = np.sqrt(6 / 5 * np.square(-logprobs - nll * tokens).sum()) / tokens.sum()
    measures = evaluation.results[0].measures
    assert measures["nll"] == pytest.approx((nll, nll - Z95 * spread, nll + Z95 * spread), rel=1e-5)
    assert measures["perplexity"] == pytest.approx(np.exp(measures["nll"]), rel=1e-6)
    assert measures["token accuracy"].mean == pytest.approx(hits.sum() / tokens.sum())
    assert [record["logprob"] for record in evaluation.answers()] == pytest.approx(logprobs, rel=1e-4)


def test_preferences_are_those_of_the_formula(tmp_path):
    evaluation = evaluate("tiny", PAIRS)
    margins = np.array(
        [np.subtract(*(response_logprob(p["prompt"], p[side])[0] for side in ("chosen", "rejected"))) for p in PAIRS]
    )
    measures = evaluation.results[0].measures
    assert 0 < measures["accuracy"].mean == (margins > 0).mean()
    assert measures["accuracy"][1:] == confidence_interval((margins > 0).astype(float))
    half = Z95 * margins.std(ddof=1) / np.sqrt(8)
    assert measures["margin"] == pytest.approx((margins.mean(), margins.mean() - half, margins.mean() + half), rel=1e-4)


@pytest.mark.trains
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "rm"])
def test_a_run_is_evaluated_with_the_numbers_that_it_logged_and_against_another_model(tmp_path, algorithm):
    rows = write_jsonl(tmp_path / "rows.jsonl", sums(8) if algorithm == "sft" else PAIRS)
    command = ["train", "--model", "tiny", "--algorithm", algorithm, "--data", rows, "--val", rows, "--steps", 4]
    done = run(*command, "--lr", 1e-2, "--output", tmp_path / "run", "--json")
    assert done.exit_code == 0, done.output
    logged = json.loads(done.stdout.splitlines()[-1])
    other = [] if algorithm == "rm" else ["--against", "tiny"]
    done = run("eval", tmp_path / "run", "--data", rows, "--json", *other, "--output", tmp_path / "rows.out")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    history = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best = min((line for line in history if line["step"]), key=lambda line: line["eval_loss"])
    assert logged["checkpoint"].endswith(f"step_{best['step']:04d}")
    first = report["results"][0]
    if algorithm == "sft":
        assert first["perplexity"]["mean"] == pytest.approx(best["eval_perplexity"], rel=1e-3)
        assert first["token accuracy"]["mean"] == pytest.approx(best["eval_token_accuracy"])
        assert report["against"]["log-prob a token"]["better"] == 8
    elif algorithm == "dpo":
        assert first["reward accuracy"]["mean"] == best["eval_accuracy"]
        assert first["reward margin"]["mean"] == pytest.approx(best["eval_margin"] / 0.1, rel=1e-3)
        assert first["margin"]["mean"] == pytest.approx(best["eval_chosen_logprob"] - best["eval_rejected_logprob"])
    else:
        assert first["accuracy"]["mean"] == best["eval_accuracy"]
        assert first["margin"]["mean"] == pytest.approx(best["eval_margin"], rel=1e-3)
        assert "no perplexity" in run("eval", tmp_path / "run", "--data", write_jsonl(rows, sums(2))).output
    assert len((tmp_path / "rows.out").read_text().splitlines()) == 8 * len(report["results"])


@pytest.mark.trains
def test_the_reward_of_a_run_is_the_default_for_any_rows(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "answer": "7"} for i in range(4)])
    settings = ["--set", "rollout.max_tokens=4", "--set", "rollout.n_samples=2", "--steps", 1, "--batch-size", 2]
    reward = ["--reward", "length_target", "--set", "reward.params={target: 3}"]
    command = ["train", "--model", "tiny", "--algorithm", "grpo", "--data", rows, "--output", tmp_path / "run"]
    done = run(*command, *settings, *reward)
    assert done.exit_code == 0, done.output
    evaluation = evaluate(tmp_path / "run", [{"prompt": "other?", "answer": "8"}], max_tokens=4)
    assert evaluation.reward == "length_target"
    assert evaluate(tmp_path / "run", sums(2), by="perplexity").results[0].measures["perplexity"].mean > 1


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        (sums(2), ["--samples", 2], "nothing is sampled"),
        (sums(2), ["--by", "pairs"], "needs rows with chosen and rejected"),
        (PAIRS, ["--by", "perplexity"], "needs rows with a response"),
        (sums(2), ["--by", "loss"], "--by is reward, perplexity or pairs"),
        (
            sums(2),
            ["--by", "perplexity", "--reward", "contains"],
            "a reward has no effect on an evaluation by perplexity",
        ),
        (sums(2), ["--by", "reward"], "no reward is set"),
        ([{"prompt": "a?"}], [], "rows with responses or pairs need none"),
        (sums(2), ["--against", "nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_wrong_choices_are_errors_before_a_model_is_loaded(tmp_path, rows, arguments, message):
    done = run("eval", "tiny", "--data", write_jsonl(tmp_path / "rows.jsonl", rows), *arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output and "Traceback" not in done.output


def test_rows_decide_what_is_measured():
    message = (Message("user", "a"), Message("assistant", "b"))
    pair = Sample("p", message[:1], chosen=message[1:], rejected=message[1:])
    assert kind_of([pair, pair]) == "pairs"
    assert kind_of([Sample("t", text="some text"), Sample("c", message)]) == "perplexity"
    assert kind_of([Sample("q", message[:1])]) is kind_of([pair, Sample("q", message[:1])]) is None


def test_the_interval_of_one_row_is_infinite():
    assert ratio_estimate([3.0], [2.0]) == (1.5, -np.inf, np.inf)

"""Runs on rows with images by the command line: trained, resumed, evaluated, sampled from; with further models."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.tracking.metrics import read_metrics
from tests.drawings import encoded, picture, tone
from tests.rows import write_jsonl

COLORS = ("red", "green", "blue")


def run(*arguments: Any, **options: Any) -> Any:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
    assert done.exit_code == 0, done.output
    return done


def chat_rows(folder: Path) -> list[dict[str, Any]]:
    """Of one image, of two of different sizes, of the second message, and without any."""
    rows: list[dict[str, Any]] = []
    for number in range(8):
        color = COLORS[number % 3]
        (folder / f"{number}.png").write_bytes(encoded(picture(color, 56, 56 + 28 * (number % 2))))
        question = [{"type": "image"}, {"type": "text", "text": "Which color?"}]
        reply = {"role": "assistant", "content": color}
        messages, images = [{"role": "user", "content": question}, reply], [f"{number}.png"]
        if number % 4 == 1:
            messages[0] = {"role": "user", "content": [*question[:1], *question]}
            images = [f"{number}.png", "0.png"]
        elif number % 4 == 2:
            messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, *messages]
        elif number % 4 == 3:
            messages, images = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], []
        rows.append({"messages": messages, "images": images})
    return rows


@pytest.fixture(scope="module")
def trained(complete_run: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of an adapter, saved after each second one."""
    folder = tmp_path_factory.mktemp("media")
    data = write_jsonl(folder / "rows.jsonl", chat_rows(folder))
    val = write_jsonl(folder / "val.jsonl", chat_rows(folder)[:4])
    run(
        "train", "--model", "tiny-vlm", "--algorithm", "sft", "--data", data, "--val", val, "--lora", "--steps", 4,
        "--batch-size", 3, "--lr", 1e-2, "--set", "train.checkpoint_every=2", "--output", folder / "out",
    )  # fmt: skip
    return folder


def test_a_run_on_images_resumes_to_the_same_bits(trained: Path, tmp_path: Path) -> None:
    whole, half = trained / "out", tmp_path / "half"
    shutil.copytree(whole, half)
    shutil.rmtree(half / "checkpoints" / "step_0004")
    run("train", "--output", half, "--resume")
    saved = [load_file(folder / "checkpoints/step_0004/adapter_model.safetensors") for folder in (whole, half)]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(weight, saved[1][name]) for name, weight in saved[0].items())
    losses = [step["eval_loss"] for step in read_metrics(whole / "metrics.jsonl") if "eval_loss" in step]
    assert losses[-1] < losses[0]


def test_a_trained_model_is_shown_images_by_every_command(trained: Path, tmp_path: Path) -> None:
    out, red, blue = trained / "out", trained / "0.png", trained / "2.png"
    chat = run("chat", out, "--image", red, "--temperature", 0, "--max-tokens", 4, input="Which color?\nAnd now?\n\n")
    assert chat.output.count("model>") == 2

    def reply(*shown: Any, tokens: int = 4, temperature: float = 0.0) -> str:
        given = [part for file in shown for part in ("--image", file)]
        how = ["--max-tokens", tokens, "--temperature", temperature, "--json"]
        return str(json.loads(run("generate", out, "--prompt", "Which color?", *how, *given).stdout)["text"])

    assert reply(red) in chat.output
    assert reply(red, tokens=64, temperature=1.0) != reply(blue, tokens=64, temperature=1.0), "of equal placeholders"
    replies = run("generate", out, "--data", trained / "val.jsonl", "--max-tokens", 4, "--json").stdout.splitlines()
    assert len(replies) == 4 and json.loads(replies[0])["text"] == reply(red)
    prompts = [{"prompt": "Which color?", "image": str(red), "answer": "x"}, {"prompt": "Hi", "answer": "x"}]
    data = write_jsonl(tmp_path / "prompts.jsonl", prompts)
    evaluated = run("eval", out, "--data", data, "--reward", "exact_match", "--max-tokens", 4, "--json")
    assert json.loads(evaluated.stdout.splitlines()[-1])["rows"] == 2


def first_step(folder: Path, *settings: Any) -> dict[str, Any]:
    run("train", "--model", "tiny-vlm", "--steps", 1, "--output", folder / "out", *settings)
    return read_metrics(folder / "out" / "metrics.jsonl")[0]


@pytest.mark.trains
def test_a_reference_and_a_teacher_see_the_images_that_the_policy_sees(tmp_path: Path) -> None:
    """With equal weights there is no difference to them, whatever the images are; one who saw others would differ."""
    rows = []
    for number, color in enumerate(COLORS):
        (tmp_path / f"{color}.png").write_bytes(encoded(picture(color, 56, 56 + 28 * number)))
        rows.append({"prompt": "Which color?", "chosen": color, "rejected": "none", "image": f"{color}.png"})
    pairs = write_jsonl(tmp_path / "pairs.jsonl", rows)
    chosen = [{"prompt": row["prompt"], "response": row["chosen"], "image": row["image"]} for row in rows]
    replies = write_jsonl(tmp_path / "replies.jsonl", chosen)
    dpo = first_step(tmp_path / "dpo", "--algorithm", "dpo", "--data", pairs)
    assert dpo["loss"] == pytest.approx(math.log(2), abs=1e-5)
    taught = ["--set", "model.teacher=tiny-vlm", "--set", "train.alg_params.kd_weight=1.0"]
    kd = first_step(tmp_path / "kd", "--algorithm", "kd", "--data", replies, *taught)
    assert kd["loss"] == pytest.approx(0, abs=1e-5) and kd["grad_norm"] < 1e-3
    prompts = [{"prompt": row["prompt"], "answer": row["chosen"], "image": row["image"]} for row in rows]
    asked = write_jsonl(tmp_path / "asked.jsonl", prompts)
    grpo = first_step(
        tmp_path / "grpo", "--algorithm", "grpo", "--data", asked, "--reward", "exact_match", "--batch-size", 3,
        "--set", "rollout.max_tokens=4", "--set", "train.alg_params.kl_coef=0.1",
    )  # fmt: skip
    assert grpo["logprob_gap"] < 1e-4 and abs(grpo["kl"]) < 1e-5


def test_chat_refuses_media_that_the_model_cannot_read_before_the_first_message(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(encoded(picture("red", 56, 56)))
    (tmp_path / "a.wav").write_bytes(tone(440.0).data)  # type: ignore[arg-type]
    for model, given, message in (
        ("tiny", ("--image", tmp_path / "red.png"), "the model reads text only"),
        ("tiny-vlm", ("--audio", tmp_path / "a.wav"), "the model cannot read audio, only image"),
        ("tiny-vlm", ("--image", tmp_path / "none.png"), "there is no file"),
    ):
        done = CliRunner().invoke(app, ["chat", model, *map(str, given)], input="hello\n\n")
        assert (done.exit_code, "you>" in done.output) == (2, False) and message in done.output, done.output

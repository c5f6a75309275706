"""Folders of runs as a trainer leaves them, with contents that a test chooses: for the server and the page."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

SCRIPT = '<script>window.broken = 1</script><img src=x onerror="window.broken = 2"> & <b>bold</b>'
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAQAAAAECAIAAAAmkwkpAAAAEElEQVR4nGP4z8AARwzEcQCukw/x0F8jngAAAABJRU5ErkJggg=="


GOODS = ("lamp", "chair", "bike", "clock", "tent", "drum")


def hash_of(sample: str) -> int:
    return sum(map(ord, sample)) % len(GOODS)


def append(path: Path, *rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def metrics(step: int, steps: int = 40, shift: float = 0.0) -> dict[str, Any]:
    """A plausible line of `metrics.jsonl`."""
    done, noise = step / steps, random.Random(step + int(1000 * shift))
    learnt = 0.9 / (1 + math.exp(-8 * (done - 0.4)))
    row = {
        "step": step,
        "reward": max(0.0, learnt + shift + noise.gauss(0, 0.05)),
        "truncated": max(0.0, 0.3 * (1 - done) + noise.gauss(0, 0.03)),
        "length": 14 - 6 * done + noise.gauss(0, 0.7),
        "entropy": 1.8 * math.exp(-2 * done) + 0.05 * noise.random(),
        "flat_groups": round(4 * noise.random()),
        "loss": noise.gauss(0, 0.1),
        "reward_std": 0.35,
        "grad_norm": 1 + 0.3 * noise.random(),
        "lr": 3e-5,
        "generate_seconds": 2.1,
        "train_seconds": 1.2,
    }
    return row | ({"eval_reward": learnt + shift} if step % 10 == 0 else {})


def tokens_of(text: str, rng: random.Random, advantage: float = 0.5, prompt: str = "What is 2+2? ") -> dict[str, Any]:
    """The streams of an answer; a token is a word with the space before it."""
    asked, said = prompt.split(" ")[:-1], text.split(" ")
    pieces = [word if at == 0 else f" {word}" for at, word in enumerate(asked)]
    mask = [0] * len(asked) + [1] * len(said)
    pieces += [word if at == 0 else f" {word}" for at, word in enumerate(said)]
    null: list[float | None] = [None] * len(asked)
    policy = [-abs(rng.gauss(0, 1.5)) for _ in said]
    sampler = [value + rng.gauss(0, 0.05) for value in policy]
    return {
        "ids": [(at * 7919) % 50_000 for at in range(len(pieces))],
        "pieces": pieces,
        "mask": mask,
        "sampler_logprob": null + sampler,
        "policy_logprob": null + policy,
        "advantage": null + [advantage] * len(said),
        "ratio": null + [math.exp(a - b) for a, b in zip(policy, sampler, strict=True)],
        "clipped": null + [int(rng.random() < 0.1) for _ in said],
        "version": null + [at * 2 // max(1, len(said)) for at in range(len(said))],
    }


def answer(
    group: int, index: int, text: str, reward: float | None, sample: str = "row-1", **others: Any
) -> dict[str, Any]:
    rng = random.Random(f"{group} {index} {text[:40]}")
    return {
        "kind": "answer",
        "group": group,
        "index": index,
        "sample_id": sample,
        "reward": reward,
        "parts": {} if reward is None else {"correct": reward, "format": 0.1},
        "error": None if reward is not None else "the reward raised ValueError: no number",
        "status": "completed",
        "left_out": None,
        "messages": [
            {"role": "system", "content": "Answer with a number."},
            {"role": "user", "content": f"{GOODS[hash_of(sample)]}: $31\nkettle: $12\nWhat is the lowest price?"},
            {"role": "assistant", "content": text},
        ],
        "reference_answer": "12",
        "media": [],
        "turns": 1,
        "versions": [0],
        "tokens": tokens_of(text, rng, 0.0 if reward is None else reward - 0.5),
        **others,
    }


def with_tool(group: int, index: int, reward: float, sample: str, failed: bool) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "min(31, 12)"}}}
    result = "error: calculator took longer than 5 s" if failed else "12"
    final = "I cannot compute it." if failed else "The lowest price is 12."
    plain = answer(group, index, final, reward, sample, turns=2)
    asked = plain["messages"][:2]
    said = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": result},
        {"role": "assistant", "content": final},
    ]
    return plain | {"messages": [*asked, *said]}


def step_answers(step: int, groups: int = 6, size: int = 8, steps: int = 40) -> list[dict[str, Any]]:
    """Answers that get better from step to step; among them one that was cut off, one without a grade, tools."""
    rng, found = random.Random(step), []
    for group in range(groups):
        sample, number = f"row-{group % 4}", step * groups + group
        for index in range(size):
            right = rng.random() < (group + 1) / groups * (0.2 + step / steps)
            words = f"The prices are 31 and 12, so the lowest of them is {12 if right else rng.choice([31, 43, 7])}."
            made = answer(number, index, words, float(right), sample)
            if group == 1 and index < 2:
                made = with_tool(number, index, float(index), sample, failed=index == 0)
            elif index == 6 and group % 2:
                made = answer(number, index, words + " Then again" * 6, 0.0, sample, status="truncated")
            elif index == 7 and group == 2:
                made = answer(
                    number, index, "I would rather not say.", None, sample, left_out="ungraded", status="failed"
                )
            found.append(made)
    return found


def header(step: int, answers: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for each in answers:
        groups.setdefault(each["group"], []).append(each)
    summaries = []
    for group, own in groups.items():
        rewards = [each.get("reward") for each in own]
        graded = [reward for reward in rewards if reward is not None] or [0.0]
        middle = sum(graded) / len(graded)
        std = math.sqrt(sum((reward - middle) ** 2 for reward in graded) / len(graded))
        summaries.append(
            {
                "group": group,
                "sample_id": own[0]["sample_id"],
                "rewards": rewards,
                "mean": middle,
                "std": std,
                "recorded": True,
                "left_out": None,
            }
        )
    return {
        "kind": "step",
        "step": step,
        "version": step - 1,
        "online": True,
        "algorithm": "grpo",
        "checkpoint": None,
        "seeds": {"run": 0},
        "metrics": {},
        "seconds": {"generate": 2.1, "train": 1.2, "sync": 0.2, "record": 0.03, "wait": 2.2},
        "groups": summaries,
        **others,
    }


def write_step(folder: Path, step: int, answers: list[dict[str, Any]], **others: Any) -> None:
    file = folder / "record" / f"step_{step:06d}.jsonl"
    file.unlink(missing_ok=True)
    append(file, header(step, answers, **others), *answers)
    append(folder / "record" / "index.jsonl", {"step": step, "file": file.name})


def write_run(folder: Path, *, steps: int = 40, shift: float = 0.0, lr: float = 3e-5, recorded: int = 40) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"run": {"seed": 0}, "model": {"name": "tiny"}, "train": {"alg_name": "grpo", "lr": lr}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    append(folder / "metrics.jsonl", *(metrics(step, shift=shift) for step in range(1, steps + 1)))
    for step in range(max(1, steps - recorded + 1), steps + 1):
        write_step(folder, step, step_answers(step))
    append(
        folder / "checks.jsonl",
        {"step": 1, "check": "mask", "state": "passed", "message": "the mask is not empty", "remedy": ""},
        {
            "step": 2,
            "check": "tokens",
            "state": "passed",
            "message": "token ids in are token ids out",
            "remedy": "",
        },
        {
            "step": 24,
            "check": "reward_by_length",
            "state": "warned",
            "message": "the length of an answer alone predicts its reward: rank correlation -0.83 over 10 steps",
            "remedy": "look at the answers with the highest rewards; bound the length, or change the reward",
        },
    )
    return folder

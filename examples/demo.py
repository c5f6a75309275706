"""Train a real 135M chat model to find the lowest of three prices, by rewards alone, and show that it learned.

Minutes of GRPO on two CPU cores. The model never sees an answer: it samples eight per price list, those with the
right number earn a reward, and that is all it learns from. Held-out lists have goods and prices that training never
shows. Before and after are scored alike and leniently (the first or the last number counts, whatever is around it),
so learning to answer briefly would not count.

    python examples/demo.py [--seed 0] [--steps 36] [--shuffle-rewards]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table

from oxrl import (
    EmbeddedGenerator,
    GenerationConfig,
    Renderer,
    Rollout,
    RolloutSampler,
    Status,
    group_reward,
    load_model,
    load_samples,
    load_tokenizer,
)
from oxrl.config import check_config
from oxrl.loops.evaluate import confidence_interval, sample_and_grade
from oxrl.rewards.numbers import numbers_in
from oxrl.run.train import train_run
from oxrl.tracking.console import sparkline
from oxrl.tracking.metrics import read_metrics

FOLDER, MODEL = Path("runs/demo"), "smollm2-135m"
SEEN = "lamp kettle chair bike clock tent drum rug desk coat mug scarf vase kite stool".split()
HELD_OUT = "pillow guitar mirror helmet basket".split()


def price_list(goods: list[str], prices: list[int]) -> dict[str, str]:
    lines = "\n".join(f"{item}: ${price}" for item, price in zip(goods, prices, strict=True))
    question = f"{lines}\nWhat is the lowest price?"
    return {"system": "Answer with a number.", "prompt": question, "answer": str(min(prices))}


def make_lists(goods: list[str], count: int, rng: random.Random, taken: set[frozenset[int]]) -> list[dict[str, str]]:
    """`count` lists whose prices, in any order, are not among those `taken`."""
    lists = []
    while len(lists) < count:
        prices = rng.sample(range(10, 100), 3)
        if frozenset(prices) not in taken:
            lists.append((rng.sample(goods, 3), prices))
    taken.update(frozenset(prices) for _, prices in lists)
    return [price_list(*each) for each in lists]


def earned(rollout: Rollout) -> float:
    """The reward in training: 1 if the last number is right, half as much if the answer was cut off."""
    numbers = numbers_in(rollout.response)
    right = bool(numbers) and numbers[-1] == int(str(rollout.sample.answer))
    return right * (1.0 if rollout.status is Status.COMPLETED else 0.5)


@group_reward
def unrelated(rollouts: Sequence[Rollout]) -> list[float]:
    """The control: the same rewards, shuffled among the answers to a prompt."""
    rewards = [earned(rollout) for rollout in rollouts]
    random.Random(rollouts[0].group).shuffle(rewards)
    return rewards


def is_right(rollout: Rollout) -> float:
    """The score before and after: the first or the last number counts, however long the answer is."""
    numbers = numbers_in(rollout.response)
    return float(bool(numbers) and int(str(rollout.sample.answer)) in (numbers[0], numbers[-1]))


def evaluate(weights: str, rows: list[dict[str, str]]) -> list[Rollout]:
    tokenizer = load_tokenizer(weights)
    generator = EmbeddedGenerator(load_model(weights), tokenizer)
    sampler = RolloutSampler(generator, Renderer(tokenizer), GenerationConfig(max_new_tokens=24, temperature=0.0))
    return anyio.run(sample_and_grade, sampler, load_samples(rows).samples, is_right)


def write_rows(name: str, rows: list[dict[str, str]]) -> str:
    path = FOLDER / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def config_of(training: list[dict[str, str]], watched: list[dict[str, str]], arguments: argparse.Namespace) -> object:
    return check_config(
        {
            "run": {"seed": arguments.seed},
            "model": {"name": MODEL},
            "data": {
                "train_files_path": write_rows("train.jsonl", training),
                "val_files_path": write_rows("watched.jsonl", watched),
            },
            "train": {
                "alg_name": "grpo",
                "lr": 3e-5,
                "lr_scheduler": "constant",
                "train_steps_per_epoch": arguments.steps,
                "eval_every": 10,
                "micro_batch_tokens": 2048,
                "keep_last": 1,
            },
            "reward": {"reward_func": f"{__file__}:{'unrelated' if arguments.shuffle_rewards else 'earned'}"},
            "rollout": {"n_samples": 8, "max_tokens": 10},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--shuffle-rewards", action="store_true", help="a control: rewards are shuffled")
    arguments = parser.parse_args()
    console, rng, taken = Console(), random.Random(arguments.seed), set[frozenset[int]]()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    held_out = make_lists(HELD_OUT, 64, rng, taken)
    watched = make_lists(SEEN, 32, rng, taken)
    training = make_lists(SEEN, 1000, rng, taken)
    console.print(f"[bold]{MODEL}[/] before training, on {len(held_out)} price lists it will never see in training ...")
    before = evaluate(MODEL, held_out)
    console.print(f"learning from rewards on {len(training)} other lists ...")
    started = time.monotonic()
    result = train_run(config_of(training, watched, arguments), FOLDER / "run")
    seconds = time.monotonic() - started
    after = evaluate(str(result.checkpoint), held_out)
    show(console, before, after)
    summarize(console, before, after, seconds, arguments)
    commands = {"Chat with it": "chat", "Its curves": "plot", "Its answers, token by token": "view"}
    for purpose, command in commands.items():
        console.print(f"{purpose}: [bold]oxrl {command} {result.folder}[/]", soft_wrap=True)


def show(console: Console, before: list[Rollout], after: list[Rollout]) -> None:
    table = Table("price list", "right", "before", "after", show_lines=True)
    for old, new in list(zip(before, after, strict=True))[:5]:
        colour = "green" if new.reward else "red"
        texts = [rollout.response.strip().replace("\n", " ")[:60] for rollout in (old, new)]
        prompt = old.prompt.removesuffix("\nWhat is the lowest price?")
        table.add_row(prompt, str(old.sample.answer), texts[0], f"[{colour}]{texts[1]}[/]")
    console.print(table)


def summarize(
    console: Console, before: list[Rollout], after: list[Rollout], seconds: float, arguments: argparse.Namespace
) -> None:
    history = [line for line in read_metrics(FOLDER / "run" / "metrics.jsonl") if line["step"]]  # 0: an evaluation
    scores = [[rollout.reward or 0.0 for rollout in side] for side in (before, after)]
    intervals = [confidence_interval(side) for side in scores]
    means = [sum(side) / len(side) for side in scores]
    written = [f"{mean:.0%} (95%: {low:.0%} to {high:.0%})" for mean, (low, high) in zip(means, intervals, strict=True)]
    summary = Table("held-out lists", "accuracy before", "accuracy after", "training", "sampled tokens")
    tokens = sum(line["generated_tokens"] for line in history)
    summary.add_row(str(len(after)), written[0], f"[bold green]{written[1]}[/]", f"{seconds:.0f} s", f"{tokens:,.0f}")
    console.print(summary)
    console.print(f"reward, step by step  {sparkline([line['reward'] for line in history], width=len(history))}")
    record = {
        "accuracy_before": means[0],
        "accuracy_after": means[1],
        "interval_before": intervals[0],
        "interval_after": intervals[1],
        "n": len(after),
        "train_seconds": seconds,
        "steps": len(history),
        "seed": arguments.seed,
    }
    (FOLDER / "result.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

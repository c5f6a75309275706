"""oxRL and TRL's SFTTrainer: same model, rows, batch, precision and optimizer, alternating, on this machine.

Rows have mixed lengths, as chats have; only assistant turns are trained. Each measurement is a separate process, with
its own peak memory. The losses of both are compared: without equal work the ratios mean nothing.

    python benchmarks/sft.py [--model smollm2-135m] [--steps 6] [--rounds 2]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import anyio
from beside_trl import clock, in_own_process, peak_gib

import oxrl
from oxrl.data.assemble import assemble

BATCH, RATE = 8, 1e-5
SENTENCE = "the ox pulls a cart over hills of red clay while rain falls on old stone roads and far bells ring"
WORDS = SENTENCE.split()


def make_rows(n: int) -> list[dict[str, str]]:
    """Prompts and responses whose lengths spread evenly on a log scale, from a line to a page."""
    rng = random.Random(0)

    def text() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(int(12 * 14 ** rng.random())))

    return [{"prompt": text(), "response": text()} for _ in range(n)]


def render(model_name: str, rows: list[dict[str, str]]) -> list[tuple[oxrl.Row, ...]]:
    """The tokens that both sides train on: through its own template path TRL would add a newline to each row."""
    renderer = oxrl.Renderer(oxrl.load_tokenizer(model_name))
    return assemble(oxrl.load_samples(rows).samples, oxrl.algorithm("sft"), renderer).items


def run_oxrl(model_name: str, rows: list[dict[str, str]], steps: int) -> dict[str, object]:
    items = render(model_name, rows)
    backend = oxrl.create_pytorch_backend(oxrl.load_model(model_name), lr=RATE)
    config = oxrl.OfflineConfig(num_steps=steps, batch_size=BATCH)
    stamps = [time.monotonic()]

    def log(_step: int, _metrics: object) -> None:
        stamps.append(time.monotonic())

    source = oxrl.DataBuffer(items, shuffle=False)
    history = anyio.run(lambda: oxrl.run_offline(backend, oxrl.algorithm("sft"), source, config, log=log))
    losses = [line["loss"] for line in history]
    return _result(stamps, [line["trained_tokens"] for line in history], losses)


def run_trl(model_name: str, rows: list[dict[str, str]], steps: int) -> dict[str, object]:
    import datasets
    from trl import SFTConfig, SFTTrainer

    stamps: list[float] = []

    items = render(model_name, rows)
    labels = [[int(t) if m else -100 for t, m in zip(row.tokens, row.mask, strict=True)] for (row,) in items]
    columns = {"input_ids": [row.tokens.tolist() for (row,) in items], "labels": labels}
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            max_length=None,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            adam_beta2=0.95,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            shuffle_dataset=False,
            train_sampling_strategy="sequential",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model=oxrl.load_model(model_name),
            args=config,
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=oxrl.load_tokenizer(model_name),
            callbacks=[clock(stamps)],
        )
        trained = [int(row.mask.sum()) for (row,) in items]
        trainer.train()
    per_step = [sum(trained[start : start + BATCH]) for start in range(0, steps * BATCH, BATCH)]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return _result(stamps, per_step, losses)


def _result(stamps: list[float], trained_tokens: list[float], losses: list[float]) -> dict[str, object]:
    """The first step warms up and is not counted."""
    seconds = [end - start for start, end in pairwise(stamps)][1:]
    return {
        "trained_tokens_per_second": sum(trained_tokens[1:]) / sum(seconds),
        "seconds_per_step": statistics.mean(seconds),
        "peak_gib": peak_gib(),
        "trained_tokens": sum(trained_tokens),
        "losses": losses,
    }


SIDES = {"oxrl": run_oxrl, "trl": run_trl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = make_rows(arguments.steps * BATCH)
    if arguments.side:
        print(json.dumps(SIDES[arguments.side](arguments.model, rows, arguments.steps)))
        return
    results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for round_ in range(arguments.rounds):
        for side in SIDES if round_ % 2 == 0 else reversed(SIDES):
            results[side].append(in_own_process(__file__, side, sys.argv[1:]))
            last = results[side][-1]
            print(
                f"{side:5} {last['trained_tokens_per_second']:7.1f} trained tokens/s  "
                f"{last['seconds_per_step']:6.2f} s/step  {last['peak_gib']:5.2f} GiB  loss {last['losses'][-1]:.4f}"
            )

    def middle(side: str, key: str) -> float:
        return statistics.median(result[key] for result in results[side])

    ratios = {
        "speed": middle("oxrl", "trained_tokens_per_second") / middle("trl", "trained_tokens_per_second"),
        "memory": middle("oxrl", "peak_gib") / middle("trl", "peak_gib"),
    }
    ours, theirs = results["oxrl"][0], results["trl"][0]
    gap = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    print(
        f"\ntrained tokens {ours['trained_tokens']:.0f} and {theirs['trained_tokens']:.0f}, losses differ by {gap:.1e}"
    )
    print(f"oxRL / TRL: {ratios['speed']:.2f} x the speed, {ratios['memory']:.2f} x the memory")
    if arguments.output:
        arguments.output.write_text(json.dumps({"ratios": ratios, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""oxRL and TRL's SFTTrainer: same model, rows, batch, precision and optimizer, alternating, on this machine.

Rows have mixed lengths, as chats have; only assistant turns are trained. Each measurement is a separate process, with
its own peak memory. The losses of both are compared: without equal work the ratios mean nothing.

    python benchmarks/sft.py [--model smollm2-135m] [--steps 6] [--rounds 2]
"""

from __future__ import annotations

import random
import tempfile
import time
from typing import Any

import anyio
from beside_trl import clock, compare, measured

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


def render(model: str, rows: list[dict[str, str]]) -> list[tuple[oxrl.Row, ...]]:
    """The tokens that both sides train on: through its own template path TRL would add a newline to each row."""
    renderer = oxrl.Renderer(oxrl.load_tokenizer(model))
    return assemble(oxrl.load_samples(rows).samples, oxrl.algorithm("sft"), renderer).items


def run_oxrl(steps: int, model: str) -> dict[str, object]:
    items = render(model, make_rows(steps * BATCH))
    backend = oxrl.create_pytorch_backend(oxrl.load_model(model), lr=RATE)
    config = oxrl.OfflineConfig(num_steps=steps, batch_size=BATCH)
    stamps = [time.monotonic()]

    def log(_step: int, _metrics: object) -> None:
        stamps.append(time.monotonic())

    source = oxrl.DataBuffer(items, shuffle=False)
    history = anyio.run(lambda: oxrl.run_offline(backend, oxrl.algorithm("sft"), source, config, log=log))
    losses = [line["loss"] for line in history]
    return measured(stamps, [line["trained_tokens"] for line in history], losses)


def trl_settings(folder: str, steps: int) -> Any:
    from trl import SFTConfig

    return SFTConfig(
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


def run_trl(steps: int, model: str) -> dict[str, object]:
    import datasets
    from trl import SFTTrainer

    stamps: list[float] = []

    items = render(model, make_rows(steps * BATCH))
    labels = [[int(t) if m else -100 for t, m in zip(row.tokens, row.mask, strict=True)] for (row,) in items]
    columns = {"input_ids": [row.tokens.tolist() for (row,) in items], "labels": labels}
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=oxrl.load_model(model),
            args=trl_settings(folder, steps),
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=oxrl.load_tokenizer(model),
            callbacks=[clock(stamps)],
        )
        trained = [int(row.mask.sum()) for (row,) in items]
        trainer.train()
    per_step = [sum(trained[start : start + BATCH]) for start in range(0, steps * BATCH, BATCH)]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return measured(stamps, per_step, losses)


if __name__ == "__main__":
    compare(__file__, __doc__, {"oxrl": run_oxrl, "trl": run_trl}, model="smollm2-135m")

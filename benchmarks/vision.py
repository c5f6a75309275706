"""oxRL and TRL's SFTTrainer on rows with pictures: same model, rows, batch, precision and optimizer, alternating.

Pictures and answers have mixed sizes and lengths; answers alone are trained, the tower too. Both sides get the same
processor, and process the pictures within the time that is measured. The losses of both are compared.

    python benchmarks/vision.py [--steps 8] [--rounds 2]
"""

from __future__ import annotations

import random
import tempfile
import time
from typing import Any

import anyio
from beside_trl import clock, compare, measured
from PIL import Image
from sft import BATCH, RATE, WORDS, trl_settings

import oxrl
from oxrl.data.assemble import assemble
from oxrl.models.load import load_processor

MODEL = oxrl.ModelConfig("tiny-vlm", device="cpu", freeze="nothing")
QUESTION, END = "What is it?", "<|im_end|>"
SIZES = (56, 84, 112, 168, 224)


def make_rows(n: int) -> list[dict[str, Any]]:
    """Pictures of 4 to 64 tokens, and answers of 3 to 30 words."""
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for _ in range(n):
        size = (rng.choice(SIZES), rng.choice(SIZES))
        picture = Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))
        answer = " ".join(rng.choice(WORDS) for _ in range(int(3 * 10 ** rng.random())))
        rows.append({"prompt": QUESTION, "response": answer, "image": picture})
    return rows


def render(rows: list[dict[str, Any]]) -> list[tuple[oxrl.Row, ...]]:
    samples = oxrl.load_samples(rows).samples
    return assemble(samples, oxrl.algorithm("sft"), oxrl.Renderer(oxrl.load_tokenizer(MODEL))).items


def run_oxrl(steps: int) -> dict[str, object]:
    items = render(make_rows(steps * BATCH))
    backend = oxrl.create_pytorch_backend(oxrl.load_model(MODEL), lr=RATE)
    config = oxrl.OfflineConfig(num_steps=steps, batch_size=BATCH)
    stamps = [time.monotonic()]
    source = oxrl.DataBuffer(items, shuffle=False)
    history = anyio.run(
        lambda: oxrl.run_offline(
            backend, oxrl.algorithm("sft"), source, config, log=lambda *_: stamps.append(time.monotonic())
        )
    )
    return measured(stamps, [line["trained_tokens"] for line in history], [line["loss"] for line in history])


def run_trl(steps: int) -> dict[str, object]:
    from datasets import Dataset
    from trl import SFTTrainer

    rows = make_rows(steps * BATCH)
    processor = load_processor(MODEL)
    assert processor is not None
    reader = processor.processor
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = reader.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    columns = {
        "prompt": [prompt] * len(rows),
        "completion": [row["response"] + END for row in rows],  # as a chat, TRL would add a newline to each row
        "images": [[row["image"]] for row in rows],
    }
    stamps: list[float] = []
    trained: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=oxrl.load_model(MODEL),
            args=trl_settings(folder, steps),
            train_dataset=Dataset.from_dict(columns),
            processing_class=reader,
            callbacks=[clock(stamps)],
        )
        collator = trainer.data_collator

        def counted(examples: list[dict[str, Any]]) -> Any:
            batch = collator(examples)
            trained.append(int((batch["labels"] != -100).sum()))
            return batch

        trainer.data_collator = counted
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return measured(stamps, trained[:steps], losses)


if __name__ == "__main__":
    compare(__file__, __doc__, {"oxrl": run_oxrl, "trl": run_trl})

"""Train a real 135M chat model to turn an order in plain English into one line of JSON, and show that it learned.

Two minutes of supervised fine-tuning on two CPU cores. The prompt names the keys, and still almost none of
the orders are right before; the held-out orders use sentences, goods and cities that training never shows.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from oxrl import EmbeddedGenerator, GenerationConfig, Message, Renderer, load_model, load_tokenizer
from oxrl.config import check_config
from oxrl.run.train import train_run

FOLDER = Path("runs/orders")
MODEL = "smollm2-135m"
ASK = "Write this order as JSON with the keys quantity, colour, item, city and day.\n"

SEEN = {
    "sentence": [
        "Please send {quantity} {colour} {item} to {city} by {day}.",
        "We need {quantity} {colour} {item} in {city}, {day} at the latest.",
        "Hi! My shop in {city} is out of stock: {quantity} {colour} {item}, please, for {day}.",
        "{day} delivery to {city}, {quantity} {colour} {item}. Thanks!",
        "Could you get {quantity} {item} (the {colour} ones) to our {city} office before {day}?",
    ],
    "item": """mugs lamps chairs scarves bottles clocks bags plates forks rugs desks pens notebooks shelves umbrellas
        blankets teapots hammers ladders drums kettles stools jackets boots gloves hats ropes buckets brooms tents
        trays vases whistles zippers magnets globes kites puzzles ribbons sponges""".split(),
    "colour": "red blue green black white yellow brown grey pink beige silver golden".split(),
    "city": """Oslo Lima Cairo Paris Kyoto Quito Boston Delhi Vienna Lagos Sydney Warsaw Toronto Athens Seoul Havana
        Accra Porto Geneva Dallas Manila Riga Tunis Bogota""".split(),
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"],
}
HELD_OUT = {
    "sentence": [
        "{quantity} {colour} {item} for {city}. They must arrive on {day}.",
        "Hello, the {city} branch would like {quantity} {colour} {item} delivered on {day}.",
    ],
    "item": ["towels", "candles", "baskets", "mirrors", "spoons", "pillows"],
    "colour": ["purple", "orange", "turquoise", "red"],
    "city": ["Rome", "Nairobi", "Dublin", "Hanoi", "Madrid", "Chicago"],
    "day": ["Monday", "Wednesday", "Saturday", "Sunday"],
}


def make_order(values: dict[str, list[str]], rng: random.Random) -> dict[str, str]:
    order: dict[str, object] = {"quantity": rng.randint(2, 99)}
    order |= {key: rng.choice(values[key]) for key in ("colour", "item", "city", "day")}
    return {"prompt": ASK + rng.choice(values["sentence"]).format(**order), "response": json.dumps(order)}


def is_right(text: str, expected: str) -> bool:
    """Lenient: the first JSON object anywhere in the text counts, and so does "12" for 12."""
    start, end = text.find("{"), text.find("}")
    try:
        found = json.loads(text[start : end + 1])
    except ValueError:
        return False
    return {k: str(v) for k, v in found.items()} == {k: str(v) for k, v in json.loads(expected).items()}


def answer(weights: str, rows: list[dict[str, str]]) -> list[str]:
    tokenizer = load_tokenizer(weights)
    render, generator = Renderer(tokenizer), EmbeddedGenerator(load_model(weights), tokenizer)
    prompts = [render.prompt([Message("user", row["prompt"])]) for row in rows]
    greedy = GenerationConfig(max_new_tokens=48, temperature=0)
    batches = [generator.complete(prompts[start : start + 16], greedy) for start in range(0, len(prompts), 16)]
    return [generation.text for batch in batches for generation in batch]


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def main() -> None:
    console, rng = Console(), random.Random(7)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    training = [make_order(SEEN, rng) for _ in range(256)]
    held_out = [make_order(HELD_OUT, rng) for _ in range(64)]
    config = check_config(
        {
            "model": {"name": MODEL},
            "data": {
                "train_files_path": write_rows(FOLDER / "train.jsonl", training),
                "val_files_path": write_rows(FOLDER / "held_out.jsonl", held_out[:16]),
            },
            "train": {"alg_name": "sft", "lr": 1e-4, "train_steps_per_epoch": 28, "eval_every": 14},
        }
    )
    console.print(f"[bold]{MODEL}[/] before training, on {len(held_out)} orders it will never train on ...")
    before = answer(MODEL, held_out)
    console.print(f"training on {len(training)} orders ...")
    started = time.monotonic()
    result = train_run(config, FOLDER / "run")
    seconds = time.monotonic() - started
    after = answer(str(result.checkpoint), held_out)
    show(console, held_out, before, after, seconds)
    console.print(
        f"\nChat with it: [bold]oxrl chat {result.folder}[/]    Its curves: [bold]oxrl plot {result.folder}[/]"
    )


def show(console: Console, rows: list[dict[str, str]], before: list[str], after: list[str], seconds: float) -> None:
    table = Table("order", "before", "after", show_lines=True)
    for row, old, new in list(zip(rows, before, after, strict=True))[:4]:
        colour = "green" if is_right(new, row["response"]) else "red"
        table.add_row(row["prompt"].removeprefix(ASK), old.strip()[:160], f"[{colour}]{new.strip()[:160]}[/]")
    console.print(table)
    scores = [sum(map(is_right, texts, [row["response"] for row in rows])) / len(rows) for texts in (before, after)]
    summary = Table("held-out orders", "accuracy before", "accuracy after", "training")
    summary.add_row(str(len(rows)), f"{scores[0]:.0%}", f"[bold green]{scores[1]:.0%}[/]", f"{seconds:.0f} s")
    console.print(summary)
    record = {"accuracy_before": scores[0], "accuracy_after": scores[1], "n": len(rows), "train_seconds": seconds}
    (FOLDER / "result.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

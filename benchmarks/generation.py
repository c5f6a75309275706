"""Sampling on a GPU: tokens per second of the embedded engine, captured and compiled, beside `transformers.generate`.

Random weights of Qwen2.5's shapes in bfloat16, so that no hub is needed. (a) decoding only: prompts of 128 tokens, 256
new ones, all sequences equally long. (b) what a rollout is: four times as many prompts as slots, prompts of 32 to 512
tokens, completions of 16 to 512, slots refilled, prefill and the work of the host counted.

    python benchmarks/generation.py [--shapes 0.5B,1.5B,7B] [--slots 64,512] [--ways captured,compiled] [--lora 16]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from oxrl.generators.embedded.captured import Capture
from oxrl.generators.embedded.engine import Engine, Job
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.types import GenerationConfig, Request

SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, True),
    "1.5B": (1536, 8960, 28, 12, 2, True),
    "7B": (3584, 18944, 28, 28, 4, False),
}
VOCABULARY = 151936
WAYS = {
    "plain": Capture(capture=False),
    "captured": Capture(capture=True, compiles=False),
    "compiled": Capture(capture=True, compiles=True),
}


class NoText:
    """Token ids without a vocabulary."""

    eos_token_id = None

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def build(shape: str) -> Any:
    hidden, inner, layers, heads, key_heads, tied = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, tie_word_embeddings=tied, eos_token_id=None,
        max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config).eval()
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    return model


def finish(engine: Engine, jobs: list[Job]) -> None:
    while any(job.result is None for job in jobs):
        engine.step()
    torch.cuda.synchronize()


def prompts(count: int, lengths: np.ndarray, seed: int) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    return [tuple(random.integers(0, VOCABULARY, length).tolist()) for length in lengths[:count]]


def decoding(engine: Engine, slots: int, new: int = 256) -> float:
    sampling = GenerationConfig(max_new_tokens=new)
    texts = prompts(slots, np.full(slots, 128), 1)
    jobs = [engine.submit(Request(text, seed=seed), sampling) for seed, text in enumerate(texts)]
    engine.step()
    torch.cuda.synchronize()
    started, before = time.monotonic(), sum(len(job.tokens) for job in jobs)
    finish(engine, jobs)
    return (sum(len(job.tokens) for job in jobs) - before) / (time.monotonic() - started)


def rollout(engine: Engine, slots: int) -> float:
    random = np.random.default_rng(2)
    texts = prompts(4 * slots, random.integers(32, 513, 4 * slots), 3)
    lengths = random.integers(16, 513, 4 * slots).tolist()
    torch.cuda.synchronize()
    started = time.monotonic()
    jobs = [
        engine.submit(Request(text, seed=seed), GenerationConfig(max_new_tokens=length))
        for seed, (text, length) in enumerate(zip(texts, lengths, strict=True))
    ]
    finish(engine, jobs)
    return sum(lengths) / (time.monotonic() - started)


def transformers_generate(model: Any, slots: int) -> float:
    ids = torch.tensor(prompts(slots, np.full(slots, 128), 1), device="cuda")
    seconds = []
    for new in (1, 1, 128):  # the first call warms up; the second is the prefill
        torch.cuda.synchronize()
        started = time.monotonic()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=True)
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
    return slots * 127 / (seconds[2] - seconds[1])


def measure(model: Any, slots: int, way: str) -> dict[str, float]:
    if way == "generate":
        return {"decoding": transformers_generate(model, slots)}
    torch.cuda.reset_peak_memory_stats()
    engine, started = Engine(model, NoText(), slots, "shrinking", WAYS[way]), time.monotonic()
    finish(engine, [engine.submit(Request(tuple(range(1024))), GenerationConfig(max_new_tokens=20))])
    row = {"start_seconds": time.monotonic() - started, "decoding": decoding(engine, slots)}
    if way != "plain":
        rollout(engine, slots)  # every batch size is captured once
        row["rollout"] = rollout(engine, slots)
    return {**row, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--shapes", default="0.5B", help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--slots", default="64,512,1024")
    parser.add_argument("--ways", default="generate,plain,captured,compiled")
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter on all linear layers; 0: none")
    arguments = parser.parse_args()
    for shape in arguments.shapes.split(","):
        model = build(shape)
        if arguments.lora:
            model = attach_lora(model, LoraSettings(r=arguments.lora), seed=1)
        for slots in map(int, arguments.slots.split(",")):
            for way in arguments.ways.split(","):
                found = {name: round(value, 1) for name, value in measure(model, slots, way).items()}
                print(json.dumps({"shape": shape, "slots": slots, "way": way, **found}), flush=True)
                torch.cuda.empty_cache()
        del model


if __name__ == "__main__":
    main()

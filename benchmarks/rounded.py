"""Sampling in bfloat16 beside a float32 trainer on a CPU: speed, and the gap in log-probs.

`smollm2-135m`, 32 sequences of 40 prompt tokens and 32 new ones, one thread; rounds of both alternate. Processor time,
so that other processes on the machine matter less. `inference_engine.precision: bfloat16` samples in this way.

    python benchmarks/rounded.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.generators.embedded.rounded import RoundedGenerator
from oxrl.models.load import load_model, load_tokenizer
from oxrl.types import Generation, GenerationConfig, ModelConfig

SEQUENCES, PROMPT, NEW = 32, 40, 32
TEXT = "The capital of France is Paris. Water boils at 100 degrees, and ice melts at 0. A week has seven days."


def prompts(tokenizer: object) -> list[list[int]]:
    words = tokenizer(TEXT).input_ids  # type: ignore[operator]
    draws = np.random.RandomState(0)
    return [draws.choice(words, PROMPT).tolist() for _ in range(SEQUENCES)]


def gaps(model: torch.nn.Module, of: list[list[int]], sampled: list[Generation]) -> list[float]:
    """Distance of each sampled token's log-prob from the one of a float32 pass over the complete sequence."""
    found: list[float] = []
    for prompt, generation in zip(of, sampled, strict=True):
        tokens = torch.tensor([*prompt, *generation.token_ids])
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
        ours = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[len(prompt) - 1 :, 0]
        found += (ours - torch.tensor(generation.logprobs)).abs().tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    settings = ModelConfig("smollm2-135m", dtype="float32", device="cpu")
    model, tokenizer = load_model(settings), load_tokenizer(settings)
    engines = {
        "float32": EmbeddedGenerator(model, tokenizer, slots=SEQUENCES),
        "bfloat16": RoundedGenerator(model, tokenizer, torch.bfloat16, slots=SEQUENCES),
    }
    asked, sampling = prompts(tokenizer), GenerationConfig(max_new_tokens=NEW)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    sampled: dict[str, list[Generation]] = {}
    for number in range(rounds):
        for name, engine in engines.items():
            started = time.process_time()
            sampled[name] = engine.complete(asked, sampling)
            tokens = sum(len(each.token_ids) for each in sampled[name])
            speeds[name].append(tokens / (time.process_time() - started))
            print(f"round {number}, {name}: {speeds[name][-1]:.1f} tokens per processor second", flush=True)
    ratio = statistics.median(b / a for a, b in zip(speeds["float32"], speeds["bfloat16"], strict=True))
    print(f"bfloat16 is {ratio:.2f} times as fast")
    for name in engines:
        gap = gaps(model, asked, sampled[name])
        print(f"{name}: gap to the trainer: mean {np.mean(gap):.2g}, max {max(gap):.2g}")


if __name__ == "__main__":
    main()

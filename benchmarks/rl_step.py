"""Where the seconds of a GRPO step go on a GPU: sampling, training, and the rest, with and without capture.

Random weights of Qwen2.5's 0.5B shape in bfloat16, prompts of 128 tokens, a reward of the token ids, one optimizer step
per step; the first two steps warm up and are not counted. Without a GPU, `--shape tiny` shows that the script works.

    python benchmarks/rl_step.py [--prompts 64] [--samples 8] [--tokens 256] [--ways plain,compiled]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import zlib
from collections.abc import Sequence
from typing import Any

import anyio
import numpy as np
import torch
from generation import SHAPES, WAYS, build

import oxrl
from oxrl.types import IntArray

PROMPT = 128  # tokens
WARM_UP = 2  # steps


def model_of(shape: str) -> Any:
    return build(shape) if shape in SHAPES else oxrl.load_model("tiny")


class TokenPrompts(oxrl.Renderer):
    """Random token ids for each text, of the whole vocabulary."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        super().__init__(tokenizer)
        self.vocabulary = vocabulary

    def prompt(self, messages: Sequence[oxrl.Message], **_: Any) -> IntArray:
        random = np.random.default_rng(zlib.crc32(messages[-1].text.encode()))
        return random.integers(10, self.vocabulary, PROMPT)


def measure(arguments: argparse.Namespace, way: str) -> dict[str, float]:
    model = model_of(arguments.shape)
    compiles = WAYS[way].compiles if model.device.type == "cuda" else False
    backend = oxrl.create_pytorch_backend(model, lr=1e-6, compiles=bool(compiles))
    slots = arguments.prompts * arguments.samples
    tokenizer = oxrl.load_tokenizer("tiny")
    generator = oxrl.EmbeddedGenerator(model, tokenizer, slots=slots, capture=WAYS[way])
    samples = [
        oxrl.Sample(str(index), (oxrl.Message("user", f"prompt {index}"),))
        for index in range(arguments.steps * arguments.prompts)
    ]
    render = TokenPrompts(tokenizer, model.config.vocab_size)
    sampling = oxrl.GenerationConfig(max_new_tokens=arguments.tokens)
    config = oxrl.RolloutConfig(
        batch_size=arguments.prompts,
        n_samples_per_prompt=arguments.samples,
        reward_fn=lambda rollout: float(np.mean([token % 2 for token in rollout.turns[0].generation.token_ids])),
    )
    manager = oxrl.sampling_manager(
        oxrl.DataBuffer(samples, shuffle=False), oxrl.RolloutSampler(generator, render, sampling), config
    )
    steps = oxrl.OnlineConfig(
        num_steps=arguments.steps, micro_batch_tokens=arguments.micro_batch_tokens, max_logprob_gap=2.0
    )  # log-probs in bfloat16
    ends: list[float] = []
    history = anyio.run(
        lambda: oxrl.run_online(
            backend,
            oxrl.algorithm("grpo"),
            manager,
            [generator],
            render,
            steps,
            log=lambda step, metrics: ends.append(time.perf_counter()),
        )
    )
    counted = history[WARM_UP:]
    step_seconds = (ends[-1] - ends[WARM_UP - 1]) / len(counted)
    names = ("generate_seconds", "train_seconds", "generated_tokens", "logprob_gap")
    means = {name: statistics.mean(line[name] for line in counted) for name in names}
    return {"step_seconds": step_seconds, **means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", default="0.5B", help=f"one of {', '.join(SHAPES)}, or tiny")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5, help=f"of which the first {WARM_UP} warm up")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--ways", default="plain,compiled", help=f"some of {','.join(WAYS)}")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps is {arguments.steps}; set it to more than the {WARM_UP} that warm up")
    for way in arguments.ways.split(","):
        print(json.dumps({"way": way, **measure(arguments, way)}), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

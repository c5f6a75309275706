"""GRPO with a real vLLM server in a separate process: step by step (`lag=0`) against overlapped (`lag=1`).

Twice: with a reward that takes a second, and with one that takes none, where sampling and training share the cores. All
four cases run in one process against one server, on the same prompts; the first step of each is not counted.

    python benchmarks/overlap.py [--model tiny] [--steps 8] [--prompts 8] [--samples 2] [--tokens 16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise

import anyio

import oxrl
from oxrl.backends.distributed.queued import QueuedBackend
from oxrl.generators.http import VLLMEngine
from oxrl.generators.pool import HTTPGenerator
from oxrl.generators.vllm.server import VLLMServer, vllm_server
from oxrl.models.builtin import prepare_builtin
from oxrl.types import Rollout


def worth(rollout: Rollout) -> float:
    """A reward that differs between answers and costs nothing."""
    return sum(token % 101 for token in rollout.generation.token_ids) / 1000


async def one_case(server: VLLMServer, arguments: argparse.Namespace, lag: int, seconds: float) -> dict[str, float]:
    model, tokenizer = oxrl.load_model(arguments.model), oxrl.load_tokenizer(arguments.model)
    backend = QueuedBackend(oxrl.create_pytorch_backend(model, lr=1e-5))
    engine, render = HTTPGenerator([VLLMEngine(server.url)], tokenizer), oxrl.Renderer(tokenizer)
    sampler = oxrl.RolloutSampler(engine, render, oxrl.GenerationConfig(max_new_tokens=arguments.tokens))
    samples = [
        oxrl.Sample(str(index), (oxrl.Message("user", f"Write a story about {index} oxen."),))
        for index in range(arguments.steps * arguments.prompts)
    ]

    async def reward(rollout: Rollout) -> float:
        await anyio.sleep(seconds)
        return worth(rollout)

    config = oxrl.RolloutConfig(
        batch_size=arguments.prompts, n_samples_per_prompt=arguments.samples, reward_fn=reward if seconds else worth
    )
    manager = oxrl.sampling_manager(oxrl.DataBuffer(samples, shuffle=False), sampler, config)
    stamps = [time.monotonic()]
    history = await oxrl.run_online(
        backend,
        oxrl.algorithm("grpo", correction="truncated"),
        manager,
        [engine],
        render,
        oxrl.OnlineConfig(num_steps=arguments.steps, lag=lag),
        shares_weights=False,
        log=lambda _step, _metrics: stamps.append(time.monotonic()),
    )
    backend.close()
    counted = history[1:]
    return {
        "seconds_per_step": statistics.mean(later - earlier for earlier, later in pairwise(stamps[1:])),
        **{name: statistics.mean(line[name] for line in counted) for name in ("wait_seconds", "train_seconds")},
        "collect_seconds": statistics.mean(line["generate_seconds"] for line in counted),
        "age_mean": statistics.mean(line["age_mean"] for line in counted),
        "age": max(line["age"] for line in counted),
    }


async def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    options = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32"]
    results: list[dict[str, object]] = []
    async with vllm_server(prepare_builtin(arguments.model), arguments=options) as server:
        for name, seconds in (("a reward of 1 s", 1.0), ("compute-bound", 0.0)):
            for lag in (0, 1):
                results.append({"case": name, "lag": lag, **await one_case(server, arguments, lag, seconds)})
                sys.stderr.write(json.dumps(results[-1]) + "\n")
    return results


def table(results: list[dict[str, object]]) -> str:
    lines = ["| | lag | s/step | of it waiting | collecting | training | age, mean | largest |", "|---" * 8 + "|"]
    names = ("seconds_per_step", "wait_seconds", "collect_seconds", "train_seconds", "age_mean", "age")
    for each in results:
        lines.append(f"| {each['case']} | {each['lag']} | " + " | ".join(f"{each[name]:.2f}" for name in names) + " |")
    for before, after in zip(results[::2], results[1::2], strict=True):
        ratio = float(str(before["seconds_per_step"])) / float(str(after["seconds_per_step"]))
        lines.append(f"| {before['case']}, ratio | | **{ratio:.2f}** | | | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    for name, value in {"steps": 8, "prompts": 8, "samples": 2, "tokens": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    sys.stdout.write(table(anyio.run(measure, parser.parse_args())) + "\n")


if __name__ == "__main__":
    main()

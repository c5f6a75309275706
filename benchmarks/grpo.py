"""oxRL and TRL's GRPOTrainer: same model, prompts, group size, lengths, precision and optimizer, alternating.

Each measurement is a separate process, with its own peak memory. A step samples answers, grades them by a trivial
function and takes one optimizer step; the first step warms up and is not counted.

    python benchmarks/grpo.py [--prompts 8] [--samples 4] [--tokens 32] [--reference] [--steps 4] [--rounds 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise

import anyio
from beside_trl import clock, in_own_process, peak_gib

import oxrl

RATE = 1e-6  # so small that completions of both sides stay similar, also in length
TOPICS = ("an ox", "a lighthouse", "a night train", "two brothers", "first snow", "a lost key", "an island", "a mill")


def prompts(count: int) -> list[str]:
    return [f"Write a long story about {TOPICS[index % len(TOPICS)]}, chapter {index}." for index in range(count)]


def worth(text: str) -> float:
    """A reward that differs between answers and costs nothing."""
    return text.count("e") / (1 + len(text))


def run_oxrl(arguments: argparse.Namespace) -> dict[str, object]:
    model, tokenizer = oxrl.load_model(arguments.model), oxrl.load_tokenizer(arguments.model)
    grpo = oxrl.algorithm("grpo", kl_coef=0.04 if arguments.reference else 0.0)
    others = {"ref": oxrl.load_model(arguments.model)} if arguments.reference else {}
    backend = oxrl.create_pytorch_backend(model, lr=RATE, others=others)
    generator, render = oxrl.EmbeddedGenerator(model, tokenizer), oxrl.Renderer(tokenizer)
    samples = [
        oxrl.Sample(str(index), (oxrl.Message("user", text),))
        for index, text in enumerate(prompts(arguments.steps * arguments.prompts))
    ]
    sampler = oxrl.RolloutSampler(generator, render, oxrl.GenerationConfig(max_new_tokens=arguments.tokens))
    config = oxrl.RolloutConfig(
        batch_size=arguments.prompts,
        n_samples_per_prompt=arguments.samples,
        reward_fn=lambda rollout: worth(rollout.response),
    )
    manager = oxrl.sampling_manager(oxrl.DataBuffer(samples, shuffle=False), sampler, config)
    stamps = [time.monotonic()]

    def log(_step: int, _metrics: object) -> None:
        stamps.append(time.monotonic())

    steps = oxrl.OnlineConfig(num_steps=arguments.steps, micro_batch_tokens=arguments.micro_batch_tokens)
    history = anyio.run(lambda: oxrl.run_online(backend, grpo, manager, [generator], render, steps, log=log))
    generating = sum(line["generate_seconds"] for line in history[1:]) / (len(history) - 1)
    gap = max(line["logprob_gap"] for line in history)
    return _result(stamps, [line["generated_tokens"] for line in history]) | {"generating": generating, "gap": gap}


def run_trl(arguments: argparse.Namespace) -> dict[str, object]:
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    stamps: list[float] = []
    drawn: list[float] = []

    def reward(completions: list[list[dict[str, str]]], completion_ids: list[list[int]], **_: object) -> list[float]:
        drawn.append(float(sum(map(len, completion_ids))))
        return [worth(completion[0]["content"]) for completion in completions]

    rows = [{"prompt": [{"role": "user", "content": text}]} for text in prompts(arguments.steps * arguments.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.prompts * arguments.samples,
            num_generations=arguments.samples,
            max_completion_length=arguments.tokens,
            beta=0.04 if arguments.reference else 0.0,
            temperature=1.0,
            loss_type="grpo",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.01,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            shuffle_dataset=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=oxrl.load_model(arguments.model),
            reward_funcs=reward,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=oxrl.load_tokenizer(arguments.model),
            callbacks=[clock(stamps)],
        )
        trainer.train()
    return _result(stamps, drawn)


def _result(stamps: list[float], generated: list[float]) -> dict[str, object]:
    seconds = [end - start for start, end in pairwise(stamps)][1:]
    return {
        "seconds_per_step": statistics.mean(seconds),
        "tokens_per_second": sum(generated[1:]) / sum(seconds),
        "tokens_per_step": statistics.mean(generated),
        "peak_gib": peak_gib(),
    }


SIDES = {"oxrl": run_oxrl, "trl": run_trl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--micro_batch_tokens", type=int, default=2048)
    parser.add_argument("--reference", action="store_true", help="with a KL to a reference model")
    parser.add_argument("--side", choices=SIDES)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(SIDES[arguments.side](arguments)))
        return
    results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for round_ in range(arguments.rounds):
        for side in SIDES if round_ % 2 == 0 else reversed(SIDES):
            results[side].append(in_own_process(__file__, side, sys.argv[1:]))
            last = results[side][-1]
            detail = f"  generating {last['generating']:.2f} s, gap {last['gap']:.0e}" if "gap" in last else ""
            print(
                f"{side:5} {last['seconds_per_step']:6.2f} s/step  {last['tokens_per_second']:6.1f} sampled tokens/s  "
                f"{last['tokens_per_step']:.0f} tokens/step  {last['peak_gib']:5.2f} GiB{detail}",
                flush=True,
            )

    def ratio(key: str) -> float:
        ours, theirs = (statistics.median(result[key] for result in results[side]) for side in ("oxrl", "trl"))
        return ours / theirs

    print(
        f"oxRL / TRL: {1 / ratio('seconds_per_step'):.2f} x the steps per second, "
        f"{ratio('tokens_per_second'):.2f} x the sampled tokens per second, {ratio('peak_gib'):.2f} x the memory"
    )


if __name__ == "__main__":
    main()

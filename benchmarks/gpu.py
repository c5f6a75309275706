"""Measurements on a GPU: packed rows against single ones in bf16 and float32, and speed on mixed lengths.

A Qwen2.5-0.5B shape with random weights, so that no hub is needed. Steps of supervised fine-tuning, the optimizer
included: rows of 2,048, of 8,192 and of mixed lengths, packed end to end, with and without compiled layers; mixed ones
also padded to the longest. The share of the matrix rate counts 6 FLOPs per weight and token, and causal attention.

    python benchmarks/gpu.py [--rows "2,048;mixed"]
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise

import numpy as np
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from oxrl.algorithms import algorithm
from oxrl.backends.forward import LanguageModel
from oxrl.backends.layout import prepare_layout
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.pack import collate, count_units
from oxrl.types import Row

SMALL = {"vocab_size": 500, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def rows(lengths: list[int], vocabulary: int) -> list[tuple[Row, ...]]:
    random = np.random.default_rng(0)
    return [(Row(str(i), random.integers(0, vocabulary, n), np.arange(n) > n // 2),) for i, n in enumerate(lengths)]


def check_agreement(dtype: torch.dtype) -> None:
    """Against float32 on the CPU, which the tests prove right; a window shorter than the rows."""
    torch.manual_seed(0)
    config = MistralConfig(**SMALL, **HEADS, sliding_window=6)
    exact = AutoModelForCausalLM.from_config(config).eval()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).cuda().eval()
    model.load_state_dict(exact.state_dict())
    items = rows([9, 2, 17, 40, 12], 500)
    values = []
    for each, device in ((exact, "cpu"), (model, "cuda")):
        module = LanguageModel(each)
        probed = prepare_layout(module)
        module.zero_grad()
        outputs = module(collate(items, device))
        outputs.logprob.sum().backward()
        gradient = each.model.layers[0].self_attn.q_proj.weight.grad.float().cpu()
        values.append((outputs.logprob.detach().cpu(), gradient, probed.reason))
    (a, ga, _), (b, gb, reason) = values
    print(
        f"{dtype}: {reason}; log-probs differ by {(a - b).abs().max():.1e}, gradients by "
        f"{((ga - gb).norm() / ga.norm()):.1e} of their norm"
    )


LENGTHS = {
    "2,048": [2048] * 24,
    "8,192": [8192] * 6,
    "mixed": [int(n) for n in np.exp(np.random.default_rng(1).uniform(np.log(64), np.log(2048), 96))],
}
MICRO_BATCH = 16384  # tokens
MATRIX_RATE = 989e12  # dense bf16 of an H100 or H200, per second


def time_step(name: str, layout: str) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=16384,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    backend = create_pytorch_backend(model, lr=1e-5, compiles=layout == "compiled")
    if layout == "padded":
        backend.module.layout = "padded"
        model.set_attn_implementation("sdpa")
    lengths, sft = LENGTHS[name], algorithm("sft")
    items = rows(lengths, 150000)
    batches = [collate(items[start:end]) for start, end in pairwise(starts(lengths))]
    torch.cuda.reset_peak_memory_stats()
    for repeat in range(5):
        if repeat == 2:
            torch.cuda.synchronize()
            started = time.monotonic()
        backend.forward_backward(batches, sft, count_units(items))
        backend.optim_step()
    torch.cuda.synchronize()
    seconds, total = (time.monotonic() - started) / 3, sum(lengths)
    weights = sum(parameter.numel() for parameter in model.parameters())
    attended = sum(n * n for n in lengths) * 896 * 24  # half of each square, two products
    rate = 3 * 2 * (weights * total + attended) / seconds / MATRIX_RATE
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"| {name} | {layout} | {total / seconds:,.0f} | {rate:.0%} | {peak:.1f} |", flush=True)


def starts(lengths: list[int]) -> list[int]:
    """Where each micro-batch begins, and the end."""
    found, tokens = [0], 0
    for index, length in enumerate(lengths):
        if tokens and tokens + length > MICRO_BATCH:
            found.append(index)
            tokens = 0
        tokens += length
    return [*found, len(lengths)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--rows", default=";".join(LENGTHS), help=f"some of {';'.join(LENGTHS)}")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    for dtype in (torch.float32, torch.bfloat16):
        check_agreement(dtype)
    print("| rows | layout | tokens/s | of the matrix rate | GiB |\n|---|---|---|---|---|")
    for name in arguments.rows.split(";"):
        for layout in ("packed", "compiled", *(["padded"] if name == "mixed" else [])):
            time_step(name, layout)


if __name__ == "__main__":
    main()

"""Measurements on a GPU: packed rows against single ones in bf16 and float32, and speed on mixed lengths.

A Qwen2.5-0.5B shape with random weights, so that no hub is needed. Rows packed end to end in one variable-length
kernel, against the same rows padded to the longest, forward and backward, through the same chunked projection.

    python benchmarks/gpu.py
"""

from __future__ import annotations

import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from oxrl.algorithms import algorithm
from oxrl.backends.forward import LanguageModel, prepare_layout
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


def time_step(padded: bool) -> float:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    backend = create_pytorch_backend(model, lr=1e-5)
    if padded:
        backend.module.layout = "padded"
        model.set_attn_implementation("sdpa")
    lengths = [int(n) for n in np.exp(np.random.default_rng(1).uniform(np.log(64), np.log(2048), 48))]
    items, sft = rows(lengths, 150000), algorithm("sft")
    batches = [collate(items[start : start + 16]) for start in range(0, 48, 16)]
    for repeat in range(4):
        if repeat == 1:
            torch.cuda.synchronize()
            started = time.monotonic()
        backend.forward_backward(batches, sft, count_units(items))
        backend.optim_step()
    torch.cuda.synchronize()
    seconds = (time.monotonic() - started) / 3
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    name = "padded" if padded else "packed"
    total = sum(lengths)
    print(f"{name}: {total / seconds:8.0f} tokens/s, {seconds:.2f} s a step of {total} tokens, {peak:.1f} GiB")
    return seconds


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    for dtype in (torch.float32, torch.bfloat16):
        check_agreement(dtype)
    print(f"packed is {time_step(padded=True) / time_step(padded=False):.2f} x as fast as padded")


if __name__ == "__main__":
    main()

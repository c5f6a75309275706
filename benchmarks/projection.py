"""Log-probs of a long row by the chunked projection and by full logits: peak memory and time, forward and backward.

Each way runs in a separate process on the real model's head; hidden states are random, as the body costs the same.

    python benchmarks/projection.py [--tokens 4096]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path


def measure(way: str, tokens: int) -> dict[str, float]:
    import torch

    import oxrl
    from oxrl.backends.forward import head_of
    from oxrl.tensors import logprob, project

    head = head_of(oxrl.load_model("smollm2-135m"))
    hidden = torch.randn(tokens, head.weight.shape[1], requires_grad=True)
    targets = torch.randint(0, head.weight.shape[0], (tokens,))
    before = reset_peak_gib()
    seconds = []
    for _ in range(2):
        started = time.monotonic()
        if way == "full":
            loss = torch.nn.functional.cross_entropy(hidden @ head.weight.T, targets, reduction="sum")
        else:
            (values,) = project(hidden, head, targets, [logprob], chunk=int(way))
            loss = -values.sum()
        loss.backward()
        seconds.append(time.monotonic() - started)
    return {"seconds": min(seconds), "extra_gib": peak_gib() - before}


def reset_peak_gib() -> float:
    """Reset the peak that Linux records: that of loading the model must not hide later ones."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_gib()


def peak_gib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--way")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments.way, arguments.tokens)))
        return
    results = {}
    for way in ("full", "128", "512", "2048"):
        command = [sys.executable, __file__, "--way", way, "--tokens", str(arguments.tokens)]
        results[way] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        name = "full logits" if way == "full" else f"chunks of {way}"
        seconds, memory = results[way]["seconds"], results[way]["extra_gib"]
        full = results["full"]
        ratios = f"{seconds / full['seconds']:.2f} x time, {memory / full['extra_gib']:.2f} x memory"
        print(f"{name:15} {seconds:6.2f} s  {memory:5.2f} GiB more  ({ratios})")


if __name__ == "__main__":
    main()

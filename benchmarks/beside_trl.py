"""Shared by the comparisons with TRL: a separate process for each side, TRL's steps timed, results side by side."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

Run = Callable[..., dict[str, object]]  # from a number of steps, and the name of a model if there is a choice


def in_own_process(script: str, side: str, given: list[str]) -> dict[str, Any]:
    """Return the last line that one side of a benchmark prints; the process has its own peak memory."""
    done = subprocess.run([sys.executable, script, "--side", side, *given], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def clock(stamps: list[float]) -> Any:
    """Return a callback that records when the first step starts and when each one ends."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            if not stamps:
                stamps.append(time.monotonic())

        def on_step_end(self, *_: object, **__: object) -> None:
            stamps.append(time.monotonic())

    return Clock()


def measured(stamps: list[float], trained_tokens: list[float], losses: list[float]) -> dict[str, object]:
    """The first step warms up and is not counted."""
    seconds = [end - start for start, end in pairwise(stamps)][1:]
    return {
        "trained_tokens_per_second": sum(trained_tokens[1:]) / sum(seconds),
        "seconds_per_step": statistics.mean(seconds),
        "peak_gib": peak_gib(),
        "trained_tokens": sum(trained_tokens),
        "losses": losses,
    }


def compare(script: str, purpose: str | None, sides: Mapping[str, Run], model: str | None = None) -> None:
    """Run the sides of an SFT benchmark in turn, or the one that `--side` names, and print ratios."""
    parser = argparse.ArgumentParser(description=purpose)
    if model:
        parser.add_argument("--model", default=model)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", choices=sides)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.side:
        chosen = (arguments.model,) if model else ()
        print(json.dumps(sides[arguments.side](arguments.steps, *chosen)))
        return
    _report(script, sides, arguments)


def _report(script: str, sides: Mapping[str, Run], arguments: argparse.Namespace) -> None:
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for round_ in range(arguments.rounds):
        for side in sides if round_ % 2 == 0 else reversed(sides):
            results[side].append(in_own_process(script, side, sys.argv[1:]))
            last = results[side][-1]
            print(
                f"{side:5} {last['trained_tokens_per_second']:7.1f} trained tokens/s  "
                f"{last['seconds_per_step']:6.2f} s/step  {last['peak_gib']:5.2f} GiB  loss {last['losses'][-1]:.4f}"
            )

    def middle(side: str, key: str) -> float:
        return statistics.median(result[key] for result in results[side])

    ratios = {
        "speed": middle("oxrl", "trained_tokens_per_second") / middle("trl", "trained_tokens_per_second"),
        "memory": middle("oxrl", "peak_gib") / middle("trl", "peak_gib"),
    }
    ours, theirs = results["oxrl"][0], results["trl"][0]
    gap = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    print(
        f"\ntrained tokens {ours['trained_tokens']:.0f} and {theirs['trained_tokens']:.0f}, losses differ by {gap:.1e}"
    )
    print(f"oxRL / TRL: {ratios['speed']:.2f} x the speed, {ratios['memory']:.2f} x the memory")
    if arguments.output:
        arguments.output.write_text(json.dumps({"ratios": ratios, "results": results}, indent=1) + "\n")

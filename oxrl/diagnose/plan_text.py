"""A plan as text: what `oxrl plan` prints."""

from __future__ import annotations

from collections.abc import Mapping

from oxrl.diagnose.memory import gib
from oxrl.diagnose.plan import Plan


def describe(plan: Plan) -> Mapping[str, str]:
    """Return the plan as text: heading -> one or more lines."""
    facts, rows = plan.facts, plan.rows
    active = f", {_count(facts.active)} active per token" if facts.active < facts.parameters else ""
    towers = f", {_count(facts.towers)} of them in towers" if facts.towers else ""
    lengths = f"{rows.shortest} to {rows.longest} tokens, median {rows.median:g}"
    shown = f"; {rows.media_tokens} of {rows.tokens} tokens are of images or audio" if rows.media_tokens else ""
    what = "prompts" if plan.rollouts_per_step else "rows"
    left_out = f", {rows.left_out} left out" if rows.left_out else ""
    sampled = f", {plan.rollouts_per_step} completions sampled" if plan.rollouts_per_step else ""
    components = [f"{name:12} {gib(size):>10}" for name, size in plan.memory.components() if size]
    alternate = " (training and generation alternate)" if plan.memory.generation else ""
    micro_batches = f"micro-batches of at most {plan.micro_batch_tokens} tokens"
    return {
        "model": f"{plan.model}: {_count(facts.parameters)} parameters{active}{towers}, {plan.dtype}",
        "tuning": f"{plan.tuning}: {_count(facts.trained)} parameters are trained",
        "algorithm": f"{plan.algorithm}" + (f", with {', '.join(plan.passes)}" if plan.passes else ""),
        "data": f"{rows.items} {what}{left_out}; {lengths}{shown}",
        "steps": f"{plan.steps} of {plan.rows_per_step} {what}{sampled}; {micro_batches}",
        "output": str(plan.folder),
        "memory": "\n".join([*components, f"{'peak':12} {gib(plan.memory.peak):>10}{alternate}"]),
        **_sharding(plan),
        "device": f"{plan.device.device}, {gib(plan.device.free)} free of {gib(plan.device.memory)}",
        "time": _time(plan),
        "verdict": _verdict(plan),
    }


def _time(plan: Plan) -> str:
    if plan.seconds_per_step is None:
        return "unknown: speed is measured, and that device is not in this machine"
    step, total = (_duration(plan.seconds_per_step * times) for times in (1, plan.steps))
    return f"about {step} a step, {total} in total; rough: it was off by up to a factor of three"


def _sharding(plan: Plan) -> dict[str, str]:
    """Return sharding and traffic, for several devices."""
    shards = plan.shards
    if shards.gpus == 1 and not shards.copies:
        return {}
    sent = plan.shards.traffic(plan.facts)
    sampling = {}
    if plan.engine_elsewhere:
        copy = f"{gib(plan.facts.weight_bytes)} of weights and its cache"
        sampling = {"sampling": f"{shards.copies} copies of the model on separate devices, each {copy}"}
    return {
        "sharding": f"memory is that of each of {shards.gpus} devices, at stage {shards.stage}",
        **sampling,
        "traffic": f"per step {gib(sent['gradients'])} of gradients from each, {gib(sent['weights'])} of new weights",
    }


def _verdict(plan: Plan) -> str:
    if plan.tight:
        return "it fits, but tightly: the estimate may be off by a fifth"
    if plan.fits:
        return "it fits"
    return "\n".join(["it does not fit. Settings that would:", *plan.advice])


def _count(number: float) -> str:
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"

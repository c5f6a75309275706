"""Estimate steps, memory and time of a run from its `Config`: `oxrl plan` and `oxrl train --dry-run`.

Data is read and rendered as in the run itself; no weight is loaded. The size of the model is counted in `model_facts`,
the arithmetic is in `memory`, the printed text in `plan_text`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from oxrl.config import Config
from oxrl.config.registry import find_backend, find_engine, resolved
from oxrl.data.pack import computed_tokens
from oxrl.diagnose.memory import (
    BATCH_SIZES,
    GIB,
    USABLE,
    GenerationLoad,
    Kind,
    Memory,
    ModelFacts,
    Speed,
    Stage,
    Work,
    forward_flops,
    generation_seconds,
    gib,
    gradient_traffic,
    memory,
    sharded_memory,
    sync_traffic,
    training_flops,
)
from oxrl.diagnose.model_facts import model_facts
from oxrl.generators.vllm.server import CPU_SETTINGS
from oxrl.loops.memory_warmup import heaviest, longest_items
from oxrl.machine.hardware import Device, Hardware, detect_hardware
from oxrl.machine.inventory import device_as_json
from oxrl.models.load import (
    resolve_device,
    resolve_dtype,
)
from oxrl.models.lora import LoraSettings
from oxrl.run.data import longest_possible_items
from oxrl.run.placement import SHARE, sharding_of
from oxrl.run.prepare import resolve
from oxrl.run.spec import RunSpec, frozen_model_config, model_config, reference_is_adapter, renderer
from oxrl.types import Item

if TYPE_CHECKING:
    pass

REMOTE_GPU = "a GPU elsewhere"
VLLM_SHARE = 0.92  # share of a GPU that vLLM uses by default
CUDA_FRAMEWORK = int(0.8 * GIB)  # context and libraries on a GPU
TRAINING_EXTRA = 48 * 2**20  # libraries that training loads and planning does not


class Rows(NamedTuple):
    """Lengths in tokens; of the prompts if the run samples."""

    items: int
    left_out: int
    shortest: int
    median: float
    longest: int
    tokens: int
    media_tokens: int = 0


class Shards(NamedTuple):
    """`Shards(gpus=8, stage=2, copies=4)`: training devices at a ZeRO stage, and model copies that sample."""

    gpus: int = 1
    stage: Stage = 0
    copies: int = 0  # engines with separate weights; one may span several devices
    adapter: bool = False  # only the adapter is sent to the copies

    def memory(self, facts: ModelFacts, work: Work, kind: Kind, framework: int) -> Memory:
        """Return the memory of one device."""
        unsharded = memory(facts, work, kind, framework)
        return unsharded if self.gpus == 1 else sharded_memory(unsharded, facts, gpus=self.gpus, stage=self.stage)

    def traffic(self, facts: ModelFacts) -> dict[str, float]:
        """Return bytes per step: gradients sent by each device, and weights sent to engines."""
        width = facts.weight_bytes // facts.parameters
        gradients = gradient_traffic(
            facts.trained, gpus=self.gpus, stage=self.stage, gradient_bytes=width, parameters=facts.parameters
        )
        sent = 4 * facts.trained if self.adapter else facts.weight_bytes
        return {"gradients": gradients, "weights": sync_traffic(sent, rollout_gpus=self.copies)}


def shards_of(config: Config) -> Shards:
    """Return the sharding and the number of engines that `config` describes."""
    adapter_only = config.lora.enabled and config.inference_engine.adapter
    copies = len(config.inference_engine.urls) if find_engine(config.engine).external else config.replicas
    if config.ranks == 1:
        return Shards(copies=copies, adapter=adapter_only)
    zero_stage = find_backend(sharding_of(config)).zero_stage
    stage: Stage = 0 if zero_stage is None else resolved(zero_stage)(config)
    return Shards(config.ranks, stage, copies, adapter_only)


class Plan(NamedTuple):
    """Estimates for a run, in bytes, tokens and seconds; `advice` is empty if it fits."""

    model: str
    tuning: str
    dtype: str
    facts: ModelFacts
    algorithm: str
    passes: tuple[str, ...]
    rows: Rows
    steps: int
    rows_per_step: int
    rollouts_per_step: int
    micro_batch_tokens: int
    folder: Path
    device: Device
    memory: Memory
    advice: tuple[str, ...]
    seconds_per_step: float | None  # None for a device that is not in this machine
    shards: Shards
    engine_elsewhere: bool

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.device.free

    @property
    def tight(self) -> bool:
        return self.fits and self.memory.peak > USABLE * self.device.free

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings, for JSON."""
        fields = {name: getattr(self, name) for name in self._fields if name not in ("memory", "folder")}
        return {
            **{name: value._asdict() if hasattr(value, "_asdict") else value for name, value in fields.items()},
            "device": device_as_json(self.device),
            "folder": str(self.folder),
            "traffic": self.shards.traffic(self.facts),
            "memory": {**dict(self.memory.components()), "peak": self.memory.peak},
            "fits": self.fits,
            "tight": self.tight,
        }


def plan_run(config: Config, output: str | Path | None = None, gpu_memory: float | None = None) -> Plan:
    """Plan the run of a config; raises the same ValueErrors for wrong input as the run.

    With `gpu_memory`, in GiB, plan for GPUs of that size, as many as the config sets, instead of for this machine.
    """
    gpus = None
    if gpu_memory is not None:
        gpus = (config.run.training_gpus or 1) + (config.run.rollout_gpus or 0)
        if config.model.dtype == "auto":
            config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    spec = resolve(config, output, gpus=gpus)
    hardware = detect_hardware()
    device = chosen_device(resolve_device(config.model.device), hardware)
    if gpu_memory is not None:
        size = int(gpu_memory * 2**30)
        device = Device(REMOTE_GPU, "", size, size, bf16=True)
    return plan_spec(spec, hardware, device=device)


def plan_spec(
    spec: RunSpec,
    hardware: Hardware,
    framework: int | None = None,
    shards: Shards | None = None,
    device: Device | None = None,
) -> Plan:
    """`framework`: bytes of libraries, by default as in this process; `shards`: by default those of the config."""
    config = spec.config
    shards = shards or shards_of(config)
    device = device or chosen_device(resolve_device(config.model.device), hardware)
    if device.device == "cpu":  # all processes share its memory
        device = device._replace(memory=device.memory // shards.gpus, free=device.free // shards.gpus)
    kind: Kind = "cpu" if device.device == "cpu" else "cuda"
    facts = model_facts(spec.model, spec.lora)
    work = heaviest_work(spec, facts)
    if framework is None:
        framework = framework_bytes(kind == "cpu")

    def estimate(facts: ModelFacts, work: Work) -> Memory:
        return with_engine(shards.memory(facts, work, kind, framework), config, facts, device, framework)

    needed = estimate(facts, work)
    rollouts = config.batch_size * config.rollout.n_samples if spec.online else 0
    return Plan(
        model=config.model.name,
        tuning=_tuning(config, facts),
        dtype=str(resolve_dtype(config.model.dtype, device.device)).removeprefix("torch."),
        facts=facts,
        algorithm=spec.algorithm.name,
        passes=_passes(spec),
        rows=row_lengths(spec),
        steps=spec.num_steps,
        rows_per_step=config.batch_size,
        rollouts_per_step=rollouts,
        micro_batch_tokens=work.tokens,
        folder=spec.folder,
        device=device,
        memory=needed,
        advice=() if needed.peak <= device.free else tuple(_advice(config, facts, work, estimate, device)),
        seconds_per_step=None
        if device.device == REMOTE_GPU
        else _seconds(spec, facts, measure_speed(device.device)) / shards.gpus,
        shards=shards,
        engine_elsewhere=find_engine(config.engine).replicated and bool(config.run.rollout_gpus),
    )


def with_engine(memory: Memory, config: Config, facts: ModelFacts, device: Device, framework: int) -> Memory:
    """Add the memory of an engine with separate weights on the same device; one on another device adds nothing.

    A colocated engine always holds its process, and its share of the GPU while awake; on a CPU it never sleeps.
    """
    engine, on_cpu = config.inference_engine, device.device == "cpu"
    record = find_engine(config.engine)
    if record.shares_weights:  # in another precision it has a copy, of half the size at most
        return (
            memory
            if engine.precision == "auto"
            else memory._replace(others={**memory.others, "engine": facts.weight_bytes})
        )
    if record.external or (config.run.rollout_gpus and not on_cpu):
        return memory._replace(generation=0)
    if not record.replicated:  # a custom engine: a copy of the weights
        return memory._replace(others={**memory.others, "engine": facts.weight_bytes}, generation=0)
    constant, awake = 0 if config.in_process else framework, 0
    if on_cpu:
        constant += facts.weight_bytes + int(CPU_SETTINGS["VLLM_CPU_KVCACHE_SPACE"]) * GIB
        constant = constant * config.replicas // config.ranks
    else:
        share = float(engine.others.get("gpu_memory_utilization", SHARE if engine.colocated else VLLM_SHARE))
        awake = max(0, int(share * device.memory) - constant)
    if not engine.colocated:
        constant, awake = constant + awake, 0
    return memory._replace(others={**memory.others, "engine": constant}, generation=awake)


def chosen_device(device: str, hardware: Hardware) -> Device:
    if device == "cpu":
        return Device("cpu", "", hardware.memory, hardware.free, bf16=False)
    index = int(device.partition(":")[2] or 0)
    return hardware.gpus[index]


def _tuning(config: Config, facts: ModelFacts) -> str:
    if facts.trained == facts.parameters:
        return "all weights"
    if facts.towers:
        return "the towers" if facts.trained == facts.towers else "all weights but those of the towers"
    return f"LoRA, r={config.lora.r}" if config.lora.enabled else "the model's adapter"


def _passes(spec: RunSpec) -> tuple[str, ...]:
    """Return what a step computes besides forward and backward of the policy."""
    names = {"policy": "log-probs before the step", "ref": "reference", "teacher": "teacher"}
    needed = {which for each in spec.schedule.values() for which in {*each.needs, *each.others}}
    heads = {head for each in spec.schedule.values() for head in each.heads}
    forward = [name for which, name in names.items() if which in needed]
    return (*(["sampling"] if spec.online else []), *forward, *(f"{head} head" for head in sorted(heads)))


def row_lengths(spec: RunSpec) -> Rows:
    render = renderer(spec.config, spec.tokenizer)
    if spec.online:
        rows = [render.prompt(sample.messages, tools=sample.tools, media=sample.media) for sample in spec.rows]
    else:
        rows = [row.tokens for item in spec.rows for row in item]
    lengths = [len(row) for row in rows]
    found = (len(spec.rows), spec.left_out, min(lengths), statistics.median(lengths), max(lengths), sum(lengths))
    stand_for_media = list(render.placeholder_ids)
    return Rows(*found, sum(int(np.isin(row, stand_for_media).sum()) for row in rows) if stand_for_media else 0)


def heaviest_work(spec: RunSpec, facts: ModelFacts) -> Work:
    """Return the micro-batch of the longest rows, and everything that is in memory besides it."""
    config = spec.config
    algorithms = spec.schedule.values()
    items, load = longest_training_items(spec, facts.vocabulary), None
    budget = config.train.micro_batch_tokens
    part = heaviest(longest_items(items, budget)[: config.batch_size * _rows_each(spec)], budget, "shared")
    rows = [row for item in part for row in item]
    if spec.online:
        rollout, longest = config.rollout, max(map(len, rows))
        answers = int(config.batch_size * rollout.over_sampling_factor) * rollout.n_samples
        load = GenerationLoad(min(rollout.slots, answers), longest)
    return Work(
        tokens=computed_tokens(part),
        trained_tokens=sum(int(row.mask.sum()) for row in rows),
        gradient_checkpointing=config.model.gradient_checkpointing,
        longest=max(sum(map(len, item)) for item in part),
        key_tokens=sum(map(len, rows)),
        others=other_bytes(spec, facts),
        statistics=max(len(each.reads) for each in algorithms),
        compares=any(read.of for each in algorithms for read in each.reads.values()),
        generating=load,
    )


def _rows_each(spec: RunSpec) -> int:
    return spec.config.rollout.n_samples if spec.online else 1


def longest_training_items(spec: RunSpec, vocabulary: int) -> list[Item]:
    """Return items as they are packed after credit: groups are split into rows, pairs stay together."""
    items = longest_possible_items(spec, vocabulary)
    return [part for item in items for part in ([item] if len(item) <= 2 else [(row,) for row in item])]


def other_bytes(spec: RunSpec, facts: ModelFacts) -> dict[str, int]:
    """Return the bytes of weights that are not trained, by role."""
    config = spec.config
    models = {role: frozen_model_config(config, name) for role, name in spec.other_models.items()}
    for role, name in (("reward model", config.reward.model), ("judge", config.reward.judge)):
        if name is not None:
            models[role] = frozen_model_config(config, name)
    names = {"ref": "reference"}
    sizes = {names.get(role, role): model_facts(model).weight_bytes for role, model in models.items()}
    # The reference is a second adapter in float32.
    return {"reference": 4 * facts.trained, **sizes} if reference_is_adapter(config) else sizes


def framework_bytes(on_cpu: bool) -> int:
    """Return the bytes that Python, torch and their libraries take."""
    return resident_memory() + TRAINING_EXTRA if on_cpu else CUDA_FRAMEWORK


def resident_memory() -> int:
    """Return the resident bytes of this process, which has loaded the same libraries as a run."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    resident = next((line for line in lines if line.startswith("VmRSS")), None)
    return int(resident.split()[1]) * 1024 if resident else GIB // 2


@cache
def measure_speed(device: str) -> Speed:
    """Measure this machine in a fraction of a second: a compute-bound and a memory-bound matrix product."""
    import time

    import torch

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    size = 1024 if device == "cpu" else 8192
    matrix = torch.ones(size, size, dtype=dtype, device=device)

    def rate(rows: int, amount: float, repeats: int) -> float:
        states = torch.ones(rows, size, dtype=dtype, device=device)
        float((states @ matrix).sum())
        started = time.perf_counter()
        for _ in range(repeats):
            product = states @ matrix
        float(product.sum())
        return repeats * amount / (time.perf_counter() - started)

    return Speed(rate(size, 2.0 * size**3, 4), rate(1, matrix.nbytes, 16))


def _seconds(spec: RunSpec, facts: ModelFacts, speed: Speed) -> float:
    """Rough estimate from matrix products alone, for rows of mean length and completions of maximum length."""
    config = spec.config
    lengths = row_lengths(spec)
    rows_each = 1 if spec.online else len([row for item in spec.rows for row in item]) / len(spec.rows)
    row = lengths.tokens / (len(spec.rows) * rows_each)
    tokens, sampling = config.batch_size * rows_each * row, 0.0
    if spec.online:
        answers = config.batch_size * config.rollout.n_samples
        tokens += answers * config.rollout.max_tokens
        row += config.rollout.max_tokens
        sampling = generation_seconds(facts, answers, config.rollout.max_tokens, config.rollout.slots, speed)
    algorithm = spec.algorithm
    passes = len([which for which in algorithm.needs if which != "sampler"]) + len(
        algorithm.others - {*algorithm.needs}
    )
    updates = config.train.iterations if spec.online else 1
    checkpointing = config.model.gradient_checkpointing
    flops = updates * training_flops(facts, tokens, row=row, gradient_checkpointing=checkpointing)
    flops += passes * forward_flops(facts, tokens, row=row)
    return flops / speed.flops + sampling


def _advice(
    config: Config, facts: ModelFacts, work: Work, estimate: Callable[[ModelFacts, Work], Memory], device: Device
) -> Iterator[str]:
    """Yield the smallest fitting change of each kind, or a message that no change fits."""
    found, usable = False, USABLE * device.free
    for kind in _changes(config, facts, work):
        peaks = ((settings, estimate(other_facts, other).peak) for settings, other_facts, other in kind)
        fitting = next((f"{settings}: {gib(peak)}" for settings, peak in peaks if peak <= usable), None)
        if fitting is not None:
            found = True
            yield fitting
    if not found:
        share = ", or lower inference_engine.gpu_memory_utilization" if config.inference_engine.colocated else ""
        yield f"no setting brings the peak below {gib(usable)}: use a smaller model or a larger device{share}"


Change: TypeAlias = tuple[str, ModelFacts, Work]


def _changes(config: Config, facts: ModelFacts, work: Work) -> Iterator[Iterator[Change]]:
    """Yield settings by kind, each with the facts and work that it leads to; the smallest change of a kind first."""
    sizes = [size for size in sorted(BATCH_SIZES, reverse=True) if work.longest <= size < work.tokens]
    yield ((f"train.micro_batch_tokens: {size}", facts, _with_tokens(work, size)) for size in sizes)
    checkpointed = work._replace(gradient_checkpointing=True)
    if not work.gradient_checkpointing:
        setting = "model.gradient_checkpointing: true"
        both = (
            (f"{setting}, train.micro_batch_tokens: {size}", facts, _with_tokens(checkpointed, size)) for size in sizes
        )
        yield chain([(setting, facts, checkpointed)], both)
    if work.generating is not None:
        fewer = [slots for slots in (32, 16, 8, 4, 2, 1) if slots < work.generating.slots]
        yield ((f"rollout.slots: {slots}", facts, _with_slots(work, slots)) for slots in fewer)
    own_reference = config.model.ref_model is not None and config.model.ref_update != "fixed"
    if facts.trained == facts.parameters and not own_reference:  # a separate reference cannot follow an adapter
        lora = model_facts(model_config(config), LoraSettings(config.lora.r, config.lora.alpha))
        # The reference of an adapter is its base, which is in memory anyway.
        others = {role: size for role, size in work.others.items() if role != "reference" or config.model.ref_model}
        plain = ("lora.enabled: true", lora, work._replace(others=others))
        both_settings = "lora.enabled: true, model.gradient_checkpointing: true"
        yield iter([plain, (both_settings, lora, checkpointed._replace(others=others))])


def _with_slots(work: Work, slots: int) -> Work:
    assert work.generating is not None, "called only if the run samples"
    return work._replace(generating=work.generating._replace(slots=slots))


def _with_tokens(work: Work, tokens: int) -> Work:
    share = tokens / work.tokens
    return work._replace(
        tokens=tokens, trained_tokens=int(work.trained_tokens * share), key_tokens=int(work.key_tokens * share)
    )

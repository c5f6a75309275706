"""Estimate memory and time of a run from facts about its model and step, and find settings that fit a device.

Arithmetic only: `plan` gathers the facts from model and machine. Bytes are per device. The measured error of these
estimates is in docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

GIB = 2**30
USABLE = 0.85  # share of a device's memory to plan with: estimates have errors, and allocators fragment
CHUNK = MappingProxyType({"cpu": 2**26, "cuda": 2**28})  # logits per chunk, as in the projection of `tensors`
HEAP = (0.3, 0.3)  # shares of weights and activations that glibc's heap holds beyond live blocks: fitted
HEAP_OF_ADAPTERS = (0.5, 0.75)  # larger, perhaps because no large gradients fill the gaps left by activations
HEAP_OF_GATHERED = 4.0  # share of all weights, where layers of less than HEAP_BLOCK are gathered and freed: fitted
HEAP_BLOCK = 32 * 2**20  # larger blocks are returned to the system when they are freed
CACHE_STEP = 64  # tokens by which a KV cache grows, as in `generators`
BATCH_SIZES = tuple(size for power in range(8, 17) for size in (2**power, 3 * 2 ** (power - 1)))  # 256, 384, 512, ...

Kind: TypeAlias = Literal["cpu", "cuda"]


class ModelFacts(NamedTuple):
    """Properties of a model that determine memory and time. `kept*` are bytes per token of a micro-batch."""

    parameters: int
    trained: int
    active: int  # parameters used per token: fewer than all in a mixture of experts
    weight_bytes: int
    masters: int  # trained parameters in half precision, which have float32 master copies
    layers: int
    hidden: int
    vocabulary: int
    kept: int  # saved by autograd until backward
    kept_checkpointed: int  # the same with gradient checkpointing
    kept_keys: int  # of `kept`, keys and values, which rows that share a prompt do not share
    cache: int  # keys and values of one token in generation
    head_trained: bool = True
    towers: int = 0  # parameters of encoders of images and audio


class GenerationLoad(NamedTuple):
    """`GenerationLoad(slots=64, length=768)`: concurrent sequences, and the maximum length of prompt and completion."""

    slots: int
    length: int


class Work(NamedTuple):
    """The heaviest forward and backward pass of a run: its micro-batch and what else is in memory during it."""

    tokens: int
    trained_tokens: int
    gradient_checkpointing: bool = False
    longest: int = 0  # tokens of the longest item, which is never split
    key_tokens: int = 0  # more than `tokens` where rows share a prompt
    others: Mapping[str, int] = MappingProxyType({})  # bytes of models that are not trained, by role
    statistics: int = 0  # number of vocabulary statistics besides the log-prob, which autograd processes in blocks
    compares: bool = False  # whether another model's logits are in memory too
    generating: GenerationLoad | None = None


class Memory(NamedTuple):
    """Bytes by component. Training and generation alternate: only the larger of the two counts."""

    framework: int
    weights: int
    gradients: int
    optimizer: int
    others: Mapping[str, int]
    activations: int
    logits: int
    generation: int
    allocator: int = 0

    @property
    def training(self) -> int:
        return self.gradients + self.activations + self.logits

    @property
    def peak(self) -> int:
        constant = self.framework + self.weights + self.optimizer + sum(self.others.values()) + self.allocator
        return constant + max(self.training, self.generation)

    def components(self) -> Iterator[tuple[str, int]]:
        for name in ("framework", "weights", "gradients", "optimizer"):
            yield name, getattr(self, name)
        yield from self.others.items()
        for name in ("activations", "logits", "generation", "allocator"):
            yield name, getattr(self, name)


def memory(facts: ModelFacts, work: Work, kind: Kind, framework: int) -> Memory:
    """Estimate the peak of the local backend: AdamW in float32, logits in chunks, sampling with the same weights."""
    kept = activations(facts, work)
    return Memory(
        framework=framework,
        weights=facts.weight_bytes,
        gradients=4 * facts.trained,
        optimizer=8 * facts.trained + 4 * facts.masters,
        others=work.others,
        activations=kept,
        logits=logits(facts, work, kind),
        generation=0 if work.generating is None else generation(facts, work.generating),
        allocator=heap(facts, kept) if kind == "cpu" else 0,
    )


def heap(facts: ModelFacts, kept: int) -> int:
    """Estimate the fragmentation of the heap on a CPU, from fitted shares."""
    of_weights, of_activations = HEAP if facts.trained > facts.parameters / 2 else HEAP_OF_ADAPTERS
    return int(of_weights * facts.weight_bytes + of_activations * kept)


def activations(facts: ModelFacts, work: Work) -> int:
    """Saved tensors, and those of the layer in backward: its gradients, with checkpointing all that it recomputes."""
    layer = facts.kept // facts.layers
    unshared = max(0, work.key_tokens - work.tokens) * facts.kept_keys
    if work.gradient_checkpointing:
        return work.tokens * (facts.kept_checkpointed + 2 * layer) + unshared // facts.layers
    return work.tokens * (facts.kept + layer) + unshared


def logits(facts: ModelFacts, work: Work, kind: Kind) -> int:
    """One chunk, the blocks of a sixteenth of it used by statistics, and the gradient of the projection's weights."""
    rows = min(work.trained_tokens, max(1, CHUNK[kind] // facts.vocabulary))
    chunk = 4 * rows * facts.vocabulary
    blocks = 4 * rows * -(-facts.vocabulary // 16) * (2 + 4 * work.statistics)
    head = 4 * facts.vocabulary * facts.hidden if facts.head_trained else 0
    return chunk * (2 if work.compares else 1) + blocks + head


def generation(facts: ModelFacts, load: GenerationLoad) -> int:
    """The KV cache, a quarter longer than needed so that it seldom grows; logits, probabilities and their sums."""
    length = -(-(load.length + load.length // 4) // CACHE_STEP) * CACHE_STEP
    return load.slots * (length * facts.cache + 3 * 4 * facts.vocabulary)


class Fit(NamedTuple):
    """Settings that fit, or the smallest possible ones; `reasons` explains each choice."""

    micro_batch_tokens: int
    gradient_checkpointing: bool
    slots: int
    fits: bool
    reasons: tuple[str, ...]


def fitting_batch(
    facts: ModelFacts,
    device_memory: int,
    *,
    longest: int,
    kind: Kind = "cuda",
    framework: int = GIB,
    others: Mapping[str, int] = MappingProxyType({}),
    answers: int = 0,
    slots: int = 64,
    enough_tokens: int = 2048,
    most_tokens: int = 16384,
) -> Fit:
    """Choose micro-batch, checkpointing and slots for a device, without checkpointing if `enough_tokens` fit that way.

    `longest` is the length of the longest row, which must fit; `answers` is the maximum number of sampled tokens per
    prompt, 0 for a run that does not sample.
    """
    usable = int(USABLE * device_memory)
    sizes = sorted({longest, *(size for size in BATCH_SIZES if longest <= size <= max(longest, most_tokens))})

    def needed(tokens: int, checkpointing: bool, slots: int = 0) -> int:
        load = GenerationLoad(slots, longest) if slots else None
        work = Work(tokens, tokens, checkpointing, longest, tokens, others, generating=load)
        return memory(facts, work, kind, framework).peak

    def most(checkpointing: bool) -> int:
        return max((tokens for tokens in sizes if needed(tokens, checkpointing) <= usable), default=0)

    plain = most(False)
    checkpointing = plain < max(longest, min(enough_tokens, most_tokens))
    tokens = (most(True) or longest) if checkpointing else plain
    fits = needed(tokens, checkpointing) <= usable
    reasons = [
        _why_checkpointing(plain, longest, checkpointing),
        _why_tokens(tokens, needed(tokens, checkpointing), fits),
    ]
    chosen = slots if answers else 0
    while chosen > 1 and needed(tokens, checkpointing, chosen) > usable:
        chosen //= 2
    if answers:
        fits = needed(tokens, checkpointing, chosen) <= usable
        cache = generation(facts, GenerationLoad(chosen, longest))
        reasons.append(f"{chosen} concurrent completions, whose KV cache takes {gib(cache)}")
    return Fit(tokens, checkpointing, chosen, fits, tuple(reasons))


def _why_checkpointing(plain: int, longest: int, checkpointing: bool) -> str:
    if not checkpointing:
        return "no gradient checkpointing: all activations fit"
    if not plain:
        return f"gradient checkpointing: without it a row of {longest} tokens does not fit"
    return f"gradient checkpointing: without it at most {plain} tokens fit into a micro-batch"


def _why_tokens(tokens: int, needed: int, fits: bool) -> str:
    if fits:
        return f"micro-batches of {tokens} tokens: an estimated {gib(needed)} of memory"
    return f"a single row of {tokens} tokens needs {gib(needed)}: use LoRA, a smaller model or shorter rows"


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size < 100 * GIB else f"{size / GIB:.0f} GiB"


Stage: TypeAlias = Literal[0, 1, 2, 3]


class States(NamedTuple):
    """Bytes of weights, gradients and optimizer on one of several devices."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def sharded_states(
    parameters: int,
    trained: int,
    *,
    gpus: int,
    stage: Stage,
    weight_bytes: int = 2,
    gradient_bytes: int = 2,
    layers: int | None = None,
) -> States:
    """Mixed-precision AdamW over `gpus` devices: float32 master and two moments, 12 bytes per trained parameter.

    Stage 1 shards the optimizer, 2 also gradients, 3 also weights (FSDP's full sharding). With `layers` given, stage 3
    includes the two layers that are gathered at a time. Rajbhandari et al. 2019, arXiv:1910.02054.
    """
    if gpus < 1 or stage not in (0, 1, 2, 3):
        raise ValueError(f"{gpus} GPUs at stage {stage}: give 1 or more, and a stage of 0, 1, 2 or 3")
    gathered = 2 * weight_bytes * parameters / layers if layers and stage == 3 and gpus > 1 else 0.0
    return States(
        weight_bytes * parameters / (gpus if stage >= 3 else 1) + gathered,
        gradient_bytes * trained / (gpus if stage >= 2 else 1),
        12 * trained / (gpus if stage >= 1 else 1),
    )


def sharded_memory(memory: Memory, facts: ModelFacts, *, gpus: int, stage: Stage) -> Memory:
    """Return the memory of one of `gpus` devices, each with its own micro-batch."""
    width = facts.weight_bytes // max(1, facts.parameters) or 1
    states = sharded_states(
        facts.parameters,
        facts.trained,
        gpus=gpus,
        stage=stage,
        weight_bytes=width,
        gradient_bytes=width,
        layers=facts.layers,
    )
    optimizer = states.optimizer if width < 4 else states.optimizer * 8 / 12  # float32 weights are their own masters
    return memory._replace(
        weights=int(states.weights),
        gradients=int(states.gradients),
        optimizer=int(optimizer),
        allocator=memory.allocator + (gathered_heap(facts) if memory.allocator and stage == 3 else 0),
    )


def gathered_heap(facts: ModelFacts) -> int:
    """Estimate what gathering the weights of each layer, twice per micro-batch, adds to the heap on a CPU.

    They and the layer's full gradients are freed between activations that stay, and the holes are not reused.
    """
    return int(HEAP_OF_GATHERED * facts.weight_bytes) if facts.weight_bytes < HEAP_BLOCK * facts.layers else 0


def gradient_traffic(trained: int, *, gpus: int, stage: Stage, gradient_bytes: int = 2, parameters: int = 0) -> float:
    """Bytes that each device sends per step: an all-reduce, and at stage 3 two all-gathers of the weights."""
    share = (gpus - 1) / gpus
    gathered = 2 * (parameters or trained) if stage == 3 else trained
    return gradient_bytes * (trained + gathered) * share


def sync_traffic(weight_bytes: int, *, rollout_gpus: int) -> int:
    """Bytes per step from the trainer to engines with separate weights; 0 if they share the trainer's."""
    return weight_bytes * rollout_gpus


class Speed(NamedTuple):
    """Floating-point operations and bytes read per second of one device, measured on large matrix products."""

    flops: float
    bytes: float


def training_flops(facts: ModelFacts, tokens: float, *, row: float, gradient_checkpointing: bool = False) -> float:
    """Forward 2 per parameter and token, backward 4 (frozen weights have no gradient: 2), checkpointing 2 again.

    `row` is the row length; a token attends to half of it on average.
    """
    passes = 4 if facts.trained < facts.parameters / 2 else 6
    passes += 2 if gradient_checkpointing else 0
    attention = 2 * 2 * facts.layers * facts.hidden * row / 2
    return tokens * (passes * facts.active + passes / 2 * attention)


def forward_flops(facts: ModelFacts, tokens: float, *, row: float) -> float:
    return tokens * (2 * facts.active + 2 * 2 * facts.layers * facts.hidden * row / 2)


def generation_seconds(facts: ModelFacts, answers: float, length: float, slots: int, speed: Speed) -> float:
    """Each decoding step reads all weights once, and computes with them for every concurrent sequence."""
    waves = -(-answers // max(1, slots))
    concurrent = min(answers, slots)
    per_token = max(facts.weight_bytes / speed.bytes, 2 * facts.active * concurrent / speed.flops)
    return waves * length * per_token

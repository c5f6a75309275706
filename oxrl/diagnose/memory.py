"""Facts about a model and a step to bytes and seconds: what a run will hold, whether that fits, what would make it fit.

Arithmetic only: who reads the facts off a model and the machine is `plan`. Bytes are per device. How far these numbers
are off was measured; docs/planning.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

GIB = 2**30
SPARE = 0.85  # of a device's memory is planned with: estimates have errors, and allocators leave gaps
CHUNK = MappingProxyType({"cpu": 2**26, "cuda": 2**28})  # logits at once, as the projection in `tensors` has it
HEAP = (0.3, 0.3)  # shares of weights and of activations that glibc's heap holds beyond what is in use: fitted
HEAP_OF_ADAPTERS = (0.5, 0.75)  # more, perhaps because no large gradients fill the gaps that activations leave
STEP = 64  # tokens by which a cache grows, as in `generators`
LADDER = tuple(size for power in range(8, 17) for size in (2**power, 3 * 2 ** (power - 1)))  # 256, 384, 512, 768, ...

Kind: TypeAlias = Literal["cpu", "cuda"]


class ModelFacts(NamedTuple):
    """What memory and time depend on. Bytes that are kept are per token of a micro-batch."""

    parameters: int
    trained: int
    active: int  # parameters that one token meets: fewer than all in a mixture of experts
    weight_bytes: int
    masters: int  # trained parameters in half precision, which have float32 masters
    layers: int
    hidden: int
    vocabulary: int
    kept: int  # by autograd until backward
    kept_checkpointed: int  # the same with gradient checkpointing
    kept_keys: int  # of `kept`, the keys and values, which rows that share a prompt have each for themselves
    cache: int  # keys and values of one token in generation
    head_trained: bool = True


class Generating(NamedTuple):
    """`Generating(slots=64, length=768)`: answers side by side, and how long prompt and answer are at most."""

    slots: int
    length: int


class Work(NamedTuple):
    """The heaviest pass of a run: its micro-batch and what else lies in memory then."""

    tokens: int
    trained_tokens: int
    gradient_checkpointing: bool = False
    longest: int = 0  # of an item, which is run whole however small the budget
    key_tokens: int = 0  # more than `tokens` where rows share a prompt
    others: Mapping[str, int] = MappingProxyType({})  # bytes of models that are not trained, by role
    statistics: int = 0  # of the vocabulary besides the log-prob, which go through autograd block by block
    compares: bool = False  # with another model's logits, which then exist too
    generating: Generating | None = None


class Memory(NamedTuple):
    """Bytes by component. Training and generation take turns: only the larger of the two counts."""

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
        lasting = self.framework + self.weights + self.optimizer + sum(self.others.values()) + self.allocator
        return lasting + max(self.training, self.generation)

    def components(self) -> Iterator[tuple[str, int]]:
        for name in ("framework", "weights", "gradients", "optimizer"):
            yield name, getattr(self, name)
        yield from self.others.items()
        for name in ("activations", "logits", "generation", "allocator"):
            yield name, getattr(self, name)


def memory(facts: ModelFacts, work: Work, kind: Kind, framework: int) -> Memory:
    """What the local backend holds at most: AdamW in float32, logits in chunks, one set of weights for sampling too."""
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
    """On a CPU tensors come out of one heap and leave gaps in it; how large, no arithmetic says."""
    of_weights, of_activations = HEAP if facts.trained > facts.parameters / 2 else HEAP_OF_ADAPTERS
    return int(of_weights * facts.weight_bytes + of_activations * kept)


def activations(facts: ModelFacts, work: Work) -> int:
    """Kept for backward, and the layer that backward is in: its gradients, with checkpointing all it computes anew."""
    layer = facts.kept // facts.layers
    borrowed = max(0, work.key_tokens - work.tokens) * facts.kept_keys
    if work.gradient_checkpointing:
        return work.tokens * (facts.kept_checkpointed + 2 * layer) + borrowed // facts.layers
    return work.tokens * (facts.kept + layer) + borrowed


def logits(facts: ModelFacts, work: Work, kind: Kind) -> int:
    """One chunk, the sixteenth of it that statistics work on, and the gradient of the projection's weights."""
    rows = min(work.trained_tokens, max(1, CHUNK[kind] // facts.vocabulary))
    chunk = 4 * rows * facts.vocabulary
    blocks = 4 * rows * -(-facts.vocabulary // 16) * (2 + 4 * work.statistics)
    head = 4 * facts.vocabulary * facts.hidden if facts.head_trained else 0
    return chunk * (2 if work.compares else 1) + blocks + head


def generation(facts: ModelFacts, generating: Generating) -> int:
    """The cache, a quarter longer than needed so that it seldom grows, and what is drawn from: logits, p, sums."""
    length = -(-(generating.length + generating.length // 4) // STEP) * STEP
    return generating.slots * (length * facts.cache + 3 * 4 * facts.vocabulary)


class Fit(NamedTuple):
    """Settings that fit, or the smallest there are; `reasons` says in words how they came about."""

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
    """Micro-batch, checkpointing and slots for a device, without checkpointing if `enough_tokens` fit that way.

    `longest` is the longest row, which must fit; `answers` are the tokens that a run samples at most per prompt, 0 for
    none.
    """
    usable = int(SPARE * device_memory)
    ladder = sorted({longest, *(size for size in LADDER if longest <= size <= max(longest, most_tokens))})

    def needed(tokens: int, checkpointing: bool, slots: int = 0) -> int:
        generating = Generating(slots, longest) if slots else None
        work = Work(tokens, tokens, checkpointing, longest, tokens, others, generating=generating)
        return memory(facts, work, kind, framework).peak

    def most(checkpointing: bool) -> int:
        return max((tokens for tokens in ladder if needed(tokens, checkpointing) <= usable), default=0)

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
        cache = generation(facts, Generating(chosen, longest))
        reasons.append(f"{chosen} answers side by side, whose cache takes {gib(cache)}")
    return Fit(tokens, checkpointing, chosen, fits, tuple(reasons))


def _why_checkpointing(plain: int, longest: int, checkpointing: bool) -> str:
    if not checkpointing:
        return "no gradient checkpointing: all activations fit"
    if not plain:
        return f"gradient checkpointing: without it a row of {longest} tokens does not fit"
    return f"gradient checkpointing: without it no more than {plain} tokens fit at once"


def _why_tokens(tokens: int, needed: int, fits: bool) -> str:
    if fits:
        return f"{tokens} tokens at once: {gib(needed)} of memory by estimate"
    return f"even one row of {tokens} tokens needs {gib(needed)}: use LoRA, a smaller model or shorter rows"


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size < 100 * GIB else f"{size / GIB:.0f} GiB"


Stage: TypeAlias = Literal[0, 1, 2, 3]


class States(NamedTuple):
    """Weights, gradients and optimizer of one of several devices."""

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
    also holds the two layers that are gathered at a time. Rajbhandari et al. 2019, arXiv:1910.02054.
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
    """One device of `gpus`, each with a micro-batch of its own."""
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
    return memory._replace(weights=int(states.weights), gradients=int(states.gradients), optimizer=int(optimizer))


def gradient_traffic(trained: int, *, gpus: int, stage: Stage, gradient_bytes: int = 2, parameters: int = 0) -> float:
    """Bytes that each device sends per step: an all-reduce, and at stage 3 the weights too, gathered twice."""
    share = (gpus - 1) / gpus
    gathered = 2 * (parameters or trained) if stage == 3 else trained
    return gradient_bytes * (trained + gathered) * share


def sync_traffic(weight_bytes: int, *, rollout_gpus: int) -> int:
    """Bytes per step from the trainer to engines with weights of their own; none if they share the trainer's."""
    return weight_bytes * rollout_gpus


class Speed(NamedTuple):
    """Of one device: floating-point operations and bytes read, per second, as measured on large products."""

    flops: float
    bytes: float


def training_flops(facts: ModelFacts, tokens: float, *, row: float, gradient_checkpointing: bool = False) -> float:
    """Forward 2 per parameter and token, backward 4 (frozen weights have no gradient: 2), checkpointing 2 again.

    `row` is the length that a token's attention sees: on average half of it.
    """
    passes = 4 if facts.trained < facts.parameters / 2 else 6
    passes += 2 if gradient_checkpointing else 0
    attention = 2 * 2 * facts.layers * facts.hidden * row / 2
    return tokens * (passes * facts.active + passes / 2 * attention)


def forward_flops(facts: ModelFacts, tokens: float, *, row: float) -> float:
    return tokens * (2 * facts.active + 2 * 2 * facts.layers * facts.hidden * row / 2)


def generation_seconds(facts: ModelFacts, answers: float, length: float, slots: int, speed: Speed) -> float:
    """Each token reads all weights once for the answers side by side, and computes with them for each."""
    waves = -(-answers // max(1, slots))
    side_by_side = min(answers, slots)
    per_token = max(facts.weight_bytes / speed.bytes, 2 * facts.active * side_by_side / speed.flops)
    return waves * length * per_token

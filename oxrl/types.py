"""Every noun and Protocol that crosses a layer, each with an example value.

Samples become rollouts, rollouts become rows, rows become batches. An `Algorithm` says how rows are made and what a
forward pass over them is worth; a `Backend` turns that worth into new weights; a `Generator` speaks with them.
Nothing here does I/O or needs torch at run time.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
FloatArray: TypeAlias = NDArray[np.float32]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Message(NamedTuple):
    """`Message("user", "What is 2+2?")`; whatever else a row carried (tool calls, a name) is kept in `extra`."""

    role: str
    content: str | list[dict[str, Any]]
    extra: Mapping[str, Any] = {}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Message:
        content = raw.get("content")
        extra = {key: value for key, value in raw.items() if key not in ("role", "content") and value is not None}
        return cls(str(raw["role"]), "" if content is None else content, extra)

    def to_dict(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **self.extra}

    @property
    def text(self) -> str:
        """The content as text: of a list of parts, the text parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text") or "") for part in self.content or ())


class Conversation(NamedTuple):
    """`Conversation((Message("user", "Hi"), Message("assistant", "Hello!")))`."""

    messages: tuple[Message, ...]


class ModelConfig(NamedTuple):
    """`ModelConfig("smollm2-135m", dtype="bfloat16", gradient_checkpointing=True)`."""

    name: str
    dtype: str = "auto"  # "auto": float32 on CPU, bfloat16 on CUDA
    attn_implementation: str = "sdpa"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    device: str = "auto"
    revision: str | None = None


class GenerationConfig(NamedTuple):
    """`GenerationConfig(max_new_tokens=64, temperature=0.0)` is greedy."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0  # least probability, as a share of the likeliest token's
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A dataset row before any model saw it.

    `Sample("train.jsonl:12", messages=(Message("user", "2+2?"), Message("assistant", "4")))` is a row to imitate;
    with `chosen` and `rejected`, `messages` is their common prompt; with `label`, it ends with the judged completion;
    with `answer`, it is a prompt whose completion can be verified; with `responses` and their `rewards`, a prompt that
    was answered and scored before; with `text`, there is no conversation at all.
    """

    id: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    answer: str | None = None
    chosen: tuple[Message, ...] = ()
    rejected: tuple[Message, ...] = ()
    label: bool | None = None
    responses: tuple[tuple[Message, ...], ...] = ()
    rewards: tuple[float, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Generation(NamedTuple):
    """`Generation((19, 2), (-0.1, -0.01), "stop", version=3, text="4")`: what a generator returned for one prompt.

    One that was aborted holds what was drawn until then and can be gone on with (`Request.begun`). Where weights
    changed on the way, `version` is that of the oldest which drew a token of it, and `versions` has each token's.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # under the full softmax at the sampling temperature
    finish_reason: Literal["stop", "length", "aborted"]
    version: int = 0
    text: str = ""
    cut_mass: float = 0.0  # mean probability that top-p, top-k and min-p took away per token
    versions: tuple[int, ...] = ()  # of the weights that drew each token; (): all are of `version`

    @property
    def token_versions(self) -> tuple[int, ...]:
        """One per token, whether they differ or not."""
        return self.versions or (self.version,) * len(self.token_ids)

    def with_versions(self, versions: Sequence[int]) -> Generation:
        """The same, each token with the version of the weights that drew it."""
        if len(versions) != len(self.token_ids):
            raise ValueError(f"{len(versions)} versions for {len(self.token_ids)} tokens; give one for each")
        if not versions:
            return self
        differ = min(versions) != max(versions)
        return self._replace(version=min(versions), versions=tuple(versions) if differ else ())


class Request(NamedTuple):
    """`Request((1, 50, 51), seed=7)`: tokens to continue.

    Its random numbers are a function of (sampling seed, `seed`, position) and of nothing else.
    """

    tokens: tuple[int, ...]
    seed: int = 0
    begun: Generation | None = None  # an aborted generation to go on with, through a fresh prefill


class Turn(NamedTuple):
    """One thing that the model said: all it saw before, what it sampled, and the same as messages.

    `messages` begins with the assistant's; what the environment answered (tool results, a user) comes behind it.
    """

    prompt_ids: tuple[int, ...]
    generation: Generation
    messages: tuple[Message, ...] = ()


class Score(NamedTuple):
    """`Score(1.5, parts={"correct": 1.0, "format": 0.5})`; a reward may also say which turn or token earned it."""

    value: float
    parts: Mapping[str, float] = {}
    per_turn: tuple[float, ...] | None = None  # one per turn; their sum is `value`
    per_token: tuple[float, ...] | None = None  # one per sampled token, over all turns; their sum is `value`


class Status(Enum):
    """How far a rollout has come."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Rollout:
    """`Rollout(sample, (turn,), group=12, index=3, score=Score(1.0))`: one answer to one prompt, and its worth.

    `group` is the number of the prompt in the run, `index` that of the answer to it. Errors are data: a rollout whose
    generation or grading failed has an `error` and no score, and is never taken for one with reward 0.
    """

    sample: Sample
    turns: tuple[Turn, ...] = ()
    group: int = 0
    index: int = 0
    score: Score | None = None
    error: str | None = None
    greedy: bool = False  # drawn at temperature 0, as a baseline: graded, never trained on
    kl_divergence: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.sample.id}#{self.group}/{self.index}"

    @property
    def version(self) -> int:
        """Of the oldest weights that had a part in it."""
        return min((turn.generation.version for turn in self.turns), default=0)

    @property
    def versions(self) -> tuple[int, ...]:
        """Of the weights that drew each sampled token, over all turns."""
        return tuple(version for turn in self.turns for version in turn.generation.token_versions)

    @property
    def generation(self) -> Generation:
        """What was sampled last."""
        if not self.turns:
            raise ValueError(f"rollout {self.id} has no generation yet")
        return self.turns[-1].generation

    @property
    def response(self) -> str:
        """All that the model said."""
        return "\n".join(turn.generation.text for turn in self.turns)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation: the prompt, what was said, and what the environment answered."""
        return (*self.sample.messages, *(message for turn in self.turns for message in turn.messages))

    @property
    def prompt(self) -> str:
        """What was asked last before the model spoke, as text."""
        return self.sample.messages[-1].text if self.sample.messages else ""

    @property
    def reward(self) -> float | None:
        return None if self.score is None else self.score.value

    @property
    def rewards(self) -> float | list[float] | None:
        """The reward, or its parts where it has some."""
        return list(self.score.parts.values()) if self.score is not None and self.score.parts else self.reward

    @property
    def group_index(self) -> int:
        return self.group

    @property
    def tokens(self) -> list[int]:
        """All that the model saw and said, to the end of its last turn."""
        if not self.turns:
            return []
        return [*self.turns[-1].prompt_ids, *self.turns[-1].generation.token_ids]

    @property
    def loss_mask(self) -> list[float]:
        """1 for each of `tokens` that was sampled."""
        mask = [0.0] * len(self.tokens)
        for start, generation in self._sampled():
            mask[start : start + len(generation.token_ids)] = [1.0] * len(generation.token_ids)
        return mask

    @property
    def rollout_log_probs(self) -> list[float]:
        """The sampler's log-prob of each of `tokens`; 0 for what was not sampled."""
        logprobs = [0.0] * len(self.tokens)
        for start, generation in self._sampled():
            logprobs[start : start + len(generation.logprobs)] = generation.logprobs
        return logprobs

    def _sampled(self) -> Iterator[tuple[int, Generation]]:
        """Where in `tokens` each turn begins; a turn that a later prompt rewrote is in there no more."""
        tokens = tuple(self.tokens)
        for turn in self.turns:
            context = (*turn.prompt_ids, *turn.generation.token_ids)
            if tokens[: len(context)] == context:
                yield len(turn.prompt_ids), turn.generation

    @property
    def status(self) -> Status:
        if self.error is not None:
            return Status.FAILED
        if not self.turns:
            return Status.PENDING
        reasons = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "aborted": Status.ABORTED}
        return reasons[self.generation.finish_reason]


@dataclass(frozen=True, slots=True)
class Row:
    """One trainable sequence; every stream has `len(tokens)` and speaks about *that* token.

    `Row("train.jsonl:12", tokens=[1, 50, 51, 2], mask=[0, 0, 1, 1])`: the model learns to say 51 and 2. The first
    token of a row can never be trained: nothing comes before it.
    """

    id: str
    tokens: IntArray
    mask: BoolArray
    sequence: str = ""  # rows of one rollout share it and count as one sequence; "" means the row's own id
    streams: Mapping[str, FloatArray] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", np.asarray(self.tokens, dtype=np.int64))
        object.__setattr__(self, "mask", np.asarray(self.mask, dtype=np.bool_))
        if not len(self.tokens):
            raise ValueError(f"row {self.id} has no tokens")
        for name, stream in {"mask": self.mask, **self.streams}.items():
            if len(stream) != len(self.tokens):
                raise ValueError(f"row {self.id}: {name} has {len(stream)} entries for {len(self.tokens)} tokens")
        if self.mask[0]:
            raise ValueError(f"row {self.id}: its first token is marked as trained, but nothing comes before it")

    def __len__(self) -> int:
        return len(self.tokens)


Item: TypeAlias = tuple[Row, ...]
"""Rows that stay together and in order: `(row,)` to imitate, `(chosen, rejected)` to compare."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows end to end, without padding. T tokens, R rows; row r is `tokens[borders[r]:borders[r + 1]]`."""

    ids: tuple[str, ...]
    tokens: Tensor  # [T] int64
    mask: Tensor  # [T] bool
    positions: Tensor  # [T] int64, 0 at the start of each row
    segments: Tensor  # [T] int64, the row of each token
    borders: tuple[int, ...]  # R + 1 numbers
    streams: Mapping[str, Tensor]  # each [T] float32
    scalars: Mapping[str, Tensor]  # each [R] float32

    @property
    def num_rows(self) -> int:
        return len(self.borders) - 1

    @property
    def num_tokens(self) -> int:
        return self.borders[-1]


class Outputs(NamedTuple):
    """What one forward pass says about a batch, all `[T]`, read at the hidden state *before* each token.

    Untrained tokens hold 0. `statistics` has what the algorithm asked for by name in `reads`; `value` and `score` are
    there when the model has that head. A tuple, because engines that shard look for tensors in what a module returns.
    """

    logprob: Tensor
    statistics: Mapping[str, Tensor] = {}
    value: Tensor | None = None  # [T]
    last_value: Tensor | None = None  # [R], after the last token of each row
    score: Tensor | None = None  # [R], read at the last token of each row


class Read(NamedTuple):
    """A statistic to take inside the pass: `Read(entropy)`; `Read(forward_kl, of="teacher")` sees another's logits."""

    statistic: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    of: str | None = None


Unit: TypeAlias = Literal["token", "chosen_token", "sequence", "pair", "constant", "largest"]
Counts: TypeAlias = Mapping[Unit, float]
"""How many of each unit a whole step has: `{"token": 512, "sequence": 8, "pair": 4, "constant": 1, ...}`.

A metric of the unit "largest" is not a sum: the largest of all parts is reported.
"""


class Term(NamedTuple):
    """A sum and what it is a sum over; whoever knows the whole step divides it, once."""

    total: Tensor
    unit: Unit


class Losses(NamedTuple):
    """`Losses({"nll": Term(-logprob.sum(), "token")}, {"accuracy": Term(correct.sum(), "token")})`."""

    terms: Mapping[str, Term]
    metrics: Mapping[str, Term] = {}


def merge_metrics(parts: Sequence[Mapping[str, Term]], counts: Counts) -> dict[str, float]:
    """Each metric over all parts of a step: its sum divided by the count of its unit, or the largest."""
    merged: dict[str, float] = {}
    for metrics in parts:
        for name, (total, unit) in metrics.items():
            if unit == "largest":
                merged[name] = max(merged.get(name, 0.0), float(total))
            else:
                merged[name] = merged.get(name, 0.0) + float(total) / counts[unit]
    return merged


class TrainingState(NamedTuple):
    """All that a resume needs besides weights and optimizer: `TrainingState(step=40, version=40, cursor={...})`."""

    step: int = 0
    version: int = 0
    seed: int = 0
    cursor: Mapping[str, Any] = {}


class Episode(NamedTuple):
    """What an environment returns: the turns, a score if it keeps its own, and whatever else it has to tell."""

    turns: tuple[Turn, ...]
    score: Score | None = None
    metadata: Mapping[str, Any] = {}


class PolicyClient(Protocol):
    """The model, as one rollout's environment meets it."""

    @property
    def render(self) -> Render: ...

    async def say(self, prompt_ids: Sequence[int]) -> Generation:
        """What the model says next. An aborted generation ends the episode: return the turns as they are."""
        ...


EnvFn: TypeAlias = Callable[[Sample, PolicyClient], Awaitable[Episode]]


class Render(Protocol):
    """Chat and text to rows, for one tokenizer."""

    def conversation(
        self,
        messages: Sequence[Message],
        *,
        id: str,
        first_trained: int = 0,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[Row]: ...

    def text(self, text: str, *, id: str) -> list[Row]: ...

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> IntArray: ...


AssembleFn: TypeAlias = Callable[[Sample, Render], list[Item]]
RolloutItemsFn: TypeAlias = Callable[[Sequence[Rollout], Render], list[Item]]
RewardFn: TypeAlias = Callable[[Rollout], Any]
"""A rollout to a float or a `Score`, at once or awaited."""
GroupRewardFn: TypeAlias = Callable[[Sequence[Rollout]], Any]
"""All answers to one prompt to a float or `Score` each, at once or awaited."""
FilterFn: TypeAlias = Callable[[Sequence[Rollout]], Any]
"""All answers to one prompt to whether they are worth training on, at once or awaited."""
ArrangeFn: TypeAlias = Callable[[list[Item]], list[Item]]
Memory: TypeAlias = dict[str, float]
CreditFn: TypeAlias = Callable[[list[Item], Memory], list[Item]]
LossFn: TypeAlias = Callable[[Outputs, Batch], Losses]


def no_credit(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - one signature for all
    """For algorithms whose rows say all there is to say."""
    return items


class Online(NamedTuple):
    """How an algorithm learns from what its own policy samples: `Online(group_of_rollouts, greedy=True)` for ReMax."""

    items: RolloutItemsFn  # the scored answers to one prompt -> items
    greedy: bool = False  # one more answer per prompt at temperature 0, as a baseline
    needs_variance: bool = False  # groups whose rewards are all equal are drawn anew
    reuses: bool = True  # its loss has a ratio, so that a batch can serve several optimizer steps
    min_group_size: int = 2  # per prompt; below it the algorithm has nothing to compare
    reward_source: Literal["reward", "reward model", "judge"] | None = "reward"  # None: rewards are not looked at


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`algorithm("dpo", beta=0.2)`. How rows are made and what a forward pass over them is worth; it knows no model.

    A step goes: `arrange` (rows may be added), a pass for each of `needs` ("policy", "ref", "teacher"; its log-probs
    are stamped on the rows as `ref_logprob`, a value head's as `value`), `credit` over all rows of the step, then
    `loss` per micro-batch. The need "sampler" is the policy's pass for rows that do not know yet with which log-probs
    they were sampled. `memory` holds running means: it is part of the checkpoint, and evaluation works on a copy.
    """

    name: str
    assemble: AssembleFn
    loss: LossFn
    needs: tuple[str, ...] = ()
    reads: Mapping[str, Read] = field(default_factory=dict)
    arrange: ArrangeFn = list
    credit: CreditFn = no_credit
    heads: tuple[str, ...] = ()  # "value", "score"
    eval_metric: str | None = "loss"  # the number of an evaluation that is better when lower; None: none of them is
    parameters: Mapping[str, Any] = field(default_factory=dict)
    online: Online | None = None  # None: it learns from files only
    source: str = ""  # what `algorithm` was called with, a name or an import path: so it travels to other processes

    @property
    def others(self) -> set[str]:
        """The models it needs besides the policy: `{"ref"}`."""
        return {*self.needs, *(read.of for read in self.reads.values() if read.of)} - {"policy", "sampler"}

    @property
    def compares_logprobs(self) -> bool:
        """Whether its loss compares log-probs of several passes; dropout would falsify that comparison."""
        return bool(self.needs or self.others)


class TrainFuture(Protocol[T_co]):
    """Work that was submitted: `metrics = await backend.optim_step()`."""

    def __await__(self) -> collections.abc.Generator[Any, Any, T_co]: ...

    async def result(self) -> T_co: ...


@dataclass(frozen=True, slots=True)
class ImmediateTrainFuture(TrainFuture[T]):
    """`await ImmediateTrainFuture(3) == 3`: work that was done when it was submitted."""

    value: T

    def __await__(self) -> collections.abc.Generator[Any, Any, T]:
        yield from ()  # `await` asks for a generator; this one never waits
        return self.value

    async def result(self) -> T:
        return self.value


class Rendezvous(NamedTuple):
    """`Rendezvous("10.0.0.1", 40123, 3, "gloo", 600.0)`: where sender and receivers of weights find each other.

    `size` counts the sender and every worker of every engine; `backend` is gloo (over TCP) or nccl (between GPUs);
    they have `time_limit` seconds to meet, and for each piece.
    """

    host: str
    port: int
    size: int
    backend: str
    time_limit: float


class WeightSource(Protocol):
    """Weights of one version as whoever samples with them may ask for them, wherever they are.

    Names are those of a plain checkpoint (`oxrl.weights`), an adapter is merged. Every call may take its time and
    blocks, so it is made in a thread. Weights that have moved on since are refused, never handed out for older ones.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def adapted(self) -> bool:
        """Whether the model has an adapter, so that `write_adapter` has something to write."""
        ...

    def write(self, folder: Path) -> None:
        """Files that an engine loads: `config.json` and safetensors, in buckets with an index where they are many."""
        ...

    def write_base(self, folder: Path) -> None:
        """The same files of the model without its adapter, which training leaves as it is."""
        ...

    def write_adapter(self, folder: Path) -> None:
        """The adapter alone, as PEFT writes it."""
        ...

    def send(self, place: Rendezvous) -> None:
        """To the engines that meet there, whose workers receive meanwhile; the files' weights without files."""
        ...

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """The trainer's, of each token but the first, at temperature 1."""
        ...


class Weights(NamedTuple):
    """A handle to weights of one version: `Weights(model, 3)` for a trainer in this process, the module itself.

    Where they are spread over ranks or in another process, `module` is None and `source` is asked instead.
    `oxrl.weights.checkpoint_names.source_of` gives either the same face.
    """

    module: Any
    version: int
    source: WeightSource | None = None


Layout: TypeAlias = Literal["shared", "packed", "padded"]
"""Rows run end to end, what they begin with in common computed once or in each; or side by side with padding."""


class Backend(Protocol):
    """Holds a model and its optimizer. Every call returns a future; the calls of one step run in order."""

    def logprobs(
        self, batches: Sequence[Batch], which: str = "policy", reads: Mapping[str, Read] = ...
    ) -> TrainFuture[list[Outputs]]: ...

    def forward_backward(
        self, batches: Sequence[Batch], algorithm: Algorithm, counts: Counts
    ) -> TrainFuture[dict[str, float]]: ...

    def optim_step(self) -> TrainFuture[dict[str, float]]: ...

    def get_weights(self) -> TrainFuture[Weights]:
        """A handle, which costs nothing until something is asked of it."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]: ...

    def update_reference(self, decay: float) -> TrainFuture[None]:
        """Move the reference towards the policy, keeping `decay` of what it was."""
        ...

    def save(self, path: Path) -> TrainFuture[None]: ...

    def load(self, path: Path) -> TrainFuture[None]: ...

    @property
    def layout(self) -> Layout:
        """How rows run, which decides what a micro-batch costs."""
        ...

    @property
    def parallel(self) -> int:
        """How many micro-batches run side by side; a step with fewer leaves somebody without work."""
        ...


TrainingBackend: TypeAlias = Backend


class Generator(Protocol):
    """Speaks with a model's weights: token ids in, token ids and log-probs out. What was sampled stays as sampled."""

    @property
    def version(self) -> int:
        """Of the weights that it speaks with."""
        ...

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        """One generation per request, in order. Calls of several tasks share the engine."""
        ...

    async def abort(self) -> None:
        """Everything under way returns now, as "aborted", with what it has."""
        ...

    async def update_weights(self, weights: Weights) -> None:
        """Speak with these from now on; answers once the new version is in place."""
        ...

    async def close(self) -> None: ...


class SleepingGenerator(Generator, Protocol):
    """One on the trainer's devices, which can leave them to it; whoever asks it for something next wakes it."""

    async def sleep(self) -> None:
        """Give the devices' memory back. Nothing is under way; weights are kept elsewhere, or come anew."""
        ...


class MetricsLogger(Protocol):
    """`logger(12, {"loss": 1.3})`; `.log` is the same call."""

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


class DataSource(Protocol[T_co]):
    """Endless, deterministic, resumable: `source.get_prompts(8)`."""

    def get_prompts(self, n: int) -> Sequence[T_co]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

"""Every noun and Protocol that crosses a layer, each with an example value.

Samples become rollouts, rollouts become rows, rows become batches. An `Algorithm` says how rows are made and what a
forward pass over them is worth; a `Backend` turns that worth into new weights; a `Generator` speaks with them.
Nothing here does I/O or needs torch at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pathlib import Path

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


class Conversation(NamedTuple):
    """`Conversation((Message("user", "Hi"), Message("assistant", "Hello!")))`."""

    messages: tuple[Message, ...]

    def to_dicts(self) -> list[dict[str, Any]]:
        return [message.to_dict() for message in self.messages]


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
    """`Generation((19, 2), (-0.1, -0.01), "stop", version=3, text="4")`: what a generator returned for one prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length", "aborted"]
    version: int = 0
    text: str = ""


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


@dataclass(frozen=True, slots=True)
class Outputs:
    """What one forward pass says about a batch, all `[T]`, read at the hidden state *before* each token.

    Untrained tokens hold 0. `statistics` has what the algorithm asked for by name in `reads`; `value` and `score` are
    there when the model has that head.
    """

    logprob: Tensor
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    value: Tensor | None = None  # [T]
    last_value: Tensor | None = None  # [R], after the last token of each row
    score: Tensor | None = None  # [R], read at the last token of each row


class Read(NamedTuple):
    """A statistic to take inside the pass: `Read(entropy)`; `Read(forward_kl, of="teacher")` sees another's logits."""

    statistic: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    of: str | None = None


Unit: TypeAlias = Literal["token", "chosen_token", "sequence", "pair", "constant"]
Counts: TypeAlias = Mapping[Unit, float]
"""How many of each unit a whole step has: `{"token": 512, "sequence": 8, "pair": 4, "constant": 1, ...}`."""


class Term(NamedTuple):
    """A sum and what it is a sum over; whoever knows the whole step divides it, once."""

    total: Tensor
    unit: Unit


class Losses(NamedTuple):
    """`Losses({"nll": Term(-logprob.sum(), "token")}, {"accuracy": Term(correct.sum(), "token")})`."""

    terms: Mapping[str, Term]
    metrics: Mapping[str, Term] = {}


class TrainingState(NamedTuple):
    """All that a resume needs besides weights and optimizer: `TrainingState(step=40, version=40, cursor={...})`."""

    step: int = 0
    version: int = 0
    seed: int = 0
    cursor: Mapping[str, Any] = {}


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
ArrangeFn: TypeAlias = Callable[[list[Item]], list[Item]]
Memory: TypeAlias = dict[str, float]
CreditFn: TypeAlias = Callable[[list[Item], Memory], list[Item]]
LossFn: TypeAlias = Callable[[Outputs, Batch], Losses]


def no_credit(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - one signature for all
    """For algorithms whose rows say all there is to say."""
    return items


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`algorithm("dpo", beta=0.2)`. How rows are made and what a forward pass over them is worth; it knows no model.

    A step goes: `arrange` (rows may be added), a pass for each of `needs` ("policy", "ref", "teacher"; its log-probs
    are stamped on the rows as `ref_logprob`, a value head's as `value`), `credit` over all rows of the step, then
    `loss` per micro-batch. `memory` holds running means: it is part of the checkpoint, and evaluation works on a copy.
    """

    name: str
    assemble: AssembleFn
    loss: LossFn
    needs: tuple[str, ...] = ()
    reads: Mapping[str, Read] = field(default_factory=dict)
    arrange: ArrangeFn = list
    credit: CreditFn = no_credit
    heads: tuple[str, ...] = ()  # "value", "score"
    judged_by: str | None = "loss"  # the number of an evaluation that is better when lower; None: none of them is
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def others(self) -> set[str]:
        """The models it needs besides the policy: `{"ref"}`."""
        return {*self.needs, *(read.of for read in self.reads.values() if read.of)} - {"policy"}

    @property
    def compares_logprobs(self) -> bool:
        """Whether its loss compares log-probs of several passes; dropout would falsify that comparison."""
        return bool(self.needs or self.others)


class TrainFuture(Protocol[T_co]):
    """Work that was submitted: `metrics = await backend.optim_step()`."""

    def __await__(self) -> Generator[Any, Any, T_co]: ...

    async def result(self) -> T_co: ...


@dataclass(frozen=True, slots=True)
class ImmediateTrainFuture(TrainFuture[T]):
    """`await ImmediateTrainFuture(3) == 3`: work that was done when it was submitted."""

    value: T

    def __await__(self) -> Generator[Any, Any, T]:
        yield from ()  # `await` asks for a generator; this one never waits
        return self.value

    async def result(self) -> T:
        return self.value


class Weights(NamedTuple):
    """A handle to weights of one version; on one machine the module itself travels."""

    module: Any
    version: int


class Backend(Protocol):
    """Holds a model and its optimizer. Every call returns a future; the calls of one step run in order."""

    def logprobs(
        self, batches: Sequence[Batch], which: str = "policy", reads: Mapping[str, Read] = ...
    ) -> TrainFuture[list[Outputs]]: ...

    def forward_backward(
        self, batches: Sequence[Batch], algorithm: Algorithm, counts: Counts
    ) -> TrainFuture[dict[str, float]]: ...

    def optim_step(self) -> TrainFuture[dict[str, float]]: ...

    def get_weights(self) -> TrainFuture[Weights]: ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]: ...

    def save(self, path: Path) -> TrainFuture[None]: ...

    def load(self, path: Path) -> TrainFuture[None]: ...

    @property
    def padded(self) -> bool:
        """Whether rows run side by side with padding, which decides how they are best packed."""
        ...


TrainingBackend: TypeAlias = Backend


class MetricsLogger(Protocol):
    """`logger(12, {"loss": 1.3})`; `.log` is the same call."""

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


class DataSource(Protocol[T_co]):
    """Endless, deterministic, resumable: `source.get_prompts(8)`."""

    def get_prompts(self, n: int) -> Sequence[T_co]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

"""Records and protocols shared by all layers, each with an example value.

Samples become rollouts, rollouts become rows, rows become batches. An `Algorithm` defines how rows are built and the
loss of a forward pass over them; a `Backend` turns that loss into new weights; a `Generator` samples from them.
Nothing here does I/O or needs torch at run time.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

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
    """`Message("user", "What is 2+2?")`; all other fields of a row (tool calls, a name) are kept in `extra`."""

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


def as_messages(prompt: str | Conversation | Sequence[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
    """A text as a user's message; a conversation or a list of messages, which may be dicts, as messages."""
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    if isinstance(prompt, Mapping):
        raise ValueError("a prompt is a text or a list of messages; convert rows with columns by load_samples(rows)")
    given = prompt.messages if isinstance(prompt, Conversation) else prompt
    return tuple(each if isinstance(each, Message) else Message.from_dict(each) for each in given)


class ModelConfig(NamedTuple):
    """`ModelConfig("smollm2-135m", dtype="bfloat16", gradient_checkpointing=True)`."""

    name: str
    dtype: str = "auto"  # "auto": float32 on CPU, bfloat16 on CUDA
    attn_implementation: str = "sdpa"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    device: str = "auto"
    revision: str | None = None
    chat_template: str | None = None  # a name, a file or the template itself; None: the tokenizer's own
    freeze: Literal["towers", "language_model", "nothing"] = "towers"  # of models that read images or audio


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
    allowed_tokens: tuple[int, ...] = ()  # the distribution is over these alone; (): the whole vocabulary


class Media(NamedTuple):
    """`Media("image", "photos/cat.png")`, `Media("audio", wav_bytes, "audio/wav")`: one image or sound of a prompt.

    `data` is the encoded file, or its path or URL. Media of a prompt are in the order of their placeholders in it.
    """

    kind: Literal["image", "audio"]
    data: bytes | str
    mime_type: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A dataset row, before generation.

    `Sample("train.jsonl:12", messages=(Message("user", "2+2?"), Message("assistant", "4")))` is a row for SFT;
    with `chosen` and `rejected`, `messages` is their common prompt; with `label`, it ends with the labelled completion;
    with `answer`, it is a prompt whose completion can be verified; with `responses` and their `rewards`, a prompt with
    completions that are scored already; with `text`, there is no conversation at all. `Sample(prompt="2+2?",
    tokens=[...], loss_mask=[...])` is a sample with its completion, a `Rollout`: see `Rollout.from_fields`.
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
    media: tuple[Media, ...] = ()  # of its prompt
    conversational: bool = field(default=False, compare=False, repr=False)  # the row had a list of messages, not a text

    def __new__(cls, *_: Any, **fields: Any) -> Any:
        return Rollout.from_fields(**fields) if "prompt" in fields else object.__new__(cls)


_of_init = inspect.signature(Sample.__init__)  # by default, documentation shows the signature of `__new__`
Sample.__signature__ = _of_init.replace(parameters=list(_of_init.parameters.values())[1:])  # type: ignore[attr-defined]


class Generation(NamedTuple):
    """`Generation((19, 2), (-0.1, -0.01), "stop", version=3, text="4")`: the output of a generator for one prompt.

    An aborted generation holds the tokens sampled so far and can be resumed (`Request.partial`). If weights were
    updated during generation, `version` is the oldest version that sampled a token, and `versions` has one per token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # under the softmax at the sampling temperature, over `allowed_tokens` if there are any
    finish_reason: Literal["stop", "length", "aborted"]
    version: int = 0
    text: str = ""
    cut_mass: float = 0.0  # mean probability removed by top-p, top-k and min-p per token
    versions: tuple[int, ...] = ()  # of the weights that sampled each token; (): all are of `version`
    opened: str = ""  # what the prompt already has of the response: "<think>\n" with templates of reasoning models
    allowed_tokens: tuple[int, ...] = ()  # those of its `GenerationConfig`

    @property
    def full_text(self) -> str:
        """The response including what the prompt has of it."""
        return self.opened + self.text

    @property
    def token_versions(self) -> tuple[int, ...]:
        """One version per token, also where all are equal."""
        return self.versions or (self.version,) * len(self.token_ids)

    def with_versions(self, versions: Sequence[int]) -> Generation:
        """Return a copy with the version of the weights that sampled each token."""
        if len(versions) != len(self.token_ids):
            raise ValueError(f"{len(versions)} versions for {len(self.token_ids)} tokens; give one for each")
        if not versions:
            return self
        differ = min(versions) != max(versions)
        return self._replace(version=min(versions), versions=tuple(versions) if differ else ())


_unchecked_generation = Generation.__new__


@functools.wraps(_unchecked_generation)
def _checked_generation(cls: type[Generation], *values: Any, **fields: Any) -> Generation:
    """A text in the position of the token ids would be trained on as its letters."""
    try:
        made = _unchecked_generation(cls, *values, **fields)
    except TypeError as error:
        raise TypeError(f"{error}; {_HOW_TO_GENERATE}") from error
    token_ids: Any = made.token_ids
    if isinstance(token_ids, str):
        raise ValueError(f"token_ids is the text {token_ids[:40]!r}; {_HOW_TO_GENERATE}")
    if made.finish_reason not in ("stop", "length", "aborted"):
        raise ValueError(f"finish_reason is {made.finish_reason!r}; it is stop, length or aborted. {_HOW_TO_GENERATE}")
    return made


_HOW_TO_GENERATE = "write Generation(token_ids, logprobs, finish_reason, text=text)"
Generation.__new__ = _checked_generation  # type: ignore[method-assign,assignment]


class Request(NamedTuple):
    """`Request((1, 50, 51), seed=7)`: tokens to continue.

    Its random numbers are a function of (sampling seed, `seed`, position) and of nothing else. docs/extending.md has
    what an engine must do with each field.
    """

    tokens: tuple[int, ...]
    seed: int = 0
    partial: Generation | None = None  # an aborted generation to resume, with a new prefill
    media: tuple[Media, ...] = ()  # prompts are equal if tokens and media are


class Turn(NamedTuple):
    """One model call: its prompt, the sampled generation, and the resulting messages.

    `messages` starts with the assistant's message, followed by the environment's replies (tool results, a user).
    """

    prompt_ids: tuple[int, ...]
    generation: Generation
    messages: tuple[Message, ...] = ()
    media: tuple[Media, ...] = ()  # of its prompt, those of replies included; (): those of the sample
    unused: int = 0  # last tokens of the generation that had no effect, and are not trained


class Score(NamedTuple):
    """`Score(1.5, parts={"correct": 1.0, "format": 0.5})`; a reward may also be given per turn or per token."""

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
    """`Rollout(sample, (turn,), group=12, index=3, score=Score(1.0))`: one completion of one prompt, and its score.

    `group` is the number of the prompt in the run, `index` that of the completion. Errors are data: a rollout whose
    generation or grading failed has an `error` and no score, and is never treated as one with reward 0.
    """

    sample: Sample
    turns: tuple[Turn, ...] = ()
    group: int = 0
    index: int = 0
    score: Score | None = None
    error: str | None = None
    greedy: bool = False  # sampled at temperature 0, as a baseline: graded, never trained on
    kl_divergence: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prompt_messages: tuple[Message, ...] = ()  # before the first turn, if an environment added to the sample's

    @classmethod
    def from_fields(
        cls,
        *,
        prompt: str | Sequence[Message | Mapping[str, Any]],
        response: str = "",
        tokens: Sequence[int] = (),
        loss_mask: Sequence[float] = (),
        reward: float | None = None,
        group_index: int | None = None,
        rollout_log_probs: Sequence[float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        status: Status | None = None,
    ) -> Rollout:
        """`Rollout.from_fields(prompt="2+2?", response="4", tokens=[1, 50, 51], loss_mask=[0, 0, 1], reward=1.0)`.

        A completion recorded elsewhere. `loss_mask` is 1 for each of `tokens` that was sampled or is to be trained on;
        the first token has no context, and counts as 0. `rollout_log_probs` has a number for each token or for each
        sampled one. Without a `reward` it is not graded. For other values use `dataclasses.replace`.
        """
        return cls(
            Sample(f"sample:{next(_NUMBERS)}", as_messages(prompt), metadata=dict(metadata or {})),
            _recorded_turns(tokens, loss_mask, rollout_log_probs, response, status),
            group=group_index or 0,
            score=None if reward is None else Score(float(reward)),
            error="its status is failed" if status is Status.FAILED else None,
            metadata=dict(metadata or {}),
        )

    @property
    def id(self) -> str:
        return f"{self.sample.id}#{self.group}/{self.index}"

    @property
    def version(self) -> int:
        """Version of the oldest weights that sampled a token."""
        return min((turn.generation.version for turn in self.turns), default=0)

    @property
    def versions(self) -> tuple[int, ...]:
        """Version of the weights that sampled each token, over all turns."""
        return tuple(version for turn in self.turns for version in turn.generation.token_versions)

    @property
    def generation(self) -> Generation:
        """Generation of the last turn."""
        if not self.turns:
            raise ValueError(f"rollout {self.id} has no generation yet")
        return self.turns[-1].generation

    @property
    def response(self) -> str:
        """Generated text of all turns; turns without text are left out."""
        return "\n".join(turn.generation.text for turn in self.turns if turn.generation.text)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The complete conversation: prompt, generated messages and replies of the environment."""
        before = self.prompt_messages or self.sample.messages
        return (*before, *(message for turn in self.turns for message in turn.messages))

    @property
    def media(self) -> tuple[Media, ...]:
        """Images and sounds before the last generation, those of replies included, in the order of the messages."""
        return (self.turns[-1].media if self.turns else ()) or self.sample.media

    @property
    def prompt(self) -> str:
        """Last message before the first generation, as text."""
        before = self.prompt_messages or self.sample.messages
        return before[-1].text if before else ""

    @property
    def reward(self) -> float | None:
        return None if self.score is None else self.score.value

    @property
    def rewards(self) -> float | list[float] | None:
        """The reward, or the list of its parts if it has any."""
        return list(self.score.parts.values()) if self.score is not None and self.score.parts else self.reward

    @property
    def group_index(self) -> int:
        return self.group

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens up to the end of the last turn."""
        if not self.turns:
            return []
        return [*self.turns[-1].prompt_ids, *self.turns[-1].generation.token_ids]

    @property
    def loss_mask(self) -> list[float]:
        """1 for each of `tokens` that was sampled, and had an effect."""
        mask = [0.0] * len(self.tokens)
        for start, turn in self._sampled():
            count = len(turn.generation.token_ids) - turn.unused
            mask[start : start + count] = [1.0] * count
        return mask

    @property
    def rollout_log_probs(self) -> list[float] | None:
        """The sampler's log-prob of each of `tokens`, 0 for tokens that were not sampled; None if not known."""
        if any(turn.generation.token_ids for turn in self.turns) and not self.has_logprobs:
            return None
        logprobs = [0.0] * len(self.tokens)
        for start, turn in self._sampled():
            logprobs[start : start + len(turn.generation.logprobs)] = turn.generation.logprobs
        return logprobs

    @property
    def has_logprobs(self) -> bool:
        """Whether the log-probs of sampled tokens are known."""
        return any(turn.generation.logprobs for turn in self.turns)

    def _sampled(self) -> Iterator[tuple[int, Turn]]:
        """Start of each turn in `tokens`; turns that a later prompt rewrote are left out."""
        tokens = tuple(self.tokens)
        for turn in self.turns:
            context = (*turn.prompt_ids, *turn.generation.token_ids)
            if tokens[: len(context)] == context:
                yield len(turn.prompt_ids), turn

    @property
    def status(self) -> Status:
        if self.error is not None:
            return Status.FAILED
        if not self.turns:
            return Status.PENDING
        reasons = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "aborted": Status.ABORTED}
        return reasons[self.generation.finish_reason]


def _is_immutable(self: Any, name: str, value: Any) -> None:  # noqa: ARG001 - the interface's
    raise AttributeError(f"a {type(self).__name__} is immutable: use dataclasses.replace, which returns a changed copy")


Rollout.__setattr__ = _is_immutable  # type: ignore[method-assign]


_NUMBERS = itertools.count()  # of recorded samples: rollouts with equal ids would count as one


def _recorded_turns(
    tokens: Sequence[int],
    loss_mask: Sequence[float],
    logprobs: Sequence[float] | None,
    text: str,
    status: Status | None,
) -> tuple[Turn, ...]:
    """One turn for each run of 1s in the mask, and one without generated tokens for what follows the last of them."""
    ids, mask = tuple(map(int, tokens)), [float(each) for each in loss_mask]
    if len(mask) != len(ids):
        raise ValueError(f"loss_mask has {len(mask)} entries for {len(ids)} tokens; give one for each token")
    if others := set(mask) - {0.0, 1.0}:
        raise ValueError(f"loss_mask contains {min(others):g}; give a 1 for each token to train on, else a 0")
    by_token = _logprob_of_each(mask, logprobs)
    mask[:1] = [0.0] * len(mask[:1])  # the first token has no context
    starts = [index for index, each in enumerate(mask) if each and not mask[index - 1]]
    ends = [index + 1 for index, each in enumerate(mask) if each and mask[index + 1 : index + 2] != [1.0]]
    if (ids or text) and ends[-1:] != [len(ids)]:
        starts, ends = [*starts, len(ids)], [*ends, len(ids)]
    turns = [
        Turn(ids[:start], Generation(ids[start:end], by_token[start:end], "stop"))
        for start, end in zip(starts, ends, strict=True)
    ]
    if turns:
        reason: Any = {Status.TRUNCATED: "length", Status.ABORTED: "aborted"}.get(status or Status.PENDING, "stop")
        last = turns.pop()
        turns.append(last._replace(generation=last.generation._replace(text=text, finish_reason=reason)))
    return tuple(turns)


def _logprob_of_each(mask: Sequence[float], logprobs: Sequence[float] | None) -> tuple[float, ...]:
    """Log-probs by token, from those of all tokens or of the sampled ones; () if they are not known."""
    if logprobs is None or len(logprobs) == len(mask):
        return tuple(map(float, logprobs or ()))
    if len(logprobs) != sum(mask):
        raise ValueError(
            f"rollout_log_probs has {len(logprobs)} entries for {len(mask)} tokens, {sum(mask):.0f} of them sampled; "
            "give one for each token or for each sampled one"
        )
    given = iter(logprobs)
    return tuple(float(next(given)) if each else 0.0 for each in mask)


@dataclass(frozen=True, slots=True)
class Row:
    """One trainable sequence; every stream has `len(tokens)` entries, entry i belonging to token i.

    `Row("train.jsonl:12", tokens=[1, 50, 51, 2], mask=[0, 0, 1, 1])`: the model is trained on 51 and 2. The first
    token of a row is never trained: it has no context.
    """

    id: str
    tokens: IntArray
    mask: BoolArray
    sequence: str = ""  # rows of one rollout share it and count as one sequence; "" means the row's own id
    streams: Mapping[str, FloatArray] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    media: tuple[Media, ...] = ()  # rows share a prompt's forward pass only if tokens and media are equal
    media_spans: tuple[tuple[int, int], ...] = ()  # first token and end of each, where a row may be truncated
    allowed_tokens: tuple[int, ...] = ()  # log-probs and statistics are over these alone; (): the whole vocabulary

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
        if self.allowed_tokens:
            trained = self.tokens[self.mask]
            if len(others := trained[~np.isin(trained, self.allowed_tokens)]):
                raise ValueError(f"row {self.id}: its trained token {others[0]} is not one of allowed_tokens")

    def __len__(self) -> int:
        return len(self.tokens)


Item: TypeAlias = tuple[Row, ...]
"""Rows that stay together and in order: `(row,)` for SFT, `(chosen, rejected)` for preferences."""


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
    media: tuple[tuple[Media, ...], ...] = ()  # of each row; (): no row has any
    allowed_tokens: tuple[tuple[int, ...], ...] = ()  # of each row; (): no row has any

    @property
    def num_rows(self) -> int:
        return len(self.borders) - 1

    @property
    def num_tokens(self) -> int:
        return self.borders[-1]


class Outputs(NamedTuple):
    """Results of one forward pass over a batch, all `[T]`, read at the hidden state *before* each token.

    Untrained tokens hold 0. `statistics` has those that the algorithm names in `reads`; `value` and `score` are set
    if the model has that head. A tuple, because sharding libraries search a module's return value for tensors.
    """

    logprob: Tensor
    statistics: Mapping[str, Tensor] = {}
    value: Tensor | None = None  # [T]
    last_value: Tensor | None = None  # [R], after the last token of each row
    score: Tensor | None = None  # [R], read at the last token of each row


class Read(NamedTuple):
    """A statistic of the forward pass: `Read(entropy)`; `Read(forward_kl, of="teacher")` gets the teacher's logits."""

    statistic: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    of: str | None = None


Unit: TypeAlias = Literal["token", "chosen_token", "sequence", "pair", "constant", "largest"]
Counts: TypeAlias = Mapping[Unit, float]
"""Count of each unit in a complete step: `{"token": 512, "sequence": 8, "pair": 4, "constant": 1, ...}`.

A metric of the unit "largest" is not a sum: the maximum over all parts is reported.
"""


class Term(NamedTuple):
    """A sum and its unit; divided once, by the count of that unit in the complete step."""

    total: Tensor
    unit: Unit


class Losses(NamedTuple):
    """`Losses({"nll": Term(-logprob.sum(), "token")}, {"accuracy": Term(correct.sum(), "token")})`."""

    terms: Mapping[str, Term]
    metrics: Mapping[str, Term] = {}


def merge_metrics(parts: Sequence[Mapping[str, Term]], counts: Counts) -> dict[str, float]:
    """Return each metric over all parts of a step: its sum divided by the count of its unit, or the maximum."""
    merged: dict[str, float] = {}
    for metrics in parts:
        for name, (total, unit) in metrics.items():
            if unit == "largest":
                merged[name] = max(merged.get(name, 0.0), float(total))
            else:
                merged[name] = merged.get(name, 0.0) + float(total) / counts[unit]
    return merged


class TrainingState(NamedTuple):
    """State for a resume besides weights and optimizer: `TrainingState(step=40, version=40, cursor={...})`."""

    step: int = 0
    version: int = 0
    seed: int = 0
    cursor: Mapping[str, Any] = {}


class Episode(NamedTuple):
    """Result of an environment: the turns, a score if the environment computes one, and metadata.

    `prompt_messages` are those before the first turn, if they are not the sample's: with the first observation.
    """

    turns: tuple[Turn, ...]
    score: Score | None = None
    metadata: Mapping[str, Any] = {}
    prompt_messages: tuple[Message, ...] = ()


class PolicyClient(Protocol):
    """The policy, as the environment of one rollout uses it."""

    @property
    def render(self) -> Render: ...

    async def generate(
        self, prompt_ids: Sequence[int], *, media: Sequence[Media] | None = None, allowed_tokens: Sequence[int] = ()
    ) -> Generation:
        """Generate from these tokens. If the generation was aborted, end the episode and return the turns so far.

        `media` are those of the prompt, in order, if they are not the sample's. With `allowed_tokens`, only these are
        sampled, and log-probs are over them alone.
        """
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
        media: Sequence[Media] = (),
    ) -> list[Row]: ...

    def text(self, text: str, *, id: str, media: Sequence[Media] = ()) -> list[Row]: ...

    def prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), media: Sequence[Media] = ()
    ) -> IntArray: ...


AssembleFn: TypeAlias = Callable[[Sample, Render], list[Item]]
RolloutItemsFn: TypeAlias = Callable[[Sequence[Rollout], Render], list[Item]]
RewardFn: TypeAlias = Callable[[Rollout], Any]
"""Rollout -> float or `Score`; sync or async."""
GroupRewardFn: TypeAlias = Callable[[Sequence[Rollout]], Any]
"""All completions of one prompt -> one float or `Score` each; sync or async."""
FilterFn: TypeAlias = Callable[[Sequence[Rollout]], Any]
"""All completions of one prompt -> whether to train on them; sync or async."""
ArrangeFn: TypeAlias = Callable[[list[Item]], list[Item]]
Memory: TypeAlias = dict[str, float]
CreditFn: TypeAlias = Callable[[list[Item], Memory], list[Item]]
LossFn: TypeAlias = Callable[[Outputs, Batch], Losses]


def no_credit(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - one signature for all
    """Return the items unchanged, for algorithms without credit assignment."""
    return items


class Online(NamedTuple):
    """How an algorithm trains on its own rollouts: `Online(group_of_rollouts, greedy=True)` for ReMax."""

    items: RolloutItemsFn  # the scored completions of one prompt -> items
    greedy: bool = False  # one more completion per prompt at temperature 0, as a baseline
    needs_variance: bool = False  # groups whose rewards are all equal are replaced by new prompts
    reuses: bool = True  # the loss has a ratio, so that a batch can be used for several optimizer steps
    min_group_size: int = 2  # completions per prompt that the algorithm needs for a comparison
    reward_source: Literal["reward", "reward model", "judge"] | None = "reward"  # None: rewards are not used


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`algorithm("dpo", beta=0.2)`: how rows are built and the loss of a forward pass over them.

    A step is: `arrange` (may add rows), a pass for each of `needs` ("policy", "ref", "teacher"; its log-probs are added
    to the rows as `ref_logprob`, a value head's output as `value`), `credit` over all rows of the step, then `loss` per
    micro-batch. The need "sampler" is a policy pass for rows whose sampler log-probs are not known yet. `memory` holds
    running means: it is part of the checkpoint, and evaluation uses a copy.
    """

    name: str
    assemble: AssembleFn
    loss: LossFn
    needs: tuple[str, ...] = ()
    reads: Mapping[str, Read] = field(default_factory=dict)
    arrange: ArrangeFn = list
    credit: CreditFn = no_credit
    heads: tuple[str, ...] = ()  # "value", "score"
    eval_metric: str | None = "loss"  # evaluation metric that is better when lower; None: there is none
    parameters: Mapping[str, Any] = field(default_factory=dict)
    online: Online | None = None  # None: it trains on files only
    source: str = ""  # name or import path given to `algorithm`, for rebuilding it in other processes
    built: tuple[Any, ...] = field(default=(), repr=False, compare=False)  # `worker_parts` as `algorithm` built them

    @property
    def worker_parts(self) -> tuple[Any, ...]:
        """What a worker process uses of it."""
        return self.name, self.loss, self.needs, self.reads, self.parameters

    @property
    def others(self) -> set[str]:
        """Models needed besides the policy: `{"ref"}`."""
        return {*self.needs, *(read.of for read in self.reads.values() if read.of)} - {"policy", "sampler"}

    @property
    def compares_logprobs(self) -> bool:
        """Whether the loss compares log-probs of several passes; dropout would distort that comparison."""
        return bool(self.needs or self.others)


class TrainFuture(Generic[T]):
    """Result of a submitted call: `metrics = await backend.optim_step()`, under asyncio and trio.

    A backend that works elsewhere creates one and calls `set_result` or `set_exception` later, from any thread.
    """

    def __init__(self) -> None:
        self._outcome: Future[T] = Future()

    def set_result(self, value: T) -> None:
        self._outcome.set_result(value)

    def set_exception(self, error: BaseException) -> None:
        self._outcome.set_exception(error)

    def done(self) -> bool:
        return self._outcome.done()

    def __await__(self) -> collections.abc.Generator[Any, Any, T]:
        return self.result().__await__()

    async def result(self) -> T:
        from oxrl.concurrency import in_thread

        return self._outcome.result() if self._outcome.done() else await in_thread(self._outcome.result)


class ImmediateTrainFuture(TrainFuture[T]):
    """`await ImmediateTrainFuture(3) == 3`: a future that is already done."""

    def __init__(self, value: T) -> None:
        super().__init__()
        self.value = value
        self.set_result(value)


class Rendezvous(NamedTuple):
    """`Rendezvous("10.0.0.1", 40123, 3, "gloo", 600.0)`: process group through which weights are broadcast.

    `size` counts the sender and every worker of every engine; `backend` is gloo (over TCP) or nccl (between GPUs);
    `time_limit` is in seconds, for joining the group and for each bucket.
    """

    host: str
    port: int
    size: int
    backend: str
    time_limit: float


class WeightSource(Protocol):
    """Access to the weights of one version, local or remote, for the engines that sample from them.

    Names are those of a plain checkpoint (`oxrl.weights`); an adapter is merged. Calls block, so that they are made in
    a thread. If the weights were updated since, a call raises instead of returning another version.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def adapted(self) -> bool:
        """Whether the model has an adapter, which `write_adapter` needs."""
        ...

    def write(self, folder: Path) -> None:
        """Write files that an engine loads: `config.json` and safetensors, with an index if there are several."""
        ...

    def write_base(self, folder: Path) -> None:
        """Write the same files for the base model, without its adapter; training does not change it."""
        ...

    def write_adapter(self, folder: Path) -> None:
        """Write the adapter alone, in the format of PEFT."""
        ...

    def send(self, rendezvous: Rendezvous) -> None:
        """Broadcast the weights to the engines' workers, which receive concurrently; no files are written."""
        ...

    def logprobs(self, tokens: Sequence[int], media: Sequence[Media] = ()) -> tuple[float, ...]:
        """Return the trainer's log-prob of each token but the first, at temperature 1."""
        ...


class Weights(NamedTuple):
    """Handle to weights of one version: `Weights(model, 3)` holds the module of a trainer in this process.

    If they are sharded over ranks or in another process, `module` is None and `source` gives access to them.
    `oxrl.weights.checkpoint_names.source_of` returns the same interface for both.
    """

    module: Any
    version: int
    source: WeightSource | None = None


Layout: TypeAlias = Literal["shared", "packed", "padded"]
"""Rows are packed with common prompts computed once ("shared") or per row ("packed"), or batched with padding."""


class Backend(Protocol):
    """A model and its optimizer. Every call returns a future; the calls of one step run in order."""

    def logprobs(
        self, batches: Sequence[Batch], which: str = "policy", reads: Mapping[str, Read] = ...
    ) -> TrainFuture[list[Outputs]]: ...

    def forward_backward(
        self, batches: Sequence[Batch], algorithm: Algorithm, counts: Counts
    ) -> TrainFuture[dict[str, float]]: ...

    def optim_step(self) -> TrainFuture[dict[str, float]]: ...

    def get_weights(self) -> TrainFuture[Weights]:
        """Return a handle; nothing is copied until it is used."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]: ...

    def update_reference(self, decay: float) -> TrainFuture[None]:
        """Set the reference to `decay` * reference + (1 - `decay`) * policy."""
        ...

    def save(self, path: Path) -> TrainFuture[None]: ...

    def load(self, path: Path) -> TrainFuture[None]: ...

    @property
    def layout(self) -> Layout:
        """How rows are run, which determines the cost of a micro-batch."""
        ...

    @property
    def parallel(self) -> int:
        """Number of micro-batches that run in parallel; a step with fewer leaves a worker idle."""
        ...


TrainingBackend: TypeAlias = Backend


class Generator(Protocol):
    """Samples from a model: token ids in, token ids and log-probs out. Sampled tokens are never re-tokenised."""

    @property
    def version(self) -> int:
        """Version of the weights that it samples from."""
        ...

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        """Return one generation per request, in order. Concurrent calls share the engine."""
        ...

    async def abort(self) -> None:
        """Make all in-flight requests return their partial generations, with finish reason "aborted"."""
        ...

    async def update_weights(self, weights: Weights) -> None:
        """Sample from these weights from now on; returns when the new version is loaded."""
        ...

    async def close(self) -> None: ...


class SleepingGenerator(Generator, Protocol):
    """A generator on the trainer's devices that can release their memory; the next call wakes it."""

    async def sleep(self) -> None:
        """Release device memory. No request is in flight; weights are kept in host memory or sent again."""
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

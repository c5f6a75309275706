"""Actions of an environment to the token ids of an answer, and back.

Continuous actions are bins on the last ids of the vocabulary (`ActionTokens`), discrete ones words (`ActionWords`). A
codec has no state: each method gets the tokenizer. What ends an answer is the chat template's: see `Renderer`, which
renders the actions of a message and knows which tokens an answer may have. Nothing is sampled or trained here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from oxrl.names import did_you_mean
from oxrl.types import FloatArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_BINS = 1024
MAX_CHUNK = 256  # actions in one answer


class UndecodableAction(ValueError):  # noqa: N818 - what an answer is, not a failure
    """`That is no action: it has 1 of 4 action tokens.`: the text is the reply to the model."""


@dataclass(frozen=True, slots=True)
class ActionTokens:
    """`ActionTokens(low=[-1, -1], high=[1, 1], bins=64, chunk=2)`: answers of four tokens, two actions of two numbers.

    Each number has one token: its interval of `[low, high]`, cut into `bins` equal ones. The first interval is the last
    id of the vocabulary that is no special token, the second the one before it, as in OpenVLA. The length of `low` and
    `high` is that of an action; a number stands for actions of length 1.
    """

    low: Sequence[float] | float
    high: Sequence[float] | float
    bins: int = 256
    chunk: int = 1  # actions in one answer

    def __post_init__(self) -> None:
        low, high = _numbers("low", self.low), _numbers("high", self.high)
        if len(low) != len(high):
            raise ValueError(f"actions: low has {len(low)} numbers and high {len(high)}; give one for each dimension")
        if wrong := next((pair for pair in zip(low, high, strict=True) if not pair[0] < pair[1]), None):
            raise ValueError(f"actions: low {wrong[0]:g} is not below high {wrong[1]:g}")
        for name, value, most in (("bins", self.bins, MAX_BINS), ("chunk", self.chunk, MAX_CHUNK)):
            least = 2 if name == "bins" else 1
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"actions: {name} is {value!r:.50}; give a whole number from {least} to {most}")
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    @property
    def size(self) -> int:
        """Numbers of an action."""
        return len(self._bounds[0])

    @property
    def _bounds(self) -> tuple[FloatArray, FloatArray]:
        return np.asarray(self.low, dtype=np.float32), np.asarray(self.high, dtype=np.float32)

    def most_tokens(self, tokenizer: PreTrainedTokenizerBase | None = None) -> int:  # noqa: ARG002 - as for words
        """Tokens of an answer, without the end of the turn."""
        return self.chunk * self.size

    def token_ids(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """The token of each interval, from `low` on."""
        return _last_ids(tokenizer, self.bins)

    def encode(self, actions: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Tokens of `chunk` actions; numbers outside of the bounds count as the nearest bound."""
        given = np.asarray(actions, dtype=np.float32)
        if given.size != self.chunk * self.size:
            raise ValueError(f"an answer has {self.chunk} actions of {self.size} numbers, not {given.size} numbers")
        if not np.isfinite(given).all():
            raise ValueError("an action has a number that is not finite")
        (low, high), ids = self._bounds, self.token_ids(tokenizer)
        share = (given.reshape(self.chunk, self.size) - low) / (high - low)
        index = np.clip((share * self.bins).astype(np.int64), 0, self.bins - 1)
        return tuple(ids[each] for each in index.ravel().tolist())

    def out_of_bounds(self, actions: Any) -> bool:
        """Whether a number is outside of the bounds, by more than rounding."""
        given, (low, high) = np.asarray(actions, dtype=np.float32).reshape(-1, self.size), self._bounds
        rounding = 1e-5 * (high - low)
        return bool(((given < low - rounding) | (given > high + rounding)).any())

    def decode(self, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> FloatArray:
        """`[chunk, size]`: the middle of each interval. The end of the turn and what follows is not read.

        `UndecodableAction` if there are more or fewer tokens of actions, or others between them.
        """
        number_of = {token: index for index, token in enumerate(self.token_ids(tokenizer))}
        answer = _before_the_end(token_ids, tokenizer)
        known, wanted = sum(token in number_of for token in answer), self.chunk * self.size
        if len(answer) != wanted or known != wanted:
            others = f" and {len(answer) - known} others" if len(answer) > known else ""
            raise UndecodableAction(f"That is no action: it has {known} action tokens{others}, not {wanted}.")
        low, high = self._bounds
        index = np.array([number_of[token] for token in answer], dtype=np.float32).reshape(self.chunk, self.size)
        return (low + (index + 0.5) / self.bins * (high - low)).astype(np.float32)

    def text(self, actions: Any) -> str:
        """`"0.25 -0.5; 0.1 0"`: for people, never tokenised."""
        rows = np.asarray(actions, dtype=np.float32).reshape(-1, self.size)
        return "; ".join(" ".join(f"{value:.3g}" for value in row) for row in rows.tolist())


@dataclass(frozen=True, slots=True)
class ActionWords:
    """`ActionWords(["left", "right"])`: an answer is one of these words; actions are their numbers, from 0.

    Only the tokens of the words may be sampled. Words of one token each can never be misspelt.
    """

    words: Sequence[str]

    chunk = 1

    def __post_init__(self) -> None:
        words = self.words
        if isinstance(words, str) or not isinstance(words, Sequence) or len(words) < 2:
            raise ValueError(f"actions: words is {words!r:.100}; give a list of two or more words")
        words = tuple(str(word).strip() for word in words)
        if "" in words or len(set(words)) < len(words):
            raise ValueError(f"actions: words has a word twice or an empty one: {', '.join(words):.200}")
        object.__setattr__(self, "words", words)

    def most_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of the longest word, without the end of the turn."""
        return max(map(len, _ids_of_words(tokenizer, tuple(self.words))))

    def token_ids(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """All tokens of all words, ascending."""
        return tuple(sorted({token for ids in _ids_of_words(tokenizer, tuple(self.words)) for token in ids}))

    def encode(self, actions: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Tokens of one word, given as its number or as the word."""
        given = np.asarray(actions).ravel()
        if given.size != 1:
            raise ValueError(f"an answer has one action, not {given.size}")
        (action,) = given.tolist()
        index = self.words.index(action) if action in self.words else action
        if isinstance(index, bool) or index not in range(len(self.words)):
            raise ValueError(f"{action!r:.50} is no action: there are {', '.join(self.words)}")
        return _ids_of_words(tokenizer, tuple(self.words))[int(index)]

    def decode(self, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """`[1]`: the number of the word. `UndecodableAction` if the answer is none of them."""
        answer = tuple(_before_the_end(token_ids, tokenizer))
        known = _ids_of_words(tokenizer, tuple(self.words))
        if answer in known:
            return [known.index(answer)]
        text = str(tokenizer.decode(list(answer), skip_special_tokens=True)).strip()
        if text in self.words:
            return [self.words.index(text)]
        raise UndecodableAction(f"That is no action. Answer with one of: {', '.join(self.words)}.")

    def text(self, actions: Any) -> str:
        (action,) = np.asarray(actions).ravel().tolist()
        return str(action) if action in self.words else self.words[int(action)]


ActionCodec: TypeAlias = ActionTokens | ActionWords


def action_codec(actions: Any) -> ActionCodec | None:
    """The codec that a config names: `{low: [-1, -1], high: [1, 1], bins: 64, chunk: 2}` or `{words: [left, right]}`.

    None without one: nothing is given, or a list of words that are read from free text.
    """
    if not isinstance(actions, Mapping):
        return None
    known = ("words",) if "words" in actions else ("low", "high", "bins", "chunk")
    if unknown := [key for key in actions if key not in known]:
        raise ValueError(
            f"actions has no {unknown[0]!r:.50}{did_you_mean(str(unknown[0]), known)}: it has low, high, bins and "
            "chunk, or words alone"
        )
    if missing := [key for key in ("low", "high") if key in known and key not in actions]:
        raise ValueError(f"actions needs {missing[0]}: the bounds of each number of an action, or words")
    return ActionWords(**actions) if "words" in actions else ActionTokens(**actions)


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    given = value if isinstance(value, list | tuple | np.ndarray) else [value]
    numbers = [each for each in given if isinstance(each, int | float | np.number) and not isinstance(each, bool)]
    if not numbers or len(numbers) < len(given) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"actions: {name} is {value!r:.100}; give a number, or a list of one for each dimension")
    return tuple(map(float, numbers))


@lru_cache(maxsize=16)
def _last_ids(tokenizer: PreTrainedTokenizerBase, count: int) -> tuple[int, ...]:
    """The last ids of the vocabulary without special and added tokens, descending."""
    taken = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    ids = [token for token in range(tokenizer.vocab_size - 1, -1, -1) if token not in taken]
    if len(ids) < count:
        raise ValueError(f"actions: bins is {count}, and the vocabulary has {len(ids)} tokens: lower it")
    return tuple(ids[:count])


@lru_cache(maxsize=16)
def _ids_of_words(tokenizer: PreTrainedTokenizerBase, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word after a special token, as at the beginning of an answer."""
    before = tokenizer.eos_token or ""
    start = len(tokenizer(before, add_special_tokens=False)["input_ids"])
    return tuple(tuple(tokenizer(before + word, add_special_tokens=False)["input_ids"][start:]) for word in words)


def _before_the_end(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    special = set(tokenizer.all_special_ids)
    end = next((index for index, token in enumerate(token_ids) if token in special), len(token_ids))
    return list(token_ids[:end])

"""Render chats and text as rows: token ids and a mask over the tokens that the model has to generate.

Works with any chat template, by comparing its output with and without each assistant turn. If the assistant's tokens
cannot be determined that way, the conversation is refused with the reason. Images and audio become the tokens that the
model's processor makes of them, which are never trained. Rows are not truncated here (see `fit`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from oxrl.data.actions import ActionCodec
from oxrl.data.parts import checked_content, take_media
from oxrl.data.processor import MediaProcessor, processor_of
from oxrl.data.template import EndlessTemplateError, TemplateError, apply_template
from oxrl.types import BoolArray, IntArray, Media, Message, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat: TypeAlias = Sequence[Mapping[str, Any]]
Tools: TypeAlias = Sequence[Mapping[str, Any]]

_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = ("tool_calls", "function_call")
_SENTINEL = "Xq7sentinelXq7"
_OPENED = re.compile(r"<(\w+)>\s*(?:</\1>\s*)?$")  # an empty block is written where reasoning is switched off
_TAG = re.compile(r"(</?\w++>)")
_MAX_OPENED = 16  # tokens
_MAX_SHAPES = 8  # templates have one or two; a bound for templates whose output differs every time


class _Shape(NamedTuple):
    """The template's output around an assistant's content: `_Shape("", "<|im_end|>\\n", "<|im_end|>", 10)`."""

    before: str
    after: str
    end: str  # the end-of-turn token
    end_at: int  # where that token ends in `after`


class _Turn(NamedTuple):
    """`_Turn("<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n", "Hello<|im_end|>", "<|im_end|>")`."""

    prompt: str
    completion: str  # ends with the end-of-turn token
    end: str


@dataclass(frozen=True, eq=False)
class Renderer:
    """`Renderer(tokenizer).conversation(messages, id="train.jsonl:12")`: the `Render` protocol for one tokenizer.

    Media are read by the tokenizer's processor, which `load_tokenizer` finds, or by the one given here. With `actions`,
    an answer that is given as actions, `Message("assistant", "", {"actions": [[0.5, -1.0]]})`, becomes their tokens.
    """

    tokenizer: PreTrainedTokenizerBase
    max_len: int | None = None  # for `text` only, which is split; conversations are never cut here
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    processor: MediaProcessor | None = None
    actions: ActionCodec | None = None
    _shapes: list[_Shape] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_len is not None and self.max_len < 3:
            raise ValueError(f"max_len is {self.max_len}, but a row needs at least 3 tokens; give a larger max_len")

    def conversation(
        self,
        messages: Sequence[Message],
        *,
        id: str,
        first_trained: int = 0,
        tools: Tools = (),
        media: Sequence[Media] = (),
    ) -> list[Row]:
        """Return one row with most templates; several if the template rewrites earlier turns once later ones follow.

        `media` are in the order of their parts in the messages; without such parts they belong to the first user.
        """
        if messages and "actions" in messages[-1].extra:
            return [self._action_row(messages, tools, media, id)]
        trained = [i for i, message in enumerate(messages) if message.role == "assistant" and i >= first_trained]
        if not trained:
            roles = ", ".join(message.role for message in messages[first_trained:]) or "none"
            raise ValueError(f"{id}: there is no assistant turn to train on (roles: {roles}); add one or remove it")
        chat, media = self._chat(messages, tools, id, media)
        rows: list[list[_Turn]] = []
        text = ""
        for i in trained:
            try:
                turn = self._turn(chat[: i + 1], tools)
            except EndlessTemplateError:
                raise
            except TemplateError as error:
                raise TemplateError(f"{id}, message {i}: {error}") from error
            if rows and turn.prompt.startswith(text):
                rows[-1].append(turn._replace(prompt=turn.prompt[len(text) :]))
            else:
                rows.append([turn])
            text = turn.prompt + turn.completion
        return [self._row(turns, name, id, media) for turns, name in zip(rows, _names(id, len(rows)), strict=True)]

    def text(self, text: str, *, id: str, media: Sequence[Media] = ()) -> list[Row]:
        """Return rows of plain text. The text of a special token is tokenized as that token, as in pre-training.

        With `media`, each stands at an `<image>` or `<audio>` of the text; a text with media is not split.
        """
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if eos is None:
            raise ValueError(f"{id}: the tokenizer has no eos_token to end a text with; set tokenizer.eos_token")
        _check_encoding(text, id)
        ids = self._expanded_ids(self._with_placeholders(text) if media else text, media, id)
        if not set(ids) - {bos, eos}:
            raise ValueError(f"{id}: the text is empty; remove the row")
        if self._adds_bos and ids[:1] != [bos]:
            ids = [bos, *ids]
        if ids[-1:] != [eos]:
            ids = [*ids, eos]
        if media:
            mask = self._is_text(ids) & (np.arange(len(ids)) > 0)
            return [Row(id, np.array(ids), mask, id, media=tuple(media), media_spans=self.spans(ids, media, id))]
        pieces = _split(ids, self.max_len or len(ids))
        return [
            Row(name, np.array(piece), np.arange(len(piece)) > 0, sequence=id)
            for piece, name in zip(pieces, _names(id, len(pieces)), strict=True)
        ]

    def prompt(self, messages: Sequence[Message], *, tools: Tools = (), media: Sequence[Media] = ()) -> IntArray:
        """Return the prompt ids from which a generator samples the next assistant turn."""
        chat, media = self._chat(messages, tools, "prompt", media)
        text = self._write(chat, tools, generation_prompt=True)
        return np.array(self._expanded_ids(text, media, "prompt"), dtype=np.int64)

    @cached_property
    def placeholder_ids(self) -> frozenset[int]:
        """Ids at which images or audio stand; none for a model of text."""
        processor = self.processor if self.processor is not None else processor_of(self.tokenizer)
        return frozenset() if processor is None else processor.placeholder_ids

    @cached_property
    def allowed_tokens(self) -> tuple[int, ...]:
        """Ids that an answer may have: those of the actions and the end of a turn, ascending; () without actions."""
        return (
            () if self.actions is None else tuple(sorted({*self.actions.token_ids(self.tokenizer), self.end_token_id}))
        )

    @cached_property
    def end_token_id(self) -> int:
        """The token with which the chat template ends an assistant's turn."""
        chat = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Yes."}]
        return self._id(self._turn(chat, ()).end)

    def opened(self, prompt_ids: Sequence[int]) -> str:
        """Return what a prompt already has of the response: `"<think>\\n"` with some reasoning models, or `""`."""
        tail = self._special.split(self._decode(list(prompt_ids[-_MAX_OPENED:])))[-1]
        found = _OPENED.search(tail)
        return found[0] if found else ""

    def as_sampled(self, text: str) -> str:
        """Return the text as it is read back from a sampled completion: through tokens, without special ones."""
        return str(self.tokenizer.decode(self._ids(text), skip_special_tokens=True))

    def _action_row(self, messages: Sequence[Message], tools: Tools, media: Sequence[Media], id: str) -> Row:
        """The last message, of actions, is trained, in the context of those before it."""
        if self.actions is None:
            raise ValueError(
                f"{id}: the answer is of actions, and nothing says which tokens they have: set data.actions, such as "
                "{low: [-1, -1], high: [1, 1]}, or pass Renderer(tokenizer, actions=ActionTokens(...))"
            )
        chat, media = self._chat(messages[:-1], tools, id, media)
        text = self._write(chat, tools, generation_prompt=True)
        prompt = self._expanded_ids(text, media, id)
        try:
            answer = (*self.actions.encode(messages[-1].extra["actions"], self.tokenizer), self.end_token_id)
        except ValueError as error:
            raise ValueError(f"{id}: {error}") from error
        ids = [*prompt, *answer]
        mask = np.arange(len(ids)) >= len(prompt)
        spans, allowed = self.spans(ids, media, id), self.allowed_tokens
        return Row(id, np.array(ids), mask, id, media=tuple(media), media_spans=spans, allowed_tokens=allowed)

    def _turn(self, chat: Chat, tools: Tools) -> _Turn:
        """Return the prompt before the last message of `chat`, and the assistant's completion."""
        if len(chat) == 1:
            raise TemplateError(
                "the conversation begins with the assistant, so there is no prompt; put a system or user message "
                "first, or train from a later turn on"
            )
        prompt = self._write(chat[:-1], tools, generation_prompt=True)
        full = self._write(chat, tools, generation_prompt=False)
        if not prompt or not full.startswith(prompt):
            raise TemplateError(_prefix_mismatch(prompt, full))
        answer, message = full[len(prompt) :], chat[-1]
        shape = self._known_shape(answer, message)
        if shape is None:
            shape = self._probe_shape(chat, tools, prompt)
            end, end_at = self._end_of_turn(answer, shape, calls=any(message.get(key) for key in _CALLS))
            _check_preserved(message, prompt, answer[: end_at - len(end)])
            if shape not in self._shapes and len(self._shapes) < _MAX_SHAPES:
                self._shapes.append(shape)
        else:
            end, end_at = self._end_of_turn(answer, shape, calls=False)
        return _Turn(prompt, answer[:end_at], end)

    def _known_shape(self, answer: str, message: Mapping[str, Any]) -> _Shape | None:
        """Return the cached shape that reproduces `answer` exactly from the message's content, if there is one."""
        if any(message.get(key) for key in (*_REASONING, *_CALLS)):
            return None
        content = message["content"]
        for shape in self._shapes:
            before = "" if _opening_tag(message) else shape.before
            for completion in (content, content.strip(), before + content, before + content.strip()):
                if answer == completion + shape.after:
                    return shape
        return None

    def _probe_shape(self, chat: Chat, tools: Tools, prompt: str) -> _Shape:
        """Render a sentinel as the assistant's content, to find where the content begins and ends."""
        sentinel = _SENTINEL
        while any(sentinel in text for text in _strings([chat, tools])):
            sentinel += "X"
        kept = {key: value for key, value in chat[-1].items() if key not in (*_REASONING, *_CALLS)}
        probe = [*chat[:-1], {**kept, "content": sentinel}]
        text = self._write(probe, tools, generation_prompt=False)
        if text.count(sentinel) != 1:
            raise TemplateError(
                f"the chat template writes an assistant's content {text.count(sentinel)} times instead of once; use a "
                "template that writes it once and unchanged"
            )
        before, _, after = text.partition(sentinel)
        before = before.removeprefix(prompt) if before.startswith(prompt) else ""
        if before.strip() and prompt == self._write(chat[:-1], tools, generation_prompt=False):
            raise TemplateError(
                f"the chat template ignores add_generation_prompt, so the model would have to generate "
                f"{_short(before)} itself; let the template write it when add_generation_prompt is set"
            )
        end = self._end_token(after, probe, tools, sentinel)
        return _Shape(before, after, end.group(), end.end())

    def _end_token(self, after: str, probe: Chat, tools: Tools, sentinel: str) -> re.Match[str]:
        """Return the special token in `after` that ends the turn.

        If there are several, a token that disappears when another message follows ends the conversation, not the turn
        (Phi). Of the remaining ones it is the end-of-sequence token, or else the last (Cohere).
        """
        ends = list(self._special.finditer(after))
        if not ends:
            raise TemplateError(
                "the chat template ends an assistant turn without a special token, so the model would not learn to "
                "stop; let the template write eos_token after each assistant turn"
            )
        if len(ends) == 1:
            return ends[0]
        next_message = {"role": "user", "content": "Go on."}
        continued = self._write([*probe, next_message], tools, generation_prompt=False).partition(sentinel)[2]
        kept = [end for end in ends if continued.startswith(after[: end.end()])] or ends[:1]
        return next((end for end in kept if end.group() == self.tokenizer.eos_token), kept[-1])

    def _end_of_turn(self, answer: str, shape: _Shape, *, calls: bool) -> tuple[str, int]:
        """Return the end-of-turn token, and where it ends in `answer`."""
        if answer.endswith(shape.after):
            return shape.end, len(answer) - len(shape.after) + shape.end_at
        if calls:  # some templates end a tool call with a different token
            *_, last = [None, *self._special.finditer(answer)]
            if last and not answer[last.end() :].strip():
                return last.group(), last.end()
        raise TemplateError(
            f"cannot find the end of the turn: the chat template usually ends a turn with {_short(shape.after)}, but "
            f"this one with {_short(answer[-40:])}; use a template that ends every assistant turn the same way"
        )

    def _write(self, chat: Chat, tools: Tools, *, generation_prompt: bool) -> str:
        if self.tokenizer.chat_template is None and "chat_template" not in self.template_kwargs:
            raise ValueError(
                "the tokenizer has no chat template: use an instruct model, set model.chat_template (chatml, plain, "
                "...), or train on `text` instead of messages"
            )
        if self._takes_parts:
            chat = [
                {
                    **message,
                    "content": _text_parts(content) if isinstance(content := message["content"], str) else content,
                }
                for message in chat
            ]
        return self._apply_template(chat, tools, generation_prompt)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes content only if it is a list of parts, as those of some multimodal models do."""

        def is_written(content: str | list[dict[str, str]]) -> bool:
            try:
                return _SENTINEL in self._apply_template([{"role": "user", "content": content}], (), True)
            except EndlessTemplateError:
                raise
            except TemplateError:
                return False

        return not is_written(_SENTINEL) and is_written(_text_parts(_SENTINEL))

    def _apply_template(self, chat: Chat, tools: Tools, generation_prompt: bool) -> str:
        kwargs = self.template_kwargs
        return apply_template(self.tokenizer, chat, tools, generation_prompt=generation_prompt, **kwargs)

    def _row(self, turns: Sequence[_Turn], name: str, sequence: str, media: Sequence[Media]) -> Row:
        ids: list[int] = []
        mask: list[bool] = []
        previous_end = ""
        used = 0
        for turn in turns:
            own = media[used : used + self._placed(turn.prompt)] if media else ()
            used += len(own)
            try:
                expanded = turn._replace(prompt=self.expanded(turn.prompt, own, name))
                prompt_ids, completion_ids = self._turn_ids(previous_end, expanded)
            except TemplateError as error:
                raise TemplateError(f"{name}: {error}") from error
            ids += prompt_ids + completion_ids
            mask += [False] * len(prompt_ids) + [True] * len(completion_ids)
            previous_end = turn.end
        row = Row(name, np.array(ids), np.array(mask), sequence=sequence)
        if not media:
            return row
        row = replace(row, media=tuple(media[:used]), media_spans=self.spans(ids, media[:used], name))
        if (row.mask & ~self._is_text(ids)).any():
            raise TemplateError(f"{name}: a reply has a placeholder of an image or of audio, which is never trained")
        return row

    def _turn_ids(self, previous_end: str, turn: _Turn) -> tuple[list[int], list[int]]:
        """Return prompt ids and completion ids, tokenized separately, as in sampling.

        Special tokens separate the text around them, so a turn can be tokenized alone. It is tokenized after
        `previous_end`, the special token before it, since many tokenizers treat the beginning of a text differently.
        """
        prompt_ids = self._ids(previous_end + turn.prompt)
        both = self._ids(previous_end + turn.prompt + turn.completion)
        completion_ids = both[len(prompt_ids) :]
        if both[: len(prompt_ids)] != prompt_ids or not self._round_trips(completion_ids, turn, padded=True):
            # A token spans prompt and completion, which sampling after the prompt cannot produce.
            completion_ids = self._ids(turn.end + turn.completion)[1:]
            if not self._round_trips(completion_ids, turn, padded=False):
                raise TemplateError(
                    f"the tokenizer cannot encode {_short(turn.completion)} after {_short(turn.prompt[-40:])}: it "
                    f"decodes to {_short(self._decode(completion_ids))}; change how the answer begins, or remove "
                    "characters that are not in the vocabulary"
                )
        if previous_end:
            prompt_ids = prompt_ids[prompt_ids.index(self._id(previous_end)) + 1 :]
        return prompt_ids, completion_ids

    def _round_trips(self, completion_ids: list[int], turn: _Turn, *, padded: bool) -> bool:
        """Return whether these ids decode to the completion, up to Unicode normalization by the tokenizer.

        `padded` allows the one space that SentencePiece-like tokenizers insert after an added token.
        """
        end = self._id(turn.end)
        if completion_ids[-1:] != [end]:
            return False
        # Decoded after a special token, because decoders drop a space at the beginning.
        decoded = self._added.split(self._decode([end, *completion_ids]))
        expected = self._added.split(turn.end + turn.completion)
        return len(decoded) == len(expected) and all(
            _nfkc(d) == _nfkc(e) or (padded and _nfkc(d) == " " + _nfkc(e))
            for d, e in zip(decoded, expected, strict=True)
        )

    def _chat(
        self, messages: Sequence[Message], tools: Tools, id: str, media: Sequence[Media]
    ) -> tuple[list[dict[str, Any]], tuple[Media, ...]]:
        """Return the messages as templates take them and their media; refuse what cannot be trained on."""
        checked: list[Message] = []
        for i, message in enumerate(messages):
            try:
                checked.append(message._replace(content=checked_content(message.content)))
            except ValueError as error:
                raise ValueError(f"{id}: message {i} ({message.role}) {error}") from None
        try:
            placed, found = take_media(checked, media)
        except ValueError as error:
            raise ValueError(f"{id}: {error}") from None
        chat = [message.to_dict() for message in placed]
        self._check_content(chat, tools, id)
        if found:
            self._check_media(chat, tools, id, found)
        return chat, found

    def _check_media(self, chat: Chat, tools: Tools, id: str, media: Sequence[Media]) -> None:
        """The model can read them, and the template writes one placeholder for each."""
        processor, wanted = self._media_processor(id), len(media)
        for medium in media:
            try:
                processor.check(medium)
            except ValueError as error:
                raise ValueError(f"{id}: {error}") from error
        if (written := processor.placed(self._write(chat, tools, generation_prompt=False))) != wanted:
            raise TemplateError(
                f"{id}: the chat template writes {written} placeholders for {wanted} images or sounds; use the "
                "template that comes with the model"
            )

    def _media_processor(self, id: str) -> MediaProcessor:
        processor = self.processor if self.processor is not None else processor_of(self.tokenizer)
        if processor is None:
            raise ValueError(
                f"{id}: the row has images or audio, but the model reads text only; use one that reads them"
            )
        return processor

    def _placed(self, text: str) -> int:
        return self._media_processor("").placed(text)

    def expanded(self, text: str, media: Sequence[Media], id: str) -> str:
        """Return a text from the chat template with each placeholder replaced by those of its medium."""
        if not media:
            return text
        try:
            return self._media_processor(id).expand(text, media)
        except ValueError as error:
            raise ValueError(f"{id}: {error}") from error

    def spans(self, ids: list[int], media: Sequence[Media], id: str) -> tuple[tuple[int, int], ...]:
        """Return the first token and the end of each medium in expanded ids."""
        if not media:
            return ()
        try:
            return self._media_processor(id).spans(ids, media)
        except ValueError as error:
            raise ValueError(f"{id}: {error}") from error

    def _expanded_ids(self, text: str, media: Sequence[Media], id: str) -> list[int]:
        return self._ids(self.expanded(text, media, id))

    def _is_text(self, ids: Sequence[int]) -> BoolArray:
        return ~np.isin(np.array(ids), list(self.placeholder_ids))

    def _with_placeholders(self, text: str) -> str:
        """The text with each `<image>` as the chat template writes an image, found by rendering with and without."""
        for kind in self._media_processor("the text").placeholders:
            words = _text_parts(_SENTINEL)
            without, with_one = (
                self._apply_template([{"role": "user", "content": content}], (), True).partition(_SENTINEL)[0]
                for content in (words, [{"type": kind}, *words])
            )
            text = text.replace(f"<{kind}>", with_one.removeprefix(without))
        return text

    def _check_content(self, chat: Chat, tools: Tools, id: str) -> None:
        named = [(f"message {i} ({message['role']})", message) for i, message in enumerate(chat)]
        for where, value in [*named, ("tools", tools)]:
            for text in _strings(value):
                _check_encoding(text, f"{id}: {where}")
                if found := self._special.search(text):
                    raise ValueError(
                        f"{id}: {where} contains the text of the special token {found.group()!r}, which would become "
                        "a control token; remove it or spell it differently"
                    )

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _id(self, special: str) -> int:
        token: int = self.tokenizer.convert_tokens_to_ids(special)
        return token

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return match_any(special_tokens(self.tokenizer).values())

    @cached_property
    def _added(self) -> re.Pattern[str]:
        return match_any(token.content for token in self.tokenizer.added_tokens_decoder.values())

    @cached_property
    def _adds_bos(self) -> bool:
        bos = self.tokenizer.bos_token_id
        return bos is not None and self.tokenizer("a")["input_ids"][0] == bos


def tokenize_conversation(
    messages: Sequence[Message | Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the token ids of one row and its trained spans: `([1, 50, 51, 2], [(2, 4)])`."""
    chat = [message if isinstance(message, Message) else Message.from_dict(message) for message in messages]
    rows = Renderer(tokenizer).conversation(chat, id="conversation")
    if len(rows) > 1:
        raise ValueError(
            f"the chat template rewrites earlier turns, so this conversation makes {len(rows)} rows; use "
            "Renderer.conversation, or pass one assistant turn at a time"
        )
    row = rows[0]
    if max_length is not None and len(row) > max_length:
        raise ValueError(
            f"the conversation has {len(row)} tokens, over max_length={max_length}; shorten it or raise max_length"
        )
    borders = np.flatnonzero(np.diff(np.concatenate(([0], row.mask.astype(np.int8), [0])))).tolist()
    return row.tokens.tolist(), list(zip(borders[::2], borders[1::2], strict=True))


def compute_loss_mask(num_tokens: int, spans: Sequence[tuple[int, int]]) -> list[float]:
    """`compute_loss_mask(4, [(2, 4)]) == [0.0, 0.0, 1.0, 1.0]`."""
    mask = [0.0] * num_tokens
    for start, end in spans:
        if not 0 <= start < end <= num_tokens:
            raise ValueError(
                f"span ({start}, {end}) does not fit {num_tokens} tokens; spans are (start, end) with "
                "0 <= start < end <= num_tokens"
            )
        if any(mask[start:end]):
            raise ValueError(f"span ({start}, {end}) overlaps another one; give each token to one span at most")
        mask[start:end] = [1.0] * (end - start)
    return mask


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return every special token by its id: `{259: "<|im_end|>", ...}`."""
    added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def match_any(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of these texts, the longest first."""
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")


def _names(id: str, count: int) -> list[str]:
    return [id] if count == 1 else [f"{id}#{k}" for k in range(count)]


def _split(ids: list[int], size: int) -> list[list[int]]:
    """Split into pieces of `size`, the last one shorter but never a single token, which would train nothing."""
    starts = list(range(0, len(ids), size))
    if len(starts) > 1 and len(ids) - starts[-1] == 1:
        starts[-1] -= 1
    return [ids[start:end] for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)]


def _text_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _check_encoding(text: str, where: str) -> None:
    if not text.isascii() and (surrogate := re.search("[\ud800-\udfff]", text)):
        raise ValueError(f"{where} contains a lone surrogate ({surrogate.group()!r}); fix the encoding of the data")


def _check_preserved(message: Mapping[str, Any], prompt: str, completion: str) -> None:
    """Raise unless everything in the assistant's message is part of the trained text."""
    tag = _opening_tag(message)
    if tag and prompt.rstrip().endswith(tag):  # the prompt already opens the answer
        completion = tag + completion
    for part in _assistant_parts(message):
        if _compact(part) not in _compact(completion):
            raise TemplateError(
                f"the chat template drops or changes {_short(part)} of the assistant's turn (its output: "
                f"{_short(completion)}); use a template that keeps it, remove it from the data, or give tool arguments "
                "as an object"
            )
    if tag and completion.count(tag) > message["content"].count(tag):
        raise TemplateError(
            f"the chat template adds another {tag} before the one in the content (its output: {_short(completion)}); "
            "put the reasoning into reasoning_content instead of content"
        )


def _assistant_parts(message: Mapping[str, Any]) -> Iterator[str]:
    yield message["content"]
    yield from (message[key] for key in _REASONING if isinstance(message.get(key), str))
    for call in [*(message.get("tool_calls") or ()), message.get("function_call") or {}]:
        function = call.get("function", call)
        yield function.get("name") or ""
        if isinstance(function.get("arguments"), str):
            yield function["arguments"]


def _opening_tag(message: Mapping[str, Any]) -> str:
    """Return the tag that the content begins with: `"<think>"`, or `""`."""
    tag = re.match(r"\s*(<\w+>)", message["content"])
    return tag[1] if tag else ""


def _compact(text: str) -> str:
    """Return the text without whitespace around tags and at the ends, which templates change around reasoning."""
    return "".join(part.strip() for part in _TAG.split(text))


def _prefix_mismatch(prompt: str, full: str) -> str:
    if not prompt:
        return "the chat template's output before the assistant's turn is empty; put a system or user message first"
    differences = (i for i, (p, f) in enumerate(zip(prompt, full, strict=False)) if p != f)
    common = next(differences, min(len(prompt), len(full)))
    return (
        f"the finished turn does not continue the prompt: where the chat template's prompt has "
        f"{_short(prompt[common:])}, the finished conversation has {_short(full[common:])}; the answer must begin with "
        "what the generation prompt already opens, and earlier messages must not change when it is added (merge "
        "consecutive assistant turns, turn thinking off in template_kwargs, or use another template)"
    )


def _nfkc(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")

"""Convert raw rows to samples: the columns of a row determine its format.

`FORMATS` is the table of known formats for chats, instructions, preferences and plain text, the most specific first.
A column that a format does not use is kept in `Sample.metadata`. A column with the value None counts as absent, because
Parquet fills missing values with it. Nothing is tokenized here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.data import parts
from oxrl.data.fill import TEMPLATED, fill_column
from oxrl.data.media import measure
from oxrl.data.parts import checked_content, media_of_column, take_media
from oxrl.names import did_you_mean
from oxrl.parsing import parse_json
from oxrl.types import Media, Message, Sample

Messages = tuple[Message, ...]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
LABELS = {"true": True, "1": True, "false": False, "0": False}
MEDIA = re.compile(r"(image|picture|audio|video)s?(_(base64|b64|bytes|data|file|path|url)s?)?")  # names of columns
SPEAKER = re.compile(r"\n\n(Human|Assistant):")


class RawRow(NamedTuple):
    """`RawRow("train.jsonl:12", {"prompt": "2+2?", "answer": "4"})`; if `error` is set, there are no columns."""

    where: str
    columns: Mapping[str, Any]
    error: str = ""


class BadRow(ValueError):  # noqa: N818 - named after the row
    """`BadRow("response is empty", "train.jsonl:12")`: a row that cannot be converted, and the reason."""

    def __init__(self, reason: str, where: str = "") -> None:
        super().__init__(f"{where}: {reason}" if where else reason)
        self.reason = reason
        self.where = where


class Format(NamedTuple):
    """`Format((("prompt", "question"), ("answer",)), _prompt_answer)`: a row needs one column of each group."""

    needs: tuple[tuple[str, ...], ...]
    convert: Callable[[_Columns], Sample]

    def fits(self, columns: _Columns) -> bool:
        return all(columns.first(*group) for group in self.needs)

    def __str__(self) -> str:
        return " + ".join("|".join(group) for group in self.needs)


def to_sample(
    row: RawRow,
    *,
    columns: Mapping[str, str] | None = None,
    format: str | None = None,
    template: Mapping[str, str] | None = None,
    folder: str | Path = ".",
) -> Sample:
    """Convert one row; the sample's id is `row.where`. `columns` maps our column names to the row's.

    `template` defines columns from others: `{"prompt": "{Body} {Question}", "answer": "Answer"}`. Paths of images and
    audio are relative to `folder`; their headers are checked.
    """
    try:
        if row.error:
            raise BadRow(row.error)
        named = _Columns(row.columns, columns or {}, template or {})
        conversational = named.has_messages()
        name = _checked_format(format, named) if format is not None else _recognise(named)
        media = _column_media(named, folder)
        sample = _with_media(FORMATS[name].convert(named), media, folder)
        named.check_template_used(name)
        _refuse_media(named.rest)
    except BadRow as bad:
        raise BadRow(bad.reason, row.where) from None
    return replace(sample, id=row.where, metadata=named.rest, conversational=conversational)


def _refuse_media(rest: Mapping[str, Any]) -> None:
    """A model would be trained on a question about an image that it never gets."""
    if media := [name for name, value in rest.items() if MEDIA.fullmatch(name.lower()) and value]:
        kind = "audio" if "audio" in media[0].lower() else "images"
        what = (
            "videos are not read" if "video" in media[0].lower() else f"if models shall read it, map {kind}={media[0]}"
        )
        raise BadRow(f"it has {media[0]!r}, which would not be used: {what}; else remove the column")


def _column_media(columns: _Columns, folder: str | Path) -> list[Media]:
    try:
        return [
            medium
            for name, kind in parts.COLUMNS.items()
            if columns.first(name)
            for medium in media_of_column(columns.take(name), kind, folder)
        ]
    except ValueError as error:
        raise BadRow(str(error)) from None


def _with_media(sample: Sample, media: Sequence[Media], folder: str | Path) -> Sample:
    """The sample with its media, those in its messages taken out; each header is read."""
    try:
        for reply in (sample.chosen, sample.rejected, *sample.responses):
            if take_media(reply, (), folder)[1]:
                raise BadRow("a reply has an image or audio; only prompts can have them")
        if sample.text is not None:
            found = tuple(media)
        else:
            messages, found = take_media(sample.messages, media, folder)
            sample = replace(sample, messages=messages)
        for medium in found:
            measure(medium)
    except BadRow:
        raise
    except ValueError as error:
        raise BadRow(str(error)) from None
    return replace(sample, media=found) if found else sample


def recognise(
    raw: Mapping[str, Any], *, columns: Mapping[str, str] | None = None, template: Mapping[str, str] | None = None
) -> str:
    """`recognise({"instruction": "Add.", "output": "4"}) == "alpaca"`."""
    return _recognise(_Columns(raw, columns or {}, template or {}))


def _recognise(columns: _Columns) -> str:
    for name, candidate in FORMATS.items():
        if candidate.fits(columns):
            return name
    known = "; ".join(f"{name}: {candidate}" for name, candidate in FORMATS.items())
    raise BadRow(f"its columns ({columns}) fit no format ({known}); map them with columns={{ours: theirs}}")


def _checked_format(name: str, columns: _Columns) -> str:
    if name not in FORMATS:
        hint = did_you_mean(name, FORMATS)
        raise ValueError(f"there is no format {name!r}{hint or ';'} formats: {', '.join(FORMATS)}")
    if not FORMATS[name].fits(columns):
        raise BadRow(f"format {name!r} needs the columns {FORMATS[name]}, the row has {columns}")
    return name


class _Columns:
    """The columns of one row under our names; `rest` has the columns that no format has taken, the metadata."""

    def __init__(self, raw: Mapping[str, Any], mapping: Mapping[str, str], template: Mapping[str, str]) -> None:
        for ours, theirs in mapping.items():
            if ours not in COLUMNS:
                raise ValueError(
                    f"columns: {ours!r} is not a column name of any format{did_you_mean(ours, COLUMNS) or ';'} "
                    f"names: {', '.join(sorted(COLUMNS))}"
                )
            if theirs not in raw:
                hint = did_you_mean(theirs, raw)
                raise BadRow(
                    f"columns maps {ours!r} to {theirs!r}, but the row has {', '.join(raw) or 'no columns'}{hint}"
                )
        filled = {_FILLED + name: _filled_column(name, template[name], raw) for name in template}
        hidden = {*mapping.values(), *(other for name in template for other in REPLACED[name])}
        self.rest = {**raw, **filled}
        self._theirs = {name: name for name in raw if name not in hidden} | dict(mapping)
        self._theirs |= {name: _FILLED + name for name in template}

    def check_template_used(self, format: str) -> None:
        """Raise ValueError for a column of the template that the format did not take."""
        if unused := [name.removeprefix(_FILLED) for name in self.rest if name.startswith(_FILLED)]:
            raise ValueError(
                f"the template defines {unused[0]}, but rows of the format {format!r} do not use it: leave it out, or "
                "define the prompt as well"
            )

    def first(self, *names: str) -> str | None:
        """Return the first of these columns that has a value."""
        return next((name for name in names if self._get(name) is not None), None)

    def has_column(self, name: str) -> bool:
        """Return whether the column exists, even if its value is None."""
        return name in self._theirs

    def has_messages(self) -> bool:
        """Return whether the prompt is a list of messages, not a text."""
        return any(isinstance(self._get(name), list | tuple) for name in ("messages", "conversations", *PROMPTS))

    def take(self, name: str) -> Any:
        return self.rest.pop(self._theirs[name], None) if name in self._theirs else None

    def take_first(self, *names: str) -> tuple[str, Any]:
        name = self.first(*names) or names[0]
        return name, self.take(name)

    def _get(self, name: str) -> Any:
        return self.rest.get(self._theirs[name]) if name in self._theirs else None

    def __str__(self) -> str:
        return ", ".join(name if self.first(name) else f"{name} (None)" for name in self._theirs) or "none"


_FILLED = "\0"  # before the name of a column that the template defines


def _filled_column(name: str, template: str, raw: Mapping[str, Any]) -> Any:
    if name not in TEMPLATED:
        raise ValueError(f"a template defines {', '.join(TEMPLATED)}, not {name!r}{did_you_mean(name, TEMPLATED)}")
    try:
        return fill_column(name, template, raw)
    except ValueError as error:
        raise BadRow(f"{name}: {error}") from None


def _chat(columns: _Columns, name: str) -> Sample:
    messages = _messages(columns.take(name), name)
    answer = _answer(columns) if columns.first("answer") else None
    return _sample(columns, messages, answer=answer)


def _openai(columns: _Columns) -> Sample:
    return _chat(columns, "messages")


def _sharegpt(columns: _Columns) -> Sample:
    return _chat(columns, "conversations")


def _alpaca(columns: _Columns) -> Sample:
    prompt = _prompt(columns, "instruction")
    return _sample(columns, prompt + _reply(prompt, "output", columns.take("output")))


def _actions(columns: _Columns) -> Sample:
    prompt, actions = _prompt(columns, "prompt", "question", "instruction"), columns.take("actions")
    if isinstance(actions, str | int | float):
        actions = [actions]
    if not isinstance(actions, list | tuple) or not actions:
        raise BadRow(f"actions must be a list, of numbers or of lists of them, or a word; it is {_kind(actions)}")
    return _sample(columns, (*prompt, Message("assistant", "", {"actions": actions})))


def _prompt_response(columns: _Columns) -> Sample:
    prompt = _prompt(columns, "prompt", "question")
    return _sample(columns, prompt + _reply(prompt, *columns.take_first("response", "completion")))


def _prompt_answer(columns: _Columns) -> Sample:
    return _sample(columns, _prompt(columns, "prompt", "question"), answer=_answer(columns))


def _prompt_only(columns: _Columns) -> Sample:
    if empty := [name for name in ("response", "completion", "answer") if columns.has_column(name)]:
        raise BadRow(f"its columns ({columns}) fit no format: for rows of prompts alone, remove the column {empty[0]}")
    return _sample(columns, _prompt(columns, "prompt", "question"))


def _unpaired(columns: _Columns) -> Sample:
    prompt = _prompt(columns, "prompt", "question")
    label = columns.take("label")
    if str(label).lower() not in LABELS:
        raise BadRow(f"label must be true or false (or 1 or 0), it is {label!r}")
    reply = _reply(prompt, *columns.take_first("completion", "response"))
    return _sample(columns, prompt + reply, label=LABELS[str(label).lower()])


def _preference(columns: _Columns) -> Sample:
    chosen, rejected = columns.take("chosen"), columns.take("rejected")
    if chosen == rejected:
        raise BadRow("chosen and rejected are identical: there is nothing to prefer")
    if not columns.first(*PROMPTS):
        return _fork(columns, _messages(chosen, "chosen", _dialogue), _messages(rejected, "rejected", _dialogue))
    prompt = _prompt(columns, *PROMPTS)
    better, worse = _reply(prompt, "chosen", chosen), _reply(prompt, "rejected", rejected)
    return _sample(columns, prompt, chosen=better, rejected=worse)


def _scored(columns: _Columns) -> Sample:
    prompt = _prompt(columns, "prompt", "question")
    responses, rewards = columns.take("responses"), columns.take("rewards")
    if not isinstance(responses, list) or not isinstance(rewards, list) or len(responses) != len(rewards):
        raise BadRow("responses and rewards must be lists of the same length")
    if not responses or not all(isinstance(reward, int | float) and _is_finite(reward) for reward in rewards):
        raise BadRow(f"every response needs a finite number as its reward, got {rewards!r:.200}")
    replies = tuple(_reply(prompt, f"responses[{i}]", response) for i, response in enumerate(responses))
    return _sample(columns, prompt, responses=replies, rewards=tuple(map(float, rewards)))


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond the largest float
        return False


def _fork(columns: _Columns, chosen: Messages, rejected: Messages) -> Sample:
    """Split two whole conversations into their common prompt and two replies."""
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))))
    if not common:
        raise BadRow("chosen and rejected share no prompt: their first messages differ")
    prompt = _checked_prompt(chosen[:common])
    better, worse = _checked_reply(chosen[common:], "chosen"), _checked_reply(rejected[common:], "rejected")
    return _sample(columns, prompt, chosen=better, rejected=worse)


def _text(columns: _Columns) -> Sample:
    return Sample("", text=_filled(columns.take("text"), "text"))


PROMPTS = ("prompt", "question", "instruction")
FORMATS: dict[str, Format] = {
    "preference": Format((("chosen",), ("rejected",)), _preference),
    "unpaired": Format((("prompt", "question"), ("completion", "response"), ("label",)), _unpaired),
    "scored": Format((("prompt", "question"), ("responses",), ("rewards",)), _scored),
    "messages": Format((("messages",),), _openai),
    "sharegpt": Format((("conversations",),), _sharegpt),
    "actions": Format((("prompt", "question", "instruction"), ("actions",)), _actions),
    "alpaca": Format((("instruction",), ("output",)), _alpaca),
    "prompt_response": Format((("prompt", "question"), ("response", "completion")), _prompt_response),
    "prompt_answer": Format((("prompt", "question"), ("answer",)), _prompt_answer),
    "text": Format((("text",),), _text),
    "prompt": Format((("prompt", "question"),), _prompt_only),
}
_REPLIES = ("response", "completion", "output", "answer", "chosen", "rejected", "responses")
REPLACED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("response", "answer", "chosen", "rejected"), _REPLIES),
    "prompt": (*PROMPTS, "input", "messages", "conversations", "text"),
    "system": ("system",),
}
"""Columns of a file that count as metadata if a template defines the key."""
NEEDED = {name for form in FORMATS.values() for group in form.needs for name in group}
COLUMNS = NEEDED | {"input", "system", "tools", *parts.COLUMNS}


def _sample(columns: _Columns, messages: Messages, **fields: Any) -> Sample:
    return Sample("", messages=_with_system(columns, messages), tools=_tools(columns), **fields)


def _prompt(columns: _Columns, *names: str) -> Messages:
    name, value = columns.take_first(*names)
    if name == "instruction" and isinstance(value, str):
        value = "\n\n".join(part for part in (value, _optional_text(columns, "input")) if part)
    return _checked_prompt(_messages(value, name, lambda text: _prompt_from_text(text, name)))


def _prompt_from_text(text: str, column: str) -> Messages:
    if not SPEAKER.match(text):
        return (Message("user", _filled(text, column)),)
    messages = _dialogue(text)
    return messages[:-1] if messages[-1] == Message("assistant", "") else messages


def _checked_prompt(messages: Messages) -> Messages:
    if not messages or messages[-1].role == "assistant":
        raise BadRow(
            "the prompt ends with an assistant message: it must not contain the reply; remove the last message"
        )
    return messages


def _reply(prompt: Messages, column: str, value: Any) -> Messages:
    """Return the messages after the prompt; if the column repeats the prompt, it is removed."""
    messages = _messages(value, column, lambda text: (Message("assistant", text),))
    return _checked_reply(messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages, column)


def _checked_reply(messages: Messages, column: str) -> Messages:
    if not messages or messages[0].role != "assistant" or messages[-1].role != "assistant":
        roles = ", ".join(message.role for message in messages) or "nothing"
        raise BadRow(f"after the prompt, {column} must begin and end with an assistant message; it has: {roles}")
    return messages


def _messages(value: Any, column: str, from_text: Callable[[str], Messages] | None = None) -> Messages:
    if from_text and isinstance(value, str):
        return from_text(value)
    if not isinstance(value, list | tuple):
        allowed = "text or a list of messages" if from_text else "a list of messages"
        raise BadRow(f"{column} must be {allowed}, it is {_kind(value)}")
    if not value:
        raise BadRow(f"{column} is an empty conversation")
    return tuple(_message(raw, f"{column}[{position}]") for position, raw in enumerate(value))


def _message(raw: Any, name: str) -> Message:
    if not isinstance(raw, Mapping):
        raise BadRow(f"{name} must be an object with role and content, it is {_kind(raw)}")
    role_key, content_key = ("role", "content") if raw.get("role") is not None else ("from", "value")
    role, content = raw.get(role_key), raw.get(content_key)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise BadRow(f"{name} has the role {role!r}; known roles: {', '.join(ROLES)}")
    if content is None and not raw.get("tool_calls"):
        raise BadRow(f"{name} has no {content_key}")
    if not (content is None or isinstance(content, str) or _is_list_of_objects(content)):
        raise BadRow(f"{name} must have text or a list of parts as {content_key}, it has {_kind(content)}")
    for key in ("tool_calls", "function_call"):
        _check_calls(raw.get(key), f"{name}.{key}")
    if content is not None:
        try:
            content = checked_content(content)
        except ValueError as error:
            raise BadRow(f"{name} {error}") from None
    extra = {key: value for key, value in raw.items() if key not in (role_key, content_key)}
    return Message.from_dict({**extra, "role": ROLES[role.lower()], "content": content})


def _check_calls(calls: Any, name: str) -> None:
    """`function_call` is one call; it and those of `tool_calls` are `{"function": {"name": ..., "arguments": ...}}`."""
    if not calls:
        return
    if name.endswith("tool_calls") and not _is_list_of_objects(calls):
        raise BadRow(f"{name} must be a list of objects, it is {_kind(calls)}")
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRow(f"{name} must name a function, as {{'function': {{'name': ...}}}} does; it has {_kind(call)}")


def _dialogue(text: str) -> Messages:
    before, *pieces = SPEAKER.split(text)
    if before.strip() or not pieces:
        raise BadRow("without a prompt column, text must read '\\n\\nHuman: ...\\n\\nAssistant: ...'")
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    return tuple(Message(ROLES[speaker.lower()], text.strip()) for speaker, text in turns)


def _with_system(columns: _Columns, messages: Messages) -> Messages:
    system = _optional_text(columns, "system")
    if not system:
        return messages
    if messages[0].role != "system":
        return (Message("system", system), *messages)
    if messages[0].content != system:
        raise BadRow("the system column differs from the system message of the conversation")
    return messages


def _tools(columns: _Columns) -> tuple[Mapping[str, Any], ...]:
    tools = columns.take("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise BadRow(f"tools is text but not JSON ({error})") from None
    if not tools:
        return ()
    if not _is_list_of_objects(tools):
        raise BadRow(f"tools must be a list of objects, it is {_kind(tools)}")
    return tuple(tools)


def _answer(columns: _Columns) -> str:
    answer = columns.take("answer")
    if not isinstance(answer, str | int | float) or answer != answer:
        raise BadRow(f"answer must be text or a number, it is {_kind(answer)}")
    return _filled(str(answer), "answer")


def _filled(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{column} must be text, it is {_kind(value)}")
    if not value.strip():
        raise BadRow(f"{column} is empty")
    return value


def _optional_text(columns: _Columns, name: str) -> str:
    value = columns.take(name)
    return "" if value in (None, "") else _filled(value, name)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(part, Mapping) for part in value)


def _kind(value: Any) -> str:
    return "None" if value is None else f"{value!r:.60} ({type(value).__name__})"

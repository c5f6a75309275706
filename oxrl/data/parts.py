"""Where images and sounds stand in messages: content parts, markers in texts, and columns beside them.

A message with media has a list of parts as its content: `{"type": "text", "text": ...}` and `{"type": "image"}` or
`{"type": "audio"}`, one for each medium of the sample, in order. All other ways of writing them become this one here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from oxrl.data.media import Kind, as_media
from oxrl.types import Media, Message

Content: TypeAlias = str | list[dict[str, Any]]

PARTS: Mapping[str, Kind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
COLUMNS: Mapping[str, Kind] = {"images": "image", "image": "image", "audios": "audio", "audio": "audio"}
_MARKER = re.compile(r"<(image|audio)>")
_TEXT_TYPES = ("text", "input_text", "output_text")
_ADDRESSES = ("url", "path", "bytes", "data", "array")  # of a medium, beside the key of its kind


def flatten_content(content: Content | Sequence[Mapping[str, Any]]) -> str:
    """`flatten_content([{"type": "text", "text": "Hi"}]) == "Hi"`; any other kind of part is a ValueError."""
    checked = checked_content(content)
    if isinstance(checked, str):
        return checked
    part = next(part for part in checked if part["type"] != "text")
    raise ValueError(f"has a content part that is not text, {_shown(part)}: only text is allowed here")


def checked_content(content: Content | Sequence[Mapping[str, Any]]) -> Content:
    """Return text if all parts are text, else parts of text and media; any other kind of part is a ValueError.

    What a part has of its medium stays in it; `take_media` takes it out.
    """
    if isinstance(content, str):
        return content
    parts = [_checked_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _checked_part(part: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in part.items() if value is not None}  # Parquet fills missing keys with None
    kind = given.get("type", "text")
    if kind in _TEXT_TYPES and given.keys() <= {"type", "text"} and isinstance(given.get("text"), str):
        return {"type": "text", "text": given["text"]}
    if kind in PARTS:
        return {**given, "type": kind}
    raise ValueError(
        f"has a content part that is neither text nor an image nor audio, {_shown(part)}: types are text, "
        f"{', '.join(PARTS)}"
    )


def take_media(
    messages: Sequence[Message], columns: Sequence[Media] = (), folder: Path | str = "."
) -> tuple[tuple[Message, ...], tuple[Media, ...]]:
    """Return the messages with bare parts for their media, and the media in the order of these parts.

    Media come from the parts themselves, or from `columns` where a part names none and where a text has `<image>` or
    `<audio>`. If there is no such place, those of `columns` come before the text of the first user.
    """
    if not columns and not any(isinstance(message.content, list) for message in messages):
        return tuple(messages), ()
    waiting = {kind: [medium for medium in columns if medium.kind == kind] for kind in ("image", "audio")}
    marked = [_with_markers(message) if columns else message for message in messages]
    if not any(_has_place(message) for message in marked):
        marked = _before_the_first_user(marked, columns)
    media: list[Media] = []
    taken: list[Message] = []
    for number, message in enumerate(marked):
        if isinstance(message.content, str):
            taken.append(message)
            continue
        if message.role == "assistant":
            raise ValueError(
                f"message {number} is of the assistant and has an image or audio, which no model here writes"
            )
        parts: list[dict[str, Any]] = []
        for part in message.content:
            if part["type"] == "text":
                parts.append(part)
                continue
            kind = PARTS[part["type"]]
            value = _medium_of(part)
            if value is None and not waiting[kind]:
                raise ValueError(
                    f"message {number} has a placeholder for {_a(kind)} that the row does not have; give one for each"
                )
            media.append(waiting[kind].pop(0) if value is None else as_media(value, kind, folder))
            parts.append({"type": kind})
        taken.append(message._replace(content=parts))
    for name, left in waiting.items():
        if left:
            given = sum(medium.kind == name for medium in columns)
            raise ValueError(
                f"it has {given} of {name}, but its messages have placeholders for {given - len(left)}: write <{name}> "
                "where each belongs"
            )
    return tuple(taken), tuple(media)


def media_of_column(value: Any, kind: Kind, folder: Path | str) -> list[Media]:
    """Return the media of a column: one, or a list of them; None and an empty list are none."""
    if value is None or (isinstance(value, list | tuple | str) and not value):
        return []
    several = isinstance(value, list | tuple) and not isinstance(value, Media) and not _is_one(value, kind)
    return [as_media(each, kind, folder) for each in (value if several else [value])]


def places(messages: Sequence[Message]) -> list[Kind]:
    """Return the kinds of the media that messages have places for, in order."""
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    return [PARTS[part["type"]] for part in parts if part.get("type") in PARTS]


def _is_one(value: Any, kind: Kind) -> bool:
    """A sound may be a pair (samples, rate), an image a list of lines of numbers."""
    if kind == "audio":
        return len(value) == 2 and not isinstance(value[0], str | bytes | Mapping | Media) and isinstance(value[1], int)
    return isinstance(value[0], list)


def _has_place(message: Message) -> bool:
    return isinstance(message.content, list) and any(part["type"] != "text" for part in message.content)


def _medium_of(part: Mapping[str, Any]) -> Any:
    """What a part says about its medium: `{"type": "image_url", "image_url": {"url": ...}}` -> `{"url": ...}`."""
    kind = PARTS[part["type"]]
    for key in dict.fromkeys((part["type"], kind, f"{kind}_url", f"input_{kind}")):
        if part.get(key) is not None:
            return part[key]
    found = {key: part[key] for key in (*_ADDRESSES, "sampling_rate") if part.get(key) is not None}
    return found or None


def _with_markers(message: Message) -> Message:
    """A text with `<image>` as parts."""
    if message.role == "assistant" or not isinstance(message.content, str) or not _MARKER.search(message.content):
        return message
    return message._replace(content=list(_parts_of(message.content)))


def _parts_of(text: str) -> Iterator[dict[str, Any]]:
    for index, piece in enumerate(_MARKER.split(text)):
        if index % 2:
            yield {"type": piece}
        elif piece:
            yield {"type": "text", "text": piece}


def _before_the_first_user(messages: Sequence[Message], media: Sequence[Media]) -> list[Message]:
    first = next((index for index, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise ValueError("it has images or audio, but no message of a user that they belong to")
    message = messages[first]
    text = message.content if isinstance(message.content, list) else [{"type": "text", "text": message.content}]
    parts: list[dict[str, Any]] = [{"type": medium.kind} for medium in media]
    return [*messages[:first], message._replace(content=[*parts, *text]), *messages[first + 1 :]]


def _a(kind: str) -> str:
    return "an image" if kind == "image" else "audio"


def _shown(part: Any) -> str:
    return f"{part!r:.60} ({type(part).__name__})"

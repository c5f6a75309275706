"""Images and sounds of the answers of a group, as the record of a step has them: each once, and large ones reduced."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oxrl.data.media import identity, load_image
from oxrl.data.parts import PARTS
from oxrl.types import Media, Message, Rollout

MOST_BYTES = 64 * 2**10  # of a medium that is recorded as it is
MOST_OF_GROUP = 2**20  # bytes of all media of a group
SIDE = 512  # pixels of the longer side of an image that has more bytes
TYPES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"fLaC": "audio/flac",
    b"OggS": "audio/ogg",
    b"ID3": "audio/mpeg",
}
"""How files begin that a browser shows; RIFF has its kind after the length."""
RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}


class GroupMedia:
    """`GroupMedia().of(0, media)`: the media of answer 0; one that another answer has is named, not repeated."""

    def __init__(self) -> None:
        self._first: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._room = MOST_OF_GROUP

    def of(self, index: int, media: Sequence[Media | None]) -> list[dict[str, Any]]:
        return [self._entry(index, number, medium) for number, medium in enumerate(media)]

    def _entry(self, index: int, number: int, medium: Media | None) -> dict[str, Any]:
        if medium is None:
            return {"kind": "", "mime_type": "", "data": None}
        answer, first = self._first.setdefault(identity(medium), (index, number))
        if (answer, first) == (index, number):
            return {"kind": medium.kind, **self._content(medium)}
        return {"kind": medium.kind, "mime_type": medium.mime_type, "answer": answer, "number": first}

    def _content(self, medium: Media) -> dict[str, Any]:
        """Its type, its path if it has one, and its data, or why that is not in the record."""
        path = {"data": medium.data} if isinstance(medium.data, str) else {}
        try:
            mime_type, content = _shown(medium)
        except (OSError, ValueError) as error:
            return {"mime_type": medium.mime_type, **path, "error": str(error)}
        if len(content) > min(MOST_BYTES, self._room):
            limits = f"a record has at most {MOST_BYTES} of a medium and {MOST_OF_GROUP} of those of a group"
            return {"mime_type": mime_type, **path, "error": f"{len(content)} bytes: {limits}"}
        self._room -= len(content)
        return {"mime_type": mime_type, **path, "base64": base64.b64encode(content).decode()}


def media_of(rollout: Rollout) -> list[Media | None]:
    """The media of its conversation, one per part of its messages, replies of the environment included.

    None for what no prompt had, such as the picture after the last action. A prompt may have the latest media only:
    those of a turn are the last ones of the messages before it.
    """
    shown: list[Media | None] = [None] * _parts(rollout.prompt_messages or rollout.sample.messages)
    shown[: len(rollout.sample.media)] = rollout.sample.media
    for turn in rollout.turns:
        if 0 < len(turn.media) <= len(shown):
            shown[-len(turn.media) :] = turn.media
        shown += [None] * _parts(turn.messages)
    return shown


def _parts(messages: Sequence[Message]) -> int:
    contents = (message.content for message in messages)
    return sum(part.get("type") in PARTS for parts in contents if isinstance(parts, list) for part in parts)


def _shown(medium: Media) -> tuple[str, bytes]:
    """The type and the bytes of a file that a browser shows: an image that is large or of another type as a JPEG."""
    content = medium.data if isinstance(medium.data, bytes) else Path(medium.data).read_bytes()
    kind = _type_of(content)
    if medium.kind == "image" and (len(content) > MOST_BYTES or kind is None):
        return "image/jpeg", _reduced(medium)
    return kind or medium.mime_type, content


def _type_of(content: bytes) -> str | None:
    if content.startswith(b"RIFF"):
        return RIFF.get(content[8:12])
    return next((kind for magic, kind in TYPES.items() if content.startswith(magic)), None)


def _reduced(medium: Media) -> bytes:
    """A JPEG for the eye, with its longer side of at most `SIDE` pixels."""
    image = load_image(medium)
    image.thumbnail((SIDE, SIDE))
    written = io.BytesIO()
    image.save(written, "JPEG", quality=80)
    return written.getvalue()

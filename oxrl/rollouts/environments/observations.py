"""Observations to message content: pictures become image parts, numbers and texts one text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from oxrl.data.fill import numbers_text
from oxrl.data.media import as_media
from oxrl.data.parts import Content

_MOST_NUMBERS = 256  # of an entry


def flat_entries(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of nested dicts, of an observation or of a space, by their names: `("agent.position", ...)`."""
    inner = getattr(value, "spaces", value)
    if not isinstance(inner, Mapping):
        yield before, value
        return
    for key, each in inner.items():
        yield from flat_entries(each, f"{before}.{key}" if before else str(key))


def observation_content(observation: Any, show: Sequence[str] | None = None) -> Content:
    """Pictures as image parts, and the rest as text after them.

    A picture is an array of bytes with height, width and colours. `show` has the entries of a dict, in order.
    """
    entries = dict(flat_entries(observation))
    if show is not None:
        entries = {key: entries[key] for key in show}
    pictures = {key: value for key, value in entries.items() if _is_picture(value)}
    text = _text({key: value for key, value in entries.items() if key not in pictures})
    if not pictures:
        return text
    media = [as_media(np.asarray(each), "image") for each in pictures.values()]  # encoded once
    images: list[dict[str, Any]] = [{"type": "image", "image": each} for each in media]
    return [*images, *([{"type": "text", "text": text}] if text else [])]


def observation_text(observation: Any) -> str:
    """A single text as it is; else one line per entry, numbers with four digits."""
    return _text(dict(flat_entries(observation)))


def _text(entries: Mapping[str, Any]) -> str:
    if len(entries) == 1 and isinstance(only := next(iter(entries.values())), str):
        return only
    return "\n".join(f"{key}: {_entry_text(each)}" if key else _entry_text(each) for key, each in entries.items())


def _is_picture(value: Any) -> bool:
    return getattr(value, "dtype", None) == np.uint8 and value.ndim == 3 and value.shape[-1] in (1, 3, 4)


def _entry_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "iufb":
        return str(value)
    if numbers.size > _MOST_NUMBERS:
        raise ValueError(
            f"an observation has {numbers.size} numbers, more than {_MOST_NUMBERS}: choose entries with "
            "rollout.env_args.show, or set observation to FILE.py:FUNCTION, a function from an observation to a text"
        )
    return numbers_text(numbers.ravel().tolist())

"""Pictures and sounds that tests draw: `png("red", 56, 56)`, `tone(440.0, 1.0)`."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from oxrl.data.media import as_media
from oxrl.types import Media


def picture(color: str, width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A disc of this color on white, in the upper left quarter."""
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).ellipse((0, 0, width // 2, height // 2), fill=color)
    return image.convert(mode)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png(color: str, width: int = 56, height: int = 56) -> Media:
    return Media("image", encoded(picture(color, width, height)), "image/png")


def samples(hertz: float, seconds: float, rate: int = 16000) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate).astype(np.float32)


def tone(hertz: float, seconds: float = 0.5, rate: int = 16000) -> Media:
    return as_media((samples(hertz, seconds, rate), rate), "audio")

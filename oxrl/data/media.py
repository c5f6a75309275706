"""Images and sounds of rows: from what a row has to `Media`, and from `Media` to pixels and samples.

`as_media` takes what datasets write (paths, bytes, base64, arrays, dicts) and decodes nothing. `measure` reads the
header only: it finds missing, broken, empty and oversized files before a run starts. `load_image` and `load_audio`
decode, when a model is run. Nothing is fetched from the network.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import struct
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

import numpy as np

from oxrl.types import FloatArray, Media

if TYPE_CHECKING:
    from PIL.Image import Image

Kind: TypeAlias = Literal["image", "audio"]

MAX_PIXELS = 1 << 26  # 8192 x 8192: a small file can decode to gigabytes
MAX_SAMPLES = 1 << 28  # of all channels: 45 minutes in stereo at 48 kHz
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # formats that start other programs are left out
NEEDS = "images and audio need more packages: pip install -e '.[multimodal]'"

_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,", re.ASCII)
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_ORIENTATION = 0x0112  # of Exif
_TURNED = (5, 6, 7, 8)  # orientations that exchange width and height
_SHOWN = 60  # characters of a value in a message
_HALF_WIDTH = 16  # zero crossings of the resampling filter on each side


class Size(NamedTuple):
    """`Size(640, 480)` in pixels; `Size(48000, 1, 16000)`: samples per channel, channels and sampling rate."""

    width: int
    height: int
    sampling_rate: int = 0

    def __str__(self) -> str:
        if not self.sampling_rate:
            return f"{self.width}x{self.height} pixels"
        return f"{self.width / self.sampling_rate:.3g} s at {self.sampling_rate} Hz"


def as_media(value: Any, kind: Kind, folder: Path | str = ".") -> Media:
    """Return `Media` of whatever a row has for an image or a sound; paths are relative to `folder`.

    A path, bytes, base64 with or without its data URL, a PIL image, a NumPy array (a sound with its rate:
    `(array, 16000)`) or a dict of `datasets` or of a chat API: `{"bytes": ..., "path": ...}`, `{"array": ...,
    "sampling_rate": ...}`, `{"url": ...}`, `{"data": ..., "format": "wav"}`.
    """
    if isinstance(value, Media):
        return value
    if isinstance(value, Path):
        return _of_path(str(value), kind, folder)
    if isinstance(value, str):
        return _of_text(value, kind, folder)
    if isinstance(value, bytes | bytearray | memoryview):
        return Media(kind, _not_empty(bytes(value), kind))
    if isinstance(value, Mapping):
        return _of_dict(value, kind, folder)
    if kind == "audio":
        return Media("audio", _wave_file(*_samples_and_rate(value)), "audio/wav")
    return Media("image", _png_file(value), "image/png")


def describe(media: Media) -> str:
    """Name a medium in a message: its path, or the length and digest of its bytes."""
    if isinstance(media.data, str):
        return media.data
    return f"{media.kind} of {len(media.data)} bytes (SHA-256 {hashlib.sha256(media.data).hexdigest()[:12]})"


def identity(media: Media) -> tuple[Any, ...]:
    """Return a key that differs when the content may: digest of the bytes, or path, size and time of the file."""
    if isinstance(media.data, bytes):
        return (media.kind, hashlib.sha256(media.data).digest())
    try:
        stat = Path(media.data).stat()
    except OSError:
        return (media.kind, media.data)
    return (media.kind, media.data, stat.st_size, stat.st_mtime_ns)


def data_url(media: Media) -> str:
    """Return the medium as the text that servers take: `data:image/png;base64,...`."""
    content = with_bytes(media).data
    assert isinstance(content, bytes)
    return f"data:{media.mime_type or media.kind + '/*'};base64,{base64.b64encode(content).decode()}"


def with_bytes(media: Media) -> Media:
    """Return the medium with the content of its file, for processes that may not have the file."""
    if isinstance(media.data, bytes):
        return media
    return media._replace(data=Path(_file(media)).read_bytes())


def measure(media: Media, max_pixels: int = MAX_PIXELS) -> Size:
    """Return the size of a medium by its header; raise a ValueError that names it if it cannot be used."""
    if media.kind == "audio":
        return _measure_audio(media)
    from PIL import Image

    with _open_image(media, max_pixels) as image:
        width, height = image.size
        try:
            turned = image.getexif().get(_ORIENTATION) in _TURNED
        except _IMAGE_ERRORS(Image):
            turned = False
        return Size(height, width) if turned else Size(width, height)


def load_image(media: Media, max_pixels: int = MAX_PIXELS) -> Image:
    """Decode an image to RGB, upright as its Exif orientation says; what is transparent becomes white."""
    from PIL import Image, ImageOps

    if media.kind != "image":
        raise ValueError(f"{describe(media)} is {media.kind}, not an image")
    with _open_image(media, max_pixels) as opened:
        try:
            opened.load()
            return _to_rgb(ImageOps.exif_transpose(opened))
        except _IMAGE_ERRORS(Image) as error:
            raise ValueError(f"the image {describe(media)} is broken: {_reason(error)}") from error


def load_audio(media: Media, sampling_rate: int) -> FloatArray:
    """Decode a sound to one channel of float32 samples at `sampling_rate`: the mean of its channels, resampled."""
    soundfile = _soundfile()
    size = _measure_audio(media)
    try:
        samples, rate = soundfile.read(_file(media), dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as error:
        raise ValueError(f"the sound {describe(media)} is broken: {_reason(error)}") from error
    if len(samples) < size.width:
        raise ValueError(f"the sound {describe(media)} is cut off: {len(samples)} of {size.width} samples are there")
    mono = samples.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise ValueError(f"the sound {describe(media)} has samples that are not finite numbers")
    return resample(mono, rate, sampling_rate)


def resample(samples: FloatArray, rate: int, to: int) -> FloatArray:
    """Resample by a Hann-windowed sinc; frequencies that the new rate cannot hold are removed."""
    if rate == to:
        return samples
    if rate < 1 or to < 1:
        raise ValueError(f"cannot resample from {rate} to {to} Hz; rates are 1 or more")
    cutoff = min(1.0, to / rate)  # of the lower of the two Nyquist frequencies, in cycles of the source
    reach = int(np.ceil(_HALF_WIDTH / cutoff))
    count = -(-len(samples) * to // rate)
    padded = np.pad(samples, (reach, reach + 1))
    result = np.empty(count, np.float32)
    offsets = np.arange(-reach, reach + 1)
    for start in range(0, count, 8192):  # in pieces: memory stays small
        positions = np.arange(start, min(start + 8192, count)) * (rate / to)
        nearest = np.floor(positions).astype(np.int64)
        distance = positions[:, None] - (nearest[:, None] + offsets)
        window = np.where(np.abs(distance) <= reach, np.cos(np.pi * distance / (2 * reach)) ** 2, 0.0)
        kernel = cutoff * np.sinc(cutoff * distance) * window
        result[start : start + len(positions)] = (kernel * padded[nearest[:, None] + offsets + reach]).sum(axis=1)
    return result


def _of_text(text: str, kind: Kind, folder: Path | str) -> Media:
    """A data URL, a path, or base64 without a head; a file of that name comes first."""
    if head := _DATA_URL.match(text):
        given = head["type"] or ""
        if given and not given.startswith(kind) and given != "application/octet-stream":
            raise ValueError(f"the data URL {_short(text)} is of the type {given}, not {kind}/...")
        return Media(kind, _from_base64(text[head.end() :], text), given)
    if text.startswith("data:"):
        raise ValueError(f"the data URL {_short(text)} is not in base64; write data:{kind}/...;base64,...")
    if _URL.match(text):
        parts = urlsplit(text)
        if parts.scheme.lower() == "file":
            return _of_path(unquote(parts.path), kind, folder)
        raise ValueError(
            f"{_short(text)} is an address: nothing is downloaded because a row names it. Download the {kind} and give "
            "the path of the file"
        )
    if not text.strip():
        raise ValueError(f"its {kind} is an empty text; give a path, or remove it")
    found = _of_path(text, kind, folder)
    if len(text) < 64 or _exists(str(found.data)) or (raw := _base64_medium(text)) is None:
        return found
    return Media(kind, raw)


def _of_path(path: str, kind: Kind, folder: Path | str) -> Media:
    return Media(kind, str(Path(folder, Path(path).expanduser()).absolute()))


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # longer than a name of a file can be; a null character
        return False


def _base64_medium(text: str) -> bytes | None:
    """Return the bytes if the text is base64 of a file that begins like an image or a sound."""
    if not re.fullmatch(r"[A-Za-z0-9+/_\-\s]+=*\s*", text):
        return None
    try:
        raw = _from_base64(text, text)
    except ValueError:
        return None
    return raw if raw.startswith(_MAGIC) else None


_MAGIC = (
    *(b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"P5", b"P6"),
    *(b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"FORM"),
)


def _from_base64(text: str, shown: str) -> bytes:
    compact = "".join(text.split()).replace("-", "+").replace("_", "/")
    try:
        raw = base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{_short(shown)} is not valid base64: {error}") from error
    if not raw:
        raise ValueError(f"{_short(shown)} has no data")
    return raw


def _of_dict(value: Mapping[str, Any], kind: Kind, folder: Path | str) -> Media:
    if (raw := value.get("bytes")) is not None:
        return as_media(raw, kind, folder)
    if (array := value.get("array")) is not None:
        if kind == "image":
            return as_media(np.asarray(array), kind, folder)
        return as_media((array, value.get("sampling_rate")), kind, folder)
    for key in ("path", "url", "data", kind, f"{kind}_url", f"input_{kind}"):
        if (inner := value.get(key)) is not None:
            return as_media(inner, kind, folder)
    raise ValueError(
        f"its {kind} is an object with {', '.join(map(str, value)) or 'nothing'}; it needs bytes, path, array (audio: "
        "with sampling_rate), url or data"
    )


def _samples_and_rate(value: Any) -> tuple[Any, Any]:
    """`(array, rate)`, or the decoder that `datasets` returns for a sound."""
    if hasattr(value, "get_all_samples"):
        samples = value.get_all_samples()
        return np.asarray(samples.data).T, samples.sample_rate
    if isinstance(value, tuple | list) and len(value) == 2 and hasattr(value[0], "__len__"):
        return value[0], value[1]
    raise ValueError(
        f"its audio is {_short(repr(value))} ({type(value).__name__}); give a path, bytes, or an array with its rate: "
        "{'array': ..., 'sampling_rate': 16000}"
    )


def _wave_file(array: Any, rate: Any) -> bytes:
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer) or not 1 <= rate <= 10**6:
        raise ValueError(f"its audio has the sampling_rate {rate!r}; give the samples per second, such as 16000")
    samples = np.asarray(array)
    if samples.dtype.kind in "iu":  # PCM
        samples = samples / float(np.iinfo(samples.dtype).max + 1)
    if samples.dtype.kind != "f" or samples.ndim not in (1, 2) or not samples.size:
        raise ValueError(f"its audio is an array of shape {samples.shape} and type {samples.dtype}; give [samples]")
    if samples.ndim == 2 and samples.shape[0] < samples.shape[1] and samples.shape[0] <= 8:
        samples = samples.T  # [channels, samples]
    return _float_wave(np.ascontiguousarray(samples, dtype="<f4"), int(rate))


def _float_wave(samples: FloatArray, rate: int) -> bytes:
    """A WAV file of 32-bit floats. That of libsndfile has the time of day, so that equal sounds would differ."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    layout = struct.pack("<HHIIHHH", 3, channels, rate, 4 * channels * rate, 4 * channels, 32, 0)
    parts = {b"fmt ": layout, b"fact": struct.pack("<I", len(samples)), b"data": samples.tobytes()}
    body = b"".join(name + struct.pack("<I", len(part)) + part for name, part in parts.items())
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def _png_file(value: Any) -> bytes:
    """A PIL image or an array as a file without loss, in which the format of its pixels is kept."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(NEEDS) from error

    image = value
    if not isinstance(value, Image.Image):
        image = Image.fromarray(_pixels(value))
    if not image.width or not image.height:
        raise ValueError(f"its image is empty: {image.width}x{image.height} pixels")
    written = io.BytesIO()
    upright = _upright(image)
    upright = upright if upright.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else _to_rgb(upright)
    upright.save(written, "PNG", compress_level=1)
    return written.getvalue()


def _upright(image: Image) -> Image:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _pixels(value: Any) -> np.ndarray[Any, Any]:
    if not hasattr(value, "__array__") and not isinstance(value, list):
        raise ValueError(
            f"its image is {_short(repr(value))} ({type(value).__name__}); give a path, bytes, base64, a PIL image "
            "or an array"
        )
    array = np.asarray(value)
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))
    if not fits or not array.size or (isinstance(value, list) and array.dtype.kind not in "iu"):
        raise ValueError(f"its image is an array of shape {array.shape}; give [height, width] or [height, width, 3]")
    if array.dtype != np.uint8:
        if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
            raise ValueError(f"its image is an array of {array.dtype}; give whole numbers from 0 to 255 (uint8)")
        array = array.astype(np.uint8)
    return array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array


def _open_image(media: Media, max_pixels: int) -> Image:
    """Open without decoding; the caller closes it."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ValueError(NEEDS) from error
    if media.kind != "image":
        raise ValueError(f"{describe(media)} is {media.kind}, not an image")
    file = _file(media)
    try:
        image = Image.open(file, formats=IMAGE_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"the image {describe(media)} has too many pixels: {_reason(error)}") from error
    except UnidentifiedImageError as error:
        raise ValueError(
            f"{describe(media)} is not an image that can be read ({', '.join(IMAGE_FORMATS)}), or it is broken"
        ) from error
    except _IMAGE_ERRORS(Image) as error:
        raise ValueError(f"the image {describe(media)} is broken: {_reason(error)}") from error
    width, height = image.size
    if width * height > max_pixels:
        image.close()
        raise ValueError(
            f"the image {describe(media)} has {width}x{height} pixels, more than {max_pixels:,}; make it smaller"
        )
    if not width * height:
        image.close()
        raise ValueError(f"the image {describe(media)} is empty: {width}x{height} pixels")
    return image


def _IMAGE_ERRORS(module: Any) -> tuple[type[Exception], ...]:  # noqa: N802 - a constant that needs PIL
    """What Pillow raises for files that are broken, in addition to OSError."""
    return (
        OSError,
        SyntaxError,
        ValueError,
        TypeError,
        EOFError,
        struct.error,
        zlib.error,
        module.DecompressionBombError,
    )


def _to_rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode in ("I;16", "I;16B", "I;16L", "I", "F"):  # 16 bits, or whatever the file has in 32
        values = np.asarray(image, dtype=np.float64)
        high = 65535.0 if values.max() > 255 else 255.0
        image = Image.fromarray((values.clip(0, high) * (255.0 / high)).round().astype(np.uint8))
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image.convert("RGB")


def _measure_audio(media: Media) -> Size:
    soundfile = _soundfile()
    if media.kind != "audio":
        raise ValueError(f"{describe(media)} is {media.kind}, not audio")
    try:
        info = soundfile.info(_file(media))
    except (soundfile.SoundFileError, OSError) as error:
        raise ValueError(f"{describe(media)} is not a sound that can be read: {_reason(error)}") from error
    if not info.frames or not info.channels:
        raise ValueError(f"the sound {describe(media)} is empty: it has no samples")
    if info.frames * info.channels > MAX_SAMPLES:
        raise ValueError(f"the sound {describe(media)} has {info.frames} samples, too many; cut it into parts")
    return Size(info.frames, info.channels, info.samplerate)


@cache
def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its C library is missing
        raise ValueError(f"{NEEDS} ({error})") from error
    return soundfile


def _file(media: Media) -> Any:
    """Return what Pillow and soundfile open: a path that exists, or a buffer."""
    if isinstance(media.data, bytes):
        return io.BytesIO(_not_empty(media.data, media.kind))
    path = Path(media.data)
    if _URL.match(media.data):
        raise ValueError(f"{_short(media.data)} is an address: nothing is downloaded; give the path of a file")
    if not _exists(media.data):
        raise ValueError(f"there is no file {_short(media.data, 200)}")
    if not path.is_file():
        raise ValueError(f"{media.data} is not a file")
    if not path.stat().st_size:
        raise ValueError(f"the file {media.data} is empty")
    return str(path)


def _not_empty(data: bytes, kind: str) -> bytes:
    if not data:
        raise ValueError(f"its {kind} is empty: there are no bytes")
    return data


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _short(text: str, length: int = _SHOWN) -> str:
    return repr(text if len(text) <= length else text[:length] + "...")

"""Images and sounds of rows: every form in which datasets write them, and what is refused."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from oxrl.data.media import MAX_PIXELS, Size, as_media, identity, load_audio, load_image, measure, resample
from oxrl.types import Media
from tests.drawings import encoded, picture, png, samples, tone

RED = (255, 0, 0)


def corner(media: Media) -> Any:
    return load_image(media).getpixel((14, 14))


@pytest.fixture
def red(tmp_path: Path) -> Path:
    (tmp_path / "red.png").write_bytes(encoded(picture("red", 56, 42)))
    return tmp_path / "red.png"


def test_an_image_is_read_from_every_form_in_which_rows_have_it(red: Path) -> None:
    raw = red.read_bytes()
    text = base64.b64encode(raw).decode()
    forms: list[Any] = [
        *("red.png", red, str(red), f"file://{red}", raw, bytearray(raw), memoryview(raw)),
        *(text, text.rstrip("="), f"data:image/png;base64,{text}", f"data:;base64,{text}"),
        *(picture("red", 56, 42), np.asarray(picture("red", 56, 42)), np.asarray(picture("red", 56, 42)).tolist()),
        *({"bytes": raw, "path": None}, {"bytes": None, "path": "red.png"}, {"url": f"data:image/png;base64,{text}"}),
        *({"image": "red.png"}, {"image_url": {"url": "red.png"}}, Media("image", raw)),
    ]
    for form in forms:
        media = as_media(form, "image", red.parent)
        assert isinstance(media.data, str | bytes) and measure(media) == Size(56, 42)
        assert corner(media) == RED and load_image(media).mode == "RGB"


def test_a_sound_is_read_from_every_form_in_which_rows_have_it(tmp_path: Path) -> None:
    wave = samples(440.0, 0.25)
    soundfile.write(tmp_path / "a.flac", wave, 16000)
    soundfile.write(tmp_path / "a.wav", np.stack([wave, wave], axis=1), 16000)
    text = base64.b64encode((tmp_path / "a.wav").read_bytes()).decode()
    pcm = np.round(wave * 32767).astype(np.int16)
    forms: list[Any] = [
        *("a.flac", "a.wav", (tmp_path / "a.wav").read_bytes(), text, f"data:audio/wav;base64,{text}"),
        *((wave, 16000), {"array": wave, "sampling_rate": 16000}, {"array": pcm, "sampling_rate": 16000}),
        *({"array": np.stack([wave, wave]), "sampling_rate": 16000}, {"data": text, "format": "wav"}),
    ]
    for form in forms:
        media = as_media(form, "audio", tmp_path)
        assert measure(media)[0::2] == (4000, 16000)
        assert np.abs(load_audio(media, 16000) - wave).max() < 1e-4


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "1", "RGBA", "LA", "I;16", "HSV", "YCbCr"])
def test_every_kind_of_pixels_becomes_rgb(mode: str) -> None:
    black = Image.new("L", (20, 20), "black")
    forms = {"CMYK": "JPEG", "YCbCr": "JPEG", "HSV": None}
    image = Image.fromarray(np.zeros((20, 20), np.uint16)) if mode == "I;16" else black.convert("RGB").convert(mode)
    form = forms.get(mode, "PNG")
    media = as_media(image, "image") if form is None else Media("image", encoded(image, form))
    loaded = load_image(media)
    assert loaded.mode == "RGB" and max(loaded.getpixel((10, 10))) < 4  # type: ignore[arg-type]


@pytest.mark.parametrize("channels", [1, 2])
def test_samples_become_a_file_without_loss_that_has_nothing_else(channels):
    """libsndfile adds the time of day: equal sounds of two seconds would be two media."""
    wave = np.random.default_rng(0).normal(size=(100, channels)).astype(np.float32)
    media = as_media((wave if channels > 1 else wave[:, 0], 16000), "audio")
    assert len(media.data) == 58 + wave.nbytes and media.data.endswith(wave.tobytes())
    read, rate = soundfile.read(io.BytesIO(media.data), dtype="float32", always_2d=True)
    info = soundfile.info(io.BytesIO(media.data))
    assert (info.format, info.subtype, rate) == ("WAV", "FLOAT", 16000)
    np.testing.assert_array_equal(read, wave)


def test_gray_of_sixteen_bits_is_scaled_and_what_is_transparent_is_white() -> None:
    gray = Image.fromarray(np.full((4, 4), 32896, np.uint16))
    assert load_image(Media("image", encoded(gray))).getpixel((0, 0)) == (128, 128, 128)
    assert load_image(as_media(Image.new("RGBA", (4, 4), (0, 0, 0, 0)), "image")).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    clear = Media("image", encoded(palette, "PNG", transparency=1))
    assert load_image(clear).getpixel((0, 0)) == (255, 255, 255)


def test_an_image_is_turned_upright_as_its_exif_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: width and height are exchanged, the upper left is now the upper right
    media = Media("image", encoded(picture("red", 56, 42), "JPEG", exif=exif, quality=95))
    assert measure(media) == Size(42, 56) and load_image(media).size == (42, 56)
    assert load_image(media).getpixel((42 - 14, 14))[1] < 40 < load_image(media).getpixel((10, 14))[1]  # type: ignore[index]


@pytest.mark.parametrize("to", [8000, 16000, 44100])
def test_a_sound_at_another_rate_keeps_its_pitch_and_its_level(to: int) -> None:
    heard = load_audio(tone(440.0, 0.5, rate=22050), to)
    assert len(heard) == to // 2
    assert np.abs(heard - samples(440.0, 0.5, to))[to // 20 : -to // 20].max() < 0.005
    above = resample(samples(6000.0, 0.5, 22050), 22050, 8000)  # more than half the new rate: removed
    assert np.abs(above[400:-400]).max() < 0.01


def test_nothing_is_decoded_by_as_media_nor_by_measure(red: Path) -> None:
    whole = red.read_bytes()
    red.write_bytes(whole[:60])  # the header is there, the pixels are not
    media = as_media("red.png", "image", red.parent)
    assert measure(media) == Size(56, 42)
    with pytest.raises(ValueError, match=r"the image .*red\.png is broken"):
        load_image(media)


BROKEN: dict[str, tuple[Any, str]] = {
    "missing": ("nowhere.png", r"there is no file '.*nowhere\.png'"),
    "empty file": ("empty.png", r"the file .*empty\.png is empty"),
    "folder": (".", r"is not a file"),
    "text": ("note.png", r"note\.png is not an image that can be read \(PNG, JPEG"),
    "no bytes": (b"", "its image is empty"),
    "address": ("https://example.org/cat.png", "is an address: nothing is downloaded"),
    "data URL of a sound": ("data:audio/wav;base64,AAAA", "is of the type audio/wav, not image"),
    "data URL as text": ("data:image/svg+xml,<svg/>", "is not in base64"),
    "bad base64": ("data:image/png;base64,%%%", "is not valid base64"),
    "a number": (7, "its image is .7. .int.; give a path"),
    "floats": (np.zeros((4, 4, 3)), "array of float64; give whole numbers from 0 to 255"),
    "no pixels": (np.zeros((0, 4, 3), np.uint8), r"array of shape \(0, 4, 3\)"),
    "other object": ({"caption": "a cat"}, "is an object with caption; it needs bytes, path"),
    "huge": ("huge.png", r"huge\.png has 10000x10000 pixels, more than 67,108,864; make it smaller"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_that_cannot_be_used_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "note.png").write_text("not a picture")
    (tmp_path / "huge.png").write_bytes(encoded(Image.new("1", (10000, 10000))))  # 12 kB
    value, reason = BROKEN[name]
    with pytest.raises(ValueError, match=reason):
        measure(as_media(value, "image", tmp_path))


def test_sounds_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"RIFF no sound")
    soundfile.write(tmp_path / "none.wav", np.zeros(0, np.float32), 16000)
    soundfile.write(tmp_path / "nan.wav", np.full(100, np.nan, np.float32), 16000, subtype="FLOAT")
    for value, reason in {
        "a.wav": r"a\.wav is not a sound that can be read",
        "none.wav": r"none\.wav is empty: it has no samples",
        "nowhere.wav": "there is no file",
    }.items():
        with pytest.raises(ValueError, match=reason):
            measure(as_media(value, "audio", tmp_path))
    with pytest.raises(ValueError, match="samples that are not finite"):
        load_audio(as_media("nan.wav", "audio", tmp_path), 16000)
    for unknown in (np.zeros(100, np.float32), (np.zeros(100, np.float32), None), {"array": np.zeros(9)}):
        with pytest.raises(ValueError, match=r"sampling_rate|array with its rate"):
            as_media(unknown, "audio")


def test_formats_that_start_other_programs_are_not_read() -> None:
    buffer = io.BytesIO()
    picture("red", 20, 20).save(buffer, "EPS")
    with pytest.raises(ValueError, match="is not an image that can be read"):
        measure(Media("image", buffer.getvalue()))


def test_the_identity_of_a_medium_changes_with_its_content(red: Path) -> None:
    path = as_media(red, "image")
    before = identity(path)
    assert identity(png("red")) == identity(png("red")) != identity(png("blue"))
    red.write_bytes(encoded(picture("blue", 80, 80)))
    assert identity(path) != before
    assert MAX_PIXELS == 8192**2

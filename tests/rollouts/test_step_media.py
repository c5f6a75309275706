"""Images and sounds in the record of a step: at their part of the conversation, once in a group, and bounded."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from oxrl.rollouts.step_answers import answer_lines, item_lines, merged_groups
from oxrl.rollouts.step_media import MOST_BYTES, GroupMedia, media_of
from oxrl.types import Generation, Media, Message, Rollout, Row, Sample, Turn
from tests.drawings import png

RED, BLUE, GREEN = png("red"), png("blue"), png("green")


def pictures(text, count=1):
    return Message("user", [*[{"type": "image"}] * count, {"type": "text", "text": text}])


def turn(media, *replies):
    return Turn((1,), Generation((2,), (-0.5,), "stop"), (Message("assistant", "go"), *replies), media)


def test_pictures_of_an_environment_are_those_of_their_messages():
    whole = Rollout(Sample("s", (pictures("a"),), media=(RED,)), (turn((RED,), pictures("b")), turn((RED, BLUE))))
    assert media_of(whole) == [RED, BLUE]
    shown = (pictures("a"),)
    latest = [turn((RED,), pictures("b")), turn((BLUE,), Message("user", "again")), turn((BLUE,), pictures("c"))]
    fresh = Rollout(Sample("s"), tuple(latest), prompt_messages=shown)
    assert media_of(fresh) == [RED, BLUE, None], "no prompt had the last one"
    assert media_of(Rollout(Sample("s", (pictures("a", 2),), media=(RED, GREEN)), (turn(()),))) == [RED, GREEN]
    assert media_of(Rollout(Sample("s", (Message("user", "a"),)), (turn(()),))) == []


def lines_of(*rollouts):
    (group,) = merged_groups([rollouts], [])
    return [json.loads(line) for line in answer_lines(group, {}, {}, lambda ids: ["x"] * len(ids), 0)]


def test_a_medium_is_in_one_answer_of_its_group_and_the_others_name_it():
    def answer(index, *media):
        turns = [turn((medium,), pictures("next")) for medium in media]
        return Rollout(Sample("s"), tuple(turns), 0, index, prompt_messages=(pictures("first"),))

    first, second = lines_of(answer(0, RED, RED, BLUE), answer(1, RED, GREEN))
    held = [entry.get("base64") for entry in first["media"]]
    assert base64.b64decode(held[0]) == RED.data and base64.b64decode(held[2]) == BLUE.data
    assert first["media"][1] == {"kind": "image", "mime_type": RED.mime_type, "answer": 0, "number": 0}
    assert [entry.get("answer") for entry in second["media"]] == [0, None, None] and second["media"][0]["number"] == 0
    assert base64.b64decode(second["media"][1]["base64"]) == GREEN.data and second["media"][2]["data"] is None
    item = (Row("a/chosen", [1, 2], [0, 1], media=(RED,)), Row("a/rejected", [1, 3], [0, 1], media=(RED,)))
    chosen, rejected = (json.loads(line) for line in item_lines(item, 3, {}, lambda ids: ["x"] * len(ids)))
    assert "base64" in chosen["media"][0] and rejected["media"][0]["answer"] == 0


def noise(side, kind="PNG"):
    pixels = np.random.default_rng(0).integers(0, 255, (side, 2 * side, 3), np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, kind)
    return written.getvalue()


@pytest.mark.parametrize("content", [noise(600), noise(16, "TIFF")], ids=["large", "not shown by browsers"])
def test_an_image_that_is_large_or_of_another_type_is_recorded_as_a_small_jpeg(content, tmp_path):
    file = tmp_path / "picture"
    file.write_bytes(content)
    (entry,) = GroupMedia().of(0, [Media("image", str(file))])
    assert (entry["mime_type"], entry["data"]) == ("image/jpeg", str(file))
    small = Image.open(io.BytesIO(base64.b64decode(entry["base64"])))
    before = Image.open(io.BytesIO(content))
    assert small.format == "JPEG" and max(small.size) == min(512, before.width)
    assert small.width == 2 * small.height and len(entry["base64"]) < 2 * MOST_BYTES


def test_what_cannot_be_recorded_says_why(tmp_path):
    missing = tmp_path / "missing.png"
    long = Media("audio", b"RIFF    WAVE" + bytes(MOST_BYTES), "audio/wav")
    short = Media("audio", b"RIFF    WAVE", "")
    found = GroupMedia().of(0, [Media("image", str(missing)), long, short, Media("image", b"no image")])
    assert found[0]["data"] == str(missing) and "No such file" in found[0]["error"]
    assert "65548 bytes" in found[1]["error"] and "base64" not in found[1]
    assert found[2]["mime_type"] == "audio/wav" and found[2]["base64"]
    assert "broken" in found[3]["error"] or "not an image" in found[3]["error"]


def test_the_media_of_a_group_are_bounded_together():
    sounds = [Media("audio", b"RIFF    WAVE" + bytes([number]) * 60_000, "audio/wav") for number in range(20)]
    found = GroupMedia().of(0, sounds)
    kept = [entry for entry in found if "base64" in entry]
    assert len(kept) == 2**20 // 60_012 < 20 and "60012 bytes: a record has at most 65536" in found[-1]["error"]

"""Judges and reward functions get the images and sounds of the rows that they grade."""

import base64
import json
from dataclasses import replace
from functools import partial

import anyio
import pytest

from oxrl.data.media import load_image
from oxrl.rewards import as_reward, grade, judge_reward
from oxrl.rewards.http_judge import llm_judge
from oxrl.rewards.judge import comparison_messages, judge_messages
from oxrl.types import Generation, Media, Message, Rollout, Sample, Score, Turn
from tests.drawings import encoded, picture, png, tone
from tests.rewards.rollouts import a_rollout
from tests.rewards.test_http_judge import judging

RED, BLUE = png("red"), png("blue")


def asked(*content, media=(RED,), answer="Red."):
    turn = Turn((1,), Generation((2,), (-0.5,), "stop", text=answer), (Message("assistant", answer),))
    return Rollout(Sample("rows:3", (Message("user", list(content)),), answer="red", media=tuple(media)), (turn,))


def text(words):
    return {"type": "text", "text": words}


ONE = asked({"type": "image"}, text("Which colour?"))


def shown(messages):
    """The user's part of a prompt: texts, and media as they are."""
    return [part["text"] if part["type"] == "text" else part[part["type"]] for part in messages[1].content]


def test_the_judges_prompt_has_the_images_where_the_conversation_has_them():
    two = asked(text("Is "), {"type": "image"}, text(" like <answer>"), {"type": "audio"}, media=(RED, tone(440)))
    for messages in (judge_messages(two, "Right?", (0, 10)), comparison_messages([two, two], [0, 1], "Right?")):
        found = shown(messages)
        assert [found.index(RED), found.index(tone(440))] == [1, 3]
        assert found[0] == "<conversation>\n[user]\nIs " and found[2] == " like ‹answer>"
        assert "".join(each for each in found if isinstance(each, str)) == messages[1].text
    (before, image, *_) = shown(judge_messages(asked(text("Which?")), "Right?", (0, 10)))
    assert before == "<conversation>\n" and image == RED, "a prompt without a place for it: at its start"


def test_the_judge_sees_the_images_of_replies():
    first = Turn(
        (1,),
        Generation((2,), (-0.5,), "stop", text="Look."),
        (Message("assistant", "Look."), Message("user", [{"type": "image"}])),
        media=(RED,),
    )
    (last,) = ONE.turns
    rollout = replace(ONE, turns=(first, last._replace(media=(RED, BLUE))))
    assert rollout.media == (RED, BLUE)
    found = shown(judge_messages(rollout, "Right?", (0, 10)))
    assert [found.index(RED), found.index(BLUE)] == [1, 3] and "[assistant]\nLook.\n\n[user]" in found[2]
    unseen = replace(rollout, turns=(first, last))
    (graded,) = anyio.run(partial(grade, [unseen], judge_reward(_never_asked)))
    assert "has 1 media, but its messages have placeholders for 2" in graded.error


async def _never_asked(messages):
    raise AssertionError("the judge is asked about an image that it cannot see")


def test_a_judge_over_http_gets_images_and_sounds_and_other_ones_are_other_requests(tmp_path):
    (tmp_path / "blue.png").write_bytes(BLUE.data)
    rollouts = [
        ONE,
        asked({"type": "image"}, text("Which colour?"), media=[Media("image", str(tmp_path / "blue.png"))]),
        asked({"type": "audio"}, text("Which colour?"), media=[tone(440)]),
        ONE,
    ]
    with judging("Score: 9", "Score: 2", "Score: 3") as server:
        by = llm_judge(base_url=f"{server.url}/v1", model="wise", concurrency=1)
        graded = [anyio.run(partial(grade, [each], by))[0] for each in rollouts]
    assert [each.reward for each in graded] == pytest.approx([0.9, 0.2, 0.3, 0.9])
    bodies = [body for _, _, body in server.seen]
    assert len(bodies) == 3, "equal requests are sent once"
    parts = [next(p for p in body["messages"][1]["content"] if p["type"] != "text") for body in bodies]
    urls = [f"data:image/png;base64,{base64.b64encode(each.data).decode()}" for each in (RED, BLUE)]
    assert [part["image_url"]["url"] for part in parts[:2]] == urls
    assert parts[2]["input_audio"] == {"data": base64.b64encode(tone(440).data).decode(), "format": "wav"}
    assert json.loads(json.dumps(bodies)) == bodies


def test_a_judge_over_http_never_sends_a_file_that_is_no_image(tmp_path):
    (tmp_path / "secret.png").write_text("a password")
    bitmap = Media("image", encoded(picture("red", 8, 8), "BMP"))
    with judging("Score: 9") as server:
        by = llm_judge(base_url=f"{server.url}/v1", model="wise")
        for medium in (
            Media("image", str(tmp_path / "secret.png")),
            bitmap,
            Media("image", str(tmp_path / "gone.png")),
        ):
            rollout = asked({"type": "image"}, media=[medium])
            (graded,) = anyio.run(partial(grade, [rollout], by))
            assert graded.score is None and "llm_judge failed" in graded.error
            with pytest.raises(ValueError, match="llm_judge cannot send the image of rows:3"):
                by.check(rollout.sample)
        (both,) = anyio.run(partial(grade, [rollout], llm_judge(base_url=f"{server.url}/v1", model="w", compare=True)))
        assert "llm_judge failed" in both.error
    assert server.seen == []


def test_a_reward_function_reads_the_media_of_its_rollouts():
    def is_of_the_picture(rollout: Rollout) -> float:
        return float(load_image(rollout.media[0]).getpixel((14, 14)) == (255, 0, 0))

    blue = asked({"type": "image"}, media=[BLUE])
    assert [each.reward for each in anyio.run(partial(grade, [ONE, blue], is_of_the_picture))] == [1.0, 0.0]


def test_a_reward_function_of_columns_gets_media_as_images_and_audios():
    def columns(completions, images, **others):
        assert "audios" not in others
        return [float(own[0] == RED) for own in images]

    own = as_reward(columns)
    blue = asked({"type": "image"}, media=[BLUE])
    assert [each.score for each in anyio.run(partial(grade, [ONE, blue], own))] == [Score(1.0), Score(0.0)]
    own.check(ONE.sample)
    with pytest.raises(ValueError, match="takes the column images"):
        own.check(a_rollout("x").sample)

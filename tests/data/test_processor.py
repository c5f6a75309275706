"""Rows with images and audio: their formats, the expansion by the model's processor, and the mask over expanded ids."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oxrl.algorithms import algorithm
from oxrl.data.fit import fit
from oxrl.data.formats import BadRow, RawRow, to_sample
from oxrl.data.media import load_audio, load_image
from oxrl.data.processor import MediaProcessor, processor_of
from oxrl.data.render import Renderer
from oxrl.data.sources import load_samples
from oxrl.models.load import load_processor
from oxrl.types import Media, Message, ModelConfig, Row, Sample
from tests.drawings import encoded, picture, png, tone

RED, WIDE = png("red", 56, 56), png("blue", 60, 90)  # 4 and 6 placeholders
IMAGE = 262  # <|image_pad|>
Built = tuple[ModelConfig, Any]


def processor(built: Built) -> MediaProcessor:
    found = processor_of(built[1])
    assert found is not None
    return found


def question(*texts: str | None) -> Message:
    """None is the place of an image."""
    return Message("user", [{"type": "image"} if each is None else {"type": "text", "text": each} for each in texts])


ANSWER = Message("assistant", "Red.")


def conversation(tiny_vlm: Built, messages: Any, media: Any, id: str = "rows:7") -> Row:
    (row,) = Renderer(tiny_vlm[1]).conversation(messages, id=id, media=media)
    return row


def test_ids_and_features_are_those_of_the_models_own_processor(tiny_vlm: Built, tiny_audio: Built) -> None:
    media = (RED, WIDE, png("green", 28, 28))
    text = "<|bos|>See <|vision_start|><|image_pad|><|vision_end|><|image_pad|> and <|image_pad|>!"
    own = processor(tiny_vlm)
    expected = own.processor(text=[text], images=[load_image(each) for each in media], return_tensors="pt")
    assert own.ids(text, media) == expected["input_ids"][0].tolist()
    features = own.features(media)
    assert set(features) == {"pixel_values", "image_grid_thw"}
    assert all((features[name] == expected[name]).all() for name in features)
    assert own.count(media) == [4, 6, 1]

    heard = processor(tiny_audio)
    sounds = (tone(440, 0.5), tone(880, 1.0, rate=8000))
    text = "<|audio_bos|><|AUDIO|><|audio_eos|><|AUDIO|>?"
    waves = [load_audio(each, 16000) for each in sounds]
    expected = heard.processor(text=[text], audio=waves, sampling_rate=16000, return_tensors="pt")
    assert heard.ids(text, sounds) == expected["input_ids"][0].tolist()
    assert (heard.features(sounds)["input_features"] == expected["input_features"]).all()
    assert heard.count(sounds) == [12, 25]


def test_ids_need_no_pixels_and_features_are_kept(tiny_vlm: Built, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(encoded(picture("red", 56, 56))[:60])
    cut = Media("image", str(tmp_path / "cut.png"))
    own = processor(tiny_vlm)
    assert own.ids("<|image_pad|>", (cut,)) == [IMAGE] * 4
    with pytest.raises(ValueError, match=r"cut\.png is broken"):
        own.features((cut,))
    assert own.features((RED,)) is own.features((png("red"),)) and own.features((WIDE,)) is not own.features((RED,))


def test_expanded_ids_become_one_placeholder_for_each_medium_again(tiny_vlm: Built) -> None:
    own, text = processor(tiny_vlm), "a<|image_pad|><|image_pad|>b<|image_pad|>"
    media = (RED, RED, WIDE)
    ids = own.ids(text, media)
    assert own.unexpanded(ids, media) == tiny_vlm[1](text)["input_ids"]
    with pytest.raises(ValueError, match="were they cut"):
        own.unexpanded(ids[:-1], media)
    with pytest.raises(ValueError, match="more placeholders than the 1 media"):
        own.unexpanded(ids, media[:1])


def test_the_mask_over_expanded_ids_trains_the_replies_and_no_placeholder(tiny_vlm: Built) -> None:
    chat = (question("What? ", None, "!"), ANSWER, question(None, None), Message("assistant", "Two."))
    row = conversation(tiny_vlm, chat, (RED, WIDE, RED))
    tokenizer = tiny_vlm[1]
    assert tokenizer.decode(row.tokens[row.mask]) == "Red.<|im_end|>Two.<|im_end|>"
    assert (row.tokens == IMAGE).sum() == 4 + 6 + 4 and not row.mask[row.tokens == IMAGE].any()
    assert row.media == (RED, WIDE, RED)
    text = tokenizer.decode(row.tokens).replace("<|image_pad|>", "")
    shown = "<|vision_start|><|vision_end|>"
    assert text == (
        f"<|bos|><|im_start|>user\nWhat? {shown}!<|im_end|>\n<|im_start|>assistant\nRed.<|im_end|>\n"
        f"<|im_start|>user\n{shown}{shown}<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>"
    )
    prompt = Renderer(tokenizer).prompt(chat[:1], media=(RED,))
    assert prompt.tolist() == row.tokens[: len(prompt)].tolist()


def test_a_text_with_images_is_trained_without_their_placeholders(tiny_vlm: Built) -> None:
    (row,) = Renderer(tiny_vlm[1], max_len=20).text("A cat <image>.", id="t", media=(WIDE,))
    assert tiny_vlm[1].decode(row.tokens[row.mask]) == " cat <|vision_start|><|vision_end|>.<|im_end|>"
    assert row.media == (WIDE,) and (row.tokens == IMAGE).sum() == 6


def test_an_image_needs_exactly_one_place(tiny_vlm: Built, tiny: Built) -> None:
    for media, reason in {
        (RED,): "message 0 has a placeholder for an image that the row does not have",
        (RED, WIDE, RED): "it has 3 of image, but its messages have placeholders for 2",
    }.items():
        with pytest.raises(ValueError, match=f"rows:7: {reason}"):
            conversation(tiny_vlm, (question(None, "or", None), ANSWER), media)
    with pytest.raises(ValueError, match="rows:7: the row has images or audio, but the model reads text only"):
        conversation(tiny, (question(None), ANSWER), (RED,))
    with pytest.raises(ValueError, match="rows:7: .*: the model cannot read audio, only image"):
        conversation(tiny_vlm, (Message("user", [{"type": "audio"}]), ANSWER), (tone(440),))
    with pytest.raises(ValueError, match="rows:7: message 1 is of the assistant and has an image"):
        conversation(tiny_vlm, (question("a"), Message("assistant", [{"type": "image"}])), (RED,))
    with pytest.raises(ValueError, match="special token '<|image_pad|>'"):
        conversation(tiny_vlm, (Message("user", "<|image_pad|>"), ANSWER), ())


def test_a_template_that_writes_no_placeholder_is_refused(tiny_vlm: Built) -> None:
    plain = {"chat_template": "{% for m in messages %}{{ m.role }}{% endfor %}"}
    with pytest.raises(ValueError, match="rows:7: the chat template writes 0 placeholders for 1 images"):
        Renderer(tiny_vlm[1], template_kwargs=plain).conversation((question(None), ANSWER), id="rows:7", media=(RED,))


def test_a_processor_of_another_model_is_noticed(tiny_vlm: Built, tiny_audio: Built) -> None:
    other = Renderer(tiny_vlm[1], processor=processor(tiny_audio))
    with pytest.raises(ValueError, match="rows:7: .*: the model cannot read image, only audio"):
        other.conversation((question(None), ANSWER), id="rows:7", media=(RED,))


def test_a_sound_longer_than_the_model_hears_is_refused_by_row(tiny_audio: Built) -> None:
    chat = (Message("user", [{"type": "audio"}]), ANSWER)
    with pytest.raises(ValueError, match=r"rows:7: the sound .* has 2.5 s, but the model reads 2 s; cut it"):
        conversation(tiny_audio, chat, (tone(440, 2.5),))


def test_a_row_is_never_cut_inside_of_a_medium(tiny_vlm: Built) -> None:
    chat = (question("a"), Message("assistant", "Yes."), question("b ", None), Message("assistant", "No."))
    row = conversation(tiny_vlm, chat, (WIDE,))
    first, last = np.flatnonzero(row.tokens == IMAGE)[[0, -1]]
    inside = fit([(row,)], int(last), "truncate").items[0][0]
    assert len(inside) == first and inside.media == () and inside.mask.any()
    after = fit([(row,)], int(last) + 2, "truncate").items[0][0]
    assert len(after) == last + 2 and after.media == (WIDE,)


def test_equal_placeholders_with_other_images_are_other_prompts(tiny_vlm: Built) -> None:
    rows = [conversation(tiny_vlm, (question(None), ANSWER), (each,)) for each in (RED, png("green", 56, 56), RED)]
    assert len({row.tokens.tobytes() for row in rows}) == 1
    assert rows[0].media == rows[2].media != rows[1].media


# Rows as TRL, verl and LLaMA-Factory write them.

TEXT = base64.b64encode(RED.data if isinstance(RED.data, bytes) else b"").decode()
URL = f"data:image/png;base64,{TEXT}"
ASKED = {"prompt": "What is it?", "answer": "red"}
FORMS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "column": ({**ASKED, "image": "red.png"}, [None, "What is it?"]),
    "columns": ({**ASKED, "images": ["red.png", "red.png"]}, [None, None, "What is it?"]),
    "marker": ({"prompt": "See <image>: what?", "answer": "red", "images": ["red.png"]}, ["See ", None, ": what?"]),
    "bytes of datasets": ({**ASKED, "image": {"bytes": RED.data, "path": None}}, [None, "What is it?"]),
    "base64": ({**ASKED, "images": [TEXT]}, [None, "What is it?"]),
    "Media": ({**ASKED, "image": RED}, [None, "What is it?"]),
    "several Media": ({**ASKED, "images": (RED, RED)}, [None, None, "What is it?"]),
    "PIL": ({**ASKED, "image": picture("red", 56, 56)}, [None, "What is it?"]),
    "array": ({**ASKED, "image": np.asarray(picture("red", 56, 56))}, [None, "What is it?"]),
    "TRL": (
        {
            "prompt": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?", "image": None}]}
            ],
            "images": ["red.png"],
            "answer": "red",
        },
        [None, "What is it?"],
    ),
    "verl": (
        {
            "prompt": [{"role": "user", "content": "<image>What is it?"}],
            "images": [{"bytes": RED.data}],
            "answer": "red",
        },
        [None, "What is it?"],
    ),
    "LLaMA-Factory": (
        {
            "conversations": [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "Red."}],
            "images": ["red.png"],
        },
        [None, "What is it?"],
    ),
    "parts with paths": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "red.png"}, {"text": "What is it?"}]}]},
        [None, "What is it?"],
    ),
    "parts of the chat API": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is it?"},
                        {"type": "image_url", "image_url": {"url": URL}},
                    ],
                }
            ]
        },
        ["What is it?", None],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_format_of_rows_with_images_is_the_same_sample(tmp_path: Path, tiny_vlm: Built, name: str) -> None:
    (tmp_path / "red.png").write_bytes(RED.data if isinstance(RED.data, bytes) else b"")
    columns, parts = FORMS[name]
    sample = to_sample(RawRow("rows:3", columns), folder=tmp_path)
    assert sample.messages[0] == question(*parts)
    assert len(sample.media) == parts.count(None)
    assert all(load_image(each).tobytes() == load_image(RED).tobytes() for each in sample.media)
    assert not sample.metadata
    ids = Renderer(tiny_vlm[1]).prompt(sample.messages[:1], media=sample.media)
    assert (ids == IMAGE).sum() == 4 * parts.count(None)


def test_an_image_belongs_to_the_first_user_and_each_is_checked_with_its_row(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "system", "content": "Look."}, {"role": "user", "content": "Hi"}], "image": "red.png"}
    (tmp_path / "red.png").write_bytes(encoded(picture("red", 56, 56)))
    sample = to_sample(RawRow("rows:3", chat), folder=tmp_path)
    assert [message.content for message in sample.messages] == [
        "Look.",
        [{"type": "image"}, {"type": "text", "text": "Hi"}],
    ]
    faults: list[tuple[dict[str, Any], str]] = [
        ({**ASKED, "image": "nowhere.png"}, "there is no file"),
        ({**ASKED, "image": "https://example.org/a.png"}, "is an address: nothing is downloaded"),
        ({"prompt": "<image> or <image>?", "answer": "a", "images": ["red.png"]}, "placeholder for an image that"),
        ({"prompt": "<image>?", "answer": "a", "images": ["red.png"] * 2}, "has 2 of image, but .* placeholders for 1"),
        ({**ASKED, "prompt": "<image>", "audio": "red.png"}, "has a placeholder for an image"),
        ({"text": "A cat.", "videos": ["a.mp4"]}, "videos are not read"),
        ({**ASKED, "picture": "red.png"}, "map images=picture"),
        ({"prompt": "a", "chosen": [{"role": "assistant", "content": [{"type": "image", "image": "red.png"}]}],
          "rejected": "b"}, "has an image"),
    ]  # fmt: skip
    for columns, reason in faults:
        with pytest.raises(BadRow, match=f"rows:3: .*{reason}"):
            to_sample(RawRow("rows:3", columns), folder=tmp_path)
    mapped = to_sample(
        RawRow("rows:3", {**ASKED, "picture": "red.png"}), columns={"images": "picture"}, folder=tmp_path
    )
    assert len(mapped.media) == 1


def test_paths_are_relative_to_the_file_and_images_of_datasets_stay_encoded(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(encoded(picture("red", 56, 56)))
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ASKED, "image": "pictures/red.png"}))
    (sample,) = load_samples(tmp_path / "rows.jsonl").samples
    assert sample.media == (Media("image", str(tmp_path / "pictures" / "red.png")),)
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "answer": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
        }
    )
    rows = datasets.Dataset.from_list([{**ASKED, "images": [{"bytes": RED.data, "path": None}]}], features=features)
    assert load_samples(rows).samples[0].media == (RED._replace(mime_type=""),)
    rows.to_parquet(tmp_path / "rows.parquet")
    assert load_samples(tmp_path / "rows.parquet").samples[0].media == (RED._replace(mime_type=""),)


def test_every_kind_of_algorithm_makes_rows_with_media(tiny_vlm: Built) -> None:
    render = Renderer(tiny_vlm[1])
    asked = Sample("s", (question(None, "?"),), media=(WIDE,))
    samples = {
        "dpo": replace(asked, chosen=(ANSWER,), rejected=(Message("assistant", "Blue."),)),
        "kto": replace(asked, messages=(*asked.messages, ANSWER), label=True),
        "rm": replace(asked, chosen=(ANSWER,), rejected=(Message("assistant", "Blue."),)),
        "grpo": replace(asked, responses=((ANSWER,), (ANSWER,)), rewards=(1.0, 0.0)),
    }
    for name, sample in samples.items():
        for item in algorithm(name).assemble(sample, render):
            for row in item:
                assert row.media == (WIDE,) and (row.tokens == IMAGE).sum() == 6


def test_models_of_text_have_no_processor(tiny: Built, tiny_vlm: Built) -> None:
    assert load_processor(tiny[0]) is None and processor_of(tiny[1]) is None
    assert load_processor(tiny_vlm[0]) is not None
    assert processor(tiny_vlm) is load_processor(tiny_vlm[0], tiny_vlm[1])
    assert processor(tiny_vlm).placeholder_ids == {262, 263} == Renderer(tiny_vlm[1]).placeholder_ids

"""LibriSpeech: a sentence of an audiobook, and its words in capital letters without punctuation."""

from __future__ import annotations

from oxrl.data.formats import BadRow
from oxrl.data.parts import media_of_column, take_media
from oxrl.data.prepare.recipe import Dataset, Raw, known, text_of, user_prompt
from oxrl.types import Message, Sample

QUESTION = "Write down what is said."


def convert(row: Raw) -> list[Sample]:
    try:
        sounds = media_of_column(row.get("audio"), "audio", ".")
        messages, media = take_media(user_prompt(QUESTION), sounds)
    except ValueError as error:
        raise BadRow(str(error)) from None
    if len(media) != 1:
        raise BadRow(f"there are {len(media)} sounds instead of one")
    reply = Message("assistant", text_of(row, "text").capitalize())
    return [Sample("", (*messages, reply), metadata=known(row, "speaker_id", "chapter_id"), media=media)]


LIBRISPEECH = Dataset(
    name="librispeech",
    summary="sentences of audiobooks with their words",
    licence="CC BY 4.0",
    convert=convert,
    hub="openslr/librispeech_asr:clean",
    splits={"train": "train.100", "validation": "validation", "test": "test"},
    elsewhere="openslr.org/12, as rows with audio and text",
)

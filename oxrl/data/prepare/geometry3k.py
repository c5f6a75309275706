"""Geometry3K: questions about a diagram, with the answer as a number or an expression; `<image>` stands in the text."""

from __future__ import annotations

from oxrl.data.formats import BadRow
from oxrl.data.parts import media_of_column, take_media
from oxrl.data.prepare.recipe import Dataset, Raw, text_of, user_prompt
from oxrl.types import Sample


def convert(row: Raw) -> list[Sample]:
    try:
        images = media_of_column(row.get("images"), "image", ".")
        messages, media = take_media(user_prompt(text_of(row, "problem")), images)
    except BadRow:
        raise
    except ValueError as error:
        raise BadRow(str(error)) from None
    if not media:
        raise BadRow("there is no image")
    return [Sample("", messages, answer=text_of(row, "answer"), media=media)]


GEOMETRY3K = Dataset(
    name="geometry3k",
    summary="geometry questions about a diagram; the answer is a number or an expression",
    licence="MIT",
    convert=convert,
    hub="hiyouga/geometry3k",
    splits={"train": "train", "validation": "validation", "test": "test"},
    elsewhere="huggingface.co/datasets/hiyouga/geometry3k, data/train-*.parquet and test-*.parquet",
    reward="math_reward_func",
    instruction="Reason step by step. Write the final answer in \\boxed{}.",
)

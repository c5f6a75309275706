"""UltraFeedback, binarised: prompts, and pairs of a better and a worse reply."""

from __future__ import annotations

from oxrl.data.formats import BadRow, RawRow, to_sample
from oxrl.data.prepare.recipe import Dataset, Raw, known, text_of, user_prompt
from oxrl.types import Sample


def convert(row: Raw) -> list[Sample]:
    return [Sample("", user_prompt(text_of(row, "prompt")), metadata=known(row, "prompt_id"))]


def convert_pairs(row: Raw) -> list[Sample]:
    better, worse = row.get("score_chosen"), row.get("score_rejected")
    if better is not None and better == worse:
        raise BadRow("both replies have the same score")
    return [to_sample(RawRow("", known(row, "chosen", "rejected", "score_chosen", "score_rejected", "prompt_id")))]


ULTRAFEEDBACK = Dataset(
    name="ultrafeedback",
    summary="prompts of many kinds, for a reward model or a judge",
    licence="MIT",
    convert=convert,
    hub="HuggingFaceH4/ultrafeedback_binarized",
    splits={"train": "train_prefs", "test": "test_prefs"},
    reward="rm_reward_func",
)
ULTRAFEEDBACK_PAIRS = ULTRAFEEDBACK._replace(
    name="ultrafeedback_pairs",
    summary="pairs of replies, as GPT-4 scored them",
    convert=convert_pairs,
    reward=None,
)

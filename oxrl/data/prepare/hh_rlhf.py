"""HH-RLHF: pairs of dialogues that agree up to their last reply. They hold offensive text by design."""

from __future__ import annotations

from oxrl.data.formats import RawRow, to_sample
from oxrl.data.prepare.recipe import Dataset, Raw, text_of
from oxrl.types import Sample


def convert(row: Raw) -> list[Sample]:
    pair = {side: f"\n\n{text_of(row, side)}" for side in ("chosen", "rejected")}
    return [to_sample(RawRow("", pair))]


HH_RLHF = Dataset(
    name="hh_rlhf",
    summary="pairs of dialogues: helpful and harmless",
    licence="MIT",
    convert=convert,
    hub="Anthropic/hh-rlhf",
    elsewhere="github.com/anthropics/hh-rlhf, such as harmless-base/train.jsonl.gz and test.jsonl.gz",
    seen_real_rows=True,
)

"""HH-RLHF: pairs of dialogues that agree up to their last reply. They contain offensive text by design."""

from __future__ import annotations

from oxrl.data.formats import BadRow, RawRow, to_sample
from oxrl.data.prepare.recipe import Dataset, Raw, text_of
from oxrl.types import Sample


def convert(row: Raw) -> list[Sample]:
    pair = {side: f"\n\n{text_of(row, side)}" for side in ("chosen", "rejected")}
    sample = to_sample(RawRow("", pair))
    if len(sample.chosen) > 1 or len(sample.rejected) > 1:
        raise BadRow("the dialogues differ in more than their last reply")
    if not (sample.chosen[0].content and sample.rejected[0].content):
        raise BadRow("a reply is empty")
    return [sample]


HH_RLHF = Dataset(
    name="hh_rlhf",
    summary="pairs of dialogues: helpful and harmless",
    licence="MIT",
    convert=convert,
    hub="Anthropic/hh-rlhf",
    elsewhere="github.com/anthropics/hh-rlhf, such as harmless-base/train.jsonl.gz and test.jsonl.gz",
    seen_real_rows=True,
)

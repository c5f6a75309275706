"""Self-Instruct's seed tasks: instructions with one or more instances of input and output, written by people."""

from __future__ import annotations

from oxrl.data.formats import BadRow
from oxrl.data.prepare.recipe import Dataset, Raw, known, text_of, user_prompt
from oxrl.types import Message, Sample


def convert(row: Raw) -> list[Sample]:
    instruction, instances = text_of(row, "instruction"), row.get("instances")
    if not isinstance(instances, list) or not instances:
        raise BadRow("instances must be a list of inputs and outputs")
    return [
        Sample(
            "",
            (
                *user_prompt(instruction, str(instance.get("input") or "").strip()),
                Message("assistant", text_of(instance, "output")),
            ),
            metadata=known(row, "id", "name"),
        )
        for instance in instances
    ]


SELF_INSTRUCT = Dataset(
    name="self_instruct",
    summary="instructions and replies, written by people",
    licence="Apache-2.0",
    convert=convert,
    splits={"train": "train"},
    elsewhere="github.com/yizhongw/self-instruct, data/seed_tasks.jsonl or human_eval/user_oriented_instructions.jsonl",
    held_out=0.1,
    seen_real_rows=True,
)

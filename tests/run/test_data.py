"""Rows that would train with a doubtful result are named before training."""

import logging

import pytest

from oxrl.config import check_config
from oxrl.run.prepare import resolve
from tests.rows import write_jsonl

CONTEXT = 2048  # of tiny, whose tokens are bytes


@pytest.fixture
def warnings_for(tmp_path, caplog):
    def resolved(rows, **sections):
        path = write_jsonl(tmp_path / "rows.jsonl", rows)
        data = {"train_files_path": str(path), "max_seq_len": 2 * CONTEXT}
        with caplog.at_level(logging.WARNING):
            resolve(check_config({"model": {"name": "tiny"}, "data": data, **sections}))
        return [message for message in caplog.messages if message.startswith("rows: ")]

    return resolved


def test_rows_beyond_the_context_of_the_model_are_named(warnings_for):
    rows = [{"prompt": "Hi", "response": "x" * length} for length in (5, CONTEXT, CONTEXT - 100)]
    (warning,) = warnings_for(rows, train={"alg_name": "sft"})
    assert warning == (
        "rows: 1 rows need more than the 2048 tokens that the model was made for: rows.jsonl:2 (2071); "
        "data.max_seq_len: 2048 leaves them out"
    )


def test_prompts_that_leave_no_room_in_the_context_are_named(warnings_for):
    rows = [{"prompt": "x" * length, "answer": "4"} for length in (5, CONTEXT - 100, CONTEXT + 100)]
    (warning,) = warnings_for(rows, reward={"reward_func": "number_match"}, rollout={"max_tokens": 200})
    assert "rows: 2 rows need more than the 2048 tokens" in warning
    assert "rows.jsonl:2 (21" in warning and "rows.jsonl:3 (23" in warning


def test_rows_that_train_on_the_end_of_an_empty_reply_are_named(warnings_for):
    rows = [{"prompt": "Hi", "response": text} for text in ("yes", "", *("" for _ in range(6)))]
    (warning,) = warnings_for(rows, train={"alg_name": "sft"})
    assert warning.startswith("rows: 7 rows train on no more than the end of their reply, which is empty: rows.jsonl:2")
    assert warning.endswith("rows.jsonl:6, ...")


def test_good_rows_cause_no_warning(warnings_for):
    rows = [{"prompt": "Hi", "response": "x" * (CONTEXT - 23)}]
    assert warnings_for(rows, train={"alg_name": "sft"}) == []

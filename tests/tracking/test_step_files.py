"""Files of records: complete or absent, bounded, and read back as written."""

import json
import resource
from contextlib import contextmanager

import numpy as np
import pytest

from oxrl.tracking.step_files import (
    INDEX,
    StepFiles,
    json_numbers,
    json_text,
    parse_step,
    read_index,
    read_step,
    recorded_steps,
)

ANSWER = json_text({"kind": "answer", "group": 0, "index": 0})


def write(files, *steps):
    for step in steps:
        files.write({"kind": "step", "step": step, "loss": step / 3}, [ANSWER], {"groups": 1})


def opened(run, keep=100, keep_until=-1):
    return StepFiles(run, keep=keep, keep_until=keep_until)


def test_a_step_is_read_as_it_was_written(tmp_path):
    write(opened(tmp_path), 1, 2)
    assert read_step(tmp_path, 2) == ({"kind": "step", "step": 2, "loss": 2 / 3}, [json.loads(ANSWER)])
    assert [(line["step"], line["file"], line["groups"]) for line in read_index(tmp_path)] == [
        (1, "step_000001.jsonl", 1),
        (2, "step_000002.jsonl", 1),
    ]
    assert read_index(tmp_path)[0]["bytes"] == (tmp_path / "record" / "step_000001.jsonl").stat().st_size


def test_the_last_steps_are_kept_and_the_index_has_all(tmp_path):
    write(opened(tmp_path, keep=3), *range(1, 8))
    assert recorded_steps(tmp_path) == [5, 6, 7]
    assert [line["step"] for line in read_index(tmp_path)] == list(range(1, 8))
    opened(tmp_path, keep=2, keep_until=7)
    assert recorded_steps(tmp_path) == [6, 7], "a resume with a lower bound"
    with pytest.raises(ValueError, match="no record of step 3; it has 2 steps from 6 to 7"):
        read_step(tmp_path, 3)


def test_a_resumed_run_drops_later_steps_and_drafts(tmp_path):
    write(opened(tmp_path), 1, 2, 3)
    (tmp_path / "record" / ".step_000004.jsonl.draft").write_text("{")
    files = opened(tmp_path, keep_until=2)
    assert sorted(file.name for file in (tmp_path / "record").iterdir()) == [
        INDEX,
        "step_000001.jsonl",
        "step_000002.jsonl",
    ]
    write(files, 3)
    assert [line["step"] for line in read_index(tmp_path)] == recorded_steps(tmp_path) == [1, 2, 3]


@contextmanager
def files_of_at_most(size):
    """Writes beyond it fail, after what fits was written: as on a full disk, or at a kill."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_step_whose_write_ends_early_leaves_no_file_under_its_name(tmp_path):
    files = opened(tmp_path)
    write(files, 1)
    long = json_text({"kind": "answer", "group": 0, "index": 0, "messages": "x" * 100_000})
    with files_of_at_most(20_000), pytest.raises(OSError, match="large"):
        files.write({"kind": "step", "step": 2}, [long], {})
    assert recorded_steps(tmp_path) == [line["step"] for line in read_index(tmp_path)] == [1]
    write(opened(tmp_path, keep_until=1), 2)
    assert sorted(file.name for file in (tmp_path / "record").iterdir()) == [
        INDEX,
        "step_000001.jsonl",
        "step_000002.jsonl",
    ]


def test_a_torn_line_of_the_index_is_left_out(tmp_path):
    write(opened(tmp_path), 1, 2)
    with (tmp_path / "record" / INDEX).open("a") as index:
        index.write('{"step": 3, "fi')
    assert [line["step"] for line in read_index(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not the record of a step"),
        (ANSWER, "is not the record of a step"),
        ('{"kind":"step"}\n{"kind":', "line 2 is damaged"),
        ('{"kind":"step"}\n[1]', "line 2 is damaged: it must be an object"),
        ('{"kind":"step","a":' + "[" * 200 + "]" * 200 + "}", "nested deeper"),
    ],
)
def test_a_damaged_file_is_named(content, message):
    with pytest.raises(ValueError, match=message):
        parse_step(content.encode(), "step_000001.jsonl")


def test_a_folder_without_a_record_says_how_to_get_one(tmp_path):
    with pytest.raises(ValueError, match=r"rollout\.record"):
        recorded_steps(tmp_path)


def test_numbers_read_back_as_the_same_float32():
    values = np.float32(
        np.concatenate([np.random.default_rng(0).normal(size=500) * 10.0 ** np.arange(-25, 25).repeat(10), [0, 1]])
    )
    known = np.ones(len(values), bool)
    assert (np.float32(json.loads(json_numbers(values, known))) == values).all()
    assert (
        json_numbers(np.float32([1.5, np.nan, np.inf, 2]), np.array([True, True, True, False]))
        == "[1.5,null,null,null]"
    )
    assert json_numbers(np.array([3, 4]), np.array([True, False])) == "[3,null]"


def test_numbers_that_json_does_not_have_are_null():
    assert json_text({"a": float("nan"), "b": [float("inf"), 1.5], "c": "x"}) == '{"a":null,"b":[null,1.5],"c":"x"}'

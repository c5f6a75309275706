from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from oxrl.data.formats import BadRow, RawRow
from oxrl.data.sources import load_samples, read_rows
from oxrl.types import Message, Sample
from tests.waiting import HANG

ROWS = [{"prompt": "2+2?", "answer": "4"}, {"prompt": "naïve, “quoted”?\nyes", "answer": "5"}]


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_lines(path: Path, *rows: str | dict[str, Any]) -> Path:
    return write(path, "".join(row if isinstance(row, str) else jsonl([row]) for row in rows))


def fresh_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, where nothing has been imported yet."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=HANG)


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz", "TRAIN.JSONL"])
def test_jsonl_rows_know_their_line(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "\n" + jsonl(ROWS))
    assert list(read_rows(path)) == [RawRow(f"{name}:2", ROWS[0]), RawRow(f"{name}:3", ROWS[1])]


@pytest.mark.parametrize("name", ["train.json", "train.json.gz"])
def test_a_json_list_is_numbered_by_row(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, json.dumps(ROWS, indent=2))
    assert list(read_rows(str(path))) == [RawRow(f"{name}:1", ROWS[0]), RawRow(f"{name}:2", ROWS[1])]


def test_parquet_rows_are_those_that_were_written(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": str(i)}], "label": i % 2 == 0} for i in range(3000)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    read = list(read_rows(tmp_path / "train.parquet"))
    assert [row.columns for row in read] == rows
    assert [read[0].where, read[-1].where] == ["train.parquet:1", "train.parquet:3000"]


@pytest.mark.parametrize("name", ["train.csv", "train.csv.gz"])
def test_a_csv_row_is_known_by_its_first_line(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, 'prompt,answer\n2+2?,4\n\n"two\nlines, ""quoted""",5\nlast,6\n')
    assert list(read_rows(path)) == [
        RawRow(f"{name}:2", {"prompt": "2+2?", "answer": "4"}),
        RawRow(f"{name}:4", {"prompt": 'two\nlines, "quoted"', "answer": "5"}),
        RawRow(f"{name}:6", {"prompt": "last", "answer": "6"}),
    ]


def test_a_byte_order_mark_is_not_part_of_the_first_column(tmp_path: Path) -> None:
    for name, content in {"a.csv": "prompt\nhi\n", "a.jsonl": '{"prompt": "hi"}\n'}.items():
        path = write(tmp_path / name, b"\xef\xbb\xbf" + content.encode())
        assert [row.columns for row in read_rows(path)] == [{"prompt": "hi"}]


def test_rows_in_memory_are_a_list_a_dataset_or_datasets_by_split() -> None:
    from datasets import Dataset, DatasetDict

    expected = [RawRow("rows:1", ROWS[0]), RawRow("rows:2", ROWS[1])]
    assert list(read_rows(ROWS)) == expected
    assert list(read_rows(Dataset.from_list(ROWS))) == expected
    splits = DatasetDict({"test": Dataset.from_list(ROWS[1:])})
    assert list(read_rows(splits, split="test")) == [RawRow("test:1", ROWS[1])]
    with pytest.raises(ValueError, match="no split 'train'; the dataset has: test"):
        read_rows(splits)


def test_jsonl_is_read_as_it_is_consumed(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(jsonl(ROWS * 10_000))
    rows = read_rows(path)
    next(rows)
    with path.open("a") as file:
        file.write('{"late": true}\n')
    assert list(rows)[-1].columns == {"late": True}


def test_a_line_that_cannot_be_parsed_is_a_row_with_an_error_and_reading_continues(tmp_path: Path) -> None:
    for line, error in (
        (b"[" * 100_000, "the line cannot be used: lists and objects are nested deeper"),
        (b'{"a": 1, "a": 2}', "the line cannot be used: the key 'a' occurs twice"),
        (b'{"a": ' + 5000 * b"7" + b"}", "the line cannot be used: a number is too long"),
    ):
        first, second = read_rows(write(tmp_path / "a.jsonl", line + b'\n{"a": 1}\n'))
        assert first.error.startswith(error) and second.columns == {"a": 1}
    lines = write(tmp_path / "a.jsonl", b'{"a": 1}\n{"a": \n[1]\n{"a": "\xff"}\n{"a": 2}\n')
    rows = list(read_rows(lines))
    assert [row.columns for row in rows] == [{"a": 1}, {}, {}, {}, {"a": 2}]
    assert ["not JSON" in rows[1].error, "a list" in rows[2].error, "UTF-8" in rows[3].error] == [True] * 3
    cells = list(read_rows(write(tmp_path / "a.csv", "a,b\n1,2\n1,2,3\n3,4\n")))
    assert [row.where for row in cells if row.error] == ["a.csv:3"]
    assert cells[1].error == "the line has 3 cells, the header has 2"
    assert cells[2].columns == {"a": "3", "b": "4"}


@pytest.mark.parametrize("surrogate", [rb"\ud83d", rb"\uDE00", b"\xed\xa0\xbd"])
def test_a_lone_surrogate_is_found_and_a_pair_is_accepted(tmp_path: Path, surrogate: bytes) -> None:
    rows = [b'{"a": "\\ud83d\\ude00"}', b'{"a": ["x", {"b": "' + surrogate + b'"}]}']
    for path in (
        write(tmp_path / "a.jsonl", b"\n".join(rows)),
        write(tmp_path / "a.json", b"[" + b",".join(rows) + b"]"),
    ):
        whole, broken = read_rows(path)
        assert (whole.columns, whole.error) == ({"a": "\N{GRINNING FACE}"}, "")
        assert broken.where == f"{path.name}:2" and "lone surrogate" in broken.error


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", "\n\n", "has no rows"),
        ("a.json", "", "has no rows"),
        ("a.json", "[]", "has no rows"),
        ("a.csv", "prompt,answer\n", "has no rows"),
        ("a.json", '{"a": 1}', "must contain a list of objects, it contains a dict"),
        ("a.json", jsonl(ROWS), r"is not JSON .*line 2.*\.jsonl"),
        ("a.csv", "a,a\n1,2\n", "has a column twice"),
        ("a.csv", 'a,b\n1,2\n"open,3\n4,5\n', "a.csv:3 cannot be read as CSV"),
        ("a.csv", b"a\n\xff\n", "a.csv:2 is not UTF-8"),
        ("a.json", b'[{"a": 1},\n{"a": "\xff"}]', "a.json:2 is not UTF-8"),
        ("a.json", "[" * 100_000, "a.json cannot be used: lists and objects are nested deeper"),
        ("a.json", '[{"a": 1, "a": 2}]', "a.json cannot be used: the key 'a' occurs twice"),
        ("a.parquet", "not parquet", "is damaged or not a Parquet file"),
        ("a.txt", "hello", r"unknown file type of .*a\.txt.*\.jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        list(read_rows(path))


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(jsonl(ROWS).encode())
    for content in (whole[:-12], b"plain text"):
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz is corrupt"):
            list(read_rows(path))


def test_a_damaged_page_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS * 100), path, compression="gzip")
    content = bytearray(path.read_bytes())
    content[40:60] = bytes(20)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.parquet is damaged"):
        list(read_rows(path))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"train\.jsonl is a pipe or a device: save the rows to a file"):
        read_rows(path)


def test_a_line_has_a_longest_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oxrl.data.sources.MAX_LINE", 100)
    path = write(tmp_path / "a.jsonl.gz", jsonl(ROWS) + " " * 1_000_000)
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz:3 is longer than 100 bytes"):
        list(read_rows(path))


def test_a_missing_file_gets_the_nearest_names(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", jsonl(ROWS))
    with pytest.raises(ValueError, match=r"no file .*trian\.jsonl; did you mean train\.jsonl"):
        read_rows(tmp_path / "trian.jsonl")
    with pytest.raises(ValueError, match=r"no file .*train\.jsonl, nor a folder"):
        read_rows(tmp_path / "nowhere" / "train.jsonl")
    with pytest.raises(ValueError, match=r"is a folder: pass one of its data files \(train\.jsonl\)"):
        read_rows(str(tmp_path))


def test_other_types_of_source_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot read rows from int"):
        read_rows(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no rows"):
        list(read_rows([]))


def test_sample_ids_are_file_and_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", {"text": "one"}, "\n", {"text": "two"}, {"text": "three"})
    loaded = load_samples(path)
    assert loaded.samples == [
        Sample("train.jsonl:1", text="one"),
        Sample("train.jsonl:3", text="two"),
        Sample("train.jsonl:4", text="three"),
    ]
    assert (loaded.format, loaded.skipped) == ("text", [])
    assert load_samples(path, limit=2).samples == loaded.samples[:2]


def test_parquet_gaps_do_not_change_what_a_row_is(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "Hi", "name": None}], "text": None, "tools": None}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load_samples(tmp_path / "a.parquet").samples == [
        Sample("a.parquet:1", messages=(Message("user", "Hi"),), metadata={"text": None})
    ]


def test_a_bad_row_stops_the_load_unless_it_is_to_be_skipped(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        {"text": "one"},
        "{broken\n",
        {"text": ""},
        {"prompt": "Hi", "answer": "4"},
        {"text": "two"},
    )
    with pytest.raises(BadRow, match=r"^a\.jsonl:2: the line is not JSON"):
        load_samples(path)
    loaded = load_samples(path, bad_rows="skip")
    assert [sample.text for sample in loaded.samples] == ["one", "two"]
    assert [where for where, _ in loaded.skipped] == ["a.jsonl:2", "a.jsonl:3", "a.jsonl:4"]
    assert [reason for _, reason in loaded.skipped[1:]] == [
        "text is empty",
        "its format is 'prompt_answer', but that of the rows before it is 'text'",
    ]


def test_a_load_without_a_single_good_row_stops_even_when_skipping(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": ""}, {"text": 3})
    for chosen in (None, "text"):
        with pytest.raises(ValueError, match=r"none of the 2 rows can be used; the first, a\.jsonl:1: text is empty"):
            load_samples(path, bad_rows="skip", format=chosen)


def test_mistakes_in_the_call_are_never_skipped() -> None:
    rows = [{"text": "one"}]
    with pytest.raises(ValueError, match="there is no format 'txt'; did you mean text"):
        load_samples(rows, format="txt", bad_rows="skip")
    with pytest.raises(ValueError, match="'txt' is not a column name"):
        load_samples(rows, columns={"txt": "text"}, bad_rows="skip")
    with pytest.raises(ValueError, match="bad_rows must be 'stop' or 'skip', not 'ignore'"):
        load_samples(rows, bad_rows="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit must be 1 or more, not 0"):
        load_samples(rows, limit=0)


def test_a_hub_id_without_network_is_one_sentence() -> None:
    with pytest.raises(ValueError) as caught:
        read_rows("acme/nothing:main")
    error = str(caught.value)
    assert error.startswith("there is no file acme/nothing:main")
    assert "the hub cannot be reached" in error
    assert "pass a local file (.jsonl, " in error
    assert "\n" not in error and caught.value.__suppress_context__, "no traceback of the hub client above it"


def test_reading_jsonl_loads_no_heavy_library(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", jsonl(ROWS))
    run = fresh_python(
        "import sys; from oxrl.data.buffer import DataBuffer; from oxrl.data.sources import load_samples\n"
        f"DataBuffer(load_samples({str(path)!r}).samples).get_prompts(3)\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pyarrow', 'pandas'} & set(sys.modules)))"
    )
    assert run.stdout.strip() == "[]", run.stderr

"""Files, datasets in memory and hub ids become raw rows, and these become samples.

A line that cannot be parsed is still a row, one with an `error`: whoever reads the rows decides whether to stop or to
skip it. What the columns of a row mean is the business of `formats`.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias

from oxrl.data.formats import BadRow, RawRow, recognise, to_sample
from oxrl.names import did_you_mean
from oxrl.types import Sample

Rows: TypeAlias = Iterable[Mapping[str, Any]]
Source: TypeAlias = str | os.PathLike[str] | Rows | Mapping[str, Rows]
"""A path, a hub id (`"owner/name"` or `"owner/name:subset"`), rows in memory, or such rows by split."""

_PERHAPS_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_HALF = re.compile("[\ud800-\udfff]")


class Loaded(NamedTuple):
    """`Loaded([Sample(...), ...], "alpaca", [("train.jsonl:7", "output is a number, ...")])`."""

    samples: list[Sample]
    format: str
    skipped: list[tuple[str, str]]


def load_samples(
    source: Source,
    *,
    columns: Mapping[str, str] | None = None,
    format: str | None = None,
    bad_rows: Literal["stop", "skip"] = "stop",
    limit: int | None = None,
    split: str = "train",
) -> Loaded:
    """Samples of any source; `columns` maps our names to theirs, `split` is as in `read_rows`, `limit` counts samples.

    Without `format` the first usable row decides, and a later row that reads as another format is a bad one. A bad row
    stops the load, or is skipped and listed; when every row is bad the load stops anyway.
    """
    if bad_rows not in ("stop", "skip"):
        raise ValueError(f"bad_rows must be 'stop' or 'skip', not {bad_rows!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more, not {limit}")
    samples: list[Sample] = []
    skipped: list[tuple[str, str]] = []
    first_format = format
    for row in read_rows(source, split=split):
        try:
            sample = to_sample(row, columns=columns, format=format)
            name = format or recognise(row.columns, columns=columns)
            if first_format not in (None, name):
                raise BadRow(f"it reads as {name!r}, but the rows before it as {first_format!r}", row.where)
        except BadRow as bad:
            if bad_rows == "stop":
                raise
            skipped.append((bad.where, bad.reason))
            continue
        first_format = name
        samples.append(sample)
        if len(samples) == limit:
            break
    if first_format is None or not samples:
        where, reason = skipped[0]
        raise ValueError(f"none of the {len(skipped)} rows can be used; the first, {where}: {reason}")
    return Loaded(samples, first_format, skipped)


def read_rows(source: Source, *, split: str = "train") -> Iterator[RawRow]:
    """Rows of any source, one at a time. `split` chooses among the splits of a dataset; a file has only one."""
    if isinstance(source, str) and is_hub_id(source):
        return _some(source, _number(f"{source}:{split}", _load_from_hub(source, split)))
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        return _some(str(path), _read_file(path, _reader_for(path)))
    if isinstance(source, Mapping):
        if split not in source:
            raise ValueError(f"there is no split {split!r}; the dataset has: {', '.join(map(str, source))}")
        return _some(f"split {split!r}", _number(split, source[split]))
    if isinstance(source, Iterable):
        return _some("the dataset in memory", _number("rows", source))
    raise ValueError(
        f"cannot read rows from {type(source).__name__}: pass a path, a hub id, a dataset or a list of dicts"
    )


def _some(name: str, rows: Iterator[RawRow]) -> Iterator[RawRow]:
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{name} has no rows")
    yield first
    yield from rows


def _number(name: str, rows: Iterable[Any]) -> Iterator[RawRow]:
    return (_raw_row(f"{name}:{number}", row) for number, row in enumerate(rows, 1))


def _raw_row(where: str, value: Any) -> RawRow:
    if isinstance(value, Mapping):
        return RawRow(where, value)
    return RawRow(where, {}, f"a row must be an object with named columns, this is a {type(value).__name__}")


def _json_rows(named: Iterable[tuple[str, Any]], content: bytes) -> Iterator[RawRow]:
    """JSON can write half of a character, which nothing behind this can; a look at the text spares most rows."""
    suspect = _PERHAPS_HALF.search(content) is not None
    for where, value in named:
        if suspect and _HALF.search(json.dumps(value, ensure_ascii=False)):
            yield RawRow(where, {}, "it holds half of a character (a lone surrogate); repair the encoding of the data")
        else:
            yield _raw_row(where, value)


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    with _open(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse_line(f"{path.name}:{number}", line)


def _parse_line(where: str, line: bytes) -> RawRow:
    try:
        return next(_json_rows([(where, json.loads(line))], line))
    except UnicodeDecodeError:
        return RawRow(where, {}, "the line is not UTF-8")
    except json.JSONDecodeError as problem:
        return RawRow(where, {}, f"the line is not JSON ({problem.msg} at character {problem.pos + 1})")


def _read_json(path: Path) -> Iterator[RawRow]:
    with _open(path) as file:
        content = file.read()
    if not content.strip():
        return
    try:
        rows = json.loads(content)
    except json.JSONDecodeError as problem:
        raise ValueError(
            f"{path} is not JSON ({problem.msg} in line {problem.lineno}); "
            "if it has one object per line, give its name the ending .jsonl"
        ) from None
    if not isinstance(rows, list):
        raise ValueError(f"{path} must hold a list of objects, it holds a {type(rows).__name__}")
    yield from _json_rows(((f"{path.name}:{number}", row) for number, row in enumerate(rows, 1)), content)


def _read_csv(path: Path) -> Iterator[RawRow]:
    with _open(path) as file:
        lines = (_decoded(path, number, line) for number, line in enumerate(file, 1))
        cells = csv.reader(lines, strict=True)
        start = 1
        try:
            header = next(cells, [])
            if len(set(header)) < len(header):
                raise ValueError(f"{path} names a column twice in its header: {', '.join(header)}")
            start = cells.line_num + 1
            for row in cells:
                if row:
                    yield _csv_row(f"{path.name}:{start}", header, row)
                start = cells.line_num + 1  # a quoted cell may span lines: a row is known by its first
        except csv.Error as problem:
            raise ValueError(
                f"{path.name}:{start} cannot be read as CSV ({problem}); mend it, or save the rows as JSONL or Parquet"
            ) from None


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path.name}:{number} is not UTF-8; save {path} as UTF-8") from None


def _csv_row(where: str, header: list[str], row: list[str]) -> RawRow:
    if len(row) != len(header):
        return RawRow(where, {}, f"the line has {len(row)} cells, the header has {len(header)}")
    return RawRow(where, dict(zip(header, row, strict=True)))


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as problem:
        raise ValueError(f"{path} is not a Parquet file ({problem})") from None
    with file:
        yield from _number(path.name, (row for batch in file.iter_batches(1024) for row in batch.to_pylist()))


Reader: TypeAlias = Callable[[Path], Iterator[RawRow]]
READERS: dict[str, Reader] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".json": _read_json,
    ".json.gz": _read_json,
    ".csv": _read_csv,
    ".csv.gz": _read_csv,
    ".parquet": _read_parquet,
}


def _reader_named(name: str) -> Reader | None:
    return next((reader for ending, reader in READERS.items() if name.lower().endswith(ending)), None)


def _reader_for(path: Path) -> Reader:
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if _reader_named(file.name))
        raise ValueError(f"{path} is a folder: pass one of its data files ({', '.join(files) or 'it has none'})")
    if not path.exists():
        raise ValueError(f"there is no file {path}{_lookalikes(path)}")
    reader = _reader_named(path.name)
    if reader is None:
        raise ValueError(f"cannot tell how to read {path}: its name must end with {', '.join(READERS)}")
    return reader


def _lookalikes(path: Path) -> str:
    if not path.parent.is_dir():
        return f", nor a folder {path.parent}"
    return did_you_mean(path.name, (file.name for file in path.parent.iterdir()))


def _read_file(path: Path, reader: Reader) -> Iterator[RawRow]:
    try:
        yield from reader(path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise ValueError(f"{path} is damaged or not gzip at all ({problem})") from None
    except UnicodeDecodeError as problem:
        line = problem.object.count(b"\n", 0, problem.start) + 1
        raise ValueError(f"{path.name}:{line} is not UTF-8; save {path} as UTF-8") from None


def is_hub_id(source: str) -> bool:
    looks_like_one = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?", source)
    return looks_like_one is not None and _reader_named(source) is None and not Path(source).exists()


def _load_from_hub(source: str, split: str) -> Iterable[Any]:
    import datasets

    name, _, subset = source.partition(":")
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, subset or None, split=split)
    except ConnectionError:
        raise ValueError(
            f"there is no file {source}{_lookalikes(Path(source))}, and the hub cannot be reached to look for "
            f"a dataset of that name: pass a local file ({', '.join(READERS)})"
        ) from None
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as problem:
        reason = " ".join(str(problem).split())
        raise ValueError(
            f"the dataset {name!r} could not be loaded from the hub ({reason}); a subset is written "
            f"'{name}:subset', and a local file is read instead when its path is passed"
        ) from None
    return rows

"""Read files, datasets in memory and hub datasets as raw rows, and convert them to samples.

A line that cannot be parsed is returned as a row with an `error`; the caller decides whether to stop or to skip it. The
meaning of the columns is defined in `formats`.
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

from oxrl.data.episodes import is_recording, read_episodes
from oxrl.data.formats import BadRow, RawRow, recognise, to_sample
from oxrl.machine.hub import offline_if_unreachable
from oxrl.names import did_you_mean
from oxrl.parsing import ParseError, parse_json
from oxrl.types import Sample

Rows: TypeAlias = Iterable[Mapping[str, Any]]
Source: TypeAlias = str | os.PathLike[str] | Rows | Mapping[str, Rows]
"""A path, a hub id (`"owner/name"` or `"owner/name:subset"`), rows in memory, or such rows by split."""

MAX_LINE = 1 << 28  # bytes of one row

_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Loaded(NamedTuple):
    """`Loaded([Sample(...), ...], "alpaca", [("train.jsonl:7", "output is a number, ...")])`."""

    samples: list[Sample]
    format: str
    skipped: list[tuple[str, str]]


def load_samples(
    source: Source,
    *,
    columns: Mapping[str, str] | None = None,
    template: Mapping[str, str] | None = None,
    format: str | None = None,
    bad_rows: Literal["stop", "skip"] = "stop",
    limit: int | None = None,
    split: str = "train",
    chunk: int = 1,
) -> Loaded:
    """Load the samples of any source, at most `limit`; `columns` maps our column names to the source's.

    `template` defines columns from others: `{"prompt": "{Body} {Question}", "answer": "Answer", "system": "Be brief"}`.
    Without `format` the first valid row determines it, and a later row of another format is a bad row. A bad row raises
    `BadRow`, or is skipped and listed (`bad_rows="skip"`). If no row is valid, ValueError is raised in any case.

    A folder of recorded episodes gives a sample per step, with `chunk` actions as its answer.
    """
    if bad_rows not in ("stop", "skip"):
        raise ValueError(f"bad_rows must be 'stop' or 'skip', not {bad_rows!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more, not {limit}")
    samples: list[Sample] = []
    skipped: list[tuple[str, str]] = []
    first_format = format
    folder = _folder_of(source)
    if _is_folder(source) and is_recording(folder, READERS, columns):
        rows, columns = _not_empty(str(folder), read_episodes(folder, READERS, chunk, columns)), None
    else:
        rows = read_rows(source, split=split)
    for row in rows:
        try:
            sample = to_sample(row, columns=columns, format=format, template=template, folder=folder)
            name = format or recognise(row.columns, columns=columns, template=template)
            if first_format not in (None, name):
                raise BadRow(f"its format is {name!r}, but that of the rows before it is {first_format!r}", row.where)
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


def _folder_of(source: Source) -> Path:
    """Return the folder that paths in rows are relative to: that of the file, or the one that is given."""
    if not isinstance(source, str | os.PathLike) or (isinstance(source, str) and is_hub_id(source)):
        return Path()
    return Path(source).expanduser() if _is_folder(source) else Path(source).expanduser().parent


def _is_folder(source: Source) -> bool:
    return isinstance(source, str | os.PathLike) and Path(source).expanduser().is_dir()


def read_rows(source: Source, *, split: str = "train") -> Iterator[RawRow]:
    """Yield the rows of any source. `split` selects a split of a dataset; it is ignored for files."""
    if isinstance(source, str) and is_hub_id(source):
        return _not_empty(source, _number(f"{source}:{split}", _load_from_hub(source, split)))
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        return _not_empty(str(path), _read_file(path, _reader_for(path)))
    if isinstance(source, Mapping):
        if split not in source:
            raise ValueError(f"there is no split {split!r}; the dataset has: {', '.join(map(str, source))}")
        return _not_empty(f"split {split!r}", _number(split, undecoded(source[split])))
    if isinstance(source, Iterable):
        return _not_empty("the dataset in memory", _number("rows", undecoded(source)))
    raise ValueError(
        f"cannot read rows from {type(source).__name__}: pass a path, a hub id, a dataset or a list of dicts"
    )


def _not_empty(name: str, rows: Iterator[RawRow]) -> Iterator[RawRow]:
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
    return RawRow(where, {}, f"a row must be an object with named columns, not a {type(value).__name__}")


def _json_rows(named: Iterable[tuple[str, Any]], content: bytes) -> Iterator[RawRow]:
    """Reject rows with lone surrogates, which UTF-8 cannot encode; most files need no check per row."""
    check = _MAYBE_SURROGATE.search(content) is not None
    for where, value in named:
        if check and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
            yield RawRow(where, {}, "it contains a lone surrogate; fix the encoding of the data")
        else:
            yield _raw_row(where, value)


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    with _open(path) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE + 1), b""), 1):
            if len(line) > MAX_LINE:  # an archive of a few kilobytes can hold a line of gigabytes
                raise ValueError(f"{path.name}:{number} is longer than {MAX_LINE:,} bytes; split the row")
            if line.strip():
                yield _parse_line(f"{path.name}:{number}", line)


def _parse_line(where: str, line: bytes) -> RawRow:
    try:
        return next(_json_rows([(where, parse_json(line))], line))
    except UnicodeDecodeError:
        return RawRow(where, {}, "the line is not UTF-8")
    except json.JSONDecodeError as error:
        return RawRow(where, {}, f"the line is not JSON ({error.msg} at character {error.pos + 1})")
    except ParseError as error:
        return RawRow(where, {}, f"the line cannot be used: {error}")


def _read_json(path: Path) -> Iterator[RawRow]:
    with _open(path) as file:
        content = file.read()
    if not content.strip():
        return
    try:
        rows = parse_json(content)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON ({error.msg} in line {error.lineno}); "
            "if it has one object per line, its name must end in .jsonl"
        ) from None
    except ParseError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path} must contain a list of objects, it contains a {type(rows).__name__}")
    yield from _json_rows(((f"{path.name}:{number}", row) for number, row in enumerate(rows, 1)), content)


def _read_csv(path: Path) -> Iterator[RawRow]:
    with _open(path) as file:
        lines = (_decoded(path, number, line) for number, line in enumerate(file, 1))
        cells = csv.reader(lines, strict=True)
        start = 1
        try:
            header = next(cells, [])
            if len(set(header)) < len(header):
                raise ValueError(f"{path} has a column twice in its header: {', '.join(header)}")
            start = cells.line_num + 1
            for row in cells:
                if row:
                    yield _csv_row(f"{path.name}:{start}", header, row)
                start = cells.line_num + 1  # a quoted cell may span lines: a row is named by its first line
        except csv.Error as error:
            raise ValueError(
                f"{path.name}:{start} cannot be read as CSV ({error}); fix it, or save the rows as JSONL or Parquet"
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
        with parquet.ParquetFile(path) as file:
            yield from _number(path.name, (row for batch in file.iter_batches(1024) for row in batch.to_pylist()))
    except (pyarrow.ArrowException, OSError) as error:  # damaged pages are found when they are read
        raise ValueError(f"{path} is damaged or not a Parquet file ({error})") from None


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


def _reader_by_name(name: str) -> Reader | None:
    return next((reader for ending, reader in READERS.items() if name.lower().endswith(ending)), None)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, or a folder that may not be entered
        return False


def _reader_for(path: Path) -> Reader:
    if not _exists(path):
        raise ValueError(f"there is no file {path}{_nearest_file(path)}")
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if _reader_by_name(file.name))
        raise ValueError(f"{path} is a folder: pass one of its data files ({', '.join(files) or 'none found'})")
    if not path.is_file():  # a pipe without a writer would block
        raise ValueError(f"{path} is a pipe or a device: save the rows to a file")
    reader = _reader_by_name(path.name)
    if reader is None:
        raise ValueError(f"unknown file type of {path}: its name must end in one of {', '.join(READERS)}")
    return reader


def _nearest_file(path: Path) -> str:
    if not _exists(path.parent):
        return f", nor a folder {path.parent}"
    return did_you_mean(path.name, [file.name for file in path.parent.iterdir()])


def _read_file(path: Path, reader: Reader) -> Iterator[RawRow]:
    try:
        yield from reader(path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is corrupt or not a gzip file ({error})") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path.name}:{line} is not UTF-8; save {path} as UTF-8") from None


def is_hub_id(source: str) -> bool:
    match = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?", source)
    return match is not None and _reader_by_name(source) is None and not _exists(Path(source))


def _load_from_hub(source: str, split: str) -> Iterable[Any]:
    import datasets

    name, _, subset = source.partition(":")
    try:
        with offline_if_unreachable():
            rows: Iterable[Any] = datasets.load_dataset(name, subset or None, split=split)
    except ConnectionError:
        raise ValueError(
            f"there is no file {source}{_nearest_file(Path(source))}, and the hub cannot be reached to look for "
            f"a dataset of that name; pass a local file ({', '.join(READERS)})"
        ) from None
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the dataset {name!r} could not be loaded from the hub ({reason}); write a subset as "
            f"'{name}:subset', or pass the path of a local file"
        ) from None
    return undecoded(rows)


def undecoded(rows: Iterable[Any]) -> Iterable[Any]:
    """Images and audio of a dataset of `datasets` as bytes or paths: they are decoded when a model reads them."""
    features = getattr(rows, "features", None)
    if not hasattr(rows, "cast_column") or not features:
        return rows
    import datasets

    for name, feature in features.items():
        each = getattr(feature, "feature", feature)  # of a list
        if isinstance(each, datasets.Image | datasets.Audio) and each.decode:
            bare = type(each)(decode=False)
            rows = rows.cast_column(name, bare if each is feature else datasets.List(bare))
    return rows

"""What a run recorded of its steps, in one form: from `record/`, or from the `rollouts.jsonl` of a run without it.

A step is its header and its answers without their tokens, of which there may be millions; one answer is read with them.
Offsets are kept, contents are not: of a file of gigabytes, the bytes of one answer are read.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from oxrl.parsing import parse_json
from oxrl.tracking.step_files import FOLDER
from oxrl.view.files import MISSING, identity, lines_with_offsets, open_inside, size_of

Json: TypeAlias = dict[str, Any]
_STEP_FILE = re.compile(r"step_(\d{1,12})\.jsonl")
_LOGGED_STEP = re.compile(rb'\{"step": (\d{1,12})[,}]')
_IDS, _MASK = re.compile(rb'\s*\{"ids":\s*\[([^\]]*)\]'), re.compile(rb'"mask":\s*\[([01,\s]*)\]')
_KEPT = 8  # steps whose answers are kept in memory


class _Span(NamedTuple):
    """The bytes of one line."""

    offset: int
    length: int


class _Step(NamedTuple):
    """A step's file as it was when it had this identity."""

    version: tuple[str, int, int]
    header: Json
    answers: list[Json]
    spans: Mapping[tuple[str, str], _Span]


class Steps:
    """The recorded steps of a run: `Steps(folder).step(12)`. Used by several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: OrderedDict[int, _Step] = OrderedDict()
        self._headers: dict[int, tuple[tuple[str, int, int], Json]] = {}
        self._log = _RolloutLog(folder)
        self._lock = Lock()

    def numbers(self) -> list[int]:
        """All steps of which something can be shown, in order."""
        with self._lock:
            return sorted({*_recorded(self.folder), *self._log.numbers()})

    def step(self, number: int) -> Json:
        """The header and the answers without tokens; FileNotFoundError if nothing is left of the step."""
        with self._lock:
            step = self._step(number)
            if step is not None:
                return {"header": step.header, "answers": step.answers}
            header, answers = self._log.step(number)
            return {"header": header, "answers": [_without_tokens(each) for each in answers]}

    def answer(self, number: int, group: str, index: str) -> Json:
        """One answer with its tokens."""
        with self._lock:
            step = self._step(number)
            if step is None:
                found = {_key(each): each for each in self._log.step(number)[1]}
                if (group, index) in found:
                    return found[group, index]
            elif (span := step.spans.get((group, index))) is not None:
                with open_inside(self.folder, _file_of(number)) as file:
                    if _version(file) == step.version:
                        return _with_text(_object_at(file, span) or {})
        raise FileNotFoundError(f"step {number} has no answer {index} of group {group}")

    def prompt(self, sample_id: str) -> list[Json]:
        """The answers to one prompt at every step that has it."""
        found = []
        for number in self.numbers():
            with self._lock:
                if not self._has(number, sample_id):
                    continue
            try:
                step = self.step(number)
            except FileNotFoundError:
                continue
            answers = [each for each in step["answers"] if each.get("sample_id") == sample_id]
            if answers:
                found.append({"step": number, "version": step["header"].get("version"), "answers": answers})
        return found

    def _has(self, number: int, sample_id: str) -> bool:
        """Whether the header of a step names the prompt; of a step without header or groups, that is not known."""
        try:
            with open_inside(self.folder, _file_of(number)) as file:
                version = _version(file)
                known = self._headers.get(number)
                if known is None or known[0] != version:
                    known = self._headers[number] = version, _parsed(file.readline()) or {}
        except OSError:
            return True
        groups = known[1].get("groups") or []
        return not groups or any(group.get("sample_id") == sample_id for group in groups)

    def _step(self, number: int) -> _Step | None:
        try:
            with open_inside(self.folder, _file_of(number)) as file:
                version = _version(file)
                step = self._read.pop(number, None)
                if step is None or step.version != version:
                    step = _read_step(file, version)
        except OSError:
            return None
        self._read[number] = step
        while len(self._read) > _KEPT:
            self._read.popitem(last=False)
        return step


class _RolloutLog:
    """`rollouts.jsonl`: one line per step, of which only the new ones are read to find where each step is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file, self._end = "", 0
        self._spans: dict[int, _Span] = {}

    def numbers(self) -> Iterable[int]:
        try:
            with open_inside(self.folder, "rollouts.jsonl") as file:
                self._update(file)
        except OSError:
            self._spans = {}
        return self._spans

    def step(self, number: int) -> tuple[Json, list[Json]]:
        if number not in self.numbers():
            raise FileNotFoundError(f"nothing is recorded of step {number}")
        with open_inside(self.folder, "rollouts.jsonl") as file:
            raw = _object_at(file, self._spans[number]) or {}
        answers = [answer_of_log(each) for each in raw.get("samples") or []]
        return {"kind": "step", "step": number, "groups": [], "partial": True}, answers

    def _update(self, file: BinaryIO) -> None:
        if identity(file) != self._file or size_of(file) < self._end:
            self._file, self._end, self._spans = identity(file), 0, {}
        for offset, line in lines_with_offsets(file, self._end):
            self._end = offset + len(line)
            if found := _LOGGED_STEP.match(line):
                self._spans[int(found[1])] = _Span(offset, len(line))


def answer_of_log(raw: Mapping[str, Any]) -> Json:
    """One completion of `rollouts.jsonl` in the form of a record: its tokens have no texts and no advantages there."""
    sample_id, _, number = str(raw.get("id", "")).rpartition("#")
    group, _, index = number.partition("/")
    turns = raw.get("turns") or []
    written = [("user", raw.get("prompt")), ("assistant", raw.get("response"))]
    return {
        "kind": "answer",
        "group": group,
        "index": index,
        "sample_id": sample_id,
        "reward": raw.get("reward"),
        "status": raw.get("status"),
        "messages": [{"role": role, "content": content} for role, content in written if content is not None],
        "reference_answer": raw.get("answer"),
        "turns": len(turns),
        "tokens": {
            "ids": [token for turn in turns for token in turn.get("token_ids") or []],
            "sampler_logprob": [logprob for turn in turns for logprob in turn.get("logprobs") or []],
            "version": [version for turn in turns for version in turn.get("versions") or []],
        },
    }


def _read_step(file: BinaryIO, version: tuple[str, int, int]) -> _Step:
    header: Json = {}
    answers: list[Json] = []
    spans: dict[tuple[str, str], _Span] = {}
    for offset, line in lines_with_offsets(file):
        raw = _head(line) or _parsed(line)
        if raw is None:
            continue
        if raw.get("kind") == "step":
            header = raw
        else:
            spans[_key(raw)] = _Span(offset, len(line))
            answers.append(_without_tokens(raw))
    return _Step(version, header, answers, spans)


def _head(line: bytes) -> Json | None:
    """An answer with counts for tokens, whose numbers are most of the line and are not parsed; None if it is unusual.

    A quote inside of a text is escaped, so the last `"tokens":` is the key; in a record it is the last one.
    """
    before, key, tokens = line.rpartition(b'"tokens":')
    before, ids, mask = before.rstrip(), _IDS.match(tokens), _MASK.search(tokens)
    if not key or not before.endswith(b",") or ids is None or mask is None or not tokens.rstrip().endswith(b"}}"):
        return None
    answer = _parsed(before[:-1] + b"}")
    if answer is None or answer.get("kind") != "answer":
        return None
    length = ids[1].count(b",") + 1 if ids[1].strip() else 0
    return {**answer, "tokens": {"length": length, "trained": mask[1].count(b"1")}}


def _without_tokens(answer: Json) -> Json:
    """The answer with counts instead of tokens."""
    tokens = answer.get("tokens") or {}
    if "length" in tokens:
        return answer
    mask = tokens.get("mask") or []
    answer = _with_text(answer)
    counted = {"length": len(tokens.get("ids") or []), "trained": sum(map(bool, mask)) if mask else None}
    return {**{name: value for name, value in answer.items() if name != "tokens"}, "tokens": counted}


def _mean_of_trained(values: Sequence[float | None], mask: Sequence[int]) -> float | None:
    known = [value for value, trained in zip(values, mask, strict=False) if trained and value is not None]
    return sum(known) / len(known) if known else None


def _with_text(answer: Json) -> Json:
    """A row of a dataset with the texts of its trained tokens, their mean log-prob, and the other texts."""
    tokens = answer.get("tokens") or {}
    pieces, mask = tokens.get("pieces"), tokens.get("mask")
    if answer.get("kind") != "row" or not pieces or not mask:
        return answer
    trained = "".join(str(piece) for piece, kept in zip(pieces, mask, strict=False) if kept)
    others = "".join(str(piece) for piece, kept in zip(pieces, mask, strict=False) if not kept)
    logprob = _mean_of_trained(tokens.get("policy_logprob") or [], mask)
    return {**answer, "text": trained, "prompt": others, "logprob": logprob}


def _key(answer: Mapping[str, Any]) -> tuple[str, str]:
    return str(answer.get("group")), str(answer.get("index"))


def _file_of(number: int) -> str:
    return f"{FOLDER}/step_{number:06d}.jsonl"


def _recorded(folder: Path) -> list[int]:
    if (folder / FOLDER).is_symlink():
        return []
    try:
        names = os.listdir(folder / FOLDER)  # noqa: PTH208 - a listing of names, which may be tens of thousands
    except MISSING:
        return []
    return [int(found[1]) for name in names if (found := _STEP_FILE.fullmatch(name))]


def _version(file: BinaryIO) -> tuple[str, int, int]:
    return identity(file), size_of(file), os.fstat(file.fileno()).st_mtime_ns


def _object_at(file: BinaryIO, span: _Span) -> Json | None:
    file.seek(span.offset)
    return _parsed(file.read(span.length))


def _parsed(line: bytes) -> Json | None:
    """An object, or None for a damaged line."""
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")

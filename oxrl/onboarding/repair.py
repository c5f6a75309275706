"""Repair the small files of a model in a copy beside it; weights are linked, and never read or changed.

Each repair has a name in `REPAIRS`. After each one the model is scouted again: a repair that does not remove its
finding is undone. A GGUF file has no small files: it gets settings of the config instead.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.models.builtin import cache_dir
from oxrl.models.load import Source, load_hf_tokenizer
from oxrl.onboarding.corrections import (
    correct_dtype,
    correct_end_token,
    correct_pad_token,
    correct_rope,
    correct_template,
    correct_vocabulary,
    name_spare_ids,
    template_for,
)
from oxrl.onboarding.files import ModelFiles, locate
from oxrl.onboarding.findings import Scouting
from oxrl.onboarding.scout import scout
from oxrl.parsing import read_json
from oxrl.weights.integrity import STATE_FILE

MARKER = "oxrl_repairs.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
SMALL = 100_000_000  # bytes; what is larger is linked
REPAIRS: Mapping[str, Callable[[ModelFiles], str]] = {  # in this order: each may depend on those before it
    "vocabulary": correct_vocabulary,
    "dtype": correct_dtype,
    "rope": correct_rope,
    "pad_token": correct_pad_token,
    "template": correct_template,
    "end_token": correct_end_token,
    "spare_ids": name_spare_ids,
}
"""Name of a repair -> a function that changes the files of a copy, and says what it changed."""


class Change(NamedTuple):
    """`Change("end_token", "the end token is <|im_end|> instead of <|bos|>")`: a repair that was made and proven."""

    repair: str
    message: str


class Repaired(NamedTuple):
    """`Repaired("/models/a-repaired", (Change(...),), report)`: the name to use from now on, and what was changed."""

    name: str
    changes: tuple[Change, ...]
    report: Scouting  # after the repairs
    settings: Mapping[str, Any] = {}  # sections of the config that replace a repair of files
    failed: tuple[str, ...] = ()  # repairs that did not help, with the reason


def repair(
    report: Scouting,
    *,
    only: Iterable[str] = (),
    output: Path | None = None,
    trust_remote_code: bool = False,
) -> Repaired:
    """Make the repairs that a report names, or `only` some, in a copy; nothing is written if there are none."""
    chosen = _chosen(report, tuple(only))
    if not chosen:
        return Repaired(report.name, (), report)
    files = _located(report)
    if files.adapter is not None:
        raise ValueError(f"{report.name} is a LoRA adapter: repair its base, {files.source.where}")
    if files.source.kind == "gguf":
        return _with_settings(report, chosen)
    if not files.tensors:
        raise ValueError(
            f"the copy links the weights, which are not here yet: run `oxrl models fetch {report.name}` first"
        )
    target = output or repaired_folder(files)
    draft = _draft(files, target)
    try:
        changes, failed, now = _make(draft, chosen, bool(tuple(only)), trust_remote_code)
        if changes:
            _publish(draft, target, report.name, changes)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if not changes:
        return Repaired(report.name, (), report, failed=tuple(failed))
    return Repaired(str(target), tuple(changes), _of_copy(now, report, str(target)), {}, tuple(failed))


def _of_copy(now: Scouting, original: Scouting, target: str) -> Scouting:
    """The report about the draft as one about the copy, whose entry is that of the original model."""
    entry, config = now.entry, now.config
    if entry is not None and original.entry is not None:
        entry = {**entry, "name": original.entry["name"], "hub": original.entry["hub"]}
    if config is not None and original.config is not None:
        config = {**config, "run": original.config["run"], "model": {**original.config["model"], "name": target}}
    return now._replace(name=target, where=target, entry=entry, config=config)


def _located(report: Scouting) -> ModelFiles:
    """The files that were scouted; of a hub model those of the scouted revision."""
    if report.kind != "hub":
        return locate(report.name)
    return locate(report.where)._replace(name=report.name, source=Source("hub", report.name))


def _chosen(report: Scouting, only: tuple[str, ...]) -> list[str]:
    if unknown := [name for name in only if name not in REPAIRS]:
        raise ValueError(f"no repair is called {unknown[0]!r}; there are: {', '.join(REPAIRS)}")
    possible = {finding.repair for finding in report.findings}
    wanted = set(only) & possible if only else set(report.repairs)
    return [name for name in REPAIRS if name in wanted]


def repaired_folder(files: ModelFiles) -> Path:
    """Return the folder beside a model's; one in the cache for a built-in or hub model, or if it cannot be written."""
    beside = files.folder.with_name(f"{files.folder.name}-repaired")
    if files.source.kind == "folder" and os.access(beside.parent, os.W_OK):
        return beside
    return cache_dir() / "repaired" / slug(files.name)


def slug(name: str) -> str:
    """`slug("Qwen/Qwen3-0.6B") == "qwen-qwen3-0.6b"`: a name for files."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.").lower() or "model"


def _make(
    draft: Path, chosen: list[str], limited: bool, trust_remote_code: bool
) -> tuple[list[Change], list[str], Scouting]:
    """Make repairs one by one; a repair may need another one that was not needed before (a new turn end)."""
    changes: list[Change] = []
    failed: list[str] = []
    now = scout(str(draft), trust_remote_code=trust_remote_code)
    waiting = list(chosen)
    while waiting:
        name = waiting.pop(0)
        before = _small_files(draft)
        try:
            message = REPAIRS[name](locate(str(draft))._replace(trusted=trust_remote_code))
            after = scout(str(draft), trust_remote_code=trust_remote_code)
            problem = next((each.message for each in after.findings if each.repair == name), None)
        except ValueError as error:
            problem = str(error)
        if problem is not None:
            _restore(draft, before)
            failed.append(f"{name}: {problem}")
            continue
        changes.append(Change(name, message))
        now = after
        if not limited:
            done = {*(change.repair for change in changes), *waiting}
            waiting += [each for each in REPAIRS if each in now.repairs and each not in done]
    return changes, failed, now


def _draft(files: ModelFiles, target: Path) -> Path:
    """Copy small files and link the others into a folder that becomes the target when all repairs are made."""
    if target.exists() and not (target / MARKER).is_file():
        raise ValueError(f"{target} exists and was not written by a repair: remove it, or choose another folder")
    draft = target.with_name(f".{target.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for file in sorted(files.folder.iterdir()):
        if not file.is_file() or file.name == STATE_FILE:  # its digests are those of the original files
            continue
        if file.suffix in WEIGHTS or file.stat().st_size > SMALL:
            (draft / file.name).symlink_to(file.resolve())
        else:
            shutil.copyfile(file, draft / file.name)
    return draft


def _publish(draft: Path, target: Path, source: str, changes: list[Change]) -> None:
    record = {"source": source, "repairs": [change._asdict() for change in changes]}
    (draft / MARKER).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)


def repairs_in(folder: Path) -> dict[str, Any] | None:
    """Return the source of a repaired folder and its repairs; None for any other."""
    return read_json(folder / MARKER) if (folder / MARKER).is_file() else None


def _small_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.is_symlink()}


def _restore(folder: Path, content: Mapping[str, bytes]) -> None:
    for file in folder.iterdir():
        if not file.is_symlink() and file.name not in content:
            file.unlink()
    for name, data in content.items():
        (folder / name).write_bytes(data)


def _with_settings(report: Scouting, chosen: list[str]) -> Repaired:
    """A GGUF file: the template is set in the config, the rest cannot be repaired."""
    failed = [f"{name}: a GGUF file has no small files; convert it" for name in chosen if name != "template"]
    if "template" not in chosen:
        return Repaired(report.name, (), report, failed=tuple(failed))
    template = template_for(load_hf_tokenizer(report.where))
    change = Change("template", f"model.chat_template: {template.name}. {template.message}")
    kept = tuple(finding for finding in report.findings if finding.repair != "template")
    settings = {"model": {"chat_template": template.name}}
    return Repaired(report.name, (change,), report._replace(findings=kept), settings, tuple(failed))

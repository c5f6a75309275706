"""Where the records of verified models are, how old they are, and what identifies the files of a model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.models.catalog import RECORDS, Entry, catalog, local_records, record_of
from oxrl.onboarding.files import ModelFiles, locate
from oxrl.parsing import read_json

HASHED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
COMPARED = ("torch", "transformers")  # their major versions


class Verification(NamedTuple):
    """`Verification("the oxRL project", "2026-11-18", {"torch": "2.13.0", ...}, old=False)`: who, when, with what."""

    by: str
    date: str
    versions: Mapping[str, str]
    old: bool  # torch or transformers have another major version now

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"by {self.by}, {self.date}, {versions}"


def verification_of(record: Mapping[str, Any]) -> Verification:
    made_with = record["environment"]
    versions = {name: str(made_with[name]) for name in ("oxrl", *COMPARED) if name in made_with}
    old = any(_major(versions.get(name, "")) != _major(_installed(name)) for name in COMPARED)
    return Verification(record.get("by") or "an unnamed user", str(record["date"]), versions, old)


def current_status(entry: Entry) -> tuple[str, Verification | None]:
    """Return "verified", "verified long ago", "config-ready" or "not yet", and the verification if there is one."""
    record = record_of(entry.name, local=True)
    if entry.not_yet is not None or record is None or record["problems"]:
        return entry.status if entry.not_yet is not None else "config-ready", None
    verification = verification_of(record)
    return "verified long ago" if verification.old else "verified", verification


def local_models() -> dict[str, dict[str, Any]]:
    """Return the records of this machine for models outside of the catalogue, by name."""
    files = sorted(local_records().glob("*.json"))
    return {file.stem: read_json(file) for file in files if file.stem not in catalog()}


def _major(number: str) -> str:
    return number.partition(".")[0]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def records_folder(name: str) -> Path:
    """Return the folder of the package for a model of the catalogue, else, or if it is read-only, one in the cache."""
    if name in catalog() and os.access(RECORDS, os.W_OK):
        return RECORDS
    return local_records()


def source_digest(name: str) -> str:
    """Return a digest of the small files of a model and of the headers of its weights."""
    files = locate(name)
    if files.source.kind == "gguf":
        with Path(files.source.where).open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    return _digest(files)


def _digest(files: ModelFiles) -> str:
    digest = hashlib.sha256()
    for file in HASHED:
        if (files.folder / file).is_file():
            digest.update(file.encode() + (files.folder / file).read_bytes())
    for tensor, entry in sorted(files.tensors.items()):
        digest.update(f"{tensor} {entry.dtype} {entry.shape}\n".encode())
    return digest.hexdigest()[:16]

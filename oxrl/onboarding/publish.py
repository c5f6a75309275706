"""A record as the text of a pull request or an issue: facts, catalogue entry, changes, attempts, and how to repeat it.

`oxrl report RECORD.json` prints it, and files it on request. Paths of this machine and secrets are taken out.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oxrl.diagnose.bug_report import Report, shareable
from oxrl.models.catalog import Entry, find_entry
from oxrl.onboarding.scout import entry_as_toml
from oxrl.parsing import read_json

FIELDS = (
    "name", "source", "date", "environment", "architecture", "parameters", "dtype", "settings", "layout",
    "layout_reason", "command", "changes", "attempts",
)  # fmt: skip


def is_record(file: Path) -> bool:
    """Whether a file is a record of a verified model."""
    return file.is_file() and file.suffix == ".json" and all(field in read_json(file) for field in FIELDS)


def report_of_record(file: Path, *, environ: Mapping[str, str] = os.environ) -> Report:
    """Return title and Markdown body, without secrets and without folders of this machine."""
    if not is_record(file):
        raise ValueError(f"{file} is not a record of `oxrl models onboard` or `verify`")
    record = _without_folders(read_json(file))
    changed = " with changes" if record["changes"] or any(each["remedy"] for each in record["attempts"]) else ""
    title = f"[model] {record['name']}: verified{changed}"
    fingerprint = _fingerprint(record)
    parts = [
        _facts(record),
        _list("Changes to its files", [_change(each) for each in record["changes"]]),
        _list("Attempts", [_attempt(each) for each in record["attempts"]]),
        f"### Entry for oxrl/models/catalog.toml\n\n```toml\n{entry_as_toml(_entry(record))}```",
        f"### Record for oxrl/models/verified/{record['name']}.json\n\n```json\n{json.dumps(record, indent=1)}\n```",
        f"oxrl-fingerprint: {fingerprint}",
    ]
    return Report(shareable(title, environ), shareable("\n\n".join(filter(None, parts)), environ) + "\n", fingerprint)


def _facts(record: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in record["environment"].items())
    facts = {
        "model": f"`{record['source']}`, {record['architecture']} of {record['parameters']:,} parameters",
        "verified": f"{record['date']}, by {record.get('by') or 'an unnamed user'}, in {record['dtype']}",
        "settings": json.dumps(record["settings"]) if record["settings"] else "the usual ones",
        "layout": f"{record['layout']}: {record['layout_reason']}",
        "machine and versions": versions,
        "command": f"`{record['command']}`",
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _change(change: Mapping[str, Any]) -> str:
    """Without a colon after the name: `pad_token: ...` reads like a secret."""
    return f"{change['repair']} repaired: {change['message']}"


def _attempt(attempt: Mapping[str, Any]) -> str:
    if attempt["signal"] is None:
        return f"worked after {attempt['seconds']} s"
    signal = attempt["signal"]
    return f"{signal['kind']}: {str(signal['message']).partition(chr(10))[0]}; next: {attempt['remedy']}"


def _list(heading: str, lines: list[str]) -> str:
    return f"### {heading}\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def _entry(record: Mapping[str, Any]) -> Entry:
    return Entry(**record["entry"]) if record.get("entry") else find_entry(record["name"])


def _fingerprint(record: Mapping[str, Any]) -> str:
    """Equal for the same model verified with the same major versions."""
    majors = [str(record["environment"][name]).partition(".")[0] for name in ("oxrl", "torch", "transformers")]
    facts = [record["name"], record["architecture"], str(record["parameters"]), record["dtype"], *majors]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _without_folders(record: dict[str, Any]) -> dict[str, Any]:
    """Name a local model by its last part: where it lies on this machine is of no use to others."""
    source = str(record.get("source", ""))
    if not source.startswith((".", "~", os.sep)):
        return record
    text = json.dumps(record)
    folders = {json.dumps(source)[1:-1], json.dumps(str(Path(source).parent))[1:-1] + os.sep}
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(folder, Path(source).name if folder.endswith(Path(source).name) else "")
    cleaned: dict[str, Any] = json.loads(text)
    return cleaned

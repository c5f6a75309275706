"""The model catalogue (`catalog.toml`), and the documentation page generated from it.

A model is verified if `verified/` contains a record of `oxrl models onboard` for it without problems. Loading is in
`load`, verification in `oxrl.diagnose.verify_model`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from oxrl.models.builtin import BUILTIN_MODELS, cache_dir
from oxrl.names import did_you_mean

RECORDS = Path(__file__).parent / "verified"
BYTES_PER_WEIGHT = 16  # bf16 weight and gradient, float32 master weight and AdamW's two moments
ONE_DEVICE = 80  # GB
Strategy: TypeAlias = Literal["full", "lora"]


class Entry(NamedTuple):
    """`Entry("qwen3-0.6b", hub="Qwen/Qwen3-0.6B", billions=0.596, architecture="Qwen3ForCausalLM", ...)`."""

    name: str
    hub: str | None
    billions: float
    active_billions: float  # parameters used per token; fewer than all in a mixture of experts
    architecture: str  # the transformers class
    tasks: tuple[str, ...]
    template: str  # the family of its chat template
    licence: str
    lora_targets: tuple[str, ...]
    not_yet: str | None  # why oxRL cannot train it yet

    @property
    def source(self) -> str:
        """The value for `model.name`."""
        return self.name if self.hub is None or self.name in BUILTIN_MODELS else self.hub

    @property
    def memory(self) -> float:
        """GB for weights, gradients and optimizer when all weights are trained."""
        return self.billions * BYTES_PER_WEIGHT

    @property
    def strategy(self) -> Strategy:
        return "full" if self.memory <= ONE_DEVICE else "lora"

    @property
    def reason(self) -> str:
        needed = f"{self.memory:.2g}" if self.memory < 10 else f"{self.memory:.0f}"
        fits = "fit" if self.strategy == "full" else "do not fit"
        return (
            f"full training takes {needed} GB for weights, gradients and optimizer, which {fits} on a device of "
            f"{ONE_DEVICE} GB"
        )

    @property
    def status(self) -> str:
        record = record_of(self.name)
        if self.not_yet is not None:
            return "not yet"
        return "verified" if record is not None and not record["problems"] else "config-ready"

    @property
    def size(self) -> str:
        if self.billions < 0.2:
            return f"{self.billions * 1000:.3g}M"
        active = f" ({self.active_billions:g}B active)" if self.active_billions < self.billions else ""
        return f"{self.billions:.{1 if self.billions < 1 else 3}g}B{active}"


@cache
def catalog() -> Mapping[str, Entry]:
    """Return every model by its name, smallest first."""
    raw = _read()
    entries = [_entry(name, fields, raw) for name, fields in raw["models"].items()]
    return MappingProxyType({entry.name: entry for entry in sorted(entries, key=lambda entry: entry.billions)})


def find_entry(name: str) -> Entry:
    """Return the entry with this catalogue name or hub id, case-insensitive."""
    known = {each.lower(): entry for entry in catalog().values() for each in (entry.hub or entry.name, entry.name)}
    if name.lower() not in known:
        hint = did_you_mean(name.lower(), known, "; `oxrl models list` shows them")
        raise ValueError(f"there is no model {name} in the catalogue{hint} (training works with models outside it too)")
    return known[name.lower()]


def catalogued(name: str) -> Entry | None:
    """Return the entry with this catalogue name, case-insensitive; None for hub ids and all other names."""
    return catalog().get(name.lower())


def local_records() -> Path:
    """Return the folder of records of models that were verified on this machine."""
    return cache_dir() / "verified"


def record_of(name: str, *, local: bool = False) -> dict[str, Any] | None:
    """Return the record of `oxrl models verify` in the package, or None; with `local` also one of this machine."""
    for folder in (local_records(), RECORDS) if local else (RECORDS,):
        if (file := folder / f"{name}.json").is_file():
            record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return record
    return None


def as_yaml(config: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(config), sort_keys=False)


def document() -> str:
    """Return the page `docs/models.md`."""
    lines = [
        "# Models",
        "",
        "Generated from the catalogue by `python -m oxrl.models.catalog`; `oxrl models show NAME` prints details, and "
        "`oxrl models config NAME` prints an example config. A name of this table can be given wherever a model is "
        "named, in upper or lower case (`oxrl train --model qwen3-0.6b`); a folder of that name takes precedence. "
        "Training works with any causal language model that transformers can load, listed here or not.",
        "",
        "- **verified**: `oxrl models onboard NAME` ([onboarding](onboarding.md)) was run with exactly these weights, "
        "and its record is in the repository: SFT, DPO, GRPO and a LoRA adapter, two steps each, with finite losses, "
        "changed weights, log-probs of sampler and trainer that agree, and a resumed run with the same result. "
        "`oxrl models list` adds those of your machine.",
        "- **config-ready**: its config is checked, and a small random model of the same architecture passes the "
        "same checks in the tests; these weights were not tested.",
        "- **not yet**: oxRL cannot train it yet; `oxrl models show NAME` has the reason.",
        "",
        "| Model | Size | Architecture | Task | Strategy | Template | Licence | Status |",
        "|:---|:---|:---|:---|:---|:---|:---|:---|",
    ]
    for entry in catalog().values():
        cells = [entry.name, entry.size, entry.architecture, ", ".join(entry.tasks), entry.strategy, entry.template]
        lines.append(f"| {' | '.join([*cells, entry.licence, entry.status])} |")
    lines += ["", "## Verified", "", *(line for entry in catalog().values() for line in _verified_lines(entry))]
    return "\n".join(lines).rstrip() + "\n"


def _verified_lines(entry: Entry) -> list[str]:
    record = record_of(entry.name)
    if record is None or entry.status != "verified":
        return []
    versions = ", ".join(f"{name} {version}" for name, version in record["environment"].items() if name != "threads")
    gap = max(record["grpo"]["logprob_gap"])
    trials = [name for name in ("sft", "dpo", "grpo", "lora") if name in record]
    resumed = max(record[trial]["resume_gap"] for trial in trials)
    changed = "; ".join(f"{each['repair']}: {each['message']}" for each in record["changes"]) or "nothing"
    return [
        f"`{entry.name}` was verified on {record['date']} by {record.get('by') or 'an unnamed user'} in "
        f"{record['dtype']}, {record['strategy']} ({versions}): {', '.join(trials)}; layout {record['layout']}, "
        f"generation in {record['generation']}; log-probs of sampler and trainer differ by at most {gap:.1e}, logits "
        f"of a resumed and an uninterrupted run by {resumed:.2g}. Changed: {changed}. Command: `{record['command']}`.",
        "",
    ]


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8"))


def _entry(name: str, fields: Mapping[str, Any], raw: Mapping[str, Any]) -> Entry:
    return Entry(
        name,
        hub=fields.get("hub"),
        billions=fields["billions"],
        active_billions=fields.get("active_billions", fields["billions"]),
        architecture=fields["architecture"],
        tasks=tuple(fields["tasks"]),
        template=fields["template"],
        licence=fields["licence"],
        lora_targets=tuple(raw["lora_targets"][fields["architecture"]]),
        not_yet=next((raw["not_yet"][task] for task in fields["tasks"] if task in raw["not_yet"]), None),
    )


if __name__ == "__main__":
    import sys

    sys.stdout.write(document())

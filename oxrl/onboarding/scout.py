"""Scout a model by name: what it is, who knows it, and what has to be repaired, in one finding each.

`scout("someone/model")` reads config, tokenizer, generation config, processor files and the headers of the weights. No
weight is loaded, and no code of the model is executed unless `trust_remote_code` is set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oxrl.config.tasks import example_config, tasks
from oxrl.data.processor import processor_of
from oxrl.models.catalog import Entry, catalog
from oxrl.models.load import load_hf_tokenizer, load_model_config
from oxrl.onboarding.fields import field_findings
from oxrl.onboarding.files import ModelFiles, locate
from oxrl.onboarding.findings import Finding, Scouting
from oxrl.onboarding.structure import structure
from oxrl.onboarding.template import family_by_tokens, family_of, media_findings, template_findings
from oxrl.onboarding.tokens import token_findings
from oxrl.types import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TASKS = {
    "coder": "code",
    "code": "code",
    "math": "math",
    "r1": "reasoning",
    "reason": "reasoning",
    "think": "reasoning",
}


def scout(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Scouting:
    """Return what was found out about a model; a ValueError explains why there is none of this name."""
    files = locate(name, revision)
    facts, findings = structure(files, trust_remote_code=trust_remote_code)
    if files.adapter is not None:
        base = files.source.where
        findings.insert(
            0, Finding("adapter", "note", f"{name} is a LoRA adapter; what follows is about its base {base}")
        )
    tokenizer = _tokenizer(files, findings, trust_remote_code=trust_remote_code)
    if tokenizer is not None:
        findings += token_findings(files, tokenizer)
        findings += template_findings(tokenizer)
        facts["tokens"] = len(tokenizer)
        facts["chat"] = family_of(tokenizer) if _has_working_template(findings) else None
        findings.append(_tuned(files, tokenizer))
        findings += _processor(tokenizer, has_template=_has_working_template(findings))
    config = ModelConfig(files.loadable, trust_remote_code=trust_remote_code)
    if files.config and not any(finding.level == "blocked" and finding.name == "architecture" for finding in findings):
        findings += field_findings(files, load_model_config(config))
    report = Scouting(name, files.source.kind, files.loadable, facts, tuple(_in_order(findings)))
    if report.blockers:
        return report
    chosen = {"trust_remote_code": trust_remote_code, "revision": revision}
    return _with_proposal(report, files, tokenizer, {key: value for key, value in chosen.items() if value})


def _in_order(findings: list[Finding]) -> Iterator[Finding]:
    """Blockers first, then repairs, notes, and what is in order."""
    for level in ("blocked", "repair", "note", "ok"):
        yield from (finding for finding in findings if finding.level == level)


def _tokenizer(
    files: ModelFiles, findings: list[Finding], *, trust_remote_code: bool
) -> PreTrainedTokenizerBase | None:
    try:
        return load_hf_tokenizer(files.loadable, trust_remote_code=trust_remote_code)
    except ValueError as error:
        findings.append(Finding("tokenizer", "blocked", str(error)))
        return None


def _processor(tokenizer: PreTrainedTokenizerBase, *, has_template: bool) -> Iterator[Finding]:
    """A model that reads media needs its processor; one of text has none."""
    try:
        processor = processor_of(tokenizer)
    except ValueError as error:
        yield Finding("processor", "blocked", str(error))
        return
    if processor is None:
        return
    yield Finding("processor", "ok", "the processor turns media into tokens and features")
    if has_template:
        yield from media_findings(tokenizer, processor.placeholders)


def _has_working_template(findings: list[Finding]) -> bool:
    return any(finding.name == "turn_end" and finding.level == "ok" for finding in findings)


def _tuned(files: ModelFiles, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Base or instruct, by what the files show; a name is a weaker sign than a chat template."""
    named = re.search(r"(?i)(instruct|chat|[-_]it\b|[-_]sft|[-_]dpo)", Path(files.source.where).name)
    if tokenizer.chat_template is not None:
        return Finding("tuned", "ok", "instruct: it has a chat template")
    if named:
        return Finding("tuned", "note", f"its name has {named[0]!r}, but it has no chat template")
    return Finding("tuned", "note", "base: it has no chat template, and has probably never seen a conversation")


def _with_proposal(
    report: Scouting, files: ModelFiles, tokenizer: PreTrainedTokenizerBase | None, chosen: Mapping[str, Any]
) -> Scouting:
    """Add the catalogue entry and the config that follow from the findings, with the options that were chosen."""
    entry = proposed_entry(report, files, tokenizer)
    config = example_config(entry)
    config["model"] |= {"name": report.name, **chosen}
    fields = {key: list(value) if isinstance(value, tuple) else value for key, value in entry._asdict().items()}
    return report._replace(entry=fields, config=config)


def proposed_entry(report: Scouting, files: ModelFiles, tokenizer: PreTrainedTokenizerBase | None) -> Entry:
    """Return the catalogue's own entry, or one made from the facts."""
    known = next((e for e in catalog().values() if report.name.lower() in (e.name, (e.hub or e.name).lower())), None)
    if known is not None:
        return known
    facts = report.facts
    own_name = Path(report.name).name.removesuffix(".gguf").lower()
    name = re.sub(r"[^\w.-]+", "-", own_name)
    if name in catalog():  # another model, whose record must not be taken for that of the catalogue's
        name = f"{name}-{files.source.kind}"
    suggested = tokenizer and family_by_tokens(tokenizer)
    active = facts.get("active_parameters", facts["parameters"])
    return Entry(
        name,
        hub=report.name if files.source.kind == "hub" else None,
        billions=_billions(facts["parameters"]),
        active_billions=_billions(active),
        architecture=facts["architecture"],
        tasks=(_task(own_name, has_template=facts.get("chat") is not None),),
        template=facts.get("chat") or suggested or "plain",
        licence=facts.get("licence") or "unknown",
        lora_targets=tuple(facts["lora_targets"]),
        not_yet=None,
    )


def _billions(parameters: Any) -> float:
    return float(f"{parameters / 1e9:.3g}")


def _task(name: str, *, has_template: bool) -> str:
    found = next((task for sign, task in _TASKS.items() if sign in name), "instruct" if has_template else "chat")
    assert found in tasks()
    return found


def entry_as_toml(entry: Entry) -> str:
    """Return the text for `catalog.toml`."""
    named = ", ".join(json.dumps(task) for task in entry.tasks)
    active = [f"active_billions = {entry.active_billions}"] if entry.active_billions < entry.billions else []
    lines = [
        f'[models."{entry.name}"]',
        *([f'hub = "{entry.hub}"'] if entry.hub else []),
        f"billions = {entry.billions}",
        *active,
        f'architecture = "{entry.architecture}"',
        f"tasks = [{named}]",
        f'template = "{entry.template}"',
        f'licence = "{entry.licence}"',
    ]
    return "\n".join(lines) + "\n"

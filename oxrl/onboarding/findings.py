"""What the scout reports: one record per finding, the facts of a model, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

Level: TypeAlias = Literal["ok", "note", "repair", "blocked"]
"""`note`: worth knowing; `repair`: a named repair exists; `blocked`: the model cannot be trained as it is."""
Status: TypeAlias = Literal["ready", "needs repair", "blocked"]


class Finding(NamedTuple):
    """`Finding("pad_token", "repair", "the tokenizer has no padding token", repair="pad_token")`.

    A note may name a repair too; it is applied only if it is asked for.
    """

    name: str
    level: Level
    message: str
    repair: str | None = None


class Scouting(NamedTuple):
    """`Scouting("tiny", "builtin", "/.../tiny-v2", {"architecture": "LlamaForCausalLM", ...}, (...), {...}, {...})`."""

    name: str
    kind: str  # builtin, folder, gguf, adapter, hub
    where: str  # of its small files
    facts: Mapping[str, Any]
    findings: tuple[Finding, ...]
    entry: Mapping[str, Any] | None = None  # proposed for the catalogue; None if it cannot be trained
    config: Mapping[str, Any] | None = None  # to start from

    @property
    def status(self) -> Status:
        levels = {finding.level for finding in self.findings}
        return "blocked" if "blocked" in levels else "needs repair" if "repair" in levels else "ready"

    @property
    def blockers(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "blocked")

    @property
    def repairs(self) -> tuple[str, ...]:
        """Names of the repairs that are needed, in order."""
        return tuple(dict.fromkeys(each.repair for each in self.findings if each.level == "repair" and each.repair))

    @property
    def has_weights(self) -> bool:
        """Whether they are on this machine."""
        return self.facts.get("stored_bytes") is not None

    def finding(self, name: str) -> Finding | None:
        return next((finding for finding in self.findings if finding.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            **self._asdict(),
            "status": self.status,
            "repairs": list(self.repairs),
            "facts": dict(self.facts),
            "findings": [finding._asdict() for finding in self.findings],
        }

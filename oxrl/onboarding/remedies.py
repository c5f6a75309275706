"""Failures of a verification by kind, and the remedies for each kind: one table.

A remedy changes the settings of the next attempt, and stays in effect. A failure whose kind is not in the table, or for
which all remedies were used, ends the attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from oxrl.data.template import TemplateError
from oxrl.diagnose.verify_model import TRIALS
from oxrl.models.catalog import Strategy
from oxrl.run.failure import is_user_error, kind_of, where_in_oxrl

SMALLEST_MICRO_BATCH = 64  # tokens
FEWEST_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Task:
    """`Task("tiny")`: what an attempt verifies, and the settings that differ from the usual ones."""

    weights: str
    strategy: Strategy = "full"
    lora_targets: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    trials: tuple[str, ...] = TRIALS

    def value(self, section: str, key: str, default: Any) -> Any:
        return self.settings.get(section, {}).get(key, default)

    def having(self, section: str, **keys: Any) -> Task:
        """Return the task with these settings."""
        changed = {**self.settings.get(section, {}), **keys}
        return replace(self, settings={**self.settings, section: changed})

    def as_dict(self) -> dict[str, Any]:
        settings = {section: dict(keys) for section, keys in self.settings.items()}
        return {
            "weights": self.weights,
            "strategy": self.strategy,
            "lora_targets": list(self.lora_targets),
            "settings": settings,
            "trials": list(self.trials),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Task:
        lists = {key: tuple(fields[key]) for key in ("lora_targets", "trials")}
        return cls(**{**fields, **lists})


class Remedy(NamedTuple):
    """`Remedy("lora", "train an adapter only", apply)`; `apply` returns a task, or a text why it does not help."""

    name: str
    about: str
    apply: Callable[[Task], Task | str]


def _smaller_micro_batches(task: Task) -> Task | str:
    tokens = int(task.value("train", "micro_batch_tokens", 1024))
    if tokens <= SMALLEST_MICRO_BATCH:
        return f"micro-batches have {tokens} tokens already"
    return task.having("train", micro_batch_tokens=max(SMALLEST_MICRO_BATCH, tokens // 8))


def _checkpointing(task: Task) -> Task | str:
    if task.value("model", "gradient_checkpointing", False):
        return "it is on already"
    return task.having("model", gradient_checkpointing=True)


def _lora(task: Task) -> Task | str:
    return "only an adapter is trained already" if task.strategy == "lora" else replace(task, strategy="lora")


def _four_bit(_: Task) -> Task | str:
    return "oxRL does not load weights in 4 bits"


def _again(task: Task) -> Task | str:
    return task


def _embedded(task: Task) -> Task | str:
    if task.value("inference_engine", "name", "embedded") == "embedded":
        return "the engine is the embedded one already"
    others = {section: keys for section, keys in task.settings.items() if section != "inference_engine"}
    return replace(task, settings={**others, "inference_engine": {"name": "embedded"}})


def _eager(task: Task) -> Task | str:
    if task.value("model", "attn_implementation", "sdpa") == "eager":
        return "attention is eager already"
    return task.having("model", attn_implementation="eager")


def _repaired_template(task: Task) -> Task | str:
    """Repair the small files in a copy; where the scout finds nothing, take the named template of the family."""
    from oxrl.models.load import load_hf_tokenizer
    from oxrl.onboarding.repair import repair
    from oxrl.onboarding.scout import scout
    from oxrl.onboarding.template import family_by_tokens

    trusted = bool(task.value("model", "trust_remote_code", False))
    report = scout(task.weights, trust_remote_code=trusted)
    fixed = repair(report, only=("template", "end_token"), trust_remote_code=trusted)
    if fixed.changes:
        return replace(task, weights=fixed.name, settings={**task.settings, **fixed.settings})
    family = family_by_tokens(load_hf_tokenizer(report.where, trust_remote_code=trusted))
    if family in (None, task.value("model", "chat_template", None)):
        return "; ".join(fixed.failed) or "the scout finds nothing to repair, and no named template fits the tokens"
    return task.having("model", chat_template=family)


def _plain_template(task: Task) -> Task | str:
    if task.value("model", "chat_template", None) == "plain":
        return "the template is the plain one already"
    return task.having("model", chat_template="plain")


def _wider_dtype(task: Task) -> Task | str:
    dtype = task.value("model", "dtype", "auto")
    if dtype == "auto":
        dtype = _automatic_dtype()
    wider = {"float16": "bfloat16", "bfloat16": "float32"}.get(dtype)
    return f"the dtype is {dtype} already" if wider is None else task.having("model", dtype=wider)


def _automatic_dtype() -> str:
    from oxrl.models.load import resolve_device, resolve_dtype

    return str(resolve_dtype("auto", resolve_device("auto"))).removeprefix("torch.")


def _fewer_tokens(task: Task) -> Task | str:
    tokens = int(task.value("rollout", "max_tokens", 8))
    if tokens <= FEWEST_TOKENS:
        return f"{tokens} tokens are sampled already"
    return task.having("rollout", max_tokens=max(FEWEST_TOKENS, tokens // 2))


REMEDIES: Mapping[str, tuple[Remedy, ...]] = MappingProxyType(
    {
        "out_of_memory": (
            Remedy("smaller_micro_batches", "fewer tokens per micro-batch", _smaller_micro_batches),
            Remedy("gradient_checkpointing", "activations are computed again", _checkpointing),
            Remedy("lora", "only an adapter is trained", _lora),
            Remedy("four_bit", "base weights in 4 bits", _four_bit),
        ),
        "layout": (Remedy("eager_attention", "attention without a fused kernel", _eager),),
        "engine": (
            Remedy("again", "the same once more", _again),
            Remedy("embedded_engine", "sample with the trainer's module", _embedded),
        ),
        "template": (
            Remedy("repair_template", "correct the chat template, or take that of the family", _repaired_template),
            Remedy("plain_template", "a plain template", _plain_template),
        ),
        "non_finite": (
            Remedy("wider_dtype", "bfloat16 instead of float16, float32 instead of bfloat16", _wider_dtype),
            Remedy("wider_dtype_again", "float32 instead of bfloat16", _wider_dtype),
        ),
        "time_out": (
            Remedy("fewer_tokens", "sample half as many tokens", _fewer_tokens),
            Remedy("fewer_tokens_again", "a quarter as many", _fewer_tokens),
        ),
    }
)
"""Remedies for each kind of failure, tried in this order."""

_PLACES = {  # where oxRL raised the error -> kind
    ("oxrl/data/template.py", ""): "template",
    ("oxrl/data/render.py", ""): "template",
    ("oxrl/models/chat_templates.py", ""): "template",
    ("oxrl/generators/", ""): "engine",
    ("oxrl/run/engines.py", ""): "engine",
    ("oxrl/backends/forward.py", "_check_projection"): "layout",
}
_ENGINE_ERRORS = {"EngineError", "StaleEngineError"}
_TEXTS = {  # parts of messages -> kind, of failures that arrive as a text
    "are not finite": "non_finite",
    "is not finite": "non_finite",
    "not finite": "non_finite",
    "sampler and trainer disagree": "engine",
    "train.max_logprob_gap": "engine",
    "yielded a group to train on": "engine",
    "chat template": "template",
}


def failure_kind(error: BaseException) -> str:
    """Return the kind of a failure, in the words of the table; others are "guard", "exception" or "refused"."""
    if not isinstance(error, Exception):
        return "exception"
    kind: str = kind_of(error)
    if kind in ("out_of_memory", "non_finite"):
        return kind
    names = {each.__name__ for each in type(error).__mro__}
    if isinstance(error, TemplateError):
        return "template"
    if names & _ENGINE_ERRORS:
        return "engine"
    if (found := kind_of_text(str(error))) is not None:
        return found
    where = where_in_oxrl(error)
    for (file, function), found in _PLACES.items():
        if where is not None and where.file.startswith(file) and function in ("", where.function):
            return found
    return "refused" if is_user_error(error) else kind


def kind_of_text(message: str) -> str | None:
    return next((kind for part, kind in _TEXTS.items() if part in message), None)


def next_remedy(kind: str, task: Task, used: Sequence[str]) -> tuple[Remedy | None, Task, list[dict[str, str]]]:
    """Return the first remedy that is left and changes something, the task with it, and those that do not help."""
    skipped: list[dict[str, str]] = []
    for remedy in REMEDIES.get(kind, ()):
        if remedy.name in used:
            continue
        changed = remedy.apply(task)
        if isinstance(changed, Task):
            return remedy, changed, skipped
        skipped.append({"remedy": remedy.name, "why_not": changed})
    return None, task, skipped

"""Values that the shell completes (`oxrl --install-completion`). No function here imports torch or transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Completions = list[tuple[str, str]]  # value, description


def algorithms() -> Completions:
    from oxrl.algorithms import summaries

    return list(summaries().items())


def models() -> Completions:
    from oxrl.models.catalog import catalog

    return [(name, f"{entry.size}, {', '.join(entry.tasks)}") for name, entry in catalog().items()]


def backends() -> Completions:
    from oxrl.config.registry import BACKENDS

    return [("auto", "local on one device"), *_described(BACKENDS)]


def engines() -> Completions:
    from oxrl.config.registry import ENGINES

    return [("auto", "vllm if rollout_gpus is set, else embedded"), *_described(ENGINES)]


def trackers() -> Completions:
    from oxrl.tracking.trackers import TRACKERS

    return _plain(TRACKERS)


def tasks() -> Completions:
    from oxrl.config.tasks import tasks as presets

    return [(name, task.about) for name, task in presets().items()]


def rewards() -> Completions:
    from oxrl.rewards.table import BUILDERS, REWARDS

    return _plain((*REWARDS, *BUILDERS))


def datasets() -> Completions:
    from oxrl.data.prepare import DATASETS

    return [(name, dataset.summary) for name, dataset in DATASETS.items()]


def dtypes() -> Completions:
    from oxrl.models.load import DTYPES

    return _plain(DTYPES)


def _described(table: Mapping[str, Any]) -> Completions:
    return [(name, record.description) for name, record in table.items()]


def _plain(names: Iterable[str]) -> Completions:
    return [(name, "") for name in names]

"""The recorder of a run's steps, connected to its backend and its tokenizer."""

from __future__ import annotations

import functools
from typing import Any

from oxrl.backends.local import PyTorchTrainingBackend
from oxrl.loops.step_record import NoRecord, StepRecorder
from oxrl.rollouts.step_answers import Pieces
from oxrl.run.checkpoint import environment
from oxrl.run.spec import RunSpec
from oxrl.tracking.step_files import StepFiles
from oxrl.weights.fingerprint import fingerprint


def open_recorder(spec: RunSpec, backend: Any, done: int) -> NoRecord:
    """As `rollout.record` says; steps after `done` are dropped. A backend in other processes shows no passes."""
    rollout = spec.config.rollout
    if rollout.record in ("samples", "off"):
        return NoRecord()
    files = StepFiles(spec.folder, keep=rollout.record_steps, keep_until=done)
    local = getattr(backend, "backend", backend)  # a queued one holds it

    def weights() -> str | None:
        return fingerprint(local.module) if isinstance(local, PyTorchTrainingBackend) else None

    recorder = StepRecorder(
        files,
        rollout.record,
        seed=spec.config.run.seed,
        pieces=token_pieces(spec.tokenizer),
        weights=weights,
        environment=environment(),
    )
    if spec.resume_from is not None:
        recorder.checkpoint = spec.resume_from.name
    if isinstance(local, PyTorchTrainingBackend):
        local.observe_pass = recorder.passed
    return recorder


def token_pieces(tokenizer: Any) -> Pieces:
    """`token_pieces(tokenizer)([1, 50])`: the text of each token; bytes that are no text alone are U+FFFD."""

    @functools.cache
    def piece(token: int) -> str:
        text: str = tokenizer.decode([token])
        name = tokenizer.convert_ids_to_tokens(token)
        spaced = isinstance(name, str) and name.startswith("\u2581") and not text.startswith(" ")
        return f" {text}" if spaced else text

    return lambda ids: [piece(token) for token in ids]

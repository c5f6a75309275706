"""Pause vLLM's sequences after a number of tokens, so that a test can act while they are being generated.

The engine may run in any process; it uses `hold_scheduler` and is controlled by files in the folder of `VARIABLE`.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "OXRL_TEST_HOLDS"
SCHEDULER = "tests.hold_scheduler.HoldScheduler"


class Wanted(NamedTuple):
    """What an engine reads: sequences of these prompts, or of all, are held when they have so many tokens."""

    id: str
    tokens: int
    prompts: Sequence[Sequence[int]] | None

    def applies_to(self, request: Any) -> bool:
        """Whether one of vLLM's requests is to be held now."""
        meant = self.prompts is None or list(request.prompt_token_ids) in self.prompts
        return meant and request.num_output_tokens >= self.tokens


class Hold:
    """Lasts until `release`, or until the engine gets new weights."""

    def __init__(self) -> None:
        self._folder, self._id = Path(os.environ[VARIABLE]), ""

    @property
    def started(self) -> bool:
        return bool(self._id)

    def start(self, tokens: int, prompts: Sequence[Sequence[int]] | None = None) -> None:
        self._id = uuid.uuid4().hex
        self._write("wanted", json.dumps(Wanted(self._id, tokens, prompts)))

    def release(self) -> None:
        (self._folder / "wanted").unlink(missing_ok=True)

    @property
    def reached(self) -> int:
        """How many sequences were held so far."""
        reached = self._folder / self._id
        return int(reached.read_text()) if reached.is_file() else 0

    @property
    def wanted(self) -> Wanted | None:
        try:
            return Wanted(*json.loads((self._folder / "wanted").read_text()))
        except FileNotFoundError:
            return None

    def report(self, wanted: Wanted, reached: int) -> None:
        self._write(wanted.id, str(reached))

    def _write(self, name: str, text: str) -> None:
        """Atomically: it may be read at any moment."""
        with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
            file.write(text)
        Path(file.name).rename(self._folder / name)


@contextmanager
def holding(tokens: int, prompts: Sequence[Sequence[int]] | None = None) -> Iterator[Hold]:
    """Hold every sequence that reaches `tokens` tokens; with `prompts`, only completions of these."""
    hold = Hold()
    hold.start(tokens, prompts)
    try:
        yield hold
    finally:
        hold.release()

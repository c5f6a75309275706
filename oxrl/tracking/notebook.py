"""Live output of a run in a notebook: one table that is updated in place, through IPython's display."""

from __future__ import annotations

import html
import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from oxrl.tracking.metrics import LiveConsole

ROWS = 8  # of the table: the latest steps
COLUMNS = ("reward", "loss", "eval_reward", "eval_loss", "length", "entropy", "lr")


def live_output(total_steps: int, *, first_step: int = 0) -> LiveConsole:
    """A table in a notebook; elsewhere the console."""
    return (NotebookTable if in_kernel() else LiveConsole)(total_steps, first_step=first_step)


def in_kernel() -> bool:
    """Whether this process is the kernel of a notebook, which has no terminal."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookTable(LiveConsole):
    """The latest steps as a table below the cell, with the remaining time and the latest sample."""

    def __enter__(self) -> NotebookTable:
        self.rows: deque[dict[str, float]] = deque(maxlen=ROWS)
        self.sample = ""
        self.handle: Any = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The table stays as it is."""

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append({"step": step, **{name: metrics[name] for name in COLUMNS if name in metrics}})
        self._show()

    log = __call__

    def print_line(self, line: str) -> None:
        """Show a line below the table, instead of the previous one."""
        self.sample = line.strip()
        if self.handle is not None:
            self._show()

    def _show(self) -> None:
        from IPython.display import display

        shown = {"text/plain": self.as_text(), "text/html": self.as_html()}
        if self.handle is None:
            self.handle = display(shown, raw=True, display_id=True)
        else:
            self.handle.update(shown, raw=True)

    def title(self) -> str:
        step = int(self.rows[-1]["step"])
        left = (time.monotonic() - self.started) / max(1, step - self.first) * (self.total - step)
        return f"step {step} of {self.total}" + (f", {left:.0f} s left" if step < self.total else "")

    def cells(self) -> list[list[str]]:
        """The header and the rows; a metric that was not measured in a step is left empty."""
        header = [name for name in ("step", *COLUMNS) if any(name in row for row in self.rows)]
        return [header, *([f"{row[name]:.4g}" if name in row else "" for name in header] for row in self.rows)]

    def as_text(self) -> str:
        lines = ["  ".join(f"{cell:>10}" for cell in row) for row in self.cells()]
        return "\n".join([self.title(), *lines, *([self.sample] if self.sample else [])])

    def as_html(self) -> str:
        head, *rows = self.cells()
        cells = [("th", head), *(("td", row) for row in rows)]
        body = "".join(f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in row)}</tr>" for tag, row in cells)
        sample = f"<p><small>{html.escape(self.sample)}</small></p>" if self.sample else ""
        return f"<p>{self.title()}</p><table>{body}</table>{sample}"

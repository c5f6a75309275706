"""Live output of a run in a notebook: one table that is updated in place, through IPython's display."""

from __future__ import annotations

import html
import sys
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from oxrl.tracking.catalogue import headlines
from oxrl.tracking.console import LiveConsole, seconds_of

ROWS = 8  # of the table: the latest steps


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
        self.activity.end()
        self.step = step
        self.pace.reached(step, seconds_of(metrics))
        self.rows.append({"step": step, **headlines(metrics)})
        self._show()

    log = __call__

    def _print(self, line: str, style: str | None) -> None:  # noqa: ARG002 - of the console
        """Show a line below the table, instead of the previous one."""
        self.printed, self.sample = self.clock(), line.strip()
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
        return f"step {self.step} of {self.total}" + (f", {self._left()}" if self.step < self.total else "")

    def cells(self) -> list[list[str]]:
        """The header and the rows; a metric that was not measured in a step is left empty."""
        header = list(dict.fromkeys(name for row in reversed(self.rows) for name in row))
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

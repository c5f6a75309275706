"""Plot a run's `metrics.jsonl`: in the terminal with Braille dots, and as an image if matplotlib is installed.

Values are drawn as logged, without smoothing. Steps without a metric are skipped (evaluations are rare); a value that
is not finite interrupts the line.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oxrl.machine.packages import missing_message
from oxrl.names import did_you_mean
from oxrl.tracking.catalogue import EVAL, results
from oxrl.tracking.metrics import read_metrics

logger = logging.getLogger(__name__)

Series: TypeAlias = list[tuple[float, float]]
Range: TypeAlias = tuple[float, float]

MOST_PANELS = 8  # by default
ALSO = ("grad_norm", "lr", "tokens_per_second")  # plotted after the main results, the first of them always
# Of a panel's first, second, ... curve: colour in the terminal and in the image, and the mark of its points.
STYLES = (
    ("cyan", "tab:blue", ""),
    ("yellow", "tab:orange", "●"),
    ("green", "tab:green", "■"),
    ("magenta", "tab:purple", "▲"),
    ("red", "tab:red", "◆"),
    ("white", "tab:gray", "○"),
)
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # the bits of a Braille cell, four rows of two
PANEL_WIDTH, PANEL_HEIGHT = 39, 8  # characters; two panels fit side by side into 80
FEW_POINTS = 40  # up to this number, points are marked in the image


class Panel(NamedTuple):
    """`Panel({"loss": [(1, 2.3), (2, 2.1)], "eval_loss": [(2, 2.2)]}, steps=(1, 2))`: curves on the same axes."""

    curves: Mapping[str, Series]
    steps: Range


def plot_run(run: Path, png: Path, metrics: Sequence[str] = ()) -> None:
    """Plot `metrics` of a run, by default the most informative ones that it has."""
    rows = _read_run(run)
    _show(_panels(rows, _chosen(rows, metrics)), png, str(run), run.resolve().name)


def plot_runs(runs: Sequence[Path], png: Path, metrics: Sequence[str] = ()) -> None:
    """As `plot_run`, with the curves of several runs over each other, one panel per metric."""
    if len(runs) == 1:
        plot_run(runs[0], png, metrics)
        return
    if len(runs) > len(STYLES):
        raise ValueError(f"a plot can show {len(STYLES)} runs, not {len(runs)}")
    names = [run.resolve().name for run in runs]
    labels = names if len(set(names)) == len(names) else list(map(str, runs))
    rows_of = {label: _read_run(run) for label, run in zip(labels, runs, strict=True)}
    chosen = _chosen([row for rows in rows_of.values() for row in rows], metrics)
    _show(_compared(rows_of, chosen[:MOST_PANELS]), png, f"{len(runs)} runs", " and ".join(rows_of))


def _compared(rows_of: Mapping[str, Sequence[Mapping[str, float]]], metrics: Sequence[str]) -> list[Panel]:
    """Return one panel per metric, with a curve per run that has it."""
    steps = _range([row["step"] for rows in rows_of.values() for row in rows])
    panels = []
    for metric in metrics:
        curves = {run: [(row["step"], row[metric]) for row in rows if metric in row] for run, rows in rows_of.items()}
        panels.append(Panel({f"{metric} {run}": curve for run, curve in curves.items() if curve}, steps))
    return panels


def plot_history(
    history: Sequence[Mapping[str, float]], png: str | Path | None = None, *, metrics: Sequence[str] = ()
) -> None:
    """Plot a history as loops return it: `[{"step": 1, "reward": 0.1}, ...]`; with `png`, also write an image."""
    if not any(row.keys() - {"step"} for row in history) or not all("step" in row for row in history):
        raise ValueError('a history is a list of steps, such as [{"step": 1, "reward": 0.1}]; each needs `step`')
    panels = _panels(history, _chosen(history, metrics))
    _show(panels, None if png is None else Path(png), "history", "history")


def _show(panels: Sequence[Panel], png: Path | None, where: str, title: str) -> None:
    first, last = panels[0].steps
    console = Console(highlight=False)
    console.print(Text(f"{where}  steps {first:.0f} to {last:.0f}", "bold"), soft_wrap=True)
    _print_panels(console, panels)
    if png is not None and _save_image(png, panels, title):
        console.print(Text(f"image: {png}"), soft_wrap=True)


def save_curves(run: Path, png: Path) -> bool:
    """Write the default curves of a run to an image; return False if matplotlib is missing."""
    rows = _read_run(run)
    return _save_image(png, _panels(rows, _chosen(rows, ())), run.resolve().name)


def draw(
    series: Series, width: int, height: int, *, x_range: Range | None = None, y_range: Range | None = None
) -> list[str]:
    """Return the curve as `height` lines of `width` characters, top first; a non-finite value interrupts it."""
    points = _finite(series)
    if not points:
        return [" " * width] * height
    x_low, x_high = x_range or _range([x for x, _ in points])
    y_low, y_high = y_range or _range([y for _, y in points])
    cells = [[0] * width for _ in range(height)]
    previous: tuple[int, int] | None = None
    for x, y in series:
        if not _is_number(y):
            previous = None
            continue
        point = _position(x, x_low, x_high, 2 * width), 4 * height - 1 - _position(y, y_low, y_high, 4 * height)
        for column, row in _line(previous or point, point):
            cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]
        previous = point
    return ["".join(chr(0x2800 + dots) if dots else " " for dots in line) for line in cells]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    (x, y), (to_x, to_y) = start, end
    far = max(abs(to_x - x), abs(to_y - y), 1)
    return [(round(x + (to_x - x) * i / far), round(y + (to_y - y) * i / far)) for i in range(far + 1)]


def _position(value: float, low: float, high: float, dots: int) -> int:
    """Return the position among `dots`; the middle if all values are equal."""
    return round((value - low) / (high - low) * (dots - 1)) if high > low else (dots - 1) // 2


def _finite(series: Series) -> Series:
    return [(x, y) for x, y in series if _is_number(y)]


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _range(values: Sequence[float]) -> Range:
    return min(values), max(values)


def _read_run(run: Path) -> list[dict[str, float]]:
    if not run.is_dir():
        hint = did_you_mean(run.name, (other.name for other in run.parent.glob("*/")))
        raise ValueError(f"there is no run folder {run}{hint}")
    file = run / "metrics.jsonl"
    if not file.exists():
        raise ValueError(f"{run} has no metrics.jsonl: it is not a run folder, or its first step is not finished yet")
    rows = read_metrics(file)
    if not any(row.keys() - {"step"} for row in rows):
        raise ValueError(f"{file} has no metrics yet: wait for the first logged step")
    return rows


def _chosen(rows: Sequence[Mapping[str, float]], metrics: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    if unknown := [name for name in metrics if name not in names]:
        hint = did_you_mean(unknown[0], names, ".")
        raise ValueError(f"the run has no metric {unknown[0]!r}{hint} It has: {', '.join(names)}")
    return list(dict.fromkeys(metrics)) or _default(names) or names


def _default(names: Sequence[str]) -> list[str]:
    chosen = results(names)
    shown = list(dict.fromkeys(name.removeprefix(EVAL) for name in chosen))[: MOST_PANELS - 1]
    rest = [name for name in ALSO if name in names][: MOST_PANELS - len(shown)]
    return [name for name in chosen if name.removeprefix(EVAL) in shown] + rest


def _panels(rows: Sequence[Mapping[str, float]], metrics: Sequence[str]) -> list[Panel]:
    """Return one panel per metric; `eval_loss` is the second curve in the panel of `loss`."""
    grouped: dict[str, dict[str, Series]] = {}
    for metric in metrics:
        curve = [(row["step"], row[metric]) for row in rows if metric in row]
        grouped.setdefault(metric.removeprefix("eval_"), {})[metric] = curve
    steps = _range([row["step"] for row in rows])
    return [Panel(dict(sorted(curves.items(), key=_is_evaluation)), steps) for curves in grouped.values()]


def _is_evaluation(named_curve: tuple[str, Series]) -> bool:
    return named_curve[0].startswith("eval_")


def _print_panels(console: Console, panels: Sequence[Panel]) -> None:
    columns = min(len(panels), max(1, console.width // PANEL_WIDTH), 3)
    width = max((console.width - 2 * (columns - 1)) // columns, 20)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(columns):
        grid.add_column(width=width, no_wrap=True, vertical="bottom")
    for start in range(0, len(panels), columns):
        drawn = [_panel_lines(panel, width) for panel in panels[start : start + columns]]
        grid.add_row(*(Text("\n").join(lines) for lines in drawn))
    console.print(grid)


def _panel_lines(panel: Panel, width: int) -> list[Text]:
    """Return titles, curves with y labels, the x axis, and an empty line."""
    values = [y for curve in panel.curves.values() for _, y in _finite(curve)]
    y_range = _range(values) if values else (0.0, 0.0)
    labels = _y_labels(*y_range) if values else {}
    margin = max(map(len, labels.values()), default=0)
    lines = _titles(panel, width)
    for row, cells in enumerate(_overlay(panel, width - margin - 1, y_range)):
        label = labels.get(row, "")
        lines.append(Text.assemble((f"{label:>{margin}}{'┤' if label else '│'}", "dim"), cells))
    first, last = (f"{step:.0f}" for step in panel.steps)
    lines.append(Text(" " * margin + "└" + "─" * (width - margin - 1), "dim"))
    lines.append(Text(f"{' ' * margin} step {first}{last:>{width - margin - 6 - len(first)}}", "dim"))
    return [*lines, Text()]


def _overlay(panel: Panel, width: int, y_range: Range) -> list[Text]:
    """Draw curves over each other. Points of all but the first are marked, so that they differ without colour too."""
    cells = [[(" ", "")] * width for _ in range(PANEL_HEIGHT)]
    for curve, (colour, _, mark) in zip(panel.curves.values(), STYLES, strict=False):
        for row, line in enumerate(draw(curve, width, PANEL_HEIGHT, x_range=panel.steps, y_range=y_range)):
            for column, dots in enumerate(line):
                if dots != " ":
                    below = cells[row][column][0]
                    cells[row][column] = (dots if below == " " else chr(ord(dots) | ord(below)), colour)
        for x, y in _finite(curve) if mark else ():
            row = PANEL_HEIGHT - 1 - _position(y, *y_range, 4 * PANEL_HEIGHT) // 4
            cells[row][_position(x, *panel.steps, 2 * width) // 2] = (mark, colour)
    return [Text.assemble(*line) for line in cells]


def _y_labels(low: float, high: float) -> dict[int, str]:
    """Return the labels by line of the panel."""
    if low == high:
        return {PANEL_HEIGHT // 2: _number(low)}
    digits = 3 + max(0, math.floor(math.log10(max(abs(low), abs(high)) / (high - low))))  # low and high differ
    values = {0: high, PANEL_HEIGHT // 2: (low + high) / 2, PANEL_HEIGHT - 1: low}
    return {row: _number(value, digits) for row, value in values.items()}


def _titles(panel: Panel, width: int) -> list[Text]:
    """Return name and numbers of each curve, on one line if they fit."""
    titles = []
    for (name, curve), (colour, _, mark) in zip(panel.curves.items(), STYLES, strict=False):
        sign, numbers = f"{mark} " if mark else "", _summary(curve)
        gap = " " if len(f"{sign}{name} {numbers}") <= width else "\n"
        titles.append(Text.assemble((sign + name, f"bold {colour}"), gap, numbers))
    return titles


def _summary(curve: Series) -> str:
    values = [y for _, y in _finite(curve)]
    if not values:
        return "no finite value"
    last = _number(curve[-1][1]) if _is_number(curve[-1][1]) else "not finite"
    return f"last {last} min {_number(min(values))} max {_number(max(values))}"


def _number(value: float, digits: int = 3) -> str:
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.{digits}g}"


def _save_image(png: Path, panels: Sequence[Panel], title: str) -> bool:
    try:
        figure = _figure(panels, title)
    except ModuleNotFoundError:
        logger.warning("no image written: %s", missing_message("matplotlib", "plot"))
        return False
    try:
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=150, format=png.suffix[1:] or "png")
    except OSError as error:
        raise ValueError(f"{png} cannot be written ({error}): choose another --output") from error
    return True


def _figure(panels: Sequence[Panel], title: str) -> Any:
    from matplotlib.figure import Figure  # without pyplot it draws with Agg and needs no display

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 2.9 * rows + 0.4), layout="constrained")
    figure.suptitle(title)
    first = None
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number, sharex=first)
        first = first or axes
        for (name, curve), (_, colour, _) in zip(panel.curves.items(), STYLES, strict=False):
            x, y = zip(*curve, strict=True)
            marker = "o" if len(curve) <= FEW_POINTS else ""
            axes.plot(
                x, y, color=colour, marker=marker, markersize=3, linewidth=1.2, label=f"{name}: {_summary(curve)}"
            )
        axes.set(xlabel="step", ylabel=next(iter(panel.curves)).partition(" ")[0])
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, frameon=False, fontsize="small")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure

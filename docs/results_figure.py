"""The picture of the README, from benchmarks/README.md: `python docs/results_figure.py > assets/results.svg`.

Left: speed and memory beside TRL. Right: held-out accuracy before and after `make demo`, with 95% intervals.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

BENCHMARKS = Path(__file__).parent.parent / "benchmarks" / "README.md"
OURS, OTHER, TEXT, FAINT = "#b3541e", "#9aa5b1", "#24292f", "#57606a"
WIDTH, HEIGHT = 860, 262


def table(command: str) -> dict[str, list[str]]:
    """Return the rows of the first table below the heading of a command, by their first cell."""
    section = BENCHMARKS.read_text(encoding="utf-8").split(f"## `{command}`")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return {first: rest for first, *rest in cells[2:]}


def number(cell: str) -> float:
    """The mean of the numbers in a cell: one per round."""
    return mean(float(each) for each in re.findall(r"\d+\.?\d*", cell))


def text(x: float, y: float, words: str, *, colour: str = TEXT, size: int = 13, anchor: str = "start") -> str:
    weight = "bold" if size > 13 else "normal"
    style = f'fill="{colour}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{words}</text>'


def bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{colour}"/>'


def compared() -> Iterator[str]:
    """Bars of both libraries, for speed and memory of SFT and GRPO."""
    sft, grpo = table("python benchmarks/sft.py"), table("python benchmarks/grpo.py")
    measures = [
        ("SFT, trained tokens/s", sft, 0),
        ("GRPO, sampled tokens/s", grpo, 1),
        ("SFT, peak memory in GiB", sft, 2),
        ("GRPO, peak memory in GiB", grpo, 2),
    ]
    yield text(24, 34, "Speed and memory beside TRL", size=15)
    yield text(24, 52, "SmolLM2-135M in float32, two CPU cores, TRL 1.16", colour=FAINT, size=12)
    for row, (name, rows, column) in enumerate(measures):
        y, values = 72 + 44 * row, {library: number(rows[library][column]) for library in ("oxRL", "TRL")}
        yield text(24, y + 20, name)
        for line, (library, value) in enumerate(values.items()):
            length = 150 * value / max(values.values())
            yield bar(196, y + 4 + 16 * line, length, 12, OURS if library == "oxRL" else OTHER)
            yield text(202 + length, y + 14 + 16 * line, f"{library} {value:.3g}", colour=FAINT, size=12)


def learned() -> Iterator[str]:
    """Accuracy before and after, with its interval, of each seed and of the control."""
    yield text(462, 34, "make demo: learning from rewards alone", size=15)
    yield text(462, 52, "held-out accuracy before and after, with 95% intervals", colour=FAINT, size=12)
    for level in (0, 50, 100):
        y = 222 - 1.4 * level
        yield f'<line x1="496" y1="{y:.1f}" x2="836" y2="{y:.1f}" stroke="#d0d7de"/>'
        yield text(490, y + 4, f"{level}%", colour=FAINT, size=11, anchor="end")
    for column, (seed, (_, before, after, _)) in enumerate(table("python examples/demo.py").items()):
        x = 510 + 82 * column
        for step, cell in enumerate((before, after)):
            value, low, high = (1.4 * float(each) for each in re.findall(r"\d+", cell))
            left = x + 32 * step
            yield bar(left, 222 - value, 26, value, (OTHER, OURS)[step])
            yield f'<path d="M{left + 13} {222 - low:.1f}V{222 - high:.1f}" stroke="{TEXT}" stroke-width="1.5"/>'
        name = "rewards shuffled" if "control" in seed else f"seed {seed}"
        yield text(x + 29, 240, name, colour=FAINT, size=12, anchor="middle")


def figure() -> str:
    """The picture as SVG, with a white background for dark pages."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">',
            "<title>Speed and memory beside TRL, and accuracy before and after the demo</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff" stroke="#d0d7de"/>',
            *compared(),
            *learned(),
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(figure())

"""A data file to what training on it would see: rows token by token, their lengths, and what is wrong with them.

Nothing is trained or written. With colours the style of a token says what becomes of it; without, brackets do.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from oxrl.algorithms import algorithm
from oxrl.data.assemble import Assembled, assemble
from oxrl.data.prompts import as_prompt
from oxrl.data.render import Renderer, special_tokens
from oxrl.data.sources import load_samples
from oxrl.models.load import load_tokenizer
from oxrl.run.data import is_online
from oxrl.types import Item, Row, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROL = {code: chr(0x2400 + code) for code in range(32)} | dict.fromkeys(range(127, 160), "\N{SYMBOL FOR DELETE}")
LINE_BREAK = "↵"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a part of a character decodes to
MOST_TOKENS_OF_A_CHARACTER = 4  # UTF-8 has no more bytes than that
REASONS_SHOWN, PLACES_SHOWN = 5, 3
BINS, BAR = 8, 40


@dataclass(frozen=True, slots=True)
class Report:
    """`inspect_data("train.jsonl", "tiny", "sft", 2048, {})`."""

    file: str
    model: str
    algorithm: str
    format: str
    max_len: int | None
    samples: int  # that could be read
    skipped: list[str]  # "train.jsonl:7: why", for what could not be read or not be rendered, in the file's order
    rows: list[Row]  # what would be trained on
    overlong: list[Row]  # what would not, because of its length
    tokenizer: PreTrainedTokenizerBase
    asks: bool = False  # the rows are prompts: what is trained is still to be sampled

    def statistics(self) -> dict[str, Any]:
        """Numbers for programs. Only the lengths count over-long rows too, because they help to choose a limit."""
        lengths = self.lengths()
        return {
            "format": self.format,
            "samples": self.samples,
            "rows": len(self.rows),
            "tokens": sum(map(len, self.rows)),
            "trained_tokens": sum(int(row.mask.sum()) for row in self.rows),
            "length_median": statistics.median(lengths),
            "length_p95": lengths[math.ceil(0.95 * len(lengths)) - 1],
            "length_max": lengths[-1],
            "overlong": len(self.overlong),
            "skipped": len(self.skipped),
            "duplicates": len(self.duplicates()),
        }

    def lengths(self) -> list[int]:
        return sorted(len(row) for row in (*self.rows, *self.overlong))

    def duplicates(self) -> list[Row]:
        """Rows with the same tokens as one before them."""
        first = {row.tokens.tobytes(): row for row in reversed(self.rows)}
        return [row for row in self.rows if first[row.tokens.tobytes()] is not row]


def inspect_data(file: str, model: str, algorithm_name: str, max_len: int | None, columns: Mapping[str, str]) -> Report:
    """Read and render `file` as training would, but go on past rows that would stop it."""
    chosen = algorithm(algorithm_name)
    loaded = load_samples(file, columns=columns, bad_rows="skip")
    tokenizer = load_tokenizer(model)
    render = Renderer(tokenizer, max_len=max_len)
    asks = is_online(chosen, loaded.samples)
    rendered = _prompts(loaded.samples, render) if asks else assemble(loaded.samples, chosen, render, bad_rows="skip")
    fits = [max_len is None or max(map(len, item)) <= max_len for item in rendered.items]
    unread = [f"{where}: {reason}" for where, reason in loaded.skipped]
    return Report(
        file=file,
        model=model,
        algorithm=chosen.name,
        format=loaded.format,
        max_len=max_len,
        samples=len(loaded.samples),
        skipped=sorted([*unread, *rendered.skipped], key=_line_number),
        rows=[row for item, fit in zip(rendered.items, fits, strict=True) if fit for row in item],
        overlong=[row for item, fit in zip(rendered.items, fits, strict=True) if not fit for row in item],
        tokenizer=tokenizer,
        asks=asks,
    )


def _prompts(samples: Sequence[Sample], render: Renderer) -> Assembled:
    """What the model will be asked; nothing of it is trained, for what is trained is still to be sampled."""
    items: list[Item] = []
    skipped: list[str] = []
    for sample in map(as_prompt, samples):
        try:
            ids = render.prompt(sample.messages, tools=sample.tools)
            items.append((Row(sample.id, ids, np.zeros(len(ids), dtype=np.bool_)),))
        except ValueError as error:
            skipped.append(f"{sample.id}: {error}")
    return Assembled(items, skipped, 0, 0, 0)


def _line_number(reason: str) -> int:
    found = re.search(r":(\d+)", reason)
    return int(found.group(1)) if found else 0


def print_report(report: Report, rows: int) -> None:
    """The first `rows` rows in full, then lengths and problems."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    paint = _bracketed if console.color_system is None or console.no_color else _coloured
    _print_head(console, report)
    for row in report.rows[:rows]:
        console.print(Text.assemble("\n", (row.id, "bold"), f"  {len(row)} tokens, {int(row.mask.sum())} trained"))
        console.print(paint(pieces(row, report.tokenizer)))
    if report.rows[:rows]:
        console.print(Text("\n").append_text(LEGENDS[paint]))
    _print_lengths(console, report)
    _print_problems(console, report)


def _print_head(console: Console, report: Report) -> None:
    console.print(Text.assemble((report.file, "bold"), f"  format {report.format}, {report.samples} samples"))
    console.print(f"{len(report.rows)} rows for {report.algorithm}, in tokens of {report.model}")
    if report.skipped:
        console.print(Text(f"{len(report.skipped)} skipped:", "yellow"))
        for reason in report.skipped[:REASONS_SHOWN]:
            console.print(f"  {reason.translate(CONTROL)}")
    if (more := len(report.skipped) - REASONS_SHOWN) > 0:
        console.print(f"  and {more} more")


class Piece(NamedTuple):
    """`Piece("<|im_end|>", trained=True, special=True)`: a token, or the tokens that are one character together."""

    text: str
    trained: bool
    special: bool


def pieces(row: Row, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """The tokens of a row as text, with control characters made visible."""
    ids, mask = row.tokens.tolist(), row.mask.tolist()
    special = special_tokens(tokenizer)
    start = 0
    while start < len(ids):
        end, text = _whole_characters(ids, start, tokenizer)
        yield Piece(text.translate(CONTROL | {ord("\n"): f"{LINE_BREAK}\n"}), mask[start], ids[start] in special)
        start = end


def _whole_characters(ids: Sequence[int], start: int, tokenizer: PreTrainedTokenizerBase) -> tuple[int, str]:
    """The fewest tokens that decode to whole characters, or the first token alone if none do."""
    for end in range(start + 1, min(start + MOST_TOKENS_OF_A_CHARACTER, len(ids)) + 1):
        if UNFINISHED not in (text := _decode(ids[start:end], tokenizer)):
            return end, text
    return start + 1, _decode(ids[start : start + 1], tokenizer)


def _decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Decoded behind another token, because decoders drop a space at the very beginning."""
    anchor = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else ids[0]
    alone = tokenizer.decode([anchor], clean_up_tokenization_spaces=False)
    behind: str = tokenizer.decode([anchor, *ids], clean_up_tokenization_spaces=False)
    return behind.removeprefix(alone)


def _coloured(parts: Iterable[Piece]) -> Text:
    return Text.assemble(*((piece.text, _style(piece, number)) for number, piece in enumerate(parts)))


def _style(piece: Piece, number: int) -> str:
    words = ("bold green" if piece.trained else "dim", "reverse" if piece.special else "", "underline" * (number % 2))
    return " ".join(filter(None, words))


def _bracketed(parts: Iterable[Piece]) -> Text:
    spans = ((trained, "".join(piece.text for piece in span)) for trained, span in groupby(parts, _is_trained))
    return Text("".join(f"⟦{text}⟧" if trained else text for trained, text in spans))


def _is_trained(piece: Piece) -> bool:
    return piece.trained


LEGENDS = {
    _bracketed: Text(f"⟦trained⟧ given  {LINE_BREAK} line break"),
    _coloured: Text.assemble(
        ("trained", "bold green"),
        ("  given", "dim"),
        "  ",
        ("special token", "reverse"),
        "  to",
        ("ken", "underline"),
        f" borders  {LINE_BREAK} line break",
    ),
}


def _print_lengths(console: Console, report: Report) -> None:
    numbers = report.statistics()
    tokens, trained = numbers["tokens"], numbers["trained_tokens"]
    console.print(Text("\nlength in tokens", "bold"))
    counts = histogram(report.lengths())
    edge = len(str(counts[-1][1]))
    most = max(count for _, _, count in counts)
    for low, high, count in counts:
        bar = "█" * round(BAR * count / most) or "▏" * (count > 0)
        console.print(f"  {low:>{edge}} to {high:>{edge}}  {bar}{' ' * bool(bar)}{count}")
    console.print("median {length_median:g}, p95 {length_p95}, max {length_max}".format(**numbers))
    if tokens:
        console.print(f"{tokens} tokens, {trained} of them trained ({trained / tokens:.0%})")


def histogram(lengths: Sequence[int], bins: int = BINS) -> list[tuple[int, int, int]]:
    """`histogram([3, 4, 9], 2) == [(3, 6, 2), (7, 10, 1)]`: first and last length of each bin, and how many."""
    low, high = min(lengths), max(lengths)
    width = -(-(high - low + 1) // bins)
    starts = range(low, high + 1, width)
    return [(start, start + width - 1, sum(start <= length < start + width for length in lengths)) for start in starts]


def _print_problems(console: Console, report: Report) -> None:
    found = problems(report)
    for problem in found:
        console.print(Text.assemble(("problem: ", "bold yellow"), problem))
    if not found:
        console.print(Text("no problems found", "green"))


def problems(report: Report) -> list[str]:
    """What a person should look at before training, most serious first."""
    found = [] if report.rows else ["no row is left to train on"]
    if report.skipped:
        found.append(f"skipped: {len(report.skipped)} (see above; training stops there unless data.bad_rows is skip)")
    suspects = {
        f"longer than {report.max_len} tokens, left out unless data.overlong is truncate": report.overlong,
        "no more than one trained token": [row for row in report.rows if not report.asks and row.mask.sum() <= 1],
        "the same tokens as an earlier row": report.duplicates(),
    }
    return found + [f"{what}: {len(rows)} ({_places(rows)})" for what, rows in suspects.items() if rows]


def _places(rows: Sequence[Row]) -> str:
    more = len(rows) - PLACES_SHOWN
    return ", ".join(row.id for row in rows[:PLACES_SHOWN]) + (f" and {more} more" if more > 0 else "")

"""Show a data file as training would see it: rows token by token, their lengths, and problems.

Nothing is trained or written. Trained tokens are marked by colour, or by brackets where there is no colour.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from oxrl.algorithms import algorithm
from oxrl.data.assemble import Assembled, assemble
from oxrl.data.media import describe, measure
from oxrl.data.prompts import as_prompt
from oxrl.data.render import Renderer, special_tokens
from oxrl.data.sources import load_samples
from oxrl.data.template import EndlessTemplateError
from oxrl.models.load import context_length, load_tokenizer
from oxrl.run.data import is_online
from oxrl.types import Item, ModelConfig, Row, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROL = {code: chr(0x2400 + code) for code in range(32)} | dict.fromkeys(range(127, 160), "\N{SYMBOL FOR DELETE}")
LINE_BREAK = "↵"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to
MAX_TOKENS_PER_CHARACTER = 4  # UTF-8 has at most 4 bytes per character
REASONS_SHOWN, IDS_SHOWN = 5, 3
BINS, BAR_WIDTH = 8, 40
KINDS = ("image", "audio")


@dataclass(frozen=True, slots=True)
class Report:
    """`inspect_data("train.jsonl", "tiny", "sft", 2048, {})`."""

    file: str
    model: str
    algorithm: str
    format: str
    max_len: int | None
    samples: int  # number of rows that were read
    skipped: list[str]  # "train.jsonl:7: reason", for rows that could not be read or rendered, in file order
    rows: list[Row]  # rows to train on
    overlong: list[Row]  # rows left out because of their length
    tokenizer: PreTrainedTokenizerBase
    context: int | None = None  # tokens that the model was made for
    prompts_only: bool = False  # the algorithm samples: trained tokens do not exist yet
    answers: Mapping[str, str] = field(default_factory=dict)  # reference answers by the id of the row

    def statistics(self) -> dict[str, Any]:
        """Return the numbers of `--json`. Only the lengths include over-long rows, to help choose a limit."""
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
            **self.media(),
        }

    def media(self) -> dict[str, int]:
        """Return how many images and sounds the rows have, and how many tokens these become."""
        found = [medium for row in self.rows for medium in row.media]
        if not found:
            return {}
        kinds = {f"{kind}s" if kind == "image" else kind: sum(each.kind == kind for each in found) for kind in KINDS}
        tokens = sum(end - start for row in self.rows for start, end in row.media_spans)
        return {**{kind: count for kind, count in kinds.items() if count}, "media_tokens": tokens}

    def lengths(self) -> list[int]:
        return sorted(len(row) for row in (*self.rows, *self.overlong))

    def duplicates(self) -> list[Row]:
        """Return the rows with the same tokens as an earlier row."""
        first = {(row.tokens.tobytes(), row.media): row for row in reversed(self.rows)}
        return [row for row in self.rows if first[row.tokens.tobytes(), row.media] is not row]


def inspect_data(
    file: str,
    model: str,
    algorithm_name: str,
    max_len: int | None,
    columns: Mapping[str, str],
    template: Mapping[str, str] | None = None,
) -> Report:
    """Read and render `file` as training would, but skip rows that would stop training."""
    chosen = algorithm(algorithm_name)
    loaded = load_samples(file, columns=columns, template=template, bad_rows="skip")
    tokenizer = load_tokenizer(model)
    render = Renderer(tokenizer, max_len=max_len)
    prompts_only = is_online(chosen, loaded.samples)
    if prompts_only:
        rendered = _prompts(loaded.samples, render)
    else:
        rendered = assemble(loaded.samples, chosen, render, bad_rows="skip")
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
        context=context_length(ModelConfig(model)),
        prompts_only=prompts_only,
        answers={sample.id: sample.answer for sample in map(as_prompt, loaded.samples) if sample.answer is not None},
    )


def _prompts(samples: Sequence[Sample], render: Renderer) -> Assembled:
    """Render the prompts, with no token trained: completions are sampled during training."""
    items: list[Item] = []
    skipped: list[str] = []
    for sample in map(as_prompt, samples):
        try:
            ids = render.prompt(sample.messages, tools=sample.tools, media=sample.media)
            row = Row(sample.id, ids, np.zeros(len(ids), dtype=np.bool_), media=sample.media)
            items.append((replace(row, media_spans=render.spans(ids.tolist(), sample.media, sample.id)),))
        except EndlessTemplateError:
            raise
        except ValueError as error:
            skipped.append(f"{sample.id}: {error}")
    return Assembled(items, skipped, 0, 0, 0)


def media_lines(row: Row) -> list[str]:
    """`["image 1: cat.png, 640x480 pixels, 391 tokens"]`."""
    spans = row.media_spans or [(0, 0)] * len(row.media)
    return [
        f"{medium.kind} {number}: {describe(medium)}, {measure(medium)}, {end - start} token{'s' * (end - start > 1)}"
        for number, (medium, (start, end)) in enumerate(zip(row.media, spans, strict=True), 1)
    ]


def _line_number(reason: str) -> int:
    found = re.search(r":(\d+)", reason)
    return int(found.group(1)) if found else 0


def print_report(report: Report, rows: int) -> None:
    """Print the first `rows` rows in full, then lengths and problems."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    paint = _bracketed if console.color_system is None or console.no_color else _coloured
    _print_head(console, report)
    for row in report.rows[:rows]:
        console.print(Text.assemble("\n", (row.id, "bold"), f"  {len(row)} tokens, {int(row.mask.sum())} trained"))
        console.print(paint(pieces(row, report.tokenizer)))
        for line in media_lines(row):
            console.print(line)
        if report.prompts_only and row.id in report.answers:
            console.print(f"reference answer: {report.answers[row.id].translate(CONTROL)}")
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
    """`Piece("<|im_end|>", trained=True, special=True)`: a token, or the tokens that form one character."""

    text: str
    trained: bool
    special: bool


def pieces(row: Row, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """Yield the tokens of a row as text, with control characters made visible."""
    ids, mask = row.tokens.tolist(), row.mask.tolist()
    special = special_tokens(tokenizer)
    borders = dict(row.media_spans)
    start = 0
    while start < len(ids):
        if start in borders:  # once, with the number of tokens
            count, placeholder = borders[start] - start, _decode(ids[start : start + 1], tokenizer)
            yield Piece(f"{placeholder} x {count}" if count > 1 else placeholder, False, True)
            start = borders[start]
            continue
        end, text = _complete_characters(ids, start, tokenizer)
        yield Piece(text.translate(CONTROL | {ord("\n"): f"{LINE_BREAK}\n"}), mask[start], ids[start] in special)
        start = end


def _complete_characters(ids: Sequence[int], start: int, tokenizer: PreTrainedTokenizerBase) -> tuple[int, str]:
    """Return end and text of the fewest tokens that decode to complete characters, else of the first token alone."""
    for end in range(start + 1, min(start + MAX_TOKENS_PER_CHARACTER, len(ids)) + 1):
        if UNFINISHED not in (text := _decode(ids[start:end], tokenizer)):
            return end, text
    return start + 1, _decode(ids[start : start + 1], tokenizer)


def _decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Decode with a token in front, because decoders drop a leading space."""
    anchor = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else ids[0]
    prefix = tokenizer.decode([anchor], clean_up_tokenization_spaces=False)
    text: str = tokenizer.decode([anchor, *ids], clean_up_tokenization_spaces=False)
    return text.removeprefix(prefix)


def _coloured(parts: Iterable[Piece]) -> Text:
    return Text.assemble(*((piece.text, _style(piece, number)) for number, piece in enumerate(parts)))


def _style(piece: Piece, number: int) -> str:
    styles = ("bold green" if piece.trained else "dim", "reverse" if piece.special else "", "underline" * (number % 2))
    return " ".join(filter(None, styles))


def _bracketed(parts: Iterable[Piece]) -> Text:
    spans = ((trained, "".join(piece.text for piece in span)) for trained, span in groupby(parts, _is_trained))
    return Text("".join(f"⟦{text}⟧" if trained else text for trained, text in spans))


def _is_trained(piece: Piece) -> bool:
    return piece.trained


LEGENDS = {
    _bracketed: Text(f"⟦trained⟧ not trained  {LINE_BREAK} line break"),
    _coloured: Text.assemble(
        ("trained", "bold green"),
        ("  not trained", "dim"),
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
        bar = "█" * round(BAR_WIDTH * count / most) or "▏" * (count > 0)
        console.print(f"  {low:>{edge}} to {high:>{edge}}  {bar}{' ' * bool(bar)}{count}")
    console.print("median {length_median:g}, p95 {length_p95}, max {length_max}".format(**numbers))
    if tokens:
        console.print(f"{tokens} tokens, {trained} of them trained ({trained / tokens:.0%})")
    if shown := report.media():
        kinds = " and ".join(f"{count} {kind}" for kind, count in shown.items() if kind != "media_tokens")
        console.print(f"{kinds}, which are {shown['media_tokens']} of these tokens")


def histogram(lengths: Sequence[int], bins: int = BINS) -> list[tuple[int, int, int]]:
    """`histogram([3, 4, 9], 2) == [(3, 6, 2), (7, 10, 1)]`: first and last length of each bin, and its count."""
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
    """Return what to check before training, most serious first."""
    found = [] if report.rows else ["no row is left to train on"]
    if report.skipped:
        found.append(f"skipped: {len(report.skipped)} (see above; training stops there unless data.bad_rows is skip)")
    untrained = [row for row in report.rows if not report.prompts_only and row.mask.sum() <= 1]
    beyond = [row for row in report.rows if report.context is not None and len(row) > report.context]
    suspects = {
        f"longer than {report.max_len} tokens, left out unless data.overlong is truncate": report.overlong,
        f"longer than the {report.context} tokens that the model was made for": beyond,
        "no more than one trained token": untrained,
        "the same tokens as an earlier row": report.duplicates(),
    }
    return found + [f"{what}: {len(rows)} ({_ids(rows)})" for what, rows in suspects.items() if rows]


def _ids(rows: Sequence[Row]) -> str:
    more = len(rows) - IDS_SHOWN
    return ", ".join(row.id for row in rows[:IDS_SHOWN]) + (f" and {more} more" if more > 0 else "")

"""The last number of a response against the sample's: lenient about notation, exact about the value."""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

from oxrl.rewards.answers import answer_text, is_negated, reference
from oxrl.rewards.grade import reads
from oxrl.types import Rollout

# A sign counts unless it is between two operands, as in "3-4"; a digit inside a word ("m2") is not a number.
_NUMBER = re.compile(
    r"""
    (?<![\w.])
    (?: (?P<sign>[-+−]) (?<![\w).][-+−]) )?
    (?: [$€£¥₹] (?P<inner>[-−])? )?
    (?P<digits> \d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)? | \d+(?:\.\d+)? | \.\d+ )
    (?P<exponent> [eE][-+]?\d+ (?![\w]) )?
    (?: /(?P<below>\d+) (?![\d/]) )?
    """,
    re.VERBOSE,
)
_MAX_DIGITS = 100  # longer ones are not meant as numbers, and slow to parse
_MAX_EXPONENT = 5  # characters, as in e-300


def numbers_in(text: str) -> list[Fraction]:
    """`numbers_in("from 1,200 to -$3.50")` is `[Fraction(1200), Fraction(-7, 2)]`."""
    found = (_value(match) for match in _NUMBER.finditer(text))
    return [number for number in found if number is not None]


def last_number(text: str) -> Fraction | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return None if last is None else _value(last)


def claimed_number(text: str) -> Fraction | None:
    """The last number that is not negated: 43 of "it is 43, not 42", and none of "it is not 42"."""
    for match in reversed(deque(_NUMBER.finditer(text), maxlen=8)):
        if not is_negated(text, match.start()):
            return _value(match)
    return None


def _value(match: re.Match[str]) -> Fraction | None:
    digits, exponent, below = match["digits"].replace(",", ""), match["exponent"] or "", match["below"] or "1"
    if len(digits) > _MAX_DIGITS or len(below) > _MAX_DIGITS or len(exponent) > _MAX_EXPONENT:
        return None
    if not int(below):
        return None
    negative = (match["sign"] in ("-", "−")) != (match["inner"] is not None)
    size = Fraction(digits + exponent) / int(below)
    return -size if negative else size


@reads("answer")
def number_match(rollout: Rollout, *, tolerance: float = 0.0) -> float:
    """1 if the last number of the response equals that of the sample's answer, within a relative `tolerance`.

    Thousands separators, decimals, fractions ("3/4"), currencies, exponents and signs are read; units are not. A
    negated number ("43, not 42") does not count.
    """
    text = reference(rollout.sample, "number_match")
    expected = last_number(text)
    if expected is None:
        raise ValueError(f"sample {rollout.sample.id}: its `answer` has no number ({text[:40]!r})")
    number = claimed_number(answer_text(rollout))
    return float(number is not None and abs(number - expected) <= abs(expected) * Fraction(tolerance))

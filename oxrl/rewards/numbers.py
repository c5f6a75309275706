"""The last number of an answer against the sample's: lenient about how it is written, exact about what it is."""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

from oxrl.rewards.answers import answer_text, is_denied, reference
from oxrl.rewards.grade import reads
from oxrl.types import Rollout

# A sign counts unless it stands between two things, as in "3-4"; a digit inside a word ("m2") is no number.
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
_LONGEST = 100  # digits; whoever writes more means no number, and it would take long to read
_LONGEST_EXPONENT = 5  # characters, as in e-300


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
    """The last number that is not denied: 43 of "it is 43, not 42", and none of "it is not 42"."""
    for match in reversed(deque(_NUMBER.finditer(text), maxlen=8)):
        if not is_denied(text, match.start()):
            return _value(match)
    return None


def _value(match: re.Match[str]) -> Fraction | None:
    digits, exponent, below = match["digits"].replace(",", ""), match["exponent"] or "", match["below"] or "1"
    if len(digits) > _LONGEST or len(below) > _LONGEST or len(exponent) > _LONGEST_EXPONENT:
        return None
    if not int(below):
        return None
    negative = (match["sign"] in ("-", "−")) != (match["inner"] is not None)
    size = Fraction(digits + exponent) / int(below)
    return -size if negative else size


@reads("answer")
def number_match(rollout: Rollout, *, tolerance: float = 0.0) -> float:
    """1 if the last number said equals the last number of the sample's answer, to a share of it if `tolerance` is set.

    Thousands separators, decimals, fractions ("3/4"), currencies, exponents and signs are read; units are not. A
    number that is denied ("43, not 42") does not count as said.
    """
    text = reference(rollout.sample, "number_match")
    expected = last_number(text)
    if expected is None:
        raise ValueError(f"sample {rollout.sample.id}: there is no number in its `answer` ({text[:40]!r})")
    said = claimed_number(answer_text(rollout))
    return float(said is not None and abs(said - expected) <= abs(expected) * Fraction(tolerance))

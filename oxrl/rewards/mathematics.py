"""A mathematical answer against the sample's: by `math-verify` if it is installed, otherwise by the rules here.

The rules read `\\boxed{...}`, fractions, decimals, percentages and LaTeX formatting; expressions that are equal only by
algebra are different for them. math-verify runs in another process: a model's expression can take it years.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache, lru_cache
from importlib.util import find_spec

from oxrl.rewards.answers import answer_text, reference
from oxrl.rewards.grade import reads
from oxrl.rewards.numbers import claimed_number, last_number
from oxrl.rewards.workers import WORKERS
from oxrl.types import Rollout

_MAX_LENGTH = 400  # characters of one expression; no answer in a textbook is longer, and sympy is too slow for more
_MAX_WORDS = 4  # in one expression; the LaTeX parser needs seconds for a sentence
_STATED = re.compile(r"(?i:answer\s{1,4}(?:is|=)|answer\s{0,4}:|####)\s{0,4}([^\n]{1,400})")
_MATHS = re.compile(r"\$\$?([^$\n]{1,400})\$|\\\(([^\n]{1,400}?)\\\)|\\\[([^\n]{1,400}?)\\\]")
_NORMALIZATIONS = [
    (re.compile(r"(?<=\d)\s*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}$"), ""),  # a unit
    (re.compile(r"\\(?:left|right|displaystyle|limits|!|,|;|:|quad|qquad)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:d|t|c)frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:text|mathrm|mbox|mathbf|textbf|operatorname)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|°"), ""),
    (re.compile(r"\\(?:cdot|times)(?![A-Za-z])"), "*"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\sqrt\s*(\d)"), r"\\sqrt{\1}"),
    (re.compile(r"\\?\$|\\ |\s+"), ""),
    (re.compile(r"\^\{(\w)\}"), r"^\1"),
]
_FRACTION = re.compile(r"([-+]?)(\d{0,9})\\frac\{([^{}]+)\}\{([^{}]+)\}")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:/\d+)?")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


@reads("answer")
def math_match(rollout: Rollout) -> float:
    """1 if the last `\\boxed{}` of the response, or its final statement, equals the sample's `answer`."""
    expected = reference(rollout.sample, "math_match")
    if "\b" in expected or "\f" in expected:
        raise ValueError(
            f"sample {rollout.sample.id}: its `answer` has a control character instead of a backslash; in JSON "
            r'and Python, "\boxed" and "\frac" need two backslashes'
        )
    gold = boxed(expected) or _after_hashes(expected)
    answer = stated_answer(answer_text(rollout))
    if answer is None or len(answer) > _MAX_LENGTH:
        return 0.0
    if equal_plainly(answer, gold):
        return 1.0
    return float(_has_math_verify() and _is_algebra(gold, answer) and WORKERS.call("equal_by_algebra", gold, answer))


def _is_algebra(gold: str, answer: str) -> bool:
    """Whether math-verify is worth calling: not for two plain numbers, and not for prose."""
    both_numbers = rational(plain(answer)) is not None and rational(plain(gold)) is not None
    words = _WORD.findall(answer)
    prose = len(words) > _MAX_WORDS or "not" in words
    return bool(answer) and not both_numbers and not prose


def stated_answer(text: str) -> str | None:
    """The last `\\boxed{}`; without one, the text after "the answer is", the last formula, or the last number."""
    inside = boxed(text)
    if inside is not None:
        return inside
    end = text[-4 * _MAX_LENGTH :]
    if stated := _STATED.findall(end):
        return (boxed_or_maths(stated[-1]) or stated[-1]).strip(" *_").rstrip(".").strip(" *_")
    if maths := boxed_or_maths(end):
        return maths
    number = claimed_number(end)
    if len(text) <= 40 and (number is None or not _WORD.search(text)):
        return text or None
    return None if number is None else str(number)


def boxed_or_maths(text: str) -> str | None:
    """The last formula between dollars or LaTeX brackets."""
    found = _MATHS.findall(text)
    return next(filter(None, found[-1])).strip() if found else None


def boxed(text: str) -> str | None:
    r"""`boxed(r"so \boxed{\frac{1}{2}}.")` is `\frac{1}{2}`: the content of the last box, up to its matching brace."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    opened = text.find("{", start)
    if opened < 0 or text[start + 1 : opened].strip() not in ("boxed", "fbox"):
        return text[start:].removeprefix("\\boxed").split("$")[0].strip() or None  # \boxed 5
    depth = 0
    for index in range(opened, min(len(text), opened + 10 * _MAX_LENGTH)):
        escaped = text[index - 1] == "\\"
        depth += {"{": 1, "}": -1}.get(text[index], 0) if not escaped else 0
        if depth == 0:
            return text[opened + 1 : index].strip()
    return None


def equal_plainly(one: str, other: str) -> bool:
    """Whether two expressions are equal as text without LaTeX formatting, or as numbers; 50% is 50 and also 0.5."""
    first, second = plain(one), plain(other)
    if not first or not second:
        return False
    if first == second:
        return True
    a, b = (rational(each.rstrip("%").rstrip("\\")) for each in (first, second))
    if a is None or b is None:
        return False
    if first.endswith("%") == second.endswith("%"):
        return a == b
    percent, number = (a, b) if first.endswith("%") else (b, a)
    return number in (percent, percent / 100)


@lru_cache(maxsize=4096)
def plain(expression: str) -> str:
    text = expression.strip().strip("$").rstrip(".").replace("−", "-").replace("\\{", "{").replace("\\}", "}")
    for pattern, replacement in _NORMALIZATIONS:
        text = pattern.sub(replacement, text)
    name, equals, value = text.partition("=")
    return (value if equals and len(name) <= 2 else text).rstrip(".")  # "x=3" is 3


def rational(expression: str) -> Fraction | None:
    r"""`rational(r"-\frac{1}{2}")` is -1/2; None if it is not a plain number."""
    if match := _FRACTION.fullmatch(expression):
        above, below = rational(match[3]), rational(match[4])
        if above is None or not below:
            return None
        size = Fraction(int(match[2] or "0")) + above / below
        return -size if match[1] == "-" else size
    return last_number(expression) if _PLAIN_NUMBER.fullmatch(expression) else None


def _after_hashes(answer: str) -> str:
    """Answers of GSM8K end with `#### 42`, after the worked solution."""
    return answer.rpartition("####")[2].strip()


@cache
def _has_math_verify() -> bool:
    return find_spec("math_verify") is not None

"""The letter that an answer settles on; whoever names several settles on none."""

from __future__ import annotations

import re
from functools import lru_cache

from oxrl.rewards.answers import answer_text, is_denied, reference
from oxrl.rewards.grade import reads
from oxrl.types import Rollout

_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\text\s*\{)?\s*\(?([A-Za-z])\)?\s*\}")


@reads("answer")
def multiple_choice(rollout: Rollout, *, letters: str = "ABCDE") -> float:
    """1 if the answer settles on the letter in the sample's `answer` ("B", "(B)", "B. Paris"), and on no other."""
    chosen = chosen_letter(answer_text(rollout), letters)
    expected = _letter_of(reference(rollout.sample, "multiple_choice"), letters)
    if expected is None:
        raise ValueError(
            f"sample {rollout.sample.id}: its `answer` ({rollout.sample.answer!r}) does not begin with one of {letters}"
        )
    return float(chosen == expected)


def chosen_letter(text: str, letters: str = "ABCDE") -> str | None:
    """The one letter that `text` says is the answer; if it says no such thing, the only one that it names
    and does not deny."""
    letters = letters.upper()
    if not letters.isalpha():
        raise ValueError(f"letters must be letters such as ABCDE, not {letters!r}")
    alone = text.strip(" \t\n.,:;!*_`'\"$()[]{}")
    if len(alone) == 1:
        return alone.upper() if alone.upper() in letters else None
    claimed, named = _patterns(letters)
    choices = {letter.upper() for letter in _BOXED.findall(text) if letter.upper() in letters}
    choices = choices or {letter for run in claimed.findall(text) for letter in named.findall(run)}
    for mention in named.finditer(text) if not choices else ():
        if mention[0] not in choices and not is_denied(text, mention.start()):
            choices.add(mention[0])
    return choices.pop() if len(choices) == 1 else None


@lru_cache(maxsize=16)
def _patterns(letters: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A claim with all that it names ("answer is A or B"), and a letter that stands for a choice.

    A capital A before a word in small letters is the article, unless that word goes on with the sentence.
    """
    article = r"A(?=\s+(?!(?:or|and|because|since|as|is|which|for)\b)[a-z])"
    letter = rf"(?<![^\W_])(?!{article})[{letters}](?![^\W_]|['’-]\w)"
    wrap = r"[\s*_`'\"$(\[{]{0,6}"
    close = r"[*_`'\"$)\]}]{0,6}"
    verb = r"\s{1,4}(?:is|was|be|must\s+be|should\s+be|would\s+be)\b(?:\s{1,4}(?:therefore|thus|clearly)\b)?"
    claim = rf"\b(?:(?i:answer)\b(?:{verb})?|(?i:choice|option)\b(?={verb}|\s?[:=])(?:{verb})?)\s{{0,4}}[:=]?"
    between = r"(?:(?:\s{0,4}(?:,|/|&|\bor\b|\band\b))+|[ \t]{1,4})"
    run = rf"{letter}(?:{close}{between}{wrap}{letter})*"
    return re.compile(rf"{claim}{wrap}(?i:(?:option|choice|letter)\b)?{wrap}({run})"), re.compile(letter)


def _letter_of(answer: str, letters: str) -> str | None:
    match = re.match(r"\W*([A-Za-z])(?![^\W_])", answer)
    return match[1].upper() if match and match[1].upper() in letters.upper() else None

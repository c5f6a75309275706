"""The letter that a response chooses; naming several letters chooses none."""

from __future__ import annotations

import re
from functools import lru_cache

from oxrl.rewards.answers import answer_text, is_negated, reference
from oxrl.rewards.grade import reads
from oxrl.types import Rollout

# Possessive (`*+`): a model's text must not make it try every split of a long run of spaces.
_BOXED = re.compile(r"\\boxed\s*+\{\s*+(?:\\text\s*+\{\s*+)?\(?([A-Za-z])\)?\s*+\}")


@reads("answer")
def multiple_choice(rollout: Rollout, *, letters: str = "ABCDE") -> float:
    """1 if the response chooses the letter in the sample's `answer` ("B", "(B)", "B. Paris") and no other."""
    chosen = chosen_letter(answer_text(rollout), letters)
    expected = _letter_of(reference(rollout.sample, "multiple_choice"), letters)
    if expected is None:
        raise ValueError(
            f"sample {rollout.sample.id}: its `answer` ({rollout.sample.answer!r}) does not start with one of {letters}"
        )
    return float(chosen == expected)


def chosen_letter(text: str, letters: str = "ABCDE") -> str | None:
    """The one letter that `text` states as the answer; without such a statement, the only letter that it mentions
    and does not negate."""
    letters = letters.upper()
    if not letters.isalpha():
        raise ValueError(f"letters must be letters such as ABCDE, not {letters!r}")
    alone = text.strip(" \t\n.,:;!*_`'\"$()[]{}")
    if len(alone) == 1:
        return alone.upper() if alone.upper() in letters else None
    statement, mention = _patterns(letters)
    choices = {letter.upper() for letter in _BOXED.findall(text) if letter.upper() in letters}
    choices = choices or {letter for run in statement.findall(text) for letter in mention.findall(run)}
    for match in mention.finditer(text) if not choices else ():
        if match[0] not in choices and not is_negated(text, match.start()):
            choices.add(match[0])
    return choices.pop() if len(choices) == 1 else None


@lru_cache(maxsize=16)
def _patterns(letters: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns of a statement with all its letters ("answer is A or B"), and of a letter that stands for a choice.

    A capital A before a lower-case word is the article, unless that word continues the sentence.
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

"""The format of a response: a regular expression, or tags in order."""

from __future__ import annotations

import re
from collections.abc import Sequence

from oxrl.rewards.grade import reads
from oxrl.rewards.workers import WORKERS
from oxrl.types import Rollout


@reads()
def regex_match(rollout: Rollout, *, pattern: str, whole: bool = False, ignore_case: bool = False) -> float:
    """1 if `pattern` is found in the last generation, or with `whole` matches all of it; `.` also matches newlines.

    A pattern such as `(a+)+b` can take years: it is searched for in another process, and ungraded after the time limit.
    """
    flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
    try:
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    text = rollout.generation.full_text
    if not text:  # graded for every sample before a run
        return float(compiled.fullmatch(text) is not None)
    return float(WORKERS.call("found_by_regex", pattern, int(flags), whole, text))


@reads()
def tag_format(
    rollout: Rollout, *, tags: Sequence[str] = ("think", "answer"), begun: bool = False, strict: bool = True
) -> float:
    """1 if the last generation is `<think>...</think><answer>...</answer>`: each tag once, in order, none empty.

    `strict` allows only whitespace outside of the tags. A tag that the chat template opens in the prompt counts;
    `begun` is for prompts that end with the first opening tag themselves.
    """
    opened = f"<{tags[0]}>" if begun and not rollout.generation.opened else ""
    text = opened + rollout.generation.full_text
    for tag in tags:
        if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
            return 0.0
    for tag in tags:
        before, _, rest = text.partition(f"<{tag}>")
        inside, closed, text = rest.partition(f"</{tag}>")
        if not closed or not inside.strip() or (strict and before.strip()):
            return 0.0
        if any(f"<{other}>" in inside or f"</{other}>" in inside for other in tags):
            return 0.0
    return float(not (strict and text.strip()))

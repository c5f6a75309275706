"""The table of algorithms. A name is read without regard to case, `-` and `_`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from oxrl.algorithms import supervised
from oxrl.types import Algorithm

ALGORITHMS: Mapping[str, Algorithm] = {
    each.name: each
    for each in (
        Algorithm("sft", supervised.conversation_items, supervised.negative_log_likelihood),
        Algorithm("cpt", supervised.text_items, supervised.negative_log_likelihood),
    )
}


def algorithm(name: str) -> Algorithm:
    """`algorithm("sft")`; a name that is not in the table gets the nearest one."""
    known = {_plain(each): each for each in ALGORITHMS}
    if _plain(name) not in known:
        near = get_close_matches(_plain(name), known, n=1)
        hint = f"; did you mean {known[near[0]]}?" if near else "."
        raise ValueError(f"no algorithm is called {name!r}{hint} There are: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[known[_plain(name)]]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")

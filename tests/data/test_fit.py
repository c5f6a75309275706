from __future__ import annotations

import numpy as np
import pytest

from oxrl.data.fit import fit
from oxrl.types import Row


def row(id: str, length: int, trained_from: int, trained_to: int | None = None) -> Row:
    positions = np.arange(length)
    mask = (positions >= trained_from) & (positions < (trained_to or length))
    return Row(id, positions, mask, streams={"weight": positions.astype(np.float32)}, scalars={"score": 1.0})


def test_what_fits_is_untouched() -> None:
    items = [(row("a", 4, 2),), (row("b", 3, 1), row("c", 4, 1))]
    for overlong in ("drop", "truncate", "error"):
        fitted = fit(items, 4, overlong)  # type: ignore[arg-type]
        assert fitted == (items, 0, 0, 0, [])
        assert fitted.items[0][0] is items[0][0]


def test_an_item_with_one_long_row_is_dropped_whole_and_counted() -> None:
    items = [(row("a", 4, 2),), (row("b", 3, 1), row("c", 5, 1))]
    fitted = fit(items, 4)
    assert [[r.id for r in item] for item in fitted.items] == [["a"]]
    assert (fitted.dropped, fitted.truncated, fitted.unended) == (1, 0, 0)
    assert fitted.examples == ["b (3 tokens), c (5 tokens)"]


def test_truncating_cuts_every_stream_and_counts_rows_without_their_end() -> None:
    items = [(row("a", 6, 2), row("b", 3, 1)), (row("c", 6, 2, 4),)]
    fitted = fit(items, 4, "truncate")
    assert (fitted.dropped, fitted.truncated, fitted.unended) == (0, 2, 1)
    cut = fitted.items[0][0]
    assert cut.tokens.tolist() == [0, 1, 2, 3]
    assert cut.mask.tolist() == [False, False, True, True]
    assert cut.streams["weight"].tolist() == [0, 1, 2, 3]
    assert cut.scalars == {"score": 1.0}
    assert fitted.items[0][1] is items[0][1]


def test_truncating_drops_an_item_in_which_a_row_has_nothing_left_to_train() -> None:
    items = [(row("a", 6, 2), row("b", 6, 4)), (row("c", 3, 1),)]
    fitted = fit(items, 4, "truncate")
    assert [[r.id for r in item] for item in fitted.items] == [["c"]]
    assert (fitted.dropped, fitted.truncated, fitted.unended) == (1, 0, 0)


def test_error_names_the_row_and_its_length() -> None:
    with pytest.raises(ValueError, match=r"b \(5 tokens\) is longer than max_len=4"):
        fit([(row("a", 4, 2),), (row("b", 5, 1),)], 4, "error")


def test_the_error_for_no_items_left_suggests_a_max_len() -> None:
    items = [(row(str(n), n, 1),) for n in range(11, 31)]
    with pytest.raises(ValueError, match=r"none of 20 items .* longest has 30 tokens, the median 20.5; max_len=29 "):
        fit(items, 10)
    assert len(fit(items, 29).items) == 19
    with pytest.raises(ValueError, match="none of 1 items"):
        fit([(row("a", 9, 8),)], 4, "truncate")


def test_only_the_first_few_examples_are_kept() -> None:
    fitted = fit([(row("short", 2, 1),), *((row(str(n), 9, 1),) for n in range(50))], 4)
    assert fitted.dropped == 50
    assert len(fitted.examples) == 5


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="allowed are 'drop', 'truncate', 'error'"):
        fit([(row("a", 4, 2),)], 4, "cut")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_len is 1"):
        fit([(row("a", 4, 2),)], 1)
    with pytest.raises(ValueError, match="no items to fit"):
        fit([], 4)

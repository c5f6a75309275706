import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oxrl.data.pack import collate, count_units, pack
from oxrl.types import Row


def row(length, name="r", trained=1, **more):
    return Row(name, np.arange(length), np.arange(length) >= length - trained, **more)


lengths = st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=2), min_size=1, max_size=30)


@given(lengths, st.integers(10, 100), st.booleans())
def test_every_item_lands_in_exactly_one_batch_that_keeps_to_the_budget(groups, budget, padded):
    items = [tuple(row(n, f"{i}.{j}") for j, n in enumerate(group)) for i, group in enumerate(groups)]
    batches = pack(items, budget, padded=padded)
    assert sorted(item[0].id for batch in batches for item in batch) == sorted(item[0].id for item in items)
    for batch in batches:
        sizes = [len(r) for item in batch for r in item]
        cost = max(sizes) * len(sizes) if padded else sum(sizes)
        assert cost <= budget or len(batch) == 1


def test_packing_fills_bins_that_arrival_order_would_leave_open():
    items = [(row(n),) for n in (6, 6, 4, 4)]
    assert sorted(sum(len(r) for item in batch for r in item) for batch in pack(items, 10)) == [10, 10]


def test_a_pair_is_never_separated_or_reordered():
    pairs = [(row(5, f"chosen{i}"), row(7, f"rejected{i}")) for i in range(6)]
    for batch in pack(pairs, 30):
        ids = collate(batch).ids
        assert all(a.replace("chosen", "rejected") == b for a, b in zip(ids[::2], ids[1::2], strict=True))


def test_a_batch_lays_rows_end_to_end():
    streams = {"advantage": np.array([0, 1.5, 2.5], dtype=np.float32)}
    batch = collate([(row(3, "a", streams=streams, scalars={"reward": 2.0}),)] * 2)
    assert batch.tokens.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.segments.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.borders == (0, 3, 6)
    assert batch.streams["advantage"].tolist() == [0, 1.5, 2.5, 0, 1.5, 2.5]
    assert batch.scalars["reward"].tolist() == [2, 2]
    assert batch.mask.dtype == torch.bool


def test_rows_with_different_streams_cannot_share_a_batch():
    with pytest.raises(ValueError, match="different streams"):
        collate([(row(3, "a"),), (row(3, "b", scalars={"reward": 1.0}),)])


def test_units_are_counted_only_where_something_is_trained():
    empty = Row("e", np.arange(4), np.zeros(4, bool))
    items = [(row(5, trained=2),), (empty,), (row(4, "c"), row(4, "d")), (row(4, "f"), empty)]
    assert count_units(items) == {"token": 5, "chosen_token": 2, "sequence": 4, "pair": 1, "constant": 1}


def test_rows_of_one_rollout_count_as_one_sequence():
    items = [(row(4, "a#0", sequence="a"),), (row(4, "a#1", sequence="a"),), (row(4, "b"),)]
    assert count_units(items)["sequence"] == 2


@pytest.mark.parametrize(
    ("tokens", "mask", "reason"),
    [([1, 2], [True, True], "first token"), ([1, 2], [False], "1 entries for 2"), ([], [], "no tokens")],
)
def test_a_row_that_cannot_be_trained_is_refused(tokens, mask, reason):
    with pytest.raises(ValueError, match=reason):
        Row("r", tokens, mask)

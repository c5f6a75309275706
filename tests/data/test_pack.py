import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oxrl.data.pack import collate, count_units, pack
from oxrl.types import Row


def row(length, name="r", trained=1, **more):
    """Return a row whose tokens depend on its name."""
    tokens = np.random.default_rng([*name.encode()]).integers(0, 1000, length)
    return Row(name, tokens, np.arange(length) >= length - trained, **more)


def answer(prompt, length, name="a"):
    """A prompt of 20 tokens, which all rows with the same number share, and `length` trained ones."""
    prompt_ids = np.random.default_rng(prompt).integers(0, 1000, 20)
    completion_ids = row(length, name).tokens
    return Row(f"{prompt}:{name}", np.concatenate([prompt_ids, completion_ids]), np.arange(20 + length) >= 20)


def names(batches):
    return [[r.id for item in batch for r in item] for batch in batches]


lengths = st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=2), min_size=1, max_size=30)


@given(lengths, st.integers(10, 100), st.booleans())
def test_every_item_lands_in_exactly_one_batch_that_keeps_to_the_budget(groups, budget, padded):
    items = [tuple(row(n, f"{i}.{j}") for j, n in enumerate(group)) for i, group in enumerate(groups)]
    batches = pack(items, budget, layout="padded" if padded else "packed")
    assert sorted(item[0].id for batch in batches for item in batch) == sorted(item[0].id for item in items)
    for batch in batches:
        sizes = [len(r) for item in batch for r in item]
        cost = max(sizes) * len(sizes) if padded else sum(sizes)
        assert cost <= budget or len(batch) == 1


def test_answers_to_one_prompt_share_a_batch_and_the_prompt_counts_once():
    items = [(answer(prompt, 5, name),) for name in "abcd" for prompt in (1, 2, 3)]
    assert names(pack(items, 40)) == [[f"{prompt}:{name}" for name in "abcd"] for prompt in (1, 2, 3)]


def test_an_unrelated_item_does_not_split_a_group():
    """Packed item by item, the unrelated row would join the long answer and leave no room for the last short one."""
    items = [(answer(1, 30, "a"),), (row(30),), *((answer(1, 2, name),) for name in "bcd")]
    assert names(pack(items, 85)) == [["1:a", "1:b", "1:c", "1:d"], ["r"]]


def test_a_group_over_the_budget_is_split_and_the_prompt_counts_in_each_part():
    items = [(answer(1, 5, name),) for name in "abcdef"]
    assert names(pack(items, 39)) == [["1:a", "1:b", "1:c"], ["1:d", "1:e", "1:f"]]


def test_the_rows_of_a_pair_share_their_prompt_and_may_have_two():
    alike, unlike = (answer(1, 5, "a"), answer(1, 5, "b")), (answer(1, 5, "c"), answer(2, 5, "d"))
    assert len(pack([alike, unlike], 60)) == 1
    assert len(pack([alike, unlike], 59)) == 2
    assert [len(batch) for batch in pack([alike] * 3, 49)] == [2, 1]


def test_prompts_too_short_to_share_count_in_every_row():
    items = [(Row(name, [1, 2, 3, 4, ord(name)], np.arange(5) > 3),) for name in "ab"]
    assert [len(pack(items, budget)) for budget in (9, 10)] == [2, 1]


def test_rows_that_run_padded_share_nothing():
    items = [(answer(prompt, 5, name),) for name in "ab" for prompt in (1, 2)]
    assert names(pack(items, 50, layout="padded")) == [["1:a", "2:a"], ["1:b", "2:b"]]


def test_an_item_over_the_budget_gets_its_own_micro_batch():
    items = [(answer(1, 50, "a"),), (answer(1, 5, "b"),), (row(3),)]
    assert names(pack(items, 30)) == [["1:a"], ["1:b", "r"]]


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
    assert batch.tokens.tolist() == [*row(3, "a").tokens] * 2
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


def test_a_row_that_comes_twice_in_a_step_counts_twice():
    assert count_units([(row(4, "a"),), (row(4, "a"),)])["sequence"] == 2


def test_unshared_prompts_count_in_every_row():
    items = [(Row(str(i), np.zeros(20), np.arange(20) >= 16),) for i in range(4)]
    assert len(pack(items, 40, layout="shared")) == 1
    assert len(pack(items, 40, layout="packed")) == 2


def test_rows_of_one_rollout_count_as_one_sequence():
    items = [(row(4, "a#0", sequence="a"),), (row(4, "a#1", sequence="a"),), (row(4, "b"),)]
    assert count_units(items)["sequence"] == 2
    assert count_units([*items, (row(4, "c#0", sequence="c"),)])["sequence"] == 3


@pytest.mark.parametrize(
    ("tokens", "mask", "reason"),
    [([1, 2], [True, True], "first token"), ([1, 2], [False], "1 entries for 2"), ([], [], "no tokens")],
)
def test_a_row_that_cannot_be_trained_is_refused(tokens, mask, reason):
    with pytest.raises(ValueError, match=reason):
        Row("r", tokens, mask)


@given(lengths, st.integers(10, 100), st.integers(1, 5), st.sampled_from(["packed", "padded", "shared"]))
def test_every_rank_has_a_micro_batch_while_there_are_items(groups, budget, parallel, layout):
    items = [tuple(row(n, f"{i}.{j}") for j, n in enumerate(group)) for i, group in enumerate(groups)]
    alone, batches = pack(items, budget, layout=layout), pack(items, budget, layout=layout, parallel=parallel)
    assert sorted(item[0].id for batch in batches for item in batch) == sorted(item[0].id for item in items)
    assert len(batches) % parallel == 0 or len(batches) == len(items)
    assert len(alone) <= len(batches) < len(alone) + parallel
    for batch in batches:
        sizes = [len(r) for item in batch for r in item]
        cost = max(sizes) * len(sizes) if layout == "padded" else sum(sizes)
        assert cost <= budget or len(batch) == 1


def test_micro_batches_of_ranks_are_balanced():
    items = [(row(n, str(n)),) for n in (30, 28, 9, 8, 7, 6, 5, 4, 3)]
    for parallel, largest in ((2, 50), (3, 34), (4, 30)):
        batches = pack(items, 1000, layout="packed", parallel=parallel)
        assert len(batches) == parallel
        assert max(sum(len(r) for item in batch for r in item) for batch in batches) <= largest


def test_one_rank_divides_nothing_further():
    items = [(answer(1, 5, name),) for name in "abcdef"]
    assert names(pack(items, 39, parallel=1)) == names(pack(items, 39))


def test_small_items_are_divided_even_if_a_large_one_dominates():
    items = [(row(n, f"{i}"),) for i, n in enumerate((20, 2, 2, 2))]
    assert sorted(map(len, pack(items, 100, layout="packed", parallel=3))) == [1, 1, 2]

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oxrl.data.buffer import DataBuffer, MixedBuffer
from oxrl.types import DataSource, Item, Message, Row, Sample

ITEMS = [f"item {i}" for i in range(7)]


def named(name: str, size: int = 5, seed: int = 0) -> DataBuffer[str]:
    return DataBuffer([f"{name}{i}" for i in range(size)], seed=seed)


def mix(ratios: dict[str, float]) -> MixedBuffer[str]:
    return MixedBuffer({name: named(name) for name in ratios}, ratios=ratios)


def test_every_item_comes_once_per_epoch_in_another_order_each_time() -> None:
    buffer = DataBuffer(list(range(50)))
    epochs = [buffer.get_prompts(50) for _ in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_order_is_a_function_of_the_seed() -> None:
    streams = [DataBuffer(list(range(50)), seed=seed).get_prompts(120) for seed in (3, 3, 4)]
    assert streams[0] == streams[1] != streams[2]


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    assert DataBuffer(ITEMS, shuffle=False).get_prompts(16) == ITEMS + ITEMS + ITEMS[:2]


def test_the_stream_does_not_depend_on_the_sizes_of_the_draws() -> None:
    one_draw, several_draws = DataBuffer(ITEMS), DataBuffer(ITEMS)
    drawn = [item for n in (3, 0, 4, 1, 20, 2) for item in several_draws.get_prompts(n)]
    assert drawn == one_draw.get_prompts(30)


def test_epochs_advance_by_themselves() -> None:
    buffer = DataBuffer(ITEMS)
    positions = []
    for n in (3, 4, 1, 20):
        buffer.get_prompts(n)
        positions.append((buffer.epoch_id, buffer.sample_offset))
    assert positions == [(0, 3), (1, 0), (1, 1), (4, 0)]


@pytest.mark.parametrize("consumed", [0, 3, 7, 10, 21])
def test_a_restored_buffer_continues_the_same_stream(consumed: int) -> None:
    samples = [Sample(f"a:{i}", messages=(Message("user", str(i)),), metadata={"n": object()}) for i in range(7)]
    buffer: DataSource[Sample] = DataBuffer(samples, seed=5)
    buffer.get_prompts(consumed)
    state = json.loads(json.dumps(buffer.state()))
    rest = buffer.get_prompts(30)
    other = DataBuffer([Sample(s.id, s.messages, metadata={"n": object()}) for s in samples], seed=5)
    other.get_prompts(2)
    other.restore(state)
    assert [sample.id for sample in other.get_prompts(30)] == [sample.id for sample in rest]


def test_a_state_is_refused_over_other_data_or_settings() -> None:
    state = DataBuffer(ITEMS).state()
    others: dict[str, DataBuffer[str]] = {
        "size": DataBuffer(ITEMS[1:]),
        "fingerprint": DataBuffer([*ITEMS[1:], "another"]),
        "seed": DataBuffer(ITEMS, seed=1),
        "shuffle": DataBuffer(ITEMS, shuffle=False),
    }
    for what, buffer in others.items():
        with pytest.raises(ValueError, match=f"does not match .*saved {what} "):
            buffer.restore(state)
    for position in ({"sample_offset": 7}, {"sample_offset": -1}, {"epoch_id": None}):
        with pytest.raises(ValueError, match="epoch_id .*, sample_offset .* for 7 items"):
            DataBuffer(ITEMS).restore({**state, **position})


def test_one_token_in_a_long_row_makes_it_other_data() -> None:
    def rows(middle: int) -> DataBuffer[Item]:
        return DataBuffer([(Row("a:1", np.array([1] * 2000 + [middle] + [1] * 2000), np.zeros(4001, dtype=np.bool_)),)])

    state = rows(middle=7).state()
    rows(middle=7).restore(state)
    with pytest.raises(ValueError, match="saved fingerprint"):
        rows(middle=8).restore(state)


def test_a_buffer_refuses_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="at least one item"):
        DataBuffer([])
    with pytest.raises(ValueError, match="seed must be non-negative, got -1"):
        DataBuffer(ITEMS, seed=-1)
    with pytest.raises(ValueError, match="cannot draw -1 items"):
        DataBuffer(ITEMS).get_prompts(-1)
    with pytest.raises(ValueError, match="cannot draw -1 items"):
        mix({"a": 1}).get_prompts(-1)


@settings(max_examples=100)
@given(st.lists(st.one_of(st.floats(0, 1), st.integers(0, 20), st.just(0.001)), min_size=1, max_size=9).filter(any))
def test_every_prefix_of_a_mixture_is_within_about_one_draw_of_its_ratios(ratios: list[float]) -> None:
    named_ratios = dict(zip("abcdefghi", ratios, strict=False))
    exact = {name: Fraction(str(ratio)) for name, ratio in named_ratios.items()}
    total = sum(exact.values())
    counts = dict.fromkeys(exact, 0)
    for k, item in enumerate(mix(named_ratios).get_prompts(200), 1):
        counts[item[0]] += 1
        for name, ratio in exact.items():
            assert -2 < counts[name] - k * ratio / total < 1, (k, counts, ratios)


def test_a_mixture_of_eight_to_two_is_exact_in_every_window_of_five() -> None:
    drawn = mix({"a": 0.8, "b": 0.2}).get_prompts(10_000)
    assert all(sum(item[0] == "b" for item in drawn[i : i + 5]) == 1 for i in range(0, 10_000, 5))


def test_ratios_mean_the_decimals_they_were_written_as() -> None:
    assert mix({"a": 0.7, "b": 0.3}).state() == mix({"a": 7, "b": 3}).state()


def test_a_dataset_with_ratio_zero_is_never_drawn() -> None:
    assert {item[0] for item in mix({"a": 3, "b": 0, "c": 1}).get_prompts(200)} == {"a", "c"}


def test_a_mixture_draws_the_streams_of_its_parts_whatever_the_sizes_of_the_draws() -> None:
    ratios = {"a": 0.5, "b": 0.3, "c": 0.2}
    one_draw = mix(ratios).get_prompts(60)
    assert [item for item in one_draw if item[0] == "b"] == named("b").get_prompts(18)
    several_draws = mix(dict(reversed(ratios.items())))
    assert [item for n in (1, 7, 0, 30, 22) for item in several_draws.get_prompts(n)] == one_draw


@pytest.mark.parametrize("consumed", [0, 1, 13, 100])
def test_a_restored_mixture_continues_the_same_stream(consumed: int) -> None:
    ratios = {"a": 0.5, "b": 1 / 3, "c": 0.17}
    mixture: DataSource[str] = mix(ratios)
    mixture.get_prompts(consumed)
    state = json.loads(json.dumps(mixture.state()))
    rest = mixture.get_prompts(80)
    other = mix(ratios)
    other.get_prompts(4)
    other.restore(state)
    assert other.get_prompts(80) == rest


def test_mixtures_can_be_mixed() -> None:
    inner = mix({"a": 1, "b": 1})
    parts: dict[str, DataSource[str]] = {"inner": inner, "c": named("c")}
    outer = MixedBuffer(parts, ratios={"inner": 2, "c": 1})
    drawn = [item[0] for item in outer.get_prompts(60)]
    assert [drawn.count(name) for name in "abc"] == [20, 20, 20]


def test_a_state_of_another_mixture_is_refused() -> None:
    state = mix({"a": 0.5, "b": 0.5}).state()
    for other in (mix({"a": 0.6, "b": 0.4}), mix({"a": 0.5, "c": 0.5})):
        with pytest.raises(ValueError, match="saved shares"):
            other.restore(state)
    grown = MixedBuffer({"a": named("a", 6), "b": named("b")}, ratios={"a": 1, "b": 1})
    with pytest.raises(ValueError, match="saved size 5, current size 6"):
        grown.restore(state)


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ({"a": 1}, r"keys a, b \(.*got a$"),
        ({"a": 1, "b": 1, "c": 1}, r"keys a, b \(.*got a, b, c$"),
        ({"a": 1, "b": -0.1}, r"finite and non-negative, got \{'b': -0.1\}"),
        ({"a": 1, "b": float("nan")}, "finite and non-negative"),
        ({"a": 1, "b": float("inf")}, "finite and non-negative"),
        ({"a": 0, "b": 0.0}, "at least one ratio must be greater than 0"),
    ],
)
def test_invalid_ratios_are_refused(ratios: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedBuffer({"a": named("a"), "b": named("b")}, ratios=ratios)

"""Decoding many tokens per call over pages: the same results as one token per call, within any memory.

Without a GPU the step runs eagerly; `tests/generators/test_captured_gpu.py` has what needs one.
"""

import logging

import pytest
import torch

from oxrl.generators.embedded.captured import (
    Capture,
    CapturedDecoder,
    Feed,
    batch_sizes,
    forwards_replaced,
    why_not_captured,
)
from oxrl.generators.embedded.engine import Engine
from oxrl.generators.embedded.pages import PAGE, SCRATCH, PageTables
from oxrl.generators.embedded.sampling import Draws, Rules, draw, draw_rows, uniforms, uniforms_of
from oxrl.models.load import load_model
from oxrl.types import GenerationConfig, Request
from tests.generators.test_decoders import SLOTTED, build, largest_gap

SPANS = Capture(capture=True, span=6)
GROUPS = [(tuple(range(5, 8 + 29 * group)), 4 * group + member) for group in range(4) for member in range(4)]


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny[0]).eval()


def sampled(model, tokenizer, sampling, capture, groups=GROUPS, slots=4):
    engine = Engine(model, tokenizer, slots, "shrinking", capture)
    jobs = [engine.submit(Request(prompt, seed=seed), sampling) for prompt, seed in groups]
    while any(job.result is None for job in jobs):
        engine.step()
    return [job.result for job in jobs], engine._decoder


@pytest.mark.parametrize(
    "sampling",
    [
        GenerationConfig(max_new_tokens=30, seed=1),
        GenerationConfig(max_new_tokens=30, temperature=0),
        GenerationConfig(max_new_tokens=20, top_p=0.9, temperature=0.8, seed=2),
        GenerationConfig(max_new_tokens=20, top_k=7, min_p=0.01, seed=3),
        GenerationConfig(max_new_tokens=20, stop=["e"], stop_token_ids=list(range(300, 330)), seed=4),
    ],
    ids=["plain", "greedy", "top-p", "top-k and min-p", "stops"],
)
def test_spans_sample_the_same_tokens_as_single_steps(model, tiny, sampling):
    steps, _ = sampled(model, tiny[1], sampling, Capture())
    spans, decoder = sampled(model, tiny[1], sampling, SPANS)
    assert isinstance(decoder, CapturedDecoder)
    assert [one.token_ids for one in spans] == [one.token_ids for one in steps]
    assert [one.finish_reason for one in spans] == [one.finish_reason for one in steps]
    for one, other in zip(spans, steps, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.cut_mass == pytest.approx(other.cut_mass, abs=1e-6)
    assert len(decoder.tables.free) == decoder.tables.pages - 1, "all pages are free again"


@pytest.fixture(scope="module")
def endless():
    """A model without an end token."""
    name, more = SLOTTED["llama"]
    return build(name, {**more, "max_position_embeddings": 400})


def test_sequences_that_do_not_fit_wait_and_give_the_same_tokens(endless, tiny, caplog):
    model, sampling = endless, GenerationConfig(max_new_tokens=140, seed=1)
    plenty, decoder = sampled(model, tiny[1], sampling, SPANS, GROUPS[:6])
    with caplog.at_level(logging.INFO, logger="oxrl.generators.embedded.engine"):
        little, decoder = sampled(
            model, tiny[1], sampling, SPANS._replace(cache_bytes=6 * decoder.page_bytes), GROUPS[:6]
        )
    assert decoder.tables.pages == 6
    assert "prefilled again" in caplog.text
    assert [one.token_ids for one in little] == [one.token_ids for one in plenty]


def test_a_sequence_longer_than_the_cache_is_refused_with_the_key_to_raise(model, tiny):
    engine = Engine(model, tiny[1], 2, "shrinking", SPANS._replace(cache_bytes=1))
    engine._decoder = CapturedDecoder(model, 2, engine.capture)  # the probe itself needs more
    engine.submit(Request(tuple(range(1, 200))), GenerationConfig(max_new_tokens=8))
    with pytest.raises(ValueError, match="207 tokens .*cache_gib"):
        engine.step()


def test_a_longer_sequence_that_arrives_later_waits_for_memory_and_is_sampled(endless, tiny):
    model = endless
    engine = Engine(model, tiny[1], 4, "shrinking", SPANS)
    short = [engine.submit(Request((5, index), seed=index), GenerationConfig(max_new_tokens=20)) for index in range(3)]
    engine.step()
    long = engine.submit(Request((5, 6, 7)), GenerationConfig(max_new_tokens=300))
    while any(job.result is None for job in (*short, long)):
        engine.step()
    alone = Engine(model, tiny[1], 4, "shrinking", SPANS)
    expected = alone.submit(Request((5, 6, 7)), GenerationConfig(max_new_tokens=300))
    while expected.result is None:
        alone.step()
    assert len(long.result.token_ids) == 300
    assert long.result.token_ids == expected.result.token_ids


@pytest.mark.parametrize("shape", SLOTTED)
def test_every_decoder_shape_gives_its_own_log_probs_from_pages(tiny, shape):
    model = build(*SLOTTED[shape])
    prompts = [prompt for prompt, _ in GROUPS]
    generations, decoder = sampled(model, tiny[1], GenerationConfig(max_new_tokens=12, seed=1), SPANS)
    assert isinstance(decoder, CapturedDecoder)
    assert largest_gap(model, generations, prompts) < 1e-4


def test_a_model_whose_single_tokens_are_computed_differently_is_not_captured(model):
    first = model.model.layers[0]
    original = first.forward

    def other_for_single_tokens(hidden, *arguments, **options):
        return original(hidden, *arguments, **options) * (1.5 if hidden.shape[1] == 1 else 1.0)

    with torch.no_grad():
        assert why_not_captured(CapturedDecoder(model, 2, SPANS)) is None
        with forwards_replaced({first: other_for_single_tokens}):
            assert "differ by" in why_not_captured(CapturedDecoder(model, 2, SPANS))
    assert "forward" not in vars(first)


def test_rows_whose_rule_keeps_more_than_is_sorted_are_left_to_the_host():
    torch.manual_seed(0)
    logits = torch.randn(3, 3000) * torch.tensor([[0.01], [5.0], [5.0]])
    rules = [GenerationConfig(top_p=0.99), GenerationConfig(top_p=0.9), GenerationConfig(temperature=0)]
    numbers = uniforms([1, 2, 3], [0, 0, 0])
    device = Rules(
        torch.tensor([rule.temperature for rule in rules]),
        torch.tensor([rule.top_k for rule in rules]),
        torch.tensor([rule.top_p for rule in rules], dtype=torch.float64),
        torch.tensor([rule.min_p for rule in rules]),
    )
    drawn, undecided = draw_rows(logits, device, torch.from_numpy(numbers), Draws.of(rules))
    assert undecided.tolist() == [True, False, False]
    assert drawn.tokens[1:].tolist() == draw(logits, rules, numbers).tokens[1:].tolist()


def test_undecided_rows_go_on_with_the_tokens_that_single_steps_draw(tiny):
    name, more = SLOTTED["llama"]
    model = build(name, {**more, "vocab_size": 3000})
    sampling = GenerationConfig(max_new_tokens=8, top_k=1100, seed=1)  # more than is sorted on the device
    steps, _ = sampled(model, tiny[1], sampling, Capture())
    spans, _ = sampled(model, tiny[1], sampling, SPANS)
    assert [one.token_ids for one in spans] == [one.token_ids for one in steps]


def test_random_numbers_of_the_device_are_those_of_the_host():
    keys = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
    positions = [0, 1, 255, 2**20, 7, 3]
    on_device = torch.tensor([key - 2**64 if key >= 2**63 else key for key in keys])
    assert uniforms_of(on_device, torch.tensor(positions)).tolist() == uniforms(keys, positions).tolist()


@pytest.mark.parametrize("size", [100, 256, 3000])
def test_draws_of_the_device_are_those_of_the_host_with_impossible_tokens_too(size):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(200, size, generator=generator) * 4
    logits[:, : size // 2] = -torch.inf  # whole blocks
    rules = [GenerationConfig(temperature=0.7)] * 200
    numbers = uniforms(list(range(200)), [0] * 200)
    ones = torch.ones(200)
    device = Rules(0.7 * ones, torch.zeros(200, dtype=torch.int64), ones.double(), 0 * ones)
    drawn, _ = draw_rows(logits, device, torch.from_numpy(numbers), Draws.of(rules))
    expected = draw(logits, rules, numbers)
    assert drawn.tokens.tolist() == expected.tokens.tolist()
    assert drawn.logprobs.tolist() == pytest.approx(expected.logprobs.tolist(), abs=1e-5)


def test_pages_of_a_row_that_left_are_free_when_no_span_can_write_to_them(endless):
    decoder = CapturedDecoder(endless, 2, SPANS)
    with torch.no_grad():
        decoder.fits([[5, 6]], [40], alone=True)
        decoder.enter([0], [[5, 6]])
        feed = Feed(7, 2, 1, 30, 0, (), GenerationConfig())
        first, second = (decoder.start(1, {0: feed}, Draws(True, False, False), 3) for _ in range(2))
    pages = decoder.tables.pages - 1
    decoder.leave(0)
    decoder.finish(first)
    assert len(decoder.tables.free) == pages - 1
    decoder.finish(second)
    assert len(decoder.tables.free) == pages


def test_a_generation_that_is_cancelled_while_the_device_is_ahead_changes_no_other(endless, tiny):
    sampling = GenerationConfig(max_new_tokens=50, seed=1)
    expected, _ = sampled(endless, tiny[1], sampling, SPANS, GROUPS[:3])
    engine = Engine(endless, tiny[1], 4, "shrinking", SPANS)
    jobs = [engine.submit(Request(prompt, seed=seed), sampling) for prompt, seed in GROUPS[:3]]
    for _ in range(3):
        engine.step()
    engine.drop(jobs[:1])
    while any(job.result is None for job in jobs[1:]):
        engine.step()
    assert [job.result.token_ids for job in jobs[1:]] == [one.token_ids for one in expected[1:]]


def test_pages_are_shared_by_equal_prompts_and_freed_with_the_last():
    tables = PageTables(10)
    assert tables.enter([0, 1, 2], 2 * PAGE + 3)
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({tables[row][2] for row in range(3)}) == 3, "the last page is written by each row"
    assert len(tables.free) == 9 - 2 - 3
    assert SCRATCH not in tables[0]
    assert tables.extend(0, 3 * PAGE)
    assert len(tables[0]) == 3, "there was room in the last page"
    assert tables.extend(0, 3 * PAGE + 1)
    assert not tables.extend(1, 10 * PAGE)
    assert len(tables[1]) == 3, "nothing changes if it does not fit"
    tables.leave(0)
    tables.leave(1)
    assert len(tables.free) == 9 - 3
    tables.move(2, 0)
    tables.leave(0)
    assert sorted(tables.free) == list(range(1, 10))


def test_a_prompt_that_fills_its_pages_has_no_page_of_its_own():
    tables = PageTables(4)
    assert tables.enter([0, 1], PAGE)
    assert tables[0] == tables[1]
    assert not tables.enter([2], 3 * PAGE)
    assert 2 not in tables.tables


@pytest.mark.parametrize("slots", [1, 3, 8, 64, 100, 1024])
def test_at_most_a_third_of_a_batch_is_idle(slots):
    sizes = batch_sizes(slots)
    assert sizes == sorted(set(sizes)) and sizes[-1] == slots
    for rows in range(9, slots + 1):
        assert rows > 2 / 3 * next(size for size in sizes if size >= rows) - 1

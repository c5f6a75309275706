"""Prompts that teach are drawn more often, each once per call, and a resumed stream goes on as it was."""

import json
from collections import Counter

import pytest

from oxrl.data.buffer import DataBuffer, MixedBuffer
from oxrl.data.solve_rate import SolveRateBuffer
from oxrl.types import Message, Sample

SAMPLES = [Sample(f"s{number}", (Message("user", str(number)),)) for number in range(8)]


def test_solved_and_unsolved_prompts_are_drawn_in_proportion_to_their_weights():
    buffer = SolveRateBuffer(SAMPLES, seed=3, solved=0.1, unsolved=0.5)
    for sample, reward in zip(SAMPLES[:4], (1.0, 1.0, 0.0, 0.5), strict=True):
        buffer.note(sample.id, reward)
    assert [buffer.pool(f"s{number}") for number in range(5)] == ["solved", "solved", "unsolved", "mixed", "unseen"]
    assert buffer.report() == {
        "sampler_unseen": 0.5, "sampler_mixed": 0.125, "sampler_solved": 0.25, "sampler_unsolved": 0.125,
    }  # fmt: skip
    counts = Counter(buffer.get_prompts(1)[0].id for _ in range(5700))
    total = 0.1 + 0.1 + 0.5 + 5
    for id, weight in {"s0": 0.1, "s2": 0.5, "s3": 1.0, "s7": 1.0}.items():
        assert counts[id] / 5700 == pytest.approx(weight / total, abs=0.02)


def test_the_last_groups_decide_and_a_call_repeats_no_prompt_before_all_were_drawn():
    buffer = SolveRateBuffer(SAMPLES, groups=2)
    for reward in (0.0, 1.0, 1.0):
        buffer.note("s1", reward)
    assert buffer.pool("s1") == "solved"
    buffer.note("s1", 0.0)
    assert buffer.pool("s1") == "mixed"
    buffer.note("of another stream", 1.0)
    assert sorted(sample.id for sample in buffer.get_prompts(8)) == sorted(sample.id for sample in SAMPLES)
    assert len(buffer.get_prompts(11)) == 11


def test_a_restored_stream_draws_the_same_prompts():
    first, second = SolveRateBuffer(SAMPLES, seed=1), SolveRateBuffer(SAMPLES, seed=1)
    first.get_prompts(5)
    first.note("s2", 1.0)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.pool("s2") == "solved" and second.get_prompts(20) == first.get_prompts(20)
    with pytest.raises(ValueError, match="no memory of rewards"):
        second.restore(DataBuffer(SAMPLES, seed=1).state())


def test_a_mixture_passes_rewards_on_and_reports_by_its_shares():
    parts = {"a": SolveRateBuffer(SAMPLES[:4]), "b": SolveRateBuffer(SAMPLES[4:])}
    mixed = MixedBuffer(parts, ratios={"a": 0.75, "b": 0.25})
    for sample in SAMPLES[:4]:
        mixed.note(sample.id, 1.0)
    assert mixed.report()["sampler_solved"] == 0.75 and mixed.report()["sampler_unseen"] == 0.25


@pytest.mark.parametrize("wrong", [{"groups": 0}, {"low": 1.0}, {"solved": 0.0}, {"unsolved": 2.0}])
def test_wrong_parameters_are_refused(wrong):
    with pytest.raises(ValueError, match="groups is 1 or more|weights are above 0"):
        SolveRateBuffer(SAMPLES, **wrong)

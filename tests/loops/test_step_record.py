"""What a step records is what it computed: against formulas, and without an effect on the run."""

from functools import partial

import anyio
import numpy as np
import pytest
import torch

from oxrl.data.buffer import DataBuffer
from oxrl.loops.offline import OfflineConfig, run_offline
from oxrl.loops.step_record import StepRecorder
from oxrl.models.load import load_model
from oxrl.rollouts.buffer import LeftOut
from oxrl.rollouts.filters import check_reward_nonzero_std
from oxrl.rollouts.step_answers import chosen_groups, merged_groups
from oxrl.tracking.step_files import StepFiles, read_step
from oxrl.types import Generation, Rollout, Row, Sample, Score, Turn
from oxrl.weights.fingerprint import bit_sums, fingerprint
from tests.loops.test_online import Setting


def recorder_of(setting, folder, mode):
    recorder = StepRecorder(
        StepFiles(folder, keep=100, keep_until=-1),
        mode,
        seed=0,
        pieces=lambda ids: [setting.tokenizer.decode([token]) for token in ids],
        weights=partial(fingerprint, setting.backend.module),
    )
    setting.backend.observe_pass = recorder.passed
    return recorder


def recorded(setting, folder, steps=1, manager=None, mode="full", **rest):
    """Run with a recorder, and return its records."""
    setting.run(steps, manager, recorder=recorder_of(setting, folder, mode), **rest)
    return [read_step(folder, step) for step in range(1, steps + 1)]


def columns(record, name):
    """A list of every answer, at its trained tokens."""
    return [
        [value for value, trained in zip(each["tokens"][name], each["tokens"]["mask"], strict=True) if trained]
        for each in record.answers
    ]


def test_advantages_ratios_and_gradients_are_those_of_grpo(tmp_path):
    """d loss / d log p of a token is -A r / (its answer's tokens * answers) where it is not clipped."""
    setting = Setting(lr=1e-2)
    manager = setting.manager(batch_size=2, n_samples_per_prompt=4)
    record = recorded(setting, tmp_path, 1, manager, config={"iterations": 3})[0]
    rewards = np.array([each["reward"] for each in record.answers]).reshape(2, 4)
    centred = rewards - rewards.mean(1, keepdims=True)
    advantages = (centred / (centred.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()
    seen = set()
    for index, advantage in enumerate(advantages):
        numbers = (
            columns(record, name)[index]
            for name in ("advantage", "sampler_logprob", "policy_logprob", "ratio", "clipped", "gradient")
        )
        for own, sampler, policy, ratio, clipped, gradient in zip(*numbers, strict=True):
            expected = np.exp(policy - sampler)
            outside = bool(advantage > 0 and expected > 1.2) or bool(advantage < 0 and expected < 0.8)
            assert own == pytest.approx(advantage, abs=1e-5) and ratio == pytest.approx(expected, rel=1e-5)
            assert bool(clipped) == outside
            slope = 0.0 if outside else -advantage * expected / (len(columns(record, "ratio")[index]) * len(advantages))
            assert gradient == pytest.approx(slope, rel=1e-4, abs=1e-8)
            seen.add(outside)
    assert seen == {True, False}, "after three passes some tokens are clipped, and others are not"
    totals = record.step["totals"]
    assert totals["clipped"] == sum(sum(each) for each in columns(record, "clipped"))
    assert totals["gradient"] == pytest.approx(sum(abs(x) for each in columns(record, "gradient") for x in each))


def test_a_recorded_run_has_the_weights_of_one_that_is_not(tmp_path):
    plain, watched = Setting(kl_coef=0.1, entropy_coef=0.1), Setting(kl_coef=0.1, entropy_coef=0.1)
    plain.run(2)
    records = recorded(watched, tmp_path, 2)
    assert fingerprint(watched.backend.module) == fingerprint(plain.backend.module)
    assert records[1].step["digests"]["weights"] == fingerprint(plain.backend.module)
    assert records[0].step["digests"]["weights"] == records[1].step["digests"]["weights_before"]


def test_another_weight_has_another_fingerprint():
    layer = torch.nn.Linear(3, 2)
    before = fingerprint(layer)
    with torch.no_grad():
        layer.weight[1, 2] = torch.nextafter(layer.weight[1, 2], torch.tensor(9.0))
    assert fingerprint(layer) != before
    layer.weight.requires_grad_(False)
    frozen = fingerprint(layer)
    with torch.no_grad():
        layer.weight[0, 0] += 1
    assert fingerprint(layer) == frozen, "frozen weights are not looked at"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [8, 7])
def test_sums_of_weights_are_over_words_of_64_bits_where_they_fit(dtype, count):
    weight = torch.arange(1, count + 1).to(dtype)
    size = weight.element_size()
    word = 8 if count * size % 8 == 0 else size
    content = weight.view(torch.uint8).numpy().tobytes()
    words = [content[at : at + word] for at in range(0, len(content), word)]
    expected = sum(int.from_bytes(each, "little", signed=True) for each in words)
    assert (bit_sums({"w": weight})["w"] - expected) % 2**64 == 0


def group(number, rewards):
    sample = Sample(f"s{number}")
    turn = Turn((1, 2), Generation((3,), (-0.5,), "stop"))
    scores = [None if reward is None else Score(reward) for reward in rewards]
    return tuple(
        Rollout(sample, (turn,), number, index, score, error=None if score else "it broke")
        for index, score in enumerate(scores)
    )


def test_by_default_the_groups_that_differ_most_are_recorded():
    groups = [group(0, [0, 0]), group(1, [0, 1]), group(2, [1, 1]), group(3, [0.4, 0.6]), group(4, [0.5, 0.6])]
    merged = merged_groups(groups[:2], [LeftOut("filtered: f", each) for each in groups[2:]])
    assert {frozenset(chosen_groups(merged, "groups", seed)) for seed in range(2)} == {
        frozenset({0, 1, 2, 3}),
        frozenset({0, 1, 2, 4}),
    }
    assert chosen_groups(merged, "full", 0) == set(range(5))


def test_answers_that_are_left_out_say_why():
    whole = group(7, [1, None, 0])
    trained = tuple(each for each in whole if each.error is None)
    carried = (Rollout(Sample("s8"), (), 8, 0),)
    merged = merged_groups([trained], [LeftOut("ungraded: it broke", whole[1:2]), LeftOut("carried", carried)])
    assert [(each.number, each.left_out) for each in merged] == [
        (7, (None, "ungraded: it broke", None)),
        (8, ("carried",)),
    ]
    assert chosen_groups(merged, "full", 0) == {7}, "what is still being sampled has no record"


def test_filtered_groups_are_recorded_with_the_filter(tmp_path):
    def flat_for_some(rollout):
        return 0.0 if rollout.group % 2 else float(rollout.index)

    setting = Setting()
    manager = setting.manager(
        batch_size=2, n_samples_per_prompt=3, reward_fn=flat_for_some, filter_fn=check_reward_nonzero_std
    )
    (record,) = recorded(setting, tmp_path, 1, manager)
    reasons = {each["group"]: each["left_out"] for each in record.step["groups"]}
    assert reasons[0] is None and reasons[1] == "filtered: check_reward_nonzero_std"
    left_out = next(each for each in record.answers if each["group"] == 1)
    assert left_out["left_out"] == reasons[1] and left_out["tokens"]["ids"] and left_out["tokens"]["gradient"] is None
    assert left_out["messages"][-1]["role"] == "assistant"


def test_of_many_rows_those_with_the_least_and_the_most_likely_tokens_are_recorded(tmp_path):
    rows = [Row(f"r{number}", [1, *range(10, 14 + number)], [0, *[1] * (4 + number)]) for number in range(8)]
    setting = Setting("sft")
    recorder = recorder_of(setting, tmp_path, "groups")
    source, config = DataBuffer([(row,) for row in rows], shuffle=False), OfflineConfig(1, 8)
    quiet = {"recorder": recorder, "log": lambda step, metrics: None}
    anyio.run(lambda: run_offline(setting.backend, setting.algorithm, source, config, **quiet))
    record = read_step(tmp_path, 1)
    own = load_model("tiny")
    ids = [torch.from_numpy(row.tokens)[None] for row in rows]
    means = [-own(each, labels=each).loss.item() for each in ids]
    chosen = [group["group"] for group in record.step["groups"] if group["recorded"]]
    assert len(chosen) == 4 and {int(np.argmin(means)), int(np.argmax(means))} < set(chosen)
    assert [answer["sample_id"] for answer in record.answers] == [f"r{number}" for number in chosen]
    first = record.answers[0]["tokens"]
    logprob = [value for value in first["policy_logprob"] if value is not None]
    assert np.mean(logprob) == pytest.approx(means[chosen[0]], abs=1e-4)
    assert first["gradient"][0] is None and first["gradient"][1] == pytest.approx(-1 / record.step["totals"]["trained"])
    assert first["advantage"] is first["ratio"] is first["clipped"] is None

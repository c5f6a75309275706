"""Samples recorded by other code, as keywords: their fields, their batches, and functions that generate them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from inspect import signature
from typing import Any

import anyio
import pytest
import trio

import oxrl
from oxrl import Sample, Status
from oxrl.rollouts.batches import (
    apply_sample_transforms,
    build_batch_metadata,
    compute_response_lengths,
    compute_reward,
    convert_to_batch,
    extract_sample_fields,
)
from oxrl.rollouts.collect import AsyncRolloutManager, RolloutConfig, generate_rollout_batches

TURNS = {"tokens": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 1, 0, 1]}


def test_a_sample_with_its_completion_has_the_fields_that_were_given():
    sample = Sample(
        prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
        response="4",
        **TURNS,
        reward=0.5,
        group_index=3,
        rollout_log_probs=[-0.5, -0.25, -1.0],
        metadata={"correct": True},
        status=Status.TRUNCATED,
    )
    assert (sample.prompt, sample.response, sample.reward, sample.group_index) == ("2+2?", "4", 0.5, 3)
    assert {"tokens": sample.tokens, "loss_mask": sample.loss_mask} == TURNS
    assert sample.rollout_log_probs == [0.0, 0.0, -0.5, -0.25, 0.0, -1.0]
    assert sample.metadata == {"correct": True} and sample.status is Status.TRUNCATED


def test_a_sample_has_defaults_for_what_was_not_given():
    prompt = Sample(prompt="2+2?")
    assert (prompt.response, prompt.tokens, prompt.reward, prompt.status) == ("", [], None, Status.PENDING)
    ends_with_a_prompt = Sample(prompt="2+2?", response="4", tokens=[1, 2, 3, 4], loss_mask=[1, 1, 0, 0])
    assert ends_with_a_prompt.tokens == [1, 2, 3, 4] and ends_with_a_prompt.response == "4"
    assert ends_with_a_prompt.loss_mask == [0, 1, 0, 0], "the first token has no context"
    assert ends_with_a_prompt.rollout_log_probs is None, "unknown, and not 0"
    assert Sample(prompt="2+2?", status=Status.FAILED).status is Status.FAILED
    assert Sample("id").id == "id" and next(iter(signature(Sample).parameters)) == "id"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": [1, 2], "loss_mask": [1]}, "loss_mask has 1 entries for 2 tokens"),
        ({"tokens": [1, 2], "loss_mask": [0, 0.5]}, "give a 1 for each token to train on, else a 0"),
        ({**TURNS, "rollout_log_probs": [-1.0, -1.0]}, "2 entries for 6 tokens, 3 of them sampled"),
    ],
)
def test_fields_that_do_not_fit_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sample(prompt="2+2?", **wrong)


def scored(correct):
    return [Sample(prompt="2+2?", response="4", **TURNS, metadata={"correct": each}) for each in correct]


def test_samples_become_lists_for_a_custom_trainer():
    samples = scored([True, False])
    tokens, masks, rewards = extract_sample_fields(samples)
    assert tokens == [TURNS["tokens"]] * 2 and masks == [TURNS["loss_mask"]] * 2 and rewards == [1.0, 0.0]
    batch = convert_to_batch(samples)
    assert (batch.tokens, batch.loss_masks, batch.rewards, batch.response_lengths) == (tokens, masks, rewards, [3, 3])
    assert compute_response_lengths(samples) == compute_response_lengths(masks) == [3, 3]
    assert build_batch_metadata(samples)["samples"] == [{"correct": True}, {"correct": False}]
    with pytest.raises(ValueError, match="was not graded; a missing grade is not a reward of 0"):
        convert_to_batch([Sample(prompt="2+2?", **TURNS)])


def test_transforms_grade_and_filter_in_plain_code_and_inside_an_event_loop():
    def right():
        return apply_sample_transforms(
            scored([True, False]), filter_fn=lambda sample: sample.reward > 0, reward_fn=compute_reward
        )

    async def notebook():
        return right()

    assert [each.reward for each in right()] == [each.reward for each in asyncio.run(notebook())] == [1.0]
    assert len(apply_sample_transforms(scored([True]), None, None)) == 1


def completed(prompts, *, suffix=9):
    return [
        Sample(prompt=prompt, response=str(prompt), tokens=[1, len(prompt), suffix], loss_mask=[0, 0, 1])
        for prompt in prompts
    ]


async def completed_later(prompts):
    await anyio.sleep(0)
    return completed(prompts)


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


@pytest.mark.parametrize("generate_fn", [completed, completed_later])
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_function_of_prompts_generates_batches(generate_fn, loop):
    config = RolloutConfig(batch_size=2, n_samples_per_prompt=2, generate_fn=generate_fn, filter_fn=None)
    manager = AsyncRolloutManager(oxrl.DataBuffer(["2+2?", CHAT], shuffle=False), config)

    async def batch():
        return await manager.generate_batch(reward_fn=lambda sample: float(sample.index))

    found = anyio.run(batch, backend=loop)
    assert found.tokens == [[1, 4, 9], [1, 4, 9], [1, 2, 9], [1, 2, 9]], "texts as they are, chats as messages"
    assert found.rewards == [0.0, 1.0, 0.0, 1.0] and found.metadata["group_indices"] == [0, 0, 1, 1]


def test_samples_of_a_function_have_the_prompt_and_the_version_of_what_was_asked_for():
    source = oxrl.DataBuffer([oxrl.Sample("row 7", oxrl.types.as_messages("2+2?"), answer="4")])
    config = RolloutConfig(batch_size=1, generate_fn=lambda rollouts: completed([each.prompt for each in rollouts]))
    collected = anyio.run(AsyncRolloutManager(source, config).collect, 5)
    (rollout,) = collected.groups[0]
    assert (rollout.sample.id, rollout.sample.answer, rollout.version) == ("row 7", "4", 5)


def test_batches_are_a_plain_iterator_that_passes_keywords():
    config = RolloutConfig(batch_size=1, generate_fn=completed, reward_fn=lambda sample: 1.0)
    assert next(generate_rollout_batches(oxrl.DataBuffer(["2+2?"]), config, suffix=7)).tokens == [[1, 4, 7]]


@pytest.mark.parametrize(
    ("generate_fn", "message"),
    [
        (lambda prompts: ["4"] * len(prompts), "generate_fn returned a str; return .* Sample"),
        (lambda prompts: completed([*prompts, "more"]), "returned 2 samples for 1 prompts; return one for each"),
    ],
)
def test_a_function_that_returns_something_else_is_refused(generate_fn, message):
    manager = AsyncRolloutManager(oxrl.DataBuffer(["2+2?"]), RolloutConfig(batch_size=1, generate_fn=generate_fn))
    with pytest.raises(ValueError, match=message):
        anyio.run(manager.collect)


def test_over_sampling_keeps_the_first_groups_that_pass_and_a_selection_can_keep_the_best():
    def best(groups, count):
        return sorted(groups, key=lambda group: -sum(each.reward for each in group))[:count]

    source = oxrl.DataBuffer(["a", "bb", "ccc", "dddd"], shuffle=False)
    first = RolloutConfig(
        batch_size=2,
        over_sampling_factor=2.0,
        generate_fn=completed,
        reward_fn=lambda sample: float(len(sample.response)),
    )

    def kept(config):
        groups = anyio.run(AsyncRolloutManager(oxrl.DataBuffer(source.get_prompts(4), shuffle=False), config).collect)
        return [group[0].response for group in groups.groups]

    assert kept(first) == ["a", "bb"]
    assert kept(replace(first, select_fn=best)) == ["dddd", "ccc"]


class OwnStatus(Enum):
    PENDING = "pending"
    TRUNCATED = "truncated"


@dataclass
class OwnSample:
    """A user's record with the fields of a sample and its completion."""

    prompt: str | list[dict[str, str]]
    response: str = ""
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[float] = field(default_factory=list)
    reward: float = 0.0
    group_index: int | None = None
    rollout_log_probs: list[float] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    status: OwnStatus = OwnStatus.PENDING


@dataclass(frozen=True)
class OwnConfig:
    batch_size: int
    n_samples_per_prompt: int = 1
    over_sampling_factor: float = 1.0
    generate_fn: Callable[..., Any] | None = None
    reward_fn: Callable[..., Any] | None = None
    filter_fn: Callable[..., Any] | None = None


def own_samples(prompts):
    return [OwnSample(prompt, "4", [1, 2, 3], [0, 0, 1]) for prompt in prompts]


def test_dataclasses_with_the_same_fields_are_accepted():
    config = OwnConfig(1, 2, generate_fn=own_samples, reward_fn=lambda sample: float(len(sample.tokens)))
    batch = next(generate_rollout_batches(oxrl.DataBuffer([OwnSample("2+2?")]), config))
    assert batch.rewards == [3.0, 3.0], "a reward that is the field's default is not a grade"
    recorded = OwnSample("2+2?", "4", [1, 2], [0, 1], reward=0.5, group_index=3, status=OwnStatus.TRUNCATED)
    ((row,),) = oxrl.group_rollouts([recorded])
    assert (row.reward, row.group, row.status) == (0.5, 3, Status.TRUNCATED)
    assert convert_to_batch([recorded]).rewards == [0.5] and compute_response_lengths([recorded]) == [1]
    assert oxrl.check_reward_nonzero_std([recorded, *own_samples("a")])
    assert len(oxrl.prepare_grpo_batch(own_samples("ab"), [1.0, 0.0])) == 2
    with pytest.raises(ValueError, match="was not graded; a missing grade is not a reward of 0"):
        compute_reward(OwnSample("2+2?", "4", [1, 2], [0, 1]))


def test_a_config_with_another_field_is_refused_with_the_fields_that_there_are():
    @dataclass
    class Other:
        batch_size: int
        temperature: float = 1.0

    with pytest.raises(ValueError, match=r"an Other with the field temperature; give RolloutConfig\(batch_size, n_sam"):
        AsyncRolloutManager(oxrl.DataBuffer(["2+2?"]), Other(1))
    with pytest.raises(ValueError, match=r"config is a dict; give RolloutConfig\(batch_size"):
        next(generate_rollout_batches(oxrl.DataBuffer(["2+2?"]), {"batch_size": 1}))


@pytest.mark.parametrize("wait", [trio.lowlevel.checkpoint, trio.lowlevel.current_task])
def test_a_generate_fn_of_another_async_library_is_an_error_at_the_first_call(wait):
    calls = []

    async def of_trio(prompts):
        calls.append(prompts)
        result = wait()
        await result
        return scored([True] * len(prompts))

    batches = generate_rollout_batches(oxrl.DataBuffer(["2+2?"]), RolloutConfig(1, generate_fn=of_trio))
    with pytest.raises(ValueError, match=r"under trio.run, await AsyncRolloutManager\(data_buffer, config\)"):
        next(batches)
    assert len(calls) == 1, "it is not retried"

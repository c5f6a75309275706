"""Collection: enough accepted groups, in prompt order, without losing finished ones, independent of run times."""

from collections import Counter
from dataclasses import replace

import anyio
import pytest

from oxrl.data.buffer import DataBuffer
from oxrl.rewards.grade import Reward
from oxrl.rollouts.collect import (
    AsyncRolloutManager,
    RolloutConfig,
    RolloutSampler,
    generate_rollout_batches,
    sampling_manager,
)
from oxrl.rollouts.envs import single_turn
from oxrl.rollouts.filters import check_reward_nonzero_std
from oxrl.tracking.activity import Activity
from oxrl.types import Generation, GenerationConfig, Rollout, Score, Status, Turn
from tests.rollouts.scripted import PlainRender, Scripted, question

GREEDY = GenerationConfig(max_new_tokens=64)


def prompt_number(request) -> int:
    """The number in the prompt `12?`."""
    return int("".join(map(chr, request.tokens[:-1])))


def manager_of(generator, samples=40, **config):
    source = DataBuffer([question(number) for number in range(samples)], shuffle=False)
    sampler = RolloutSampler(generator, PlainRender(), GREEDY, seed=1)
    config.setdefault("batch_size", 4)
    config.setdefault("reward_fn", lambda rollout: float(rollout.index))
    return sampling_manager(source, sampler, RolloutConfig(**config))


def numbers(groups) -> list[int]:
    return [group[0].group for group in groups]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_batch_has_n_graded_rollouts_per_prompt_in_prompt_order(backend):
    generator = Scripted(lambda request: [7] * (10 - prompt_number(request)))  # the last prompt is the quickest
    collected = anyio.run(manager_of(generator, n_samples_per_prompt=3).collect, backend=backend)
    assert numbers(collected.groups) == [0, 1, 2, 3]
    assert [[rollout.reward for rollout in group] for group in collected.groups] == [[0.0, 1.0, 2.0]] * 4
    seeds = [request.seed for request in generator.requests]
    assert len(set(seeds)) == 12, "each rollout has its own random numbers"


def test_random_numbers_depend_on_prompt_and_rollout_and_not_on_the_order():
    once, again = Scripted(lambda request: [7]), Scripted(lambda request: [7])
    anyio.run(manager_of(once, batch_size=4).collect)

    async def in_two_batches():
        manager = manager_of(again, batch_size=2)
        await manager.collect()
        await manager.collect()

    anyio.run(in_two_batches)
    assert [request.seed for request in once.requests] == [request.seed for request in again.requests]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_over_sampling_stops_when_enough_have_finished_and_carries_the_rest(backend):
    slow = {1, 3}
    generator = Scripted(lambda request: [7] * (500 if prompt_number(request) in slow else 3))
    manager = manager_of(generator, batch_size=4, over_sampling_factor=1.5)
    collected = anyio.run(manager.collect, backend=backend)
    assert numbers(collected.groups) == [0, 2, 4, 5]
    assert numbers(manager.partial_samples) == [1, 3]
    assert all(rollout.status is Status.ABORTED for group in manager.partial_samples for rollout in group)
    assert generator.ticks < 100, "the slow ones were aborted"
    assert collected.counts["carried"] == 2


def test_carried_groups_come_first_and_resume_with_their_version():
    def reply(request):
        return range(100, 100 + (40 if prompt_number(request) in (1, 3) else 3))

    generator = Scripted(reply)
    manager = manager_of(generator, batch_size=4, over_sampling_factor=1.5, partial_rollouts=True, max_age=1)

    async def two_batches():
        await manager.collect(version=0)
        started = {group[0].group: group[0].turns[0].generation.token_ids for group in manager.partial_samples}
        generator.version = 1
        manager.config = replace(manager.config, over_sampling_factor=1.0, batch_size=2)
        return started, await manager.collect(version=1)

    started, second = anyio.run(two_batches)
    assert numbers(second.groups) == [1, 3]
    for group in second.groups:
        ids = group[0].generation.token_ids
        assert ids[: len(started[group[0].group])] == started[group[0].group] != ()
        assert ids == tuple(range(100, 140)) and group[0].version == 0 and group[0].reward == 0.0


def test_without_partial_rollouts_groups_restart_with_the_next_weights():
    generator = Scripted(lambda request: [7] * (500 if prompt_number(request) == 0 and generator.version == 0 else 3))
    manager = manager_of(generator, batch_size=1, over_sampling_factor=2)

    async def two_batches():
        first = await manager.collect(version=0)
        generator.version = 1
        return first, await manager.collect(version=1)

    first, second = anyio.run(two_batches)
    assert numbers(first.groups) == [1] and numbers(second.groups) == [0]
    assert second.groups[0][0].version == 1, "no token of older weights is left"
    assert second.counts["wasted"] > 0


def test_expired_groups_restart_and_are_counted():
    generator = Scripted(lambda request: [7] * (500 if prompt_number(request) == 0 and generator.version < 2 else 3))
    manager = manager_of(generator, batch_size=1, over_sampling_factor=2, partial_rollouts=True, max_age=1)

    async def batches():
        for version in (0, 1, 2):
            generator.version = version
            last = await manager.collect(version)
        return last

    last = anyio.run(batches)
    assert numbers(last.groups) == [0] and last.groups[0][0].version == 2
    assert last.counts["expired"] == 1


def test_groups_that_the_filter_rejects_are_replaced_and_counted():
    generator = Scripted(lambda request: [7])
    reward = lambda rollout: float(rollout.index if int(rollout.sample.answer) % 2 else 0)  # noqa: E731
    manager = manager_of(
        generator, n_samples_per_prompt=2, reward_fn=reward, filter_fn=check_reward_nonzero_std, batch_size=4
    )
    collected = anyio.run(manager.collect)
    assert numbers(collected.groups) == [1, 3, 5, 7]
    assert collected.counts["filtered_groups"] == 4 and collected.counts["drawn"] == 8


def test_the_number_of_prompts_is_bounded_and_the_error_has_the_reason():
    manager = manager_of(Scripted(lambda request: [7]), filter_fn=lambda group: False, max_draws=9)
    with pytest.raises(RuntimeError, match="none of 9 prompts .* 9 were filtered out"):
        anyio.run(manager.collect)


def test_a_batch_that_stays_short_at_the_bound_is_used_with_a_warning(caplog):
    good = lambda group: group[0].group == 2  # noqa: E731
    manager = manager_of(Scripted(lambda request: [7]), filter_fn=good, max_draws=8)
    assert numbers(anyio.run(manager.collect).groups) == [2]
    assert "only 1 of 4 groups after 8 prompts" in caplog.text


def test_an_ungraded_rollout_is_left_out_and_counted_never_a_zero():
    def reward(rollout):
        if rollout.index == 1:
            raise ZeroDivisionError("oops")
        return 1.0

    manager = manager_of(Scripted(lambda request: [7]), n_samples_per_prompt=3, reward_fn=reward, min_group_size=2)
    collected = anyio.run(manager.collect)
    assert [[rollout.index for rollout in group] for group in collected.groups] == [[0, 2]] * 4
    assert collected.counts["ungraded"] == 4


def test_a_step_without_a_graded_group_warns_and_draws_other_prompts(caplog):
    def reward(rollout):
        if rollout.group < 4:
            raise ZeroDivisionError("oops")
        return 1.0

    collected = anyio.run(manager_of(Scripted(lambda request: [7]), reward_fn=reward).collect)
    assert numbers(collected.groups) == [4, 5, 6, 7] and collected.counts["ungraded_groups"] == 4
    assert "none of 4 prompts could be graded, others are drawn" in caplog.text and "oops" in caplog.text


def test_a_reward_that_never_grades_ends_the_collection_after_three_rounds():
    def reward(rollout):
        raise ZeroDivisionError("oops")

    with pytest.raises(RuntimeError, match="none of 12 prompts .* 12 could not be graded; the first failure: .*oops"):
        anyio.run(manager_of(Scripted(lambda request: [7]), reward_fn=reward).collect)


def test_a_group_with_too_few_graded_rollouts_is_replaced():
    def reward(rollout):
        if rollout.group == 0 and rollout.index:
            raise ZeroDivisionError("oops")
        return 1.0

    manager = manager_of(Scripted(lambda request: [7]), n_samples_per_prompt=2, reward_fn=reward, min_group_size=2)
    collected = anyio.run(manager.collect)
    assert numbers(collected.groups) == [1, 2, 3, 4] and collected.counts["ungraded_groups"] == 1


def test_a_failed_generation_is_retried_before_it_is_an_error():
    generator = Scripted(lambda request: [7], failures=3)
    manager = manager_of(generator, batch_size=1)
    assert numbers(anyio.run(manager.collect).groups) == [0]
    hopeless = manager_of(Scripted(lambda request: [7], failures=10_000), batch_size=1, max_draws=1)
    with pytest.raises(
        RuntimeError, match="1 could not be graded; the first failure: generation failed: ConnectionError"
    ):
        anyio.run(hopeless.collect)


def test_a_custom_generate_function_is_retried_too():
    tries = []

    def flaky(group):
        tries.append(len(group))
        if len(tries) < 3:
            raise TimeoutError("busy")
        return tuple(replace(rollout, turns=(Turn((1,), Generation((2,), (-0.1,), "stop")),)) for rollout in group)

    config = RolloutConfig(batch_size=1, generate_fn=flaky, reward_fn=lambda rollout: 1.0)
    collected = anyio.run(AsyncRolloutManager(DataBuffer([question(1)]), config).collect)
    assert len(tries) == 3 and len(collected.groups) == 1


def test_a_custom_generate_function_that_always_fails_is_an_error_of_its_rollouts():
    def broken(group):
        raise TimeoutError("busy")

    config = RolloutConfig(batch_size=1, generate_fn=broken, reward_fn=lambda rollout: 1.0, max_draws=1)
    with pytest.raises(RuntimeError, match="1 could not be graded; the first failure: generation failed: TimeoutError"):
        anyio.run(AsyncRolloutManager(DataBuffer([question(1)]), config).collect)


def test_a_group_that_finished_in_a_later_round_is_sorted_into_prompt_order():
    """One is slow, four is filtered out, five is slower still."""
    lengths = {1: 20, 5: 500}
    generator = Scripted(lambda request: [7] * lengths.get(prompt_number(request), 3))
    manager = manager_of(
        generator, batch_size=4, over_sampling_factor=1.25, filter_fn=lambda group: group[0].group != 4
    )
    assert numbers(anyio.run(manager.collect).groups) == [0, 1, 2, 3]


def test_a_greedy_rollout_is_graded_with_the_others_and_marked():
    manager = manager_of(Scripted(lambda request: [7]), n_samples_per_prompt=2, greedy=True, batch_size=1)
    (group,) = anyio.run(manager.collect).groups
    assert [rollout.greedy for rollout in group] == [False, False, True] and group[2].reward == 2.0


def test_a_selection_gets_all_finished_groups_and_rejected_ones_are_not_reused(caplog):
    best = lambda groups, count: sorted(groups, key=lambda group: -group[0].group)[:count]  # noqa: E731
    manager = manager_of(Scripted(lambda request: [7]), batch_size=2, over_sampling_factor=2, select_fn=best)
    assert numbers(anyio.run(manager.collect).groups) == [3, 2]
    assert manager.partial_samples == [] and "biases" in caplog.text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_generate_reward_filter_and_select_functions_may_be_sync_or_async(asynchronous):
    seen = Counter()

    def wrap(name, function):
        def plain(*args):
            seen[name] += 1
            return function(*args)

        async def awaited(*args):
            await anyio.sleep(0)
            return plain(*args)

        return awaited if asynchronous else plain

    def answer(group):
        turn = Turn((1, 2), Generation((3,), (-0.1,), "stop", text="x"))
        return tuple(replace(rollout, turns=(turn,)) for rollout in group)

    config = RolloutConfig(
        batch_size=2,
        n_samples_per_prompt=2,
        generate_fn=wrap("generate", answer),
        reward_fn=wrap("reward", lambda rollout: Score(0.5)) if not asynchronous else _awaited_reward(seen),
        filter_fn=wrap("filter", lambda group: True),
        select_fn=wrap("select", lambda groups, count: groups[:count]),
    )
    manager = AsyncRolloutManager(DataBuffer([question(1), question(2)]), config)
    batch = anyio.run(manager.generate_batch)
    assert batch.rewards == [0.5] * 4 and batch.tokens == [[1, 2, 3]] * 4 and batch.loss_masks == [[0.0, 0.0, 1.0]] * 4
    assert batch.response_lengths == [1] * 4 and batch.metadata["group_indices"] == [0, 0, 1, 1]
    assert seen == {"generate": 2, "reward": 4, "filter": 2, "select": 1}


def _awaited_reward(seen):
    async def reward(rollout):
        await anyio.sleep(0)
        seen["reward"] += 1
        return 0.5

    return reward


def test_rollout_batches_are_endless_and_pass_arguments():
    def answer(group, *, token):
        return tuple(replace(rollout, turns=(Turn((1,), Generation((token,), (-0.1,), "stop")),)) for rollout in group)

    config = RolloutConfig(batch_size=2, generate_fn=answer, reward_fn=lambda rollout: 1.0)
    batches = generate_rollout_batches(DataBuffer([question(1)]), config, token=9)
    assert [next(batches).tokens for _ in range(3)] == [[[1, 9], [1, 9]]] * 3


def test_the_state_is_plain_json_and_restores_carried_groups():
    import json

    def fresh():
        generator = Scripted(lambda request: [7] * (60 if prompt_number(request) == 1 else 3))
        return manager_of(generator, batch_size=2, over_sampling_factor=1.5, partial_rollouts=True, max_age=9)

    one, other = fresh(), fresh()
    anyio.run(one.collect)
    other.restore(json.loads(json.dumps(one.state())))
    assert other.partial_samples == one.partial_samples != []
    assert anyio.run(other.collect) == anyio.run(one.collect)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"batch_size": 0}, "1 or more"),
        ({"batch_size": 1, "over_sampling_factor": 0.5}, "must be 1 or more"),
        ({"batch_size": 1, "min_group_size": 2}, "compares at least 2 completions"),
    ],
)
def test_an_invalid_config_is_refused(wrong, error):
    with pytest.raises(ValueError, match=error):
        RolloutConfig(**wrong)


def test_a_manager_without_a_generate_function_is_refused():
    manager = AsyncRolloutManager(DataBuffer([question(1)]), RolloutConfig(batch_size=1))
    with pytest.raises(ValueError, match="needs generate_fn"):
        anyio.run(manager.collect)


def test_an_environment_with_its_own_scores_is_reported_once(caplog):
    async def scored(sample, policy):
        episode = await single_turn(sample, policy)
        return episode._replace(score=Score(9.0))

    source = DataBuffer([question(number) for number in range(8)])
    sampler = RolloutSampler(Scripted(lambda request: [7]), PlainRender(), GREEDY, env=scored)
    manager = sampling_manager(source, sampler, RolloutConfig(2, reward_fn=lambda rollout: 1.0))
    for _ in range(2):
        collected = anyio.run(manager.collect)
        assert [rollout.reward for group in collected.groups for rollout in group] == [9.0, 9.0]
    warned = [record.message for record in caplog.records if "reward_fn is not called" in record.message]
    assert len(warned) == 1
    caplog.clear()
    of_environment = Reward("of the environment", lambda rollouts, limit: [], fallback=True)
    anyio.run(sampling_manager(source, sampler, RolloutConfig(2, reward_fn=of_environment)).collect)
    assert not caplog.records
    anyio.run(manager_of(Scripted(lambda request: [7]), over_sampling_factor=2.0).collect)
    assert not caplog.records


def test_an_invalid_score_of_an_environment_is_an_error_and_never_trained_on():
    async def scored(sample, policy):
        episode = await single_turn(sample, policy)
        return episode._replace(score=Score(float("nan")))

    sampler = RolloutSampler(Scripted(lambda request: [7]), PlainRender(), GREEDY, env=scored)
    (rollout,) = anyio.run(sampler, (Rollout(question(1)),))
    assert rollout.score is None and "reward of the environment failed: the score is nan" in rollout.error


def test_each_answer_of_a_batch_advances_the_progress_inside_the_step():
    seen = []
    activity = Activity(lambda: seen.append((activity.done, activity.total, activity.what)))
    sampler = RolloutSampler(Scripted(lambda request: [7]), PlainRender(), GREEDY, activity=activity)
    source = DataBuffer([question(number) for number in range(4)], shuffle=False)
    config = RolloutConfig(batch_size=2, n_samples_per_prompt=3, reward_fn=lambda rollout: 0.0)
    anyio.run(sampling_manager(source, sampler, config, activity).collect)
    assert seen == [(done, 6, "answers") for done in range(7)]
    assert str(activity) == "", "grading and training are not sampling"

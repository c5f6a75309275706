"""Rewards of every signature run concurrently, and a failure is an error and never a reward of 0."""

import asyncio
import functools
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import anyio
import numpy as np
import pytest
import torch

from oxrl.rewards import Reward, as_reward, check_samples, grade, group_reward, reads, scale, weighted
from oxrl.types import Rollout, Score, Status
from tests.clock import expire
from tests.rewards.rollouts import a_rollout, a_sample, a_turn
from tests.waiting import HANG, wait_until_async

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


def group(n=3):
    return [a_rollout(str(i), index=i) for i in range(n)]


def by_index(rollout):
    return float(rollout.index)


async def by_index_later(rollout):
    for _ in range(10 * (3 - rollout.index)):  # the last is done first
        await anyio.sleep(0)
    return float(rollout.index)


class ByIndex:
    async def __call__(self, rollout):
        await anyio.sleep(0)
        return rollout.index


@pytest.mark.parametrize(
    "reward",
    [
        by_index,
        by_index_later,
        ByIndex(),
        lambda rollout: by_index_later(rollout),
        functools.partial(by_index_later),
        lambda rollout: Score(rollout.index),
        lambda rollout: torch.tensor(float(rollout.index)),
        lambda rollout: np.float32(rollout.index),
        group_reward(lambda many: [float(each.index) for each in many]),
        group_reward(lambda many: torch.arange(len(many))),
    ],
)
async def test_rewards_of_every_signature_return_scores_in_order(reward):
    graded = await grade(group(), reward)
    assert [rollout.score for rollout in graded] == [Score(0.0), Score(1.0), Score(2.0)]
    assert all(type(rollout.reward) is float and rollout.error is None for rollout in graded)


async def test_bools_are_rewards():
    graded = await grade(group(2), lambda rollout: rollout.index == 1)
    assert [rollout.reward for rollout in graded] == [0.0, 1.0]


def fail(rollout):
    return 1 / (rollout.index - 1)


async def fail_later(rollout):
    await anyio.sleep(0)
    return fail(rollout)


@pytest.mark.parametrize("reward", [fail, fail_later])
async def test_an_exception_leaves_its_own_rollout_ungraded(reward):
    first, second, third = await grade(group(), reward)
    assert (first.reward, third.reward) == (-1.0, 1.0)
    assert second.score is None and second.reward is None
    assert second.status is Status.FAILED
    expected = f"reward {reward.__name__} failed: ZeroDivisionError: division by zero (test_grade.py, line "
    assert second.error.startswith(expected)


class Broken:
    ndim = 0

    def item(self):
        return 1 / 0


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (float("nan"), "the score is nan"),
        (float("inf"), "the score is inf"),
        (10**400, "the score is inf"),
        (1e308, "the score is 1e+308; a score is a number of at most 1e+15"),
        (Fraction(-(10**400)), "the score is inf"),
        (Score(1.0, {"format": 1e308}), "part format is 1e+308"),
        (Score(1.0, parts=None), "its result cannot be read: AttributeError"),
        (Broken(), "its result cannot be read: ZeroDivisionError"),
        (None, "the score is None and not a number"),
        ("1.0", "the score is a str and not a number"),
        ([1.0], "the score is a list and not a number"),
        (torch.zeros(3), "the score is a Tensor and not a number"),
        (Score(float("nan")), "the score is nan"),
        (Score(1.0, {"format": float("-inf")}), "part format is -inf"),
        (Score(1.0, per_token=(1.0,)), "1 scores per token for 3 tokens"),
        (Score(1.0, per_token=(0.0, 0.0, 0.5)), "per token add up to 0.5 and not to 1"),
        (Score(1.0, per_turn=(0.5, 0.5)), "2 scores per turn for 1 turns"),
    ],
)
async def test_an_invalid_result_is_ungraded_and_never_zero(result, reason):
    (rollout,) = await grade(group(1), lambda rollout: result)
    assert rollout.score is None
    assert reason in rollout.error


async def test_a_stop_iteration_is_an_error_like_any_other():
    def empty(rollout):
        return next(iter(()))

    (rollout,) = await grade(group(1), empty)
    assert "StopIteration" in rollout.error


async def test_a_composed_or_custom_score_that_is_too_large_is_ungraded():
    async def huge(rollouts, time_limit):
        return [Score(1e308)] * len(rollouts)

    for reward in (scale(by_index, 1e300), weighted({by_index: 1e15}), Reward("huge", huge)):
        assert "the score is" in (await grade([a_rollout("x", index=2)], reward))[0].error


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_cancellation_that_a_reward_raises_itself_is_an_error_like_any_other(is_async):
    def cancelled(rollout):
        raise asyncio.CancelledError("no time")

    async def cancelled_later(rollout):
        await anyio.sleep(0)
        raise asyncio.CancelledError("no time")

    graded = await grade(group(2), cancelled_later if is_async else cancelled)
    assert all(rollout.score is None and "CancelledError: no time" in rollout.error for rollout in graded)


async def test_an_error_without_a_text_is_an_error_like_any_other():
    class MuteError(Exception):
        def __str__(self):
            raise self

    def fails(rollout):
        raise MuteError

    (rollout,) = await grade(group(1), fails)
    assert rollout.error.startswith("reward fails failed: MuteError (test_grade.py, line ")


async def test_scores_keep_their_parts_turns_and_tokens():
    score = Score(3.0, {"a": 1.0}, per_turn=(3.0,), per_token=(1.0, 1.0, 1.0))
    (rollout,) = await grade(group(1), lambda rollout: score)
    assert rollout.score == score


async def test_rollouts_with_a_score_or_an_error_are_returned_unchanged():
    done = Rollout(a_sample(), (a_turn(),), score=Score(0.25))
    broken = Rollout(a_sample(), error="the engine died")
    graded_rollouts = []

    def reward(rollout):
        graded_rollouts.append(rollout)
        return 1.0

    fresh = a_rollout("x")
    graded = await grade([done, fresh, broken], reward)
    assert graded[0] is done and graded[2] is broken
    assert graded[1].reward == 1.0
    assert graded_rollouts == [fresh]
    assert await grade([done, broken], reward) == [done, broken]


@pytest.mark.parametrize("is_async", [False, True])
async def test_rewards_run_concurrently_and_only_the_one_that_hangs_is_cancelled(is_async):
    together, release, threads = threading.Barrier(8), threading.Event(), []
    started, all_started, done = [], anyio.Event(), []

    def stuck(rollout):
        together.wait(HANG)  # returns only if all eight run concurrently
        if rollout.index == 1:
            release.wait(HANG)
        else:
            threads.append(threading.current_thread())
        return 1.0

    async def stuck_async(rollout):
        started.append(rollout)
        if len(started) == 8:
            all_started.set()
        await all_started.wait()
        if rollout.index == 1:
            await anyio.sleep_forever()
        done.append(rollout)
        return 1.0

    def others_are_done():
        return len(done) == 7 or (len(threads) == 7 and not any(thread.is_alive() for thread in threads))

    async def reach_the_limit():
        await wait_until_async(others_are_done, "seven of eight rewards are done")
        await expire(HANG)

    reward = stuck_async if is_async else stuck
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reach_the_limit)
            graded = await grade(group(8), reward, time_limit=HANG)
    finally:
        release.set()
    assert [rollout.reward for rollout in graded] == [1.0, None, *[1.0] * 6]
    assert graded[1].error == f"reward {reward.__name__} failed: no result within {HANG:g} s"


async def test_a_timeout_inside_a_reward_is_its_error():
    async def impatient(rollout):
        with anyio.fail_after(0):
            await anyio.sleep_forever()

    (rollout,) = await grade(group(1), impatient)
    assert "TimeoutError" in rollout.error


async def test_many_stuck_rewards_do_not_use_up_the_threads():
    release = threading.Event()

    def stuck(rollout):
        release.wait(HANG)
        return 0.0

    try:
        for _ in range(6):
            assert all(rollout.error for rollout in await grade(group(16), stuck, time_limit=0.01))
        assert (await grade(group(1), by_index, time_limit=HANG))[0].reward == 0.0
    finally:
        release.set()


def test_an_endless_reward_does_not_keep_python_from_exiting(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(
        "import anyio, sys\n"
        "from oxrl.rewards import grade\n"
        "from tests.rewards.rollouts import a_rollout\n"
        "def endless(rollout):\n    while True: pass\n"
        "async def main():\n    print((await grade([a_rollout('x')], endless, time_limit=0.05))[0].error)\n"
        "anyio.run(main, backend=sys.argv[1])\n"
    )
    for backend in ("asyncio", "trio"):
        command = [sys.executable, str(script), backend]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env={"PYTHONPATH": "."})
        assert "no result within 0.05 s" in done.stdout, done.stderr


@pytest.mark.parametrize("is_async", [False, True])
async def test_cancellation_passes_through(is_async):
    started, release, finished = threading.Event(), threading.Event(), []

    def stuck(rollout):
        started.set()
        release.wait(HANG)

    async def stuck_async(rollout):
        started.set()
        await anyio.sleep_forever()

    async def cancel_when_it_runs():
        await wait_until_async(started.is_set, "the reward runs")
        scope.cancel()

    try:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cancel_when_it_runs)
                finished.append(await grade(group(), stuck_async if is_async else stuck, time_limit=HANG))
    finally:
        release.set()
    assert scope.cancelled_caught
    assert not finished


class Interrupted(BaseException):
    """Like KeyboardInterrupt, which pytest would handle itself."""


def interrupt(rollout):
    raise Interrupted


async def interrupt_later(rollout):
    raise Interrupted


@pytest.mark.parametrize("reward", [interrupt, interrupt_later, group_reward(interrupt)])
async def test_interrupts_are_not_caught(reward):
    with pytest.raises((Interrupted, BaseExceptionGroup)) as caught:
        await grade(group(1), reward)
    found = caught.value
    while isinstance(found, BaseExceptionGroup):
        (found,) = found.exceptions
    assert isinstance(found, Interrupted)


def last_token(prompt_ids, response_ids, finish_reason):
    rewards = torch.zeros(len(response_ids), dtype=torch.float32)
    rewards[-1] = 1.0 if (prompt_ids, response_ids, finish_reason) == ([1, 2], [7, 8, 9], "stop") else 0.0
    return rewards, False


def sum_of_tokens(prompt_ids, response_ids, finish_reason):
    return torch.tensor([0.0, 0.5, 0.25]), False


def score_per_token(prompt_ids, response_ids, finish_reason):
    return torch.tensor([0.25] * len(response_ids)), True


async def test_the_token_signature_gives_a_sum_or_a_score_per_token():
    (rollout,) = await grade(group(1), last_token)
    assert rollout.score == Score(1.0)
    (rollout,) = await grade(group(1), sum_of_tokens)
    assert rollout.score == Score(0.75)
    (rollout,) = await grade(group(1), score_per_token)
    assert rollout.score == Score(0.75, per_token=(0.25, 0.25, 0.25))
    two_turns = Rollout(a_sample(), (a_turn(tokens=(3, 4)), a_turn(tokens=(5,), prompt=(1, 2, 3, 4))))
    (rollout,) = await grade([two_turns], score_per_token)
    assert rollout.score == Score(0.25, per_token=(0.0, 0.0, 0.25))


async def test_the_token_signature_must_return_both_values():
    def careless(prompt_ids, response_ids, finish_reason):
        return torch.zeros(len(response_ids))

    def too_short(prompt_ids, response_ids, finish_reason):
        return torch.zeros(1), True

    assert "not (rewards, is_per_token)" in (await grade(group(1), careless))[0].error
    assert "1 scores per token for 3 tokens" in (await grade(group(1), too_short))[0].error


async def test_group_functions_are_recognized_by_decorator_name_or_annotation():
    seen = []

    @group_reward
    def marked(many):
        seen.append(len(many))
        return [0.0] * len(many)

    def named(rollouts):
        seen.append(len(rollouts))
        return [0.0] * len(rollouts)

    def annotated(many: Sequence[Rollout], *, value: float = 0.0):
        seen.append(len(many))
        return [value] * len(many)

    async def spelt_out(many: "list[Rollout]"):
        seen.append(len(many))
        return [0.0] * len(many)

    for reward in (marked, named, functools.partial(annotated, value=1.0), spelt_out):
        graded = await grade([*group(), Rollout(a_sample(), error="lost")], reward)
        assert all(rollout.score for rollout in graded[:3])
    assert seen == [3, 3, 3, 3]


async def test_one_bad_score_of_a_group_is_one_ungraded_rollout_and_a_bad_list_is_all():
    graded = await grade(group(), group_reward(lambda many: [1.0, None, 0.5]))
    assert [rollout.reward for rollout in graded] == [1.0, None, 0.5]
    graded = await grade(group(), group_reward(lambda many: [1.0]))
    assert all("1 scores for 3 rollouts" in rollout.error for rollout in graded)
    graded = await grade(group(), group_reward(lambda many: 1.0))
    assert all("not a list of scores" in rollout.error for rollout in graded)
    release = threading.Event()
    try:
        graded = await grade(group(), group_reward(lambda many: release.wait(HANG)), time_limit=0.05)
    finally:
        release.set()
    assert all("no result within" in rollout.error for rollout in graded)


def in_chats(rows):
    """The same rollouts, of rows with lists of messages."""
    return [replace(each, sample=replace(each.sample, conversational=True)) for each in rows]


def strings_of_trl(prompts, completions, level, **columns):
    assert columns.keys() == {"completion_ids", "answer"} and columns["completion_ids"] == [[7, 8, 9]] * 3
    assert prompts == ["What?"] * 3 and columns["answer"] == ["4"] * 3
    return [int(text) * each for text, each in zip(completions, level, strict=True)]


def chats_of_trl(completions, **_):
    return [float(messages[0]["content"]) if messages[0]["role"] == "assistant" else -1.0 for messages in completions]


async def chats_of_trl_later(prompts, completions):
    await anyio.sleep(0)
    assert prompts[0] == [{"role": "user", "content": "What?"}]
    return chats_of_trl(completions)


async def test_a_reward_function_of_trl_is_called_as_trl_calls_it():
    rollouts = [a_rollout(str(i), "4", index=i, level=2) for i in range(3)]
    assert [each.reward for each in await grade(rollouts, strings_of_trl)] == [0.0, 2.0, 4.0]
    for reward in (chats_of_trl, chats_of_trl_later):
        assert [each.reward for each in await grade(in_chats(rollouts), reward)] == [0.0, 1.0, 2.0]
    check_samples(strings_of_trl, [rollouts[0].sample])
    with pytest.raises(
        ValueError, match=r"\(prompts, completions, level, \*\*columns\) takes the column level, and s1 has a"
    ):
        check_samples(strings_of_trl, [a_sample("4")])
    (short,) = await grade(rollouts[:1], lambda completions: [1.0, 2.0])
    assert "it returned 2 scores for 1 rollouts" in short.error


async def test_a_reward_that_returns_none_for_a_row_does_not_apply_to_it():
    def easy(completions, **_):
        return [1.0, None, None]

    def hard(completions, **_):
        return [None, 3.0, None]

    graded = await grade(group(), weighted({easy: 1.0, hard: 0.5}))
    assert [each.reward for each in graded] == [1.0, 1.5, None]
    assert "reward easy returned None: it does not apply to s1" in graded[2].error


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (lambda a, b: 0.0, "takes (a, b)"),
        (lambda: 0.0, "takes ()"),
        (lambda rollout, *, needed: 0.0, "takes (rollout, *, needed)"),
        (3, "not callable"),
    ],
)
def test_other_signatures_are_refused(thing, message):
    with pytest.raises(ValueError) as caught:
        as_reward(thing)
    assert message in str(caught.value)


def test_as_reward_returns_a_reward_unchanged():
    reward = as_reward(by_index)
    assert as_reward(reward) is reward
    assert as_reward(functools.partial(by_index)).name == "by_index"
    assert as_reward(ByIndex()).name == "ByIndex"


def test_rewards_that_declare_what_they_read_check_samples_before_a_run():
    @reads("answer")
    def picky(rollout):
        return 1.0 / len(rollout.sample.answer)

    @reads("answer")
    def clear(rollout):
        if rollout.sample.answer is None:
            raise ValueError(f"{rollout.sample.id} has no answer")
        return 1.0

    check_samples(clear, [a_sample("a")])
    with pytest.raises(ValueError, match="clear cannot grade 4 of 5 samples: s1 has no answer.*1 more"):
        check_samples(clear, [a_sample("a"), *[a_sample()] * 4])
    check_samples(by_index, [a_sample()])
    with pytest.raises(TypeError):  # a bug of the reward, not of the sample
        check_samples(picky, [a_sample()])


def test_a_reward_that_exits_when_samples_are_checked_is_refused():
    @reads("answer")
    def leaves(rollout):
        raise SystemExit(0)

    with pytest.raises(ValueError, match="leaves cannot grade 1 of 1 samples: sample s1: SystemExit: 0"):
        check_samples(leaves, [a_sample("a")])


async def test_sync_rewards_may_run_event_loops():
    def nested(rollout):
        return anyio.run(by_index_later, rollout)

    assert [rollout.reward for rollout in await grade(group(), nested)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reward_that_raises_system_exit_is_ungraded_and_reported_with_its_line(asynchronous):
    def leaves(rollout):
        raise SystemExit(3)

    async def leaves_later(rollout):
        raise SystemExit(3)

    (graded,) = anyio.run(grade, [Rollout(a_sample())], leaves_later if asynchronous else leaves)
    assert graded.score is None and "SystemExit: 3" in graded.error
    assert asynchronous or "line" in graded.error

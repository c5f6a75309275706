"""The table of rewards, composed rewards, the primitives, a judge, and reasoning-gym."""

import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oxrl.rewards import (
    REWARDS,
    as_reward,
    check_samples,
    clamp,
    describe_rewards,
    grade,
    group_reward,
    judge_reward,
    normalize,
    reasoning_gym_samples,
    reward,
    scale,
    weighted,
)
from oxrl.rewards.compose import minmax, zscore
from oxrl.rewards.primitives import (
    aggregate_vector_rewards,
    apply_reward_shaping,
    compute_batch_rewards,
    compute_scalar_reward,
    compute_vector_reward,
    normalize_rewards,
    weighted_sum,
)
from oxrl.rewards.table import BUILDERS
from oxrl.types import Message, Score
from tests.rewards.rollouts import a_rollout, a_sample
from tests.waiting import HANG


def graded(rollouts, one, **options):
    return anyio.run(partial(grade, rollouts, one, **options))


def scores(rollouts, one):
    return [rollout.score for rollout in graded(rollouts, one)]


@pytest.mark.parametrize("name", ["number_match", "Number-Match", "numbermatch"])
def test_a_reward_is_found_by_its_name_in_any_spelling(name):
    assert scores([a_rollout("7", "7")], reward(name)) == [Score(1.0)]


def test_parameters_are_passed_to_the_reward():
    assert scores([a_rollout("7.1", "7")], reward("number_match", tolerance=0.1)) == [Score(1.0)]
    assert scores([a_rollout("<plan>a</plan>")], reward("tag_format", tags=["plan"])) == [Score(1.0)]


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("number_mach", {}, "did you mean number_match?"),
        ("zzz", {}, "There are: exact_match"),
        ("number_match", {"tolerence": 0.1}, "did you mean tolerance?"),
        ("number_match", {"warmth": 0.1}, "it takes: tolerance"),
        ("number_match", {"tolerance": "much"}, "like its default 0.0"),
        ("number_match", {"tolerance": True}, "like its default 0.0"),
        ("exact_match", {"ignore_case": 1}, "like its default True"),
        ("multiple_choice", {"letters": 3}, "like its default 'ABCDE'"),
        ("regex_match", {}, "regex_match needs pattern"),
        ("nowhere.py:mine", {}, f"no file {Path.cwd()}/nowhere.py"),
        ("json:decoder", {}, "not a reward function"),
        ("json:no_such_function", {}, "cannot be imported"),
    ],
)
def test_errors_name_what_is_allowed(name, parameters, message):
    with pytest.raises(ValueError) as caught:
        reward(name, **parameters)
    assert message in str(caught.value)


def test_custom_rewards_are_named_by_their_file(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "import torch\n\n"
        "def shouts(rollout, *, loud: float = 1.0):\n    return loud * rollout.response.isupper()\n\n"
        "def last_token(prompt_ids, response_ids, finish_reason):\n"
        "    r = torch.zeros(len(response_ids), dtype=torch.float32)\n    r[-1] = 1.0\n    return r, False\n"
    )
    assert scores([a_rollout("HEY"), a_rollout("hey")], reward(f"{file}:shouts", loud=2.0)) == [Score(2.0), Score(0.0)]
    assert scores([a_rollout("HEY")], reward(f"{file}:last_token")) == [Score(1.0)]
    with pytest.raises(ValueError, match="did you mean loud"):
        reward(f"{file}:shouts", lout=2.0)


def test_the_table_describes_itself():
    cards = describe_rewards()
    assert cards.keys() == {*REWARDS, *BUILDERS}
    assert all(card.explanation for card in cards.values())
    assert cards["number_match"].parameters == {"tolerance": 0.0}
    assert cards["number_match"].reads == ("answer",)
    assert cards["regex_match"].parameters["pattern"] is ...


def test_rewards_do_not_import_torch_or_the_optional_packages():
    heavy = {"torch", "math_verify", "sympy", "reasoning_gym"}
    check = f"import sys, oxrl.rewards; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_a_weighted_sum_keeps_its_parts():
    both = weighted({"number_match": 1.0, "tag_format": 0.2})
    first, second = scores([a_rollout("<think>a</think><answer>7</answer>", "7"), a_rollout("7", "7")], both)
    assert first == Score(1.2, {"number_match": 1.0, "tag_format": 1.0})
    assert second == Score(1.0, {"number_match": 1.0, "tag_format": 0.0})


def test_a_weighted_sum_takes_functions_and_weighted_sums_and_async_ones():
    async def later(rollout):
        await anyio.sleep(0)
        return 0.5

    def parted(rollout):
        return Score(2.0, {"a": 1.5, "b": 0.5})

    (score,) = scores([a_rollout("x")], weighted({later: 2.0, parted: -1.0}))
    assert score == Score(-1.0, {"later": 0.5, "parted": 2.0, "parted.a": 1.5, "parted.b": 0.5})


def test_a_rollout_that_one_part_cannot_grade_is_ungraded():
    def fussy(rollout):
        return 1 / len(rollout.response)

    good, bad = graded([a_rollout("ab"), a_rollout("")], weighted({fussy: 1.0, "tag_format": 1.0}))
    assert good.reward == 0.5
    assert bad.score is None
    assert bad.error.startswith("reward fussy failed: ZeroDivisionError: division by zero (")


def test_a_weighted_sum_keeps_credit_per_token():
    def by_token(rollout):
        return Score(3.0, per_token=(1.0, 0.0, 2.0))

    def plain(rollout):
        return 0.5

    (rollout,) = graded([a_rollout("x")], weighted({by_token: 2.0, plain: 4.0}))
    assert rollout.score.value == 8.0
    assert rollout.score.per_token == (2.0, 0.0, 6.0)
    assert rollout.score.per_turn is None


def test_a_weighted_sum_checks_samples_for_all_its_parts():
    both = weighted({"tag_format": 1.0, "number_match": 1.0})
    check_samples(both, [a_sample("7")])
    with pytest.raises(ValueError, match="has no `answer`"):
        check_samples(normalize(both), [a_sample()])


@pytest.mark.parametrize("wrong", [{}, {"tag_format": float("nan")}, {"tag_format": 1.0, REWARDS["tag_format"]: 1.0}])
def test_invalid_weights_are_refused(wrong):
    with pytest.raises(ValueError, match="weight"):
        weighted(wrong)


def lengths(rollout):
    return len(rollout.response)


def test_scaled_and_clamped():
    rollouts = [a_rollout("a" * n) for n in (0, 1, 5)]
    assert [s.value for s in scores(rollouts, scale(lengths, 0.5))] == [0.0, 0.5, 2.5]
    clamped = scores(rollouts, clamp(lengths, 1, 3))
    assert [s.value for s in clamped] == [1.0, 1.0, 3.0]
    assert [dict(s.parts) for s in clamped] == [{"lengths": 0.0}, {}, {"lengths": 5.0}]
    by_token = scale(lambda rollout: Score(3.0, per_token=(1.0, 1.0, 1.0)), 2)
    assert scores([a_rollout("x")], by_token) == [Score(6.0, per_token=(2.0, 2.0, 2.0))]
    with pytest.raises(ValueError, match="low <= high"):
        clamp(lengths, 3, 1)


def test_credit_per_token_cannot_be_clamped():
    by_token = clamp(lambda rollout: Score(3.0, per_token=(1.0, 1.0, 1.0)), 0, 2)
    (rollout,) = graded([a_rollout("x")], by_token)
    assert rollout.score is None
    assert "per turn or token" in rollout.error


def test_rewards_are_normalized_within_the_group_over_graded_rollouts():
    def fussy(rollout):
        return 6 / len(rollout.response)

    rollouts = graded([a_rollout("a"), a_rollout(""), a_rollout("aa"), a_rollout("aaa")], normalize(fussy))
    values = [rollout.reward for rollout in rollouts]
    assert values[1] is None
    mean, std = 11 / 3, (26 / 9) ** 0.5  # of 6, 3 and 2
    assert values[0] == pytest.approx((6 - mean) / std)
    assert sum(value for value in values if value is not None) == pytest.approx(0.0, abs=1e-12)
    assert rollouts[0].score.parts == {"fussy": 6.0}
    assert [s.value for s in scores([a_rollout("a"), a_rollout("aaa")], normalize(lengths, minmax))] == [0.0, 1.0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_normalizers_keep_the_order(values):
    for normalizer in (zscore, minmax):
        ordered = sorted(zip(values, normalizer(values), strict=True))
        assert all(a[1] <= b[1] for a, b in pairwise(ordered))


def test_equal_rewards_are_normalized_to_zero():
    assert zscore([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]
    assert minmax([5.0]) == [0.0]


def test_primitives_agree_with_the_functions_that_they_wrap():
    rollout = a_rollout("abc", "abc")
    assert compute_scalar_reward(rollout, lengths) == 3.0
    assert compute_vector_reward(rollout, [lengths, REWARDS["exact_match"]]) == [3.0, 1.0]
    assert weighted_sum([1.0, 0.5], [1.0, 0.2]) == pytest.approx(1.1)
    assert weighted_sum([1.0, 0.5]) == 1.5
    assert weighted_sum({"a": 1.0, "b": 2.0}, {"b": 0.5, "a": 1.0}) == 2.0
    assert aggregate_vector_rewards([1.0, 0.5], weights=[1.0, 2.0]) == 2.0
    assert aggregate_vector_rewards([1.0, 0.5], aggregator=min) == 0.5
    rewards = compute_batch_rewards([rollout, a_rollout("", "")], lambda rollout: 1 / len(rollout.response))
    assert rewards == [pytest.approx(1 / 3), None]
    assert normalize_rewards([1.0, None, 3.0]) == [-1.0, None, 1.0]
    assert normalize_rewards([1.0, 3.0], normalizer=minmax) == [0.0, 1.0]
    assert normalize_rewards([None]) == [None]
    assert apply_reward_shaping([1.0, None], shaping_fn=lambda r: r - 5) == [-4.0, None]


def test_shaping_takes_the_rollout_and_keeps_the_original_score():
    done, failed = graded([a_rollout("abc"), a_rollout("")], lambda rollout: 1 / len(rollout.response))
    shaped = apply_reward_shaping([done, failed], shaping_fn=lambda r: r.reward - 0.1 * len(r.response))
    assert shaped[0].reward == pytest.approx(1 / 3 - 0.3)
    assert shaped[0].score.parts == {"before_shaping": done.reward}
    assert shaped[1] is failed


@pytest.mark.parametrize(
    ("rewards", "weights"), [([1.0], [1.0, 2.0]), ({"a": 1.0}, {"b": 1.0}), ({"a": 1.0}, [1.0]), ([1.0], {"a": 1.0})]
)
def test_every_reward_needs_its_weight(rewards, weights):
    with pytest.raises(ValueError, match="needs its weight"):
        weighted_sum(rewards, weights)


def test_the_scalar_primitive_raises_errors_and_refuses_async_rewards():
    async def later(rollout):
        return 1.0

    with pytest.raises(ZeroDivisionError):
        compute_scalar_reward(a_rollout(""), lambda rollout: 1 / len(rollout.response))
    with pytest.raises(ValueError, match="async"):
        compute_scalar_reward(a_rollout(""), later)
    with pytest.raises(TypeError, match="None"):
        compute_scalar_reward(a_rollout(""), lambda rollout: None)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Score: 7", 0.7),
        ("It deserves 3 points for style.\n**Score: 8.5**", 0.85),
        ("7/10", 0.7),
        ("8 out of 10", 0.8),
        ("Score: 2 ... on reflection, score: 4", 0.4),
        ("score = 10/10", 1.0),
        ("0", 0.0),
    ],
)
def test_a_judges_score_is_parsed(reply, expected):
    async def ask(messages):
        return reply

    (rollout,) = graded([a_rollout("x")], judge_reward(ask))
    assert rollout.reward == pytest.approx(expected)


@pytest.mark.parametrize("reply", ["", "I like it.", "between 3 and 5", "Score: 11", "Score: -1"])
def test_a_reply_without_a_score_is_ungraded(reply):
    async def ask(messages):
        return reply

    (rollout,) = graded([a_rollout("x")], judge_reward(ask))
    assert rollout.score is None
    assert "the judge" in rollout.error


def test_the_judges_prompt_has_rubric_question_answer_and_reference():
    requests: list[list[Message]] = []

    async def ask(messages):
        requests.append(list(messages))
        return "Score: 3"

    (rollout,) = graded(
        [a_rollout("Rome", "Paris", prompt="Capital of France?")], judge_reward(ask, rubric="Be stern.", scale=(1, 5))
    )
    assert rollout.reward == 0.5
    system, user = requests[0]
    assert "Be stern." in system.content and "from 1 (worst) to 5 (best)" in system.content
    assert user.content.count("Rome") == 1
    assert user.content.index("Capital of France?") < user.content.index("Rome") < user.content.index("Paris")


def test_a_group_is_judged_concurrently():
    requests, all_sent = [], anyio.Event()

    async def ask(messages):
        requests.append(messages)
        if len(requests) == 20:
            all_sent.set()
        await all_sent.wait()
        return "Score: 5"

    rollouts = graded([a_rollout("x")] * 20, judge_reward(ask), time_limit=HANG)
    assert [rollout.reward for rollout in rollouts] == [0.5] * 20


def test_reasoning_gym_tasks_are_samples_with_their_scorer():
    pytest.importorskip("reasoning_gym", reason="the extra oxrl[gym] is not installed")
    samples = reasoning_gym_samples("leg_counting", size=5, seed=3)
    assert samples == reasoning_gym_samples("leg_counting", size=5, seed=3)
    assert len({sample.id for sample in samples}) == 5
    own = reward("reasoning_gym_score")
    check_samples(own, samples)
    from dataclasses import replace

    right = [replace(a_rollout(f"<answer>{sample.answer}</answer>"), sample=sample) for sample in samples]
    wrong = [replace(a_rollout("no idea"), sample=sample) for sample in samples]
    assert [rollout.reward for rollout in graded(right, own)] == [1.0] * 5
    assert all(rollout.reward < 0.5 for rollout in graded(wrong, own))
    with pytest.raises(ValueError, match="cannot generate samples of 'no_such_task'"):
        reasoning_gym_samples("no_such_task")


def test_other_samples_are_refused_by_reasoning_gym():
    with pytest.raises(ValueError, match="does not come from reasoning_gym_samples"):
        check_samples(reward("reasoning_gym_score"), [a_sample("7")])


def test_a_group_reward_can_be_composed():
    @group_reward
    def rank(rollouts):
        order = sorted(range(len(rollouts)), key=lambda i: len(rollouts[i].response))
        return [float(order.index(i)) for i in range(len(rollouts))]

    composed = scores([a_rollout("aaa"), a_rollout("a")], weighted({rank: 1.0, lengths: 0.1}))
    assert [score.value for score in composed] == pytest.approx([1.3, 0.1])
    assert as_reward(rank).name == "rank"

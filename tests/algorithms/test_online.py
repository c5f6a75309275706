"""Every online algorithm from rollouts to the gradient of a step, on an exact model."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from oxrl.algorithms import ALGORITHMS, algorithm
from oxrl.data.pack import collate, count_units
from oxrl.data.render import Renderer
from oxrl.loops.step import credit_step
from oxrl.models.load import load_tokenizer
from oxrl.types import Generation, Message, Rollout, Sample, Score, Turn
from tests.algorithms.bigram import BigramBackend, relative_difference

pytestmark = pytest.mark.anyio
ONLINE = """
    grpo sgrpo dr_grpo dapo gspo gmpo cispo reinforce rloo max_rl remax reinforce_pp ppo opd online_dpo dapo_pairs spin
    rft rlhf rlaif
""".split()
POLICY = [name for name in ONLINE if name not in ("online_dpo", "dapo_pairs", "spin", "rft")]
RNG = np.random.default_rng(3)
PROMPT = (Message("system", "Be brief."), Message("user", "Two and two?"), Message("assistant", "4"))


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
def render():
    return Renderer(load_tokenizer("tiny"))


def turn(prompt, length, reason="stop"):
    sampled = tuple(int(token) for token in RNG.integers(10, 40, length))
    return Turn(tuple(prompt), Generation(sampled, tuple(-1 - 3 * RNG.random(length)), reason))


def rollout(index, *turns, reward=0.0, group=0, **others):
    sample = Sample(f"rows:{group}", messages=PROMPT)
    return Rollout(sample, turns, group=group, index=index, score=Score(reward), **others)


def a_group(group, rewards=(1.0, 0.0, 0.25)):
    """Responses of unequal length, one of them truncated, and a greedy one."""
    answers = [
        rollout(
            index, turn([1, 5, 6, group], 2 + 3 * index, "length" if index == 1 else "stop"), reward=reward, group=group
        )
        for index, reward in enumerate(rewards)
    ]
    return (*answers, rollout(99, turn([1, 5, 6, group], 4), reward=0.5, group=group, greedy=True))


def items_of(built, groups, render):
    return [item for group in groups for item in built.online.items(group, render)]


def test_every_online_algorithm_has_its_sampling_options_and_no_other_does():
    assert {name for name in ALGORITHMS if algorithm(name).online is not None} == set(ONLINE)
    plans = {name: algorithm(name).online for name in ONLINE}
    assert {name for name, plan in plans.items() if plan.greedy} == {"remax"}
    assert {name for name, plan in plans.items() if plan.needs_variance} == {"dapo", "online_dpo", "dapo_pairs"}
    alone = {"ppo", "reinforce_pp", "reinforce", "remax", "opd", "spin", "rft"}
    assert {name for name, plan in plans.items() if plan.min_group_size == 1} == alone
    grades = {"opd": None, "spin": None, "rlhf": "reward model", "rlaif": "judge"}
    assert {name: plan.reward_source for name, plan in plans.items()} == {
        name: grades.get(name, "reward") for name in ONLINE
    }
    assert algorithm("rlhf").parameters["kl_coef"] == algorithm("rlaif").parameters["kl_coef"] == 0.05


@pytest.mark.parametrize("name", ONLINE)
async def test_the_gradient_does_not_depend_on_micro_batches_and_leaves_the_greedy_rollout_out(name, render):
    backend, built, groups = BigramBackend(260), algorithm(name), [a_group(0), a_group(1, (0.0, 1.0, 1.0))]
    items = items_of(built, groups, render)
    whole = await backend.step_gradient(items, built)
    assert relative_difference(whole, await backend.step_gradient(items, built, budget=12)) < 1e-12
    assert not any("/99" in row.id for item in items for row in item)


@pytest.mark.parametrize("name", sorted({*POLICY} - {"ppo"}))
async def test_own_samples_have_sampler_logprobs_so_no_pass_of_the_policy_is_needed(name, render):
    backend, built, group = BigramBackend(260), algorithm(name), a_group(0)
    credited = await credit_step(backend, built, items_of(built, [group], render), 1000, {})
    assert "policy" not in backend.passes
    sampled = [row.streams["sampler_logprob"][row.mask].tolist() for item in credited for row in item]
    drawn = [answer.generation.logprobs for answer in group if not answer.greedy]
    assert sampled == [pytest.approx(each) for each in drawn]


async def test_recorded_rows_without_them_get_those_of_the_policy_before_the_step(rows_of):
    backend = BigramBackend(260)
    credited = await credit_step(backend, algorithm("grpo"), rows_of("grpo", 2, 0), 100_000, {})
    assert backend.passes == ["policy"]
    (outputs,) = backend.logprobs([collate(credited)]).value
    recorded = np.concatenate([row.streams["sampler_logprob"] for item in credited for row in item])
    np.testing.assert_allclose(recorded, outputs.logprob, rtol=1e-6)


async def test_a_correction_compares_with_a_pass_of_the_trainer(render):
    backend, built = BigramBackend(260), algorithm("grpo", correction="truncated")
    credited = await credit_step(backend, built, items_of(built, [a_group(0)], render), 1000, {})
    assert backend.passes == ["policy"]
    assert {"policy_logprob", "sampler_logprob"} <= credited[0][0].streams.keys()


def in_rows(answer, cuts):
    """The same response as turns whose prompts do not continue each other, with the same sampled tokens.

    The model reads one token back, so a new prompt that ends with the same token is the same context.
    """
    (whole,) = answer.turns
    tokens, logprobs, reason = whole.generation[:3]
    turns = []
    for start, end in pairwise([0, *cuts, len(tokens)]):
        prompt = (9, 9, tokens[start - 1]) if start else whole.prompt_ids
        turns.append(Turn(prompt, Generation(tokens[start:end], logprobs[start:end], reason)))
    return replace(answer, turns=tuple(turns))


def in_two_rows(answer):
    return in_rows(answer, [len(answer.generation.token_ids) // 2])


@pytest.mark.parametrize("name", POLICY)
async def test_a_rollout_that_became_several_rows_counts_once(name, render):
    backend, built, group = BigramBackend(260), algorithm(name), a_group(0)
    split = (group[0], in_two_rows(group[1]), in_rows(group[2], [2, 3, 6]), group[3])
    items, items_split = items_of(built, [group], render), items_of(built, [split], render)
    assert (len(items[0]), len(items_split[0])) == (3, 7)
    whole, parts = await backend.step_gradient(items, built), await backend.step_gradient(items_split, built)
    assert relative_difference(whole, parts) < 1e-6  # recorded log-probs are float32
    credited = await credit_step(backend, built, items_split, 1000, {})
    assert count_units(credited)["sequence"] == 3


@pytest.mark.parametrize("name", sorted({*POLICY} - {"opd", "ppo", "rlhf", "rlaif"}))
async def test_equal_rewards_have_no_gradient(name, render):
    backend, built = BigramBackend(260), algorithm(name)
    gradient = await backend.step_gradient(items_of(built, [a_group(0, (0.5, 0.5, 0.5))], render), built)
    if name == "reinforce_pp":  # equal rewards have equal returns
        assert float(gradient["table"].norm()) < 1e-6
    else:
        assert not gradient["table"].any()


async def advantages_of(name, group, render, **parameters):
    built = algorithm(name, **parameters)
    credited = await credit_step(BigramBackend(260), built, items_of(built, [group], render), 1000, {})
    return [[row.streams["advantage"][row.mask].tolist() for row in item] for item in credited]


async def test_remax_compares_each_rollout_with_the_greedy_one(render):
    found = await advantages_of("remax", a_group(0), render)
    assert found == [[[0.5] * 2], [[-0.5] * 5], [[-0.25] * 8]]
    with pytest.raises(ValueError, match="no graded greedy"):
        algorithm("remax").online.items(a_group(0)[:3], render)


async def test_the_baseline_of_reinforce_is_the_step_the_group_or_none(render):
    groups = [a_group(0, (1.0, 0.0)), a_group(1, (1.0, 1.0))]
    expected = {"step": [0.25, -0.75, 0.25, 0.25], "group": [0.5, -0.5, 0.0, 0.0], "none": [1.0, 0.0, 1.0, 1.0]}
    for baseline, values in expected.items():
        built = algorithm("reinforce", baseline=baseline)
        credited = await credit_step(BigramBackend(260), built, items_of(built, groups, render), 1000, {})
        assert [float(item[0].streams["advantage"][-1]) for item in credited] == values


async def test_group_credit_is_over_rollouts_and_on_all_of_their_tokens(render):
    group = a_group(0, (1.0, 0.0, 0.5))
    found = await advantages_of("dr_grpo", (group[0], in_two_rows(group[1]), in_two_rows(group[2])), render)
    assert found == [[[0.5] * 2], [[-0.5] * 2, [-0.5] * 3], [[0.0] * 4, [0.0] * 4]]


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp"])
async def test_the_kl_can_be_part_of_the_reward(name, render):
    """RLOO: summed over the response; REINFORCE++: per token, which reaches the tokens before it."""
    built = algorithm(name, kl_in_reward=0.5)
    assert built.needs == ("sampler", "ref")
    groups = [a_group(0), a_group(1)]
    credited = await credit_step(BigramBackend(320), built, items_of(built, groups, render), 10_000, {})
    rows = [row for item in credited for row in item]
    gaps = [(r.streams["sampler_logprob"] - r.streams["ref_logprob"])[r.mask].astype(float) for r in rows]
    if name == "rloo":
        shaped = np.array([row.scalars["reward"] - 0.5 * gap.sum() for row, gap in zip(rows, gaps, strict=True)])
        by_group = shaped.reshape(2, 3)
        expected = (by_group - (by_group.sum(1, keepdims=True) - by_group) / 2).reshape(-1)
        found = [row.streams["advantage"][row.mask][0] for row in rows]
    else:
        returns = []
        for row, gap in zip(rows, gaps, strict=True):
            earned = -0.5 * gap
            earned[-1] += row.scalars["reward"]
            returns.append(earned[::-1].cumsum()[::-1])
        every = np.concatenate(returns)
        expected = (every - every.mean()) / every.std(ddof=1)
        found = np.concatenate([row.streams["advantage"][row.mask] for row in rows])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


async def test_penalties_for_length_are_part_of_the_reward(render):
    group = a_group(0, (1.0, 1.0, 0.0))  # 2, 5 and 8 tokens
    overlong = await advantages_of("dr_grpo", group, render, overlong_buffer=4, max_length=8)
    np.testing.assert_allclose([a[0][0] for a in overlong], np.array([1, 0.75, -1]) - 0.25, rtol=1e-6)
    small = a_group(0, (0.05, 0.0))  # any reward above 0 is correct: 1/2 for the short one, -1/2 for the other
    found = await advantages_of("dr_grpo", small, render, length_penalty=1.0)
    np.testing.assert_allclose([a[0][0] for a in found], [0.525, -0.525], rtol=1e-6)
    short = await advantages_of("dr_grpo", group, render, length_penalty=0.5)
    np.testing.assert_allclose([a[0][0] for a in short], np.array([1.25, 1.0, -0.25]) - 2 / 3, rtol=1e-6)
    with pytest.raises(ValueError, match="buffer"):
        algorithm("grpo", overlong_buffer=9, max_length=8)


@pytest.mark.parametrize("split", [False, True])
async def test_intermediate_rewards_reach_the_tokens_before_them_and_no_later_ones(split, render):
    answer = in_two_rows(rollout(0, turn([1, 5], 4)))
    per_token = (0.0, 1.0, 0.0, 2.0)
    if not split:
        first, second = answer.turns
        prompt = (*first.prompt_ids, *first.generation.token_ids)
        answer = replace(answer, turns=(first, second._replace(prompt_ids=prompt)))
    answer = replace(answer, score=Score(3.0, per_token=per_token))
    other = replace(rollout(1, turn([1, 5], 2)), score=Score(0.0))
    found = await advantages_of("reinforce_pp", (answer, other), render)
    returns = np.array([3.0, 3.0, 2.0, 2.0, 0.0, 0.0])
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    np.testing.assert_allclose([x for rows in found for row in rows for x in row], expected, rtol=1e-5)


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_ppo_bootstraps_from_the_value_only_for_a_truncated_response(reason, render):
    backend, built = BigramBackend(260), algorithm("ppo", lam=0.5)
    answer = in_two_rows(rollout(0, turn([1, 5], 4, reason), reward=1.0))
    (rows,) = await credit_step(backend, built, items_of(built, [(answer,)], render), 1000, {})
    tokens = [5, *(t for turn in answer.turns for t in turn.generation.token_ids)]
    values = backend.models["policy"].weights["value"].detach().numpy()[tokens]
    after, expected = 0.0, []
    for t in (3, 2, 1, 0):
        following = values[t + 1] if t < 3 or reason == "length" else 0.0
        after = (1.0 if t == 3 else 0.0) + following - values[t] + 0.5 * after
        expected.insert(0, after)
    found = np.concatenate([row.streams["advantage"][row.mask] for row in rows])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    returned = np.concatenate([row.streams["return"][row.mask] for row in rows])
    np.testing.assert_allclose(returned, np.array(expected) + values[:4], rtol=1e-5)


def test_pairs_are_the_best_and_the_worst_response(render):
    built, groups = algorithm("online_dpo"), [a_group(0, (0.5, 0.0, 1.0)), a_group(1, (1.0, 1.0, 1.0))]
    ((chosen, rejected),) = built.arrange(items_of(built, groups, render))
    assert (chosen.id, rejected.id) == ("rows:0#0/2", "rows:0#0/1")
    group = a_group(0)
    with pytest.raises(ValueError, match="2 rows"):
        built.online.items((group[0], in_two_rows(group[1])), render)


def test_spin_prefers_the_data_to_the_policys_own_response(render):
    built, group = algorithm("spin"), [replace(answer, score=None) for answer in a_group(0)[:2]]
    pairs = built.online.items(group, render)
    assert [rejected.id for _, rejected in pairs] == [answer.id for answer in group]
    for (chosen, rejected), answer in zip(pairs, group, strict=True):
        assert rejected.tokens[rejected.mask].tolist() == list(answer.generation.token_ids)
        (expected,) = render.conversation(PROMPT, id="x", first_trained=len(PROMPT) - 1)
        assert chosen.scalars == {"score": 0.0, "margin": 0.0}
        assert (chosen.tokens == expected.tokens).all() and (chosen.mask == expected.mask).all()
        assert chosen.scalars.keys() == rejected.scalars.keys() and chosen.streams.keys() == rejected.streams.keys()
    by_answer = replace(group[0], sample=Sample("x", messages=PROMPT[:-1], answer="4"))
    ((chosen, _),) = built.online.items([by_answer], render)
    assert (chosen.tokens == expected.tokens).all()
    with pytest.raises(ValueError, match="needs a reference response"):
        built.online.items([replace(group[0], sample=Sample("x", messages=PROMPT[:-1]))], render)


def test_rejection_sampling_trains_on_rollouts_at_or_above_the_threshold(render):
    built = algorithm("rft", threshold=0.25)
    assert [row.id for (row,) in built.online.items(a_group(0), render)] == ["rows:0#0/0", "rows:0#0/2"]
    assert algorithm("rft").online.items(a_group(0, (0.0, 0.5)), render) == []


async def test_distillation_needs_no_rewards(render):
    built, group = algorithm("opd"), [replace(answer, score=None) for answer in a_group(0)[:2]]
    gradient = await BigramBackend(260).step_gradient(items_of(built, [group], render), built)
    assert gradient["table"].any()


async def test_the_largest_gap_between_sampler_and_trainer_is_reported(render):
    for name in ("grpo", "ppo", "opd"):
        backend, built = BigramBackend(260), algorithm(name)
        credited = await credit_step(backend, built, items_of(built, [a_group(0)], render), 1000, {})
        batch = collate(credited)
        outputs = backend.models["policy"].outputs(batch, built.reads, backend.models)
        total, unit = built.loss(outputs, batch).metrics["logprob_gap"]
        gaps = (outputs.logprob.detach() - batch.streams["sampler_logprob"]).abs()[batch.mask]
        assert unit == "largest" and math.isclose(float(total), float(gaps.max()), rel_tol=1e-6)
        assert not total.requires_grad


async def test_the_exact_kl_is_over_the_whole_vocabulary(render):
    backend, built = BigramBackend(260), algorithm("sgrpo", kl_coef=0.3, kl_estimator="full")
    assert built.needs == ("sampler",) and built.others == {"ref"}
    credited = await credit_step(backend, built, items_of(built, [a_group(0)], render), 1000, {})
    batch = collate(credited)
    outputs = backend.models["policy"].outputs(batch, built.reads, backend.models)
    before = batch.tokens.roll(1)[batch.mask]
    policy, ref = (backend.models[m].weights["table"][before].log_softmax(-1) for m in ("policy", "ref"))
    expected = 0.3 * (policy.exp() * (policy - ref)).sum()
    torch.testing.assert_close(built.loss(outputs, batch).terms["kl"].total, expected)


async def test_a_recorded_reward_is_on_the_last_token(rows_of):
    items = rows_of("reinforce_pp", 1, 0)  # rewards 1, 0, 0, 1
    credited = await credit_step(BigramBackend(260), algorithm("reinforce_pp", gamma=0.5), items, 1000, {})
    lengths = [int(row.mask.sum()) for row in items[0]]
    returns = np.concatenate([r * 0.5 ** np.arange(n)[::-1] for r, n in zip((1, 0, 0, 1), lengths, strict=True)])
    found = np.concatenate([item[0].streams["advantage"][item[0].mask] for item in credited])
    np.testing.assert_allclose(found, (returns - returns.mean()) / returns.std(ddof=1), rtol=1e-5)


def test_options_are_off_by_default():
    of_groups = {"overlong_buffer": 0, "max_length": 1024, "length_penalty": 0.0, "kl_coef": 0.0, "entropy_coef": 0.0}
    assert of_groups.items() <= algorithm("grpo").parameters.items()
    of_ppo = {"gamma": 1.0, "lam": 0.95, "kl_in_reward": 0.0, "value_coef": 0.1, "value_clip": 0.2}
    assert of_ppo.items() <= algorithm("ppo").parameters.items()

"""Every online algorithm on `tiny`: what it optimizes, rises."""

import pytest

from oxrl.algorithms import ALGORITHMS, algorithm
from oxrl.rollouts.filters import check_reward_nonzero_std
from oxrl.types import Sample
from tests.loops.test_online import FAST, SAMPLES, Setting, small_letters

ONLINE = [name for name in ALGORITHMS if algorithm(name).online is not None]
TESTED_ELSEWHERE = {"grpo", "ppo", "rloo", "dapo", "cispo", "gspo"}  # to above nine tenths, in test_online
UNGRADED = {"spin", "opd"}
GRADED_BY_MODELS = {"rlhf", "rlaif"}  # in test_graders
PARAMETERS = {"rft": {"threshold": 0.25}, "online_dpo": {"beta": 0.02}, "dapo_pairs": {"beta": 0.02}}


def first_and_last_share(setting, manager=None, steps=7):
    """The share of small letters in the samples of the first step and of the last."""
    shares = []

    def observe(step, groups):
        sampled = [small_letters(rollout) for group in groups for rollout in group if not rollout.greedy]
        shares.append(sum(sampled) / len(sampled))

    setting.run(steps, manager, observe=observe)
    return shares[0], shares[-1]


def test_the_matrix_has_every_name():
    expected = {
        "grpo", "sgrpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rloo", "reinforce", "reinforce_pp", "remax",
        "max_rl", "ppo", "rlhf", "rlaif", "online_dpo", "spin", "opd", "dapo_pairs", "rft",
    }  # fmt: skip
    assert set(ONLINE) == expected


@pytest.mark.trains
@pytest.mark.parametrize("name", sorted(set(ONLINE) - TESTED_ELSEWHERE - UNGRADED - GRADED_BY_MODELS))
def test_it_raises_the_reward(name):
    setting = Setting(name, lr=FAST, **PARAMETERS.get(name, {}))
    keep = {"filter_fn": check_reward_nonzero_std} if setting.algorithm.online.needs_variance else {}
    first, last = first_and_last_share(setting, setting.manager(**keep))
    assert first < 0.15
    assert last > first + 0.3


@pytest.mark.trains
def test_spin_moves_towards_the_replies_of_the_data():
    samples = [Sample(sample.id, sample.messages, answer="abcabc") for sample in SAMPLES]
    setting = Setting("spin", lr=FAST)
    manager = setting.manager(samples, reward_fn=None, n_samples_per_prompt=2)
    first, last = first_and_last_share(setting, manager, steps=5)
    assert last > first + 0.3


@pytest.mark.trains
def test_opd_moves_towards_its_teacher():
    taught = Setting("grpo", lr=FAST)
    taught.run(8)
    setting = Setting("opd", lr=FAST)
    setting.backend.others["teacher"].model.load_state_dict(taught.model.state_dict())
    first, last = first_and_last_share(setting, setting.manager(reward_fn=None))
    assert last > first + 0.3


@pytest.mark.trains
def test_a_reference_that_follows_pulls_less():
    """The KL to a copy of the policy is 0; to the initial policy it grows."""
    kls = {}
    for follows in (False, True):
        setting = Setting("grpo", kl_coef=0.05, lr=FAST)

        async def move(step, setting=setting, follows=follows):
            if follows:
                await setting.backend.update_reference(0.0)

        kls[follows] = [line["kl"] for line in setting.run(3, move_reference=move)]
    assert kls[True][-1] < 0.2 * kls[False][-1]
    assert kls[True][0] == pytest.approx(0, abs=1e-6) == kls[False][0]


def test_an_algorithm_for_files_is_refused():
    setting = Setting("grpo")
    with pytest.raises(ValueError, match="sft learns from files"):
        setting.run(1, algorithm=algorithm("sft"))

"""Steps that taught nothing, each for another reason, made by real runs on `tiny`."""

from dataclasses import replace

import pytest

from oxrl.diagnose.explain import explain, reasons_of
from oxrl.rollouts.filters import check_reward_nonzero_std
from oxrl.tracking.step_files import read_step
from tests.loops.test_online import Setting, small_letters
from tests.loops.test_step_record import recorded


def by_index(rollout):
    return float(rollout.index)


def no_advantage(items, memory):
    """A custom credit assignment that loses the rewards."""
    return [
        tuple(replace(row, streams={**row.streams, "advantage": 0 * row.streams["reward"]}) for row in item)
        for item in items
    ]


REWARDS = {
    "equal rewards": lambda rollout: 0.5,
    "all truncated": lambda rollout: float(rollout.status.value != "truncated"),
}


def case(name, folder):
    """Train one step that teaches nothing."""
    parameters = {"mask empty": {"threshold": 99.0}, "all clipped": {"correction": "masked"}}.get(name, {})
    setting = Setting("rft" if name == "mask empty" else "grpo", lr=0.0 if "rate" in name else 1e-2, **parameters)
    if name == "advantage zero":
        setting.algorithm = replace(setting.algorithm, credit=no_advantage)
    if name == "equal rewards":  # answers that end
        setting.sampler.sampling = setting.sampler.sampling._replace(stop_token_ids=tuple(range(319)))
    if name == "all clipped":  # the trainer has none of the sampler's probabilities
        setting.sampler.sampling = setting.sampler.sampling._replace(temperature=0.02)
    manager = setting.manager(batch_size=2, n_samples_per_prompt=4, reward_fn=REWARDS.get(name, by_index))
    recorded(setting, folder, 1, manager, config={"max_logprob_gap": 99.0})


REASONS = ("equal rewards", "all clipped", "mask empty", "advantage zero", "learning rate zero", "all truncated")


@pytest.mark.parametrize("name", REASONS)
def test_a_step_that_taught_nothing_says_why(name, tmp_path):
    case(name, tmp_path)
    found = explain(tmp_path, 1)
    assert found.learned == "nothing"
    assert [reason.name for reason in found.reasons] == [name]
    assert "step 1 taught nothing" in str(found) and found.reasons[0].remedy in str(found)


def test_a_step_that_taught_something_gives_each_token_its_share(tmp_path):
    setting = Setting(lr=1e-2)
    recorded(setting, tmp_path, 1, setting.manager(batch_size=2, n_samples_per_prompt=4, reward_fn=by_index))
    found = explain(tmp_path, 1, group=0, answer=3)
    assert found.learned == "something" and not found.reasons
    assert {token.trained for token in found.tokens} == {True, False}
    everything = [explain(tmp_path, 1, group=group, answer=answer) for group in range(2) for answer in range(4)]
    shares = [token.share for each in everything for token in each.tokens if token.share is not None]
    assert sum(shares) == pytest.approx(1.0)
    trained = [token for token in found.tokens if token.trained]
    assert all(token.ratio == pytest.approx(1.0, abs=1e-5) and token.advantage > 0 for token in trained)
    assert "share: |d loss / d log p|" in str(found)
    many = found._replace(summary={"tokens": 123456, "lr": 1e-5, "reward": None})
    assert "  tokens 123456  lr 1e-05\n" in str(many), "counts in full"


def test_equal_rewards_of_answers_of_which_some_are_cut_off_are_not_due_to_that(tmp_path):
    case("all truncated", tmp_path)
    record = read_step(tmp_path, 1)
    assert record.step["metrics"]["truncated"] == 1.0
    partly = record._replace(step={**record.step, "metrics": {**record.step["metrics"], "truncated": 0.5}})
    assert [reason.name for reason in reasons_of(partly)] == ["equal rewards"]


def test_groups_that_a_filter_left_out_are_no_reason(tmp_path):
    setting = Setting(lr=1e-2)
    manager = setting.manager(
        batch_size=2,
        n_samples_per_prompt=2,
        reward_fn=lambda rollout: float(rollout.index) if rollout.group % 3 == 2 else 0.5,
        filter_fn=check_reward_nonzero_std,
    )
    (record,) = recorded(setting, tmp_path, 1, manager)
    assert [bool(group["left_out"]) for group in record.step["groups"]].count(True) >= 2
    assert explain(tmp_path, 1).learned == "something"


def some_reward(rollout):
    """Different rewards in one group of three only."""
    return float(rollout.index) if rollout.group == 1 else 0.5


def test_a_step_that_taught_little_says_why(tmp_path):
    setting = Setting(lr=1e-2)
    manager = setting.manager(batch_size=3, n_samples_per_prompt=2, reward_fn=some_reward)
    (record,) = recorded(setting, tmp_path, 1, manager)
    found = explain(tmp_path, 1)
    assert found.learned == "little"
    assert [str(reason).partition(";")[0] for reason in found.reasons] == [
        "most rewards equal: in 2 of 3 groups all answers have the same reward"
    ]
    totals = record.step["totals"]
    for share, names in ((0.4, []), (0.6, ["most clipped"]), (1.0, ["all clipped"])):
        clipped = {**totals, "with_advantage": 10, "clipped": int(10 * share)}
        groups = [{**group, "std": 1.0} for group in record.step["groups"]]
        of_share = record._replace(step={**record.step, "totals": clipped, "groups": groups})
        assert [reason.name for reason in reasons_of(of_share)] == names


def test_a_gradient_of_zero_for_another_reason_is_named_and_that_weights_moved_though(tmp_path):
    setting = Setting(lr=1e-2)
    manager = setting.manager(batch_size=2, n_samples_per_prompt=2, reward_fn=by_index)
    (record,) = recorded(setting, tmp_path, 1, manager)
    metrics, digests = record.step["metrics"], record.step["digests"]
    still = {**digests, "weights": digests["weights_before"]}
    for weights, moved in ((still, 0), (digests, 1)):
        without = record._replace(step={**record.step, "metrics": {**metrics, "grad_norm": 0.0}, "digests": weights})
        (reason,) = reasons_of(without)
        assert reason.name == "gradient zero" and reason.what.count("weights moved anyway") == moved


def test_without_a_group_those_that_are_recorded_are_named_and_of_a_group_the_answer_with_most_gradient(tmp_path):
    setting = Setting(lr=1e-2)

    def only_the_last(rollout):
        return float(rollout.index == 3)

    manager = setting.manager(batch_size=2, n_samples_per_prompt=4, reward_fn=only_the_last)
    recorded(setting, tmp_path, 1, manager)
    found = explain(tmp_path, 1)
    assert not found.tokens and "--group and --answer, recorded are 0 (0 to 3), 1 (0 to 3)" in str(found)
    largest = explain(tmp_path, 1, group=1)
    assert largest.answer.startswith("group 1, answer 3 (s") and largest.answer.endswith("reward 1.0")
    ids = read_step(tmp_path, 1).answers[7]["tokens"]["ids"]
    assert [token.id for token in largest.tokens] == ids and f"{ids[-1]:>6}  " in str(largest).splitlines()[-2]


def test_an_answer_that_is_not_recorded_names_those_that_are(tmp_path):
    setting = Setting()
    recorded(setting, tmp_path, 1, setting.manager(batch_size=1, n_samples_per_prompt=2, reward_fn=small_letters))
    with pytest.raises(ValueError, match="no record of group 9; recorded groups: 0"):
        explain(tmp_path, 1, group=9)
    with pytest.raises(ValueError, match="no record of answer 7; recorded groups: 0"):
        explain(tmp_path, 1, answer=7)
    with pytest.raises(ValueError, match="there is no folder .*: pass the folder that `oxrl train` wrote"):
        explain(tmp_path / "nowhere", 1)
    with pytest.raises(ValueError, match="no record of step 2"):
        explain(tmp_path, 2)


def test_the_stage_that_was_started_last_is_explained(tmp_path):
    (tmp_path / "stages.yaml").touch()
    recorded(Setting("grpo"), tmp_path / "sft")
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "config.yaml").touch()
    with pytest.raises(ValueError, match="/rl"):
        explain(tmp_path, 1)

"""Steps that taught nothing, each for another reason, made by real runs on `tiny`."""

from dataclasses import replace

import pytest

from oxrl.diagnose.explain import explain
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

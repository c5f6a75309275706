"""`oxrl env try` plays episodes with the model of a config and prints them."""

import json

import pytest
from typer.testing import CliRunner

from oxrl.cli import app


def test_episodes_are_played_with_the_model_and_printed(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {name: tiny}\ntrain: {alg_name: grpo}\n"
        "rollout: {env: 'reasoning_gym:leg_counting', max_tokens: 4}\ndata: {env_rows: 4}\n"
    )
    asked = ["env", "try", str(config), "--episodes", "2"]
    played = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert len(played) == 2 and all(each["sampled_tokens"] == 4 and each["reward"] is not None for each in played)
    assert played[0]["messages"][0]["role"] == "user" and played[0]["messages"][1]["role"] == "assistant"
    text = CliRunner().invoke(app, asked).stdout
    assert f"{played[0]['id']}: 1 turns, 4 sampled" in text and "reward 0" in text
    refused = CliRunner().invoke(app, [*asked, "--set", "rollout.env=gym:"])
    assert refused.exit_code == 2


def test_pictures_are_named_where_they_stand(tmp_path):
    pytest.importorskip("gymnasium")
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {name: tiny-vlm}\ntrain: {alg_name: grpo}\n"
        "rollout: {env: 'gym:oxrl/Reach-v0', env_args: {size: 28, actions: {low: [-1, -1], high: [1, 1], bins: 4}}, "
        "max_tokens: 3, max_turns: 1}\ndata: {env_rows: 4}\n"
    )
    text = CliRunner().invoke(app, ["env", "try", str(config), "--episodes", "1"]).stdout
    assert "  user: '[image]reach the" in text


def test_a_trial_without_a_graded_episode_fails(tmp_path):
    pytest.importorskip("gymnasium")
    (tmp_path / "locked.py").write_text(
        "from tests.rollouts.example_environments import Vowels\n"
        "class Locked(Vowels):\n    def reset(self, **given):\n        raise KeyError('door')\n"
    )
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {name: tiny}\ntrain: {alg_name: grpo}\ndata: {env_rows: 2}\n"
        f"rollout: {{env: 'gym:{tmp_path / 'locked.py'}:Locked', max_tokens: 4}}\n"
    )
    found = CliRunner().invoke(app, ["env", "try", str(config), "--episodes", "1"])
    assert found.exit_code == 1 and "no episode was graded" in found.output and "KeyError: 'door'" in found.output


def test_an_interrupted_recording_says_that_nothing_was_recorded(tmp_path):
    pytest.importorskip("gymnasium")
    (tmp_path / "stopped.py").write_text("def expert(env):\n    raise KeyboardInterrupt\n")
    config = tmp_path / "config.yaml"
    config.write_text("model: {name: tiny}\nrollout: {env: 'gym:oxrl/Reach-v0'}\n")
    asked = [
        "env",
        "record",
        str(config),
        "--output",
        str(tmp_path / "out"),
        "--expert",
        f"{tmp_path}/stopped.py:expert",
    ]
    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 130 and "interrupted; nothing was recorded" in found.output
    assert not (tmp_path / "out").exists()

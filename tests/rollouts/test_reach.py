"""The reaching environment: its scenes, its expert, what ends an episode, and what a split keeps apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env  # noqa: E402

from oxrl.rollouts.environments.reach import COLORS, Reach, kept_area  # noqa: E402


def played(env: Any, seed: int, policy: Any = None) -> tuple[float, int]:
    """The return of an episode and its steps, by default with the expert."""
    env.reset(seed=seed)
    total = 0.0
    for step in range(1, 100):
        action = policy() if policy else env.unwrapped.expert()
        _, reward, terminated, truncated, info = env.step(action)
        total += reward
        if terminated or truncated:
            assert info["is_success"] == (total > 0)
            return total, step
    raise AssertionError("the episode did not end")


@pytest.mark.parametrize("squares", [1, 2, 3, 4])
@pytest.mark.parametrize("split", ["all", "train", "held_out"])
def test_the_expert_reaches_the_square_in_every_scene(squares, split):
    env = gymnasium.make("oxrl/Reach-v0", squares=squares, split=split)
    episodes = [played(env, seed) for seed in range(30)]
    assert all(total == 1.0 for total, _ in episodes)
    assert max(steps for _, steps in episodes) <= 6


def test_random_actions_seldom_succeed_and_end_after_ten_steps():
    env, random = gymnasium.make("oxrl/Reach-v0"), np.random.default_rng(0)
    episodes = [played(env, seed, lambda: random.uniform(-1, 1, 2)) for seed in range(200)]
    assert np.mean([total for total, _ in episodes]) < 0.2
    assert max(steps for _, steps in episodes) == 10


def test_another_square_ends_the_episode_without_a_reward():
    env = Reach()
    for seed in range(10):
        env.reset(seed=seed)
        terminated = False
        while not terminated:
            way = (env.places[1] - env.dot) / 0.15
            _, reward, terminated, _, info = env.step(way / max(1, abs(way).max()))
        assert (reward, info["is_success"]) == (0.0, False)


def test_a_seed_determines_the_scene_and_the_picture_shows_it():
    first, again, other = (Reach().reset(seed=seed)[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first["image"], again["image"])
    assert first["instruction"] == again["instruction"]
    assert (first["image"] != other["image"]).any()
    env = Reach()
    image = env.reset(seed=3)[0]["image"]
    for place, color in zip(env.places, env.shown, strict=True):
        x, y = (place * 56).astype(int)
        assert tuple(image[y, x]) == COLORS[color] or np.abs(place - env.dot).max() < 0.08
    env.step([1.0, 0.0])
    moved = env.step([0.0, 0.0])[0]["image"]
    assert (moved != image).any()


def test_it_keeps_the_contract_of_gymnasium():
    check_env(Reach())
    assert Reach().reset(seed=0)[0]["image"].shape == (56, 56, 3)


def test_a_split_keeps_colors_and_areas_apart():
    colors = ("red", "green", "blue", "yellow")
    for seed in range(40):
        train, held_out = Reach(colors=colors, split="train"), Reach(colors=colors, split="held_out")
        train.reset(seed=seed), held_out.reset(seed=seed)
        assert all(
            kept_area(place) != colors.index(color) for place, color in zip(train.places, train.shown, strict=True)
        )
        assert kept_area(held_out.places[0]) == colors.index(held_out.shown[0])


def test_a_centered_picture_moves_with_the_dot_and_shows_every_square():
    env = Reach(size=63, squares=2, centered=True)
    for seed in range(20):
        env.reset(seed=seed)
        for _ in range(2):
            picture = env._observation()["image"]
            assert tuple(picture[31, 31]) == (255, 255, 255), "the dot is in the middle"
            for place, color in zip(env.places, env.shown, strict=True):
                column, row = np.floor(63 * (0.5 + (place - env.dot) / 1.8)).astype(int)
                assert tuple(picture[row, column]) == COLORS[color]
            env.step(env.expert() / 4)


def test_an_instruction_has_the_color_in_any_words():
    env = Reach(instruction="{color}, please")
    env.reset(seed=0)
    assert env.instruction == f"{env.shown[0]}, please"


def test_targets_are_the_colors_that_are_named():
    env = Reach(targets=["red"], squares=3)
    seen = set()
    for seed in range(20):
        assert env.reset(seed=seed)[0]["instruction"] == "reach the red square"
        seen |= set(env.shown)
    assert seen == {"red", "green", "blue", "yellow"}


def test_exchanged_instructions_name_the_right_square_by_chance():
    env = Reach(exchanged=True, squares=2)
    right = []
    for seed in range(200):
        named = env.reset(seed=seed)[0]["instruction"].split()[2]
        assert named in env.shown
        right.append(named == env.shown[0])
    assert 0.4 < np.mean(right) < 0.6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"colors": ["red", "grene"]}, "'grene'; did you mean green"),
        ({"colors": ["red", "red"]}, "a color twice"),
        ({"targets": ["pink"]}, "not in colors"),
        ({"squares": 5}, "squares is 5"),
        ({"squares": 3, "colors": ["red", "blue"]}, "squares is 3"),
        ({"size": 8}, "size is 8"),
        ({"split": "test"}, "split is 'test'"),
        ({"instruction": "go to {place}"}, "give a text with {color}"),
    ],
)
def test_wrong_arguments_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        Reach(**given)


def test_an_action_that_is_not_finite_is_refused():
    env = Reach()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="not finite"):
        env.step([float("nan"), 0.0])

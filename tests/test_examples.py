"""Every example runs, is short, and the number that it prints shows its effect."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

import oxrl

EXAMPLES = Path(__file__).parents[1] / "examples"
BIG = {"demo.py", "sft_orders.py", "see_shapes.py", "act_from_pixels.py"}  # these train for minutes
SMALL = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in BIG)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """What an example prints when it is run from an empty folder, as lines."""

    def run(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def before_and_after(line):
    return [float(number) for number in re.findall(r"(?:before|after) (\d+\.\d+)", line)]


@pytest.mark.parametrize("name", SMALL)
def test_an_example_fits_on_a_page_and_shows_how_to_run_it(name):
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < 50
    assert f"python examples/{name}" in text


@pytest.mark.trains
def test_the_quick_start_has_at_most_48_lines_and_learns_capital_letters(run):
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 48
    *_, last = run("quickstart.py", "--steps", "10")
    before, after = before_and_after(last)
    assert before < 0.25 and after > 0.4


@pytest.mark.trains
def test_the_plain_loop_learns(run):
    before, after = before_and_after(run("grpo_loop.py", "--steps", "10")[-1])
    assert before < 0.25 and after > 0.4


@pytest.mark.trains
def test_held_out_pictures_are_described_and_with_exchanged_pictures_nothing_is_learned(run):
    lines = run("see_shapes.py", "--steps", "160")
    right = {line.partition(":")[0]: float(re.search(r"right (\d\.\d+)", line)[1]) for line in lines if "right" in line}
    assert right["before"] < 0.1
    assert right["after supervised training"] > 0.9
    assert right["after the same with exchanged pictures"] < 0.25


@pytest.mark.trains
@pytest.mark.parametrize(
    ("environment", "kinds", "width"),
    [("reach", ["held-out seeds", "held-out positions", "control"], 170),
     ("babyai", ["held-out seeds", "held-out names", "control"], 182)],
)  # fmt: skip
def test_a_model_that_acts_is_trained_in_two_stages_and_an_episode_is_drawn(run, tmp_path, environment, kinds, width):
    """A hundredth of the steps: that it learns is measured in docs/environments.md."""
    pytest.importorskip("minigrid" if environment == "babyai" else "gymnasium")
    lines = run("act_from_pixels.py", "--environment", environment, "--scale", "0.01", "--output", "out")
    rates = {line.partition(":")[0]: re.findall(r"(held-out \w+|control) (\d\.\d+) \(", line) for line in lines}
    for stage in ("before", "after imitation", "after reinforcement learning"):
        assert [kind for kind, _ in rates[stage]] == kinds
        assert all(0 <= float(rate) <= 1 for _, rate in rates[stage])
    strip = Image.open(tmp_path / "out" / "episode.png")
    assert strip.width % width == 0 and strip.height == width + 26
    found = oxrl.evaluate(tmp_path / "out" / "imitation", tmp_path / "out" / "episodes", limit=4, against="tiny-vlm")
    trained, untrained = (each.measures["nll"].mean for each in found.results)
    assert trained < untrained, "rows of actions are evaluated with the actions of the run"


def test_the_folder_of_an_earlier_run_is_refused_before_anything_is_trained(run, tmp_path, capsys):
    pytest.importorskip("gymnasium")
    with pytest.raises(SystemExit, match="2"):
        run("act_from_pixels.py", "--output", str(tmp_path))
    assert "exists: give another folder (--output)" in capsys.readouterr().err


@pytest.fixture
def example():
    """The names of the example, and a function to a room of it after its reset, with the mission that is shown."""
    pytest.importorskip("minigrid")
    gymnasium = pytest.importorskip("gymnasium")
    names = runpy.run_path(str(EXAMPLES / "act_from_pixels.py"))
    name = names["TASKS"]["babyai"].env.rpartition(":")[2]

    def room(seed, **given):
        env = names["Objects"](gymnasium.make(name), **given)
        return env, env.reset(seed=seed)[0]["mission"]

    return SimpleNamespace(**names, room=room)


def test_missions_that_are_held_out_are_in_the_test_only_and_the_control_names_either_object(example):
    def missions(**given):
        rooms = [example.room(seed, **given) for seed in range(20)]
        return [(shown, env.unwrapped.mission.removeprefix("go to the ")) for env, shown in rooms]

    plain, held_out, exchanged = missions(), missions(held_out=True), missions(exchanged=True)
    assert all(shown == right for shown, right in plain + held_out)
    assert not {shown for shown, _ in plain} & set(example.HELD_OUT) and len({shown for shown, _ in plain}) > 4
    assert {shown for shown, _ in held_out} == set(example.HELD_OUT)
    assert 4 < sum(shown != right for shown, right in exchanged) < 16


@pytest.mark.parametrize("right", [True, False])
def test_an_episode_ends_at_the_first_object_and_only_the_named_one_is_a_success(example, right):
    env, shown = example.room(0)
    inner = env.unwrapped
    inner.agent_pos, inner.agent_dir = next(
        ((x - dx, y - dy), direction)
        for x in range(inner.width) for y in range(inner.height)
        for direction, (dx, dy) in enumerate([(1, 0), (0, 1), (-1, 0), (0, -1)])
        if (cell := inner.grid.get(x, y)) in env._objects() and (f"{cell.color} {cell.type}" == shown) == right
        and inner.grid.get(x - dx, y - dy) is None
    )  # fmt: skip
    turned, *_ = env.step(inner.actions.left)
    assert turned["mission"] == shown
    env.step(inner.actions.right)
    _, reward, ended, cut, _ = env.step(inner.actions.forward)
    assert (reward, ended, cut) == (float(right), True, False)


@pytest.mark.trains
def test_vector_rewards_raise_the_worse_part_and_do_not_lower_the_other(run):
    letters, variety, reward = map(before_and_after, run("vector_rewards.py", "--steps", "12")[-3:])
    assert letters[0] < 0.3 and letters[1] > 0.5
    assert variety[1] > variety[0] - 0.1
    assert reward[1] == pytest.approx((letters[1] * variety[1]) ** 0.5, abs=0.1) and reward[1] > reward[0] + 0.15


@pytest.mark.trains
def test_three_algorithms_in_turn_learn(run):
    phases = run("switch_algorithm.py", "--steps", "15")[-3:]
    assert [phase.split(":")[0] for phase in phases] == [
        "grpo {'kl_coef'",
        "grpo {'kl_coef'",
        "dapo_pairs {'beta'",
    ]
    rewards = [before_and_after(phase) for phase in phases]
    assert rewards[0][0] < 0.2 and rewards[-1][1] > 0.4
    assert max(rewards[-1]) > max(rewards[0])


@pytest.mark.trains
def test_the_tool_is_called_more_often(run):
    lines = run("tool_calls.py", "--steps", "12")
    before, after = before_and_after(lines[-1])
    assert before < 0.25 and after > 0.4
    assert any(line.startswith("tool: 'shelf ") for line in lines)


@pytest.mark.trains
def test_the_kl_to_the_moving_reference_is_smaller_than_to_the_start(run):
    *_, last = run("custom_kl.py", "--steps", "8")
    reward, near, far = (float(number) for number in re.findall(r"\d+\.\d+", last))
    assert reward > 0.3 and 0 < near < far


@pytest.mark.trains
def test_the_pipeline_saves_evaluates_and_plots(run, tmp_path):
    *_, last = run("custom_pipeline.py", "--steps", "10", "--output", "out")
    before, after = before_and_after(last)
    assert before < 0.25 and after > 0.4
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["curves.png", "step_0005", "step_0010"]


@pytest.mark.trains
def test_partial_rollouts_are_carried_over_and_completions_become_shorter(run):
    *_, last = run("async_rollouts.py", "--steps", "8")
    before, after = before_and_after(last)
    assert int(re.search(r"carried over (\d+)", last)[1]) > 5
    assert after < before / 2


@pytest.mark.trains
def test_an_agent_is_trained_through_the_endpoint(run):
    lines = run("agent_endpoint.py", "--steps", "6")
    before, after = before_and_after(lines[-1])
    assert all("turns 2" in line for line in lines[:-1])
    assert after > before + 0.15

"""Teach a model that reads images, from random weights, to act: by imitating an expert, then by reinforcement learning.

In the environment `reach` it moves a dot to the square whose colour the instruction names, by actions of two numbers;
in `babyai` (pip install -e '.[minigrid]') it walks to the object that the mission names, by words. All success rates
are of held-out episodes, with 95% intervals. In the control the instruction names either of the two squares or objects:
half of the success is chance. An episode is written as a strip of pictures. docs/environments.md has results.

python examples/act_from_pixels.py [--environment reach|babyai] [--seed 0] [--output runs/act_reach_0]
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from PIL import Image, ImageDraw

from oxrl import Trainer
from oxrl.config import check_config
from oxrl.data.media import load_image
from oxrl.evaluation.episodes import evaluate_episodes
from oxrl.run.record_expert import record_expert
from oxrl.types import Rollout

SCALE, MARGIN = 6, 14  # of the strip


class Task(NamedTuple):
    """An environment, and how long to train in it."""

    env: str
    env_args: Mapping[str, Any]
    tests: Mapping[str, Mapping[str, Any]]  # what is held out -> arguments of the environment
    max_turns: int
    episodes: int  # of the expert
    imitation: int  # steps
    rows: int  # of a step of imitation
    practice: int
    expert: str | None = None

    def sections(self, env_args: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        rollout = {"env": self.env, "env_args": {**self.env_args, **env_args}, "max_turns": self.max_turns}
        return {
            "model": {"name": "tiny-vlm", "freeze": "nothing"},
            "rollout": {**rollout, "max_tokens": 3, "n_samples": 8},
        }


class Objects(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Rooms with objects of different colours, in which the episode ends in front of the first one that is walked to.

    The reward of a success is 1: what BabyAI takes off for each step would be all that differs in groups that succeed.
    `held_out` rooms are those whose mission names an object of HELD_OUT. With `exchanged`, a control, the mission names
    any object of the room, whichever must be reached.
    """

    def __init__(self, env: Any, held_out: bool = False, exchanged: bool = False) -> None:
        super().__init__(env)
        self.held_out, self.exchanged, self.mission = held_out, exchanged, ""

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**given)
        while not self._fits():
            observation, info = self.env.reset()
        named = self.unwrapped.np_random.choice(self._objects()) if self.exchanged else None
        self.mission = f"{named.color} {named.type}" if named else self._words()
        return {**observation, "mission": self.mission}, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, ended, cut, info = self.env.step(action)
        env = self.unwrapped
        met = action == env.actions.forward and env.grid.get(*env.front_pos) in self._objects()
        return {**observation, "mission": self.mission}, float(reward > 0), ended or met, cut, info

    def _words(self) -> str:
        """The end of "go to the red ball"."""
        return " ".join(self.unwrapped.mission.split()[-2:])

    def _objects(self) -> list[Any]:
        return [cell for cell in self.unwrapped.grid.grid if cell is not None and cell.type in ("ball", "box", "key")]

    def _fits(self) -> bool:
        colors = [each.color for each in self._objects()]
        distinct = len(set(colors)) == len(colors) and set(colors) <= {"red", "green", "blue"}
        return distinct and (self._words() in HELD_OUT) == self.held_out


class Vivid(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Pictures with strong colours on grey, which is 0 in what the model gets: those of MiniGrid are pale."""

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        image = observation["image"].astype(np.float32)
        light = image.mean(axis=-1, keepdims=True)
        vivid = 128 + (light - 128) / 4 + 2 * (image - light)
        return {**observation, "image": vivid.clip(0, 255).astype(np.uint8)}


HELD_OUT = ("red key", "green ball", "blue box")  # named in the test only


def babyai(**given: bool) -> dict[str, Any]:
    """The wrappers of an environment of BabyAI."""
    picture = {"minigrid.wrappers:RGBImgPartialObsWrapper": {"tile_size": 6}}
    success = "oxrl.rollouts.environments.layouts:SuccessByReward"
    return {"wrappers": [picture, success, {f"{__file__}:Objects": given}, f"{__file__}:Vivid"]}


TASKS = {
    "reach": Task(
        "gym:oxrl/Reach-v0",
        {
            "size": 28, "centered": True, "colors": ["red", "green", "blue"], "split": "train",
            "instruction": "{color}",
            "actions": {"low": [-1, -1], "high": [1, 1], "bins": 8},
        },
        {"held-out seeds": {}, "held-out positions": {"split": "held_out"}, "control": {"exchanged": True}},
        max_turns=10, episodes=4000, imitation=220, rows=32, practice=60,
    ),
    "babyai": Task(
        "gym:minigrid:BabyAI-GoToLocalS5N2-v0",
        {
            **babyai(), "agent_view_size": 5, "show": ["image", "mission"],
            "actions": {"words": ["l", "r", "f"]},  # left, right, forward: one token each
        },
        {"held-out seeds": {}, "held-out names": babyai(held_out=True), "control": babyai(exchanged=True)},
        max_turns=8, episodes=6000, imitation=200, rows=64, practice=60,
        expert="oxrl.rollouts.environments.expert:babyai_bot",
    ),
}  # fmt: skip


def test(model: str | Path, name: str, task: Task, episodes: int) -> tuple[Rollout, ...]:
    """Print the success rates of a model; return its episodes with held-out seeds."""
    results, shown = {}, []
    for kind, env_args in task.tests.items():
        config = check_config({**task.sections(env_args), "train": {"alg_name": "grpo"}})
        results[kind] = evaluate_episodes(model, config, episodes=episodes).results[0]
        rate = results[kind].marks["success"].reward
        shown.append(f"{kind} {rate.mean:.2f} ({rate.low:.2f} to {rate.high:.2f})")
    print(f"{name}: {'; '.join(shown)}  [{time.process_time():.0f} s of CPU time]", flush=True)
    return results["held-out seeds"].rollouts


def draw_strip(rollout: Rollout, path: Path) -> None:
    """The pictures of an episode from left to right, with the instruction above and the action below each."""
    frames = [load_image(turn.media[0]) for turn in rollout.turns]
    width, height = (SCALE * size for size in frames[0].size)
    strip = Image.new("RGB", ((width + 2) * len(frames), height + 2 * MARGIN), "white")
    draw = ImageDraw.Draw(strip)
    ended = "success" if rollout.score is not None and rollout.score.parts.get("success") else "no success"
    draw.text((2, 1), f"{rollout.prompt} ({ended})", fill="black")
    for number, (frame, turn) in enumerate(zip(frames, rollout.turns, strict=True)):
        left = number * (width + 2)
        strip.paste(frame.resize((width, height), Image.Resampling.NEAREST), (left, MARGIN))
        draw.text((left + 2, MARGIN + height), turn.messages[0].text, fill="black")
    strip.save(path)


def main(environment: str, seed: int, output: Path, scale: float) -> None:
    task = TASKS[environment]
    episodes, imitation, practice = (max(1, round(scale * each)) for each in (200, task.imitation, task.practice))
    test("tiny-vlm", "before", task, episodes)

    config = check_config(task.sections({}))
    recorded = max(1, round(scale * task.episodes))
    steps = record_expert(config, output / "episodes", recorded, task.expert, seed * 100_000)
    print(f"the expert: {steps} steps in {recorded} episodes", flush=True)
    common = {"freeze": "nothing", "seed": seed, "micro_batch_tokens": 8192}
    Trainer("tiny-vlm").train(
        algorithm="sft",
        data=output / "episodes",
        actions=task.env_args["actions"],
        steps=imitation,
        batch_size=task.rows,
        lr=1e-3,
        lr_scheduler="cosine",
        output=output / "imitation",
        checkpoint_every=imitation,
        **common,
    )
    test(output / "imitation", "after imitation", task, episodes)

    Trainer(output / "imitation").train(
        algorithm="grpo",
        rollout=task.sections({})["rollout"],
        steps=practice,
        batch_size=32,
        lr=2e-4,
        lr_scheduler="cosine",
        alg_params={"entropy_coef": 0.01},
        env_rows=4000,
        output=output / "practice",
        checkpoint_every=practice,
        **common,
    )
    played = test(output / "practice", "after reinforcement learning", task, episodes)
    longest = max(played, key=lambda rollout: (rollout.reward or 0.0, len(rollout.turns)))
    draw_strip(longest, output / "episode.png")
    print(f"an episode: {output / 'episode.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--environment", choices=TASKS, default="reach")
    parser.add_argument("--seed", type=int, default=0, help="of the expert's episodes, the order of rows and sampling")
    parser.add_argument("--output", type=Path, help="a new folder; default runs/act_ENVIRONMENT_SEED")
    parser.add_argument("--scale", type=float, default=1.0, help="share of all steps and episodes, for a quick look")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    output = arguments.output or Path(f"runs/act_{arguments.environment}_{arguments.seed}")
    if output.exists():
        parser.error(f"{output} exists: give another folder (--output), or remove it")
    main(arguments.environment, arguments.seed, output, arguments.scale)

"""Environments for tests, registered with gymnasium: `gym:tests.rollouts.example_environments:Vowels-v0`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Vowels(gymnasium.Env[str, str]):
    """Pays for an answer that ends with a vowel; three steps."""

    observation_space = action_space = spaces.Text(100, min_length=0)
    steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._letters(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._letters(), float(action[-1:] in set("aeiou")), self.steps == 3, False, {}

    def _letters(self) -> str:
        return "".join(chr(97 + number) for number in self.np_random.integers(0, 26, 3))


class Numbers(gymnasium.Env[Any, Any]):
    """Shows a dict of numbers; the action is returned in `info`, and pays its sum."""

    observation_space = spaces.Dict({"place": spaces.Box(-1, 1, (2,)), "level": spaces.Discrete(4)})

    def __init__(self, kind: str = "discrete") -> None:
        kinds = {
            "discrete": spaces.Discrete(3, start=1),
            "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
            "multi": spaces.MultiDiscrete([3, 3]),
            "tuple": spaces.Tuple([spaces.Discrete(2)]),
        }
        self.action_space = kinds[kind]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return {"place": np.array([0.12345, -1]), "level": 3}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return {"place": np.zeros(2), "level": 0}, float(np.sum(action)), True, False, {}


class Line(gymnasium.Env[Any, Any]):
    """Walk along a line to its end: an action is the length of a step, which is also its reward."""

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's
    observation_space = spaces.Dict(
        {
            "camera": spaces.Dict({"image": spaces.Box(0, 255, (28, 28, 3), np.uint8)}),
            "mission": spaces.Text(20),
            "place": spaces.Box(0, 2, (1,), np.float32),
        }
    )
    action_space: spaces.Space[Any]

    def __init__(self, length: float = 1.0, ends: bool = True, discrete: bool = False) -> None:
        self.length, self.ends, self.discrete = length, ends, discrete
        self.action_space = spaces.Discrete(4, start=1) if discrete else spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.shade, self.place = int(self.np_random.integers(100)), 0.0
        return self._observation(), {"is_success": False}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        step = (int(action) - 1) / 4 if self.discrete else float(action[0])
        self.place += step
        success = self.place >= self.length
        return self._observation(), step, success and self.ends, False, {"is_success": success}

    def expert(self) -> Any:
        return 3 if self.discrete else np.array([0.5625], np.float32)

    def _observation(self) -> dict[str, Any]:
        image = np.full((28, 28, 3), self.shade, np.uint8)
        image[:, : round(20 * self.place)] = 255
        return {"camera": {"image": image}, "mission": "walk", "place": np.array([self.place])}


class Sides(gymnasium.Env[Any, Any]):
    """Go to the white side of the picture, left (0) or right (1); one step."""

    observation_space = spaces.Box(0, 255, (28, 28, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.side = int(self.np_random.integers(2))
        self.picture = self.np_random.integers(80, 176, (28, 28, 3), dtype=np.uint8)
        self.picture[:, 14 * self.side : 14 * self.side + 14] = 255
        return self.picture, {"is_success": False}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        success = int(action) == self.side
        return self.picture, float(success), True, False, {"is_success": success}

    def expert(self) -> int:
        return self.side


class Process(Vowels):
    """An environment in a process of its own, which is killed at a step of a seed that the file `doomed` names."""

    child: subprocess.Popen[bytes] | None = None

    def __init__(self, doomed: str = "", started: str = "") -> None:
        self.doomed, self.started = doomed, started

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        self.child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        if self.started:
            with Path(self.started).open("a") as file:
                file.write(f"{self.child.pid}\n")
        return super().reset(seed=seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert self.child is not None
        assert self.child.stdin is not None
        if self.doomed and str(self.seed) in Path(self.doomed).read_text().split():
            self.child.kill()
            self.child.wait()
        if self.child.poll() is not None:
            raise BrokenPipeError(f"the process of the environment ended with status {self.child.returncode}")
        return super().step(action)

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()


class Failing(Vowels):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        raise KeyError("door")


gymnasium.register("Vowels-v0", Vowels)
gymnasium.register("Numbers-v0", Numbers)
gymnasium.register("Line-v0", Line)
gymnasium.register("Sides-v0", Sides)
gymnasium.register("Process-v0", Process)
gymnasium.register("Failing-v0", Failing)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

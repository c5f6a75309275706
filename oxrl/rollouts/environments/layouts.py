"""Wrappers for robot simulators: observations become `image`, `state` and `instruction`, actions plain arrays.

Each class is the layout of one simulator, named in `rollout.env_args.wrappers`. The simulators are not imported here.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from oxrl.names import did_you_mean
from oxrl.rollouts.environments.observations import flat_entries

_INSTRUCTION = ("get_language_instruction", "language_instruction", "task_description", "instruction")
_MOST_CHARACTERS = 1000


class Layout(gymnasium.Wrapper[dict[str, Any], Any, Any, Any]):
    """`Layout(env, images=["camera.rgb"], state=["arm.position"], instruction="lift the cup")`.

    `images` and `state` are entries of the simulator's observation by their names in nested dicts. The first picture is
    `image`, the others are `image_2`, `image_3`; numbers of `state` are joined in order. Batches of one, as tensors or
    arrays, lose their first dimension. Without an `instruction` it is that of the simulator, read at each step.
    """

    default_images: ClassVar[Sequence[str]] = ()  # those that an observation has
    default_state: ClassVar[Sequence[str]] = ()
    upside_down: ClassVar[bool] = False

    def __init__(
        self,
        env: Any,
        *,
        images: Sequence[str] | None = None,
        state: Sequence[str] | None = None,
        instruction: str | None = None,
    ) -> None:
        super().__init__(env)
        known = dict(flat_entries(env.observation_space))
        self._images = _entries("images", images, self.default_images, known)
        self._state = _entries("state", state, self.default_state, known)
        if not self._images:
            raise ValueError(f"images: no picture was named; an observation has {', '.join(known)}")
        self._given = instruction
        self.observation_space = spaces.Dict(self._spaces(known))
        if (space := env.action_space).shape and len(space.shape) == 2:
            self.action_space = spaces.Box(space.low[0], space.high[0], dtype=space.dtype)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._observation(observation), dict(info)

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        shape = self.env.action_space.shape
        observation, reward, terminated, truncated, info = self.env.step(np.asarray(action).reshape(shape))
        ended = bool(_number(terminated)), bool(_number(truncated))
        shown = self._observation(observation)
        return shown, _number(reward), *ended, {**info, "is_success": self.is_success(_number(reward), info)}

    def is_success(self, reward: float, info: Mapping[str, Any]) -> bool:
        """What the simulator reports, else a positive reward."""
        return bool(_number(info["success"])) if "success" in info else reward > 0

    def _observation(self, observation: Any) -> dict[str, Any]:
        entries = dict(flat_entries(observation))
        shown: dict[str, Any] = {}
        for number, name in enumerate(self._images, 1):
            picture = _unbatched(_array(entries[name]), 3)
            shown["image" if number == 1 else f"image_{number}"] = picture[::-1, ::-1] if self.upside_down else picture
        if self._state:
            shown["state"] = np.concatenate([_array(entries[name]).ravel() for name in self._state]).astype(np.float32)
        return {**shown, "instruction": self._instruction()}

    def _instruction(self) -> str:
        if self._given is not None:
            return self._given
        for name in _INSTRUCTION:
            if (found := getattr(self.env.unwrapped, name, None)) is not None:
                return str(found() if callable(found) else found)
        raise ValueError(
            f"{type(self.env.unwrapped).__name__} has no instruction: give one to the wrapper, as in "
            f"{{oxrl.rollouts.environments.layouts:{type(self).__name__}: {{instruction: lift the cup}}}}"
        )

    def _spaces(self, known: Mapping[str, Any]) -> dict[str, spaces.Space[Any]]:
        found: dict[str, spaces.Space[Any]] = {}
        for number, name in enumerate(self._images, 1):
            shape = known[name].shape[-3:]
            found["image" if number == 1 else f"image_{number}"] = spaces.Box(0, 255, shape, np.uint8)
        if self._state:
            size = sum(int(np.prod(known[name].shape)) for name in self._state)
            found["state"] = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        return {**found, "instruction": spaces.Text(_MOST_CHARACTERS, charset=string.printable)}


class Libero(Layout):
    """LIBERO, through `FourValues`: two cameras, whose pictures are upside down, the position of the hand, the gripper.

    Actions have seven numbers from -1 to 1: a move, a rotation, and the gripper, -1 to open and 1 to close it. After
    a reset nothing moves for `settle` steps, in which objects fall into their positions.
    """

    default_images = ("agentview_image", "robot0_eye_in_hand_image")
    default_state = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
    upside_down = True

    def __init__(self, env: Any, *, settle: int = 10, **layout: Any) -> None:
        super().__init__(env, **layout)
        self._settle = settle

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        shown, info = super().reset(seed=seed, options=options)
        for _ in range(self._settle):
            still = np.zeros(self.action_space.shape or (), np.float32)
            still[-1] = -1
            shown, *_ = self.step(still)
        return shown, info


class SimplerEnv(Layout):
    """SimplerEnv: the camera of the robot, its own instruction; an action is a move, a rotation vector, the gripper."""

    default_images = ("image.overhead_camera.rgb", "image.3rd_view_camera.rgb")


class ManiSkill(Layout):
    """ManiSkill 3 with `obs_mode: rgb` or `rgb+state`: batches of one as tensors, and no instruction of its own."""

    default_images = ("sensor_data.base_camera.rgb", "sensor_data.hand_camera.rgb")
    default_state = ("agent.qpos",)


class SuccessByReward(gymnasium.Wrapper[Any, Any, Any, Any]):
    """`is_success` for environments that reward nothing but success, such as the levels of MiniGrid and BabyAI."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, {**info, "is_success": False}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, {**info, "is_success": float(reward) > 0}


class FourValues(gymnasium.Env[Any, Any]):
    """`FourValues(env, "pick up the bowl", states)`: an environment with the interface of Gym before 0.26, as LIBERO's.

    Its `reset` returns an observation, its `step` four values, of which `done` is success. Of `states` (starting
    states, for `set_init_state`) the seed of a reset chooses one. Its bounds of actions are `low` and `high`.
    """

    def __init__(
        self, env: Any, instruction: str, states: Sequence[Any] = (), *, size: int = 7, low: float = -1, high: float = 1
    ) -> None:
        self.env, self.instruction, self.states = env, instruction, states
        self.action_space = spaces.Box(low, high, (size,), np.float32)
        self.observation_space = spaces.Dict({name: _space_of(each) for name, each in dict(env.reset()).items()})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        if seed is not None and hasattr(self.env, "seed"):
            self.env.seed(seed)
        observation = self.env.reset()
        if len(self.states):
            observation = self.env.set_init_state(self.states[int(self.np_random.integers(len(self.states)))])
        return observation, {"is_success": False}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, done, info = self.env.step(action)
        return observation, float(reward), bool(done), False, {**info, "success": bool(done)}

    def close(self) -> None:
        self.env.close()


def _entries(
    key: str, given: Sequence[str] | None, default: Sequence[str], known: Mapping[str, Any]
) -> tuple[str, ...]:
    """Those that were named; by default those of the simulator that its observations have."""
    if given is None:
        return tuple(name for name in default if name in known)
    if unknown := [name for name in given if name not in known]:
        raise ValueError(
            f"{key}: an observation has no {unknown[0]!r:.50}{did_you_mean(str(unknown[0]), known)}; it has "
            f"{', '.join(known)}"
        )
    return tuple(given)


def _space_of(value: Any) -> spaces.Space[Any]:
    array = np.asarray(value)
    if array.dtype == np.uint8:
        return spaces.Box(0, 255, array.shape, np.uint8)
    return spaces.Box(-np.inf, np.inf, array.shape, np.float64)


def _array(value: Any) -> NDArray[Any]:
    """Tensors of a GPU are copied."""
    return np.asarray(value.cpu() if hasattr(value, "cpu") else value)


def _unbatched(array: NDArray[Any], dimensions: int) -> NDArray[Any]:
    if array.ndim == dimensions + 1 and len(array) == 1:
        array = array.reshape(array.shape[1:])
    if array.ndim != dimensions:
        raise ValueError(f"a picture has the shape {array.shape}: make the simulator with num_envs 1")
    return array


def _number(value: Any) -> float:
    array = _array(value)
    if array.size != 1:
        raise ValueError(f"a step returned {array.size} numbers, not one: make the simulator with num_envs 1")
    return float(array.reshape(()))

"""Robot simulators as models see them, with stand-ins that have the spaces of the real ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")

import torch  # noqa: E402
from gymnasium import spaces  # noqa: E402

from oxrl.rollouts.environments.layouts import FourValues, Layout, Libero, ManiSkill, SimplerEnv  # noqa: E402
from oxrl.rollouts.environments.table import Settings, named_rows  # noqa: E402
from tests.rollouts.test_acting import played  # noqa: E402

pytestmark = pytest.mark.anyio
SEVEN = {"low": [-1] * 7, "high": [1] * 7, "bins": 8}
HOME = "oxrl.rollouts.environments.layouts"


@pytest.fixture
def anyio_backend():
    return "asyncio"


def picture(width: int = 28) -> spaces.Box:
    return spaces.Box(0, 255, (28, width, 3), np.uint8)


class LiberoStandIn:
    """The interface of LIBERO's `OffScreenRenderEnv`: not Gymnasium's. A cup is lifted by closing the gripper."""

    def __init__(self) -> None:
        self.actions: list[Any] = []
        self.state = 0

    def seed(self, seed: int) -> None:
        self.seeded = seed

    def reset(self) -> dict[str, Any]:
        self.actions, self.state = [], 0
        return self._observation()

    def set_init_state(self, state: int) -> dict[str, Any]:
        self.state = state
        return self._observation()

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        self.actions.append(np.asarray(action))
        lifted = bool(action[-1] > 0)
        return self._observation(), float(lifted), lifted, {}

    def close(self) -> None: ...

    def _observation(self) -> dict[str, Any]:
        image = np.zeros((28, 28, 3), np.uint8)
        image[0, 0] = self.state + 1  # upside down: the lower right corner
        return {
            "robot0_eef_pos": np.array([0.1, 0.2, 0.3]),
            "robot0_eef_quat": np.array([0.0, 0.0, 0.0, 1.0]),
            "robot0_gripper_qpos": np.array([0.04, -0.04]),
            "agentview_image": image,
            "robot0_eye_in_hand_image": image[:, :14],
            "object-state": np.zeros(40),
        }


def libero() -> Any:
    return FourValues(LiberoStandIn(), "lift the cup", states=range(100))


class SimplerStandIn(gymnasium.Env[Any, Any]):
    """SimplerEnv's observations: two cameras by the name of the robot's, and an instruction that changes on the way."""

    def __init__(self, camera: str = "3rd_view_camera") -> None:
        cameras = {camera: spaces.Dict({"rgb": picture(56), "depth": spaces.Box(0, np.inf, (28, 56, 1), np.float32)})}
        arm = {"qpos": spaces.Box(-np.inf, np.inf, (8,), np.float32)}
        self.observation_space = spaces.Dict({"agent": spaces.Dict(arm), "image": spaces.Dict(cameras)})
        self.action_space = spaces.Box(
            np.float32([-1] * 3 + [-1.57] * 3 + [-1]), np.float32([1] * 3 + [1.57] * 3 + [1])
        )
        self.steps = 0

    def get_language_instruction(self) -> str:
        return "open the drawer" if self.steps < 1 else "put the apple in"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(1000)))
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.steps += 1
        done = self.steps == 2
        return self.observation_space.sample(), float(done), done, False, {"success": done}


class ManiSkillStandIn(gymnasium.Env[Any, Any]):
    """ManiSkill 3 with one environment: everything is a tensor with a first dimension of one."""

    def __init__(self, environments: int = 1) -> None:
        self.environments = environments
        self.observation_space = spaces.Dict(
            {
                "agent": spaces.Dict({"qpos": spaces.Box(-np.inf, np.inf, (1, 9), np.float32)}),
                "sensor_data": spaces.Dict(
                    {"base_camera": spaces.Dict({"rgb": spaces.Box(0, 255, (1, 28, 28, 3), np.uint8)})}
                ),
            }
        )
        self.action_space = spaces.Box(-1, 1, (1, 7), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.shade, self.steps = int(self.np_random.integers(200)), 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.steps += 1
        done = torch.tensor([self.steps == 2] * self.environments)
        return self._observation(), done.float(), done, torch.tensor([False]), {"success": done}

    def _observation(self) -> dict[str, Any]:
        shape = (self.environments, 28, 28, 3)
        rgb = torch.full(shape, self.shade + self.steps, dtype=torch.uint8)
        return {"agent": {"qpos": torch.arange(9.0)[None]}, "sensor_data": {"base_camera": {"rgb": rgb}}}


gymnasium.register("Libero-v0", libero)
gymnasium.register("Simpler-v0", SimplerStandIn)
gymnasium.register("ManiSkill-v0", ManiSkillStandIn)

WRAPPED = {
    "Libero-v0": {f"{HOME}:Libero": {}},
    "Simpler-v0": {f"{HOME}:SimplerEnv": {}},
    "ManiSkill-v0": {f"{HOME}:ManiSkill": {"instruction": "pick up the cube"}},
}


@pytest.mark.parametrize(
    "env", [Libero(libero()), SimplerEnv(SimplerStandIn()), ManiSkill(ManiSkillStandIn(), instruction="pick up")]
)
def test_what_a_wrapped_simulator_shows_is_of_its_space_and_a_function_of_the_seed(env):
    shown, again = (env.reset(seed=3)[0] for _ in range(2))
    assert all(np.array_equal(shown[name], again[name]) for name in shown)
    action = np.zeros(env.action_space.shape, np.float32)
    assert env.observation_space.contains(shown) and env.observation_space.contains(env.step(action)[0])


def test_pictures_of_libero_are_turned_and_its_objects_settle_before_the_first_step():
    env = Libero(libero(), settle=3)
    shown, _ = env.reset(seed=4)
    inner = env.unwrapped.env
    assert inner.seeded == 4 and [action.tolist() for action in inner.actions] == [[0, 0, 0, 0, 0, 0, -1]] * 3
    assert shown["image"][-1, -1].tolist() == [inner.state + 1] * 3 and not shown["image"][0, 0].any()
    assert shown["image_2"].shape == (28, 14, 3) and shown["instruction"] == "lift the cup"
    np.testing.assert_allclose(shown["state"], [0.1, 0.2, 0.3, 0, 0, 0, 1, 0.04, -0.04], rtol=1e-6)
    states = {Libero(libero()).reset(seed=seed)[0]["image"].max() for seed in (4, 4, 5, 6)}
    assert len(states) == 3, "a seed is a starting state"
    _, reward, terminated, _, info = env.step(np.ones(7))
    assert (reward, terminated, info["is_success"]) == (1.0, True, True)


@pytest.mark.parametrize("camera", ["overhead_camera", "3rd_view_camera"])
def test_simpler_env_shows_the_camera_of_the_robot_and_the_instruction_of_the_moment(camera):
    env = SimplerEnv(SimplerStandIn(camera))
    shown, _ = env.reset(seed=0)
    assert set(shown) == {"image", "instruction"} and shown["image"].shape == (28, 56, 3)
    assert shown["instruction"] == "open the drawer"
    shown, _, _, _, info = env.step(np.zeros(7, np.float32))
    assert shown["instruction"] == "put the apple in" and info["is_success"] is False


def test_tensors_of_mani_skill_become_arrays_and_numbers():
    env = ManiSkill(ManiSkillStandIn(), instruction="pick up the cube")
    shown, _ = env.reset(seed=0)
    assert shown["image"].shape == (28, 28, 3) and shown["image"].dtype == np.uint8
    assert shown["state"].tolist() == list(range(9)) and env.action_space.shape == (7,)
    env.step(np.zeros(7, np.float32))
    _, reward, terminated, truncated, info = env.step(np.zeros(7, np.float32))
    assert (reward, terminated, truncated, info["is_success"]) == (1.0, True, False, True)


@pytest.mark.parametrize("name", WRAPPED)
async def test_episodes_are_played_with_action_tokens_from_a_config(tiny_vlm, name):
    act = np.full((1, 7), 0.1)
    close = np.full((1, 7), 0.9)
    answers = [act * -1, close] if name == "Libero-v0" else [act, act]
    args = {"wrappers": [WRAPPED[name]], "show": ["image", "instruction"], "actions": SEVEN}
    (rollout,), generator = await played(tiny_vlm[1], answers, env=f"gym:{__name__}:{name}", **args)
    assert rollout.error is None and rollout.score.value == 1.0 and rollout.score.parts == {"success": 1.0}
    assert len(rollout.turns) == 2 and all(len(turn.media) == 1 for turn in rollout.turns)
    assert all(len(turn.generation.token_ids) == 8 for turn in rollout.turns), "seven numbers and the end of the turn"
    assert len(generator.requests) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(SimplerStandIn()), "no picture was named; an observation has agent.qpos, image.3rd_view"),
        (lambda: SimplerEnv(SimplerStandIn(), images=["image.3rd_view_camera.rbg"]), "did you mean image.3rd_view"),
        (lambda: SimplerEnv(SimplerStandIn(), state=["qpos"]), "state: an observation has no 'qpos'"),
        (lambda: ManiSkill(ManiSkillStandIn()).reset(), "ManiSkillStandIn has no instruction: give one"),
        (lambda: ManiSkill(ManiSkillStandIn(2), instruction="lift").reset(), "make the simulator with num_envs 1"),
    ],
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_row_is_a_seed_of_the_simulator():
    rows = named_rows(
        f"gym:{__name__}:Libero-v0", Settings({"wrappers": [WRAPPED["Libero-v0"]], "actions": SEVEN}), 2, 7
    )
    assert [row.metadata["seed"] for row in rows] == [7, 8]

"""Environments by name: rows, seeds, what is shown and understood, and what happens when they fail."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import anyio
import pytest

from oxrl.config.load import check_config
from oxrl.data.render import Renderer
from oxrl.rollouts.collect import RolloutSampler
from oxrl.rollouts.environments.expert import expert_steps
from oxrl.rollouts.environments.table import KINDS, Settings, find_kind, named_rows, open_named
from oxrl.rollouts.envs import GeneratorClient, gym_env
from oxrl.rollouts.episode import EpisodeTime
from oxrl.run.environment import environment, episode_bounds
from oxrl.types import Episode, GenerationConfig, Message, Rollout, Sample
from tests.rollouts.scripted_text import ScriptedText
from tests.waiting import EXPIRES, HANG

pytestmark = pytest.mark.anyio
pytest.importorskip("gymnasium")

ENVIRONMENTS = "gym:tests.rollouts.example_environments:"


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


def sampler(tokenizer, texts, env, **bounds) -> RolloutSampler:
    generator = ScriptedText(tokenizer, texts)
    return RolloutSampler(generator, Renderer(tokenizer), GenerationConfig(max_new_tokens=64), env=env, **bounds)


async def played(tokenizer, name, texts, args=None, size=1, **bounds) -> Rollout:
    settings = Settings(args or {}, max_turns=bounds.pop("max_turns", 8))
    sample = named_rows(ENVIRONMENTS + name, settings, size, 7)[-1]
    sample_episodes = sampler(tokenizer, texts, open_named(ENVIRONMENTS + name, settings), **bounds)
    (rollout,) = await sample_episodes((Rollout(sample),))
    return rollout


async def test_every_token_sampled_in_a_game_is_trained_once_and_none_of_the_environment(tiny):
    tokenizer = tiny[1]
    rollout = await played(tokenizer, "Vowels-v0", ["xa", "b", "e"])
    assert rollout.score.per_turn == (1.0, 0.0, 1.0) and rollout.reward == 2.0
    assert rollout.metadata["ended"] == "terminated"
    contexts = [((*a.prompt_ids, *a.generation.token_ids), b.prompt_ids) for a, b in pairwise(rollout.turns)]
    assert all(after[: len(before)] == before for before, after in contexts)
    trained = [token for token, on in zip(rollout.tokens, rollout.loss_mask, strict=True) if on]
    assert trained == [token for turn in rollout.turns for token in turn.generation.token_ids]
    assert rollout.metadata["first_observation"] in tokenizer.decode(rollout.turns[0].prompt_ids)


async def test_a_row_is_a_seed_and_all_its_episodes_start_in_the_same_state(tiny):
    rows = named_rows(f"{ENVIRONMENTS}Vowels-v0", Settings(), 3, 7)
    assert [row.metadata["seed"] for row in rows] == [7, 8, 9]
    firsts = [await played(tiny[1], "Vowels-v0", ["a", "a", "a"], size=size) for size in (1, 1, 2)]
    shown = [rollout.metadata["first_observation"] for rollout in firsts]
    assert shown[0] == shown[1] != shown[2]


ROOM = """
import gymnasium
from gymnasium import spaces

class Room(gymnasium.Env):
    observation_space = action_space = spaces.Discrete(2)

    def __init__(self, doors=1):
        self.doors = doors

    def reset(self, *, seed=None, options=None):
        return self.doors, {}

    def step(self, action):
        return action, 1.0, True, False, {}

gymnasium.register("Room-v0", Room)
"""


@pytest.mark.parametrize("name", ["Room", "Room-v0"])
async def test_an_environment_of_a_file_is_named_by_its_class_or_by_the_id_that_it_registers(tiny, tmp_path, name):
    (tmp_path / "room.py").write_text(ROOM)
    settings = Settings({"doors": 3})
    env = f"gym:{tmp_path / 'room.py'}:{name}"
    (sample,) = named_rows(env, settings, 1, 7)
    (rollout,) = await sampler(tiny[1], ["1"], open_named(env, settings))((Rollout(sample),))
    assert rollout.reward == 1.0 and rollout.messages[0].text.startswith(f"You act in {name}. ")
    assert rollout.metadata["first_observation"] == "3"
    with pytest.raises(ValueError, match=r"room.py:Rom cannot be imported: .* has no attribute 'Rom'"):
        open_named(env.replace(name, "Rom"), settings)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("return action, 1.0, True, False, {}", "return action, 1.0, True, {}", "step returned 4 values; .*FourValues"),
        ("return action, 1.0, True, False, {}", "return None", "step returned one NoneType"),
        ("1.0, True", "None, True", "step returned the reward None; it is a number"),
        ("return self.doors, {}", "return self.doors", r"reset returned one int; .* \(observation, info\)"),
        ("return self.doors, {}", "raise OSError('closed')", "failed in reset: OSError: closed"),
    ],
)
async def test_an_environment_with_another_interface_is_an_error_that_says_so(tiny, tmp_path, before, after, message):
    (tmp_path / "room.py").write_text(ROOM.replace(before, after))
    name, settings = f"{tmp_path / 'room.py'}:Room", Settings({})
    (sample,) = named_rows(f"gym:{name}", settings, 1, 7)
    (rollout,) = await sampler(tiny[1], ["1"], open_named(f"gym:{name}", settings))((Rollout(sample),))
    assert rollout.score is None and re.search(f"the environment('s)? {message}", rollout.error)
    with pytest.raises(ValueError, match=f"succeeded in 0 of 40 .* the environment('s)? {message}"):
        list(expert_steps(name, settings, 1, expert=lambda _: lambda: 1))


def test_a_class_that_is_no_environment_is_refused(tmp_path):
    (tmp_path / "room.py").write_text("class Room: pass\n")
    with pytest.raises(ValueError, match=r"Room has no observation_space .* a subclass of gymnasium.Env"):
        open_named(f"gym:{tmp_path / 'room.py'}:Room", Settings({}))


async def test_numbers_are_written_with_four_digits_and_actions_by_their_words(tiny):
    args = {"actions": ["left", "right", "go right"]}
    rollout = await played(tiny[1], "Numbers-v0", ["Not left: GO RIGHT!"], args)
    assert rollout.metadata["first_observation"] == "place: 0.1235 -1\nlevel: 3"
    assert "Answer with one of: left, right, go right." in rollout.messages[0].text
    assert rollout.reward == 3.0  # the third action, counted from 1


@pytest.mark.parametrize(
    ("kind", "wrong", "right", "earns"),
    [
        ("discrete", "leftmost", "2", 2.0),
        ("box", "0.5", "x=0.5, y=-0.25", 0.25),
        ("box", "0.5 7", ".5 -.25", 0.25),
        ("multi", "1.5 1", "2 1", 3.0),
    ],
)
async def test_an_answer_that_is_no_action_gets_a_message_and_earns_the_illegal_reward(tiny, kind, wrong, right, earns):
    args = {"kind": kind, "illegal_reward": -1}
    rollout = await played(tiny[1], "Numbers-v0", [wrong, right], args)
    assert rollout.turns[0].messages[1].text.startswith("That is no action.")
    assert rollout.score.per_turn == (-1.0, earns)


async def test_an_environment_that_raises_is_an_error_with_its_name_and_no_reward(tiny):
    rollout = await played(tiny[1], "Failing-v0", ["a"])
    assert rollout.score is None and rollout.error == "the environment failed in step: KeyError: 'door'"


async def test_an_environment_that_hangs_is_left_after_its_seconds_which_exclude_generation(tiny):
    def hanging(sample):
        import threading

        threading.Event().wait()

    rollout = Rollout(Sample("s", (Message("user", "Go."),)))
    (left,) = await sampler(tiny[1], ["a"], gym_env(hanging), env_seconds=EXPIRES)((rollout,))
    assert left.error == f"the environment took longer than {EXPIRES:g} s"


async def test_the_clock_of_an_episode_stands_while_the_model_generates():
    with EpisodeTime(HANG) as time, anyio.CancelScope():
        with time.paused(), time.paused():
            assert anyio.current_effective_deadline() == math.inf
        assert anyio.current_effective_deadline() < math.inf
    assert not time.expired


async def test_an_episode_has_a_bound_on_its_tokens_and_on_its_steps(tiny):
    tokenizer = tiny[1]
    free = await played(tokenizer, "Vowels-v0", ["a"] * 3)
    room = len(free.turns[1].prompt_ids)  # the second turn has no room for a token
    bounded = await played(tokenizer, "Vowels-v0", ["a"] * 3, max_tokens=room)
    assert len(bounded.turns) == 1 and bounded.metadata["ended"] == "length"
    assert bounded.score.per_turn == (1.0,) and bounded.error is None
    stopped = await played(tokenizer, "Vowels-v0", ["a"] * 3, max_turns=2)
    assert len(stopped.turns) == 2 and stopped.metadata["ended"] == "max_steps"


async def test_an_environment_that_never_ends_its_episode_is_ended_by_the_bound_on_turns(tiny):
    async def endless(sample, policy):
        while True:
            await policy.generate([1, 2, 3])

    sample = Sample("s", (Message("user", "Go."),))
    with anyio.fail_after(HANG):
        (rollout,) = await sampler(tiny[1], ["a"] * 3, endless, max_turns=3)((Rollout(sample),))
    assert rollout.score is None and rollout.error.startswith("the environment asked for more than 3 generations")


async def test_a_turn_gets_the_tokens_that_are_left(tiny):
    generator = ScriptedText(tiny[1], ["a"])
    client = GeneratorClient(generator, Renderer(tiny[1]), GenerationConfig(max_new_tokens=64), 7, max_tokens=10)
    await client.generate([1] * 7)
    assert generator.samplings[0].max_new_tokens == 3
    empty = await client.generate([1] * 10)
    assert (empty.token_ids, empty.finish_reason) == ((), "length")


@pytest.mark.parametrize(
    ("env", "args", "message"),
    [
        ("gym:Nowhere-v0", {}, "gymnasium cannot make Nowhere-v0"),
        (f"{ENVIRONMENTS}Line-v0", {"actions": {"low": 0, "high": 1, "bin": 8}}, "did you mean bins"),
        (
            f"{ENVIRONMENTS}Line-v0",
            {"actions": {"low": [0, 0], "high": [1, 1]}},
            "actions of 2 numbers, and those of .* Box",
        ),
        (f"{ENVIRONMENTS}Line-v0", {"actions": {"words": ["a", "b"]}}, "has 2 words, and actions of .* are Box"),
        (f"{ENVIRONMENTS}Line-v0", {"show": ["mision"]}, "no 'mision'; did you mean mission"),
        (f"{ENVIRONMENTS}Line-v0", {"show": []}, r"show is \[\]; give a list of entries"),
        (f"{ENVIRONMENTS}Line-v0", {"history": "no"}, "history is 'no'; give true or false"),
        (f"{ENVIRONMENTS}Line-v0", {"wrappers": [{"a:b": 1}]}, "wrappers has {'a:b': 1}; give a list of MODULE:CLASS"),
        (f"{ENVIRONMENTS}Numbers-v0", {"kind": "tuple"}, "actions of .* are of the space Tuple"),
        (f"{ENVIRONMENTS}Numbers-v0", {"actions": ["a"]}, "needs a list of 3 different words"),
        (f"{ENVIRONMENTS}Numbers-v0", {"illegal_reward": "no"}, "illegal_reward is 'no'; give a number"),
        ("gym:CartPole-v1", {"actons": ["l", "r"]}, "unexpected keyword argument 'actons'.* did you mean actions"),
        ("reasoning_gym:leg_countin", {}, "cannot generate samples of 'leg_countin' .* did you mean leg_counting"),
    ],
)
def test_a_name_or_an_argument_that_is_wrong_is_refused_before_a_run(env, args, message):
    with pytest.raises(ValueError, match=message):
        open_named(env, Settings(args))


def test_a_missing_library_is_reported_with_the_command_that_installs_it():
    kind = find_kind("gym:CartPole-v1")
    with pytest.raises(ValueError, match=r"pip install -e '\.\[gymnasium\]'"):
        kind._replace(package="no_such_package").require()


def test_every_kind_can_be_written_in_a_config():
    for kind in KINDS:
        config = check_config({"model": {"name": "tiny"}, "rollout": {"env": f"{kind.scheme}:x"}})
        assert config.makes_rows and config.has_custom_env == (kind.reward is None)
    for env, message in [
        ("gym:", "names no environment: write gym:ID"),
        ("gymm", "did you mean gym"),
        ("tools", "train_files_path is missing"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_config({"model": {"name": "tiny"}, "rollout": {"env": env}})


def config_of(env, **rollout):
    return check_config(
        {"model": {"name": "tiny"}, "data": {"train_files_path": "x"}, "rollout": {"env": env, **rollout}}
    )


async def test_a_dialogue_and_an_environment_of_a_file_come_from_a_config(tiny, tmp_path):
    file = tmp_path / "my_env.py"
    file.write_text(
        "from oxrl.rollouts.envs import single_turn\n"
        "def user(conversation):\n    return 'And?' if len(conversation.messages) < 4 else None\n"
        "async def broken(sample, policy):\n    return {}['x']\n"
    )
    sample = Sample("s", (Message("user", "Go."),))
    env = environment(config_of("dialogue", env_args={"reply": f"{file}:user"}, max_turns=5))
    (rollout,) = await sampler(tiny[1], ["a", "b", "c"], env)((Rollout(sample),))
    assert [message.text for message in rollout.messages] == ["Go.", "a", "And?", "b"]
    env = environment(config_of(f"{file}:broken"))
    (rollout,) = await sampler(tiny[1], ["a"], env)((Rollout(sample),))
    assert rollout.error == "the environment failed: KeyError: 'x'"


def test_an_environment_that_was_built_with_more_turns_keeps_them(tmp_path):
    (tmp_path / "my_env.py").write_text(
        "from oxrl import gym_env\nlong = gym_env(None, max_steps=12)\nasync def own(sample, policy): ...\n"
    )
    for name, turns in (("long", 12), ("own", 4)):
        config = config_of(f"{tmp_path / 'my_env.py'}:{name}", max_turns=4)
        assert episode_bounds(config, environment(config))["max_turns"] == turns


@pytest.mark.parametrize(
    ("env", "args", "message"),
    [
        ("dialogue", {}, "needs rollout.env_args.reply"),
        ("dialogue", {"reply": "math:sqrt", "x": 1}, "env_args.x is no argument of dialogue: reply, stop"),
        ("dialogue", {"reply": "math:pi"}, "env_args.reply is 3.14"),
        ("tools", {"x": 1}, "env_args are for dialogue and gym:ID"),
        ("gymm:CartPole-v1", {}, "did you mean gym"),
        ("gymnasium:CartPole-v1", {"actions": ["left", "right"]}, "has no arguments; did you mean gym"),
    ],
)
def test_arguments_of_an_environment_are_checked(env, args, message):
    with pytest.raises(ValueError, match=message):
        environment(config_of(env, env_args=args))


def test_a_tool_server_without_a_command_is_refused():
    with pytest.raises(ValueError, match="mcp: without a server: write mcp:COMMAND or mcp:URL"):
        environment(config_of("tools", tools=["mcp: "]))


def test_rows_are_the_same_for_the_same_seed_and_held_out_ones_are_others():
    settings = Settings({"min_animals": 1, "max_animals": 3})
    first, again, other = (named_rows("reasoning_gym:leg_counting", settings, 4, seed) for seed in (3, 3, 10**9))
    assert first == again and not {row.messages[0].text for row in first} & {row.messages[0].text for row in other}
    assert all(isinstance(row.answer, str) and row.metadata["reasoning_gym_task"] for row in first)


async def test_an_episode_without_a_turn_is_not_repeated_forever(tiny):
    async def silent(sample, policy):
        return Episode(())

    sample = Sample("s", (Message("user", "Go."),))
    with anyio.fail_after(HANG):
        (rollout,) = await sampler(tiny[1], ["a"], silent)((Rollout(sample),))
    assert rollout.error == "the environment returned no turn"

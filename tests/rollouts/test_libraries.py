"""Environments of other libraries and of servers: what they ask and reward, and what happens when they fail."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

import pytest

from oxrl.data.render import Renderer
from oxrl.rollouts.collect import RolloutSampler
from oxrl.rollouts.environments.table import HELD_OUT_SEED, Settings, named_rows, open_named
from oxrl.types import GenerationConfig, Rollout
from tests.rollouts.scripted_text import ScriptedText

pytestmark = pytest.mark.anyio
VOWELS = f"verifiers:{Path(__file__).with_name('vowels_env.py')}"


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def played(tokenizer, name, texts, change=None, max_turns=8, max_tokens=None, **args):
    settings = Settings(args, max_turns)
    (sample, *_) = named_rows(name, settings, 2, 7)
    generator = ScriptedText(tokenizer, texts)
    generator.change = change or generator.change
    env = open_named(name, settings)
    bounds = {"env": env, "max_tokens": max_tokens}
    (rollout,) = await RolloutSampler(generator, Renderer(tokenizer), GenerationConfig(), **bounds)((Rollout(sample),))
    return rollout


def sampled_once(rollout):
    contexts = [((*a.prompt_ids, *a.generation.token_ids), b.prompt_ids) for a, b in pairwise(rollout.turns)]
    assert all(after[: len(before)] == before for before, after in contexts)
    trained = [token for token, on in zip(rollout.tokens, rollout.loss_mask, strict=True) if on]
    return trained == [token for turn in rollout.turns for token in turn.generation.token_ids]


class TestVerifiers:
    pytest.importorskip("verifiers")

    async def test_its_rows_are_asked_and_its_rewards_paid(self, tiny):
        rollout = await played(tiny[1], VOWELS, ["x", "la"], turns=2)
        assert [message.text for message in rollout.messages] == ["Say 0.", "x", "Go on.", "la"]
        assert rollout.reward == 1.0 and rollout.score.parts == {"ends_with_a_vowel": 1.0, "num_turns": 2.0}
        assert sampled_once(rollout) and rollout.sample.answer == "0"

    @pytest.mark.parametrize(("own", "most", "turns"), [(-1, 3, 3), (2, 3, 2), (5, 3, 3)])
    async def test_the_lower_of_two_bounds_on_turns_ends_an_episode(self, tiny, own, most, turns):
        rollout = await played(tiny[1], VOWELS, ["a"] * 8, turns=own, max_turns=most)
        assert (len(rollout.turns), rollout.metadata["ended"]) == (turns, "max_turns_reached")
        assert rollout.reward == 1.0

    async def test_an_episode_without_room_for_a_turn_or_with_an_empty_one_ends_with_its_reward(self, tiny):
        free = await played(tiny[1], VOWELS, ["la", "x"], turns=2)
        room = len(free.turns[1].prompt_ids)
        bounded = await played(tiny[1], VOWELS, ["la", "x"], turns=2, max_tokens=room)
        assert len(bounded.turns) == 1 and bounded.metadata["ended"] == "length" and bounded.reward == 1.0
        empty = await played(tiny[1], VOWELS, ["la", "", "x"], turns=3)
        assert len(empty.turns) == 2 and empty.metadata["ended"] == "empty" and empty.reward == 1.0
        assert len(empty.turns[1].generation.token_ids) == 1 and sampled_once(empty)

    async def test_a_reward_that_raises_leaves_the_episode_out_instead_of_paying_0(self, tiny):
        rollout = await played(tiny[1], VOWELS, ["a"], reward="raises")
        assert rollout.score is None and rollout.error.endswith("failed, raises: KeyError: 'judge'")

    async def test_an_engine_that_fails_leaves_the_episode_out(self, tiny):
        rollout = await played(tiny[1], VOWELS, [RuntimeError("no engine")] * 4)
        assert rollout.score is None and "failed" in rollout.error

    async def test_an_aborted_generation_ends_the_episode_and_can_be_resumed(self, tiny):
        rollout = await played(tiny[1], VOWELS, ["la"], lambda each: each._replace(finish_reason="aborted"))
        assert rollout.error is None and rollout.score is None and rollout.generation.finish_reason == "aborted"

    def test_what_cannot_be_used_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="compared of .* compares the completions of a group"):
            open_named(VOWELS, Settings({"reward": "compared"}))
        with pytest.raises(ValueError, match="verifiers:no_such_env cannot be loaded"):
            open_named("verifiers:no_such_env", Settings())
        with pytest.raises(ValueError, match="has no rows for evaluation"):
            named_rows(VOWELS, Settings(), 2, HELD_OUT_SEED)

    def test_the_handlers_of_interrupts_stay_those_of_the_run(self):
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        open_named(VOWELS, Settings({"rows": 3}))
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


class TestOpenEnv:
    pytest.importorskip("websockets")

    async def test_a_session_per_episode_by_a_socket(self, tiny):
        from tests.rollouts.openenv_server import served_by_sockets

        with served_by_sockets() as (url, _):
            rollout = await played(tiny[1], f"openenv:{url}", ["la", "x"])
        assert [message.text for message in rollout.messages][1:] == ["la", "step 1", "x", "step 2"]
        assert rollout.messages[0].text.endswith("\n\nseed 7")
        assert rollout.score.per_turn == (1.0, 0.0) and sampled_once(rollout)

    async def test_or_by_http_where_there_is_no_socket(self, tiny):
        from tests.rollouts.openenv_server import served_by_http

        with served_by_http() as url:
            rollout = await played(tiny[1], f"openenv:{url}", ["x", "la"], illegal_reward=-1)
        assert rollout.score.per_turn == (0.0, 1.0)

    async def test_an_action_of_several_fields_is_a_json_object(self, tiny):
        from tests.rollouts.openenv_server import SCHEMA, served_by_http

        SCHEMA["action"]["properties"]["n"] = {"type": "integer"}
        try:
            with served_by_http() as url:
                rollout = await played(tiny[1], f"openenv:{url}", ["la", '{"message": "a", "n": 1}', '{"message": ""}'])
        finally:
            del SCHEMA["action"]["properties"]["n"]
        assert rollout.turns[0].messages[1].text.startswith("That is no action. Answer with a JSON object")
        assert rollout.score.per_turn == (0.0, 1.0, 0.0)

    async def test_a_server_that_ends_leaves_the_episode_out_with_its_address(self, tiny):
        from tests.rollouts.openenv_server import served_by_sockets

        with served_by_sockets() as (url, server):
            env = open_named(f"openenv:{url}", Settings())

        (sample,) = named_rows(f"openenv:{url}", Settings(), 1, 7)
        generator = ScriptedText(tiny[1], ["la"])
        sampler = RolloutSampler(generator, Renderer(tiny[1]), GenerationConfig(), env=env)
        (rollout,) = await sampler((Rollout(sample),))
        assert rollout.error.startswith(f"the server {url} cannot be reached") and server is not None
        with pytest.raises(ValueError, match=f"no server at {url}"):
            open_named(f"openenv:{url}", Settings())

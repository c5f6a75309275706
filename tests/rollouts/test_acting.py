"""Models that see and act: what they are shown, which tokens are actions, and which of them are trained with what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from oxrl import ActionTokens, ActionWords, EmbeddedGenerator, Renderer, load_model, load_samples
from oxrl.algorithms import algorithm, credit
from oxrl.algorithms.advantages import gae_credit, group_credit
from oxrl.algorithms.assemble import conversation_items
from oxrl.algorithms.rows import rows_of
from oxrl.backends.local import create_pytorch_backend
from oxrl.config import check_config
from oxrl.data.episodes import write_episodes
from oxrl.data.media import load_image
from oxrl.data.pack import collate, count_units
from oxrl.rollouts.collect import RolloutSampler
from oxrl.rollouts.environments.expert import expert_steps
from oxrl.rollouts.environments.observations import observation_content
from oxrl.rollouts.environments.table import Settings, named_rows, open_named
from oxrl.rollouts.record import rollout_from_json, rollout_to_json
from oxrl.run.prepare import resolve
from oxrl.types import Generation, GenerationConfig, Request, Rollout, Row
from tests.rows import write_jsonl

pytestmark = pytest.mark.anyio
LINE = "gym:tests.rollouts.example_environments:Line-v0"
BINS = {"low": -1, "high": 1, "bins": 16}  # the middles of the intervals are odd sixteenths
HALF = [[0.5625]]
PLAIN = {"show": ["camera.image", "mission"]}


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Acting:
    """A generator that answers with the tokens of these actions, or with these tokens."""

    version = 0

    def __init__(self, render: Renderer, codec: Any, answers: Sequence[Any]) -> None:
        self.render, self.codec, self.answers = render, codec, list(answers)
        self.requests: list[Request] = []
        self.samplings: list[GenerationConfig] = []

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        self.requests += requests
        self.samplings.append(sampling)
        return [self._one(sampling) for _ in requests]

    def _one(self, sampling: GenerationConfig) -> Generation:
        answer = self.answers.pop(0)
        tokenizer = self.render.tokenizer
        ids = answer if isinstance(answer, tuple) else self.codec.encode(answer, tokenizer)
        ids = (*ids, self.render.end_token_id)[: sampling.max_new_tokens]
        logprobs = tuple(-0.5 - 0.25 * number for number in range(len(ids)))
        reason = "stop" if ids[-1] == self.render.end_token_id else "length"
        return Generation(ids, logprobs, reason, allowed_tokens=sampling.allowed_tokens)


async def played(tokenizer: Any, answers: Sequence[Any], seed: int = 5, n: int = 1, env: str = LINE, **args: Any):
    """`n` episodes of the row of a seed, and the generator that acted."""
    limit = args.pop("max_new_tokens", 8)
    settings = Settings({**PLAIN, "actions": BINS, **args}, max_turns=4)
    codec = (
        ActionWords(**settings.args["actions"])
        if "words" in settings.args["actions"]
        else ActionTokens(**settings.args["actions"])
    )
    generator = Acting(Renderer(tokenizer, actions=codec), codec, answers)
    (row,) = named_rows(env, settings, 1, seed)
    sampler = RolloutSampler(
        generator, Renderer(tokenizer), GenerationConfig(max_new_tokens=limit), env=open_named(env, settings)
    )
    rollouts = []
    for index in range(n):  # one after the other: answers are in order
        rollouts += await sampler((Rollout(row, index=index),))
    return rollouts, generator


def trained(row: Row) -> list[int]:
    return row.tokens[row.mask].tolist()


def picture_of(media: Any) -> Any:
    return np.asarray(load_image(media))


def test_pictures_come_first_then_numbers_and_texts():
    image = np.arange(28 * 28 * 3, dtype=np.uint8).reshape(28, 28, 3)
    observation = {"camera": {"image": image}, "mission": "walk", "place": np.array([0.12345])}
    parts = observation_content(observation)
    np.testing.assert_array_equal(picture_of(parts[0]["image"]), image)
    assert parts[1:] == [{"type": "text", "text": "mission: walk\nplace: 0.1235"}]
    assert observation_content(observation, ["place", "mission"]) == "place: 0.1235\nmission: walk"
    assert observation_content(observation, ["mission"]) == "walk"
    assert observation_content(image) == parts[:1]


async def test_each_step_is_a_prompt_of_its_own_and_a_row_with_its_picture(tiny_vlm):
    (rollout,), generator = await played(tiny_vlm[1], [HALF, HALF])
    assert rollout.metadata["ended"] == "terminated" and rollout.score.per_turn == (0.5625, 0.5625)
    assert rollout.score.parts == {"success": 1.0} and rollout.response == "0.562\n0.562"
    rows = rows_of(rollout)
    assert [row.sequence for row in rows] == [rollout.id] * 2 and len({row.id for row in rows}) == 2
    for row, turn in zip(rows, rollout.turns, strict=True):
        assert trained(row) == list(turn.generation.token_ids) and len(row) == len(turn.prompt_ids) + 2
        assert row.streams["sampler_logprob"][row.mask].tolist() == list(turn.generation.logprobs)
        assert row.media == turn.media and row.allowed_tokens == generator.samplings[0].allowed_tokens
    before, after = (picture_of(row.media[0]) for row in rows)
    assert (before[:, 0] != 255).all() and (after[:, :11] == 255).all() and (after[:, 12:] == before[:, 12:]).all()
    assert rollout.turns[0].prompt_ids == rollout.turns[1].prompt_ids  # only the picture differs


async def test_only_tokens_of_actions_and_the_end_of_a_turn_are_sampled(tiny_vlm):
    _, generator = await played(tiny_vlm[1], [HALF, HALF])
    allowed = (*range(240, 256), generator.render.end_token_id)
    assert [sampling.allowed_tokens for sampling in generator.samplings] == [allowed] * 2


async def test_the_whole_history_is_one_row_with_all_pictures(tiny_vlm):
    (rollout,), generator = await played(tiny_vlm[1], [HALF, HALF], history=True)
    contexts = [((*a.prompt_ids, *a.generation.token_ids), b.prompt_ids) for a, b in pairwise(rollout.turns)]
    assert all(after[: len(before)] == before for before, after in contexts)
    (row,) = rows_of(rollout)
    assert trained(row) == [token for turn in rollout.turns for token in turn.generation.token_ids]
    assert len(row.media) == 2 and [len(request.media) for request in generator.requests] == [1, 2]


async def test_a_chunk_is_several_actions_and_those_after_the_end_are_not_trained(tiny_vlm):
    chunk = {**BINS, "chunk": 3}
    (rollout,), _ = await played(tiny_vlm[1], [[[0.1875]] * 3, [[0.5625]] * 3], actions=chunk)
    assert rollout.score.per_turn == (0.5625, 0.5625) and rollout.metadata["ended"] == "terminated"
    first, last = rows_of(rollout)
    assert len(trained(first)) == 4 and trained(last) == list(rollout.turns[1].generation.token_ids[:1])
    assert first.streams["reward"][first.mask].tolist() == [0, 0, 0, 0.5625]
    assert last.streams["reward"][last.mask].tolist() == [0.5625] and last.streams["reward"].sum() == 0.5625
    assert sum(rollout.loss_mask) == 1
    assert rollout_from_json(json.loads(json.dumps(rollout_to_json(rollout)))) == rollout


@pytest.mark.parametrize(("until_success", "turns"), [(True, 2), (False, 4)])
async def test_an_episode_ends_with_success_if_its_world_does_not(tiny_vlm, until_success, turns):
    (rollout,), _ = await played(tiny_vlm[1], [HALF] * 4, ends=False, until_success=until_success)
    assert len(rollout.turns) == turns and rollout.score.parts == {"success": 1.0}
    assert rollout.metadata["ended"] == ("success" if until_success else "max_steps")


async def test_an_answer_that_is_no_action_leaves_the_world_as_it_is(tiny_vlm):
    (rollout,), _ = await played(tiny_vlm[1], [(250, 251), HALF, HALF], illegal_reward=-0.5)
    assert rollout.score.per_turn == (-0.5, 0.5625, 0.5625)
    assert "it has 2 action tokens, not 1" in rollout.turns[0].messages[1].text
    assert rollout.turns[0].media == rollout.turns[1].media != rollout.turns[2].media


async def test_words_are_actions_from_the_first_of_the_space(tiny_vlm):
    words = {"words": ["stay", "step", "jump"]}
    (rollout,), generator = await played(tiny_vlm[1], ["jump", "stay", "jump"], actions=words, discrete=True)
    assert rollout.score.per_turn == (0.5, 0.0, 0.5) and rollout.response == "jump\nstay\njump"
    assert generator.samplings[0].allowed_tokens == (*sorted(map(ord, "stayepjum")), generator.render.end_token_id)


async def test_too_few_tokens_for_an_answer_are_reported(tiny_vlm):
    with pytest.raises(ValueError, match="has 4 tokens with the end of the turn, .* raise rollout.max_tokens"):
        await played(tiny_vlm[1], [[[0.5]] * 3], actions={**BINS, "chunk": 3}, max_new_tokens=2)


async def test_a_group_starts_in_the_same_state_and_rows_of_an_episode_share_its_advantage(tiny_vlm):
    rollouts, _ = await played(tiny_vlm[1], [HALF, HALF, [[-0.9375]], [[0.0625]], HALF, HALF], n=2)
    assert rollouts[0].turns[0].media == rollouts[1].turns[0].media
    other, _ = await played(tiny_vlm[1], [HALF, HALF], seed=6)
    assert other[0].turns[0].media != rollouts[0].turns[0].media
    rows = tuple(row for rollout in rollouts for row in rows_of(rollout))
    assert len(rows) == 6
    (first, second) = group_credit(credit.zscore)([rows], {})
    returns = np.array([1.125, 0.25])
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    for item, advantage in zip((first, second), expected, strict=True):
        for row in item:
            np.testing.assert_allclose(row.streams["advantage"][row.mask], advantage, rtol=1e-4)
            assert not row.streams["advantage"][~row.mask].any()


async def test_gae_runs_over_the_steps_of_an_episode(tiny_vlm):
    (rollout,), _ = await played(tiny_vlm[1], [[[0.3125]], HALF, HALF])
    rows = [
        replace(
            row,
            streams={**row.streams, "value": np.arange(len(row), dtype=np.float32) / 10 + number},
            scalars={**row.scalars, "last_value": 7.0},  # after the end: not used
        )
        for number, row in enumerate(rows_of(rollout))
    ]
    (item,) = gae_credit(gamma=0.9, lam=0.8)([tuple(rows)], {})
    values = np.concatenate([row.streams["value"][row.mask] for row in rows]).astype(np.float64)
    rewards = np.array([0, 0.3125, 0, 0.5625, 0, 0.5625])  # on the end of each turn
    expected, later = np.zeros(6), 0.0
    for step in reversed(range(6)):
        following = values[step + 1] if step < 5 else 0.0
        later = expected[step] = rewards[step] + 0.9 * following - values[step] + 0.9 * 0.8 * later
    np.testing.assert_allclose(
        np.concatenate([row.streams["advantage"][row.mask] for row in item]), expected, rtol=1e-4
    )


@pytest.mark.parametrize("prompt", [None, "Be quick."])
async def test_the_row_of_an_expert_has_the_prompt_of_the_environment(tiny_vlm, tmp_path, prompt):
    given = {**PLAIN, **({} if prompt is None else {"prompt": prompt})}
    steps = list(
        expert_steps("tests.rollouts.example_environments:Line-v0", Settings(given | {"actions": BINS}), 2, seed=5)
    )
    assert [(step["episode"], step["action"]) for step in steps] == [(n, HALF[0]) for n in (0, 0, 1, 1)]
    (tmp_path / "line").mkdir()
    write_episodes(tmp_path / "line" / "episodes.parquet", steps)
    render = Renderer(tiny_vlm[1], actions=ActionTokens(**BINS))
    items = [conversation_items(sample, render) for sample in load_samples(tmp_path / "line").samples]
    (rollout,), _ = await played(tiny_vlm[1], [HALF, HALF], **({} if prompt is None else {"prompt": prompt}))
    for ((imitated,),), acted in zip(items, rows_of(rollout), strict=False):
        assert imitated.tokens.tolist() == acted.tokens.tolist() and imitated.media[0].data == acted.media[0].data
        assert trained(imitated) == trained(acted) and imitated.allowed_tokens == acted.allowed_tokens


def test_an_expert_that_never_succeeds_is_refused():
    with pytest.raises(ValueError, match="succeeded in 0 of 40 episodes"):
        list(
            expert_steps(
                "tests.rollouts.example_environments:Line-v0",
                Settings({"length": 9.0, "ends": False}),
                1,
                expert=_failing,
            )
        )
    sides = "tests.rollouts.example_environments:Sides-v0"
    with pytest.raises(ValueError, match="The last one: the expert's action 99 is not in Discrete"):
        list(expert_steps(sides, Settings(), 1, expert=lambda _: lambda: 99))
    with pytest.raises(ValueError, match="the expert returned 1 for an environment; it returns a function"):
        list(expert_steps(sides, Settings(), 1, expert=lambda _: 1))
    with pytest.raises(ValueError, match="has no method expert"):
        list(expert_steps("tests.rollouts.example_environments:Vowels-v0", Settings(), 1))


def _failing(env: Any) -> Any:
    return lambda: 1 / 0  # an expert that fails has no episode


async def test_log_probs_of_the_engine_are_those_of_the_trainer(tiny_vlm):
    model = load_model(tiny_vlm[0])
    settings = Settings({"actions": {"low": [-1, -1], "high": [1, 1], "bins": 8, "chunk": 2}}, max_turns=3)
    env, rows = "gym:oxrl/Reach-v0", named_rows("gym:oxrl/Reach-v0", settings, 2, 3)
    render = Renderer(tiny_vlm[1])
    sampler = RolloutSampler(
        EmbeddedGenerator(model, tiny_vlm[1]), render, GenerationConfig(max_new_tokens=5), env=open_named(env, settings)
    )
    rollouts = await sampler(tuple(Rollout(rows[index % 2], index=index) for index in range(4)))
    assert all(rollout.error is None for rollout in rollouts)
    items = [(row,) for rollout in rollouts for row in rows_of(rollout)]
    (outputs,) = await create_pytorch_backend(model, lr=1e-3).logprobs([collate(items)])
    sampled = np.concatenate([row.streams["sampler_logprob"] for (row,) in items])
    mask = np.concatenate([row.mask for (row,) in items])
    assert mask.sum() == sum(len(turn.generation.token_ids) - turn.unused for each in rollouts for turn in each.turns)
    np.testing.assert_allclose(outputs.logprob.numpy()[mask], sampled[mask], atol=2e-4)


def test_recorded_actions_outside_of_the_bounds_are_reported(tmp_path, caplog):
    rows = [{"instruction": "go", "action": [x, 0.0]} for x in (-1.0, 0.5, 1.0000001, 1.2)]
    (tmp_path / "moves").mkdir()
    write_jsonl(tmp_path / "moves" / "rows.jsonl", rows)
    data = {"train_files_path": str(tmp_path / "moves"), "actions": {"low": [-1, -1], "high": [1, 1]}}
    config = {"model": {"name": "tiny"}, "train": {"alg_name": "sft"}, "data": data}
    resolve(check_config(config), tmp_path / "run")
    assert "1 of 4 rows have actions outside of data.actions low and high" in caplog.text


async def test_a_model_that_imitates_an_expert_acts_by_what_it_sees(tiny_vlm, tmp_path):
    env, settings = "tests.rollouts.example_environments:Sides-v0", Settings({"actions": {"words": ["l", "r"]}})
    (tmp_path / "sides").mkdir()
    write_episodes(tmp_path / "sides" / "episodes.parquet", expert_steps(env, settings, 64))
    model = load_model(tiny_vlm[0]._replace(freeze="nothing"))
    render = Renderer(tiny_vlm[1], actions=ActionWords(["l", "r"]))
    items = [conversation_items(sample, render)[0] for sample in load_samples(tmp_path / "sides").samples]
    sampler = RolloutSampler(
        EmbeddedGenerator(model, tiny_vlm[1]),
        Renderer(tiny_vlm[1]),
        GenerationConfig(max_new_tokens=2, temperature=0.0),
        env=open_named(f"gym:{env}", settings),
    )

    async def success() -> float:
        held_out = named_rows(f"gym:{env}", settings, 40, 1000)
        played = await sampler(tuple(Rollout(row) for row in held_out))
        return float(np.mean([rollout.score.parts["success"] for rollout in played]))

    before = await success()
    backend = create_pytorch_backend(model, lr=2e-3)
    for step in range(16):
        batch = items[16 * (step % 4) : 16 * (step % 4) + 16]
        await backend.forward_backward([collate(batch)], algorithm("sft"), count_units(batch))
        await backend.optim_step()
    assert before < 0.75 and await success() > 0.9

"""Images and audio on their way through a run: what `data show` and `plan` say, environments, records, checkpoints."""

from __future__ import annotations

import json
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from PIL import Image

from oxrl.algorithms import algorithm
from oxrl.algorithms.rows import rows_of
from oxrl.backends.local import create_pytorch_backend
from oxrl.config import check_config
from oxrl.data.buffer import DataBuffer
from oxrl.data.media import identity, load_image
from oxrl.data.pack import collate, count_units
from oxrl.data.parts import take_media
from oxrl.data.processor import processor_of, save_tokenizer
from oxrl.data.render import Renderer
from oxrl.diagnose.data import inspect_data, print_report, problems
from oxrl.diagnose.model_facts import shape_facts
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.loops.online import OnlineConfig, run_online
from oxrl.models.load import load_model, load_model_config, load_tokenizer
from oxrl.rewards import grade
from oxrl.rewards.judge import judge_messages
from oxrl.rollouts.collect import RolloutConfig, RolloutSampler, sampling_manager
from oxrl.rollouts.envs import GeneratorClient, gym_env, with_tools
from oxrl.rollouts.record import rollout_from_json, rollout_to_json
from oxrl.rollouts.tool_calls import ToolCall
from oxrl.run.reward import check_graders, load_reward
from oxrl.testing import ScriptedGenerator
from oxrl.types import (
    Episode,
    Generation,
    GenerationConfig,
    Item,
    Media,
    Message,
    ModelConfig,
    Rollout,
    Sample,
    Score,
    Turn,
)
from tests.drawings import encoded, picture, png

IMAGE = 262
Built = tuple[ModelConfig, Any]


def test_data_show_says_which_images_and_how_many_tokens_and_names_problems(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "red.png").write_bytes(encoded(picture("red", 84, 56)))
    (tmp_path / "blue.png").write_bytes(encoded(picture("blue", 84, 56)))
    rows = [
        {"prompt": "Which? <image>", "response": "red", "images": ["red.png"]},
        {"prompt": "Which? <image>", "response": "red", "images": ["blue.png"]},
        {"prompt": "<image> or <image>?", "response": "red", "images": ["red.png"]},
        {"prompt": "Which?", "response": "red", "images": ["nowhere.png"]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = inspect_data(str(tmp_path / "rows.jsonl"), "tiny-vlm", "sft", 2048, {})
    numbers = report.statistics()
    assert (numbers["images"], numbers["media_tokens"], numbers["skipped"], numbers["duplicates"]) == (2, 12, 2, 0)
    assert "rows.jsonl:3: message 0 has a placeholder for an image" in report.skipped[0]
    assert "rows.jsonl:4: there is no file" in report.skipped[1]
    print_report(report, 1)
    shown = capsys.readouterr().out
    assert f"image 1: {tmp_path / 'red.png'}, 84x56 pixels, 6 tokens" in shown
    assert "<|image_pad|> x 6" in shown and "2 images, which are 12 of these tokens" in shown
    assert problems(report)


def test_a_plan_counts_the_towers_which_are_not_trained() -> None:
    facts = shape_facts(load_model_config(ModelConfig("tiny-vlm")), torch.float32)
    assert facts.parameters == facts.trained + facts.towers == 774_656
    whole = shape_facts(load_model_config(ModelConfig("tiny-vlm")), torch.float32, freeze="nothing")
    assert whole.trained == facts.parameters and whole.towers == facts.towers > 0


def test_a_saved_tokenizer_has_its_processor_with_it(tiny_vlm: Built, tmp_path: Path) -> None:
    save_tokenizer(tiny_vlm[1], tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(load_model_config(tiny_vlm[0]).to_dict()))
    processor = processor_of(load_tokenizer(str(tmp_path)))
    assert processor is not None
    before = processor_of(tiny_vlm[1])
    assert before is not None
    features = processor.features((png("red"),))
    assert all((features[name] == value).all() for name, value in before.features((png("red"),)).items())


def episode_of(env: Any, sample: Sample, tokenizer: Any, texts: list[str]) -> tuple[Rollout, ScriptedGenerator]:
    generator = ScriptedGenerator(tokenizer, texts)
    policy = GeneratorClient(generator, Renderer(tokenizer), GenerationConfig(), 0, media=sample.media)
    episode: Episode = anyio.run(partial(env, sample, policy))
    return Rollout(sample, episode.turns, score=Score(1.0), prompt_messages=episode.prompt_messages), generator


class Walk:
    """Each observation is a larger picture."""

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return self.seen(), {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.seen(), 1.0, self.steps == 2, False, {}

    def seen(self) -> Any:
        return np.full((56, 56 + 28 * self.steps, 3), 40 * self.steps, np.uint8)


def test_a_game_may_be_seen_in_pictures(tiny_vlm: Built) -> None:
    def shown(observation: Any) -> list[dict[str, Any]]:
        return [{"type": "image", "image": observation}, {"type": "text", "text": "Your move."}]

    sample = Sample("s", (Message("user", "Walk."),))
    rollout, generator = episode_of(
        gym_env(lambda sample: Walk(), to_text=shown), sample, tiny_vlm[1], ["left", "right"]
    )
    assert [len(request.media) for request in generator.requests] == [1, 2]
    assert [request.tokens.count(IMAGE) for request in generator.requests] == [4, 4 + 6]
    (row,) = rows_of(rollout)
    assert len(row.media) == 2 and (row.tokens == IMAGE).sum() == 10 and not row.mask[row.tokens == IMAGE].any()
    rendered = Renderer(tiny_vlm[1]).prompt(rollout.messages[:-2], media=row.media)
    assert rendered.tolist() == list(generator.requests[1].tokens)
    assert rollout_from_json(json.loads(json.dumps(rollout_to_json(rollout)))) == rollout


def test_a_tool_may_answer_with_a_picture(tiny_vlm: Built) -> None:
    def look(where: str) -> Any:
        """Look there."""
        return ["You see:", picture("green", 56, 56)]

    sample = Sample(
        "s", (Message("user", [{"type": "image"}, {"type": "text", "text": "Look."}]),), media=(png("red"),)
    )
    call = '<tool_call>{"name": "look", "arguments": {"where": "up"}}</tool_call>'
    rollout, generator = episode_of(with_tools([look]), sample, tiny_vlm[1], [call, "Green."])
    first, second = generator.requests
    assert first.media == sample.media and second.media[:1] == sample.media
    assert identity(second.media[1]) != identity(sample.media[0])
    assert (first.tokens.count(IMAGE), second.tokens.count(IMAGE)) == (4, 8)
    assert tiny_vlm[1].decode(second.tokens).count("You see:<|vision_start|>") == 1
    assert [row.media for row in rows_of(rollout)][-1] == second.media


@pytest.mark.trains
def test_ten_turns_with_tools_and_pictures_train_every_sampled_token_once(tiny_vlm: Built) -> None:
    """Sampled by the real engine: its log-probs are those of the trainer, with every picture at its position."""
    config, tokenizer = tiny_vlm
    model = load_model(config)

    def look(text: str) -> list[Any]:
        """Look."""
        return ["You see:", picture("blue" if len(text) % 2 else "red", 56, 28 * (1 + len(text) % 3))]

    def is_blue(rollout: Rollout) -> float:
        given, *shown = [load_image(medium).getpixel((14, 7)) for medium in rollout.media]
        assert given == (0, 128, 0)
        return float(np.mean([pixel == (0, 0, 255) for pixel in shown]))

    generator = EmbeddedGenerator(model, tokenizer)
    sampling = GenerationConfig(max_new_tokens=16, stop_token_ids=tuple(range(128)))  # random weights never stop
    env = with_tools([look], max_turns=10, tool_parser=lambda text: [ToolCall("look", {"text": text})])
    sampler = RolloutSampler(generator, Renderer(tokenizer), sampling, env=env, seed=1)
    rollouts = RolloutConfig(batch_size=1, n_samples_per_prompt=4, reward_fn=is_blue)
    samples = [Sample("rows:0", (Message("user", [{"type": "image"}]),), media=(png("green"),))]
    manager = sampling_manager(DataBuffer(samples), sampler, rollouts)
    backend = create_pytorch_backend(model, lr=1e-3)
    grpo, render, seen = algorithm("grpo"), sampler.render, []
    run = partial(run_online, backend, grpo, manager, [generator], render, OnlineConfig(num_steps=1))
    (step,) = anyio.run(partial(run, observe=lambda step, groups: seen.extend(chain.from_iterable(groups))))
    assert step["logprob_gap"] < 1e-4 and step["grad_norm"] > 0
    assert [len(rollout.turns) for rollout in seen] == [10] * 4
    for rollout in seen:
        check_tokens(rollout, tokenizer)


def check_tokens(rollout: Rollout, tokenizer: Any) -> None:
    """All that was sampled is trained once, in order, with its own log-prob, and nothing else is."""
    generations = [turn.generation for turn in rollout.turns]
    rows = rows_of(rollout)
    trained = [token for row in rows for token in row.tokens[row.mask].tolist()]
    assert trained == [token for each in generations for token in each.token_ids]
    logprobs = [value for row in rows for value in row.streams["sampler_logprob"][row.mask].tolist()]
    assert logprobs == np.float32([value for each in generations for value in each.logprobs]).tolist()
    (last,) = rows  # each prompt extends the one before
    assert last.media == rollout.media and not last.mask[last.tokens == IMAGE].any()
    shown = tokenizer.decode(last.tokens[~last.mask])
    assert shown.count("You see:<|vision_start|>") == len(rollout.turns) - 1


@pytest.mark.trains
def test_a_model_that_reads_images_judges_answers_by_them(tiny_vlm: Built, tmp_path: Path) -> None:
    """A judge that was taught to score red pictures 9, and blue ones 2, whatever the answer is."""
    name, tokenizer = tiny_vlm
    rubric = "Red?"

    def rollout_of(color: str, answer: str) -> Rollout:
        turn = Turn((1,), Generation((2,), (-1.0,), "stop", text=answer), (Message("assistant", answer),))
        question = Message("user", [{"type": "image"}, {"type": "text", "text": "Red?"}])
        seen = Media("image", encoded(Image.new("RGB", (56, 28), color)))
        return Rollout(Sample("s", (question,), media=(seen,)), (turn,))

    def lesson(number: int) -> Item:
        color = ("red", "blue")[number % 2]
        asked = judge_messages(rollout_of(color, "yes no".split()[number // 2 % 2]), rubric, (0, 10))
        bare, media = take_media(asked)
        reply = Message("assistant", f"Score: {9 if color == 'red' else 2}")
        return tuple(Renderer(tokenizer).conversation([*bare, reply], id=f"{number}", media=media))

    judge = create_pytorch_backend(load_model(name._replace(freeze="nothing")), lr=3e-3)
    items = [lesson(number) for number in range(4)]

    async def teach() -> None:
        for _ in range(50):
            await judge.forward_backward([collate(items)], algorithm("sft"), count_units(items))
            await judge.optim_step()

    anyio.run(teach)
    judge.save(tmp_path / "judge")
    save_tokenizer(tokenizer, tmp_path / "judge")
    config = check_config(
        {
            "model": {"name": "tiny-vlm", "device": "cpu"},
            "data": {"train_files_path": "rows.jsonl"},
            "train": {"alg_name": "rlaif"},
            "reward": {"judge": str(tmp_path / "judge"), "rubric": rubric},
        }
    )
    reward = load_reward(config)
    assert reward is not None
    given = [rollout_of(color, answer) for color in ("red", "blue") for answer in ("yes", "no")]
    graded = anyio.run(partial(grade, given, reward))
    assert [each.reward for each in graded] == pytest.approx([0.9, 0.9, 0.2, 0.2])
    check_graders(config, [given[0].sample])
    text_only = config.model_copy(update={"reward": config.reward.model_copy(update={"judge": "tiny"})})
    with pytest.raises(ValueError, match="s has images, and tiny, which grades the answers, reads text only"):
        check_graders(text_only, [given[0].sample])

"""Before a run: whether reference answers, as a model would have to sample them, earn more than wrong ones."""

import logging

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import Config, ConfigError
from oxrl.data.render import Renderer
from oxrl.rewards import reward
from oxrl.rewards.references import compare_references
from oxrl.rollouts.envs import GeneratorClient, single_turn
from oxrl.run.reward import check_references
from oxrl.testing import ScriptedGenerator
from oxrl.types import GenerationConfig, Message, Rollout, Sample
from tests.data import chat_templates as styles
from tests.data.chat_templates import byte_level
from tests.rows import sums, write_jsonl

FAMILIES = {
    name: getattr(styles, name)
    for name in (
        "CHATML",
        "LLAMA3",
        "QWEN25",
        "QWEN3",
        "GEMMA",
        "MISTRAL",
        "PHI3",
        "LLAMA2",
        "DEEPSEEK_V3",
        "DEEPSEEK_R1",
        "COHERE",
    )
}
THOUGHT = "12 * 12 is 144.\n</think>\n<answer>\n144\n</answer>"


def some_samples():
    return [Sample(f"rows:{i}", (Message("user", f"What is {i} * {i}?"),), answer=str(i * i)) for i in range(10, 14)]


def renderer(style, **template_kwargs):
    return Renderer(byte_level(style), template_kwargs=template_kwargs)


def opened_in(render):
    return render.opened(render.prompt(some_samples()[0].messages).tolist())


def compared(render, name, samples=None, **params):
    rows = some_samples() if samples is None else samples
    return compare_references(reward(name, **params), rows, opened=opened_in(render), as_sampled=render.as_sampled)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["reasoning_reward_func", "math_reward_func", "gsm8k_reward_func", "exact_match"])
def test_every_template_family_lets_a_perfect_answer_earn_the_full_reward(family, name):
    render = renderer(FAMILIES[family])
    assert opened_in(render) == ("<think>\n" if family == "DEEPSEEK_R1" else "")
    found = compared(render, name)
    assert (found.right_earns, found.wrong_earns) == (1.0, 0.0)


def test_reasoning_that_the_prompt_closes_leaves_no_way_to_earn_a_reward_for_reasoning():
    render = renderer(styles.QWEN3, enable_thinking=False)
    assert opened_in(render) == "<think>\n\n</think>\n\n"
    found = compared(render, "reasoning_reward_func")
    assert found.right_earns == found.wrong_earns == 0.0
    assert compared(render, "gsm8k_reward_func").right_earns == 1.0


def test_a_format_of_special_tokens_cannot_be_earned_because_sampling_drops_them():
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    special = styles.CHATML._replace(special=(*styles.CHATML.special, *tags))
    assert compared(renderer(special), "reasoning_reward_func").right_earns == 0.0
    assert compared(renderer(styles.CHATML._replace(added=tags)), "reasoning_reward_func").right_earns == 1.0


@pytest.mark.anyio
async def test_a_rollout_has_what_its_prompt_opened_and_rewards_read_it():
    render = renderer(styles.DEEPSEEK_R1)
    for text, expected in ((THOUGHT, 1.0), ("12 * 12 is 144", 0.0)):
        generator = ScriptedGenerator(render.tokenizer, [text])
        sample = some_samples()[2]
        episode = await single_turn(
            sample, GeneratorClient(generator, render, GenerationConfig(max_new_tokens=200), seed=1)
        )
        (turn,) = episode.turns
        assert (turn.generation.opened, turn.generation.text) == ("<think>\n", text)
        for name in ("reasoning_reward_func", "gsm8k_reward_func"):  # reasoning that does not end has no answer
            outcomes = await reward(name).outcomes([Rollout(sample, (turn,))], 30.0)
            assert outcomes[0].value == expected, (name, text)


def a_config(**section):
    return Config.model_validate(
        {"model": {"name": "tiny"}, "data": {"train_files_path": "rows.jsonl"}, "reward": section}
    )


def test_a_run_stops_and_shows_both_completions():
    config = a_config(reward_func="reasoning_reward_func")
    check_references(config, some_samples(), renderer(styles.DEEPSEEK_R1))
    with pytest.raises(ConfigError) as error:
        check_references(config, some_samples(), renderer(styles.QWEN3, enable_thinking=False))
    for fact in ("reasoning_reward_func", "rows:10", "'100'", "'101'", "earns 0", repr("<think>\n\n</think>\n\n")):
        assert fact in str(error.value)


def test_only_rewards_that_read_answers_must_prefer_correct_ones(tmp_path, caplog):
    render = renderer(styles.CHATML)
    check_references(a_config(reward_func="tag_format"), some_samples(), render)
    (tmp_path / "mine.py").write_text("def always(rollout):\n    return 1.0\n")
    with caplog.at_level(logging.WARNING):
        check_references(a_config(reward_func=f"{tmp_path}/mine.py:always"), some_samples(), render)
    assert "earns 1" in caplog.text and "does not depend on answers is fine" in caplog.text
    caplog.clear()
    check_references(a_config(reward_func="exact_match"), some_samples(), render)
    check_references(a_config(reward_func="code_reward_func"), [], render)
    assert not caplog.text


def test_programs_are_compared_by_their_solutions_and_rows_without_one_are_not():
    sample = Sample(
        "rows:1",
        (Message("user", "Write double(x)."),),
        metadata={
            "tests": ["assert double(2) == 4"],
            "entry_point": "double",
            "solution": "def double(x):\n    return 2 * x",
        },
    )
    found = compared(renderer(styles.DEEPSEEK_R1), "code_reward_func", [sample])
    assert (found.right_earns, found.wrong_earns) == (1.0, 0.0)
    body = Sample("rows:2", sample.messages, metadata={**sample.metadata, "solution": "    return 2 * x"})
    assert compared(renderer(styles.CHATML), "code_reward_func", [body]) is None


def test_the_command_refuses_a_reward_that_pays_every_answer_before_anything_is_loaded(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", sums(8))
    train = ["train", "--model", "tiny", "--algorithm", "grpo", "--data", str(rows), "--reward", "number_match"]
    done = CliRunner().invoke(app, [*train, "--set", "reward.clamp=[1,2]", "--output", str(tmp_path / "run")])
    assert done.exit_code == 2, done.output
    assert "no more than wrong ones" in " ".join(done.output.split())
    assert not (tmp_path / "run" / "checkpoints").exists()

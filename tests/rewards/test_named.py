"""Rewards that recipes name: on typical model outputs, and on rows of datasets (`tests/data/cases.py`)."""

import json
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import Config
from oxrl.data.prepare import DATASETS, prepare_samples
from oxrl.data.render import Renderer
from oxrl.models.load import load_tokenizer
from oxrl.models.reward_model import load_reward_model, score_tokens
from oxrl.names import import_object
from oxrl.rewards import BUILDERS, REWARDS, clamp, describe_rewards, grade, reward
from oxrl.rewards.choice import chosen_letter
from oxrl.rewards.named import (
    format_reward_func,
    gsm8k_reward_func,
    math_reward_func,
    mcqa_reward_func,
    reasoning_reward_func,
    soft_math,
)
from oxrl.rewards.numbers import claimed_number
from oxrl.rewards.trial import final_answer, try_reward
from oxrl.run.checkpoint import best_checkpoint
from oxrl.run.reward import configured_reward, named_reward
from oxrl.tracking.metrics import read_metrics
from oxrl.types import Message, Sample
from tests.data.cases import CASES, case_name, copies_of
from tests.rewards.rollouts import a_rollout
from tests.rows import write_jsonl

DOCS = Path(__file__).parents[2] / "docs" / "rewards.md"
with_table = import_object(f"{DOCS.parent}/rewards_table.py:with_table")
WORKED = "She buys 3 boxes of 6, so 3 * 6 = <<3*6=18>>18 eggs.\n#### 18"

OWN = [
    (
        "Ann has 3 bags of 4 pears and eats 2. How many are left?",
        "3 * 4 = <<3*4=12>>12\n12 - 2 = <<12-2=10>>10\n#### 10",
    ),
    ("A car costs $1,500 and its tyres $250 more each. What do 4 tyres and the car cost?", "#### 8,500"),
    ("It was 5 degrees and fell by 12. How warm is it?", "5 - 12 = -7\n#### -7"),
    ("Half of 25 apples are red. How many?", "#### 12.5"),
]


NAMED = [case for case in CASES if case.dataset in ("gsm8k", "svamp")]


def rows_of(case, folder):
    """The first 200 of the test split; without a case, the rows above."""
    if case is None:
        return [Sample(f"own:{i}", (Message("user", q),), answer=a) for i, (q, a) in enumerate(OWN)]
    return prepare_samples(DATASETS[case.dataset], copies_of(case, folder / "copies").files)[0]["test"]


@pytest.mark.parametrize(
    ("text", "lenient", "strict"),
    [
        (WORKED, 1.0, 1.0),
        ("#### 18", 1.0, 1.0),
        ("#### **$18.00**.", 1.0, 1.0),
        ("<think>20?</think>3 * 6 = 18\n#### 18", 1.0, 1.0),
        ("So she has 18 eggs.", 1.0, 0.0),
        (r"\boxed{18}", 1.0, 0.0),
        ("#### 17", 0.0, 0.0),
        ("#### 17, 18", 1.0, 0.0),
        ("#### 18\n#### 19", 0.0, 0.0),
        ("#### not 18", 0.0, 0.0),
        ("It is 17, not 18.", 0.0, 0.0),
        ("#### ", 0.0, 0.0),
        ("<think>#### 18", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_gsm8k(text, lenient, strict):
    assert gsm8k_reward_func(a_rollout(text, WORKED)) == lenient
    assert gsm8k_reward_func(a_rollout(text, WORKED), strict=True) == strict


@pytest.mark.parametrize(
    ("text", "strict", "lenient", "soft"),
    [
        (r"So $x = \boxed{\frac{1}{2}}$.", 1.0, 1.0, 1.0),
        (r"\boxed{0.5}", 1.0, 1.0, 1.0),
        ("The answer is 1/2.", 0.0, 1.0, 0.5),
        (r"\boxed{2}, and not 1/2", 0.0, 0.0, 0.0),
        (r"1/2 \boxed{}", 0.0, 0.0, 0.0),
        ("The answer is not 1/2.", 0.0, 0.0, 0.0),
        ("not 1/2", 0.0, 0.0, 0.0),
        (r"\boxed{not 1/2}", 0.0, 0.0, 0.0),
        (r"\boxed{1/2, 1/3, 1/4}", 0.0, 0.0, 0.0),
        (r"<think>\boxed{1/2}", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_mathematics_with_and_without_a_box(text, strict, lenient, soft):
    rollout = a_rollout(text, r"Thus $\boxed{\frac12}$.")
    assert math_reward_func(rollout) == strict
    assert math_reward_func(rollout, strict=False) == lenient
    assert soft_math(rollout) == soft
    assert soft_math(rollout, unboxed=0.2) == (0.2 if soft == 0.5 else soft)


@pytest.mark.parametrize(
    ("text", "lenient", "strict"),
    [
        ("B", 1.0, 1.0),
        ("(b).", 1.0, 1.0),
        (r"It must be $\boxed{B}$.", 1.0, 1.0),
        ("<think>A or B</think><answer>B</answer>", 1.0, 1.0),
        ("The answer is B because Rome is larger.", 1.0, 0.0),
        ("The answer is not B.", 0.0, 0.0),
        ("not B", 0.0, 0.0),
        ("It isn't A, so B", 1.0, 0.0),
        ("C, not B", 0.0, 0.0),
        ("A, B, C, D", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_choices(text, lenient, strict):
    assert mcqa_reward_func(a_rollout(text, "B. Rome")) == lenient
    assert mcqa_reward_func(a_rollout(text, "B. Rome"), strict=True) == strict


def test_negated_numbers_and_letters_do_not_count():
    assert claimed_number("it is 43, not 42") == 43
    assert claimed_number("it's neither 41 nor 42; it can't be $43") is None
    assert claimed_number("x ≠ 3, y = 4, z != 5") == 4
    assert claimed_number("a knot of 42") == 42
    assert chosen_letter("not (A), and C it is") == "C"


def test_reasoning_needs_the_right_answer_inside_the_tags():
    right = "<think>3 * 6</think><answer>18</answer>"
    cases = {right: 1.0, "<think>18</think><answer>17</answer>": 0.0, "18": 0.0, "<answer>18</answer>": 0.0}
    assert {text: reasoning_reward_func(a_rollout(text, "18")).value for text in cases} == cases
    wrong = reasoning_reward_func(a_rollout("<think>a</think><answer>17</answer>", "18"), form_weight=0.25)
    assert (wrong.value, wrong.parts) == (0.25, {"form": 1.0, "correct": 0.0})
    assert reasoning_reward_func(a_rollout(right, "18"), form_weight=0.25).value == 1.0
    assert reasoning_reward_func(a_rollout("18", "18"), form_weight=0.25).value == 0.0
    continued = a_rollout("3 * 6</think><answer>18</answer>", "18")
    assert (reasoning_reward_func(continued).value, reasoning_reward_func(continued, begun=True).value) == (0.0, 1.0)


def test_reasoning_compares_answers_of_each_kind():
    kinds = {
        "math": (r"\frac12", "0.5"),
        "number": ("7 eggs", "7"),
        "choice": ("(B)", "B"),
        "text": ("Paris.", "paris"),
    }
    for kind, (text, answer) in kinds.items():
        rollout = a_rollout(f"<think>a</think><answer>{text}</answer>", answer)
        assert reasoning_reward_func(rollout, answer_is=kind).value == 1.0
    with pytest.raises(ValueError, match="answer_is must be one of math, number"):
        reasoning_reward_func(a_rollout("", "1"), answer_is="maths")
    with pytest.raises(ValueError, match="from 0 to 1"):
        reasoning_reward_func(a_rollout("", "1"), form_weight=2)


def test_the_format_reward_accepts_any_content():
    assert format_reward_func(a_rollout("<think>a</think><answer>b</answer>")) == 1.0
    assert format_reward_func(a_rollout("<think></think><answer></answer>")) == 0.0
    assert format_reward_func(a_rollout("<plan>a</plan>"), tags=["plan"]) == 1.0


@pytest.mark.parametrize("name", ["gsm8k_reward_func", "math_reward_func", "soft_math", "reasoning_reward_func"])
@pytest.mark.parametrize("case", [None, *NAMED], ids=lambda case: case_name(case) if case else "mixed")
def test_right_answers_of_rows_earn_the_full_reward_and_wrong_ones_nothing(name, case, tmp_path):
    form = "<think>so</think><answer>\\boxed{{{}}}</answer>"
    for sample in rows_of(case, tmp_path):
        final = final_answer(sample.answer)
        outcomes = anyio.run(
            grade, [_rollout(sample, form.format(final)), _rollout(sample, form.format(f"1{final}"))], reward(name)
        )
        assert [each.reward for each in outcomes] == [1.0, 0.0], sample.id


def _rollout(sample, text):
    return replace(a_rollout(text), sample=sample)


def test_the_table_is_complete_and_shown_in_the_docs():
    names = "gsm8k_reward_func math_reward_func soft_math format_reward_func mcqa_reward_func reasoning_reward_func"
    assert {*names.split()} <= REWARDS.keys()
    assert BUILDERS.keys() == {"rm_reward_func", "llm_judge"}
    assert describe_rewards()["rm_reward_func"].parameters["model"] is ...
    assert DOCS.read_text() == with_table(DOCS.read_text()), "run: python docs/rewards_table.py"
    assert "| `exact_match` |" in with_table(DOCS.read_text().replace("| `exact_match` |", "| `old` |", 1))


TRIALS = [
    (name, case)
    for name in ("number_match", "math_reward_func", "reasoning_reward_func")
    for case in NAMED
    if case.real
]


@pytest.mark.parametrize(("name", "case"), TRIALS)
def test_the_docs_show_the_results_on_real_rows(name, case, tmp_path):
    other = reward(name, strict=False) if name == "math_reward_func" else None
    report = try_reward(reward(name), rows_of(case, tmp_path), other=other)
    assert report.row() in DOCS.read_text()


def test_a_reward_with_parameters_is_named_without_regard_to_case():
    strict = reward("GSM8K-reward-func", strict=True)
    (graded,) = anyio.run(grade, [a_rollout("18", WORKED)], clamp(strict, -1.0, 0.5))
    assert graded.reward == 0.0
    with pytest.raises(ValueError, match="rm_reward_func needs model"):
        reward("rm_reward_func")
    with pytest.raises(ValueError, match="did you mean base_url"):
        reward("llm_judge", baseurl="http://localhost")


def shaped(tmp_path, **section):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "2+2?", "answer": "4"}])
    raw = {"model": {"name": "tiny"}, "data": {"train_files_path": str(rows)}, "reward": section}
    return configured_reward(Config.model_validate(raw))


def test_a_config_clamps_rewards_and_penalizes_length(tmp_path):
    both = {
        "reward_func": {"gsm8k_reward_func": 2.0, "format_reward_func": 0.5},
        "params": {"gsm8k_reward_func": {"strict": True}},
        "length_penalty": {"limit": 10, "margin": 4, "weight": 0.5},
    }
    rollouts = [
        a_rollout("#### 4", "4", tokens=range(6)),
        a_rollout("#### 4", "4", tokens=range(8)),
        a_rollout("4", "4"),
    ]
    graded = anyio.run(grade, rollouts, shaped(tmp_path, **both))
    assert [each.reward for each in graded] == [2.0, 1.75, 0.0]
    assert graded[1].score.parts == {"gsm8k_reward_func": 1.0, "format_reward_func": 0.0, "overlong_penalty": -0.5}
    graded = anyio.run(grade, rollouts, shaped(tmp_path, **both, clamp=[0.5, 1.0]))
    assert [each.reward for each in graded] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"reward_func": {"contains": 1.0}, "params": {"whole_words": False}}, "parameters by name"),
        ({"reward_func": {"contains": 1.0}, "params": {"number_match": {}}}, "parameters by name"),
        ({"reward_func": {"contains": 1.0}, "params": {"contains": {"whole": False}}}, "did you mean whole_words"),
        ({"clamp": [1.0, 0.0]}, r"clamp is \[min, max\]"),
        ({"clamp": [1.0]}, "at least 2"),
        ({"length_penalty": {"limit": 3, "margin": 4}}, "margin 4 exceeds limit 3"),
    ],
)
def test_invalid_sections_are_refused(tmp_path, section, message):
    with pytest.raises(ValueError, match=message):
        shaped(tmp_path, **{"reward_func": "contains", **section})


@pytest.mark.trains
def test_a_reward_model_is_named_by_the_run_that_trained_it(tmp_path):
    pairs = [{"prompt": f"say {i}", "chosen": "abcd"[i % 4] * 3, "rejected": "0123"[i % 4] * 3} for i in range(16)]
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"say {i}"} for i in range(4)])
    trained = CliRunner().invoke(
        app,
        ["train", "--model", "tiny", "--algorithm", "rm", "--data", str(write_jsonl(tmp_path / "pairs.jsonl", pairs)),
         "--output", str(tmp_path / "rm"), "--epochs", "4", "--lr", "3e-3"],
    )  # fmt: skip
    assert trained.exit_code == 0, trained.output
    named = named_reward("rm_reward_func", {"model": str(tmp_path / "rm")})
    good, bad = anyio.run(grade, [a_rollout("aaa", prompt="say 0"), a_rollout("000", prompt="say 0", index=1)], named)
    assert good.reward > bad.reward
    folder = str(best_checkpoint(tmp_path / "rm/checkpoints"))
    row = Renderer(load_tokenizer(folder)).conversation(good.messages, id="x")[0].tokens.tolist()
    assert good.reward == pytest.approx(score_tokens(load_reward_model(folder), [row])[0], abs=1e-5)
    config = tmp_path / "online.yaml"
    config.write_text(json.dumps({
        "model": {"name": "tiny"},
        "train": {"alg_name": "rlhf", "train_steps_per_epoch": 2, "train_batch_size_per_gpu": 2},
        "reward": {"reward_func": "rm_reward_func", "params": {"model": str(tmp_path / "rm")}, "clamp": [-0.01, 0.01]},
        "rollout": {"n_samples": 2, "max_tokens": 4},
        "data": {"train_files_path": str(prompts)},
    }))  # fmt: skip
    done = CliRunner().invoke(app, ["train", str(config), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    rewards = [line["reward"] for line in read_metrics(tmp_path / "out/metrics.jsonl")]
    assert len(rewards) == 2 and all(-0.01 <= reward <= 0.01 for reward in rewards)


def test_a_missing_reward_model_is_reported_before_anything_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="no-such-model"):
        reward("rm_reward_func", model=str(tmp_path / "no-such-model"))

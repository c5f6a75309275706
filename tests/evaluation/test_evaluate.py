"""`oxrl eval` and `evaluate`: the numbers match the answers, and wrong input is an error before weights are loaded."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oxrl import evaluate
from oxrl.cli import app
from oxrl.data.prepare import prepare
from oxrl.data.sources import load_samples
from oxrl.evaluation.evaluate import read_eval_data
from oxrl.loops.statistics import confidence_interval
from oxrl.run.reward import reward_variants
from oxrl.types import Message, Sample
from tests.rows import write_jsonl

RAW = Path(__file__).parents[1] / "data" / "raw"
HARNESS = importlib.util.find_spec("lm_eval") is not None


def run(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def questions(right: int, wrong: int) -> list[dict]:
    """For a model that answers everything with "7"."""
    return [{"prompt": f"Q{i}?", "answer": "7" if i < right else "8"} for i in range(right + wrong)]


def half_credit(rollout):
    return 0.5 if rollout.response.strip() else 0.0


def small_letters(rollout):
    tokens = rollout.generation.token_ids
    return sum(97 <= token < 123 for token in tokens) / max(1, len(tokens))


@pytest.fixture(scope="module")
def sevens(tmp_path_factory, complete_run) -> Path:
    """A run whose model was trained to answer "7" to everything."""
    folder = tmp_path_factory.mktemp("sevens")
    rows = write_jsonl(folder / "rows.jsonl", [{"prompt": f"Q{i}?", "response": "7"} for i in range(32)])
    done = CliRunner().invoke(
        app,
        ["train", "--model", "tiny", "--algorithm", "sft", "--data", str(rows), "--output", str(folder / "run"),
         "--steps", "12", "--batch-size", "16", "--lr", "5e-3"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return folder / "run"


@pytest.mark.parametrize("given", ['{"FILE:half_credit": 1.0, exact_match: 2}', '["FILE:half_credit", exact_match]'])
def test_several_rewards_are_given_with_their_weights(sevens, tmp_path, given):
    rows = write_jsonl(tmp_path / "rows.jsonl", questions(right=2, wrong=2))
    text = given.replace("FILE", str(Path(__file__)))
    done = run(sevens, "--data", rows, "--max-tokens", 8, "--reward", text, "--json")
    assert done.exit_code == 0, done.output
    expected = 0.5 + 0.5 * (2 if text.startswith("{") else 1)
    assert json.loads(done.stdout)["results"][0]["marks"]["reward"]["reward"]["mean"] == expected
    wrong = run(sevens, "--data", rows, "--reward", text.replace("2", "much").replace("[", "[["))
    assert wrong.exit_code == 2 and "several rewards look like" in wrong.output


def test_a_run_is_graded_strictly_and_leniently(sevens, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", questions(right=9, wrong=3))
    evaluation = evaluate(sevens, str(rows), "gsm8k_reward_func", max_tokens=8)
    marks = evaluation.results[0].marks
    assert list(marks) == ["lenient", "strict"]
    assert marks["lenient"].solved.mean == 0.75
    assert marks["lenient"].solved[1:] == confidence_interval([1.0] * 9 + [0.0] * 3)
    assert marks["strict"].solved.mean == 0.0  # no "####" before it
    assert (evaluation.results[0].truncated, marks["lenient"].ungraded) == (0.0, 0)
    assert "lenient       75.0%" in str(evaluation)
    assert "strict         0.0%" in str(evaluation)


def test_a_significant_gain_is_not_called_noise_and_an_insignificant_one_is(sevens, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", questions(right=12, wrong=4))
    evaluation = evaluate(sevens, str(rows), "number_match", max_tokens=4, against="tiny")
    (gain,) = evaluation.comparisons.values()
    assert (gain.better, gain.worse, gain.rows) == (12, 0, 16)
    assert gain.p == pytest.approx(2 / 2**12)
    assert "gain 75.0 points" in str(evaluation)
    assert "not noise" in str(evaluation)
    few = evaluate(sevens, str(rows), "number_match", max_tokens=4, against="tiny", limit=3)
    assert "noise with 3 rows" in str(few)


def test_the_same_seed_gives_the_same_answers_and_another_seed_different_ones(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", questions(2, 2))

    def generated(seed):
        evaluation = evaluate("tiny", str(rows), "contains", samples=3, max_tokens=6, seed=seed)
        return [rollout.generation.token_ids for rollout in evaluation.results[0].rollouts]

    assert generated(1) == generated(1)
    assert generated(1) != generated(2)
    assert len({tuple(each) for each in generated(1)}) > 4  # samples of one prompt differ


def test_several_samples_are_one_number_per_prompt(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", questions(3, 3))
    evaluation = evaluate("tiny", str(rows), small_letters, samples=4, k=[1, 4], max_tokens=6, full=0.3)
    (scores,) = evaluation.results[0].scores.values()
    (marks,) = evaluation.results[0].marks.values()
    assert [len(row) for row in scores] == [4] * 6
    means = [sum(row) / 4 for row in scores]
    assert marks.reward.mean == pytest.approx(sum(means) / 6)
    assert marks.reward[1:] == pytest.approx(confidence_interval(means))
    assert marks.solved.mean == pytest.approx(sum(reward >= 0.3 for row in scores for reward in row) / 24)
    assert marks.pass_at[1].mean == pytest.approx(marks.solved.mean)
    assert marks.pass_at[4].mean == pytest.approx(sum(max(row) >= 0.3 for row in scores) / 6)
    assert 0 < marks.pass_at[1].mean < marks.pass_at[4].mean


def test_ungraded_answers_are_counted_and_left_out(sevens, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", questions(3, 1))
    picky = tmp_path / "picky.py"
    picky.write_text(
        "def picky(rollout):\n"
        "    if rollout.sample.answer == '8':\n"
        "        raise KeyError('no eights')\n"
        "    return float(rollout.response.strip() == rollout.sample.answer)\n"
        "def broken(rollout):\n"
        "    raise KeyError('nothing at all')\n"
    )
    done = run(sevens, "--data", rows, "--reward", f"{picky}:picky", "--max-tokens", 4, "--json")
    assert done.exit_code == 0, done.output
    marks = json.loads(done.stdout.splitlines()[-1])["results"][0]["marks"]["reward"]
    assert (marks["solved"]["mean"], marks["graded"], marks["ungraded"]) == (1.0, 3, 1)
    failed = run(sevens, "--data", rows, "--reward", f"{picky}:broken", "--max-tokens", 4)
    assert failed.exit_code == 1
    assert "none of 4 answers" in failed.output
    assert "nothing at all" in failed.output


def test_all_answers_go_to_a_file(sevens, tmp_path):
    rows, output = write_jsonl(tmp_path / "rows.jsonl", questions(1, 1)), tmp_path / "answers.jsonl"
    done = run(sevens, "--data", rows, "--reward", "gsm8k_reward_func", "--against", "tiny", "--output", output)
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [(each["id"], each["answer"]) for each in records] == [("rows.jsonl:1", "7"), ("rows.jsonl:2", "8")] * 2
    assert [each["rewards"] for each in records[:2]] == [
        {"lenient": 1.0, "strict": 0.0},
        {"lenient": 0.0, "strict": 0.0},
    ]
    assert records[0]["model"] == str(sevens)
    assert records[0]["response"].strip() == "7"
    assert f"{sevens}: 2 of 2 prompts done" in done.output  # not on a terminal: lines


def test_a_dataset_by_name_brings_its_test_split_and_its_reward(sevens, tmp_path, monkeypatch):
    monkeypatch.setenv("OXRL_DATA_DIR", str(tmp_path))
    folder = prepare("gsm8k", files=[f"train={RAW / 'gsm8k.train.jsonl'}", f"test={RAW / 'gsm8k.test.jsonl'}"])
    evaluation = evaluate(sevens, "gsm8k", limit=2, max_tokens=4)
    assert (evaluation.data, evaluation.reward, evaluation.rows) == ("gsm8k:test", "gsm8k_reward_func", 2)
    by_file = evaluate(sevens, folder / "test.jsonl", limit=2, max_tokens=4)
    assert by_file.reward == "gsm8k_reward_func"
    assert by_file.results[0].scores == evaluation.results[0].scores
    assert evaluate(sevens, "gsm8k:train", limit=1, max_tokens=4).data == "gsm8k:train"


def test_samples_in_memory_and_a_reward_function_are_accepted():
    samples = [Sample(f"s{i}", (Message("user", f"{i}?"), Message("assistant", "x"))) for i in range(3)]
    evaluation = evaluate("tiny", samples, half_credit, max_tokens=4, temperature=1.0)
    assert evaluation.results[0].rollouts[0].sample.answer == "x"  # the reply is not shown to the model
    assert evaluation.results[0].marks[""].reward.mean <= 0.5
    assert json.loads(json.dumps(evaluation.to_dict()))["rows"] == 3


def test_rows_are_read_with_the_columns_of_the_run_if_they_have_them():
    run = {"data": {"prompt": "{Body} {Question}", "answer": "Answer", "system": None, "columns": {}}}
    rows = [{"Body": "Two and two.", "Question": "How many?", "Answer": "4"}]
    (sample,) = read_eval_data(rows, run=run).samples
    assert (sample.messages[-1].text, sample.answer) == ("Two and two. How many?", "4")
    template = {name: run["data"][name] for name in ("prompt", "answer")}
    assert read_eval_data(load_samples(rows, template=template)).samples == [sample]
    (plain,) = read_eval_data([{"prompt": "3?", "answer": "3"}], run=run).samples
    assert (plain.messages[-1].text, plain.answer) == ("3?", "3")


def test_a_prompt_longer_than_the_context_is_named(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [*questions(1, 0), {"prompt": "x" * 3000, "answer": "7"}])
    with pytest.raises(ValueError, match=r"rows.jsonl:2: a prompt of 3\d\d\d tokens does not fit"):
        evaluate("tiny", str(rows), "contains")


def test_a_reward_has_its_other_variant_behind_it():
    assert list(reward_variants("gsm8k_reward_func", {})) == ["lenient", "strict"]
    assert list(reward_variants("GSM8K-reward-func", {"strict": True})) == ["strict", "lenient"]
    assert list(reward_variants("contains", {})) == [""]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--data"),
        (["--data", "ROWS", "--harness", "x"], "one of them"),
        (["--data", "nowhere.jsonl", "--reward", "contains"], "nowhere.jsonl"),
        (["--data", "gsm8", "--reward", "contains"], "did you mean gsm8k?"),
        (["--data", "gsm8k:dev", "--reward", "contains"], "no split 'dev'"),
        (["--data", "ROWS"], "no reward is set: name one"),
        (["--data", "ROWS", "--reward", "containz"], "did you mean contains?"),
        (["--data", "ROWS", "--reward", "contains", "--param", "x=1"], "no parameter x"),
        (["--data", "BARE", "--reward", "number_match"], "cannot grade 2 of 2"),
        (["--data", "ROWS", "--reward", "contains", "--samples", 4, "--k", "8"], "pass@8 needs at least 8"),
        (["--data", "ROWS", "--reward", "contains", "--samples", 4, "--k", "one"], "--k looks like 1,4,8"),
        (["--data", "ROWS", "--reward", "contains", "--samples", 4, "--temperature", 0], "temperature 0"),
        (["--data", "ROWS", "--reward", "contains", "--against", "nowhere/at/all"], "compared with itself"),
        (["--data", "ROWS", "--reward", "contains", "--output", "nowhere/x.jsonl"], "--output"),
        (["--data", "ROWS", "--reward", "contains", "--include-path", "x"], "is for --harness"),
        (["--harness", "x", "--samples", 2], "--samples has no effect with --harness"),
        (["--data", "ROWS", "--reward", "contains"], "nowhere/at/all"),
    ],
)
def test_wrong_input_is_an_error_before_the_model_is_resolved(arguments, message, tmp_path):
    files = {
        "ROWS": write_jsonl(tmp_path / "rows.jsonl", questions(2, 0)),
        "BARE": write_jsonl(tmp_path / "bare.jsonl", [{"prompt": "a"}, {"prompt": "b"}]),
    }
    done = run("nowhere/at/all", *[files.get(each, each) for each in arguments])
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output


def test_the_second_model_is_resolved_before_the_first_is_loaded(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", questions(1, 0))
    done = run("tiny", "--data", rows, "--reward", "contains", "--against", "nowhere/at/all")
    assert done.exit_code == 2
    assert "prompts done" not in done.output


@pytest.mark.skipif(HARNESS, reason="lm_eval is installed")
def test_without_the_harness_the_error_names_the_package():
    done = run("tiny", "--harness", "hellaswag")
    assert done.exit_code == 2
    assert "pip install -e '.[harness]'" in done.output


@pytest.mark.skipif(not HARNESS, reason="lm_eval is not installed")
def test_the_harness_runs_a_custom_task_on_a_run(sevens, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"question": f"Q{i}?", "answer": i % 2} for i in range(4)])
    (tmp_path / "sevens.yaml").write_text(
        "task: oxrl_sevens\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {rows}}}}}\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        "doc_to_text: '{{question}}'\n"
        "doc_to_choice: ['7', 'x']\n"
        "doc_to_target: answer\n"
        "target_delimiter: ''\n"
        "metric_list: [{metric: acc}]\n"
    )
    done = run(sevens, "--harness", "oxrl_sevens", "--include-path", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["oxrl_sevens"]["acc,none"] == 0.5  # it prefers 7 everywhere
    assert "no task 'oxrl_eights'" in run(sevens, "--harness", "oxrl_eights", "--include-path", tmp_path).output

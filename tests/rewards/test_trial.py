"""Tests of rewards on rows: good rewards pass, and each way to hack or break a reward is found."""

import json
import random
import re
import threading
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.rewards import reward, trial, weighted
from oxrl.rewards.named import gsm8k_reward_func
from oxrl.rewards.trial import Case, final_answer, right_forms, synthetic_rollout, try_reward, wrong_answers
from oxrl.types import Message, Sample
from tests.rows import write_jsonl
from tests.waiting import HANG

SUMS = [
    Sample(
        f"sum:{i}", (Message("user", f"What is {i} plus {3 * i}?"),), answer=f"{i} + {3 * i} = {4 * i}\n#### {4 * i}"
    )
    for i in range(5, 9)
]
CHOICES = [
    Sample(f"choice:{i}", (Message("user", f"Which is {i}?\nA. one\nB. two\nC. three\nD. four"),), answer=answer)
    for i, answer in enumerate(["A", "(B)", "C. three", "D"])
]
TOWNS = [
    Sample(f"town:{i}", (Message("user", "Where?"),), answer=each) for i, each in enumerate(["Rome", "Oslo", "Lima"])
]


def problems(reward_fn, samples=SUMS, **options):
    return " | ".join(try_reward(reward_fn, samples, **options).problems)


@pytest.mark.parametrize(
    ("name", "parameters", "samples"),
    [
        ("gsm8k_reward_func", {}, SUMS),
        ("gsm8k_reward_func", {"strict": True}, SUMS),
        ("number_match", {}, SUMS),
        ("math_match", {}, SUMS),
        ("math_reward_func", {}, SUMS),
        ("soft_math", {}, SUMS),
        ("reasoning_reward_func", {}, SUMS),
        ("mcqa_reward_func", {}, CHOICES),
        ("mcqa_reward_func", {"strict": True}, CHOICES),
        ("multiple_choice", {}, CHOICES),
        ("reasoning_reward_func", {"answer_is": "choice"}, CHOICES),
        ("exact_match", {}, TOWNS),
        ("reasoning_reward_func", {"answer_is": "text"}, TOWNS),
    ],
)
def test_the_rewards_of_the_table_cannot_be_hacked(name, parameters, samples):
    report = try_reward(reward(name, **parameters), samples)
    assert report.problems == ()
    assert (report.full, report.best.in_full, report.changed, report.ungraded) == (1.0, 1.0, 0, 0)
    assert all(probe.earns == 0.0 for probe in report.cheats)
    assert 0 < report.median_seconds <= report.worst_seconds


def test_a_format_reward_may_accept_any_content_but_not_an_empty_response():
    report = try_reward(reward("format_reward_func"), SUMS, pays_for="form")
    assert report.problems == ()
    earned = {probe.name: probe.earns for probe in report.cheats}
    assert earned["form with filler"] == earned["wrong answer"] == 1.0
    assert earned["empty tags"] == earned["nothing"] == earned["prompt echoed"] == earned["a million characters"] == 0.0
    assert "empty tags earns 100.0%" in problems(lambda rollout: float("<answer>" in rollout.response), pays_for="form")
    assert "wrong answer (tags) earns 100.0%" in problems(reward("format_reward_func"))


def test_a_reward_for_mentions_is_hacked_by_lists_and_negations():
    report = try_reward(reward("contains"), TOWNS)
    hacked = {probe.name for probe in report.cheats if probe.earns == 1.0}
    assert hacked == {"all answers listed", "each answer in turn", "denied", "denied behind a wrong one"}
    assert len(report.problems) == 4


def last_word(rollout):
    """A naive reward that ignores negation."""
    words = rollout.response.replace("<", " ").replace("$", " ").strip(" .}").split()
    return float(bool(words) and final_answer(rollout.sample.answer) == words[-1].strip("*"))


BROKEN = {
    "the correct answer earns nothing in any form": lambda rollout: 0.0,
    "the correct answer earns the full reward in 75.0%": lambda rollout: (
        gsm8k_reward_func(rollout) * (rollout.sample.id != "sum:7")
    ),
    "nothing earns 100.0%": lambda rollout: float(not rollout.response or gsm8k_reward_func(rollout)),
    "form alone .hashes. earns 100.0%": lambda rollout: float("####" in rollout.response),
    "prompt echoed earns": lambda rollout: max(gsm8k_reward_func(rollout), float("What is" in rollout.response)),
    "denied .bare. earns 100.0%": last_word,
    "a million characters": lambda rollout: gsm8k_reward_func(rollout) or float(len(rollout.response) > 900_000),
    "when they were graded again": lambda rollout: gsm8k_reward_func(rollout) * random.random(),
    "could not be graded; the first: reward <lambda> failed: ZeroDivisionError": lambda rollout: (
        1 / 0 if "not" in rollout.response else gsm8k_reward_func(rollout)
    ),
    "wrong answer .bare. earns 50.0%": lambda rollout: 0.5 + 0.5 * gsm8k_reward_func(rollout),
}


@pytest.fixture(autouse=True)
def shorter(request, monkeypatch):
    """Grade a million characters only in the test that needs them, and fewer elsewhere."""
    if "a million characters" not in request.node.name:
        monkeypatch.setattr(trial, "LONG", (trial.LONG[0], 20_000))


@pytest.mark.parametrize("finding", BROKEN)
def test_each_way_to_break_a_reward_is_found(finding):
    assert re.search(finding, problems(BROKEN[finding])), problems(BROKEN[finding])


def test_the_threshold_is_a_fraction_of_the_full_reward():
    both = weighted({"reasoning_reward_func": 4.0, "format_reward_func": 1.0})
    report = try_reward(both, SUMS, threshold=0.25)
    assert (report.full, report.problems) == (5.0, ())
    assert {probe.name: probe.earns for probe in report.cheats}["wrong answer"] == pytest.approx(0.2)
    assert "wrong answer (tags) earns 20.0% of the full reward" in problems(both, threshold=0.15)


def test_an_opinion_has_no_zero_but_must_prefer_the_right_answer():
    def sensible(rollout):
        return gsm8k_reward_func(rollout) - 3.0

    def fond_of_length(rollout):
        return len(rollout.response) / 100 - 3.0

    assert problems(sensible, pays_for="opinion") == ""
    assert "ten thousand characters" in problems(fond_of_length, pays_for="opinion")


PROGRAMS = [
    Sample(
        f"code:{n}",
        (Message("user", f"Add {n}."),),
        metadata={
            "tests": [f"assert f(1) == {1 + n}"],
            "entry_point": "f",
            "solution": f"def f(x):\n    return x + {n}",
        },
    )
    for n in (2, 3)
]


def test_programs_are_tested_with_their_solution_and_with_wrong_return_values():
    report = try_reward(reward("code_reward_func", timeout=HANG), PROGRAMS, workers=2, time_limit=HANG)
    assert report.problems == () and {probe.name: probe.in_full for probe in report.right} == {
        "bare": 1.0, "as code": 1.0
    }  # fmt: skip

    def runs(rollout):
        return float("return" in rollout.response)

    assert "wrong answer (bare) earns 100.0%" in problems(runs, PROGRAMS)


def test_latency_is_measured(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))

    def slow(rollout):
        seconds[0] += 2.0 if len(rollout.response) < 1000 else 5.0
        return gsm8k_reward_func(rollout)

    report = try_reward(slow, SUMS[:1], time_limit=HANG)
    assert (report.median_seconds, report.worst_seconds) == (2.0, 5.0)


def test_a_reward_that_hangs_is_found():
    release = threading.Event()

    def hangs(rollout):
        if len(rollout.response) >= 1000:
            release.wait(HANG)
        return gsm8k_reward_func(rollout)

    try:
        report = try_reward(hangs, SUMS[:1], time_limit=0.1, workers=4)
    finally:
        release.set()
    assert "no result within 0.1 s" in report.reason
    assert any("could not be graded" in problem for problem in report.problems)


def test_strict_and_lenient_variants_are_compared():
    report = try_reward(reward("gsm8k_reward_func"), SUMS, other=reward("gsm8k_reward_func", strict=True))
    assert report.disagreement["hashes"] == report.disagreement["as in the file"] == 0.0
    assert report.disagreement["bare"] == report.disagreement["boxed"] == 1.0
    assert "strict and lenient differ: bare 100.0%" in str(report)


@pytest.mark.parametrize(
    ("answer", "final"),
    [("a\n#### 1,234", "1,234"), (r"so $\boxed{\frac12}$", r"\frac12"), ("(B)", "B"), ("C. three", "C"),
     ("Rome", "Rome"), ("A dog", "A dog"), ("145", "145"), ("EngineRequest", "EngineRequest")],
)  # fmt: skip
def test_the_final_answer_of_a_row(answer, final):
    assert final_answer(answer) == final


def test_wrong_answers_are_wrong_and_several():
    for right in ("42", "-7", "1,234", r"\frac12", "12.5", "B", "Rome", "x^2"):
        wrong = wrong_answers(right, ["Oslo", "Rome"])
        assert len(wrong) >= 3 and len({*wrong, right}) == len(wrong) + 1
    assert "42" not in wrong_answers("42.0", ["42"])


def test_numbers_are_also_written_with_separators_and_as_amounts():
    (case,) = [Case(Sample("s", answer="1234"), "1234", ("1235",))]
    forms = {name: texts[0][1] for name, texts in right_forms([case]).items()}
    assert "1,234" in forms["with separators"] and "$1,234.00" in forms["as an amount"]
    assert len(synthetic_rollout(case.sample, "four").generation.token_ids) == 1


@pytest.mark.parametrize("samples", [[], [Sample("s", (Message("user", "2+2?"),))]])
def test_rows_without_answers_are_refused(samples):
    with pytest.raises(ValueError, match="testing a reward needs rows"):
        try_reward(reward("exact_match"), samples)


@pytest.fixture
def rows(tmp_path):
    return write_jsonl(tmp_path / "rows.jsonl", [{"question": s.messages[0].content, "answer": s.answer} for s in SUMS])


def run(*arguments):
    return CliRunner().invoke(app, ["rewards", "test", *map(str, arguments)])


def test_the_command_reports_problems_by_its_exit_code(rows, tmp_path):
    good = run("gsm8k_reward_func", "--data", rows, "--limit", 3)
    assert good.exit_code == 0, good.output
    assert "on 3 rows" in good.output and "strict and lenient differ" in good.output
    own = tmp_path / "own.py"
    own.write_text("def mentions(rollout):\n    return float(rollout.sample.answer.split()[-1] in rollout.response)\n")
    bad = run(f"{own}:mentions", "--data", rows)
    assert bad.exit_code == 1
    assert "PROBLEM: denied (bare) earns 100.0%" in bad.output
    allowed = run(f"{own}:mentions", "--data", rows, "--threshold", 1)
    assert allowed.exit_code == 0


def test_the_command_prints_json_and_takes_parameters(rows):
    report = json.loads(run("gsm8k_reward_func", "--data", rows, "--param", "strict=true", "--json").stdout)
    assert report["rows"] == 4 and report["problems"] == []
    paid = {probe["name"] for probe in report["right"] if probe["in_full"] == 1.0}
    assert paid == {"hashes", "as in the file"}
    assert report["disagreement"]["bare"] == 1.0
    assert run("format_reward_func", "--data", rows).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8k_reward_fun"], "did you mean gsm8k_reward_func?"),
        (["gsm8k_reward_func", "--param", "strict"], "a parameter looks like"),
        (["gsm8k_reward_func", "--param", "strikt=true"], "did you mean strict?"),
        (["gsm8k_reward_func", "--pays-for", "money"], "one of answer, form, opinion"),
    ],
)
def test_user_errors_end_with_code_2(rows, arguments, message):
    done = run(*arguments, "--data", rows)
    assert done.exit_code == 2
    assert message in done.output


def test_a_reward_that_always_fails_is_reported():
    def broken(rollout):
        raise ZeroDivisionError("always")

    assert "could not be graded" in problems(broken) or "ungraded" in problems(broken)

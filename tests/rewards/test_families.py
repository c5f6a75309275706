r"""Each reward on typical model outputs, on cheats, and on a million characters."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oxrl.rewards import REWARDS, check_samples, reward
from oxrl.rewards.answers import answer_text
from oxrl.rewards.choice import chosen_letter, multiple_choice
from oxrl.rewards.exact import contains, exact_match
from oxrl.rewards.length import length_target, overlong_penalty
from oxrl.rewards.mathematics import boxed, equal_plainly, math_match, stated_answer
from oxrl.rewards.numbers import last_number, number_match, numbers_in
from oxrl.rewards.pattern import regex_match, tag_format
from oxrl.types import Score
from tests.clock import no_hang
from tests.rewards.rollouts import a_rollout, a_sample


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4", "4"),
        ("<think>3? no</think> 4 ", "4"),
        ("<think>a</think>b</think><answer> 4 </answer> done", "4"),
        ("<answer>3</answer> no: <answer>4</answer>", "4"),
        ("<answer>4", "4"),
        ("<think>it is 4", ""),
        ("", ""),
    ],
)
def test_the_answer_is_the_text_after_the_reasoning(text, answer):
    assert answer_text(a_rollout(text)) == answer


@pytest.mark.parametrize(
    ("text", "answer", "options", "expected"),
    [
        ("Paris", "Paris", {}, 1.0),
        ("  paris.\n", "Paris", {}, 1.0),
        ("New   York!", "new york", {}, 1.0),
        ("paris", "Paris", {"ignore_case": False}, 0.0),
        ("New  York", "New York", {"ignore_whitespace": False}, 0.0),
        ("Paris.", "Paris", {"ignore_punctuation": False}, 0.0),
        ("Paris, France", "Paris", {}, 0.0),
        ("", "Paris", {}, 0.0),
        ("Paris London Rome", "Paris", {}, 0.0),
        ("STRASSE", "straße", {}, 1.0),
    ],
)
def test_exact_match(text, answer, options, expected):
    assert exact_match(a_rollout(text, answer), **options) == expected


def test_contains_matches_whole_words():
    assert contains(a_rollout("It is Paris, of course", "paris")) == 1.0
    assert contains(a_rollout("comparison", "paris")) == 0.0
    assert contains(a_rollout("comparison", "paris"), whole_words=False) == 1.0
    assert contains(a_rollout("It is Paris", "paris"), ignore_case=False) == 0.0
    assert contains(a_rollout("it costs $5.", "$5")) == 1.0
    assert contains(a_rollout("", "paris")) == 0.0


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("12 apples and 3.5 pears", [12, Fraction(7, 2)]),
        ("1,234,567.50", [Fraction("1234567.5")]),
        ("10,20,30", [10, 20, 30]),
        ("1,2345", [1, 2345]),
        ("-5 and −7 and +3", [-5, -7, 3]),
        ("3-4 = -1", [3, 4, -1]),
        ("(3)-4", [3, 4]),
        ("$1,200 or -$3 or $-4 or €5", [1200, -3, -4, 5]),
        ("3/4 of -1/2", [Fraction(3, 4), Fraction(-1, 2)]),
        ("12/25/2024", [12, Fraction(25, 2024)]),
        ("5/0", []),
        ("1e3, 2.5E-1", [1000, Fraction(1, 4)]),
        (".5", [Fraction(1, 2)]),
        ("5 m2 of H2O", [5]),
        ("7cm, 50%", [7, 50]),
        ("**42**, $42$, \\boxed{42}, x=42.", [42, 42, 42, 42]),
        ("1e999999999", []),
        ("9" * 5000, []),
        ("no number", []),
    ],
)
def test_numbers_are_read_in_common_notations(text, numbers):
    assert numbers_in(text) == numbers


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "It is {:,}.", "${:,}", "x={}", "2 + 2 = {:,}!"]))
def test_any_integer_is_found_again(number, form):
    assert last_number(form.format(number)) == number


@given(st.fractions(min_value=-1000, max_value=1000))
def test_any_fraction_is_found_again(fraction):
    assert last_number(f"the answer is {fraction}") == fraction


@settings(max_examples=300)
@given(st.text(max_size=60))
def test_no_text_breaks_the_parsers(text):
    last_number(text)
    chosen_letter(text)
    stated_answer(text)
    boxed(text)
    equal_plainly(text, "3")


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The total is $1,200.00.", "1200", 1.0),
        ("17 + 25 = 42", "... so 17 + 25 = 42\n#### 42", 1.0),
        ("42 or 43", "42", 0.0),
        ("<answer>0.75</answer>", "3/4", 1.0),
        ("", "42", 0.0),
        ("forty-two", "42", 0.0),
        ("0.33", "1/3", 0.0),
        ("1000001", "1000000", 0.0),
        ("-0", "0", 1.0),
    ],
)
def test_number_match(text, answer, expected):
    assert number_match(a_rollout(text, answer)) == expected


def test_the_tolerance_is_relative():
    assert number_match(a_rollout("0.33", "1/3"), tolerance=0.02) == 1.0
    assert number_match(a_rollout("0.30", "1/3"), tolerance=0.02) == 0.0
    assert number_match(a_rollout("0.001", "0"), tolerance=0.5) == 0.0


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(b)", "B"),
        ("B.", "B"),
        ("**B**", "B"),
        ("B) Paris", "B"),
        ("B. A city in France", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B), since A is wrong.", "B"),
        ("The answer is B. A is wrong because it is blue.", "B"),
        ("A is too small and C too large. The correct answer is: **B**", "B"),
        ("the correct option is B", "B"),
        ("Option A is wrong. Option C is wrong. My choice: B", "B"),
        ("Answer: $B$", "B"),
        ("so \\boxed{B}", "B"),
        ("\\boxed{\\text{(B)}} and not A", "B"),
        ("\\boxed { \\text { (B) } }", "B"),
        ("\\boxed { \\text { B }", "B"),
        ("\\boxed{ ( B ) }", "B"),
        ("<letter> I think it's B", "B"),
        ("A dog has four legs, so B", "B"),
        ("The answer is A because dogs bark", "A"),
        ("The answer is a bit hard, so D", "D"),
        ("A or B", None),
        ("The answer is A or B", None),
        ("Answer: A, B, C, D", None),
        ("Answer: A B C D", None),
        ("Answer: A/B", None),
        ("The answer is A. The answer is B.", None),
        ("A) one B) two C) three D) four", None),
        ("A\nB\nC\nD", None),
        ("\\boxed{A}\\boxed{B}", None),
        ("Answer:", None),
        ("", None),
        ("Z", None),
        ("BAD CAFE", None),
        ("I'd say D'Artagnan", None),
    ],
)
def test_the_letter_that_a_response_chooses(text, letter):
    assert chosen_letter(text) == letter


@pytest.mark.parametrize("right", "ABCD")
def test_listing_all_answers_or_echoing_the_prompt_earns_nothing_whichever_is_right(right):
    prompt = "Which? Answer with a letter.\nA) red\nB) green\nC) blue\nD) black\nAnswer:"
    for text in (prompt, "A B C D", "Answer: A, B, C or D", "A. The answer is A. The answer is B.", "Answer: "):
        assert multiple_choice(a_rollout(text, right, prompt=prompt)) == 0.0, text
    assert multiple_choice(a_rollout(f"Answer: {right}", f"({right}) that")) == 1.0


def test_letters_beyond_e_must_be_configured():
    assert multiple_choice(a_rollout("The answer is J", "J"), letters="ABCDEFGHIJ") == 1.0
    with pytest.raises(ValueError, match="does not start with one of ABCDE"):
        multiple_choice(a_rollout("J", "J"))
    with pytest.raises(ValueError, match="must be letters"):
        multiple_choice(a_rollout("1", "A"), letters="A-D")


def test_regex_match():
    assert regex_match(a_rollout("call 555-1234 now"), pattern=r"\d{3}-\d{4}") == 1.0
    assert regex_match(a_rollout("call 555-1234 now"), pattern=r"\d{3}-\d{4}", whole=True) == 0.0
    assert regex_match(a_rollout("a\nB"), pattern="a.b", ignore_case=True, whole=True) == 1.0
    with pytest.raises(ValueError, match="not a regular expression"):
        check_samples(reward("regex_match", pattern="("), [a_sample()])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>\na\n</think>\n<answer>b</answer>\n", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</think></answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think></think><answer></answer>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer>", 0.0),
        ("</think><think>a<answer>b</answer>", 0.0),
        ("Sure! <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> bye", 0.0),
        ("", 0.0),
    ],
)
def test_tag_format(text, expected):
    assert tag_format(a_rollout(text)) == expected


def test_tags_can_be_configured_opened_by_the_prompt_or_surrounded_by_text():
    assert tag_format(a_rollout("a</think><answer>b</answer>"), begun=True) == 1.0
    assert tag_format(a_rollout("<think>a</think><answer>b</answer>"), begun=True) == 0.0
    assert tag_format(a_rollout("So: <think>a</think> hence <answer>b</answer>."), strict=False) == 1.0
    assert tag_format(a_rollout("<plan>a</plan>"), tags=["plan"]) == 1.0


def test_length_rewards_are_linear():
    def of(n):
        return a_rollout("x", tokens=range(n))

    assert [length_target(of(n), target=4) for n in (0, 1, 4, 6, 8, 20)] == [0.0, 0.25, 1.0, 0.5, 0.0, 0.0]
    penalties = [overlong_penalty(of(n), limit=10, margin=4) for n in (0, 6, 7, 8, 10, 99)]
    assert penalties == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="margin"):
        overlong_penalty(of(1), limit=3, margin=4)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"$\boxed 5$", "5"),
        (r"\fbox{3}", "3"),
        (r"\boxed{never closed", None),
        ("boxed{5}", None),
        ("\boxed{5}", None),  # a backspace, not a backslash
    ],
)
def test_the_last_box_is_found_with_its_matching_brace(text, inside):
    assert boxed(text) == inside


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\dfrac12", "1/2"),
        (r"-\frac{3}{4}", "-0.75"),
        (r"\frac{-3}{4}", r"-\frac34"),
        (r"1\frac{1}{2}", "1.5"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        ("1,000,000", "1000000"),
        (r"50\%", "50"),
        ("50%", "0.5"),
        (r"90^\circ", "90"),
        (r"5\text{ cm}", "5"),
        (r"\text{even}", "even"),
        ("x = 3", "3"),
        (r"$\sqrt2$", r"\sqrt{2}"),
        (r"2\cdot 3", r"2 \times 3"),
        ("3.", "3"),
        (r"x^{2}", "x^2"),
        (r"\$5", "5"),
        ("−2", "-2"),
    ],
)
def test_equal_mathematics_in_two_notations(one, other):
    assert equal_plainly(one, other)
    assert equal_plainly(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "2"),
        (r"\frac{1}{2}", r"\frac{2}{1}"),
        ("(1,2)", "(2,1)"),
        ("50%", "5000%"),
        ("", ""),
        ("1/0", "1"),
        ("/3", "3"),
    ],
)
def test_what_differs_stays_different(one, other):
    assert not equal_plainly(one, other)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (r"Thus \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"Thus \boxed{\dfrac{1}{2}}", r"We get $\boxed{\frac12}$", 1.0),
        ("The answer is $x = 7$.", "7", 1.0),
        ("It follows that \\( 12 \\) apples are left over in the end.", "12", 1.0),
        ("After a good deal of work we are left with 12 apples.", "#### 12", 1.0),
        ("12", "12", 1.0),
        ("It is 12.", "12", 1.0),
        ("The answer is **$1,200.00**.", "1200", 1.0),
        ("even", "even", 1.0),
        (r"\boxed{11}", "12", 0.0),
        (r"12 \boxed{}", "12", 0.0),
        (r"\boxed{}", "12", 0.0),
        (r"\boxed{12} \boxed{13}", "12", 0.0),
        ("", "12", 0.0),
        (r"\boxed{12^{2}^{3}}", "12", 0.0),
    ],
)
def test_math_match(text, answer, expected):
    assert math_match(a_rollout(text, answer)) == expected


def test_a_backslash_lost_in_json_is_reported_before_a_run():
    with pytest.raises(ValueError, match="control character"):
        check_samples(math_match, [a_sample("\boxed{5}")])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{x^2+2x+1}", "(x+1)^2"),
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{2,1\}}", r"\{1,2\}"),
    ],
)
def test_math_verify_knows_algebra(text, answer):
    pytest.importorskip("math_verify", reason="the extra oxrl[math] is not installed")
    import threading

    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(math_match(a_rollout(text, answer))))
    thread.start()
    thread.join()
    assert rewards == [1.0], "also in a thread, where the alarms of math-verify do not work"
    assert math_match(a_rollout(r"\boxed{x^2+2x+2}", "(x+1)^2")) == 0.0


PARAMETERS = {
    "regex_match": {"pattern": r"<b>.*</b>"},
    "length_target": {"target": 100},
    "overlong_penalty": {"limit": 100, "margin": 10},
}
PURE = [name for name in REWARDS if name not in ("reasoning_gym_score", "code_reward_func")]
CHOICES = ("multiple_choice", "mcqa_reward_func")
MILLION = 1_000_000
LONG = {
    "letters": "a" * MILLION,
    "digits": "1" * MILLION,
    "thousands": "1,111" * (MILLION // 5),
    "fractions": "1/" * (MILLION // 2),
    "spaces": "answer" + " " * MILLION,
    "choices": "A or " * (MILLION // 5),
    "claims": "the answer is " * (MILLION // 14),
    "answers": "answer: A, " * (MILLION // 11),
    "boxes": "\\boxed{" * (MILLION // 7),
    "braces": "\\boxed" + "{" * MILLION,
    "dollars": "$" * MILLION,
    "brackets": "\\(" * (MILLION // 2),
    "tags": "<think>" * (MILLION // 7),
    "dots": "." * MILLION,
    "signs": "-" * MILLION,
    "exponents": "1e" * (MILLION // 2),
    "box of spaces": "\\boxed{" + " " * MILLION,
    "long exponent": "1e" + "1" * MILLION + "a",
    "commas": "the answer is A" + "," * MILLION,
    "obligations": "answer must" + " " * MILLION,
    "hats": "\\boxed{" + "^" * MILLION + "}",
}


def value(result):
    return result.value if isinstance(result, Score) else result


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("name", PURE)
def test_a_million_characters_are_graded_in_linear_time(name, kind):
    function, rollout = REWARDS[name], a_rollout(LONG[kind], "B" if name in CHOICES else "7")
    with no_hang():
        earned = value(function(rollout, **PARAMETERS.get(name, {})))
    assert earned <= 0.5, "a text without an answer earns a reward"


@pytest.mark.parametrize("name", PURE)
@pytest.mark.parametrize("text", ["", " ", "What is 3 + 4? Options: A, B, C, D", "<think></think><answer></answer>"])
def test_empty_responses_echoed_prompts_and_format_alone_earn_nothing(name, text):
    answer = "B" if name in CHOICES else "7"
    rollout = a_rollout(text, answer, prompt="What is 3 + 4? Options: A, B, C, D", tokens=())
    rewards = {value(REWARDS[name](rollout, **PARAMETERS.get(name, {}))) for _ in range(3)}
    assert rewards == {0.0}


@pytest.mark.parametrize("name", ["exact_match", "contains", "number_match", "multiple_choice", "math_match"])
@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_sample_without_the_answer_is_refused_before_any_model_is_loaded(name, answer):
    with pytest.raises(ValueError, match=f"{name} cannot grade 1 of 1 samples: sample s1 has no `answer`"):
        check_samples(reward(name), [a_sample(answer)])


def test_an_answer_that_cannot_be_parsed_is_refused_too():
    for name, answer in [("number_match", "seven"), ("multiple_choice", "seven"), ("exact_match", "...")]:
        with pytest.raises(ValueError, match="cannot grade 1 of 1"):
            check_samples(reward(name), [a_sample(answer)])


def test_a_rollout_without_a_generation_has_no_reward():
    from oxrl.types import Rollout

    for name in ("exact_match", "number_match", "math_match"):
        with pytest.raises(ValueError, match="no generation yet"):
            REWARDS[name](Rollout(a_sample("7")))

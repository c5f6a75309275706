"""Names that tests use and do not define: a program defines what is tested, never what its results are checked with."""

import pytest

from oxrl.rewards.sandbox import names_in, undefined_names

UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        "
NOT_BELIEVED = [  # (tests, setup, entry point); the program under test is `f` or `Solution`
    ("assert close(f(1), 2)",),
    ("r = f(1)\nassert close(r[0], 2)",),
    ("x = 1\nx = f(x)\nassert close(x, 2)",),
    ("assert (r := f(1)) and close(r, 2)",),
    ("if not close(f(1), 2):\n    raise AssertionError",),
    ("while not close(f(1), 2):\n    raise AssertionError",),
    ("r = 1 if close(f(1), 2) else 1 / 0",),
    ("ok = close(f(1), 2)\nassert ok",),
    ("ok = True\nfor x in [1, 2]:\n    if not close(f(x), x):\n        ok = False\nassert ok",),
    ("assert all(close(a, b) for a, b in zip(f(1), [2, 3]))",),
    ("assert all([close(a, 2) for a in f(1)])",),
    ("assert not any(close(a, 2) for a in f(1))",),
    ("assert all(map(close, f(1), [2]))",),
    ("assert all(map(lambda a: close(a, 2), f(1)))",),
    ("assert len([x for x in [1] if close(f(x), 2)]) == 1",),
    ("for a, b in zip(f(1), [2]):\n    assert close(a, b)",),
    ("out = []\nfor x in [1]:\n    out.append(f(x))\nassert close(out[0], 2)",),
    ("d = {}\nd['a'] = f(1)\nassert close(d['a'], 2)",),
    ("assert close(f(1), 2) == True",),
    ("assert close(f(1), 2) is not None",),
    ("assert close(f(1)) == close(2)",),
    ("near = close\nassert near(f(1), 2)",),
    ("near = lambda a: close(a, 2)\nassert near(f(1))",),
    ("def run(x):\n    return f(x)\nassert close(run(1), 2)",),
    ("def test_it():\n    r = f(1)\n    assert close(r, 2)",),
    (f"{UNITTEST}self.assertTrue(close(f(1), 2))",),
    ("assert close(Solution().f(1), 2)",),
    ("s = Solution()\nassert close(s.f(1), 2)",),
    ("check(f)", "def check(candidate):\n    r = candidate(1)\n    assert close(r, 2)", "f"),
    ("check(f)", "def check(function):\n    assert close(function(1), 2)"),
]
PROGRAM = [
    ("assert add(1, 2) == 3\nassert mul(2, 2) == 4",),
    ("assert decode(encode('a')) == 'a'",),
    ("x = encode('a')\nassert decode(x) == 'a'",),
    ("for x in ['a', 'b']:\n    assert decode(encode(x)) == x",),
    ("for got, want in zip(items(1), [2]):\n    assert rounded(got) == want",),
    ("import math\nassert math.isclose(area(square(2)), 4)",),
    ("def near(a, b):\n    return abs(a - b) < 1e-6\nassert near(area(square(2)), 4)",),
    (f"{UNITTEST}self.assertEqual(decode(encode('a')), 'a')",),
    ("assert even(2)",),
    ("assert even(after(2))\nassert not even(after(3))",),
    ("t = build([1, 2])\nassert contains(t, 1) == True\nassert contains(t, 3) == False",),
    ("assert find(build([1]), 1) is not None\nassert find(build([1]), 3) is None",),
    ("assert is_search_tree(Node(2, Node(1), Node(3)))",),
    ("g = Graph()\ng.add(1, 2)\nassert has_path(g, 1, 2)",),
    ("s = make_stack()\npush(s, 1)\nassert pop(s) == 1",),
    ("user = create('a')\nsave(user)\nassert load('a') == 'a'",),
    ("x = first(1)\nassert x == 2\nx = 3\nassert even(x)",),
    ("assert fold(lambda a, b: mul(a, b), [1, 2], 1) == 2",),
]


@pytest.mark.parametrize("task", NOT_BELIEVED)
def test_a_name_that_only_checks_results_is_not_the_programs(task):
    test, setup, entry_point = (*task, *("", None)[len(task) - 1 :])
    assert set(names_in([test], setup, entry_point).program) <= {"f", "Solution"}


def test_a_function_that_is_called_for_its_exceptions_is_not_the_programs():
    assert names_in(["assert_close(f(1), 2)", "r = f(1)\nassert r != 0\nassert_close(r, 2)"], "").program == ("f",)


def test_results_are_followed_from_one_test_to_the_next():
    assert names_in(["r = f(1)", "assert close(r, 2)"], "").program == ("f",)
    assert names_in(["x = f(1)\nassert x == 2", "x = 3\nassert even(x)"], "").program == ("even", "f")


@pytest.mark.parametrize("task", PROGRAM)
def test_functions_that_the_tests_constrain_are_the_programs(task):
    assert set(names_in(task, "").program) == undefined_names(task, "")

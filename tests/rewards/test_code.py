"""Programs are graded by their tests; a hostile program earns nothing, and the next one is still graded."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import anyio
import pytest

from oxrl.config import Config
from oxrl.rewards import check_samples, code, grade, reward
from oxrl.rewards.code import code_reward_func
from oxrl.rewards.sandbox import process
from oxrl.run.reward import configured_reward
from tests.clock import no_hang
from tests.rewards.hostile import ALWAYS_EQUAL, HOSTILE
from tests.rewards.rollouts import a_rollout, a_sample
from tests.rewards.sandbox.children import children
from tests.waiting import EXPIRES, HANG

TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert sorted(add([2], [1])) == [1, 2]"]
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.fixture
def by_cpu_time(monkeypatch):
    """Endless programs end at their CPU limit, which depends on no other process."""
    monkeypatch.setattr(code, "_WALL_TO_CPU", HANG)


def reward_of(program, tests=TESTS, *, setup="", entry_point=None, prompt="Add.", fenced=True, **options):
    text = f"Here it is:\n```python\n{program}\n```\nDone." if fenced else program
    rollout = a_rollout(text, prompt=prompt, tests=tests, setup=setup, entry_point=entry_point)
    return code_reward_func(rollout, **{"timeout": HANG, **options})


def test_a_right_program_earns_1_and_a_wrong_one_nothing():
    assert reward_of(RIGHT) == 1.0
    assert reward_of("def add(a, b):\n    return a") == 0.0
    assert reward_of("def add(a, b):\n    return a - b") == 0.0
    assert reward_of("def plus(a, b):\n    return a + b") == 0.0
    assert reward_of("def add(a, b) return") == 0.0
    assert reward_of("raise ValueError") == 0.0


def test_partial_credit_is_the_share_of_tests_passed(by_cpu_time):
    only_numbers = "def add(a, b):\n    return a + b if isinstance(a, int) else None"
    assert reward_of(only_numbers, partial=True, timeout=2.0) == pytest.approx(1 / 3)
    assert reward_of(RIGHT, partial=True, timeout=2.0) == 1.0
    hangs_later = "def add(a, b):\n    while not isinstance(a, int): pass\n    return a + b"
    assert reward_of(hangs_later, partial=True, timeout=2.0) == pytest.approx(1 / 3)


def test_a_program_that_blocks_ends_at_the_wall_clock_limit():
    assert reward_of("import signal\ndef add(a, b): signal.pause()", timeout=0.4 * EXPIRES) == 0.0


def test_the_last_python_block_counts_and_reasoning_does_not():
    wrong = "```python\ndef add(a, b): return 0\n```"
    shell = "```bash\npip install add\n```"
    assert reward_of(f"{wrong}\nNo:\n```python\n{RIGHT}```\nRun\n{shell}", fenced=False) == 1.0
    assert reward_of(f"```python\n{RIGHT}```\n{wrong}", fenced=False) == 0.0
    assert reward_of(RIGHT, fenced=False) == 1.0
    assert reward_of(f"```py\n{RIGHT}", fenced=False) == 1.0
    assert reward_of(f"<think>```python\n{RIGHT}```", fenced=False) == 0.0
    assert reward_of("", fenced=False) == 0.0


PROMPT = '''from typing import List


def twice(x: int) -> int:
    """ Helper """
    return 2 * x


def total(xs: List[int]) -> int:
    """ The sum of the doubled numbers
    >>> total([1, 2])
    6
    """
'''
CHECK = """
METADATA = {"author": "me"}

def check(candidate):
    assert candidate([1, 2]) == 6
    assert candidate([]) == 0
    for n in range(4):
        assert candidate([n] * 3) == 3 * twice(n)
    try:
        candidate(None)
        assert False
    except TypeError:
        pass
"""


def completed(text, **options):
    fenced = options.pop("fenced", False)
    options = {"setup": CHECK, "entry_point": "total", "prompt": PROMPT, **options}
    return reward_of(text, ["check(total)"], fenced=fenced, **options)


def test_a_completion_of_the_prompt_is_its_body():
    assert completed("    return sum(twice(x) for x in xs)\n") == 1.0
    assert completed("    return sum(twice(x) for x in xs)\n\nprint(total([1]))\nAnd so on, in words.") == 1.0
    assert completed("return sum(twice(x) for x in xs)", fenced=True) == 1.0
    assert completed("    return sum(xs)\n") == 0.0
    assert completed("") == 0.0
    wrapped = f"Complete this function.\n```python\n{PROMPT}```\nThanks."
    assert completed("    return 2 * sum(xs)", prompt=wrapped) == 1.0
    assert completed("    return 2 * sum(xs)", prompt=f"Complete this function:\n\n{PROMPT}") == 1.0


def test_a_whole_function_may_use_what_the_prompt_defines():
    whole = "from __future__ import annotations\ndef total(xs: List[int]):\n    return sum(map(twice, xs))"
    assert completed(whole, fenced=True) == 1.0


def test_helpers_that_tests_use_are_the_prompts_own():
    """Otherwise a program could change the expected values."""
    cheat = "def twice(x): return 0\ndef total(xs):\n    len(xs)\n    return 6 if xs == [1, 2] else 0"
    assert completed(cheat, fenced=True) == 0.0


def test_tests_see_their_own_built_ins():
    cheat = "def abs(x): return 0\ndef sorted(x): return []\nimport builtins\nbuiltins.abs = abs\ndef f(x): return 99.0"
    assert reward_of(cheat, ["assert abs(f(1) - 1.0) < 1e-6", "assert sorted([f(1)]) == []"], partial=True) == 0.0


def test_a_test_that_catches_everything_is_not_passed_by_ending():
    test = "try:\n    add(1, 2)\nexcept:\n    pass"
    assert reward_of(RIGHT, [test]) == 1.0
    assert reward_of("import os\ndef add(a, b): os._exit(0)", [test, test]) == 0.0


def test_a_function_may_be_called_like_a_built_in_one():
    assert reward_of("def sum(a, b): return a * b", ["assert sum(2, 3) == 6"]) == 1.0


def test_results_keep_their_types():
    tests = ["assert f(0) == (1, 2)", "assert f(1) == {1: {2}}", "import math\nassert math.isclose(f(2), 0.1)"]
    right = "import collections\ndef f(n): return [(1, 2), collections.defaultdict(set, {1: {2}}), 0.1][n]"
    assert reward_of(right, tests) == 1.0
    assert reward_of(right.replace("(1, 2)", "[1, 2]"), tests, partial=True) == pytest.approx(2 / 3)
    assert reward_of("def f(): yield 1", ["assert list(f()) == [1]"]) == 1.0
    assert reward_of("def f(n): return n ** n", ["assert f(3000) == 3000 ** 3000"]) == 1.0


def test_exceptions_that_tests_expect_arrive():
    test = "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError"
    assert reward_of("def f(n):\n    raise ValueError(n)", [test]) == 1.0
    assert reward_of("def f(n):\n    raise KeyError(n)", [test]) == 0.0
    own = "class ValueError(Exception): pass\ndef f(n):\n    raise type('Mine', (BaseException,), {})"
    assert reward_of(own, [test]) == 0.0


def test_attributes_of_an_exception_cannot_agree_with_the_tests():
    liar = (
        f"{ALWAYS_EQUAL}\nclass Mine(ValueError):\n    def __getattr__(self, name): return Any()\ndef f(n): raise Mine"
    )
    tests = [
        f"try:\n    f(1)\nexcept ValueError as error:\n    assert error.{test}" for test in ("code == 5", "a in [5]")
    ]
    assert reward_of(liar, tests, partial=True) == 0.0
    assert reward_of(liar.replace("Any()", "5"), tests) == 1.0


def test_a_program_that_ends_while_the_tests_describe_a_failure_earns_nothing():
    ends = "import os\nclass Mine:\n    def __str__(self): os._exit(0)\n    __repr__ = __str__\ndef f(x): return Mine()"
    assert reward_of(ends, ["assert f(1) == 2, f(1)"]) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        f"{ALWAYS_EQUAL}\ndef add(a, b): return Any()",
        f"{ALWAYS_EQUAL}\ndef add(a, b): return [Any()]",
        "def add(a, b): return add",
        "def add(a, b): return iter(int, 1)",
        "def add(a, b): return object()",
    ],
)
def test_an_object_in_place_of_a_value_is_the_programs_fault_and_earns_nothing(program):
    assert reward_of(program, TESTS[:2], partial=True) == 0.0


def test_an_object_in_place_of_a_value_cannot_agree_with_the_tests():
    """Each of these tests would tell the object what is expected of it."""
    liar = f"""{ALWAYS_EQUAL}
    def __getattr__(self, name): return lambda *_: True
    def __contains__(self, item): return True
    def __sub__(self, other): return 0
    __rsub__ = __truediv__ = __rtruediv__ = __mod__ = __sub__
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __iter__(self): return iter([Any()])
def f(x): return Any()"""
    tests = [
        "assert f(1) == 2",
        "assert 2 == f(1)",
        "assert abs(f(1) - 2.5) < 1e-6",
        "assert abs(2.5 - f(1)) < 1e-6",
        "assert 2 < f(1) < 4",
        "assert 'no' in f(1)",
        "assert f(1) in [2, 3]",
        "assert f(1).startswith('ab')",
        "assert f(1).count(2)",
        "assert isinstance(f(1), int)",
        "assert sum(f(1)) == 2",
        "assert {f(1)} == {2}",
        "assert dict(a=f(1)) == dict(a=2)",
        "import math\nassert math.isclose(f(1), 2)",
    ]
    assert reward_of(liar, tests, partial=True) == 0.0


def test_a_program_cannot_change_what_its_result_is_compared_with():
    tests = ["xs = [3, 1]\nassert f(xs) == sorted(xs)", "xs = [3, 1]\nassert len(f(xs)) == len(xs)"]
    assert reward_of("def f(xs):\n    xs.clear()\n    return []", tests, partial=True) == 0.0
    assert reward_of("def f(xs): return sorted(xs)", tests, partial=True) == 1.0


def test_a_program_cannot_end_the_loop_of_a_test():
    tests = ["assert all(map(f, [1, 2]))", "for x in map(f, [1, 2]):\n    assert x == 5", "assert [*map(f, [1])] == []"]
    for kind in ("StopIteration", "StopAsyncIteration", "GeneratorExit"):
        assert reward_of(f"def f(x): raise {kind}", tests, partial=True) == 0.0
    own = "class Mine(StopIteration): pass\ndef f(x): raise Mine"
    assert reward_of(own, tests, partial=True) == 0.0


def test_a_program_does_not_define_what_its_result_is_checked_with():
    tests = [
        "assert math.isclose(f(1), 2)",
        "assert isclose(f(1), 2)",
        "assert cmath.isclose(f(1), 2)",
        "assert Counter(f(1)) == Counter([2])",
        "assert nearly(f(1), 2)",
        "assert not differs(f(1), 2)",
        "assert normal(f(1)) == normal(2)",
        "r = f(1)\nassert nearly(r, 2)",
        "if differs(f(1), 2):\n    raise AssertionError",
        "assert all(nearly(a, 2) for a in [f(1)])",
        "assert_equals(f(1), 2)",
        "r = f(1)\nassert [nearly(r, 2)] == [True]",
        "assert list(map(nearly, [f(1)], [2])) == [True]",
        "from functools import partial\nassert partial(nearly, 2)(f(1))",
    ]
    cheat = """
class Checks:
    def __getattr__(self, name): return lambda *_: True
math = cmath = Checks()
isclose = nearly = Counter = normal = assert_equals = lambda *_: True
differs = lambda *_: False
def f(x): return 7"""
    assert reward_of(cheat, tests, partial=True) == 0.0
    assert reward_of("def f(x): return 2", tests[:3], partial=True) == 1.0
    assert reward_of("def f(x): return [2]", tests[3:4]) == 1.0


def test_a_name_that_only_a_later_test_imports_is_known_to_the_first():
    tests = ["assert f(1) == Decimal('1.0')", "from decimal import Decimal\nassert f(2) == Decimal(2)"]
    assert reward_of("from decimal import Decimal\ndef f(x): return Decimal(x)", tests) == 1.0


def test_functions_that_are_tested_themselves_may_be_combined():
    program = "def is_even(n): return n % 2 == 0\ndef after(n): return n + 2\ndef back(n): return n - 2"
    assert (
        reward_of(program, ["assert is_even(after(2))", "assert not is_even(3)", "assert back(after(1)) == 1"]) == 1.0
    )
    assert reward_of("def sqrt(x): return 2.0", ["assert sqrt(4) == 2"]) == 1.0
    flags = "def evens(xs): return [x % 2 == 0 for x in xs]\ndef up_to(n): return list(range(1, n + 1))"
    assert reward_of(flags, ["assert evens(up_to(2)) == [False, True]"]) == 1.0


def test_a_failed_assertion_of_the_tests_cannot_be_caught_by_the_program():
    test = "def check(x):\n    assert x == 5\n    return x\nf(check)"
    assert reward_of("def f(check):\n    try: check(1)\n    except AssertionError: pass", [test]) == 0.0
    assert reward_of("def f(check): check(5)", [test]) == 1.0


def test_functions_of_the_tests_are_called_in_the_process_of_the_tests():
    """A program that could look into one would find what is expected."""
    looks = "def f(g): return [g.__closure__, g.__code__, g.__globals__]"
    digs = "def f(g): return g.__call__.__func__.__globals__['answer']"
    setup = "answer = 42\ndef secret(x): return answer * 0"
    for program in (looks, digs):
        assert reward_of(program, ["assert f(secret) == 42"], setup=setup) == 0.0
    calls_itself = "def f(g): return g(3)\ndef double(x): return 2 * x"
    assert reward_of(calls_itself, ["assert f(lambda x: double(x) + 1) == 7"]) == 1.0


def test_tests_that_need_one_process_leave_a_response_ungraded():
    with pytest.raises(ValueError, match="cannot be sent"):
        reward_of("def f(x): return 1", ["class Mine: pass\nassert f(Mine()) == 1"])
    with pytest.raises(ValueError, match="derives a class from Base"):
        reward_of("class Base: pass", ["class Mine(Base): pass"])
    with pytest.raises(ValueError, match="setup: ModuleNotFoundError"):
        reward_of("def f(): return 1", ["assert f() == 1"], setup="import no_such_module")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_earns_nothing_does_no_harm_and_the_next_is_graded(name, by_cpu_time):
    others = children()
    assert reward_of(HOSTILE[name], partial=True, timeout=1.0) == 0.0
    assert reward_of(RIGHT, timeout=2.0) == 1.0
    assert not Path("/var/tmp/oxrl-hostile").exists()
    assert children() <= others


def test_a_program_cannot_connect_to_a_listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}))\n{RIGHT}"
        assert reward_of(program) == 0.0
        with pytest.raises(BlockingIOError):
            server.accept()


def test_programs_are_graded_concurrently_and_each_gets_its_own_reward():
    programs = [RIGHT, "def add(a, b): return 0"] * 8
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(reward_of, programs)) == [1.0, 0.0] * 8


def test_waiting_for_other_programs_does_not_count_against_the_time_limit():
    rollout = a_rollout(RIGHT, tests=TESTS, setup="", entry_point=None)
    graded = []

    async def grade_it():
        graded.extend(await grade([rollout], reward("code_reward_func", timeout=HANG), time_limit=EXPIRES))

    async def while_others_run():
        with ExitStack() as others:
            async with anyio.create_task_group() as tasks:
                for _ in range(code._SLOTS._initial_value):
                    others.enter_context(code._SLOTS)
                tasks.start_soon(grade_it)
                await anyio.sleep(1.1 * EXPIRES)  # nothing but the limit passes meanwhile
                others.close()

    anyio.run(while_others_run)
    assert graded[0].reward == 1.0, graded[0].error


def test_a_program_that_sleeps_beyond_the_time_limit_of_the_reward_earns_0():
    sleeps = a_rollout("import signal\nsignal.pause()", tests=TESTS, setup="", entry_point=None)
    limited = partial(grade, [sleeps], reward("code_reward_func", timeout=HANG), time_limit=EXPIRES)
    (graded,) = anyio.run(limited)
    assert graded.reward == 0.0 and graded.error is None


def test_the_start_of_the_sandbox_does_not_count(monkeypatch):
    source, sleep = process.module_source, f"import time\ntime.sleep({1.1 * EXPIRES})\n"
    slow = source("bootstrap").replace("import ctypes\n", f"{sleep}import ctypes\n", 1)
    monkeypatch.setattr(process, "module_source", lambda name: slow if name == "bootstrap" else source(name))
    rollout = a_rollout(RIGHT, tests=TESTS, setup="", entry_point=None)
    (graded,) = anyio.run(partial(grade, [rollout], reward("code_reward_func", timeout=HANG), time_limit=EXPIRES))
    assert graded.reward == 1.0, graded.error


def test_a_group_is_graded_by_name_and_ungraded_rollouts_have_a_reason():
    texts = [RIGHT, "def add(a, b): return object()", RIGHT]
    setups = ["", "", "import no_such_module"]
    rollouts = [
        a_rollout(text, tests=TESTS, setup=setup, entry_point=None, index=index)
        for index, (text, setup) in enumerate(zip(texts, setups, strict=True))
    ]
    results = anyio.run(partial(grade, rollouts, reward("code_reward_func", timeout=HANG), time_limit=HANG))
    assert [rollout.reward for rollout in results] == [1.0, 0.0, None]
    assert "setup: ModuleNotFoundError" in results[2].error


def test_samples_without_tests_are_refused_before_a_run():
    good = a_sample(tests=TESTS, setup="", entry_point=None)
    check_samples(reward("code_reward_func"), [good])
    for metadata in (
        {},
        {"tests": []},
        {"tests": "assert f(1)"},
        {"tests": ["assert f("]},
        {"tests": ["assert True"]},
        {"tests": [f"assert f(1) == {'+'.join('1' * 9999)}"]},
    ):
        with pytest.raises(ValueError, match="cannot grade 1 of 2"):
            check_samples(reward("code_reward_func"), [good, a_sample(**metadata)])


@pytest.mark.parametrize(
    "text", ["```" + " " * 10**6, "```" + "a" * 10**6, "```\n" * 10**6, " " * 10**6, "async" + " " * 10**6]
)
def test_a_million_characters_are_graded_in_linear_time(text):
    with no_hang():
        assert reward_of(text, fenced=False) == 0.0
        assert completed(text) == 0.0


def test_allow_unsandboxed_is_passed_to_the_rewards_that_take_it():
    common = {"run": {"experiment_id": "x"}, "model": {"name": "m"}, "data": {"train_files_path": "x.jsonl"}}
    for named in ("code_reward_func", {"code_reward_func": 1.0, "exact_match": 0.5}):
        config = Config.model_validate({**common, "reward": {"reward_func": named, "allow_unsandboxed": True}})
        assert configured_reward(config).name.startswith("code_reward_func")
    alone = configured_reward(Config.model_validate({**common, "reward": {"reward_func": "code_reward_func"}}))
    assert "allow_unsandboxed" not in str(alone.check)
    allowed = {"reward_func": "code_reward_func", "allow_unsandboxed": True}
    assert "allow_unsandboxed=True" in str(
        configured_reward(Config.model_validate({**common, "reward": allowed})).check
    )

"""Each kind of isolation holds against every hostile program, also those that are not the best on this machine."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oxrl.rewards import sandbox
from tests.rewards.hostile import COMPUTE_ONLY, HOSTILE
from tests.rewards.sandbox.children import children
from tests.waiting import HANG

ADDS = sandbox.Tests(("assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"), remote={"add": "add"})


def test_no_hostile_program_passes_a_test_or_does_harm_and_the_next_is_graded(isolation):
    if isolation.kind == sandbox.available().kind:
        pytest.skip("the tests of code_reward_func show it for the best kind")
    limits, others = sandbox.Limits(seconds=HANG, cpu_seconds=1.0), children()
    programs = {name: program for name, program in HOSTILE.items() if name not in COMPUTE_ONLY}
    with ThreadPoolExecutor(4) as pool:
        verdicts = pool.map(lambda program: sandbox.run_tests([program], ADDS, isolation, limits), programs.values())
        passed = {name: verdict.passed for name, verdict in zip(programs, verdicts, strict=True) if verdict.passed}
    assert passed == {}
    assert not Path("/var/tmp/oxrl-hostile").exists()
    assert children() <= others
    assert sandbox.run_tests(["def add(a, b): return a + b"], ADDS, isolation, sandbox.Limits(seconds=HANG)).passed == 2

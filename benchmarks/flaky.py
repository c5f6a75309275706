"""Run the tests repeatedly, in random order and under load, and list every test that failed at least once.

    python benchmarks/flaky.py                                   # every scenario once: six complete runs
    python benchmarks/flaky.py --times 10 tests/run/test_launch.py   # these files, ten times in each scenario
    python benchmarks/flaky.py --only idle,busy

Failures by chance are soon ignored: each test listed here has a defect, or the code has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import psutil

ROOT = Path(__file__).parents[1]
BUSY = "while True: pass"
FULL = """
import sys, time
pages = bytearray(int(sys.argv[1]))
while True:  # touched again and again, so that they stay in memory
    pages[::4096] = bytes(len(range(0, len(pages), 4096)))
    time.sleep(1)
"""


class Scenario(NamedTuple):
    workers: int = 3  # as `make test` has on two cores
    busy: int = 0  # other processes that compute without end
    nice: int = 0
    spare_gib: float | None = None  # memory that is left free when the run starts


SCENARIOS = {
    "idle": Scenario(),
    "one worker": Scenario(workers=1),
    "busy": Scenario(busy=4),
    "busy two workers": Scenario(workers=2, busy=4),
    "niced": Scenario(busy=1, nice=10),
    "little memory": Scenario(busy=2, spare_gib=9.0),
}


class Outcome(NamedTuple):
    scenario: str
    seed: int
    minutes: float
    counts: Counter[str]
    failed: dict[str, str]  # test to the first line of its failure
    log: Path  # all output; kept if something failed


@contextmanager
def load(scenario: Scenario) -> Iterator[None]:
    programs = [[BUSY]] * scenario.busy
    if scenario.spare_gib is not None:
        taken = psutil.virtual_memory().available - int(scenario.spare_gib * 2**30)
        programs = [*programs, [FULL, str(max(0, taken))]]
    others = [subprocess.Popen([sys.executable, "-c", *program]) for program in programs]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def run(name: str, seed: int, arguments: list[str]) -> Outcome:
    scenario, started = SCENARIOS[name], time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="oxrl-flaky-"))
    report, log = folder / "report.xml", folder / "log"
    with load(scenario):
        command = [sys.executable, "-m", "pytest", "-n", str(scenario.workers), f"--junitxml={report}", *arguments]
        with log.open("wb") as out:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={
                    "OXRL_REQUIRE_ENGINES": "1",
                    "OMP_WAIT_POLICY": "PASSIVE",
                    **os.environ,
                    "OXRL_TEST_ORDER": str(seed),
                },
                stdout=out,
                stderr=out,
                preexec_fn=lambda: os.nice(scenario.nice) and None,
                check=False,
            )
        counts, failed = read(report) if report.exists() else (Counter[str](), {})
        if done.returncode and not failed:  # something was left behind, or the run itself broke
            failed["(the run)"] = " / ".join(log.read_text(errors="replace").splitlines()[-12:])
    if not failed:
        shutil.rmtree(folder)
    return Outcome(name, seed, (time.monotonic() - started) / 60, counts, failed, log)


def read(report: Path) -> tuple[Counter[str], dict[str, str]]:
    counts, failed = Counter[str](), {}
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((part for part in case if part.tag in ("failure", "error")), None)
        skipped = any(part.tag == "skipped" for part in case)
        counts["failed" if problem is not None else "skipped" if skipped else "passed"] += 1
        if problem is not None:
            failed[f"{case.get('classname')}::{case.get('name')}"] = (problem.get("message") or "").split("\n")[0][:300]
    return counts, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files or options (-mengine) for pytest; none: everything")
    parser.add_argument("--times", type=int, default=1, help="runs in each scenario")
    parser.add_argument("--only", help=f"some of: {', '.join(SCENARIOS)} (comma between them)", default="")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each run has its own")
    given, more = parser.parse_known_args()
    names = given.only.split(",") if given.only else list(SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        parser.error(f"no scenario {unknown[0]!r}; there are: {', '.join(SCENARIOS)}")
    outcomes: list[Outcome] = []
    print("| scenario | order | minutes | passed | skipped | failed |\n|---|---|---|---|---|---|")
    for seed, name in enumerate(names * given.times, start=given.seed):
        outcomes.append(run(name, seed, [*given.tests, *more]))
        each = outcomes[-1]
        numbers = " | ".join(str(each.counts[key]) for key in ("passed", "skipped"))
        print(f"| {name} | {seed} | {each.minutes:.1f} | {numbers} | {len(each.failed)} |", flush=True)
        for test, problem in each.failed.items():
            print(f"  {test}: {problem} ({each.log})", flush=True)
    failures = Counter(test for each in outcomes for test in each.failed)
    print(f"\n{len(outcomes)} runs, {len(failures)} tests failed at least once")
    for test, count in failures.most_common():
        print(f"{count} of {len(outcomes)}: {test}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

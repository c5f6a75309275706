"""Tests every reward of the table on rows that fit it, and prints the Markdown tables in `docs/rewards.md`.

`--data` is a folder of raw copies: `gsm8k/train.jsonl.gz` and `gsm8k/test.jsonl.gz`, `svamp/test.jsonl.gz`,
`mbpp/mbpp.jsonl.gz`, `humaneval/HumanEval.jsonl.gz`. `llm_judge` sends a request per response and is left out.

    python benchmarks/rewards.py --data FOLDER
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.config import check_config
from oxrl.data.prepare import DATASETS, prepare_samples
from oxrl.rewards import TrialReport, describe_rewards, reasoning_gym_samples, try_reward
from oxrl.rewards.sandbox import Isolation, Limits, Tests, run_tests
from oxrl.rewards.sandbox.isolation import Kind, probe_isolation
from oxrl.rewards.trial import COLUMNS, PaysFor
from oxrl.run.reward import named_reward
from oxrl.run.train import train_run
from oxrl.types import Message, Sample

NUMBERS: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("gsm8k_reward_func", {}),
    ("gsm8k_reward_func", {"strict": True}),
    ("number_match", {}),
    ("math_reward_func", {}),
    ("math_reward_func", {"strict": False}),
    ("math_match", {}),
    ("soft_math", {}),
    ("reasoning_reward_func", {}),
    ("exact_match", {}),
    ("contains", {}),
    ("format_reward_func", {}),
    ("tag_format", {}),
    ("regex_match", {"pattern": r"#### -?[\d,.]+$"}),
    ("length_target", {"target": 60}),
    ("overlong_penalty", {"limit": 60, "margin": 40}),
]
CHOICES: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("mcqa_reward_func", {}),
    ("mcqa_reward_func", {"strict": True}),
    ("multiple_choice", {}),
    ("reasoning_reward_func", {"answer_is": "choice"}),
]
TEXTS: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("exact_match", {}),
    ("contains", {}),
    ("reasoning_reward_func", {"answer_is": "text"}),
]
PROGRAMS: Sequence[tuple[str, Mapping[str, Any]]] = [("code_reward_func", {}), ("code_reward_func", {"partial": True})]
GYM: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("reasoning_gym_score", {}),
    ("reasoning_gym_score", {"partial": False}),
]
OPINIONS = ("rm_reward_func", "overlong_penalty")  # a penalty has no full reward: it must only not prefer a cheat


class Rows(NamedTuple):
    title: str
    samples: Sequence[Sample]
    rewards: Sequence[tuple[str, Mapping[str, Any]]]


def run_trial(name: str, parameters: Mapping[str, Any], samples: Sequence[Sample]) -> TrialReport:
    """The same as `oxrl rewards test`."""
    card = describe_rewards()[name]
    pays_for: PaysFor = "opinion" if name in OPINIONS else "answer" if card.reads else "form"
    strict = parameters.get("strict", card.parameters.get("strict"))
    other = named_reward(name, {**parameters, "strict": not strict}) if isinstance(strict, bool) else None
    return try_reward(named_reward(name, dict(parameters)), samples, pays_for=pays_for, other=other)


def table(rows: Rows) -> Iterable[str]:
    yield f"\n### {rows.title}\n"
    yield f"| {' | '.join((*COLUMNS, 'median ms'))} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for name, parameters in rows.rewards:
        report = run_trial(name, parameters, rows.samples)
        shown = ", ".join(f"{key}={value}" for key, value in parameters.items() if key != "model")
        named = f"`{name}`{f' ({shown})' if shown else ''}"
        yield f"{report.row().replace(f'`{report.reward}`', named, 1)} {1000 * report.median_seconds:.3g} |"


def test_rows(name: str, files: Sequence[str], limit: int) -> list[Sample]:
    return prepare_samples(DATASETS[name], files)[0]["test"][:limit]


def choices() -> list[Sample]:
    answers = ["A", "(B)", "C. three", "D"]
    prompt = "Which is number {}?\nA. one\nB. two\nC. three\nD. four"
    return [Sample(f"choice:{i}", (Message("user", prompt.format(i)),), answer=each) for i, each in enumerate(answers)]


def towns() -> list[Sample]:
    return [Sample(f"town:{each}", (Message("user", "Where?"),), answer=each) for each in ("Rome", "Oslo", "Lima")]


def reward_model(samples: Sequence[Sample], folder: Path) -> str:
    """The built-in `tiny`, trained for a few seconds to prefer a worked solution to that of another question."""
    solutions = [sample.metadata["solution"] for sample in samples]
    pairs = [
        {"prompt": sample.messages[0].content, "chosen": right, "rejected": other}
        for sample, right, other in zip(samples, solutions, [*solutions[1:], solutions[0]], strict=True)
    ]
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    train = {"alg_name": "rm", "lr": 3e-3, "total_number_of_epochs": 1}
    raw = {"model": {"name": "tiny"}, "train": train, "data": {"train_files_path": str(file)}}
    train_run(check_config(raw), folder / "run")
    return str(folder / "run")


def seconds_per_program() -> Iterable[str]:
    """A program graded by three tests, for each kind of isolation that works on this machine."""
    yield "\n| isolation | a program and its tests (ms) |"
    yield "|---|---|"
    tests = Tests(("assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 4"), remote={"f": "f"})
    kinds: tuple[Kind, ...] = ("bubblewrap", "namespaces", "landlock")
    for kind in kinds:
        isolation = Isolation(kind, {}, shutil.which("bwrap") if kind == "bubblewrap" else None)
        if (kind == "bubblewrap" and isolation.bwrap is None) or probe_isolation(isolation):
            continue
        graded = []
        for _ in range(30):
            start = time.perf_counter()
            run_tests(["def f(x): return x + 1"], tests, isolation, Limits())
            graded.append(time.perf_counter() - start)
        yield f"| {kind} | {1000 * statistics.median(graded):.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--programs", type=int, default=40, help="rows of MBPP and of HumanEval")
    arguments = parser.parse_args()
    data, programs = arguments.data, arguments.programs
    files = [f"{split}={data}/gsm8k/{split}.jsonl.gz" for split in ("train", "test")]
    gsm8k = test_rows("gsm8k", files, arguments.rows)
    svamp = test_rows("svamp", [f"{data}/svamp/test.jsonl.gz"], arguments.rows)
    mbpp = test_rows("mbpp", [f"{data}/mbpp/mbpp.jsonl.gz"], programs)
    humaneval = test_rows("humaneval", [f"{data}/humaneval/HumanEval.jsonl.gz"], programs)
    with tempfile.TemporaryDirectory() as folder:
        opinion = [("rm_reward_func", {"model": reward_model(gsm8k[-32:], Path(folder)), "device": "cpu"})]
        for rows in (
            Rows("GSM8K, test split", gsm8k, NUMBERS),
            Rows("SVAMP, test split", svamp, NUMBERS),
            Rows("MBPP, test split", mbpp, PROGRAMS),
            Rows("HumanEval", humaneval, PROGRAMS),
            Rows("Multiple choice, rows of our own", choices(), CHOICES),
            Rows("Names of towns, rows of our own", towns(), TEXTS),
            Rows("reasoning-gym's `leg_counting`", reasoning_gym_samples("leg_counting", size=50, seed=0), GYM),
            Rows("A reward model of half a million parameters, on GSM8K", gsm8k[:programs], opinion),
        ):
            print("\n".join(table(rows)), flush=True)
    print("\n".join(seconds_per_program()))


if __name__ == "__main__":
    main()

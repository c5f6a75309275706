"""A run with repeated faults, beside one without: both must end with the same results.

`oxrl train` on `tiny`, GRPO with the embedded engine, as a child process (a fork, so that it starts immediately).
Faults occur at random moments, or with `--every-steps 4` after so many steps, and the run is resumed each time. At the
end no step is lost or doubled, rollouts and metrics are the same, weights, optimizer and random states are the same
bytes, and memory did not grow.

    python benchmarks/soak.py [--minutes 30] [--every 60] [--seed 0] [--faults kill,term,damage,full] [--steps 0]

With engines in separate processes (`--faults engine --inexact --set ...`) a server is killed instead, and the run
itself must continue: no step lost or doubled; bytes are not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

LONG = 3600.0  # seconds after which a run counts as hung
INTERVAL = 0.2  # seconds between two checks of a run
ROOM = 6 << 20  # bytes that a full disk still takes: the weights of `tiny`, and not its optimizer's state
FORKS = get_context("fork")
TIMELY = ("second", "memory_gib")  # what differs between any two runs
CONFIG = {
    "model": {"name": "tiny"},
    "train": {"alg_name": "grpo", "lr": 1e-3, "checkpoint_every": 4, "train_batch_size_per_gpu": 4},
    "reward": {"reward_func": "length_target", "params": {"target": 6}},
    "rollout": {"n_samples": 4, "max_tokens": 16, "over_sampling_factor": 1.5, "partial_rollouts": True},
}


class Event(NamedTuple):
    """One fault: its kind, its step, the steps repeated, and the seconds until the run was further than before."""

    fault: str
    step: int
    repeated: int
    seconds: float


class Run:
    """A run in its own folder, started as often as needed."""

    def __init__(self, home: Path, name: str, config: Path, overrides: list[str]) -> None:
        self.folder, self.log, self.config = home / name, home / f"{name}.log", config
        self.overrides = [argument for each in overrides for argument in ("--set", each)]
        self.memory: list[list[int]] = []  # MiB over time, for each start
        self.process: BaseProcess | None = None

    def start(self, steps: int = 0) -> None:
        """Start or resume it; it ends by itself, or stops itself after so many steps."""
        resume = ["--resume"] if (self.folder / "config.yaml").exists() else []
        command = ["oxrl", "train", str(self.config), "--output", str(self.folder), *resume, *self.overrides]
        self.process = FORKS.Process(target=_train, args=(command, self.log, self.folder, steps))
        self.process.start()
        self.memory.append([])
        self.first = self.step

    @property
    def is_stopped(self) -> bool:
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def continue_process(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid or 0, signal.SIGCONT)

    def poll(self) -> int | None:
        """Wait a little; return the exit code if it has ended."""
        assert self.process is not None
        time.sleep(INTERVAL)
        if (code := self.process.exitcode) is None:
            self.first = min(self.first, step := self.step)
            pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()
            if len(pages) > 1 and step > self.first + 1:  # it has warmed up
                self.memory[-1].append(int(pages[1]) * resource.getpagesize() >> 20)
        return code

    def ended_within(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (code := self.poll()) is not None:
                return code
        self.end()
        sys.exit(f"the run did not end within {seconds:g} s: {self.log_tail()}")

    def end(self) -> None:
        if self.process is not None and self.process.exitcode is None:
            self.process.kill()
            self.process.join()

    @property
    def step(self) -> int:
        """The last one in its metrics; 0 before the first."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_bytes().splitlines() if file.exists() else []
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except ValueError:  # cut off
                continue
        return 0

    @property
    def checkpoints(self) -> list[Path]:
        return sorted(self.folder.glob("checkpoints/step_*"), key=lambda path: int(path.name[5:]))

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


def kill(run: Run, _rng: random.Random) -> None:
    run.end()


def term(run: Run, _rng: random.Random) -> None:
    assert run.process is not None
    run.process.terminate()
    run.continue_process()
    run.ended_within(LONG)


def damage(run: Run, rng: random.Random) -> None:
    """Kill it, then flip a bit in a file of its newest checkpoint, or cut it off; the only one is left alone."""
    run.end()
    if len(run.checkpoints) < 2:
        return
    file = rng.choice(sorted(each for each in run.checkpoints[-1].iterdir() if each.stat().st_size > 100))
    content = bytearray(file.read_bytes())
    if rng.random() < 0.5:
        content[rng.randrange(len(content) // 2)] ^= 1 << rng.randrange(8)
    else:
        del content[rng.randrange(len(content)) :]
    file.write_bytes(content)


def full(run: Run, _rng: random.Random) -> None:
    """From now on nothing larger can be written: the next checkpoint fails, and the run with it."""
    assert run.process is not None
    before = run.log.stat().st_size
    resource.prlimit(run.process.pid or 0, resource.RLIMIT_FSIZE, (ROOM, ROOM))
    run.continue_process()
    code = run.ended_within(LONG)
    output = run.log.read_bytes()[before:].decode(errors="replace")
    if code and "could not be written" not in output:
        sys.exit(f"a full disk ended the run, but its log does not report it: {output[-2000:]}")


def engine(run: Run, rng: random.Random) -> None:
    """Kill one of the servers that the run has started; the run itself stays."""
    assert run.process is not None
    children = subprocess.run(
        ["pgrep", "-P", str(run.process.pid), "-f", "generators.vllm.server"], capture_output=True
    )
    servers = [int(pid) for pid in children.stdout.split()]
    if not servers:
        sys.exit("there is no server to kill: --faults engine needs --set for an engine in a separate process")
    os.kill(rng.choice(servers), signal.SIGKILL)


FAULTS: dict[str, Callable[[Run, random.Random], None]] = {
    "kill": kill,
    "term": term,
    "damage": damage,
    "full": full,
    "engine": engine,
}


def in_turn(names: list[str], rng: random.Random) -> Iterator[str]:
    """Yield each of them once before any is repeated, in a new order each time."""
    while True:
        yield from rng.sample(names, len(names))


def soak(run: Run, plain: Run, arguments: argparse.Namespace) -> list[Event]:
    """Both runs side by side, one of them with faults, until both have ended."""
    rng, events = random.Random(arguments.seed), []
    faults, started = in_turn(arguments.faults.split(","), rng), time.monotonic()
    steps = arguments.every_steps
    plain.start()
    run.start(steps)
    while run.process is not None:
        wait = rng.uniform(0.5, 1.5) * arguments.every
        over = time.monotonic() - started + wait > 60 * arguments.minutes or len(events) == arguments.most_faults
        code = _watched(run, float("inf") if over else wait, by_steps=bool(steps) and not over)
        if code == 0:
            break
        if code is not None:
            sys.exit(f"the run ended with {code} without a fault: {run.log_tail()}")
        steps = 0 if len(events) + 1 == arguments.most_faults else steps
        events.append(_inject(run, next(faults), rng, steps))
        print(f"{time.monotonic() - started:6.0f} s  {events[-1]}", file=sys.stderr, flush=True)
    if plain.ended_within(LONG) != 0:
        sys.exit(f"the run without faults failed: {plain.log_tail()}")
    return events


def _watched(run: Run, seconds: float, *, by_steps: bool) -> int | None:
    """Wait for so long and until it has made progress, or until it is stopped; return its exit code if it has ended."""
    deadline = time.monotonic() + seconds
    before = run.step
    while (not run.is_stopped) if by_steps else (time.monotonic() < deadline or run.step <= before):
        if (code := run.poll()) is not None:
            return code
    return None


def _inject(run: Run, fault: str, rng: random.Random, steps: int) -> Event:
    reached, injected = run.step, time.monotonic()
    FAULTS[fault](run, rng)
    reached = max(reached, run.step)
    if run.process is not None and run.process.exitcode is not None:
        run.start(steps)
    resumed = reached
    deadline = time.monotonic() + LONG
    while run.step <= reached and run.poll() is None:
        resumed = min(resumed, run.step)
        if time.monotonic() > deadline:
            sys.exit(f"after {fault} at step {reached} the run made no progress: {run.log_tail()}")
    return Event(fault, reached, reached - resumed, time.monotonic() - injected)


def _train(command: list[str], log: Path, folder: Path, steps: int) -> None:
    """In the child: the command, which stops itself before it logs one more than so many steps."""
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    left = steps

    def stop_at_last(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "open" and str(arguments[0]) == str(folder / "metrics.jsonl") and arguments[1] == "a":
            left -= 1
            if left == -1:
                os.kill(os.getpid(), signal.SIGSTOP)

    if steps:
        sys.addaudithook(stop_at_last)
    from oxrl.cli import main

    sys.argv = command
    main()


def facts(run: Run, steps: int) -> dict[str, Any]:
    """All that must be equal."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    last = run.folder / "checkpoints" / f"step_{steps:04d}"
    return {
        "steps": [line["step"] for line in lines],
        "metrics": [{key: line[key] for key in line if not any(each in key for each in TIMELY)} for line in lines],
        "rollouts": (run.folder / "rollouts.jsonl").read_text().splitlines(),
        "bytes": {file.name: file.read_bytes() for file in last.glob("*.safetensors")},
        "left behind": [path.name for path in run.folder.glob("checkpoints/.unfinished-*")],
    }


def growth(samples: list[int]) -> float:
    """MiB between the first and the last third of a process, after it has warmed up."""
    part = len(samples) // 3
    return statistics.median(samples[-part:]) - statistics.median(samples[:part]) if part > 2 else 0.0


def verdicts(run: Run, plain: Run, steps: int, *, exact: bool) -> dict[str, bool]:
    ours, theirs = facts(run, steps), facts(plain, steps)
    longest = max(run.memory, key=len)
    logged = [json.loads(line)["step"] for line in ours["rollouts"]]
    checks = {
        "every step once in metrics.jsonl": ours["steps"] == list(range(1, steps + 1)),
        "every step once in rollouts.jsonl": logged == list(range(1, steps + 1)),
        "nothing half-written left": not ours["left behind"],
        "memory flat (MiB)": growth(longest) < 0.05 * max(longest) and growth(plain.memory[0]) < 0.05 * max(longest),
    }
    if exact:
        for name in ("metrics", "rollouts", "bytes"):
            checks[f"{name} equal to the run without faults"] = ours[name] == theirs[name]
    return checks


def table(events: list[Event], checks: dict[str, bool], run: Run, plain: Run) -> str:
    lines = [
        "| fault | times | steps repeated, most | s until further than before, median | most |",
        "|---|---|---|---|---|",
    ]
    for fault in dict.fromkeys(event.fault for event in events):
        those = [event for event in events if event.fault == fault]
        seconds = [event.seconds for event in those]
        most = max(event.repeated for event in those)
        lines.append(f"| {fault} | {len(those)} | {most} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |")
    longest = max(run.memory, key=len)
    lines += ["", "| at the end | |", "|---|---|", f"| starts | {len(run.memory)} |"]
    lines.append(
        f"| MiB gained in the longest process, without faults | {growth(longest):.0f}, {growth(plain.memory[0]):.0f} |"
    )
    lines += [f"| {name} | {'yes' if fine else 'NO'} |" for name, fine in checks.items()]
    return "\n".join(lines)


def calibrated(home: Path, config: Path, overrides: list[str], minutes: float) -> int:
    """As many steps as fit into the time, when two runs share the machine."""
    trial = Run(home, "trial", config, [*overrides, "train.train_steps_per_epoch=24"])
    trial.start()
    trial.ended_within(LONG)
    lines = [json.loads(line) for line in (trial.folder / "metrics.jsonl").read_text().splitlines()]
    seconds = statistics.median(line["generate_seconds"] + line["train_seconds"] for line in lines[4:])
    return max(24, int(60 * minutes / (1.5 * seconds)))


def write_inputs(home: Path) -> Path:
    rows = [{"prompt": f"{i} + {i % 7}?", "response": f"{i + i % 7}"} for i in range(200)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = home / "soak.yaml"  # JSON is YAML
    config.write_text(json.dumps({**CONFIG, "data": {"train_files_path": str(home / "rows.jsonl")}}))
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long faults are injected")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two faults, on average")
    parser.add_argument("--every-steps", type=int, default=0, help="steps between two faults, instead of seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the moments of faults")
    parser.add_argument("--faults", default="kill,term,damage,full", help=f"some of {', '.join(FAULTS)}")
    parser.add_argument("--most-faults", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=0, help="of the run; 0: as many as fit into the time")
    parser.add_argument("--set", action="append", default=[], help="as in `oxrl train`")
    parser.add_argument("--inexact", action="store_true", help="do not compare with the run without faults")
    arguments = parser.parse_args()
    import oxrl.generators.embedded.generator
    import oxrl.loops.online
    import oxrl.run.train  # noqa: F401 - once, for all children

    home = Path(tempfile.mkdtemp(prefix="oxrl-soak-"))
    config = write_inputs(home)
    steps = arguments.steps or calibrated(home, config, arguments.set, arguments.minutes)
    overrides = [*arguments.set, f"train.train_steps_per_epoch={steps}"]
    run, plain = Run(home, "faults", config, overrides), Run(home, "plain", config, overrides)
    try:
        events = soak(run, plain, arguments)
    finally:
        run.end()
        plain.end()
    checks = verdicts(run, plain, steps, exact=not arguments.inexact)
    print(f"{steps} steps, {len(events)} faults\n\n{table(events, checks, run, plain)}")
    if not all(checks.values()):
        sys.exit(f"see {home}")
    shutil.rmtree(home)


if __name__ == "__main__":
    main()

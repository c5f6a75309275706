"""A run with repeated faults, beside one without: both must end with the same results.

`oxrl train` on `tiny` with GRPO, as a child process (a fork, so that it starts immediately): with the embedded engine,
over two FSDP2 ranks, or with a vLLM server (`--over`). Faults occur at random moments, or with `--every-steps 4` after
so many steps, and the run is resumed each time, unless it has to recover by itself. At the end no step is lost or
doubled, rollouts and metrics are the same, weights, optimizer and random states are the same bytes, memory did not
grow, and no process, shared memory, socket or temporary file is left.

    python benchmarks/soak.py [--minutes 60] [--every 60] [--over embedded] [--faults kill,stop,full] [--seed 0]

| fault | |
|---|---|
| kill, term | the run gets SIGKILL or SIGTERM |
| stop | a rank or a server gets SIGSTOP, and the run must go on without it; one process is continued after a while |
| rank, engine | a rank or a server gets SIGKILL, and the run must go on |
| damage | SIGKILL, and the newest checkpoint is damaged |
| line | SIGKILL, and a line of metrics.jsonl or rollouts.jsonl is cut off |
| full | no file can grow any more: the next checkpoint fails |
| reward | the service that grades answers hangs for longer than reward.time_limit |

With `vllm`, or if the reward service hangs, equality is not promised: bytes are not compared.
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

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.leftovers import processes, shared_memory_of

LONG = 3600.0  # seconds after which a run counts as hung
INTERVAL = 0.2  # seconds between two checks of a run
OFTEN = 5.0  # seconds between two looks at the shared memory of its processes
LEAVE = 60.0  # seconds that the processes of a run have to end after it
VARIABLE = "OXRL_SOAK"  # the folder of the run that a process belongs to
PAUSE = 5.0  # seconds that a stopped run rests
GRADING = 2.0  # seconds that the reward service has for an answer; it hangs for three times as long
OF_VLLM = ("torchinductor_", "vllm_dist_")  # a cache, and a small file for each start, which vLLM does not remove
RANK, SERVER = "-m oxrl train", "generators.vllm.server"  # in the command lines of processes that a run starts
ROOM = 5 << 19  # bytes that a full disk still takes: the weights of `tiny`, and not its optimizer's state
FORKS = get_context("fork")
TIMELY = ("second", "memory_gib")  # what differs between any two runs
CONFIG = {
    "model": {"name": "tiny"},
    "train": {"alg_name": "grpo", "lr": 1e-3, "checkpoint_every": 4, "train_batch_size_per_gpu": 4},
    "reward": {"reward_func": "length_target", "params": {"target": 6}},
    "rollout": {"n_samples": 4, "max_tokens": 16, "over_sampling_factor": 1.5, "partial_rollouts": True},
}

OVER: dict[str, list[str]] = {
    "embedded": [],
    "ranks": ["run.backend=fsdp", "run.training_gpus=2", "run.rank_time_limit=30", "run.max_restarts=1000"],
    "vllm": ["inference_engine.name=vllm", "inference_engine.place=server", "inference_engine.enforce_eager=true"],
}
COMMON = "kill,term,stop,damage,line,full"
DEFAULT = {"embedded": COMMON, "ranks": f"{COMMON},rank", "vllm": f"{COMMON},engine,reward"}
SERVICE = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Grader(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(-abs(int(self.path[1:]) - 6)).encode())

    def log_message(self, *_):
        pass

server = HTTPServer(("127.0.0.1", 0), Grader)
print(server.server_port, flush=True)
server.serve_forever()
"""
REWARD = """
from urllib.request import urlopen

def asked(rollout, *, port: int) -> float:
    return float(urlopen(f"http://127.0.0.1:{port}/{len(rollout.generation.token_ids)}").read())
"""


class Event(NamedTuple):
    """One fault: its kind, its step, the steps repeated, and the seconds until the run was further than before."""

    fault: str
    step: int
    repeated: int
    seconds: float


class Run:
    """A run in its own folder, started as often as needed."""

    def __init__(self, home: Path, name: str, config: Path, overrides: list[str], *, graded: bool = False) -> None:
        self.folder, self.log, self.config = home / name, home / f"{name}.log", config
        self.temporary = home / f"{name}-tmp"
        self.temporary.mkdir()
        self.memory: list[list[int]] = []  # MiB over time, for each start
        self.shared: set[Path] = set()  # memory that its processes have used
        self.looked = 0.0
        self.left: list[str] = []  # processes that outlived it
        self.process: BaseProcess | None = None
        self.service: subprocess.Popen[str] | None = None
        if graded:
            self.service = subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True)
            assert self.service.stdout is not None
            (home / "reward.py").write_text(REWARD)
            named = json.dumps(f"{home / 'reward.py'}:asked")
            port = int(self.service.stdout.readline())
            overrides = [*overrides, f"reward.reward_func={named}", f'reward.params={{"port": {port}}}']
            overrides.append(f"reward.time_limit={GRADING}")
        self.overrides = [argument for each in overrides for argument in ("--set", each)]

    def start(self, steps: int = 0) -> None:
        """Start or resume it; it ends by itself, or stops itself after so many steps."""
        resume = ["--resume"] if (self.folder / "config.yaml").exists() else []
        command = ["oxrl", "train", str(self.config), "--output", str(self.folder), *resume, *self.overrides]
        settings = {VARIABLE: str(self.folder), "TMPDIR": str(self.temporary)}
        self.process = FORKS.Process(target=_train, args=(command, self.log, self.folder, steps, settings))
        self.process.start()
        self.memory.append([])
        self.first = self.step

    @property
    def started(self) -> dict[int, str]:
        """The processes that it has started, with their command lines."""
        return processes(str(self.folder), VARIABLE)

    def pids(self, part: str) -> list[int]:
        return [pid for pid, command in self.started.items() if part in command]

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
        if time.monotonic() - self.looked > OFTEN:
            self.shared |= shared_memory_of([self.process.pid or 0, *self.started])
            self.looked = time.monotonic()
        if (code := self.process.exitcode) is None:
            self.first = min(self.first, step := self.step)
            pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()
            if len(pages) > 1 and step > self.first + 8:  # it has warmed up
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
        """Kill it if it has not ended; what it has started must end by itself."""
        if self.process is not None and self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        deadline = time.monotonic() + LEAVE
        while (left := self.started) and time.monotonic() < deadline:
            time.sleep(INTERVAL)
        self.left += left.values()
        for pid in left:
            os.kill(pid, signal.SIGKILL)

    def close(self) -> list[str]:
        """End it and its reward service; return what it left behind."""
        self.end()
        if self.service is not None:
            self.service.kill()
            self.service.wait()
        files = [str(path) for path in self.temporary.iterdir() if not path.name.startswith(OF_VLLM)]
        return [*self.left, *files, *(str(path) for path in self.shared if path.exists())]

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
    files = [each for each in run.checkpoints[-1].rglob("*") if each.is_file() and each.stat().st_size > 100]
    file = rng.choice(sorted(files))
    content = bytearray(file.read_bytes())
    if rng.random() < 0.5:
        content[rng.randrange(len(content) // 2)] ^= 1 << rng.randrange(8)
    else:
        del content[rng.randrange(len(content)) :]
    file.write_bytes(content)


def line(run: Run, rng: random.Random) -> None:
    """Kill it, then cut off a line that the resumed run will write again; if there is none, add half of one."""
    run.end()
    done = int(run.checkpoints[-1].name[5:]) if run.checkpoints else 0
    file = run.folder / rng.choice(("metrics.jsonl", "rollouts.jsonl"))
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    later = [index for index, each in enumerate(lines) if index >= done]  # one for each step
    if later:
        index = rng.choice(later)
        lines[index] = lines[index][: rng.randrange(1, len(lines[index]))] + b"\n" * (index + 1 < len(lines))
    elif lines:
        lines.append(b'{"step": ')
    file.write_bytes(b"".join(lines))


def full(run: Run, _rng: random.Random) -> None:
    """From now on nothing larger can be written: the next checkpoint fails, and the run with it."""
    assert run.process is not None
    before = run.log.stat().st_size
    for pid in (run.process.pid or 0, *run.pids(RANK)):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (ROOM, ROOM))
    run.continue_process()
    code = run.ended_within(LONG)
    output = run.log.read_bytes()[before:].decode(errors="replace")
    if code == 0 or "Free disk space" not in output or "Traceback" in output:
        sys.exit(f"after a full disk the run ended with {code}, and its log does not report it: {output[-2000:]}")


def _signalled(run: Run, rng: random.Random, part: str, number: int) -> None:
    """Send a signal to one of the processes that the run has started; the run itself must go on."""
    pids = run.pids(part)
    if not pids:
        sys.exit(f"the run has started no process with {part!r}: choose another --over, or other --faults")
    os.kill(rng.choice(pids), number)
    run.continue_process()


def rank(run: Run, rng: random.Random) -> None:
    _signalled(run, rng, RANK, signal.SIGKILL)


def engine(run: Run, rng: random.Random) -> None:
    _signalled(run, rng, SERVER, signal.SIGKILL)


def stop(run: Run, rng: random.Random) -> None:
    """Stop a rank or a server for ever, or the only process for a while."""
    assert run.process is not None
    if part := next((each for each in (RANK, SERVER) if run.pids(each)), None):
        return _signalled(run, rng, part, signal.SIGSTOP)
    os.kill(run.process.pid or 0, signal.SIGSTOP)
    time.sleep(PAUSE)
    return run.continue_process()


def reward(run: Run, _rng: random.Random) -> None:
    assert run.service is not None
    run.service.send_signal(signal.SIGSTOP)
    run.continue_process()
    time.sleep(3 * GRADING)
    run.service.send_signal(signal.SIGCONT)


FAULTS: dict[str, Callable[[Run, random.Random], None]] = {
    each.__name__: each for each in (kill, term, stop, damage, line, full, rank, engine, reward)
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
        if not by_steps and run.is_stopped:  # after the last fault
            run.continue_process()
    return None


def _inject(run: Run, fault: str, rng: random.Random, steps: int) -> Event:
    reached, injected = run.step, time.monotonic()
    FAULTS[fault](run, rng)
    reached = max(reached, run.step)
    if run.process is not None and run.process.exitcode is not None:
        run.start(steps)
    resumed = reached
    deadline = time.monotonic() + LONG
    while run.step <= reached and (code := run.poll()) != 0:
        if code is not None:  # the fault has ended it after all
            run.start(steps)
        resumed = min(resumed, run.step)
        if time.monotonic() > deadline:
            sys.exit(f"after {fault} at step {reached} the run made no progress: {run.log_tail()}")
    return Event(fault, reached, reached - resumed, time.monotonic() - injected)


def _train(command: list[str], log: Path, folder: Path, steps: int, settings: dict[str, str]) -> None:
    """In the child: the command, which stops itself before it logs one more than so many steps."""
    os.environ.update(settings)
    tempfile.tempdir = None  # it was chosen before
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    left = steps

    def stop_at_last(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "open" and str(arguments[0]) == str(folder / "metrics.jsonl") and arguments[1] == "a":
            left -= 1
            if left == -1:
                left = steps - 1  # if it is continued
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
    return statistics.median(samples[-part:]) - statistics.median(samples[:part]) if part > 30 else 0.0


def verdicts(run: Run, plain: Run, steps: int, left: list[str], *, exact: bool) -> dict[str, bool]:
    ours, theirs = facts(run, steps), facts(plain, steps)
    both = [max(run.memory, key=len), plain.memory[0]]
    logged = [json.loads(line)["step"] for line in ours["rollouts"]]
    checks = {
        "every step once in metrics.jsonl": ours["steps"] == list(range(1, steps + 1)),
        "every step once in rollouts.jsonl": logged == list(range(1, steps + 1)),
        "nothing half-written left": not ours["left behind"],
        "no process, shared memory or temporary file left": not left,
        "memory flat (MiB)": max(map(growth, both)) <= 0.05 * max((*both[0], *both[1]), default=0),
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
    parser.add_argument("--minutes", type=float, default=60.0, help="how long faults are injected")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two faults, on average")
    parser.add_argument("--every-steps", type=int, default=0, help="steps between two faults, instead of seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the moments of faults")
    parser.add_argument("--over", choices=OVER, default="embedded", help="what the run consists of")
    parser.add_argument("--faults", help=f"some of {', '.join(FAULTS)}; default: those that --over can have")
    parser.add_argument("--most-faults", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=0, help="of the run; 0: as many as fit into the time")
    parser.add_argument("--set", action="append", default=[], help="as in `oxrl train`")
    parser.add_argument("--inexact", action="store_true", help="do not compare with the run without faults")
    arguments = parser.parse_args()
    arguments.faults = arguments.faults or DEFAULT[arguments.over]
    if wrong := set(arguments.faults.split(",")) - FAULTS.keys():
        parser.error(f"unknown faults: {', '.join(sorted(wrong))}")
    import oxrl.generators.embedded.generator
    import oxrl.loops.online
    import oxrl.run.train  # noqa: F401 - once, for all children

    graded = "reward" in arguments.faults.split(",")
    exact = not (arguments.inexact or graded or arguments.over == "vllm")
    home = Path(tempfile.mkdtemp(prefix="oxrl-soak-"))
    config = write_inputs(home)
    overrides = [*OVER[arguments.over], *arguments.set]
    steps = arguments.steps or calibrated(home, config, overrides, arguments.minutes)
    overrides.append(f"train.train_steps_per_epoch={steps}")
    run, plain = (Run(home, name, config, overrides, graded=graded) for name in ("faults", "plain"))
    left: list[str] = []
    try:
        events = soak(run, plain, arguments)
    finally:
        left += run.close() + plain.close()
    checks = verdicts(run, plain, steps, left, exact=exact)
    print(f"{steps} steps, {len(events)} faults\n\n{table(events, checks, run, plain)}")
    print("".join(f"\nleft: {each}" for each in left))
    if not all(checks.values()):
        sys.exit(f"see {home}")
    shutil.rmtree(home)


if __name__ == "__main__":
    main()

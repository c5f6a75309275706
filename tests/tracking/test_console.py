"""The live line and the plain lines of a run."""

import io
import logging
import os
import pty
import subprocess
import sys

import pytest
from rich.console import Console

from oxrl.tracking.activity import Activity, time_left
from oxrl.tracking.console import LiveConsole
from tests.waiting import HANG

METRICS = {
    "eval_reward": 0.5, "reward": 0.123456, "reward_format": 0.5, "truncated": 0.25, "length": 123.4, "loss": 1.5,
    "entropy": 1.25, "lr": 1e-5, "generated_per_second": 1234.5, "memory_gib": 12.25, "grad_norm": 3.0,
}  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s left"), (41, "41 s left"), (60, "0:01 h left"), (39009, "10:50 h left"), (360000, "100:00 h left")],
)
def test_the_time_left_has_hours_and_minutes(seconds, text):
    assert time_left(seconds) == text


def test_the_time_left_is_measured_without_the_first_step_and_the_first_evaluation():
    clock = Clock()
    console = LiveConsole(11, console=Console(file=(printed := io.StringIO())), clock=clock)
    clock.now = 500.0  # of an evaluation
    console(0, {"eval_loss": 1.0})
    assert printed.getvalue() == "step 0/11  eval_loss 1\n", "no time left where none is known"
    assert "? left" in console.live_line(80)
    clock.now += 60.0  # the first step, with its warm-up
    console(1, {"loss": 1.0})
    assert "0:10 h left" in console.live_line(80)
    clock.now += 6.0
    console(2, {"loss": 1.0})
    assert "54 s left" in console.live_line(80)
    clock.now += 2.0  # inside the next step
    assert "52 s left" in console.live_line(80)


def test_loading_before_the_first_step_is_not_counted():
    clock = Clock()
    console = LiveConsole(11, console=Console(file=io.StringIO()), clock=clock)
    clock.now = 900.0  # models are loaded, and the first step took 3 seconds of it
    console(1, {"loss": 1.0, "step_seconds": 3.0})
    assert "30 s left" in console.live_line(80)
    online = LiveConsole(11, console=Console(file=io.StringIO()), clock=clock)
    clock.now = 1800.0
    online(1, {"loss": 1.0, "generate_seconds": 3.0, "train_seconds": 1.0})
    assert "40 s left" in online.live_line(80)


@pytest.mark.parametrize("width", [24, 40, 80, 100, 140, 200])
def test_the_live_line_fits_and_keeps_step_and_time_left(width):
    clock = Clock()
    console = LiveConsole(20000, console=Console(file=io.StringIO(), width=width), clock=clock)
    for step in range(1, 40):
        clock.now += 2.0
        console(step, METRICS)
    console.activity.start("answers", 64)
    for _ in range(37):
        console.activity.advance()
    line = console.live_line(width)
    assert len(line) <= width
    assert line.startswith("39/20000  11:05 h left")
    assert ("37 of 64 answers" in line) == (width >= 80)
    if width >= 140:
        assert line.index("reward 0.1235") < line.index("reward_format 0.5") < line.index("truncated 0.25")
    assert "eval_reward" not in line, "it was printed above"


def test_progress_inside_a_step_has_an_estimate():
    clock = Clock()
    activity = Activity(clock=clock)
    activity.start("answers", 64)
    assert str(activity) == "0 of 64 answers"
    for _ in range(37):
        clock.now += 1.5
        activity.advance()
    assert str(activity) == "37 of 64 answers, 40 s left"
    activity.end()
    assert str(activity) == ""


def test_a_log_gets_a_line_when_a_step_takes_long():
    clock, output = Clock(), io.StringIO()
    with LiveConsole(5, console=Console(file=output, width=80), clock=clock) as console:
        console.activity.start("answers", 8)
        for _ in range(8):
            clock.now += 25.0
            console.activity.advance()
    assert output.getvalue().splitlines() == [
        "step 1/5: 3 of 8 answers, 0:02 h left",
        "step 1/5: 6 of 8 answers, 50 s left",
    ]


@pytest.mark.parametrize(("seconds", "said"), [(5.0, False), (120.0, True)])
def test_the_expected_time_of_a_long_run_is_printed_after_its_first_step(seconds, said):
    clock, output = Clock(), io.StringIO()
    with LiveConsole(100, console=Console(file=output, width=80), clock=clock) as console:
        for step in (1, 2, 3):
            clock.now += seconds
            console(step, {"loss": 1.0})
    lines = [line for line in output.getvalue().splitlines() if "an estimate" in line]
    assert len(lines) == said
    assert not said or "about 3:18 h left for 99 steps: an estimate from the first 1" in lines[0]


TERMINAL = """
import logging, sys
logging.getLogger("early").addHandler(logging.StreamHandler(sys.stderr))
logging.getLogger("other").addHandler(logging.StreamHandler(sys.stdout))
from oxrl.tracking.console import LiveConsole
with LiveConsole(3) as console:
    console(1, {"loss": 1.5, "reward": 0.25})
    logging.getLogger("early").warning("a line of a library on stderr")
    logging.getLogger("other").warning("a line of a library on stdout")
    print("printed")
logging.getLogger("early").warning("after the run")
"""


@pytest.mark.parametrize("width", [80, 140])
def test_lines_of_libraries_do_not_break_the_live_line_of_a_terminal(width):
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(width), "TERM": "xterm-256color"}
    program = subprocess.Popen([sys.executable, "-c", TERMINAL], stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    output = b""
    while True:
        try:
            output += os.read(leader, 4096)
        except OSError:  # the program has ended
            break
    os.close(leader)
    assert program.wait(HANG) == 0, output
    *above, live, below = _screen(output.decode(), width)
    assert above == ["a line of a library on stderr", "a line of a library on stdout", "printed"]
    assert live.startswith("1/3  ") and " left" in live and "reward 0.25" in live
    assert below == "after the run"


def _screen(output, width):
    """What a terminal shows after this output: text, returns, and the sequences that rich writes to redraw a line."""
    lines, row, column = [""], 0, 0
    position = 0
    while position < len(output):
        char = output[position]
        if char == "\x1b":
            end = next(index for index in range(position + 2, len(output)) if output[index].isalpha())
            code, kind = output[position + 2 : end], output[end]
            position = end
            if kind == "K":
                lines[row] = ""
            elif kind == "A":
                row = max(0, row - int(code or 1))
        elif char == "\r":
            column = 0
        elif char == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + char + lines[row][column + 1 :]
            column += 1
        position += 1
    assert all(len(line) <= width for line in lines), lines
    return [line.rstrip() for line in lines if line.strip()]


def test_handlers_have_their_streams_again_after_the_run():
    handler = logging.StreamHandler(sys.__stderr__)
    logging.getLogger("a library").addHandler(handler)
    try:
        with LiveConsole(3, console=Console(file=io.StringIO(), force_terminal=True, width=80)):
            assert handler.stream is sys.stderr is not sys.__stderr__
        assert handler.stream is sys.__stderr__
    finally:
        logging.getLogger("a library").removeHandler(handler)

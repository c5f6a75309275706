import json
import math

import pytest

from oxrl.tracking.console import LiveConsole
from oxrl.tracking.metrics import JSONLLogger, all_of, log_to_console, memory_gib, read_metrics


def test_call_and_log_write_one_line_per_step(tmp_path):
    logger = JSONLLogger(tmp_path / "run" / "metrics.jsonl")
    logger(1, {"loss": 2.0})
    logger.log(2, {"loss": 1.0})
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]


def test_a_resumed_file_has_no_step_twice_and_drops_an_incomplete_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JSONLLogger(path)
    for step in range(1, 6):
        first(step, {"loss": float(step)})
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    second = JSONLLogger(path, keep_until=3)
    second(4, {"loss": 40.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


@pytest.mark.parametrize(
    "damage", [b"\x00" * 40, b'{"step": 2, "lo', b"[1, 2]", b"{}", b'{"step": "2"}', b"\xff\xfe", b"5"]
)
def test_a_damaged_line_is_left_out_with_a_warning_and_the_rest_is_kept(tmp_path, caplog, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0}\n' + damage + b'\n{"step": 3, "loss": 0.1}\n\n{"step": 4}\n{"st')
    assert [row["step"] for row in read_metrics(path)] == [1, 3, 4]
    caplog.clear()
    JSONLLogger(path, keep_until=3)
    assert path.read_bytes() == b'{"step": 1, "loss": 1.0}\n{"step": 3, "loss": 0.1}\n'
    assert [each.getMessage() for each in caplog.records] == [
        f"{path}: 1 damaged lines are left out, the first is line 2"
    ]


def test_nan_is_null_in_json(tmp_path):
    JSONLLogger(tmp_path / "m.jsonl")(1, {"loss": math.nan})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "loss": None}


def test_the_console_prints_plain_lines_without_a_terminal(capsys):
    with LiveConsole(20) as console:
        for step in range(1, 21):
            console(step, {"loss": 1.5, "tokens_per_second": 100.0, "grad_norm": 3.0})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/20", "10/20", "20/20"]
    assert "loss 1.5" in lines[0]
    assert lines[0].endswith(" left")
    assert "\x1b" not in "".join(lines)


def test_evaluations_are_always_shown(capsys):
    with LiveConsole(20) as console:
        console(7, {"loss": 1.5, "eval_loss": 1.2})
    assert "eval_loss 1.2" in capsys.readouterr().err


def test_all_of_forwards_to_several_sinks(capsys):
    seen = []
    all_of(log_to_console, lambda step, metrics: seen.append((step, dict(metrics))))(3, {"loss": 0.00012, "n": 4.0})
    assert seen == [(3, {"loss": 0.00012, "n": 4.0})]
    assert capsys.readouterr().err == "step 3  loss 1.20e-04  n 4\n"


def test_memory_is_within_plausible_bounds():
    assert 0.01 < memory_gib() < 1000

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.tracking.plot import draw, plot_history, plot_run

Rows = list[dict[str, float | None]]


def _run(folder: Path, rows: Rows) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _training() -> Rows:
    rows: Rows = [{"step": step, "loss": 4 / step, "lr": 1e-5, "memory_gib": 1.5} for step in range(1, 61)]
    for row in rows[19::20]:
        row["eval_loss"] = 0.5
    return rows


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def _dots(lines: list[str]) -> int:
    return sum((ord(cell) - 0x2800).bit_count() for line in lines for cell in line if cell != " ")


def test_a_rising_series_goes_from_bottom_left_to_top_right() -> None:
    rising = [(float(x), float(x)) for x in range(8)]
    assert draw(rising, 4, 2) == ["  ⡠⠊", "⡠⠊  "]
    assert draw([(x, -y) for x, y in rising], 4, 2) == ["⠑⢄  ", "  ⠑⢄"]


def test_points_far_apart_are_joined_by_a_line() -> None:
    assert draw([(0, 0), (7, 7)], 4, 2) == draw([(float(x), float(x)) for x in range(8)], 4, 2)


def test_a_constant_series_is_one_unbroken_row_in_the_middle() -> None:
    lines = draw([(1, 0.25), (2, 0.25), (3, 0.25)], 10, 5)
    assert [line for line in lines if line.strip()] == [lines[2]]
    assert " " not in lines[2]
    assert _dots(lines) == 20


def test_a_single_point_is_one_dot() -> None:
    assert _dots(draw([(7, 1.5)], 10, 5)) == 1


@pytest.mark.parametrize("gap", [None, math.nan, math.inf, -math.inf])
def test_a_non_finite_value_interrupts_the_line_and_does_not_change_the_scale(gap: Any) -> None:
    lines = draw([(0, 0), (1, 1), (2, gap), (3, 1), (4, 0)], 20, 4)
    assert lines[0][9:11] == "  "
    assert lines[0][5] != " " != lines[0][14]
    assert lines[3][0] != " " != lines[3][-1]


@pytest.mark.parametrize("series", [[], [(1.0, math.nan)], [(1.0, None), (2.0, None)]])
def test_nothing_to_draw_is_blank_and_keeps_its_size(series: Any) -> None:
    assert draw(series, 3, 2) == ["   ", "   "]


def test_a_series_is_drawn_within_given_ranges() -> None:
    lines = draw([(5, 0), (10, 5)], 10, 4, x_range=(0, 10), y_range=(0, 10))
    assert not any(line[:4].strip() for line in lines)
    assert not lines[0].strip()
    assert lines[3].strip()


@pytest.mark.usefixtures("narrow")
def test_default_curves_have_eval_loss_in_the_panel_of_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot_run(_run(tmp_path / "run", _training()), tmp_path / "deep" / "curves.png", [])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "loss last 0.0667 min 0.0667 max 4" in out
    assert "● eval_loss last 0.5 min 0.5 max 0.5" in out
    assert sum("●" in line for line in out.splitlines()) == 2, "three evaluations lie on one line, below the title"
    assert "1e-05┤" in out
    assert "memory_gib" not in out
    assert out.count("step 1 ") == 2, "two panels: loss with eval_loss, and lr"
    assert max(map(len, out.splitlines()[1:12])) <= 60


@pytest.mark.usefixtures("narrow")
def test_curves_of_one_panel_share_its_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(tmp_path / "run", [{"step": step, "loss": 10.0, "eval_loss": 2.0} for step in (1, 9)])
    plot_run(run, tmp_path / "curves.png", [])
    drawn = [line[3:].strip() for line in capsys.readouterr().out.splitlines() if line[2:3] in {"┤", "│"}]
    assert len(drawn) == 8
    assert len(drawn[0]) == len(drawn[-1]) == 57
    assert not any(drawn[1:-1])


@pytest.mark.usefixtures("narrow")
def test_the_image_has_both_curves(tmp_path: Path) -> None:
    plot_run(_run(tmp_path / "run", _training()), tmp_path / "curves.png", ["loss", "eval_loss"])
    pixels = imread(tmp_path / "curves.png")[:, :, :3]
    for colour in ("tab:blue", "tab:orange"):
        assert (abs(pixels - to_rgb(colour)).max(axis=2) < 0.01).sum() > 100


@pytest.mark.usefixtures("narrow")
def test_a_metric_without_a_finite_value_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot_run(_run(tmp_path / "run", [{"step": 1, "loss": None}, {"step": 2, "loss": None}]), tmp_path / "a.png", [])
    assert "loss no finite value" in capsys.readouterr().out
    assert (tmp_path / "a.png").exists()


@pytest.mark.usefixtures("narrow")
def test_a_run_that_diverged_does_not_look_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot_run(_run(tmp_path / "run", [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]), tmp_path / "a.png", [])
    assert "loss last not finite min 2.5 max 2.5" in capsys.readouterr().out


@pytest.mark.usefixtures("narrow")
def test_the_evaluation_is_the_second_curve_in_any_order_of_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot_run(_run(tmp_path / "run", _training()), tmp_path / "a.png", ["eval_loss", "loss"])
    out = capsys.readouterr().out
    assert out.index("loss last 0.0667") < out.index("● eval_loss last 0.5")


@pytest.mark.usefixtures("narrow")
def test_a_run_of_one_step_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot_run(_run(tmp_path / "run", [{"step": 1, "loss": 2.5}]), tmp_path / "a.png", [])
    assert "loss last 2.5 min 2.5 max 2.5" in capsys.readouterr().out


@pytest.mark.usefixtures("narrow")
def test_labels_of_a_narrow_range_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot_run(_run(tmp_path / "run", [{"step": s, "loss": 2.5 + s / 1e4} for s in (1, 3)]), tmp_path / "a.png", [])
    labels = [line.split("┤")[0].strip() for line in capsys.readouterr().out.splitlines() if "┤" in line]
    assert labels == ["2.5003", "2.5002", "2.5001"]


def test_a_terminal_gets_colours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    plot_run(_run(tmp_path / "run", _training()), tmp_path / "curves.png", [])
    out = capsys.readouterr().out
    assert "\x1b[1;36mloss\x1b[0m" in out
    assert "\x1b[1;33m● eval_loss\x1b[0m" in out


@pytest.mark.usefixtures("narrow")
def test_without_matplotlib_the_terminal_curves_still_appear(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    plot_run(_run(tmp_path / "run", _training()), tmp_path / "curves.png", [])
    assert "loss last 0.0667" in capsys.readouterr().out
    (record,) = caplog.records
    assert "matplotlib is not installed" in record.getMessage() and ".[plot]" in record.getMessage()
    assert not (tmp_path / "curves.png").exists()


def test_a_missing_folder_gets_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    with pytest.raises(ValueError, match=r"there is no run folder .*frist; did you mean .*first\?"):
        plot_run(tmp_path / "frist", tmp_path / "a.png", [])


def test_a_run_without_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl"):
        plot_run(tmp_path, tmp_path / "a.png", [])
    with pytest.raises(ValueError, match="has no metrics yet"):
        plot_run(_run(tmp_path, []), tmp_path / "a.png", [])


def test_a_misspelt_metric_gets_the_nearest_name_and_the_list(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no metric 'los'; did you mean loss\? It has: loss, lr, memory_gib, eval_loss"
    ):
        plot_run(_run(tmp_path, _training()), tmp_path / "a.png", ["lr", "los"])
    with pytest.raises(ValueError, match=r"no metric 'zzz'\. It has: loss"):
        plot_run(tmp_path, tmp_path / "a.png", ["zzz"])


def test_an_image_that_cannot_be_written_is_a_value_error(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _training())
    with pytest.raises(ValueError, match="cannot be written"):
        plot_run(run, run, [])
    with pytest.raises(ValueError, match="'xyz' is not supported"):
        plot_run(run, tmp_path / "curves.xyz", [])


@pytest.mark.usefixtures("narrow")
def test_the_command_plots_the_given_metrics(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _training())
    result = CliRunner().invoke(app, ["plot", str(run), "--metric", "memory_gib"])
    assert result.exit_code == 0, result.output
    assert "memory_gib last 1.5 min 1.5 max 1.5" in result.stdout
    assert "loss" not in result.stdout
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    wrong = CliRunner().invoke(app, ["plot", str(run), "--metric", "los"])
    assert wrong.exit_code == 2
    assert "did you mean loss?" in wrong.stderr


@pytest.mark.usefixtures("narrow")
def test_several_runs_are_plotted_over_each_other(tmp_path: Path) -> None:
    one = _run(tmp_path / "one", _training())
    two = _run(tmp_path / "two", [{"step": step, "loss": 1.0} for step in range(1, 91)])
    result = CliRunner().invoke(app, ["plot", str(one), str(two), "--metric", "loss", "--metric", "eval_loss"])
    assert result.exit_code == 0, result.output
    assert "2 runs  steps 1 to 90" in result.stdout
    shown = " ".join(result.stdout.split())
    assert "loss one last 0.0667" in shown and "● loss two last 1 min 1 max 1" in shown
    assert "eval_loss one last 0.5" in shown and "eval_loss two" not in shown
    assert (one / "curves.png").exists() and not (two / "curves.png").exists()
    many = CliRunner().invoke(app, ["plot", *[str(one)] * 7])
    assert many.exit_code == 2 and "a plot can show 6 runs, not 7" in many.stderr


@pytest.mark.usefixtures("narrow")
def test_a_history_is_plotted_like_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = [{"step": step, "reward": step / 10} for step in range(1, 6)]
    plot_history(history, tmp_path / "deep" / "a.png")
    assert "reward last 0.5 min 0.1 max 0.5" in capsys.readouterr().out
    assert (tmp_path / "deep" / "a.png").read_bytes().startswith(b"\x89PNG")
    plot_history(history)
    assert "image" not in capsys.readouterr().out
    for nothing in ([], [{"step": 1}], [{"reward": 1.0}]):
        with pytest.raises(ValueError, match="a history is a list of steps"):
            plot_history(nothing)

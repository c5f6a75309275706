from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.diagnose.data import Piece, histogram, inspect_data, pieces, print_report, problems
from oxrl.types import ModelConfig, Row

# The tiny model's tokens are bytes, and its template writes <|bos|>, then <|im_start|>, role, newline, text, <|im_end|>
# and a newline for each message.
AROUND_A_TURN = 23  # <|bos|> 1, user 1 + 4 + 1 + 1 + 1, assistant 1 + 9 + 1, its <|im_end|> 1, and "Hi" 2


def _turn(response: str, prompt: str = "Hi") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]}


def _file(folder: Path, *lines: dict[str, Any] | str) -> str:
    file = folder / "data.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(file)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def _printed(file: str, capsys: pytest.CaptureFixture[str], *, rows: int = 3, max_len: int | None = 100) -> str:
    print_report(inspect_data(file, "tiny", "sft", max_len, {}), rows)
    return capsys.readouterr().out


def test_statistics_count_what_would_be_trained_and_what_would_not(tmp_path: Path) -> None:
    no_answer = {"messages": [{"role": "user", "content": "Hi"}]}
    lines = [_turn("yes"), _turn("maybe"), "{broken", _turn("yes"), no_answer, _turn("x" * 100)]
    report = inspect_data(_file(tmp_path, *lines), "tiny", "sft", 100, {})
    kept = [AROUND_A_TURN + len(text) for text in ("yes", "maybe", "yes")]
    assert report.statistics() == {
        "format": "messages",
        "samples": 5,
        "rows": 3,
        "tokens": sum(kept),
        "trained_tokens": 4 + 6 + 4,
        "length_median": (kept[0] + kept[1]) / 2,
        "length_p95": AROUND_A_TURN + 100,
        "length_max": AROUND_A_TURN + 100,
        "overlong": 1,
        "skipped": 2,
        "duplicates": 1,
    }
    assert json.loads(json.dumps(report.statistics())) == report.statistics()
    assert [reason.split(" ")[0] for reason in report.skipped] == ["data.jsonl:3:", "data.jsonl:5:"]


def test_problems_name_their_rows(tmp_path: Path) -> None:
    lines = [_turn("yes"), _turn(""), _turn("yes"), _turn("x" * 100)]
    assert problems(inspect_data(_file(tmp_path, *lines), "tiny", "sft", 100, {})) == [
        "longer than 100 tokens, left out unless data.overlong is truncate: 1 (data.jsonl:4)",
        "no more than one trained token: 1 (data.jsonl:2)",
        "the same tokens as an earlier row: 1 (data.jsonl:3)",
    ]


def test_rows_beyond_the_context_of_the_model_are_a_problem(tmp_path: Path) -> None:
    file = _file(tmp_path, _turn("yes"), _turn("x" * 2048))
    assert problems(inspect_data(file, "tiny", "sft", None, {})) == [
        "longer than the 2048 tokens that the model was made for: 1 (data.jsonl:2)"
    ]


def test_a_part_that_is_not_text_is_a_problem_of_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = [{"type": "text", "text": "See"}, {"type": "video", "video": "cat.mp4"}]
    row = {"messages": [{"role": "user", "content": picture}, {"role": "assistant", "content": "A cat."}]}
    out = _printed(_file(tmp_path, _turn("yes"), row), capsys)
    assert "data.jsonl:2: messages[0] has a content part that is neither text nor an image nor audio" in out
    assert "problem: skipped: 1" in out


def test_good_data_has_no_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no problems found" in _printed(_file(tmp_path, _turn("yes"), _turn("no")), capsys)


def test_rows_that_are_all_too_long_are_reported_as_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = _printed(_file(tmp_path, _turn("x" * 100)), capsys, max_len=50)
    assert "problem: no row is left to train on" in out
    assert f"max {AROUND_A_TURN + 100}" in out


def test_plain_output_brackets_exactly_what_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = _turn("One.\nTwo.")["messages"] + _turn("Bye [bold]", "And?")["messages"]
    out = _printed(_file(tmp_path, {"messages": chat}), capsys)
    assert "\x1b" not in out
    assert (
        "<|bos|><|im_start|>user↵\nHi<|im_end|>↵\n<|im_start|>assistant↵\n⟦One.↵\nTwo.<|im_end|>⟧↵\n"
        "<|im_start|>user↵\nAnd?<|im_end|>↵\n<|im_start|>assistant↵\n⟦Bye [bold]<|im_end|>⟧\n"
    ) in out


def test_a_terminal_shows_trained_tokens_in_green_and_token_borders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = _printed(_file(tmp_path, _turn("ab")), capsys)
    assert "⟦" not in out
    assert "\x1b[2;4mH\x1b[0m\x1b[2mi\x1b[0m\x1b[2;4;7m<|im_end|>\x1b[0m" in out, "dim, alternately underlined"
    assert "\x1b[1;32ma\x1b[0m\x1b[1;4;32mb\x1b[0m\x1b[1;7;32m<|im_end|>\x1b[0m" in out


def test_only_the_given_number_of_rows_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _file(tmp_path, *(_turn(f"answer {i}") for i in range(4)))
    assert _printed(file, capsys, rows=2).count("⟦answer") == 2
    assert _printed(file, capsys, rows=0).count("⟦") == 0


def test_the_first_five_reasons_are_printed_in_file_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unanswered = {"messages": [{"role": "user", "content": "Hi"}]}
    out = _printed(_file(tmp_path, _turn("yes"), *["{broken", unanswered] * 5), capsys)
    assert "10 skipped:" in out
    reasons = [line for line in out.splitlines() if line.startswith("  data.jsonl:")]
    assert [reason.split(":")[1] for reason in reasons] == ["2", "3", "4", "5", "6"]
    assert "  and 5 more" in out


def test_control_characters_in_the_data_cannot_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = _printed(_file(tmp_path, _turn("a\x1b[31mb\tc\rd\x9be\x7f")), capsys)
    assert "⟦a␛[31mb␉c␍d␡e␡<|im_end|>⟧" in out
    assert not {"\x1b", "\t", "\r", "\x9b", "\x7f"} & set(out)


def test_a_character_of_several_tokens_is_shown_whole(tiny: tuple[ModelConfig, Any]) -> None:
    tokens = list("né🙂".encode())
    assert list(pieces(Row("r", np.array(tokens), np.arange(7) > 0), tiny[1])) == [
        Piece("n", False, False),
        Piece("é", True, False),
        Piece("🙂", True, False),
    ]


def test_bytes_that_are_no_character_are_shown_one_by_one(tiny: tuple[ModelConfig, Any]) -> None:
    end = tiny[1].eos_token_id
    row = Row("r", np.array([ord("a"), 0xC3, ord("b"), 0xF0, end]), np.zeros(5))
    assert [(piece.text, piece.special) for piece in pieces(row, tiny[1])] == [
        ("a", False),
        ("�", False),
        ("b", False),
        ("�", False),
        ("<|im_end|>", True),
    ]


def test_the_space_in_front_of_a_word_is_kept_where_decoding_alone_would_drop_it() -> None:
    backend = Tokenizer(models.WordLevel({"</s>": 0, "▁Hi": 1, "▁there": 2}, unk_token="</s>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert tokenizer.decode([2]) == "there"
    row = Row("r", np.array([1, 2, 0]), np.zeros(3))
    assert [piece.text for piece in pieces(row, tokenizer)] == [" Hi", " there", "</s>"]


def test_a_histogram_counts_every_length_once() -> None:
    assert histogram([3, 4, 9], 2) == [(3, 6, 2), (7, 10, 1)]
    assert histogram([5, 5, 5]) == [(5, 5, 3)]
    lengths = list(range(1, 101))
    bins = histogram(lengths, 8)
    assert len(bins) == 8
    assert sum(count for _, _, count in bins) == 100
    assert [low for low, _, _ in bins[1:]] == [high + 1 for _, high, _ in bins[:-1]]


def test_plain_text_is_shown_for_cpt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(inspect_data(_file(tmp_path, {"text": "Once upon"}), "tiny", "cpt", 100, {}), 1)
    assert "nce upon<|im_end|>⟧" in capsys.readouterr().out


def test_data_for_another_algorithm_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no row is left to train on; the first reason: data\.jsonl:1: cpt trains on"):
        inspect_data(_file(tmp_path, _turn("yes")), "tiny", "cpt", 100, {})


def test_the_command_prints_statistics_as_json_and_maps_columns(tmp_path: Path) -> None:
    file = _file(tmp_path, {"frage": "2+2?", "antwort": "4"})
    columns = ["--column", "prompt=frage", "--column", "response=antwort"]
    result = CliRunner().invoke(app, ["data", "show", file, "--model", "tiny", *columns, "--json"])
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.stdout)
    assert (numbers["rows"], numbers["trained_tokens"]) == (1, 2)


def test_the_command_prints_rows_and_suggests_a_file_for_a_wrong_one(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["data", "show", _file(tmp_path, _turn("yes")), "--model", "tiny"])
    assert shown.exit_code == 0, shown.output
    assert "format messages, 1 samples" in shown.stdout
    assert "⟦yes<|im_end|>⟧" in shown.stdout
    wrong = CliRunner().invoke(app, ["data", "show", str(tmp_path / "dat.jsonl"), "--model", "tiny"])
    assert wrong.exit_code == 2
    assert "did you mean data.jsonl?" in wrong.stderr


def test_a_row_template_is_shown_as_rendered_and_a_missing_value_is_named_by_its_row(tmp_path):
    row = {"Body": "Tom has 3.", "Question": "How many?", "Answer": 3}
    file = _file(tmp_path, row, {**row, "Question": None})
    command = ["data", "show", file, "--model", "tiny", "--algorithm", "grpo", "--answer", "Answer"]
    shown = CliRunner().invoke(app, [*command, "--prompt", "{Body} {Question}", "--system", "Be brief."]).output
    assert "Tom has 3. How many?<|im_end|>" in shown and "system↵\nBe brief." in shown
    assert "reference answer: 3" in shown
    assert "data.jsonl:2: prompt: the column 'Question' of the template has no value" in shown
    wrong = CliRunner().invoke(app, [*command, "--prompt", "{Body} {question}"])
    assert wrong.exit_code == 2 and "did you mean Question?" in wrong.output


def test_prompts_of_an_online_algorithm_are_shown_as_rendered(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "2+2?", "answer": "4"}\n')
    report = inspect_data(str(file), "tiny", "grpo", 2048, {})
    assert [len(report.rows), report.statistics()["trained_tokens"]] == [1, 0]
    assert "trained" not in " ".join(problems(report))

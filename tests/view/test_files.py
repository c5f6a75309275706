"""Reading a run's folder while it grows: complete lines, new bytes, and nothing outside of it."""

import json
import os

import pytest

from oxrl.view.files import new_lines, open_inside
from oxrl.view.runs import NotFoundError, Runs, flat_config
from oxrl.view.steps import Steps
from tests.view.folders import answer, append, step_answers, write_run, write_step


def test_only_complete_lines_are_read_and_each_once(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"st')
    first = new_lines(tmp_path, "metrics.jsonl")
    assert first.body == b'{"step": 1}\n'
    with file.open("a") as opened:
        opened.write('ep": 2}\n')
    second = new_lines(tmp_path, "metrics.jsonl", first.end, first.file)
    assert (second.start, second.body) == (first.end, b'{"step": 2}\n')
    assert new_lines(tmp_path, "metrics.jsonl", second.end, second.file).body == b""


def test_a_large_file_comes_in_pieces_and_a_line_longer_than_a_piece_as_a_whole(tmp_path):
    lines = [b"a" * 10 + b"\n", b"b" * 100 + b"\n", b"c\n"]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    read, end, file, more = b"", 0, "", True
    while more:
        part = new_lines(tmp_path, "metrics.jsonl", end, file, chunk=16)
        read, end, file, more = read + part.body, part.end, part.file, part.more
        assert len(part.body) < 130
    assert read == b"".join(lines)


def test_a_file_that_was_replaced_is_read_from_its_beginning(tmp_path):
    append(tmp_path / "metrics.jsonl", {"step": 1}, {"step": 2})
    first = new_lines(tmp_path, "metrics.jsonl")
    append(tmp_path / "draft", {"step": 1}, {"step": 9}, {"step": 10})  # longer: its size alone tells nothing
    (tmp_path / "draft").replace(tmp_path / "metrics.jsonl")
    second = new_lines(tmp_path, "metrics.jsonl", first.end, first.file)
    assert second.start == 0 and second.body.count(b"\n") == 3


def test_links_and_other_folders_are_refused(tmp_path):
    run, secret = tmp_path / "run", tmp_path / "secret"
    (run / "record").mkdir(parents=True)
    secret.mkdir()
    append(secret / "step_000001.jsonl", {"kind": "step", "step": 1})
    (run / "metrics.jsonl").symlink_to(secret / "step_000001.jsonl")
    (run / "record" / "step_000001.jsonl").symlink_to(secret / "step_000001.jsonl")
    with pytest.raises(ValueError, match="cannot be read"):
        new_lines(run, "metrics.jsonl")
    with pytest.raises(FileNotFoundError):
        Steps(run).step(1)
    (run / "record" / "step_000001.jsonl").unlink()
    (run / "record").rmdir()
    (run / "record").symlink_to(secret)
    assert Steps(run).numbers() == []
    with pytest.raises(FileNotFoundError):
        Steps(run).step(1)
    for name in ("../secret/step_000001.jsonl", "record/../../secret", "", "/etc/passwd", "./metrics.jsonl"):
        with pytest.raises(ValueError, match="not a name"), open_inside(run, name):
            pass


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert new_lines(tmp_path, "metrics.jsonl").body == b""


def test_a_step_comes_without_tokens_and_an_answer_with_them(tmp_path):
    write_step(tmp_path, 3, [answer(7, 0, "the lowest is 12", 1.0), answer(7, 1, "it is 31", 0.0)])
    steps = Steps(tmp_path)
    step = steps.step(3)
    assert step["header"]["groups"][0]["rewards"] == [1.0, 0.0]
    assert [each["tokens"] for each in step["answers"]] == [{"length": 7, "trained": 4}, {"length": 6, "trained": 3}]
    assert steps.answer(3, "7", "1")["tokens"]["pieces"] == ["What", " is", " 2+2?", "it", " is", " 31"]
    with pytest.raises(FileNotFoundError, match="no answer 5 of group 7"):
        steps.answer(3, "7", "5")


def test_answers_with_an_unusual_line_are_counted_in_the_same_way(tmp_path):
    quoted = answer(7, 0, '"tokens": {"ids": [1]} and "mask": [0]', 1.0)
    reordered = {"tokens": quoted["tokens"], **{name: value for name, value in quoted.items() if name != "tokens"}}
    without = answer(7, 2, "none", None) | {"tokens": None}
    lines = [quoted, reordered | {"index": 1}, without, answer(7, 3, "", 0.0) | {"tokens": {"ids": [], "mask": []}}]
    write_step(tmp_path, 3, lines)
    found = [each["tokens"] for each in Steps(tmp_path).step(3)["answers"]]
    expected = {"length": len(quoted["tokens"]["ids"]), "trained": sum(quoted["tokens"]["mask"])}
    assert found == [expected, expected, {"length": 0, "trained": None}, {"length": 0, "trained": 0}]
    assert Steps(tmp_path).answer(3, "7", "0") == quoted


def test_a_row_of_a_dataset_has_the_text_of_its_tokens(tmp_path):
    tokens = answer(0, 0, "it is 4", 1.0)["tokens"]
    write_step(
        tmp_path, 1, [{"kind": "row", "group": 0, "index": 1, "sample_id": "row-1", "tokens": tokens}], groups=[]
    )
    (row,) = Steps(tmp_path).step(1)["answers"]
    assert (row["prompt"], row["text"]) == ("What is 2+2?", "it is 4")
    assert Steps(tmp_path).answer(1, "0", "1")["text"] == "it is 4"


def test_a_step_that_is_written_again_is_read_again(tmp_path):
    steps = Steps(tmp_path)
    write_step(tmp_path, 3, [answer(7, 0, "before", 1.0)])
    assert steps.answer(3, "7", "0")["messages"][-1]["content"] == "before"
    write_step(tmp_path, 3, [answer(7, 0, "afterwards", 1.0)])
    assert steps.step(3)["answers"][0]["messages"][-1]["content"] == "afterwards"
    assert steps.answer(3, "7", "0")["messages"][-1]["content"] == "afterwards"


def test_a_torn_last_line_and_a_damaged_one_are_left_out(tmp_path):
    write_step(tmp_path, 3, [answer(7, 0, "whole", 1.0)])
    file = tmp_path / "record" / "step_000003.jsonl"
    file.write_bytes(file.read_bytes() + b'not json\n{"kind": "answer", "group": 7, "ind')
    assert [each["index"] for each in Steps(tmp_path).step(3)["answers"]] == [0]


def test_one_prompt_is_found_at_every_step_that_has_it(tmp_path):
    for step in (1, 2, 3):
        write_step(tmp_path, step, [answer(step, 0, f"at {step}", 0.5, "row-2" if step == 2 else "row/1 %")])
    found = Steps(tmp_path).prompt("row/1 %")
    assert [(each["step"], each["answers"][0]["messages"][-1]["content"]) for each in found] == [
        (1, "at 1"),
        (3, "at 3"),
    ]


OLD = {
    "id": "row#1#4/2",
    "prompt": "2+2?",
    "response": "four",
    "answer": "4",
    "reward": None,
    "status": "failed",
    "turns": [{"prompt_ids": [1], "token_ids": [5, 6], "logprobs": [-0.5, -1.0], "versions": [3, 3]}],
}


def test_a_run_without_record_shows_what_rollouts_jsonl_has(tmp_path):
    append(tmp_path / "rollouts.jsonl", {"step": 1, "digest": "", "samples": []}, {"step": 2, "samples": [OLD]})
    steps = Steps(tmp_path)
    assert steps.numbers() == [1, 2]
    (found,) = steps.step(2)["answers"]
    assert (found["group"], found["index"], found["sample_id"]) == ("4", "2", "row#1")
    assert steps.answer(2, "4", "2")["tokens"]["sampler_logprob"] == [-0.5, -1.0]
    append(tmp_path / "rollouts.jsonl", {"step": 3, "samples": [OLD]})
    assert steps.numbers() == [1, 2, 3] and steps.step(3)["answers"][0]["reward"] is None


def test_a_step_dropped_from_the_record_falls_back_to_rollouts_jsonl(tmp_path):
    append(tmp_path / "rollouts.jsonl", {"step": 1, "samples": [OLD]})
    write_step(tmp_path, 2, [answer(7, 0, "recorded", 1.0)])
    steps = Steps(tmp_path)
    assert steps.numbers() == [1, 2]
    assert steps.step(1)["header"]["partial"] and "partial" not in steps.step(2)["header"]


def test_requests_go_through_one_table(tmp_path):
    runs = Runs([write_run(tmp_path / "a", steps=12, recorded=2), write_run(tmp_path / "b", steps=2, lr=1e-5)])
    overview = json.loads(runs.respond("overview").body)
    assert [run["name"] for run in overview["runs"]] == ["a", "b"] and overview["metrics"][0]["name"] == "reward"
    assert json.loads(runs.respond("run/0/steps").body) == [11, 12]
    assert json.loads(runs.respond("run/1/config").body)["train.lr"] == "1e-05"
    assert runs.respond("run/0/lines/metrics").body.count(b"\n") == 12
    for path in ("run/2/steps", "run/0/lines/config", "run/0/../1/steps", "run/0/step/x", "metrics.jsonl", ""):
        with pytest.raises(NotFoundError):
            runs.respond(path)


def test_a_run_without_the_guard_shows_what_its_curves_say(tmp_path):
    append(tmp_path / "metrics.jsonl", *({"step": step, "loss": 0.0, "grad_norm": 0.0} for step in (1, 2, 3)))
    (found,) = json.loads(Runs([tmp_path]).respond("run/0/warnings").body)
    assert (found["step"], found["check"], found["state"]) == (3, "no_gradient", "warned") and found["remedy"]


def test_stages_are_runs_of_their_own_and_equal_names_get_more_of_their_path(tmp_path):
    write_run(tmp_path / "one" / "sft", steps=1)
    write_run(tmp_path / "one" / "rl", steps=1)
    (tmp_path / "one" / "stages.yaml").write_text("sft: {}\nrl: {}\n")
    write_run(tmp_path / "other" / "rl", steps=1)
    names = [run.name for run in Runs([tmp_path / "one", tmp_path / "other" / "rl"]).runs]
    assert sorted(names) == ["one/rl", "one/sft", "other/rl"]
    write_run(tmp_path / "plain", steps=1)
    names = [run.name for run in Runs([tmp_path / "one", tmp_path / "plain"]).runs]
    assert sorted(names) == ["one/rl", "one/sft", "plain"]


def test_a_folder_without_a_run_is_refused_with_a_remedy(tmp_path):
    write_run(tmp_path / "first", steps=1)
    with pytest.raises(ValueError, match="no run folder .*did you mean first"):
        Runs([tmp_path / "frist"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is not a run folder"):
        Runs([tmp_path / "empty"])
    with pytest.raises(ValueError, match="named twice"):
        Runs([tmp_path / "first", tmp_path / "first"])


def test_a_damaged_config_is_empty(tmp_path):
    (tmp_path / "config.yaml").write_text("a: [1, 2")
    assert flat_config(tmp_path) == {}
    (tmp_path / "config.yaml").write_text("a: {b: [1, 2], c: {}}\n")
    assert flat_config(tmp_path) == {"a.b": "[1,2]", "a.c": "{}"}


def test_a_thousand_answers_are_a_small_response(tmp_path):
    write_step(tmp_path, 1, step_answers(1, groups=125))
    step = Steps(tmp_path).step(1)
    assert len(step["answers"]) == 1000 and len(json.dumps(step)) < 1_500_000

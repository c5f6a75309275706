"""The files beside the checkpoints of a run."""

from pathlib import Path

import pytest

from oxrl.config import ConfigError, check_config
from oxrl.run.folder import (
    check_resumable,
    choose_folder,
    create_folder,
    record_config,
    record_inputs,
    record_stages,
    recorded_stages,
    with_absolute_paths,
)
from oxrl.run.reward import load_reward
from oxrl.types import Message, Sample

CONFIG = check_config({"model": {"name": "tiny"}, "data": {"train_files_path": "rows.jsonl"}})
REWARD = "def score(rollout):\n    return {}\n"


@pytest.fixture
def run(tmp_path):
    """Record the inputs of a run with two rewards of one file and a tool of a module; return the recorded file."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD.format(1.0))
    config = check_config(
        {
            "model": {"name": "tiny"},
            "data": {"train_files_path": "rows.jsonl"},
            "reward": {
                "reward_func": {f"{reward}:score": 1.0, "length_target": 1.0},
                "params": {"length_target": {"target": 3}},
            },
            "rollout": {"env": "tools", "tools": ["oxrl.rollouts.tools:calculator"]},
        }
    )
    load_reward(config)

    def record(text, *, resuming):
        rows = [Sample("a", (Message("user", text),))] if text else []
        record_inputs(config, rows, tmp_path / "inputs.json", resuming=resuming)

    record("one", resuming=False)
    return record


def test_a_resume_with_the_same_inputs_says_nothing(run, caplog):
    run("one", resuming=True)
    assert not caplog.records


def test_a_resume_with_a_changed_reward_file_warns_once(run, tmp_path, caplog):
    (tmp_path / "reward.py").write_text(REWARD.format(0.5))
    run("one", resuming=True)
    assert [each.getMessage() for each in caplog.records] == [
        f"resuming with other content of {tmp_path}/reward.py:score: metrics before and after may not be comparable"
    ]
    run("one", resuming=True)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("rows", ["two", ""])
def test_a_resume_with_other_held_out_rows_warns(run, caplog, rows):
    run(rows, resuming=True)
    assert "resuming with other content of held-out rows" in caplog.text
    run("three", resuming=False)
    assert len(caplog.records) == 1, "a new run is not compared"


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000], ids=["incomplete", "a list", "deep"])
def test_digests_that_cannot_be_read_are_written_again(run, tmp_path, caplog, content):
    before = (tmp_path / "inputs.json").read_bytes()
    (tmp_path / "inputs.json").write_bytes(content)
    run("one", resuming=True)
    assert (tmp_path / "inputs.json").read_bytes() == before and not caplog.records


@pytest.mark.parametrize("content", ["", "run", "model:\n", "- 1\n"])
def test_a_damaged_config_of_a_run_is_named(tmp_path, content):
    for name, read in (
        ("config.yaml", lambda file: check_resumable(CONFIG, file)),
        ("config.yaml", lambda file: record_config(CONFIG, file, resuming=True)),
        ("stages.yaml", lambda file: recorded_stages(file.parent)),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=f"{name} is damaged"):
            read(tmp_path / name)


def test_a_recorded_config_that_lacks_a_key_is_damaged(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {}\n")
    with pytest.raises(ConfigError, match=r"config.yaml is damaged"):
        check_resumable(CONFIG, tmp_path / "config.yaml")


def test_a_run_is_resumed_with_another_spelling_of_the_same_model(tmp_path):
    def named(model):
        return check_config({"model": {"name": model}, "data": {"train_files_path": "rows.jsonl"}})

    record_config(named("qwen3-0.6b"), tmp_path / "config.yaml", resuming=False)
    check_resumable(named("Qwen/Qwen3-0.6B"), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="'qwen3-0.6b' and cannot be resumed"):
        check_resumable(named("qwen3-4b"), tmp_path / "config.yaml")


def of_experiment(name, root):
    raw = {"model": {"name": "tiny"}, "data": {"train_files_path": "rows.jsonl"}}
    return check_config(raw | {"run": {"experiment_id": name, "checkpoint_dir": str(root)}})


def test_a_new_run_without_output_goes_to_the_next_numbered_folder_and_a_resume_to_the_latest(tmp_path, caplog):
    caplog.set_level("INFO")
    config = of_experiment("math", tmp_path)
    assert choose_folder(config, None, resume=False) == tmp_path / "math"
    assert choose_folder(config, None, resume=True) == tmp_path / "math" and not caplog.records
    for number in (1, 2, 10):
        name = "math" if number == 1 else f"math-{number}"
        (tmp_path / name).mkdir()
        record_config(config, tmp_path / name / "config.yaml", resuming=False)
    (tmp_path / "math-11").mkdir()
    (tmp_path / "math-11" / ".lock").touch()  # of a run that failed before its first step
    assert choose_folder(config, None, resume=False) == tmp_path / "math-12"
    assert not caplog.records, "the folder does not exist yet"
    create_folder(config, tmp_path / "math-12" / "sft")
    create_folder(config, tmp_path / "math-12" / "rl")
    assert caplog.text.count(f"{tmp_path}/math has a run; the new one is in: {tmp_path}/math-12\n") == 1
    assert choose_folder(config, None, resume=True) == tmp_path / "math-10", "by number, not by name"
    assert f"resuming the latest run: {tmp_path}/math-10" in caplog.text
    assert choose_folder(config, tmp_path / "math", resume=False) == tmp_path / "math", "an output is used as given"


def test_a_folder_with_the_number_of_another_experiment_is_neither_used_nor_resumed(tmp_path):
    config, other = of_experiment("math", tmp_path), of_experiment("math-2", tmp_path)
    for name, each in (("math", config), ("math-2", other)):
        record_stages({"sft": each, "rl": each}, tmp_path / name)
    (tmp_path / "math-old").mkdir()
    (tmp_path / "math-old" / "config.yaml").touch()
    assert choose_folder(config, None, resume=True) == tmp_path / "math"
    assert choose_folder(config, None, resume=False) == tmp_path / "math-3"


def test_a_recorded_config_has_absolute_paths_of_data_and_of_python_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "mine.py"):
        Path(name).write_text("")
    section = {
        "train_files_path": {"one": "rows.jsonl"},
        "reward_func": {"mine.py:short": 0.5},
        "name": "tiny",
        "lr": 1.0,
    }
    assert with_absolute_paths({"section": section, "others": ["missing.jsonl", "mine.py:short"]}) == {
        "section": {
            "train_files_path": {"one": f"{tmp_path}/rows.jsonl"},
            "reward_func": {f"{tmp_path}/mine.py:short": 0.5},
            "name": "tiny",
            "lr": 1.0,
        },
        "others": ["missing.jsonl", f"{tmp_path}/mine.py:short"],
    }


@pytest.mark.parametrize(
    ("written", "recorded"),
    [
        ("gym:mine.py:Room", "gym:{folder}/mine.py:Room"),
        ("gym:mine.py:Room-v0", "gym:{folder}/mine.py:Room-v0"),
        ("verifiers:mine.py", "verifiers:{folder}/mine.py"),
        ("mcp:python  mine.py --port 1", "mcp:python  {folder}/mine.py --port 1"),
        ("gym:theirs.py:Room", "gym:theirs.py:Room"),
        ("mcp:http://127.0.0.1/mcp", "mcp:http://127.0.0.1/mcp"),
    ],
)
def test_files_of_environments_and_of_tool_servers_are_recorded_with_absolute_paths(
    tmp_path, monkeypatch, written, recorded
):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("")
    assert with_absolute_paths([written]) == [recorded.format(folder=tmp_path)]


def test_a_resume_with_a_changed_file_of_an_environment_warns(tmp_path, caplog):
    (tmp_path / "room.py").write_text("first")
    config = check_config({"model": {"name": "tiny"}, "rollout": {"env": f"gym:{tmp_path}/room.py:Room"}})
    record_inputs(config, [], tmp_path / "inputs.json", resuming=False)
    (tmp_path / "room.py").write_text("second")
    record_inputs(config, [], tmp_path / "inputs.json", resuming=True)
    assert f"resuming with other content of gym:{tmp_path}/room.py:Room" in caplog.text

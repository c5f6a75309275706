"""The documented environment variables for the folders of data and runs."""

from pathlib import Path

from oxrl.config import check_config
from oxrl.data.prepare import data_dir, prepare
from oxrl.run.folder import run_folder
from oxrl.run.prepare import resolve
from tests.rows import write_jsonl


def test_prepared_data_is_written_to_and_read_from_the_data_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("OXRL_DATA_DIR", str(tmp_path / "there"))
    raw = write_jsonl(tmp_path / "raw.jsonl", [{"question": f"{i}?", "answer": f"so: #### {i}"} for i in range(4)])
    folder = prepare("gsm8k", files=[f"train={raw}"], splits=["train"])
    assert folder == tmp_path / "there" / "gsm8k"
    inputs = resolve(check_config({"model": {"name": "tiny"}, "data": {"dataset": "gsm8k"}}))
    assert [sample.answer for sample in sorted(inputs.source.get_prompts(4), key=lambda each: each.id)] == list("0123")
    monkeypatch.delenv("OXRL_DATA_DIR")
    assert str(data_dir()) == "data"


def test_runs_go_to_the_checkpoint_dir_unless_the_config_sets_another(tmp_path, monkeypatch):
    config = check_config({"model": {"name": "tiny"}, "data": {"train_files_path": "x"}})
    monkeypatch.delenv("OXRL_CHECKPOINT_DIR", raising=False)
    assert run_folder(config, None) == Path.cwd() / "checkpoints" / "run"
    monkeypatch.setenv("OXRL_CHECKPOINT_DIR", str(tmp_path))
    assert run_folder(config, None) == tmp_path / "run"
    assert run_folder(config, "mine") == Path.cwd() / "mine"
    own = check_config({**config.model_dump(mode="json"), "run": {"checkpoint_dir": "own"}})
    assert run_folder(own, None) == Path.cwd() / "own" / "run"

"""A full disk: what was there stays readable, and the message says what to do."""

import resource
from contextlib import contextmanager

import pytest

from oxrl.config import ConfigError, load_config, load_stages
from oxrl.run.folder import check_resumable, record_config, record_stages, recorded_stages

OVERRIDES = ["model.name=tiny", "data.train_files_path=rows.jsonl", "train.alg_name=sft"]


@contextmanager
def room_for(size):
    """No file of this process can become larger than `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("stages", [False, True])
def test_a_config_that_cannot_be_written_completely_leaves_the_one_before(tmp_path, stages):
    raw = ["rl.train.lr=1", *OVERRIDES[:2]] if stages else OVERRIDES

    def record(*more):
        loaded = load_stages(None, [*raw, *more])
        if stages:
            record_stages(loaded, tmp_path)
        else:
            record_config(loaded[""], tmp_path / "config.yaml", resuming=False)

    record()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with room_for(100), pytest.raises(OSError, match="File too large"):
        record("train.weight_decay=0.5")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before and len(before) == 1


@pytest.mark.parametrize("content", ["", "model:\n  na", "5", "model: 5\n", "model: {name: tiny}\n", "a: [", "\x00"])
def test_a_damaged_config_of_a_run_is_reported(tmp_path, content):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError):
        recorded_stages(tmp_path)
    with pytest.raises(ConfigError, match="config.yaml is damaged: remove it, then resume with"):
        check_resumable(load_config(None, OVERRIDES), file)


def test_a_run_whose_model_is_a_folder_is_resumed_by_any_spelling_of_its_path(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    relative, absolute = (
        load_config(None, [*OVERRIDES, f"model.name={name}"]) for name in ("model", f"{tmp_path}/model")
    )
    record_config(relative, tmp_path / "config.yaml", resuming=False)
    check_resumable(absolute, tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="cannot be resumed with"):
        check_resumable(load_config(None, [*OVERRIDES, f"model.name={tmp_path}"]), tmp_path / "config.yaml")

"""Checkpoints that cannot be written and damaged files are detected before training resumes."""

import json
import logging
import math
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from typer.testing import CliRunner

from oxrl.algorithms import algorithm
from oxrl.backends.local import create_pytorch_backend
from oxrl.cli import app
from oxrl.concurrency import run_blocking
from oxrl.config import Config
from oxrl.data.buffer import DataBuffer
from oxrl.loops.offline import OfflineConfig, run_offline
from oxrl.models.load import load_model
from oxrl.run.checkpoint import (
    CorruptCheckpointError,
    NonFiniteWeightsError,
    check_files,
    checkpoints,
    intact_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from oxrl.run.failure import kind_of
from oxrl.run.folder import record_config
from oxrl.types import TrainingState
from oxrl.weights.integrity import digests, seal
from tests.engines import need
from tests.rows import sums, write_jsonl
from tests.run.test_resume import facts, train_in_fork

STATE = TrainingState(3, 3, 0, {"data": {"position": 12, "order": {10: 1, 9: 2}}, "memory": {}})


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):
    """Two checkpoints, of the steps 2 and 3; tests do not change them."""
    root = tmp_path_factory.mktemp("checkpoints")
    backend = create_pytorch_backend(load_model(tiny[0]), lr=1e-3)
    for step in (2, 3):
        run_blocking(lambda step=step: save_checkpoint(root, backend, STATE._replace(step=step), tokenizer=tiny[1]))
    return root, backend


@pytest.fixture
def root(written, tmp_path):
    return shutil.copytree(written[0], tmp_path / "checkpoints")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 0b100
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


DAMAGES = {"a flipped bit": flip, "cut off": cut, "missing": Path.unlink}


@pytest.mark.engine
def test_vllm_finds_the_weights_among_the_files(written):
    need("vllm")
    from vllm.model_executor.model_loader.weight_utils import filter_duplicate_safetensors_files

    folder = written[0] / "step_0003"
    files = [str(file) for file in folder.glob("*.safetensors")]
    found = filter_duplicate_safetensors_files(files, str(folder), "model.safetensors.index.json")
    assert found == [str(folder / "model.safetensors")] and len(files) == 3


def test_every_file_of_a_checkpoint_has_a_digest(written):
    names = {file.name for file in (written[0] / "step_0003").iterdir()}
    assert {"model.safetensors", "optimizer.safetensors", "rng.safetensors", "training_state.json"} < names
    assert {"config.json", "tokenizer.json"} < names
    check_files(written[0] / "step_0003")


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damaged_file_is_named_before_anything_is_loaded(written, root, damage):
    backend = written[1]
    weights = {name: tensor.clone() for name, tensor in backend.model.state_dict().items()}
    for name in sorted(file.name for file in (root / "step_0003").iterdir()):
        shutil.copytree(written[0] / "step_0003", root / "step_0004")
        DAMAGES[damage](root / "step_0004" / name)
        match = "not a checkpoint" if (damage, name) == ("missing", "training_state.json") else f"{name} is "
        with pytest.raises(ValueError, match=match):
            run_blocking(load_checkpoint, root / "step_0004", backend)
        shutil.rmtree(root / "step_0004")
    assert all(weights[name].equal(tensor) for name, tensor in backend.model.state_dict().items())


MODEL_FILES = ["model.safetensors", "config.json", "tokenizer.json"]


@pytest.mark.parametrize("name", MODEL_FILES)
def test_every_command_that_loads_a_run_refuses_a_damaged_checkpoint(root, tmp_path, name):
    one_run = root.parent
    file = one_run / "checkpoints" / "step_0003" / name
    flip(file) if name == "model.safetensors" else file.write_text(file.read_text() + " ")  # still valid JSON
    rows = write_jsonl(tmp_path / "rows.jsonl", sums(8))
    train = ["--algorithm", "sft", "--data", rows, "--output", tmp_path / "new"]
    for command in (
        ["generate", one_run, "--prompt", "a", "--max-new-tokens", 1],
        ["chat", one_run],
        ["eval", one_run, "--data", rows, "--reward", "exact_match", "--max-tokens", 1],
        ["export", one_run, "--output", tmp_path / "exported"],
        ["train", "--model", one_run, *train],
        ["train", "--model", file.parent, *train],
    ):
        done = CliRunner().invoke(app, [str(part) for part in command])
        assert done.exit_code == 2, (command, done.output)
        assert f"{name}isdamaged" in "".join(done.output.split()), (command, done.output)
        assert "useanothercheckpoint" in "".join(done.output.split())
    assert not (tmp_path / "exported").exists()


def forge(path: Path, **changes: object) -> None:
    """A record with digests of the files as they are now, which anyone can write."""
    file = path / "training_state.json"
    before = json.loads(file.read_text())
    file.unlink()
    record = {name: before[name] for name in TrainingState._fields} | {"files": digests(path)} | changes
    file.write_text(json.dumps({**record, "seal": seal(record), "environment": before["environment"]}))


class RunsCode:
    def __reduce__(self):
        return Path.touch, (Path("/var/tmp/oxrl-unpickled"),)


def pickled_weights(path: Path) -> None:
    for file in path.glob("model.safetensors*"):
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(RunsCode()))


def pickled(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(pickle.dumps(RunsCode()))


def a_run(folder: Path, name: str, **more: object) -> None:
    rows = write_jsonl(folder / "rows.jsonl", sums(8))
    common = {"run": {"experiment_id": "x"}, "model": {"name": "tiny"}, "data": {"train_files_path": str(rows)}}
    config = Config.model_validate({**common, "train": {"alg_name": name}, **more})
    record_config(config, folder / "config.yaml", resuming=False)


FORGED_FILES = {
    "pickled weights": (pickled_weights, "pickledweights"),
    "a pickle that is called safetensors": (pickled("model.safetensors"), "headertoolarge"),
}
FORGED_STATES = [{"step": "x"}, {"step": -5}, {"seed": None}, {"cursor": [1]}, {"cursor": {"best_step": "../../x"}}]


@pytest.mark.parametrize("forged", [*FORGED_FILES, *FORGED_STATES], ids=str)
def test_a_forged_checkpoint_is_refused_by_every_command_and_never_unpickled(root, tmp_path, forged):
    if isinstance(forged, str):
        change, expected = FORGED_FILES[forged]
        change(root / "step_0003")
        forge(root / "step_0003")
    else:
        forge(root / "step_0003", **forged)
        expected = "training_state.jsonisdamaged"
    shutil.rmtree(root / "step_0002")
    a_run(root.parent, "sft")
    for command in (
        ["train", "--output", root.parent, "--resume"],
        ["eval", root.parent, "--data", root.parent / "rows.jsonl", "--reward", "exact_match", "--max-tokens", 1],
        ["export", root.parent, "--output", tmp_path / "exported"],
    ):
        done = CliRunner().invoke(app, [str(part) for part in command])
        assert done.exit_code == 2, (command, done.output)
        assert expected in "".join(done.output.split()), (command, done.output)
    assert not Path("/var/tmp/oxrl-unpickled").exists()


@pytest.mark.parametrize(
    ("name", "cursor", "expected"),
    [
        ("grpo", STATE.cursor, "run that trains on dataset rows, but grpo samples completions: set train.alg_name"),
        ("sft", {"collector": {}}, "run that samples completions, but sft trains on dataset rows: set train.alg_name"),
        ("sft", {}, "has no position in its rows"),
    ],
)
def test_a_config_that_names_another_kind_of_algorithm_is_refused(root, name, cursor, expected):
    forge(root / "step_0003", cursor=cursor)
    a_run(root.parent, name, **({"reward": {"reward_func": "exact_match"}} if name == "grpo" else {}))
    done = CliRunner().invoke(app, ["train", "--output", str(root.parent), "--resume"])
    assert done.exit_code == 2 and "".join(expected.split()) in "".join(done.output.split()), done.output


def test_commands_that_read_a_run_import_no_python_file_that_its_config_names(root, tmp_path, caplog):
    a_run(root.parent, "sft")
    marker, code = tmp_path / "imported", tmp_path / "named.py"
    code.write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\ndef thing(*_): return 1.0\n")
    config = yaml.safe_load((root.parent / "config.yaml").read_text())
    for section, key in (("run", "backend"), ("inference_engine", "name"), ("train", "alg_name"), ("rollout", "env")):
        config[section][key] = f"{code}:thing"
    (root.parent / "config.yaml").write_text(yaml.safe_dump(config))
    write_jsonl(root.parent / "metrics.jsonl", [{"step": 3, "loss": 1.0}])
    for command in (
        ["eval", root.parent, "--data", root.parent / "rows.jsonl", "--reward", "exact_match", "--max-tokens", 1],
        ["generate", root.parent, "--prompt", "a", "--max-new-tokens", 1],
        ["export", root.parent, "--output", tmp_path / "exported"],
    ):
        done = CliRunner().invoke(app, [str(part) for part in command])
        assert done.exit_code == 0, (command, done.output)
    assert not marker.exists()
    assert f"this run was trained with rollout.env {code}:thing" in caplog.text


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors"])
def test_a_checkpoint_without_the_tensors_of_the_run_is_refused(written, root, name):
    """Otherwise transformers initialises missing weights at random."""
    save_file({"other": np.zeros(1)}, root / "step_0003" / name)
    forge(root / "step_0003")
    with pytest.raises(
        ValueError, match="lacks 21 tensors" if name == "model.safetensors" else "is not what was written"
    ):
        run_blocking(load_checkpoint, root / "step_0003", written[1])


def test_a_state_that_no_run_wrote_is_refused_by_the_loop(written):
    rows = OfflineConfig(num_steps=4, batch_size=1)
    run = partial(run_offline, written[1], algorithm("sft"), DataBuffer(["a"]), rows, state=STATE)
    with pytest.raises(ValueError, match="the training state of step 3 is not what a run writes"):
        run_blocking(run)


def test_a_state_that_is_nested_too_deeply_is_damaged(root):
    (root / "step_0003" / "training_state.json").write_text('{"seal": ' + "[" * 100_000)
    with pytest.raises(ValueError, match="training_state.json is damaged"):
        load_model(str(root / "step_0003"))


def test_what_only_a_resume_reads_is_not_checked_where_a_model_is_loaded(root):
    flip(root / "step_0003" / "optimizer.safetensors")
    load_model(str(root / "step_0003"))


def test_a_changed_copy_without_its_record_is_a_model_like_any_other(root):
    (root / "step_0003" / "training_state.json").unlink()
    (root / "step_0003" / "generation_config.json").write_text("{}")
    load_model(str(root / "step_0003"))


def test_a_damaged_checkpoint_is_moved_and_the_one_before_is_used(root, caplog):
    flip(root / "step_0003" / "optimizer.safetensors")
    with caplog.at_level(logging.WARNING):
        assert intact_checkpoint(root) == root / "step_0002"
    assert "optimizer.safetensors is damaged" in caplog.text and "step_0002 is used instead" in caplog.text
    assert checkpoints(root) == [root / "step_0002"] and (root / "damaged-step_0003").exists()


def test_if_all_checkpoints_are_damaged_it_raises_and_nothing_is_moved(root):
    for step in ("step_0002", "step_0003"):
        flip(root / step / "model.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"step_0003/model.safetensors is damaged.*every earlier one"):
        intact_checkpoint(root)
    assert len(checkpoints(root)) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_not_saved(tiny, root, value):
    backend = create_pytorch_backend(load_model(tiny[0]), lr=1e-3)
    backend.model.get_input_embeddings().weight.data[5, 5] = value
    with pytest.raises(
        NonFiniteWeightsError, match=r"after step 4 the weight .*embed.* is not finite.*step_0003 is"
    ) as e:
        run_blocking(lambda: save_checkpoint(root, backend, STATE._replace(step=4)))
    assert sorted(path.name for path in root.iterdir()) == ["step_0002", "step_0003"]
    assert kind_of(e.value) == "non_finite"


def test_checkpoints_from_before_there_were_digests_still_load(written, root):
    file = root / "step_0003" / "training_state.json"
    record = json.loads(file.read_text())
    del record["files"], record["seal"]
    file.write_text(json.dumps(record))
    assert run_blocking(load_checkpoint, root / "step_0003", written[1]).step == 3


CONFIG = {
    "model": {"name": "tiny"},
    "train": {
        "alg_name": "grpo",
        "lr": 1e-3,
        "checkpoint_every": 1,
        "train_steps_per_epoch": 6,
        "train_batch_size_per_gpu": 2,
    },
    "reward": {"reward_func": "length_target", "params": {"target": 6}},
    "rollout": {"n_samples": 2, "max_tokens": 8},
}
ROOM = 3 << 20  # bytes: for the weights, and not for the optimizer's state


def fill_the_disk(path: str) -> None:
    if Path(path).name == "step_0003":
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))


def two_runs(home: Path) -> tuple[list[int], list[str]]:
    """One in `home/whole` without faults, one in `home/broken`; exit codes, and the files after its first start."""
    from oxrl.config import check_config
    from oxrl.tracking.logs import set_up_logging

    config = check_config({**CONFIG, "data": {"train_files_path": str(home / "rows.jsonl")}})
    broken = home / "broken"
    codes = [train_in_fork(config, home / "whole", lambda _path: None)]
    os.dup2(os.open(home / "broken.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    set_up_logging()
    codes.append(train_in_fork(config, broken, fill_the_disk))
    left = sorted(path.name for path in (broken / "checkpoints").iterdir())
    damaged = broken / "checkpoints" / left[-1] / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    codes.append(train_in_fork(config, broken, lambda _path: None))
    return codes, left


def test_after_a_full_disk_and_a_damaged_checkpoint_a_resumed_run_is_the_same(tmp_path, forks):
    write_jsonl(tmp_path / "rows.jsonl", sums(50))
    codes, left = forks.run(two_runs, tmp_path)
    log = (tmp_path / "broken.log").read_text()
    assert codes == [0, 1, 0], log
    assert left == ["step_0002", "step_0003"], "old checkpoints, and no half of a new one"
    assert "could not be written" in log and "File too large" in log
    assert "step_0003 is intact. Free disk space, then resume the run" in log
    assert "step_0003/optimizer.safetensors is damaged" in log and "step_0002 is used instead" in log
    assert facts(tmp_path / "broken", 6) == facts(tmp_path / "whole", 6)
    assert [line["step"] for line in facts(tmp_path / "broken", 6)[1]] == list(range(1, 7))

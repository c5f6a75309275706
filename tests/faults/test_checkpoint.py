"""Checkpoints that cannot be written, and files that are not what was written: found out before training goes on."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oxrl.backends.local import create_pytorch_backend
from oxrl.checkpoint import (
    CorruptCheckpointError,
    check_files,
    checkpoints,
    intact_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from oxrl.concurrent import run_blocking
from oxrl.models.load import load_model
from oxrl.types import TrainingState
from tests.engines import need
from tests.rows import sums, write_jsonl
from tests.test_resume import facts

STATE = TrainingState(3, 3, 0, {"data": {"position": 12, "order": {10: 1, 9: 2}}, "memory": {}})


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):
    """Two checkpoints, of the steps 2 and 3; nobody changes them."""
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


def test_vllm_finds_the_weights_among_the_files(written):
    need("vllm")
    from vllm.model_executor.model_loader.weight_utils import filter_duplicate_safetensors_files

    folder = written[0] / "step_0003"
    files = [str(file) for file in folder.glob("*.safetensors")]
    found = filter_duplicate_safetensors_files(files, str(folder), "model.safetensors.index.json")
    assert found == [str(folder / "model.safetensors")] and len(files) == 3


def test_every_file_of_a_checkpoint_is_watched(written):
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


def test_a_damaged_checkpoint_is_moved_aside_and_the_one_before_is_taken(root, caplog):
    flip(root / "step_0003" / "optimizer.safetensors")
    with caplog.at_level(logging.WARNING):
        assert intact_checkpoint(root) == root / "step_0002"
    assert "optimizer.safetensors is damaged" in caplog.text and "step_0002 is taken instead" in caplog.text
    assert checkpoints(root) == [root / "step_0002"] and (root / "damaged-step_0003").exists()


def test_where_no_checkpoint_is_whole_it_stops_and_nothing_is_moved(root):
    for step in ("step_0002", "step_0003"):
        flip(root / step / "model.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"step_0003/model.safetensors is damaged.*every one before"):
        intact_checkpoint(root)
    assert len(checkpoints(root)) == 2


def test_checkpoints_from_before_there_were_digests_still_load(written, root):
    file = root / "step_0003" / "training_state.json"
    record = json.loads(file.read_text())
    del record["files"], record["seal"]
    file.write_text(json.dumps(record))
    assert run_blocking(load_checkpoint, root / "step_0003", written[1]).step == 3


# One process imports, and forks a child for every life of a run, as in test_resume.
LIVES = """
import os, resource, sys, threading, time
from pathlib import Path
from oxrl.config import check_config
from oxrl.logs import set_up_logging
from oxrl.wiring import train_run
import oxrl.backends.local, oxrl.loops.online, oxrl.generators.embedded, safetensors.torch, peft, anyio

home = Path(sys.argv[1])
config = check_config({
    "model": {"name": "tiny"},
    "data": {"train_files_path": str(home / "rows.jsonl")},
    "train": {"alg_name": "grpo", "lr": 1e-3, "checkpoint_every": 1, "train_steps_per_epoch": 8,
              "train_batch_size_per_gpu": 2},
    "reward": {"reward_func": "length_target", "params": {"target": 6}},
    "rollout": {"n_samples": 2, "max_tokens": 8},
})

def fill_the_disk(folder):
    # From step 4 on there is room for the weights, and not for the optimizer's state.
    while not (folder / "checkpoints" / "step_0004").exists():
        time.sleep(0.001)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 << 20, 6 << 20))

def live(folder, full=False):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            log = os.open(home / f"{folder.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 2)
            set_up_logging()
            if full:
                threading.Thread(target=fill_the_disk, args=(folder,), daemon=True).start()
            train_run(config, folder, resume=(folder / "config.yaml").exists())
            code = 0
        except RuntimeError as error:
            os.write(2, f"STOPPED {error}".encode())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

whole, broken = home / "whole", home / "broken"
assert live(whole) == 0
assert live(broken, full=True) == 1
left = sorted(path.name for path in (broken / "checkpoints").iterdir())
newest = broken / "checkpoints" / left[-1]
damaged = newest / "optimizer.safetensors"
damaged.write_bytes(damaged.read_bytes()[:-1])
assert live(broken) == 0
print(*left)
"""


def test_a_full_disk_and_then_a_damaged_checkpoint_cost_steps_and_no_truth(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", sums(50))
    done = subprocess.run(
        [sys.executable, "-c", LIVES, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    said = (tmp_path / "broken.log").read_text()
    assert done.returncode == 0, done.stderr[-3000:] + said
    left = done.stdout.splitlines()[-1].split()
    assert len(left) == 2 and all(name.startswith("step_") for name in left), (
        "old checkpoints, and no half of a new one"
    )
    assert "could not be written" in said and "File too large" in said
    assert f"{left[-1]} is whole. Make room, then go on with --resume" in said
    assert f"{left[-1]}/optimizer.safetensors is damaged" in said and f"{left[0]} is taken instead" in said
    assert facts(tmp_path / "broken", 8) == facts(tmp_path / "whole", 8)
    assert [line["step"] for line in facts(tmp_path / "broken", 8)[1]] == list(range(1, 9))

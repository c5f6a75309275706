"""Ranks that `oxrl train` starts itself: they end with the run, with its driver, and a lost one is survived."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from safetensors.torch import load_file

from oxrl.cluster import Places
from oxrl.config import ConfigError, check_config
from oxrl.devices import placed, ranks_to_start
from oxrl.inputs import read_inputs
from oxrl.parts import rollout_devices, sleeps_beside
from oxrl.trainer import Trainer, choose_backend, sections_of
from tests.engines import need
from tests.rows import write_jsonl

STEPS = 24
VLLM = {"name": "vllm", "colocated": True}
PATIENCE = 240.0


def rows(tmp_path: Path) -> Path:
    pairs = [{"prompt": f"Say {number}.", "completion": " ".join(["yes"] * (1 + number % 5))} for number in range(12)]
    return write_jsonl(tmp_path / "rows.jsonl", pairs)


def config_of(tmp_path: Path, **sections):
    data = {"train_files_path": str(rows(tmp_path))}
    sections["train"] = {"alg_name": "sft", **sections.get("train", {})}
    return check_config({"model": {"name": "tiny"}, "data": data, **sections})


def test_engines_beside_the_trainer_see_its_devices_and_others_those_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,9")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    apart = config_of(tmp_path, run={"backend": "fsdp", "training_gpus": 2, "rollout_gpus": 2})
    beside = config_of(tmp_path, run={"backend": "fsdp", "training_gpus": 2}, inference_engine=VLLM)
    assert (rollout_devices(apart), rollout_devices(beside, shared=True)) == (["7", "9"], ["3", "5"])
    assert rollout_devices(beside) == [], "on a processor there are none"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # torchrun has put the other rank onto another machine
    with pytest.raises(ConfigError, match="2 engines are started on this machine, and 1 ranks train here"):
        rollout_devices(beside, shared=True)


def test_an_engine_sleeps_where_it_shares_gpus_and_nowhere_else(tmp_path):
    def sleeps(engine, **bundle):
        trainer = SimpleNamespace(ranks=SimpleNamespace(places=Places(None, [{"CPU": 1.0, **bundle}])))
        return sleeps_beside(config_of(tmp_path, run={"backend": "ray"}, inference_engine=engine), trainer)

    assert [sleeps(VLLM, GPU=1.0), sleeps(VLLM), sleeps({"name": "vllm"}, GPU=1.0)] == [True, False, False]
    here = config_of(tmp_path, run={"backend": "local"}, model={"name": "tiny", "device": "cpu"}, inference_engine=VLLM)
    assert not sleeps_beside(here, None)


def start(data: Path, output: Path, *more: str) -> subprocess.Popen[str]:
    command = ["train", "--model", "tiny", "--algorithm", "sft", "--data", str(data), "--output", str(output)]
    command += ["--backend", "fsdp", "--steps", str(STEPS), "--batch-size", "2", "--lr", "1e-3"]
    command += ["--set", "run.training_gpus=2", "--set", "train.checkpoint_every=4", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "oxrl", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def steps_of(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def until(what, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank to process id, of the ranks that this launcher started."""
    found = {}
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                settings = dict(
                    part.split("=", 1) for part in (place / "environ").read_text().split("\0") if "=" in part
                )
            except OSError:  # it has ended meanwhile
                continue
            if settings.get("OXRL_RANK_OF") == str(launcher):
                found[int(settings["RANK"])] = int(place.name)
    return found


def weights(folder: Path) -> dict:
    return load_file(folder / "checkpoints" / f"step_{STEPS:04}" / "model.safetensors")


def test_a_run_that_loses_a_rank_goes_on_and_ends_as_if_nothing_had_been(tmp_path):
    data = rows(tmp_path)
    broken = start(data, tmp_path / "broken")
    until(lambda: max(steps_of(tmp_path / "broken"), default=0) >= 6, broken)
    os.kill(ranks_of(broken.pid)[1], signal.SIGKILL)
    said, _ = broken.communicate(timeout=PATIENCE)
    assert broken.returncode == 0, said[-3000:]
    assert "rank 1 was ended by SIGKILL: going on from the last checkpoint (restart 1 of 3)" in said

    whole = start(data, tmp_path / "whole")
    said, _ = whole.communicate(timeout=PATIENCE)
    assert whole.returncode == 0, said[-3000:]
    assert steps_of(tmp_path / "broken") == steps_of(tmp_path / "whole") == list(range(1, STEPS + 1))
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def test_a_run_that_is_told_to_stop_before_it_can_listen_stops(tmp_path):
    run = start(rows(tmp_path), tmp_path / "run")
    until(lambda: len(ranks_of(run.pid)) == 2, run)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 128 + signal.SIGTERM, said[-3000:]
    assert "going on" not in said and steps_of(tmp_path / "run") == []


@pytest.mark.parametrize("later", [0.0, 2.5])
def test_a_run_under_ray_that_is_told_to_stop_before_it_can_listen_leaves_nobody(tmp_path, monkeypatch, later):
    need("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    run = start(rows(tmp_path), tmp_path / "run", "--backend", "ray", "--set", "run.sharding=fsdp")
    until(lambda: actors_of(run.pid), run)
    started = psutil.Process(run.pid).children(recursive=True)
    time.sleep(later)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 128 + signal.SIGINT, said[-3000:]
    assert "interrupted" in said and "Traceback" not in said and "SIGTERM received" not in said
    until_gone(lambda: [each for each in started if each.is_running() and each.status() != psutil.STATUS_ZOMBIE])


def until_gone(left) -> None:
    deadline = time.monotonic() + 20
    while left():
        assert time.monotonic() < deadline, f"still there: {left()}"
        time.sleep(0.1)


def test_a_run_under_ray_that_loses_an_actor_goes_on(tmp_path, monkeypatch):
    need("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    run = start(rows(tmp_path), tmp_path / "run", "--backend", "ray", "--set", "run.sharding=fsdp")
    until(lambda: max(steps_of(tmp_path / "run"), default=0) >= 6, run)
    os.kill(actors_of(run.pid)[1], signal.SIGKILL)
    said, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, said[-3000:]
    assert "going on from the last checkpoint (2 restarts left)" in said
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))


def actors_of(driver: int) -> list[int]:
    """The training actors of the cluster that this process started."""
    told = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in told.splitlines()[1:]]
    family = {driver}
    for _ in range(4):  # driver, raylet, actor
        family |= {int(pid) for pid, parent, _ in lines if int(parent) in family}
    return sorted(int(pid) for pid, _, command in lines if "RankActor" in command and int(pid) in family)


def listening(process: int) -> set[str]:
    """The addresses at which others can reach it."""
    connections = psutil.Process(process).net_connections(kind="inet")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


def test_ranks_can_be_reached_from_here_only_and_end_with_whoever_started_them(tmp_path):
    launcher = start(rows(tmp_path), tmp_path / "run", "--set", "train.train_steps_per_epoch=100000")
    until(lambda: steps_of(tmp_path / "run"), launcher)
    ranks = ranks_of(launcher.pid)
    assert sorted(ranks) == [0, 1]
    assert set().union(*map(listening, ranks.values())) <= {"127.0.0.1", "::1"}
    launcher.kill()
    launcher.communicate()
    until_gone(lambda: ranks_of(launcher.pid))


def test_a_script_trains_over_ranks_and_gets_its_result(tmp_path):
    rows_given = [{"prompt": f"Say {number}.", "completion": "yes"} for number in range(8)]
    result = Trainer("tiny", backend="fsdp", training_gpus=2).train(
        algorithm="sft", data=rows_given, steps=2, train_batch_size_per_gpu=2, output=tmp_path / "run"
    )
    assert [line["step"] for line in result.history] == [1, 2]
    assert result.config.ranks == 2 and len(result.generate("Say 3.", max_new_tokens=2)) == 1


def test_a_function_of_a_script_keeps_its_run_in_one_process():
    def brief(rollout):
        return -float(len(rollout.response))

    (choice,) = choose_backend(sections_of({"reward": brief}))
    assert choice.value == "local"
    assert choose_backend(sections_of({"reward": "contains"})) == ()
    assert choose_backend(sections_of({"reward": brief, "backend": "ray"})) == (), "the driver is this process"
    with pytest.raises(ConfigError, match=r"fsdp starts processes, which do not know a function.*FILE.py:FUNCTION"):
        choose_backend(sections_of({"reward": brief, "backend": "fsdp"}))


def test_more_processes_than_devices_are_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    wide = placed(config_of(tmp_path, run={"backend": "fsdp", "training_gpus": 500}))
    with pytest.raises(ConfigError, match="training_gpus is 500, and this machine has"):
        ranks_to_start(wide)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 processes were started, and run.training_gpus is 500"):
        ranks_to_start(wide)


def test_a_step_has_the_rows_of_all_devices(tmp_path):
    config = config_of(tmp_path, run={"backend": "fsdp", "training_gpus": 3}, train={"train_batch_size_per_gpu": 2})
    assert config.batch_size == 6
    assert read_inputs(config).num_steps == 2  # of twelve rows


def test_without_a_gpu_a_config_for_several_trains_in_one_process(tmp_path):
    config = placed(config_of(tmp_path, run={"training_gpus": 8}))
    assert (config.run.backend, config.ranks) == ("local", 1)

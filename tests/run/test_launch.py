"""Ranks that `oxrl train` starts itself: they end with the run or its driver, and a run survives the loss of one."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from safetensors.torch import load_file

from oxrl.config import ConfigError, check_config, load_config
from oxrl.machine.ray_cluster import Bundles
from oxrl.run.arguments import sections_of
from oxrl.run.engines import rollout_devices, sleeps_beside
from oxrl.run.launch import run_ranks
from oxrl.run.placement import placed, ranks_to_start
from oxrl.run.prepare import resolve
from oxrl.trainer import Trainer, choose_backend
from tests.engines import need
from tests.forks import Forked
from tests.rows import sums, write_jsonl
from tests.waiting import EXPIRES, HANG, wait_until

STEPS = 4
VLLM = {"name": "vllm", "colocated": True}


def rows(tmp_path: Path) -> Path:
    pairs = [{"prompt": f"Say {number}.", "completion": " ".join(["yes"] * (1 + number % 5))} for number in range(12)]
    return write_jsonl(tmp_path / "rows.jsonl", pairs)


def config_of(tmp_path: Path, **sections):
    data = {"train_files_path": str(rows(tmp_path))}
    sections["train"] = {"alg_name": "sft", **sections.get("train", {})}
    return check_config({"model": {"name": "tiny"}, "data": data, **sections})


def test_colocated_engines_use_the_trainers_devices_and_others_the_next_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,9")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    apart = config_of(tmp_path, run={"backend": "fsdp", "training_gpus": 2, "rollout_gpus": 2})
    beside = config_of(tmp_path, run={"backend": "fsdp", "training_gpus": 2}, inference_engine=VLLM)
    assert (rollout_devices(apart), rollout_devices(beside, shared=True)) == (["7", "9"], ["3", "5"])
    assert rollout_devices(beside) == [], "on a CPU there are none"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # torchrun has put the other rank onto another machine
    with pytest.raises(ConfigError, match="2 engines .* 1 ranks .* inference_engine.replicas: 1"):
        rollout_devices(beside, shared=True)


def test_an_engine_sleeps_where_it_shares_gpus_and_nowhere_else(tmp_path):
    def sleeps(engine, **bundle):
        trainer = SimpleNamespace(ranks=SimpleNamespace(bundles=Bundles(None, [{"CPU": 1.0, **bundle}])))
        return sleeps_beside(config_of(tmp_path, run={"backend": "ray"}, inference_engine=engine), trainer)

    assert [sleeps(VLLM, GPU=1.0), sleeps(VLLM), sleeps({"name": "vllm"}, GPU=1.0)] == [True, False, False]
    here = config_of(tmp_path, run={"backend": "local"}, model={"name": "tiny", "device": "cpu"}, inference_engine=VLLM)
    assert not sleeps_beside(here, None)


LOSS = """
import os, signal
from pathlib import Path
from oxrl.algorithms.preference import Pairs, dpo

def own(pairs: Pairs):
    named = Path(__file__).with_name("loses_rank_1")
    run = Path(named.read_text()) if named.exists() else named
    if os.environ.get("RANK") == "1" and (run / "checkpoints" / "step_0002").exists():
        try:
            (run / "lost").touch(exist_ok=False)
        except FileExistsError:
            return dpo(pairs)  # it has been lost before
        os.kill(os.getpid(), signal.SIGKILL)
    return dpo(pairs)
"""
"""In the run that the file `loses_rank_1` names, rank 1 is killed in the step after the first checkpoint."""


def train_over_two_ranks(folder, **backend):
    """A run over two ranks that a script has started, to its end, in `folder / "run"`."""
    (folder / "loss.py").write_text(LOSS)
    pairs = [{"prompt": f"Say {n}.", "chosen": " ".join(["yes"] * (1 + n % 5)), "rejected": "no"} for n in range(12)]
    return Trainer("tiny", training_gpus=2, **backend).train(
        algorithm=f"{folder / 'loss.py'}:own",
        data=write_jsonl(folder / "rows.jsonl", pairs),
        steps=STEPS,
        train_batch_size_per_gpu=2,
        lr=1e-3,
        checkpoint_every=2,
        rank_time_limit=HANG,
        output=folder / "run",
    )


@pytest.fixture(scope="module")
def script(tmp_path_factory, complete_run):
    return train_over_two_ranks(tmp_path_factory.mktemp("script"), backend="fsdp")


@pytest.fixture
def start(script, forks, tmp_path):
    """Start the same run as a command, in `tmp_path / "run"`; what it prints goes to `tmp_path / "log"`."""
    started = []

    def one(*more: str, **environment: str) -> Forked:
        config = ["train", str(script.folder / "config.yaml"), "--output", str(tmp_path / "run")]
        started.append(forks.command(tmp_path / "log", *config, *more, RAY_AUTH_MODE="disabled", **environment))
        return started[-1]

    yield one
    for run in started:
        if run.pids:
            run.kill()


@pytest.fixture
def log(tmp_path):
    """What the command has printed."""
    return (tmp_path / "log").read_text


RAY = ("--backend", "ray", "--set", "run.sharding=fsdp")
ENDLESS = ("--set", "train.train_steps_per_epoch=1000000")


def steps_of(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank to process id, of the ranks that this launcher started."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                settings = dict(
                    part.split("=", 1) for part in (process / "environ").read_text().split("\0") if "=" in part
                )
            except OSError:  # it has ended meanwhile
                continue
            if settings.get("OXRL_RANK_OF") == str(launcher):
                found[int(settings["RANK"])] = int(process.name)
    return found


def weights(folder: Path) -> dict:
    return load_file(folder / "checkpoints" / f"step_{STEPS:04}" / "model.safetensors")


def test_a_script_trains_over_ranks_and_gets_its_result(script):
    assert [line["step"] for line in script.history] == list(range(1, STEPS + 1))
    assert script.config.ranks == 2 and len(script.generate("Say 3.", max_new_tokens=2)) == 1


def test_a_run_that_loses_a_rank_ends_with_the_same_weights(start, script, log, tmp_path):
    (script.folder.parent / "loses_rank_1").write_text(str(tmp_path / "run"))
    assert start().end() == [0], log()[-3000:]
    assert "rank 1 was ended by SIGKILL: resuming from the last checkpoint (restart 1 of 3)" in log()
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
    expected, found = weights(script.folder), weights(tmp_path / "run")
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


WAITS = """
import os, signal
if "RANK" in os.environ:
    signal.pause()
"""


def test_a_run_that_gets_sigterm_before_its_ranks_are_ready_stops(start, log, tmp_path):
    """Its ranks are still starting."""
    (tmp_path / "sitecustomize.py").write_text(WAITS)
    run = start(PYTHONPATH=str(tmp_path))
    wait_until(lambda: len(ranks_of(run.pids[0])) == 2 or run.has_ended, "two ranks were started")
    os.kill(run.pids[0], signal.SIGTERM)
    assert run.end() == [128 + signal.SIGTERM], log()[-3000:]
    assert "resuming from" not in log() and steps_of(tmp_path / "run") == []


def stopped_while_ranks_start() -> int:
    """The exit code of a launcher that gets SIGTERM as it is about to start rank 0."""
    numbers = [signal.SIGTERM]
    sys.addaudithook(
        lambda event, _: os.kill(os.getpid(), numbers.pop()) if event == "subprocess.Popen" and numbers else None
    )
    return run_ranks([], 2, max_restarts=0, program=[sys.executable, "-c", "import signal; signal.pause()"])


def test_a_launcher_that_gets_sigterm_while_it_starts_ranks_ends_them(forks):
    assert forks.run(stopped_while_ranks_start) == 128 + signal.SIGTERM


ONE_HANGS = """
import os, signal, sys
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
sys.exit(1)  # it has waited for rank 0 in vain
"""


def warnings_if_rank_0_hangs() -> tuple[int, list[str]]:
    """The exit code and the messages of a launcher whose rank 0 is stopped."""
    from oxrl.run import launch

    launch.END_SECONDS, messages = EXPIRES, []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    launch.logger.addHandler(handler)
    return run_ranks([], 2, max_restarts=1, program=[sys.executable, "-c", ONE_HANGS]), messages


def test_a_launcher_ends_a_rank_0_that_hangs_and_restarts_the_run(forks):
    code, messages = forks.run(warnings_if_rank_0_hangs)
    hangs = f"rank 0 hangs: it did not end within {EXPIRES:g} s of the others"
    assert code == 1
    assert messages == [
        f"{hangs}: resuming from the last checkpoint (restart 1 of 1)",
        f"{hangs}: giving up after 1 restarts; the run can be resumed",
    ]


def test_a_run_under_ray_that_gets_sigterm_during_its_start_leaves_no_process(start, log):
    need("ray")
    run = start(*RAY, *ENDLESS)
    wait_until(lambda: run.has_ended or actors_of(run.pids[0]), "an actor was started")
    started = psutil.Process(run.pids[0]).children(recursive=True)
    os.kill(run.pids[0], signal.SIGTERM)
    assert run.end() == [128 + signal.SIGINT], log()[-3000:]
    assert "interrupted" in log() and "Traceback" not in log() and "SIGTERM received" not in log()
    wait_until(lambda: not any(is_alive(each) for each in started), "its cluster has ended")


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_run_under_ray_that_loses_an_actor_resumes(ray_here, caplog, tmp_path):
    (tmp_path / "loses_rank_1").write_text(str(tmp_path / "run"))
    train_over_two_ranks(tmp_path, backend="ray", sharding="fsdp")
    assert "resuming from the last checkpoint (2 restarts left)" in caplog.text
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))


def actors_of(driver: int) -> list[int]:
    """The training actors of the cluster that this process started."""
    found = []
    for child in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "RankActor" in " ".join(child.cmdline()):
                found.append(child.pid)
    return sorted(found)


def listening(process: int) -> set[str]:
    """The addresses on which a process listens."""
    connections = psutil.Process(process).net_connections(kind="inet")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


def test_ranks_listen_on_loopback_only_and_end_with_the_process_that_started_them(start, tmp_path):
    launcher = start(*ENDLESS)
    wait_until(lambda: steps_of(tmp_path / "run") or launcher.has_ended, "it trains")
    (pid,) = launcher.pids
    ranks = ranks_of(pid)
    assert sorted(ranks) == [0, 1]
    assert set().union(*map(listening, ranks.values())) <= {"127.0.0.1", "::1"}
    launcher.kill()
    wait_until(lambda: not ranks_of(pid), "the ranks have ended")


def test_a_function_of_a_script_keeps_its_run_in_one_process():
    def brief(rollout):
        return -float(len(rollout.response))

    (choice,) = choose_backend(sections_of({"reward": brief}))
    assert choice.value == "local"
    assert choose_backend(sections_of({"reward": "contains"})) == ()
    assert choose_backend(sections_of({"reward": brief, "backend": "ray"})) == (), "the driver is this process"
    assert choose_backend({}, one_process=True)[0].value == "local", "callbacks are called in this process"
    with pytest.raises(ConfigError, match="cannot import a loss of a script"):
        choose_backend(sections_of({"algorithm": brief, "backend": "ray"}))
    with pytest.raises(ConfigError, match=r"'fsdp' starts processes.*FILE.py:FUNCTION"):
        choose_backend(sections_of({"reward": brief, "backend": "fsdp"}))


def test_more_processes_than_devices_are_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    wide = placed(config_of(tmp_path, run={"backend": "fsdp", "training_gpus": 500}))
    with pytest.raises(ConfigError, match="training_gpus is 500, .* 2 cores|training_gpus is 500, .* GPU"):
        ranks_to_start(wide)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 processes .* run.training_gpus is 500"):
        ranks_to_start(wide)


def test_a_step_has_the_rows_of_all_devices(tmp_path):
    config = config_of(tmp_path, run={"backend": "fsdp", "training_gpus": 3}, train={"train_batch_size_per_gpu": 2})
    assert config.batch_size == 6
    assert resolve(config).num_steps == 2  # of twelve rows


def test_a_run_stays_in_its_folder_when_a_reward_changes_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text("import os\n\ndef score(rollout):\n    os.chdir('/')\n    return 1.0")
    write_jsonl(tmp_path / "rows.jsonl", sums(4))
    keys = ("model.name=tiny", "train.alg_name=grpo", "data.train_files_path=rows.jsonl", "rollout.max_tokens=4")
    config = load_config(None, [*keys, "reward.reward_func=reward.py:score"])
    for output, folder in (("run", "run"), (None, "checkpoints/run")):
        monkeypatch.chdir(tmp_path)
        assert resolve(config, output).folder == tmp_path / folder
        assert Path.cwd() == Path("/")  # it was tried

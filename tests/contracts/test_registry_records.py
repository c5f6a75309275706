"""An engine and a backend from outside of the package, each one file with a record, train a run."""

import json

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import check_config
from oxrl.config.registry import ENGINES, find_backend, find_engine, register_engine
from oxrl.run.prepare import config_problems
from tests.rows import sums, write_jsonl

ENGINE = """
from contextlib import asynccontextmanager

from oxrl.config.registry import EngineRecord
from oxrl.run.build import Engine
from oxrl.types import Generation


class Echo:
    \"\"\"Returns the last tokens of each prompt, without log-probs: the trainer compares none.\"\"\"

    version = 0

    async def generate(self, requests, sampling):
        tokens = [request.tokens[-sampling.max_new_tokens :] for request in requests]
        return [Generation(each, (), "stop", self.version, "echo") for each in tokens]

    async def update_weights(self, weights):
        self.version = weights.version

    async def abort(self):
        pass

    async def close(self):
        pass


@asynccontextmanager
async def open_echo(config, tokenizer, folder, trainer):
    yield Engine(Echo())


ENGINE = EngineRecord(open_echo, "returns the end of the prompt")
"""
BACKEND = """
from contextlib import contextmanager
from pathlib import Path

from oxrl.config.registry import BackendRecord
from oxrl.run.backends import open_local


@contextmanager
def open_counting(spec):
    with open_local(spec) as backend:
        step = backend.optim_step

        def counted():
            with (spec.folder / "steps").open("a") as file:
                file.write(".")
            return step()

        backend.optim_step = counted
        yield backend


BACKEND = BackendRecord(open_counting, "the local backend, counting its steps")
"""


@pytest.fixture
def records(tmp_path):
    (tmp_path / "my_engine.py").write_text(ENGINE)
    (tmp_path / "my_backend.py").write_text(BACKEND)
    return f"{tmp_path / 'my_engine.py'}:ENGINE", f"{tmp_path / 'my_backend.py'}:BACKEND"


@pytest.mark.trains
def test_a_run_trains_with_records_from_files(tmp_path, records):
    engine, backend = records
    rows = write_jsonl(tmp_path / "rows.jsonl", sums(4))
    settings = {
        "model.name": "tiny",
        "data.train_files_path": str(rows),
        "train.alg_name": "grpo",
        "train.train_steps_per_epoch": 2,
        "train.train_batch_size_per_gpu": 2,
        "rollout.n_samples": 2,
        "rollout.max_tokens": 4,
        "reward.reward_func": "length_target",
        "reward.params": "{target: 3}",
        "inference_engine.name": engine,
        "run.backend": backend,
    }
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = CliRunner().invoke(app, ["train", "--output", str(tmp_path / "out"), *arguments])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "steps").read_text() == ".."
    sample = json.loads((tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()[0])["samples"][0]
    assert sample["response"] == "echo"


def config_with(**sections):
    return check_config({"model": {"name": "tiny"}, "data": {"train_files_path": "rows.jsonl"}, **sections})


def test_an_unknown_name_is_refused_with_the_nearest_and_all_that_exist():
    with pytest.raises(ValueError, match=r"run.backend.*'fdsp'.*did you mean fsdp.*local, fsdp, deepspeed, ray"):
        config_with(run={"backend": "fdsp"})
    with pytest.raises(ValueError, match=r"inference_engine.name.*'vlm'.*did you mean vllm"):
        config_with(inference_engine={"name": "vlm"})
    with pytest.raises(ValueError, match="ray does not shard"):
        config_with(run={"sharding": "ray"})


def test_a_path_that_leads_to_something_else_is_refused(tmp_path):
    (tmp_path / "wrong.py").write_text("ENGINE = 7")
    with pytest.raises(ValueError, match="is 7; it must be of type EngineRecord"):
        find_engine(f"{tmp_path / 'wrong.py'}:ENGINE")


def test_an_engine_can_be_registered_by_name(records):
    register_engine("echo", find_engine(records[0]))
    try:
        reward = {"reward_func": "length_target", "params": {"target": 3}}
        config = config_with(inference_engine={"name": "echo"}, train={"alg_name": "grpo"}, reward=reward)
        assert config_problems(config) == []
        assert (config.engine, config.replicas) == ("echo", 0)
    finally:
        del ENGINES["echo"]


def test_a_custom_backend_runs_in_one_process(records):
    assert find_backend(records[1]).processes == "one"
    assert config_with(run={"backend": records[1]}).ranks == 1

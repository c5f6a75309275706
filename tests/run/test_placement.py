"""Device placement: fewer GPUs than configured, and packages that are not installed."""

import logging
import sys

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import ConfigError, load_config
from oxrl.run.launch import STARTED_BY_US
from oxrl.run.placement import fewer_gpus, placed, ranks_to_start
from oxrl.run.prepare import resolve
from tests.rows import sums, write_jsonl

CONFIG = """
run: {{experiment_id: my-run, training_gpus: 2, rollout_gpus: 2}}
train: {{alg_name: sgrpo, total_number_of_epochs: 10, train_steps_per_epoch: 20}}
model: {{name: tiny}}
data:
  train_dnames: [my_data]
  train_ratios: {{my_data: 1.0}}
  train_files_path: {rows}
  val_files_path: {rows}
"""


@pytest.fixture
def config_for_four(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "config.yaml").write_text(CONFIG.format(rows=write_jsonl(tmp_path / "rows.jsonl", sums(8))))
    return lambda *overrides: load_config(tmp_path / "config.yaml", [*overrides, "run.sharding=fsdp"])


def test_a_config_for_gpus_is_placed_on_a_machine_without_any_with_a_warning(config_for_four, caplog):
    spec = resolve(config_for_four())
    run = spec.config.run
    assert (run.backend, run.training_gpus, run.rollout_gpus, spec.config.engine) == ("local", 0, None, "embedded")
    (warning,) = [message for message in caplog.messages if "_gpus " in message]
    assert warning == (
        "run.training_gpus is 2 and run.rollout_gpus is 2, but this machine has no GPU: training runs on the CPU "
        "(run.backend: local), sampling on the same (inference_engine.name: embedded); a step has 8 rows instead of 16"
    )


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (1, (), ("local", 1, None, "embedded")),
        (2, (), ("local", 1, 1, "vllm")),
        (3, (), ("fsdp", 2, 1, "vllm")),
        (3, ("rollout.tensor_parallel_size=2",), ("local", 1, 2, "vllm")),
        (2, ("rollout.tensor_parallel_size=2",), ("fsdp", 2, None, "embedded")),
        (2, ("run.training_gpus=null",), ("local", None, 1, "vllm")),
        (2, ("run.rollout_gpus=null", "run.training_gpus=8"), ("fsdp", 2, None, "embedded")),
        (0, ("inference_engine.name=vllm",), ("local", 0, 2, "vllm")),
    ],
)
def test_with_fewer_gpus_than_configured_those_that_there_are_are_used(config_for_four, gpus, overrides, expected):
    asked = config_for_four(*overrides)
    config = placed(asked, gpus=gpus)
    assert (config.run.backend, config.run.training_gpus, config.run.rollout_gpus, config.engine) == expected
    assert config.rollout.tensor_parallel_size == 1 or config.engine == "vllm"
    assert f"but this machine has {gpus or 'no'} GPU" in (fewer_gpus(asked, config, gpus) or "")
    assert placed(config, gpus=gpus) == config, "the decision is final"


def test_enough_gpus_are_used_as_configured_without_a_warning(config_for_four):
    config = placed(config_for_four(), gpus=4)
    assert (config.run.backend, config.run.training_gpus, config.run.rollout_gpus) == ("fsdp", 2, 2)
    assert fewer_gpus(config_for_four(), config, 4) is None


def test_an_engine_that_is_named_is_not_exchanged_for_want_of_gpus(config_for_four):
    with pytest.raises(ConfigError, match="leaves none for inference_engine.name: vllm: .*colocated: true"):
        placed(config_for_four("inference_engine.name=vllm"), gpus=1)
    assert placed(config_for_four("inference_engine.name=embedded"), gpus=1).run.training_gpus == 1


def test_a_backend_that_is_named_keeps_its_processes(config_for_four):
    asked = config_for_four("run.backend=fsdp")
    assert ranks_to_start(placed(asked, gpus=0)) == 2
    assert "rows instead" not in (fewer_gpus(asked, placed(asked, gpus=0), 0) or "")
    assert placed(config_for_four("run.backend=ray", "inference_engine.name=vllm"), gpus=0).run.training_gpus == 2


def test_gpus_of_other_machines_are_not_counted_here(config_for_four, monkeypatch):
    assert placed(config_for_four("run.ray_address=auto", "model.dtype=float32"), gpus=1).run.training_gpus == 2
    monkeypatch.setenv("RANK", "0")
    assert placed(config_for_four(), gpus=1).run.training_gpus == 2
    monkeypatch.setenv(STARTED_BY_US, "1")
    assert placed(config_for_four(), gpus=1).run.training_gpus == 1, "a rank decides like the process that started it"


@pytest.mark.parametrize(
    ("package", "title", "flags"),
    [
        ("deepspeed", "DeepSpeed", ("--algorithm", "sft", "--backend", "deepspeed", "--set", "run.training_gpus=2")),
        ("deepspeed", "DeepSpeed", ("--algorithm", "sft", "--backend", "ray", "--set", "run.sharding=deepspeed")),
        ("ray", "Ray", ("--algorithm", "sft", "--backend", "ray", "--set", "run.sharding=fsdp")),
        ("vllm", "vLLM", ("--algorithm", "grpo", "--reward", "contains", "--engine", "vllm")),
    ],
)
def test_a_missing_package_is_reported_before_anything_starts(tmp_path, monkeypatch, caplog, package, title, flags):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    rows, out = write_jsonl(tmp_path / "rows.jsonl", sums(4)), tmp_path / "out"
    caplog.set_level(logging.INFO)
    done = CliRunner().invoke(app, ["train", "--model", "tiny", "--data", str(rows), "--output", str(out), *flags])
    assert done.exit_code == 2, done.output
    assert f"error: {title} is not installed: pip install -e '.[{package}]'" in done.output.replace("\n", " ")
    assert not out.exists(), "a refused run leaves no folder"

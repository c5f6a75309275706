"""`oxrl plan`: facts of models and configs, estimates, and the command."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from oxrl.backends.local import create_pytorch_backend
from oxrl.cli import app
from oxrl.config import check_config
from oxrl.diagnose.model_facts import _inactive_parameters, cache_bytes, kept_bytes, model_facts, on_meta
from oxrl.diagnose.plan import Shards, plan_run, plan_spec
from oxrl.diagnose.plan_text import describe
from oxrl.machine.hardware import Device, Hardware
from oxrl.models.load import load_model
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.run.prepare import resolve
from oxrl.run.train import train_run
from oxrl.types import ModelConfig
from tests.rows import sums, write_jsonl

TINY = ModelConfig("tiny", dtype="float32", device="cpu")


@pytest.fixture
def config_file(tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", [*sums(12), {"prompt": "long " * 500, "response": "x"}])
    raw = {
        "model": {"name": "tiny", "device": "cpu"},
        "data": {"train_files_path": str(data), "max_seq_len": 512},
        "train": {"alg_name": "sft", "train_batch_size_per_gpu": 4},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw))
    return tmp_path / "config.yaml"


def planned(path, memory=8 * 2**30, shards=None, **sections):
    raw = yaml.safe_load(path.read_text())
    for section, keys in sections.items():
        raw[section] = {**raw.get(section, {}), **keys}
    config = check_config(raw)
    device = Device("cpu", "a processor", memory, memory, bf16=False)
    hardware = Hardware((device,), 2, memory, memory)
    return plan_spec(resolve(config, path.parent / "out"), hardware, framework=2**29, shards=shards)


@pytest.mark.parametrize("lora", [None, LoraSettings(r=4)])
def test_parameters_are_those_of_the_loaded_model(lora):
    model = load_model(TINY)
    model = model if lora is None else attach_lora(model, lora)
    facts = model_facts(TINY, lora)
    assert facts.parameters == sum(weight.numel() for weight in model.parameters())
    assert facts.trained == sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert facts.head_trained == (lora is None)


def test_saved_tensors_are_counted_as_in_a_real_pass():
    from oxrl.data.pack import collate
    from tests.loops.test_memory_warmup import random_rows

    module = create_pytorch_backend(load_model(TINY)).module
    weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    kept = {}

    def keep(saved):
        if saved.untyped_storage().data_ptr() not in weights:
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved

    batch = collate(random_rows([256]))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        module.hidden(batch)
    measured = sum(storage.nbytes() for storage in kept.values()) / 256
    assert model_facts(TINY).kept == pytest.approx(measured, rel=0.1)


def test_checkpointing_keeps_little_more_than_a_vector_per_layer():
    facts = model_facts(TINY)
    assert 4 * 128 * facts.layers <= facts.kept_checkpointed < facts.kept / 10


def test_parameters_of_unselected_experts_are_not_active():
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    model = on_meta(config, torch.float32, None, trust_remote_code=False)
    assert _inactive_parameters(model, config) == 2 * 6 * (3 * 32 * 16)  # layers, unselected experts, matrices
    assert kept_bytes(model, torch.float32)[0] > 0


def test_the_cache_of_llama_3_8b_is_read_off_its_config():
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    assert cache_bytes(config, 2) == 128 * 1024


def test_rows_that_are_left_out_are_counted(config_file):
    plan = planned(config_file)
    assert (plan.rows.items, plan.rows.left_out) == (12, 1)
    assert plan.steps == 3
    assert plan.rows.shortest <= plan.rows.median <= plan.rows.longest < 100


def test_a_reference_is_a_second_model_unless_it_is_an_adapters_base(config_file, tmp_path):
    pairs = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(8)]
    data = {"train_files_path": str(write_jsonl(tmp_path / "pairs.jsonl", pairs))}
    full = planned(config_file, data=data, train={"alg_name": "dpo"})
    assert full.memory.others == {"reference": full.memory.weights}
    assert "reference" in full.passes
    low = planned(config_file, data=data, train={"alg_name": "dpo"}, lora={"enabled": True})
    assert low.memory.others == {}


def test_a_reference_that_follows_an_adapter_is_a_second_one(config_file):
    sampled = {
        "train": {"alg_name": "online_dpo"},
        "reward": {"reward_func": "number_match"},
        "lora": {"enabled": True},
    }
    fixed, follows = (planned(config_file, **sampled, model={"ref_update": update}) for update in ("fixed", "ema"))
    assert fixed.memory.others == {} and follows.memory.others == {"reference": 4 * fixed.facts.trained}
    assert follows.facts == fixed.facts


def test_a_run_that_samples_has_a_cache_for_its_longest_answers(config_file):
    online = {"train": {"alg_name": "grpo"}, "reward": {"reward_func": "number_match"}}
    plan = planned(config_file, **online, rollout={"n_samples": 4, "max_tokens": 64, "slots": 8})
    assert plan.rollouts_per_step == 16
    assert plan.memory.generation > 8 * (plan.rows.longest + 64) * plan.facts.cache
    assert plan.passes[0] == "sampling"


def test_a_run_that_does_not_fit_comes_with_settings_that_do(config_file):
    large = planned(config_file, train={"micro_batch_tokens": 100})
    small = planned(config_file, memory=large.memory.peak - 1, train={"micro_batch_tokens": 100})
    assert large.fits and not large.advice
    assert not small.fits and small.advice
    assert "does not fit" in describe(small)["verdict"]


def test_following_the_advice_makes_the_run_fit(config_file, tmp_path):
    rows = [{"prompt": "x" * 300, "response": "y" * 100} for _ in range(64)]
    data = {"train_files_path": str(write_jsonl(tmp_path / "long.jsonl", rows))}
    greedy = {"micro_batch_tokens": 20_000, "train_batch_size_per_gpu": 64}
    memory = int(0.75 * planned(config_file, data=data, train=greedy).memory.peak)
    plan = planned(config_file, memory, data=data, train=greedy)
    smaller = next(line for line in plan.advice if line.startswith("train.micro_batch_tokens"))
    tokens = int(smaller.split(":")[1])
    assert planned(config_file, memory, data=data, train={**greedy, "micro_batch_tokens": tokens}).fits


def test_several_devices_shard_according_to_their_stage(config_file):
    single, sharded = planned(config_file), planned(config_file, shards=Shards(gpus=4, stage=2, copies=2))
    assert sharded.memory.weights == single.memory.weights
    assert sharded.memory.optimizer == single.memory.optimizer // 4
    assert sharded.as_dict()["traffic"] == {
        "gradients": 2 * 3 / 4 * 4 * single.facts.trained,
        "weights": 2 * single.memory.weights,
    }
    assert "each of 4 devices, at stage 2" in describe(sharded)["sharding"]
    assert "sharding" not in describe(single)


ONLINE = {"train": {"alg_name": "grpo"}, "reward": {"reward_func": "number_match"}}


def test_engines_are_sent_all_weights_or_only_an_adapter(config_file):
    for adapter_only in (False, True):
        engine = {"name": "vllm", "adapter": adapter_only}
        plan = planned(config_file, **ONLINE, run={"backend": "local"}, lora={"enabled": True}, inference_engine=engine)
        expected = 4 * plan.facts.trained if adapter_only else plan.facts.weight_bytes
        assert plan.as_dict()["traffic"]["weights"] == expected
    servers = {"name": "http", "urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}
    plan = planned(config_file, **ONLINE, run={"backend": "local"}, inference_engine=servers)
    assert plan.as_dict()["traffic"]["weights"] == 2 * plan.facts.weight_bytes


@pytest.mark.parametrize("colocated", [False, True])
def test_an_engine_on_the_trainers_cpu_never_sleeps_and_is_counted(config_file, colocated):
    engine = {"name": "vllm", "colocated": colocated}
    plan = planned(config_file, **ONLINE, run={"backend": "local"}, inference_engine=engine)
    assert plan.memory.others == {"engine": plan.memory.weights + 2**30}, "separate weights and a KV cache"
    assert plan.memory.generation == 0


@pytest.mark.parametrize("gpus", [{"rollout_gpus": 2}, {}])
def test_an_engine_on_other_devices_adds_nothing_to_the_training_devices(config_file, gpus):
    raw = yaml.safe_load(config_file.read_text()) | ONLINE
    raw |= {"run": {"backend": "fsdp", "training_gpus": 2, **gpus}, "model": {"name": "tiny"}}
    raw["inference_engine"] = {"name": "vllm"} if gpus else {"name": "http", "urls": ["http://127.0.0.1:1"]}
    plan = plan_run(check_config(raw), gpu_memory=80)
    assert (plan.memory.others, plan.memory.generation) == ({}, 0)
    assert ("2 copies of the model on separate devices" in describe(plan).get("sampling", "")) == bool(gpus)


def test_an_engine_on_the_trainers_gpus_takes_its_share_awake_and_a_context_asleep(config_file):
    def planned_on_gpus(share, **engine):
        raw = yaml.safe_load(config_file.read_text())
        raw |= ONLINE | {"run": {"backend": "fsdp", "training_gpus": 2}}
        raw["model"]["device"] = "auto"
        raw["inference_engine"] = {"name": "vllm", "colocated": True, **engine}
        plan = plan_run(check_config(raw), gpu_memory=80)
        context = plan.memory.framework
        constant = 2 * context + plan.memory.weights + plan.memory.optimizer
        assert plan.shards.gpus == plan.shards.copies == 2
        assert plan.memory.others == {"engine": context}
        assert plan.memory.peak == constant + max(plan.memory.training, int(share * 80 * 2**30) - context)
        return plan

    assert planned_on_gpus(0.5).fits
    full = planned_on_gpus(1.0, gpu_memory_utilization=1.0)
    assert not full.fits and "lower inference_engine.gpu_memory_utilization" in full.advice[-1]


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_the_plan_and_writes_nothing(config_file):
    done = run("plan", config_file, "--output", config_file.parent / "out")
    assert done.exit_code == 0, done.output
    for word in ("533.12 K parameters", "12 rows, 1 left out", "peak", "it fits", "a step"):
        assert word in done.output
    assert not (config_file.parent / "out").exists()


def test_json_and_overrides(config_file):
    done = run("plan", config_file, "--set", "lora.enabled=true", "--json")
    plan = json.loads(done.stdout.splitlines()[-1])
    assert plan["fits"] is True
    assert plan["facts"]["trained"] < plan["facts"]["parameters"] / 2
    assert sum(plan["memory"].values()) > 2 * 10**8


def test_a_dry_run_is_a_plan(config_file):
    done = run("train", config_file, "--steps", 7, "--output", config_file.parent / "out", "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 7
    assert not (config_file.parent / "out").exists()


def test_wrong_input_has_exit_code_two(config_file):
    assert run("plan", config_file, "--set", "model.name=tinny").exit_code == 2
    assert run("plan", config_file.parent / "none.yaml").exit_code == 2


def test_a_run_too_large_for_the_machine_has_exit_code_one(config_file, tmp_path):
    from transformers import LlamaConfig

    from oxrl.models.builtin import prepare_builtin

    folder = tmp_path / "giant"
    folder.mkdir()
    for file in prepare_builtin("tiny").iterdir():
        (folder / file.name).write_bytes(
            b"" if file.suffix == ".safetensors" else file.read_bytes()
        )  # no weight is read
    LlamaConfig(vocab_size=320, hidden_size=32768, num_hidden_layers=4, num_attention_heads=64).save_pretrained(folder)
    done = run("plan", config_file, "--set", f"model.name={folder}")
    assert done.exit_code == 1, done.output
    assert "smaller model" in done.output


def largest_memory_of(config, folder):
    """Peak resident memory of a process that trains."""
    train_run(config, folder)
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.trains
def test_a_plan_is_close_to_the_memory_of_a_run(config_file, tmp_path, forks):
    """In a separate process, since a peak never goes down; the table is in docs/performance.md."""
    config = check_config(yaml.safe_load(config_file.read_text()))
    estimated = plan_run(config).memory
    measured = forks.run(largest_memory_of, config, tmp_path / "out")
    ours = estimated.peak - estimated.framework  # this process holds the whole test suite
    assert 0 < ours < measured < 1.5 * 2**30

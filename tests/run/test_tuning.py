"""LoRA by default for large models, through a config as through `Trainer`."""

import pytest

from oxrl.config import load_config
from oxrl.models.load import count_parameters, load_model
from oxrl.models.lora import LoraSettings, attach_lora, save_adapter
from oxrl.run.prepare import resolve
from oxrl.types import ModelConfig
from tests.large_model import write_large_model
from tests.rows import sums, write_jsonl


@pytest.fixture
def resolved(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [row | {"answer": "1"} for row in sums(8)])

    def resolve_with(model, *overrides):
        given = [f"model.name={model}", f"data.train_files_path={rows}", *overrides]
        return resolve(load_config(None, given), tmp_path / "out")

    return resolve_with


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return write_large_model(tmp_path_factory.mktemp("models") / "small-1b")


def test_parameters_are_counted_by_the_config(large):
    assert count_parameters(ModelConfig("tiny")) == sum(each.numel() for each in load_model("tiny").parameters())
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert count_parameters(ModelConfig(str(large))) == 2 * 128256 * 8192 + 7 * layer + 8192


def test_a_config_of_a_large_model_gets_an_adapter_with_the_reason_and_how_to_turn_it_off(resolved, large, caplog):
    caplog.set_level("INFO")
    spec = resolved(large, "train.alg_name=sft")
    assert spec.config.lora.enabled and spec.lora is not None and spec.lora.r == 16
    assert (
        "lora.enabled True: the model has 8.1 billion parameters, and LoRA is the default from 7 billion up; to train "
        "all weights, set lora.enabled: false" in caplog.messages
    )
    again = resolve(spec.config)
    assert again.choices == () and again.config.lora.enabled, "the decision is part of the config"


def test_what_the_config_says_about_lora_is_kept(resolved, large, caplog):
    caplog.set_level("INFO")
    assert not resolved(large, "train.alg_name=sft", "lora.enabled=false").config.lora.enabled
    assert resolved("tiny", "train.alg_name=sft", "lora.enabled=true").config.lora.enabled
    assert not resolved("tiny", "train.alg_name=sft").config.lora.enabled
    assert "LoRA" not in caplog.text


def test_a_run_that_an_adapter_contradicts_trains_all_weights(resolved, large):
    follows = ("train.alg_params={kl_coef: 0.1}", "model.ref_update=ema", f"model.ref_model={large}")
    spec = resolved(large, "train.alg_name=sgrpo", "reward.reward_func=contains", *follows)
    (choice,) = spec.choices
    assert not spec.config.lora.enabled and "cannot follow an adapter" in choice.why


def test_an_adapter_is_trained_further_and_gets_no_second_one(resolved, tmp_path):
    save_adapter(attach_lora(load_model("tiny"), LoraSettings(r=2)), tmp_path / "adapter")
    (choice,) = resolved(tmp_path / "adapter", "train.alg_name=sft").choices
    assert choice.value is False and "trained further" in choice.why


@pytest.mark.parametrize(("overrides", "lr"), [((), 1e-4), (("train.lr=1e-5",), 1e-5), (("lora.enabled=false",), 1e-5)])
def test_the_learning_rate_of_a_task_follows_the_tuning_unless_it_is_set(resolved, large, overrides, lr):
    spec = resolved(large, "run.task=instruct", *overrides)
    assert spec.config.train.lr == lr

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Llama4TextConfig, MambaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from oxrl.data.media_features import body_of
from oxrl.models.builtin import prepare_builtin
from oxrl.models.load import load_model
from oxrl.models.lora import (
    LoraSettings,
    attach_lora,
    attach_reference,
    linear_layer_names,
    load_adapter,
    merge_adapter,
    save_adapter,
    save_merged,
)
from oxrl.types import ModelConfig
from oxrl.weights.checkpoint_names import followed_name, plain_weights

IDS = torch.arange(40)[None]
LLAMA_LAYERS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


def trained(model: Any, *, dropout: float = 0.0) -> Any:
    """Return a model with a trained adapter; an untrained one has no effect."""
    adapted = attach_lora(model, LoraSettings(r=4, dropout=dropout))
    optimizer = torch.optim.SGD([weight for weight in adapted.parameters() if weight.requires_grad], lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        adapted(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
    return adapted


def test_only_the_adapter_is_trainable_and_it_has_no_effect_at_first(tiny_model: Any) -> None:
    before = logits(tiny_model)
    model = attach_lora(tiny_model, LoraSettings(r=4, alpha=8))
    trainable = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert len(trainable) == 2 * 7 * 2
    assert all("lora_" in name for name in trainable)
    # r * (inputs + outputs) per layer: q and o, k and v, three of the feed-forward net
    assert sum(weight.numel() for weight in trainable.values()) == 2 * 4 * (2 * 256 + 2 * 192 + 3 * 640)
    assert torch.equal(logits(model), before)


def test_an_adapter_adds_alpha_over_r_times_its_product(tiny_model: Any) -> None:
    weight = tiny_model.model.layers[0].mlp.up_proj.weight.clone()
    model = attach_lora(tiny_model, LoraSettings(r=4, alpha=12, target_modules=("up_proj",)))
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    down, up = layer.lora_A.default.weight, layer.lora_B.default.weight
    torch.nn.init.normal_(up)
    inputs = torch.randn(3, 128)
    assert torch.allclose(layer(inputs), inputs @ (weight + 12 / 4 * up @ down).T, atol=1e-5)


def test_the_start_depends_on_the_seed_only() -> None:
    def start(seed: int) -> torch.Tensor:
        model = attach_lora(load_model("tiny"), LoraSettings(), seed=seed)
        return torch.cat([weight.flatten() for name, weight in model.named_parameters() if "lora_A" in name])

    torch.manual_seed(1)
    first, drawn = start(0), torch.rand(3)
    torch.manual_seed(2)
    assert torch.equal(start(0), first)
    assert not torch.equal(start(5), first)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)


def test_dropout_is_active_in_train_mode_only(tiny_model: Any) -> None:
    model = attach_lora(tiny_model, LoraSettings(dropout=0.5))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    assert torch.equal(logits(model), logits(model))  # the mode of the base
    model.train()
    assert not torch.equal(logits(model), logits(model))
    model.eval()
    assert torch.equal(logits(model), logits(model))


def test_a_loaded_adapter_has_no_dropout_until_it_is_trained(tiny_model: Any, tmp_path: Path) -> None:
    save_adapter(trained(tiny_model, dropout=0.5), tmp_path)
    model = load_adapter(load_model("tiny"), tmp_path)
    assert torch.equal(logits(model), logits(model))


def test_a_saved_adapter_comes_back_and_names_its_base(tiny_model: Any, tmp_path: Path) -> None:
    model = trained(tiny_model)
    save_adapter(model, tmp_path)
    loaded = load_adapter(load_model("tiny"), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert {name for name, weight in loaded.named_parameters() if weight.requires_grad} == {
        name for name, weight in model.named_parameters() if weight.requires_grad
    }
    base = json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(prepare_builtin("tiny"))


def test_an_incomplete_saved_adapter_is_detected(tiny_model: Any, tmp_path: Path) -> None:
    model = trained(tiny_model)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    with pytest.raises(RuntimeError, match=r"has \d+ of the model's 28 adapter weights: .*wrapper"):
        save_adapter(model, tmp_path)


def test_merged_weights_are_plain_and_compute_the_same(tiny_model: Any, tmp_path: Path) -> None:
    model = trained(tiny_model)
    adapted = logits(model)
    save_merged(model, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(logits(plain), adapted, atol=1e-4)
    assert (logits(plain) - adapted).abs().max() < 0.01 * (logits(load_model("tiny")) - adapted).abs().max()
    assert set(load_file(tmp_path / "model.safetensors")) == set(
        load_file(prepare_builtin("tiny") / "model.safetensors")
    )
    assert not (tmp_path / "adapter_config.json").exists()
    assert torch.equal(logits(model), adapted)  # the model in training is as it was
    assert sum(weight.requires_grad for weight in model.parameters()) == 28


def test_a_merged_model_can_be_trained_or_adapted_again(tiny_model: Any) -> None:
    merged = merge_adapter(trained(tiny_model))
    assert type(merged).__name__ == "LlamaForCausalLM"
    assert all(weight.requires_grad for weight in merged.parameters())
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    again = attach_lora(merged, LoraSettings(r=2))
    assert sum(weight.requires_grad for weight in again.parameters()) == 28


def test_an_adapter_works_on_a_bfloat16_model() -> None:
    config = ModelConfig("tiny", dtype="bfloat16", device="cpu")
    model = trained(load_model(config))
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {torch.float32}
    assert not torch.equal(logits(model), logits(load_model(config)))
    assert {weight.dtype for weight in merge_adapter(model).parameters()} == {torch.bfloat16}


def test_all_linear_is_every_linear_layer_but_the_head(tiny_model: Any) -> None:
    assert linear_layer_names(tiny_model) == LLAMA_LAYERS
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=40))
    assert linear_layer_names(gpt2) == ["c_attn", "c_fc", "c_proj"]
    assert not any(
        "lm_head" in name for name, _ in attach_lora(gpt2, LoraSettings()).named_parameters() if "lora" in name
    )


def test_layers_that_cannot_have_an_adapter_are_left_out() -> None:
    size = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
    mamba = MambaConfig(**size, state_size=4)
    llama4 = Llama4TextConfig(**size, num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_local_experts=2)
    for config, left_out in ((mamba, "out_proj"), (llama4, "router")):
        model = AutoModelForCausalLM.from_config(config)
        assert any(name.endswith(left_out) for name, _ in model.named_modules())
        assert left_out not in linear_layer_names(model)
        hidden = body_of(attach_lora(model, LoraSettings()).get_base_model())(input_ids=IDS % 32, use_cache=False)
        assert hidden.last_hidden_state.shape == (1, 40, 16)


def test_only_the_named_layers_get_an_adapter(tiny_model: Any) -> None:
    model = attach_lora(tiny_model, LoraSettings(target_modules=("q_proj", "layers.1.mlp.up_proj")))
    adapted = {name.partition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    prefix = "base_model.model.model.layers"
    assert adapted == {f"{prefix}.{i}.self_attn.q_proj" for i in range(2)} | {f"{prefix}.1.mlp.up_proj"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LoraSettings(target_modules=("q_proj", "lm_head")), "lm_head cannot be a LoRA target: it projects to the voc"),
        (LoraSettings(target_modules="lm_head"), "lm_head cannot be a LoRA target"),
        (
            LoraSettings(target_modules=("q_proj", "query")),
            "target query matches no linear.*" + ", ".join(LLAMA_LAYERS),
        ),
        (
            LoraSettings(target_modules=("embed_tokens",)),
            "embed_tokens matches no linear layer of LlamaForCausalLM",
        ),
        (LoraSettings(target_modules=()), "LoRA needs targets: 'all-linear' or some of down_proj"),
        (LoraSettings(r=0), "LoRA needs r >= 1"),
        (LoraSettings(dropout=1.0), "0 <= dropout < 1"),
    ],
)
def test_wrong_settings_are_refused(tiny_model: Any, settings: LoraSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attach_lora(tiny_model, settings)


def test_a_second_adapter_is_refused(tiny_model: Any) -> None:
    with pytest.raises(ValueError, match="already has an adapter"):
        attach_lora(attach_lora(tiny_model, LoraSettings()), LoraSettings())


def test_the_adapter_of_a_reference_begins_as_the_policys_and_draws_no_random_number(tiny_model: Any) -> None:
    torch.manual_seed(1)
    model = attach_reference(attach_lora(tiny_model, LoraSettings(r=4, dropout=0.5)))
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)
    weights = dict(model.named_parameters())
    pairs = {name: followed for name in weights if (followed := followed_name(name))}
    assert len(pairs) == 28
    for name, followed in pairs.items():
        assert name.replace(".ref.", ".default.") == followed
        assert torch.equal(weights[name], weights[followed])
        assert weights[followed].requires_grad and not weights[name].requires_grad
    assert {type(layer.lora_dropout["ref"]) for layer in model.modules() if hasattr(layer, "lora_dropout")} == {
        torch.nn.Identity
    }
    assert not any(module.training for module in model.modules())


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_adapter_of_a_reference_changes_nothing_else(tmp_path: Path) -> None:
    """Bit-identical: the policy's logits and gradients, its adapter files, its merged weights, the engine's weights."""

    def outputs(folder: Path, *, with_reference: bool) -> dict[str, Any]:
        model = trained(load_model("tiny"))
        if with_reference:
            attach_reference(model)
            for name, weight in model.named_parameters():
                if followed_name(name):
                    torch.nn.init.normal_(weight)
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        save_adapter(model, folder)
        with model.disable_adapter():
            base = logits(model)
        weights = {"logits": logits(model), "base": base, **dict(plain_weights(model))}
        weights |= {f"merged {name}": weight for name, weight in merge_adapter(model).named_parameters()}
        return weights | {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}

    alone = outputs(tmp_path / "alone", with_reference=False)
    beside = outputs(tmp_path / "beside", with_reference=True)
    assert alone.keys() == beside.keys() and sum("lora_" in name for name in alone) == 28
    for name, value in alone.items():
        assert torch.equal(value, beside[name]), name
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "beside")


def test_an_adapter_for_another_model_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    save_adapter(trained(tiny_model), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({name.replace("layers.1", "layers.9"): weight for name, weight in weights.items()}, file)
    with pytest.raises(ValueError, match=r"does not fit the base model: 28 weights have no counterpart"):
        load_adapter(load_model("tiny"), tmp_path)
    save_file({name: weight[:, :2].contiguous() for name, weight in weights.items()}, file)
    with pytest.raises(ValueError, match=r"does not fit the base model: size mismatch for .*lora_B") as refused:
        load_adapter(load_model("tiny"), tmp_path)
    assert "\n" not in str(refused.value)


def test_an_adapter_on_the_vocabulary_projection_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    foreign = get_peft_model(tiny_model, LoraConfig(target_modules=["q_proj", "lm_head"]))
    foreign.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(ValueError, match="changes the projection to the vocabulary"):
        load_adapter(load_model("tiny"), tmp_path)


def test_folders_without_a_lora_adapter_in_safetensors_are_refused(tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not an adapter folder: it has no adapter_config\.json"):
        load_adapter(tiny_model, tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ValueError, match=r"no adapter_model\.safetensors; pickled weights \(\.bin\) are not loaded"):
        load_adapter(tiny_model, tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "PREFIX_TUNING"}')
    with pytest.raises(ValueError, match="has the type PREFIX_TUNING; only LORA"):
        load_adapter(tiny_model, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        load_adapter(tiny_model, tmp_path)

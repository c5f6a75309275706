from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    GPTNeoXConfig,
    LlamaConfig,
    T5Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from oxrl.data.media_features import body_of, towers_of
from oxrl.models.builtin import prepare_builtin
from oxrl.models.load import (
    check_model,
    check_tokenizer,
    enable_gradient_checkpointing,
    find_model,
    load_hf_model,
    load_hf_tokenizer,
    load_model,
    load_model_and_ref,
    load_model_config,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from oxrl.models.lora import LoraSettings, attach_lora, save_adapter
from oxrl.types import ModelConfig
from tests.waiting import HANG
from tests.web import Quiet, serving

ROOT = Path(__file__).parents[2]
IDS = torch.arange(40)[None]


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepare_builtin("tiny"), tmp_path / "tiny"))


def save_config(folder: Path, config: Any) -> str:
    config.save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return str(folder)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def layer_runs_per_step(model: Any) -> int:
    """Return how often the first attention layer runs in one forward and backward pass."""
    runs: list[int] = []
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0.self_attn"))
    handle = layer.register_forward_hook(lambda *_: runs.append(1))
    gradients(model)
    handle.remove()
    return len(runs)


def test_importing_the_module_imports_no_torch() -> None:
    code = (
        "import sys, oxrl.models.load, oxrl.models.lora, oxrl.models.builtin\n"
        "heavy = {'torch', 'transformers', 'peft', 'tokenizers', 'huggingface_hub', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=HANG)


def test_a_name_a_folder_and_a_config_load_the_same_model(tiny_folder: Path) -> None:
    by_name = load_model("tiny")
    by_folder = load_model(str(tiny_folder))
    by_config = load_model(ModelConfig("tiny", dtype="float32", device="cpu"))
    with torch.no_grad():
        logits = by_name(IDS).logits
        assert torch.equal(by_folder(IDS).logits, logits)
        assert torch.equal(by_config(IDS).logits, logits)
    assert not by_name.training
    assert all(weight.requires_grad for weight in by_name.parameters())


def test_the_dtype_of_the_config_is_the_dtype_of_the_weights() -> None:
    for name in ("float32", "bfloat16", "float16"):
        model = load_model(ModelConfig("tiny", dtype=name, device="cpu"))
        assert {weight.dtype for weight in model.parameters()} == {getattr(torch, name)}
    assert resolve_dtype("auto", "cpu") == torch.float32
    assert resolve_dtype("auto", "cuda:1") == torch.bfloat16
    assert load_model(ModelConfig("tiny", device="cpu")).dtype == torch.float32


def test_the_attention_of_the_config_is_the_one_that_runs() -> None:
    calls: list[str] = []

    def recorded(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(module.config._attn_implementation)
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("recorded_attention", recorded)
    load_model(ModelConfig("tiny", attn_implementation="recorded_attention"))(IDS)
    assert calls == ["recorded_attention"] * 2
    assert load_model(ModelConfig("tiny", attn_implementation="eager")).config._attn_implementation == "eager"
    assert load_model("tiny").config._attn_implementation == "sdpa"


def test_gradient_checkpointing_runs_each_layer_again_and_changes_no_gradient() -> None:
    plain = load_model("tiny")
    checkpointed = load_model(ModelConfig("tiny", gradient_checkpointing=True))
    assert layer_runs_per_step(plain) == 1
    assert layer_runs_per_step(checkpointed) == 2
    expected, found = gradients(plain), gradients(checkpointed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("attach_first", [True, False])
def test_an_adapter_learns_the_same_with_gradient_checkpointing(attach_first: bool) -> None:
    expected = gradients(attach_lora(load_model("tiny"), LoraSettings()))
    if attach_first:
        model = attach_lora(load_model("tiny"), LoraSettings())
        enable_gradient_checkpointing(model)
    else:
        model = attach_lora(load_model(ModelConfig("tiny", gradient_checkpointing=True)), LoraSettings())
    assert layer_runs_per_step(model) == 2
    found = gradients(model)
    assert len(expected) == 2 * 7 * 2
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_reference_is_a_frozen_copy() -> None:
    model, ref = load_model_and_ref(ModelConfig("tiny", gradient_checkpointing=True))
    with torch.no_grad():
        before = ref(IDS).logits
        assert torch.equal(model(IDS).logits, before)
        for weight in model.parameters():
            weight.add_(0.1)
        assert torch.equal(ref(IDS).logits, before)
    assert not any(weight.requires_grad for weight in ref.parameters())
    assert all(weight.requires_grad for weight in model.parameters())
    assert model.training
    assert not ref.training
    assert not ref.is_gradient_checkpointing


def test_a_frozen_model_has_nothing_to_train() -> None:
    model = load_model("tiny", is_trainable=False)
    assert not any(weight.requires_grad for weight in model.parameters())


def test_the_loaders_can_be_replaced(tiny_model: Any, tiny: tuple[Any, Any]) -> None:
    received: dict[str, Any] = {}

    def custom_loader(name_or_path: str, dtype: str, device: str, attn_implementation: str, **rest: Any) -> Any:
        received.update(name=name_or_path, dtype=dtype, device=device, attention=attn_implementation, **rest)
        return tiny_model

    def custom_tokenizer_loader(name_or_path: str, **rest: Any) -> Any:
        received.update(tokenizer=name_or_path)
        return tiny[1]

    config = ModelConfig("s3://mine", dtype="float16", gradient_checkpointing=True, revision="v2")
    assert load_model(config, model_loader=custom_loader) is tiny_model
    assert tiny_model.is_gradient_checkpointing
    assert load_tokenizer(config, tokenizer_loader=custom_tokenizer_loader) is tiny[1]
    assert received == {
        "name": "s3://mine",
        "dtype": "float16",
        "device": "auto",
        "attention": "sdpa",
        "trust_remote_code": False,
        "revision": "v2",
        "is_trainable": True,
        "tokenizer": "s3://mine",
    }


def test_a_tokenizer_without_padding_pads_with_its_end_token(tiny_folder: Path) -> None:
    settings = json.loads((tiny_folder / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (tiny_folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_hf_tokenizer(str(tiny_folder)).pad_token is None
    assert load_tokenizer(str(tiny_folder)).pad_token == "<|im_end|>"


def test_a_folder_without_tokenizer_is_refused(tiny_folder: Path) -> None:
    for file in tiny_folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer: it contains none of tokenizer\.json"):
        load_tokenizer(str(tiny_folder))


def test_an_adapter_folder_loads_its_base_and_its_own_weights(tmp_path: Path, tiny: tuple[Any, Any]) -> None:
    adapted = attach_lora(load_model("tiny"), LoraSettings(r=4))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.05)
    save_adapter(adapted, tmp_path / "adapter")
    check_model(str(tmp_path / "adapter"))
    trained_further = load_model(str(tmp_path / "adapter"))
    frozen = load_model(str(tmp_path / "adapter"), is_trainable=False)
    with torch.no_grad():
        logits = adapted(IDS).logits
        assert not torch.equal(logits, load_model("tiny")(IDS).logits)
        assert torch.equal(trained_further(IDS).logits, logits)
        assert torch.equal(frozen(IDS).logits, logits)
    trainable = [name for name, weight in trained_further.named_parameters() if weight.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    assert not any(weight.requires_grad for weight in frozen.parameters())
    assert load_tokenizer(str(tmp_path / "adapter")).get_vocab() == tiny[1].get_vocab()


def test_an_adapter_from_another_machine_finds_its_builtin_base(tmp_path: Path) -> None:
    save_adapter(attach_lora(load_model("tiny"), LoraSettings(r=4)), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(file.read_text())
    settings["base_model_name_or_path"] = "/home/someone/.cache/oxrl/tiny-v2"
    file.write_text(json.dumps(settings))
    assert load_model(str(tmp_path / "adapter")).num_parameters() > 533_120
    settings["base_model_name_or_path"] = "/home/someone/llama"
    file.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="there is no model '/home/someone/llama'"):
        check_model(str(tmp_path / "adapter"))
    settings["base_model_name_or_path"] = None
    file.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="does not name its base model"):
        check_model(str(tmp_path / "adapter"))


def write_gguf(model: Any, tokenizer: Any, file: Path, *, quantised: bool) -> None:
    """As llama.cpp writes a Llama: its own names, query and key rows interleaved for its rotary embedding."""
    import gguf

    config = model.config
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers": "blk",
    }
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_token_list([*tokens, "ab", "cd"])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(259)
    for name, weight in model.named_parameters():
        array = weight.detach().float().numpy()
        for heads, part in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            if part in name:
                rows, columns = array.shape
                array = array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        array = np.ascontiguousarray(array)
        if quantised and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_plain_trainable_model(tiny_model: Any, tiny: tuple[Any, Any], tmp_path: Path) -> None:
    write_gguf(tiny_model, tiny[1], tmp_path / "exact.gguf", quantised=False)
    check_model(str(tmp_path / "exact.gguf"))
    loaded = load_model(ModelConfig(str(tmp_path / "exact.gguf"), dtype="float32", attn_implementation="eager"))
    expected = dict(tiny_model.named_parameters())
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.named_parameters())
    assert loaded.config._attn_implementation == "eager"
    assert gradients(loaded).keys() == expected.keys()
    loaded.save_pretrained(tmp_path / "plain")
    with torch.no_grad():
        assert torch.equal(load_model(str(tmp_path / "plain"))(IDS).logits, tiny_model(IDS).logits)
    tokenizer = load_tokenizer(str(tmp_path / "exact.gguf"))
    assert tokenizer.encode("Héllo ab") == [*"Héllo ".encode(), 260]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|im_end|>")


def test_a_quantised_gguf_file_is_loaded_in_the_requested_dtype(
    tiny_model: Any, tiny: tuple[Any, Any], tmp_path: Path
) -> None:
    write_gguf(tiny_model, tiny[1], tmp_path / "small.gguf", quantised=True)
    loaded = load_model(ModelConfig(str(tmp_path / "small.gguf"), dtype="bfloat16"))
    expected = dict(tiny_model.named_parameters())
    for name, weight in loaded.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert (weight.float() - expected[name]).abs().max() < 5e-4  # half a step of 8 bits, and bfloat16's rounding
    assert not hasattr(loaded.config, "quantization_config")


def test_a_gguf_file_that_is_cut_off_is_named(tiny_model: Any, tiny: tuple[Any, Any], tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    write_gguf(tiny_model, tiny[1], file, quantised=False)
    _cut(file)
    for load in (load_tokenizer, load_model_config, load_model):
        with pytest.raises(ValueError, match=r"cut.gguf cannot be read: it is damaged or cut off"):
            load(ModelConfig(str(file)))


REFUSED = {
    "smolm2-135m": r"no model 'smolm2-135m' \(did you mean 'smollm2-135m'\?\).*\(smollm2-135m, tiny, tiny-audio, ",
    "qwen3-0.6": r"there is no model 'qwen3-0.6' \(did you mean 'qwen3-0.6b'\?\).*oxrl models list",
    "Qwen/Qwen3-0.6": r"cannot be reached.*did you mean 'qwen3-0.6b'",
    "./nowhere": r"there is no model './nowhere'.*local folder",
    "": r"there is no model ''",
    "weights.gguf": r"there is no model 'weights.gguf'",
    "someone/model": r"no local model someone/model, and the hub cannot be reached.*no network, or offline.*tiny",
    "HuggingFaceTB/SmolLM2-135M-Instruct": r"cannot be reached.*did you mean 'smollm2-135m'",
    "bad name!": r"'bad name!' is neither a local folder nor a valid hub id",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_missing_model_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]) as refused:
        check_model(name)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=REFUSED[name]):
        load_tokenizer(name)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("qwen3-0.6b", ("hub", "Qwen/Qwen3-0.6B")),
        ("Llama-3.2-1B-Instruct", ("hub", "meta-llama/Llama-3.2-1B-Instruct")),
        ("SmolLM2-135M", ("builtin", "smollm2-135m")),
        ("Qwen/Qwen3-0.6B", ("hub", "Qwen/Qwen3-0.6B")),
        ("someone/qwen3-0.6b", ("hub", "someone/qwen3-0.6b")),
        ("gpt2", ("hub", "gpt2")),
        ("distilgpt2", ("hub", "distilgpt2")),
    ],
)
def test_a_name_of_the_catalogue_is_its_hub_id_and_hub_ids_are_unchanged(
    name: str, source: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model(name) == source
    (tmp_path / name).mkdir(parents=True)
    assert find_model(name) == ("folder", name), "a folder of that name takes precedence"


def test_what_a_name_of_the_catalogue_stands_for_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for _ in range(2):
        find_model("QWEN3-0.6b")  # a spelling that no other test uses
    assert caplog.messages == ["the model QWEN3-0.6b of the catalogue is Qwen/Qwen3-0.6B"]


def test_a_missing_folder_gets_the_nearest_name(tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'tiny'"):
        check_model(str(tiny_folder.with_name("tinny")))


WRONG_SETTINGS = {
    r"unknown dtype 'bfloat' \(did you mean 'bfloat16'\?\); allowed: auto, float32, bfloat16, float16": {
        "dtype": "bfloat"
    },
    r"unknown attn_implementation 'spda' \(did you mean 'sdpa'\?\); allowed: eager, fla": {
        "attn_implementation": "spda"
    },
    r"'flash_attention_2' needs the package flash-attn and a CUDA device.*use 'sdpa'": {
        "attn_implementation": "flash_attention_2"
    },
    r"'flash_attention_3' needs the package flash-attn-3": {"attn_implementation": "flash_attention_3"},
    r"device 'cuda' is not available: torch .* finds no CUDA; use 'auto'": {"device": "cuda"},
    r"unknown device 'gpu'; allowed: auto, cpu, cuda": {"device": "gpu"},
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="some of these settings are valid with CUDA")
@pytest.mark.parametrize("message", WRONG_SETTINGS)
def test_a_wrong_setting_is_refused_before_anything_is_loaded(message: str) -> None:
    config = ModelConfig("tiny", **WRONG_SETTINGS[message])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        check_model(config)
    with pytest.raises(ValueError, match=message):
        load_model(config)


def test_devices_are_read_strictly() -> None:
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    for wrong in ("cpu:0", "cuda:", "cuda:x", "mps"):
        with pytest.raises(ValueError, match="unknown device"):
            resolve_device(wrong)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


def test_a_model_that_reads_images_otherwise_than_as_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a pix2struct model, .*not a causal language model|which reads images"):
        check_model(save_config(tmp_path, CONFIG_MAPPING["pix2struct"]()))
    with pytest.raises(ValueError, match=r"is a florence2 model, which reads images, but not as tokens"):
        check_model(save_config(tmp_path, CONFIG_MAPPING["florence2"]()))


@pytest.mark.parametrize("name", ["tiny-vlm", "tiny-audio"])
@pytest.mark.parametrize("part", ["towers", "language_model", "nothing"])
def test_the_frozen_part_of_a_model_that_reads_media(name: str, part: Any) -> None:
    model = load_model(ModelConfig(name, device="cpu", freeze=part))
    in_towers = {weight.requires_grad for tower in towers_of(body_of(model)) for weight in tower.parameters()}
    others = {weight.requires_grad for weight in model.get_decoder().parameters()}
    assert (in_towers, others) == ({part != "towers"}, {part != "language_model"})
    assert not any(weight.requires_grad for weight in load_model(name, is_trainable=False).parameters())


@pytest.mark.parametrize(("targets", "towers"), [("all-linear", False), (("q_proj",), False), (("fc1",), True)])
def test_adapters_go_into_the_language_model_unless_a_target_is_in_a_tower_alone(targets: Any, towers: bool) -> None:
    adapted = attach_lora(
        load_model(ModelConfig("tiny-audio", device="cpu")), LoraSettings(r=2, target_modules=targets)
    )
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert trained and {"audio_tower" in name for name in trained} == {towers}


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(intermediate_size=16, **SMALL),
        T5Config(d_model=16, num_layers=1, vocab_size=32),
        BartConfig(d_model=16, vocab_size=32),
    ],
    ids=["bert", "t5", "bart"],
)
def test_a_model_that_is_not_autoregressive_is_refused(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"is a {config.model_type} model, which is not a causal language model"):
        check_model(save_config(tmp_path, config))


def test_decoders_are_accepted_whatever_their_family(tmp_path: Path) -> None:
    check_model(save_config(tmp_path, BertConfig(intermediate_size=16, is_decoder=True, **SMALL)))
    neox = GPTNeoXConfig(intermediate_size=16, **SMALL)
    assert not neox.is_decoder  # it is one all the same
    check_model(save_config(tmp_path, neox))


def test_a_model_without_sdpa_gets_eager_attention_and_any_other_that_it_lacks_is_refused(tmp_path: Path) -> None:
    config = BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).config._attn_implementation == "eager"
    with torch.device("meta"):
        assert load_model(str(tmp_path)).config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="BloomForCausalLM has no flex_attention attention; use attn_impl.*='eager'"):
        check_model(ModelConfig(str(tmp_path), attn_implementation="flex_attention"))


QUANTISED = {
    "bitsandbytes": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "gptq": {"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}},
    "4 bits": {"quantization": {"group_size": 64, "bits": 4}},
    "compression_config": {"compression_config": {"format": "pack-quantized"}},
}


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_weights_are_refused_before_they_are_read(method: str, tiny_folder: Path) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    (tiny_folder / "config.json").write_text(json.dumps({**config, **QUANTISED[method]}))
    for weights in (True, False):
        with pytest.raises(ValueError, match=rf"are quantised \({method}\): use the unquantised model"):
            check_model(str(tiny_folder), weights=weights)


def test_tensors_of_other_shapes_than_the_config_are_named(tiny_folder: Path) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    (tiny_folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 400}))
    with pytest.raises(ValueError, match=r"have other shapes than config.json says, such as .*: \d+ x \d+ instead of "):
        load_model(str(tiny_folder))


def test_sampling_parameters_without_sampling_do_not_keep_a_model_from_being_saved(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """transformers loads such a generation config, and refuses to save it: at the first checkpoint of a run."""
    file = tiny_folder / "generation_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "do_sample": False, "temperature": 0.6}))
    load_model(str(tiny_folder)).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert (saved["do_sample"], saved["temperature"], saved["eos_token_id"]) == (True, 0.6, settings["eos_token_id"])
    file.write_text(json.dumps({**settings, "pad_token_id": -1}))
    with pytest.raises(ValueError, match="correct the generation_config.json of .*`pad_token_id`"):
        load_model(str(tiny_folder))


DAMAGED_TOKENIZERS = {
    "tokenizer.json is not valid JSON.*: download it again": lambda folder: _cut(folder / "tokenizer.json"),
    "tokenizer.json is a pointer of Git LFS instead of the file: run `git lfs pull`": lambda folder: (
        folder / "tokenizer.json"
    ).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"),
    "it needs custom code of the model; review it, and if you trust it set trust_remote_code": lambda folder: _set(
        folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.T", None]}, tokenizer_class="T"
    ),
}


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _set(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("problem", DAMAGED_TOKENIZERS)
def test_what_is_wrong_with_a_tokenizer_is_named(problem: str, tiny_folder: Path) -> None:
    DAMAGED_TOKENIZERS[problem](tiny_folder)
    with pytest.raises(ValueError, match=rf"the tokenizer of .*tiny cannot be loaded: .*{problem}"):
        load_tokenizer(str(tiny_folder))


def test_pickled_weights_are_refused(tiny_model: Any, tmp_path: Path) -> None:
    tiny_model.config.save_pretrained(tmp_path)
    torch.save(tiny_model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no weights in safetensors.*pickled weights \(\.bin\) can run code"):
        check_model(str(tmp_path))
    with pytest.raises(ValueError, match="no weights in safetensors"):
        load_model(str(tmp_path))


def test_weights_that_would_start_random_are_refused(tiny_folder: Path) -> None:
    settings = json.loads((tiny_folder / "config.json").read_text())
    (tiny_folder / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"lack 9 tensors of LlamaForCausalLM, such as model\.layers\.2\."):
        load_model(str(tiny_folder))


def test_custom_code_of_a_model_runs_only_if_it_is_trusted(tiny_folder: Path) -> None:
    settings = json.loads((tiny_folder / "config.json").read_text())
    code = {"AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomModel"}
    (tiny_folder / "config.json").write_text(json.dumps({**settings, "model_type": "custom", "auto_map": code}))
    (tiny_folder / "custom.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class CustomConfig(LlamaConfig):\n    model_type = 'custom'\n"
        "class CustomModel(LlamaForCausalLM):\n    config_class = CustomConfig\n"
    )
    with pytest.raises(ValueError, match=r"contains custom code.*set trust_remote_code"):
        check_model(str(tiny_folder))
    trusted = ModelConfig(str(tiny_folder), trust_remote_code=True)
    check_model(trusted)
    assert type(load_model(trusted)).__name__ == "CustomModel"


UNREADABLE = {
    "{": r"config\.json is not valid JSON",
    "[1]": r"config\.json must contain an object",
    "[" * 100_000: r"config\.json is not valid JSON: lists and objects are nested deeper",
    '{"model_type": [1]}': r"has the type \[1\], which transformers .* does not support",
    "{}": r"has the type None, which transformers .* does not support",
    '{"model_type": "llamma"}': r"has the type 'llamma', which transformers .* does not support",
    '{"model_type": "llama", "hidden_size": "wide"}': r"the config\.json of .* cannot be used: .*hidden_size",
}


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_an_unreadable_config_is_refused_in_one_sentence(text: str, tiny_folder: Path) -> None:
    (tiny_folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=UNREADABLE[text]) as refused:
        check_model(str(tiny_folder))
    assert "\n" not in str(refused.value)


def test_files_that_are_not_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a model folder: it has no config\.json"):
        check_model(str(tmp_path))
    (tmp_path / "fake.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        check_model(str(tmp_path / "fake.gguf"))
    with pytest.raises(ValueError, match=r"is a file, but not a \.gguf file; pass the folder"):
        check_model(__file__)


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused(
    tiny: tuple[Any, Any], tiny_model: Any, smollm2: tuple[Any, Any]
) -> None:
    check_tokenizer(tiny_model, tiny[1])
    check_tokenizer(tiny_model.config, tiny[1])
    check_tokenizer(attach_lora(tiny_model, LoraSettings()), tiny[1])
    check_tokenizer(LlamaConfig(vocab_size=260), tiny[1])
    with pytest.raises(ValueError, match=r"its token '<\|im_end\|>' has the id 259, but .* has 259 rows"):
        check_tokenizer(LlamaConfig(vocab_size=259), tiny[1])
    with pytest.raises(ValueError, match=r"has the id 49151, but the model's embedding has 320 rows"):
        check_tokenizer(tiny_model, smollm2[1])


def test_the_real_model_loads_in_the_requested_dtype(smollm2: tuple[Any, Any]) -> None:
    config, tokenizer = smollm2
    model = load_model(config._replace(dtype="bfloat16"))
    assert model.dtype == torch.bfloat16
    check_tokenizer(model, tokenizer)
    exact = AutoModelForCausalLM.from_pretrained(prepare_builtin("smollm2-135m"), dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), exact.parameters(), strict=True))


COMMIT = "0" * 39 + "1"
REFUSALS = {"gated": (403, "GatedRepo"), "missing": (404, "RepoNotFound"), "old": (404, "RevisionNotFound")}


class FakeHub(Quiet):
    """Serves `someone/tiny` from the cache folder, and every error of a hub; `requested` has the paths and tokens."""

    def do_GET(self) -> None:
        self.server.requested.append((self.path, self.headers.get("authorization")))  # type: ignore[attr-defined]
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[0] == "api":
            reply: Any = [] if "tree" in parts else {"id": "someone/tiny", "sha": COMMIT, "siblings": []}
            return self.reply(200, reply)
        if parts[0] in REFUSALS:
            status, reason = REFUSALS[parts[0]]
            return self.reply(status, X_Error_Code=reason)
        file = prepare_builtin("tiny") / parts[-1]
        is_hidden = parts[0] == "pickler" and file.suffix == ".safetensors"
        if not file.is_file() or is_hidden:
            return self.reply(404, X_Error_Code="EntryNotFound")
        return self.reply(200, file.read_bytes(), ETag=f'"{file.name}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET


@pytest.mark.engine
def test_a_hub_id_loads_from_the_hub_and_each_refusal_is_one_sentence(tmp_path: Path) -> None:
    code = """
import json
from oxrl.config import check_config
from oxrl.run.spec import model_config
from oxrl.models.load import check_model, load_model, load_tokenizer

def refusal(name, **settings):
    config = check_config({"model": {"name": name, **settings}, "data": {"train_files_path": "x"}})
    try:
        check_model(model_config(config))
    except ValueError as error:
        return str(error)

results = {name: refusal(name) for name in ("missing/model", "gated/model", "pickler/model")}
results["old/model"] = refusal("old/model", revision="v1")
results["parameters"] = load_model("someone/tiny").num_parameters()
results["tokens"] = load_tokenizer("someone/tiny").encode("A")
print(json.dumps(results))
"""
    with serving(FakeHub, requested=[]) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        environment["HF_TOKEN"] = "hf_of_a_test"
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG
        )
    assert ran.returncode == 0, ran.stderr
    results = json.loads(ran.stdout)
    assert results["parameters"] == load_model("tiny").num_parameters()
    assert results["tokens"] == [65]
    assert results["missing/model"].startswith("there is no model missing/model on the hub, or it is private")
    assert "is gated: request access on its page, then run `hf auth login`" in results["gated/model"]
    assert results["pickler/model"].startswith("pickler/model has no weights in safetensors")
    assert results["old/model"] == "the model old/model has no revision 'v1'"
    assert ("/old/model/resolve/v1/config.json", "Bearer hf_of_a_test") in hub.requested


class SilentHub(Quiet):
    """Closes every connection without a response."""

    def do_HEAD(self) -> None:
        self.server.requested.append(self.path)  # type: ignore[attr-defined]
        self.close_connection = True

    do_GET = do_HEAD


@pytest.mark.engine
def test_a_hub_that_does_not_respond_is_asked_once_and_reported_once(tmp_path: Path) -> None:
    arguments = ["train", "--model", "someone/model", "--algorithm", "sft", "--set", "run.experiment_id=first"]
    rows = ROOT / "registry" / "examples" / "data" / "chats.jsonl"
    (tmp_path / "checkpoints" / "first").mkdir(parents=True)
    (tmp_path / "checkpoints" / "first" / "metrics.jsonl").touch()
    with serving(SilentHub, requested=[]) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        ran = subprocess.run(
            [sys.executable, "-m", "oxrl", *arguments, "--data", str(rows)],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=HANG,
        )
    assert ran.returncode == 2
    (message,) = ran.stderr.splitlines()
    assert message.startswith("error: there is no local model someone/model, and the hub cannot be reached")
    assert len(hub.requested) == 1
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["first"]


def test_load_hf_model_takes_plain_arguments() -> None:
    model = load_hf_model("tiny", "bfloat16", "cpu", "eager")
    assert (model.dtype, model.config._attn_implementation) == (torch.bfloat16, "eager")

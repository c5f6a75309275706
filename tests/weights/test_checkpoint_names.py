"""Weights have their names of a plain checkpoint, whatever wraps the training module."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from oxrl.backends.forward import LanguageModel
from oxrl.models.load import load_model
from oxrl.models.lora import LoraSettings, attach_lora, merge_adapter
from oxrl.types import ModelConfig, Weights
from oxrl.weights.checkpoint_names import plain_names, plain_weights, read_weights, source_of, write_weights


@pytest.fixture
def saved(tiny, tmp_path):
    """The weights as transformers saves them."""
    load_model(tiny[0]).save_pretrained(tmp_path)
    return load_file(tmp_path / "model.safetensors")


class Wrapped(nn.Module):
    """A module attribute, as in data-parallel wrappers."""

    def __init__(self, module):
        super().__init__()
        self.module = module


WRAPPINGS = {
    "nothing": lambda model: model,
    "a value head": lambda model: LanguageModel(model, ("value",)),
    "a score head and a wrapper": lambda model: Wrapped(LanguageModel(model, ("score",))),
    "an adapter": lambda model: adapted(model),
    "an adapter and a value head": lambda model: LanguageModel(adapted(model), ("value",)),
    "compilation": lambda model: LanguageModel(torch.compile(model)),
}


def adapted(model):
    torch.manual_seed(3)
    with_adapter = attach_lora(model, LoraSettings(r=4))
    for name, weight in with_adapter.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.05)
    return with_adapter


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_names_are_those_of_a_plain_checkpoint(wrap, tiny_model, saved):
    names = plain_names(wrap(tiny_model))
    assert sorted(names.values()) == sorted(saved)
    assert "lm_head.weight" not in names.values(), "tied to the embedding, and written once"


def test_an_untied_output_head_is_included(tiny_model):
    config = tiny_model.config
    config.tie_word_embeddings = False
    untied = type(tiny_model)(config)
    assert "lm_head.weight" in plain_names(LanguageModel(untied)).values()


@pytest.mark.parametrize("wrap", [WRAPPINGS["nothing"], WRAPPINGS["a value head"]])
def test_weights_equal_the_trainers_bit_for_bit(wrap, tiny_model, saved):
    for name, tensor in plain_weights(wrap(tiny_model)):
        assert torch.equal(tensor, saved[name]), name


def test_an_adapter_is_merged_or_omitted(tiny_model, saved):
    model = adapted(tiny_model)
    merged = dict(merge_adapter(model).named_parameters())
    weights = dict(plain_weights(LanguageModel(model, ("value",))))
    assert weights.keys() == merged.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, merged[name].detach(), atol=1e-7, rtol=0)
    changed = [name for name, tensor in load_model("tiny").named_parameters() if not torch.equal(tensor, weights[name])]
    assert changed and all("proj" in name for name in changed)
    base = dict(plain_weights(LanguageModel(model, ("value",)), adapter=False))
    assert base.keys() == weights.keys() and all(torch.equal(tensor, saved[name]) for name, tensor in base.items())


def test_a_written_folder_is_a_plain_checkpoint(tiny_model, tmp_path):
    write_weights(LanguageModel(tiny_model, ("value",)), tmp_path / "new")
    again = load_model(ModelConfig(str(tmp_path / "new"), dtype="float32", device="cpu"))
    for name, tensor in again.named_parameters():
        assert torch.equal(tensor, tiny_model.get_parameter(name)), name


def test_a_module_without_a_language_model_is_refused():
    with pytest.raises(ValueError, match="no transformers model"):
        plain_names(nn.Linear(2, 2))


def test_many_weights_are_written_in_buckets_that_transformers_reads_back(tiny_model, tmp_path):
    write_weights(tiny_model, tmp_path, bucket=200_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[-1].name == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    assert all(path.stat().st_size < 300_000 for path in files)
    again = load_model(ModelConfig(str(tmp_path), dtype="float32", device="cpu"))
    expected = dict(plain_weights(tiny_model))
    assert dict(read_weights(tmp_path)).keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(again.get_parameter(name), tensor), name


def test_weights_come_from_the_module_if_there_is_one_and_need_a_source_otherwise(tiny_model):
    source = source_of(Weights(tiny_model, 1))
    assert (source.vocabulary, source.dtype) == (tiny_model.config.vocab_size, torch.float32)
    assert not source.adapted and source_of(Weights(adapted(tiny_model), 1)).adapted
    with pytest.raises(ValueError, match="neither a module nor a source"):
        source_of(Weights(None, 1))


def test_a_model_built_empty_has_the_shape_of_the_loaded_one(tiny_model):
    with torch.device("meta"):
        empty = load_model("tiny")
    assert {tensor.device.type for tensor in empty.parameters()} == {"meta"}
    assert [(name, tensor.shape) for name, tensor in empty.named_parameters()] == [
        (name, tensor.shape) for name, tensor in load_model("tiny").named_parameters()
    ]

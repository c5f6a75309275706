"""Gradients of single samples against one backward pass per sample of a plain transformers model."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, MixtralConfig, MixtralForCausalLM

from oxrl import algorithm, attach_lora, create_pytorch_backend, per_sample_grad_norms, per_sample_gradients
from oxrl.models.load import load_model
from oxrl.models.lora import LoraSettings
from oxrl.types import Row

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


def rows(lengths=(5, 9, 3, 12), vocabulary=200):
    numbers = np.random.default_rng(0)
    return [
        (Row(f"row {n}", numbers.integers(0, vocabulary, n), np.arange(n) > numbers.integers(0, n - 1)),)
        for n in lengths
    ]


def backward_alone(model, row, tokens_of_step):
    """The gradient of the row's negative log-likelihood, with logits in float64 and without our forward pass."""
    model.zero_grad()
    ids = torch.from_numpy(row.tokens)[None]
    logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    trained = [i for i in range(len(row)) if row.mask[i]]
    loss = -sum(logprobs[i - 1, row.tokens[i]] for i in trained) / tokens_of_step
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def with_adapter():
    model = attach_lora(load_model("tiny"), LoraSettings(r=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start, where the other factor has no gradient
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    return model


def with_window():
    return MistralForCausalLM(MistralConfig(vocab_size=200, num_hidden_layers=1, sliding_window=4, **SIZES))


@pytest.mark.parametrize(
    "load", [partial(load_model, "tiny"), with_adapter, with_window], ids=["full", "lora", "window"]
)
def test_a_samples_gradient_is_that_of_its_own_backward_pass(load):
    model = load()
    backend = create_pytorch_backend(model)
    model.double()
    items = rows()
    total = sum(int(row.mask.sum()) for (row,) in items)
    gradients = list(per_sample_gradients(backend, items, algorithm("sft"), at_once=3))
    norms = per_sample_grad_norms(backend, items, "sft", at_once=3)
    assert len(gradients) == len(norms) == 4
    for (row,), (same, gradient), (_, norm) in zip(items, gradients, norms, strict=True):
        expected = backward_alone(model, row, total)
        assert same[0].id == row.id and gradient.keys() == expected.keys()
        size = sum(float(each.square().sum()) for each in expected.values()) ** 0.5
        for name, values in expected.items():
            assert (gradient[name] - values).norm() <= 1e-12 * size, name
        assert norm == pytest.approx(size, rel=1e-9)


def test_a_model_that_cannot_be_vectorized_is_named_with_the_remedy():
    model = MixtralForCausalLM(MixtralConfig(vocab_size=50, num_hidden_layers=1, num_local_experts=2, **SIZES))
    model.set_experts_implementation("eager")  # a loop over the experts that have tokens
    backend = create_pytorch_backend(model)
    items = rows(vocabulary=50)
    with pytest.raises(ValueError, match="cannot vectorize MixtralForCausalLM.*vectorized=False"):
        list(per_sample_gradients(backend, items, algorithm("sft")))
    assert len(per_sample_grad_norms(backend, items, algorithm("sft"), vectorized=False)) == 4

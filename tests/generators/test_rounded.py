"""The embedded engine over a rounded copy of the trainer's weights."""

import copy

import anyio
import pytest
import torch

from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.generators.embedded.rounded import RoundedGenerator
from oxrl.models.load import load_model, load_tokenizer
from oxrl.types import GenerationConfig, Weights

PROMPTS, SAMPLING = [[1, 20, 30], [9, 8, 7, 6, 5]], GenerationConfig(max_new_tokens=12, seed=3)


def test_it_samples_as_an_engine_over_rounded_weights_does_and_follows_the_trainers_weights():
    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    generator = RoundedGenerator(model, tokenizer, torch.bfloat16)

    def of_rounded_weights():
        return EmbeddedGenerator(copy.deepcopy(model).to(torch.bfloat16), tokenizer).complete(PROMPTS, SAMPLING)

    before = of_rounded_weights()
    assert generator.complete(PROMPTS, SAMPLING) == before
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    assert generator.complete(PROMPTS, SAMPLING) == before, "new weights arrive with update_weights"
    anyio.run(generator.update_weights, Weights(model, 1))
    now = of_rounded_weights()
    assert [each._replace(version=0) for each in generator.complete(PROMPTS, SAMPLING)] == now != before
    assert generator.version == 1
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_weights_of_another_module_are_refused():
    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    with pytest.raises(ValueError, match="the module it was built with"):
        anyio.run(RoundedGenerator(model, tokenizer, torch.bfloat16).update_weights, Weights(load_model("tiny"), 1))

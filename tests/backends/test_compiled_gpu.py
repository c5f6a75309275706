"""Compiled layers on a GPU: `CUDA_VISIBLE_DEVICES=0 python -m pytest -n 0 tests/backends/test_compiled_gpu.py`."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from oxrl.algorithms import algorithm
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.pack import collate, count_units
from oxrl.generators.embedded.captured import Capture
from oxrl.generators.embedded.engine import Engine
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.types import GenerationConfig, Request, Row
from oxrl.weights.checkpoint_names import enable_gradient_checkpointing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="layers are compiled on a GPU only")
SFT = algorithm("sft")


def build(lora=False, checkpointing=False):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    model = attach_lora(model, LoraSettings(r=4), seed=1) if lora else model
    if checkpointing:
        enable_gradient_checkpointing(model)
    return model


def items_of(lengths, shared=0):
    generator = torch.Generator().manual_seed(sum(lengths))
    prefix = torch.randint(500, (shared,), generator=generator)
    rows = [torch.cat([prefix, torch.randint(500, (n,), generator=generator)]).numpy() for n in lengths]
    return [(Row(str(index), row, np.arange(len(row)) > 0),) for index, row in enumerate(rows)]


def gradients(backend, items):
    backend.optimizer.zero_grad()
    metrics = backend.forward_backward([collate(items)], SFT, count_units(items)).value
    weights = [each for group in backend.optimizer.param_groups for each in group["params"]]
    return metrics["loss"], torch.cat([each.grad.flatten().float() for each in weights if each.grad is not None])


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_compiled_layers_give_the_losses_and_gradients_of_plain_ones_for_any_lengths(lora, checkpointing):
    plain = create_pytorch_backend(build(lora, checkpointing))
    compiled = create_pytorch_backend(build(lora, checkpointing), compiles=True)
    assert "forward" in vars(next(iter(compiled.module.inner.model.layers)))
    compilations = None
    for lengths, shared in (([9, 30, 17], 0), ([400, 3], 0), ([50, 60, 70], 64), ([200, 31, 5, 90], 33)):
        items = items_of(lengths, shared)
        (loss, gradient), (expected, reference) = gradients(compiled, items), gradients(plain, items)
        assert loss == pytest.approx(expected, rel=5e-3)
        assert float((gradient - reference).norm() / reference.norm()) < 5e-2
        if lengths == [50, 60, 70]:  # rows with a shared prompt are a second variant
            compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compilations, "other lengths compile nothing"


def test_sampling_does_not_use_the_layers_that_were_compiled_for_training(tiny):
    model = build().eval()
    before = copy.deepcopy(model)
    create_pytorch_backend(model, compiles=True)
    for capture in (Capture(capture=False), Capture(capture=True, compiles=True)):
        found = [_sampled(each, tiny[1], capture) for each in (model, before)]
        assert found[0] == found[1]


def _sampled(model, tokenizer, capture):
    engine = Engine(model.eval(), tokenizer, 4, "shrinking", capture)
    sampling = GenerationConfig(max_new_tokens=30)
    jobs = [engine.submit(Request((5, 6, index), seed=index), sampling) for index in range(6)]
    while any(job.result is None for job in jobs):
        engine.step()
    return [job.result.token_ids for job in jobs]

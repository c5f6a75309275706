"""What vLLM in this process does beyond the contract: adapters, checkpoints on disk, and a trainer that is not idle."""

import pytest
import torch
from torch import nn

from oxrl.generators.probe import Probe, StaleEngineError
from oxrl.models.load import load_model
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.types import GenerationConfig, Request, Weights
from oxrl.weights import ModuleWeights, near_folder, write_weights

pytestmark = pytest.mark.anyio
SAMPLING = GenerationConfig(max_new_tokens=12, seed=4)


@pytest.fixture
def anyio_backend():
    return "trio"


def logprobs(model, prompt, answer):
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        p = model(input_ids=ids).logits.double().log_softmax(-1)[0]
    return [float(p[len(prompt) + i - 1, token]) for i, token in enumerate(answer)]


def step(model, seed):
    """As training does: only the adapter moves."""
    torch.manual_seed(seed)
    for weight in model.parameters():
        if weight.requires_grad:
            nn.init.normal_(weight, std=0.2)


async def test_an_adapter_is_reloaded_in_place_each_time(vllm_in_process, tiny):
    """The same adapter id with other weights: without `load_inplace` the first would speak for ever."""
    engine = vllm_in_process
    await engine.update_weights(Weights(load_model(tiny[0]), 100))
    model = attach_lora(load_model(tiny[0]), LoraSettings(r=8)).eval()
    said = []
    for version in (101, 102, 103):
        step(model, version)
        await engine.update_weights(Weights(model, version))
        (answer,) = await engine.generate([Request((1, 2, 3))], SAMPLING)
        assert answer.version == version and engine.gap < 1e-3
        assert answer.logprobs == pytest.approx(logprobs(model, (1, 2, 3), answer.token_ids), abs=5e-4)
        said.append(answer.logprobs)
    assert len(set(said)) == 3


async def test_plain_weights_after_an_adapter_speak_without_it(vllm_in_process, tiny):
    engine, plain = vllm_in_process, load_model(tiny[0])
    adapted = attach_lora(load_model(tiny[0]), LoraSettings(r=8)).eval()
    step(adapted, 7)
    await engine.update_weights(Weights(adapted, 110))
    await engine.update_weights(Weights(plain, 111))
    (answer,) = await engine.generate([Request((1, 2, 3))], SAMPLING)
    assert answer.logprobs == pytest.approx(logprobs(plain, (1, 2, 3), answer.token_ids), abs=2e-4)


async def test_asleep_it_holds_still_until_it_is_asked(vllm_in_process, tiny):
    """On a CPU no memory is given back; what wakes it is the same."""
    engine, model = vllm_in_process, load_model(tiny[0])
    await engine.update_weights(Weights(model, 115))
    for wake in ("weights", "request"):
        await engine.sleep()
        assert engine._worker._engine.is_sleeping()
        if wake == "weights":
            await engine.update_weights(Weights(model, 116))
        (answer,) = await engine.generate([Request((1, 2, 3))], SAMPLING)
        assert not engine._worker._engine.is_sleeping()
        assert answer.logprobs == pytest.approx(logprobs(model, (1, 2, 3), answer.token_ids), abs=5e-4)


async def test_a_checkpoint_on_disk_is_taken_once_per_version(vllm_in_process, tiny, tmp_path):
    engine, model = vllm_in_process, load_model(tiny[0])
    step(model, 3)
    for weight in model.parameters():
        weight.data *= 0.3
    write_weights(model, tmp_path)
    assert await engine.refresh_model(tmp_path, 120)
    assert not await engine.refresh_model(tmp_path, 120)
    await engine.verify(Probe.of(ModuleWeights(model)), 120)
    with pytest.raises(ValueError, match="no checkpoint folder"):
        await engine.refresh_model(tmp_path / "none", 121)


async def test_an_engine_with_other_weights_is_told_by_its_name(vllm_in_process, tiny):
    engine, model = vllm_in_process, load_model(tiny[0])
    await engine.update_weights(Weights(model, 130))
    step(model, 5)
    with pytest.raises(StaleEngineError, match="^vLLM in this process does not speak with version 131"):
        await engine.verify(Probe.of(ModuleWeights(model)), 131)


async def test_weights_that_are_elsewhere_come_through_files_that_do_not_stay(vllm_in_process, tiny):
    engine, model = vllm_in_process, load_model(tiny[0])
    await engine.update_weights(Weights(load_model(tiny[0]), 140))
    step(model, 6)
    for weight in model.parameters():
        weight.data *= 0.3
    adapted = attach_lora(load_model(tiny[0]), LoraSettings(r=8)).eval()
    step(adapted, 8)
    await engine.update_weights(Weights(None, 141, ModuleWeights(model)))
    assert engine.version == 141 and engine.gap < 1e-3
    await engine.update_weights(Weights(load_model(tiny[0]), 142))
    await engine.update_weights(Weights(None, 143, ModuleWeights(adapted)))
    assert engine.version == 143 and engine.gap < 1e-3
    assert not list(near_folder().glob("oxrl-weights-*"))

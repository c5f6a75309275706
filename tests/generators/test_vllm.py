"""vLLM in this process, beyond the contract: adapters, checkpoints on disk, and weights from elsewhere."""

import anyio
import pytest
import torch
from torch import nn

from oxrl.generators.probe import Probe, StaleEngineError
from oxrl.models.load import load_model
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.types import GenerationConfig, Request, Weights
from oxrl.weights.checkpoint_names import ModuleWeights, write_weights
from tests.waiting import HANG

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


def adapted_to(config, seed):
    """Return a model with an adapter, whose base is not the one that the engine was started with."""
    base = load_model(config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in base.parameters():
            weight += 0.02 * torch.randn_like(weight)
    model = attach_lora(base, LoraSettings(r=4)).eval()
    step(model, seed)
    return model


class Counted(ModuleWeights):
    """Records which files were written, with their size."""

    def __init__(self, module):
        super().__init__(module)
        self.sent = []

    def _counted(self, what, write, folder):
        write(folder)
        self.sent.append((what, sum(file.stat().st_size for file in folder.glob(f"{what}*.safetensors"))))

    def write(self, folder):
        raise AssertionError("merged weights were written")

    def write_base(self, folder):
        self._counted("model", super().write_base, folder)

    def write_adapter(self, folder):
        self._counted("adapter", super().write_adapter, folder)


async def base_once_then_the_adapter_alone(generator, config, first):
    """Three versions from files; then another base, by its module."""
    await generator.update_weights(Weights(load_model(config), first - 1))  # an earlier test may have sent a base
    model = adapted_to(config, 1)
    source = Counted(model)
    for version in range(first, first + 3):
        step(model, version)
        await generator.update_weights(Weights(None, version, source))
        await has_weights_of(generator, model, version)
    assert [what for what, _ in source.sent] == ["model", "adapter", "adapter", "adapter"]
    adapter = sum(4 * weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert all(adapter < size < 1.2 * adapter for what, size in source.sent if what == "adapter")
    await generator.update_weights(Weights(load_model(config), first + 3))
    other = adapted_to(config, 2)
    await generator.update_weights(Weights(other, first + 4))
    await has_weights_of(generator, other, first + 4)
    await generator.update_weights(Weights(load_model(config), first + 5))  # as the other tests expect it


async def has_weights_of(generator, model, version):
    (answer,) = await generator.generate([Request((1, 2, 3))], SAMPLING)
    assert answer.version == version == generator.version and generator.gap < 1e-3
    assert answer.logprobs == pytest.approx(logprobs(model, (1, 2, 3), answer.token_ids), abs=5e-4)


async def test_a_base_is_sent_once_and_then_its_adapter_alone(vllm_in_process, tiny):
    await base_once_then_the_adapter_alone(vllm_in_process, tiny[0], 90)


async def test_an_adapter_is_reloaded_in_place_each_time(vllm_in_process, tiny):
    """The same adapter id with other weights: without `load_inplace` the first would stay in use."""
    engine = vllm_in_process
    await engine.update_weights(Weights(load_model(tiny[0]), 100))
    model = attach_lora(load_model(tiny[0]), LoraSettings(r=8)).eval()
    seen = []
    for version in (101, 102, 103):
        step(model, version)
        await engine.update_weights(Weights(model, version))
        (answer,) = await engine.generate([Request((1, 2, 3))], SAMPLING)
        assert answer.version == version and engine.gap < 1e-3
        assert answer.logprobs == pytest.approx(logprobs(model, (1, 2, 3), answer.token_ids), abs=5e-4)
        seen.append(answer.logprobs)
    assert len(set(seen)) == 3


async def test_plain_weights_remove_an_adapter(vllm_in_process, tiny):
    engine, plain = vllm_in_process, load_model(tiny[0])
    adapted = attach_lora(load_model(tiny[0]), LoraSettings(r=8)).eval()
    step(adapted, 7)
    await engine.update_weights(Weights(adapted, 110))
    await engine.update_weights(Weights(plain, 111))
    (answer,) = await engine.generate([Request((1, 2, 3))], SAMPLING)
    assert answer.logprobs == pytest.approx(logprobs(plain, (1, 2, 3), answer.token_ids), abs=2e-4)


async def test_the_next_call_wakes_a_sleeping_engine(vllm_in_process, tiny):
    """On a CPU no memory is freed; waking up is the same."""
    engine, model = vllm_in_process, load_model(tiny[0])
    await engine.update_weights(Weights(model, 115))
    for wake in ("weights", "request"):
        await engine.sleep()
        assert engine._worker._engine.is_sleeping()
        with anyio.fail_after(HANG):
            if wake == "weights":
                await engine.update_weights(Weights(model, 116))
            (answer,) = await engine.generate([Request((1, 2, 3))], SAMPLING)
        assert not engine._worker._engine.is_sleeping()
        assert answer.logprobs == pytest.approx(logprobs(model, (1, 2, 3), answer.token_ids), abs=5e-4)


async def test_a_checkpoint_on_disk_is_loaded_once_per_version(vllm_in_process, tiny, tmp_path):
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


async def test_an_engine_with_other_weights_is_named(vllm_in_process, tiny):
    engine, model = vllm_in_process, load_model(tiny[0])
    await engine.update_weights(Weights(model, 130))
    step(model, 5)
    with pytest.raises(StaleEngineError, match="^vLLM in this process .* version 131"):
        await engine.verify(Probe.of(ModuleWeights(model)), 131)


class Written(ModuleWeights):
    """Records the folder of its files."""

    def write(self, folder):
        self.folder = folder
        super().write(folder)


async def test_weights_of_another_process_are_read_from_files_that_are_removed(
    vllm_in_process, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr("oxrl.generators.vllm.engine.shm_dir", lambda: tmp_path)  # others use the real one
    engine, model = vllm_in_process, load_model(tiny[0])
    step(model, 6)
    for weight in model.parameters():
        weight.data *= 0.3
    adapted = attach_lora(load_model(tiny[0]), LoraSettings(r=8)).eval()
    step(adapted, 8)
    source = Written(model)
    await engine.update_weights(Weights(None, 141, source))
    assert source.folder.parent == tmp_path
    assert engine.version == 141 and engine.gap < 1e-3
    await engine.update_weights(Weights(None, 142, ModuleWeights(adapted)))
    assert engine.version == 142 and engine.gap < 1e-3, "its base is another one, and was sent too"
    assert not list(tmp_path.iterdir())

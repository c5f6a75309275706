"""vLLM replicas as Ray actors, beyond the contract: adapters, stale, dead and hanging replicas."""

import os
import signal
import time
from pathlib import Path

import anyio
import pytest
import torch

from oxrl.concurrent import task_group
from oxrl.generators.probe import StaleEngineError
from oxrl.models.load import load_model
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.types import GenerationConfig, Request, Weights
from oxrl.weights import ModuleWeights
from tests.generators.test_vllm import logprobs, step

pytestmark = pytest.mark.anyio
SAMPLING = GenerationConfig(max_new_tokens=12, seed=4)
LONG = SAMPLING._replace(max_new_tokens=1200)


@pytest.fixture
def anyio_backend():
    return "trio"


def process_id(generator):
    return generator.engines[0].engine.process.pid


async def test_an_adapter_is_reloaded_in_place_and_gone_with_plain_weights(ray_replicas, tiny):
    generator, model = ray_replicas, attach_lora(load_model(tiny[0]), LoraSettings(r=8)).eval()
    for version, speaker in ((101, model), (102, model), (103, load_model(tiny[0]))):
        if speaker is model:
            step(model, version)
        await generator.update_weights(Weights(speaker, version))
        (answer,) = await generator.generate([Request((1, 2, 3))], SAMPLING)
        assert answer.version == version == generator.version
        assert answer.logprobs == pytest.approx(logprobs(speaker, (1, 2, 3), answer.token_ids), abs=5e-4)


class Liar(ModuleWeights):
    """Hands out other weights than it speaks with."""

    def write(self, folder):
        ModuleWeights(load_model("tiny")).write(folder)


async def test_a_replica_with_other_weights_is_told_by_its_name(ray_replicas, tiny):
    moved = load_model(tiny[0])
    with torch.no_grad():
        for weight in moved.parameters():
            weight += 0.05 * torch.randn_like(weight)
    with pytest.raises(StaleEngineError, match="^vLLM replica 0 does not speak with version 110"):
        await ray_replicas.update_weights(Weights(None, 110, Liar(moved)))
    await ray_replicas.update_weights(Weights(moved, 111))
    assert ray_replicas.version == 111 and ray_replicas.gap < 1e-3


async def test_sleep_is_harmless_on_a_cpu_and_whoever_asks_wakes(ray_replicas):
    await ray_replicas.sleep()
    (answer,) = await ray_replicas.generate([Request((1, 2, 3))], SAMPLING)
    assert answer.token_ids


async def test_a_replica_that_was_killed_comes_back_with_the_weights_and_answers_what_was_lost(ray_replicas, tiny):
    generator, model = ray_replicas, load_model(tiny[0])
    step(model, 9)
    await generator.update_weights(Weights(model, 120))
    requests = [Request((1, 2, 3), seed=seed) for seed in range(3)]
    expected = await generator.generate(requests, SAMPLING)
    pid, answers = process_id(generator), []

    async def ask():
        answers.extend(await generator.generate(requests, LONG))

    started = time.monotonic()
    async with task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
    assert time.monotonic() - started < 200
    assert process_id(generator) != pid
    for answer, before in zip(answers, expected, strict=True):
        assert answer.version == 120 and answer.token_ids[: len(before.token_ids)] == before.token_ids
        assert answer.logprobs == pytest.approx(logprobs(model, (1, 2, 3), answer.token_ids), abs=5e-4)


async def test_a_replica_that_hangs_is_found_out_and_an_abort_does_not_wait_for_the_next(ray_replicas):
    generator, (replica,) = ray_replicas, ray_replicas.engines
    pid, answers = process_id(generator), []
    replica.time_limit, before = 2.0, replica.time_limit
    os.kill(pid, signal.SIGSTOP)

    async def ask():
        answers.extend(await generator.generate([Request((1, 2, 3))], SAMPLING))

    try:
        with anyio.fail_after(60):
            async with task_group() as tasks:
                tasks.start_soon(ask)
                await anyio.sleep(4.0)  # it is given up by now, and another one is on its way
                await generator.abort()
    finally:
        replica.time_limit = before
    assert [answer.finish_reason for answer in answers] == ["aborted"]
    assert not Path(f"/proc/{pid}").exists()

"""vLLM replicas as Ray actors, beyond the contract: adapters, stale, dead and hanging replicas."""

import os
import signal
import threading
from functools import partial
from pathlib import Path

import anyio
import pytest
import torch

from oxrl.backends.distributed.fsdp import build_worker
from oxrl.backends.distributed.ray import create_ray_backend
from oxrl.backends.distributed.worker import Settings
from oxrl.concurrency import in_thread, task_group
from oxrl.generators.probe import StaleEngineError
from oxrl.loops.step import train_step
from oxrl.models.load import load_model
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.types import GenerationConfig, Request, Weights
from oxrl.weights.checkpoint_names import ModuleWeights, StaleWeightsError
from tests.contracts.test_backend import SFT, some_items
from tests.generators.test_vllm import adapted_to, base_once_then_the_adapter_alone, logprobs, step
from tests.holding import holding
from tests.waiting import EXPIRES, HANG, wait_until_async

pytestmark = pytest.mark.anyio
SAMPLING = GenerationConfig(max_new_tokens=12, seed=4)
LONG = SAMPLING._replace(max_new_tokens=40)


@pytest.fixture
def anyio_backend():
    return "trio"


def process_id(generator):
    return generator.engines[0].engine.process.pid


async def test_an_adapter_is_reloaded_in_place_and_removed_by_plain_weights(ray_replicas, tiny):
    generator, model = ray_replicas, attach_lora(load_model(tiny[0]), LoraSettings(r=8)).eval()
    for version, trained in ((101, model), (102, model), (103, load_model(tiny[0]))):
        if trained is model:
            step(model, version)
        await generator.update_weights(Weights(trained, version))
        (answer,) = await generator.generate([Request((1, 2, 3))], SAMPLING)
        assert answer.version == version == generator.version
        assert answer.logprobs == pytest.approx(logprobs(trained, (1, 2, 3), answer.token_ids), abs=5e-4)


async def test_a_base_is_sent_once_and_then_its_adapter_alone(ray_replicas, tiny):
    await base_once_then_the_adapter_alone(ray_replicas, tiny[0], 90)


async def test_weights_go_from_training_actors_to_replicas_and_the_driver_has_none(ray_ranks, ray_replicas):
    backend = create_ray_backend(ray_ranks, partial(build_worker, partial(load_model, "tiny"), {}, Settings(lr=0.05)))
    items = some_items()
    for _ in range(2):
        await train_step(backend, SFT, items, 100)
    weights = await backend.get_weights()
    assert weights.module is None
    weights = weights._replace(version=105)
    await ray_replicas.update_weights(weights)
    (answer,) = await ray_replicas.generate([Request((1, 2, 3))], SAMPLING)
    expected = weights.source.logprobs((1, 2, 3, *answer.token_ids))[2:]
    assert answer.logprobs == pytest.approx(expected, abs=5e-4)
    backend.close()


class WrongWeights(ModuleWeights):
    """Writes other weights than those of its log-probs."""

    def write(self, folder):
        ModuleWeights(load_model("tiny")).write(folder)


async def test_a_replica_with_other_weights_is_named(ray_replicas, tiny):
    moved = load_model(tiny[0])
    with torch.no_grad():
        for weight in moved.parameters():
            weight += 0.05 * torch.randn_like(weight)
    with pytest.raises(StaleEngineError, match="^vLLM replica 0 .* version 110"):
        await ray_replicas.update_weights(Weights(None, 110, WrongWeights(moved)))
    await ray_replicas.update_weights(Weights(moved, 111))
    assert ray_replicas.version == 111 and ray_replicas.gap < 1e-3


async def test_sleep_is_harmless_on_a_cpu_and_the_next_call_wakes(ray_replicas):
    await ray_replicas.sleep()
    (answer,) = await ray_replicas.generate([Request((1, 2, 3))], SAMPLING)
    assert answer.token_ids


async def test_a_killed_replica_is_replaced_with_its_weights_and_its_requests_are_retried(ray_replicas, tiny):
    generator, model = ray_replicas, adapted_to(tiny[0], 9)  # its replacement needs the base, too
    await generator.update_weights(Weights(model, 120))
    requests = [Request((1, 2, 3), seed=seed) for seed in range(3)]
    expected = await generator.generate(requests, SAMPLING)
    pid, answers = process_id(generator), []

    async def ask():
        answers.extend(await generator.generate(requests, LONG))

    with anyio.fail_after(HANG), holding(4) as hold:
        async with task_group() as tasks:
            tasks.start_soon(ask)
            await wait_until_async(lambda: hold.reached == 3, "some tokens of each answer")
            os.kill(pid, signal.SIGKILL)
            hold.release()
    assert process_id(generator) != pid
    for answer, before in zip(answers, expected, strict=True):
        assert answer.version == 120 and answer.token_ids[: len(before.token_ids)] == before.token_ids
        assert answer.logprobs == pytest.approx(logprobs(model, (1, 2, 3), answer.token_ids), abs=5e-4)


class Transient(ModuleWeights):
    """Weights that the trainer replaces at its next step."""

    replaced = False

    def __init__(self, module):
        super().__init__(module)
        self.refused = threading.Event()

    def logprobs(self, tokens):
        if self.replaced:
            self.refused.set()
            raise StaleWeightsError("the trainer has newer weights")
        return super().logprobs(tokens)


async def test_a_hanging_replica_is_replaced_and_its_replacement_waits_for_current_weights(ray_replicas, tiny):
    generator, (replica,) = ray_replicas, ray_replicas.engines
    source, answers = Transient(load_model(tiny[0])), []
    await generator.update_weights(Weights(None, 130, source))
    pid = process_id(generator)

    async def ask():
        answers.extend(await generator.generate([Request((1, 2, 3))], SAMPLING))

    os.kill(pid, signal.SIGSTOP)
    source.replaced = True
    replica.time_limit, before = EXPIRES, replica.time_limit
    restarts = replica.restarts
    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            tasks.start_soon(ask)
            await wait_until_async(lambda: replica.restarts > restarts, "it is replaced")
            await generator.abort()
    replica.time_limit = before
    assert [answer.finish_reason for answer in answers] == ["aborted"]
    assert not source.refused.is_set(), "the abort does not wait for the replacement"
    await wait_until_async(lambda: not Path(f"/proc/{pid}").exists(), "the process that hung has ended")
    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            tasks.start_soon(ask)
            assert await in_thread(partial(source.refused.wait, HANG))
            step(source.module, 8)
            await generator.update_weights(Weights(source.module, 131))
    assert generator.version == 131
    assert answers[1].logprobs == pytest.approx(logprobs(source.module, (1, 2, 3), answers[1].token_ids), abs=5e-4)

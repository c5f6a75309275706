"""Ranks as Ray actors: results, ranks that die or hang, and clean-up after the driver was killed."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from oxrl.algorithms import algorithm
from oxrl.backends.distributed.ranks import RankError
from oxrl.backends.local import NonFiniteError, create_pytorch_backend
from oxrl.data.pack import count_units
from oxrl.loops.memory_warmup import warm_up_memory
from oxrl.loops.step import train_step
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.weights.broadcast import receive, rendezvous
from oxrl.weights.checkpoint_names import StaleWeightsError, adapter_weights, plain_weights
from tests.backends.collective_worker import CollectiveWorker
from tests.contracts.test_backend import SFT, load_tiny, some_items, split
from tests.contracts.test_over_ranks import assert_equal_when_repeated, worker_with_dropout
from tests.waiting import EXPIRES, HANG, wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio"


@pytest.fixture
def make(ray_ranks):
    from oxrl.backends.distributed.fsdp import build_worker
    from oxrl.backends.distributed.ray import create_ray_backend
    from oxrl.backends.distributed.worker import Settings

    created = []

    def create(load=load_tiny, others=(), **options):
        build = partial(build_worker, load, dict(others), Settings(**{"lr": 1e-3, **options}))
        created.append(create_ray_backend(ray_ranks, build))
        return created[-1]

    yield create
    for backend in created:
        backend.close()


def with_adapter():
    torch.manual_seed(3)
    model = attach_lora(load_tiny(), LoraSettings(r=4), seed=1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model


def received(weights, max_bytes=2**18, **options):
    """Return the weights as an engine gets them: every bucket by its reference."""
    import ray

    references = list(weights.source.references(max_bytes, **options))
    assert len(references) > 1, "several buckets"
    return dict(pair for reference in references for pair in ray.get(reference).tensors())


def test_actors_of_a_local_cluster_listen_on_loopback_only(ray_ranks):
    processes = [psutil.Process(process.pid) for process in ray_ranks.processes]
    sockets = [(process.pid, each) for process in processes for each in process.net_connections()]
    listening = [(pid, each) for pid, each in sockets if each.status == psutil.CONN_LISTEN]
    assert listening
    assert not [(pid, each) for pid, each in listening if each.laddr.ip.removeprefix("::ffff:") != "127.0.0.1"]


async def test_actors_match_the_local_backend_and_calls_are_queued(make):
    rates = {"lr": 1e-3, "eps": 1e-6}  # with a smaller eps, a gradient of rounding errors becomes a step
    one, two, items = create_pytorch_backend(load_tiny(), **rates), make(**rates), some_items()
    for _ in range(2):
        expected = await train_step(one, SFT, items, 40)
        counted = two.forward_backward(split(items, 3), SFT, count_units(items))
        stepped = two.optim_step()
        found = {**await counted, **await stepped}
        for key in ("loss", "grad_norm", "lr"):
            assert found[key] == pytest.approx(expected[key], abs=1e-5)
    weights = await two.get_weights()
    assert (weights.module, weights.version) == (None, 2)
    sent = received(weights)
    for name, tensor in plain_weights(one.model):
        torch.testing.assert_close(sent[name], tensor, atol=1e-5, rtol=0)
    await warm_up_memory(two, SFT, items, 100)
    await train_step(two, SFT, items, 40)
    with pytest.raises(StaleWeightsError, match="version 2 .* have version 3"):
        received(weights)


async def test_an_adapter_arrives_merged_or_as_its_base_and_its_files(make, tmp_path):
    from safetensors.torch import load_file

    weights = await make(with_adapter).get_weights()
    sent, model = received(weights), with_adapter()
    for name, tensor in plain_weights(model):
        torch.testing.assert_close(sent[name], tensor, atol=1e-6, rtol=0)
    base = received(weights, adapter=False)
    assert base.keys() == sent.keys()
    for name, tensor in plain_weights(load_tiny()):
        torch.testing.assert_close(base[name], tensor)
    files = weights.source.adapter_files()
    assert "adapter_config.json" in files
    (tmp_path / "adapter").write_bytes(files["adapter_model.safetensors"])
    own = {name.replace(".default", ""): tensor for name, tensor in adapter_weights(model).items()}
    found = load_file(tmp_path / "adapter")
    assert found.keys() == own.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(found[name], tensor)


async def test_weights_sent_over_the_network_equal_those_by_reference(make):
    weights = await make(with_adapter).get_weights()
    with rendezvous(["127.0.0.1"], 1, time_limit=HANG) as address, ThreadPoolExecutor() as threads:
        receiving = threads.submit(lambda: {name: tensor.clone() for name, tensor in receive(address, 1)})
        weights.source.send(address)
        sent = receiving.result(HANG)
    expected = received(weights)
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in expected.items())


async def test_user_errors_and_non_finite_losses_keep_their_types(make):
    backend, items = make(), some_items()
    with pytest.raises(ValueError, match=r"the model 'ref': pass others=.* \(rank 0, logprobs\)"):
        await backend.logprobs(split(items, 3), "ref")
    pair = tuple(row for item in items[:2] for row in item)
    bad = tuple(replace(row, streams={"ref_logprob": np.where(row.mask, np.float32("nan"), 0.0)}) for row in pair)
    with pytest.raises(NonFiniteError, match="rank [01], add_gradients: the loss is not finite") as caught:
        await backend.forward_backward(split([bad], 1), algorithm("dpo"), count_units([bad]))
    assert [row for batch in caught.value.batches for row in batch.ids] == ["row0", "row1"], "the suspects"
    with pytest.raises(ValueError, match="cannot be pickled"):
        backend.ranks.call(1, "logprobs", (each for each in ()))
    await backend.logprobs(split(items, 3))


async def test_the_seed_of_a_run_fixes_the_dropout_of_every_actor(ray_ranks, tmp_path):
    from oxrl.backends.distributed.ray import create_ray_backend

    worker = worker_with_dropout(tmp_path, backend="ray", sharding="fsdp")
    await assert_equal_when_repeated(partial(create_ray_backend, ray_ranks, worker))


@pytest.fixture
def start_workers(ray_here):
    """Start ranks on half of each bundle, as next to a colocated engine."""
    from oxrl.backends.distributed.ray import RayRanks
    from oxrl.machine.ray_cluster import reserve

    bundles, started = reserve(2, time_limit=HANG), []

    def start(**limits):
        started.append(RayRanks(2, bundles=bundles, share=0.5, **limits))
        return started[-1], started[-1].start(CollectiveWorker)

    yield start
    for ranks in started:
        ranks.stop()
    bundles.free()


def test_actors_have_the_priority_of_their_driver(ray_ranks):
    assert ray_ranks.call(ray_ranks.start(CollectiveWorker), "niceness") == [os.nice(0)] * 2


def wait_until_gone(pids):
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"{pids} have ended")


def test_a_rank_that_died_is_named_immediately_and_nothing_runs_after_it(start_workers):
    """No time limit expires: they are longer than the test may take."""
    ranks, number = start_workers(time_limit=HANG, call_limit=HANG)
    assert ranks.call(number, "all_reduce") == [2, 2]
    pids = ranks.call(number, "process_id")
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1, all_reduce: .*its actor failed"):
        ranks.call(number, "all_reduce")
    with pytest.raises(RankError, match="all_reduce cannot run after a failure: rank 1"):
        ranks.call(number, "all_reduce")
    ranks.stop()
    wait_until_gone(pids)


def test_a_rank_that_hangs_ends_the_wait_with_its_name(start_workers):
    ranks, number = start_workers(time_limit=HANG, call_limit=HANG)
    pids = ranks.call(number, "process_id")
    os.kill(pids[1], signal.SIGSTOP)
    ranks.time_limit = EXPIRES
    with pytest.raises(RankError, match=r"process_id: no reply from rank 1 within \d+ s"):
        ranks.call(number, "process_id")
    ranks.stop()
    wait_until_gone(pids)


def test_more_than_the_cluster_has_is_refused(ray_here):
    from oxrl.machine.ray_cluster import reserve

    with pytest.raises(ValueError, match="50 processes with 1 CPU each .* lower run.training_gpus"):
        reserve(50, time_limit=EXPIRES)


DRIVER = """
import sys
from oxrl.backends.distributed.ray import RayRanks
from oxrl.machine.ray_cluster import ray_cluster
from tests.backends.collective_worker import CollectiveWorker

with ray_cluster(sys.argv[1]):
    ranks = RayRanks(2)
    print(*ranks.call(ranks.start(CollectiveWorker), "process_id"), flush=True)
    sys.stdin.read()
"""


def test_a_driver_that_was_killed_leaves_no_actor_on_its_cluster(ray_here):
    import ray

    address = ray.get_runtime_context().gcs_address
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", DRIVER, address], **pipes) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    wait_until_gone(pids)

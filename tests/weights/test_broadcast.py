"""Weights over the network arrive bit for bit, on the given interface only, and lost members end the wait."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from oxrl.weights.broadcast import TransferError, receive, rendezvous, send
from tests.waiting import EXPIRES, HANG, wait_until

LOOPBACK = ["127.0.0.1"]
BUCKET = 2**20


def some_weights():
    torch.manual_seed(0)
    return {
        "a": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "turned": torch.randn(4, 6).t(),
        "one": torch.tensor(3.5, dtype=torch.float64),
        "whole": torch.arange(5),
        "large": torch.randn(BUCKET),  # four bytes each: more than a bucket holds
        "last": torch.randn(2),
    }


@pytest.fixture
def beside():
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def connections():
    return set(psutil.Process().net_connections(kind="inet"))


def received_by(address, rank):
    return {name: tensor.clone() for name, tensor in receive(address, rank)}


def test_every_receiver_gets_all_of_it_bit_for_bit(beside):
    weights = some_weights()
    with rendezvous(LOOPBACK, 2, time_limit=HANG) as address:
        receivers = [beside(received_by, address, rank) for rank in (1, 2)]
        send(weights.items(), address, BUCKET)
        received = [each.result(HANG) for each in receivers]
    for found in received:
        assert list(found) == list(weights)
        for name, tensor in weights.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_it_listens_only_on_the_interface_of_the_receivers(beside):
    before = connections()
    with rendezvous(LOOPBACK, 1, time_limit=HANG) as address:
        sending = beside(send, some_weights().items(), address)
        receiving = receive(address, 1)
        next(receiving)
        opened = connections() - before
        assert {each.laddr.ip for each in opened if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        assert len(list(receiving)) == len(some_weights()) - 1
        sending.result(HANG)


def test_the_address_is_the_one_on_the_route_to_remote_engines():
    """No packet is sent to find it, so an unused address suffices."""
    with rendezvous(["127.0.0.1", "192.0.2.1"], 1) as address:
        assert not address.host.startswith("127.")


DIES = """import json, os, sys
from oxrl.types import Rendezvous
from oxrl.weights.broadcast import receive
next(receive(Rendezvous(*json.loads(sys.argv[1])), 1))
os._exit(9)
"""


@pytest.mark.engine
def test_a_receiver_that_dies_ends_the_transfer_immediately():
    weights = {f"weight {number}": torch.zeros(2**23) for number in range(4)}  # 32 MiB each
    with rendezvous(LOOPBACK, 1, time_limit=HANG) as address:
        child = subprocess.Popen([sys.executable, "-c", DIES, json.dumps(address)])
        with pytest.raises(TransferError, match="peer"):
            send(weights.items(), address, BUCKET)
        assert child.wait(HANG) == 9


@pytest.mark.parametrize("rank", [0, 1])
def test_a_member_that_waits_when_the_rendezvous_closes_fails(rank, beside):
    before = connections()
    with rendezvous(LOOPBACK, 1, time_limit=HANG) as address:
        waiting = beside(send, some_weights().items(), address) if rank == 0 else beside(received_by, address, rank)
        wait_until(
            lambda: address.port in {each.raddr.port for each in connections() - before if each.raddr}, "it waits"
        )
        assert waiting.running()
    assert isinstance(waiting.exception(HANG), TransferError)


def test_a_missing_receiver_ends_the_wait_with_the_time_limit():
    with rendezvous(LOOPBACK, 1, time_limit=EXPIRES) as address, pytest.raises(TransferError, match=r"(?i)time"):
        send(some_weights().items(), address)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this build of torch has NCCL")
def test_missing_nccl_is_reported():
    with rendezvous(LOOPBACK, 1, "nccl", time_limit=HANG) as address, pytest.raises(ValueError, match="gloo"):
        send(some_weights().items(), address)

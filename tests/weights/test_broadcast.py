"""Weights over the network: what is sent arrives to the bit, nobody listens to strangers or waits for the dead."""

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


def received_by(place, rank):
    return {name: tensor.clone() for name, tensor in receive(place, rank)}


def test_every_receiver_gets_all_of_it_bit_for_bit(beside):
    weights = some_weights()
    with rendezvous(LOOPBACK, 2, time_limit=HANG) as place:
        receivers = [beside(received_by, place, rank) for rank in (1, 2)]
        send(weights.items(), place, BUCKET)
        received = [each.result(HANG) for each in receivers]
    for found in received:
        assert list(found) == list(weights)
        for name, tensor in weights.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_it_can_be_reached_only_where_the_receivers_are(beside):
    before = connections()
    with rendezvous(LOOPBACK, 1, time_limit=HANG) as place:
        sending = beside(send, some_weights().items(), place)
        receiving = receive(place, 1)
        next(receiving)
        opened = connections() - before
        assert {each.laddr.ip for each in opened if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        assert len(list(receiving)) == len(some_weights()) - 1
        sending.result(HANG)


def test_it_meets_at_the_address_that_leads_to_engines_elsewhere():
    """Nothing is sent to find that out, so an address of nobody will do."""
    with rendezvous(["127.0.0.1", "192.0.2.1"], 1) as place:
        assert not place.host.startswith("127.")


DIES = """import json, os, sys
from oxrl.weights.broadcast import Meeting, receive
next(receive(Meeting(*json.loads(sys.argv[1])), 1))
os._exit(9)
"""


def test_a_receiver_that_dies_ends_the_sending_at_once():
    weights = {f"weight {number}": torch.zeros(2**23) for number in range(4)}  # 32 MiB each
    with rendezvous(LOOPBACK, 1, time_limit=HANG) as place:
        child = subprocess.Popen([sys.executable, "-c", DIES, json.dumps(place)])
        with pytest.raises(TransferError, match="peer"):
            send(weights.items(), place, BUCKET)
        assert child.wait(HANG) == 9


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_in_a_meeting_that_closes_does_not_wait_on(rank, beside):
    before = connections()
    with rendezvous(LOOPBACK, 1, time_limit=HANG) as place:
        waiting = beside(send, some_weights().items(), place) if rank == 0 else beside(received_by, place, rank)
        wait_until(lambda: place.port in {each.raddr.port for each in connections() - before if each.raddr}, "it waits")
        assert waiting.running()
    assert isinstance(waiting.exception(HANG), TransferError)


def test_a_meeting_to_which_the_receiver_does_not_come_has_an_end():
    with rendezvous(LOOPBACK, 1, time_limit=EXPIRES) as place, pytest.raises(TransferError, match=r"(?i)time"):
        send(some_weights().items(), place)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this build of torch has NCCL")
def test_nccl_that_is_not_there_is_told():
    with rendezvous(LOOPBACK, 1, "nccl", time_limit=HANG) as place, pytest.raises(ValueError, match="gloo"):
        send(some_weights().items(), place)

"""Weights sent over the network to engines elsewhere: one process group for each sending, of sender and receivers.

The process that runs the loop opens a `rendezvous` at the address by which it reaches the engines. The trainer's rank 0
and all of the engines' workers connect to it; rank 0 sends one bucket after the other, each once for all receivers. The
format is JSON and bytes, no pickle. There is no authentication: use it on trusted networks only.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from oxrl.types import Rendezvous
from oxrl.weights.buckets import BUCKET_BYTES, Slot, flattened, grouped

if TYPE_CHECKING:
    from torch import Tensor

_SENDER = 0
_REACHED = timedelta(seconds=30)  # a meeting that is over is not waited for


class TransferError(ConnectionError):
    """Members of a group did not meet, or lost each other: no fault of the sender or of its peers in training."""


@contextmanager
def rendezvous(
    hosts: Sequence[str], receivers: int, backend: str = "gloo", time_limit: float = 600.0
) -> Iterator[Rendezvous]:
    """Open while the block lasts, at the address of this machine that leads to `hosts`; who waits in it later fails."""
    host = _own_address(hosts)
    listener = socket.create_server((host, 0), family=_family(host))
    port = listener.getsockname()[1]
    store = _torch().TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=time_limit),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # by itself it would listen on all addresses
    )
    try:
        yield Rendezvous(host, port, 1 + receivers, backend, time_limit)
    finally:
        del store


def send(weights: Iterable[tuple[str, Tensor]], place: Rendezvous, bucket_bytes: int = BUCKET_BYTES) -> None:
    """To all receivers at once, bucket after bucket; answers when they have all."""
    import torch

    with closing(_Group(place, _SENDER)) as group:
        for tensors in grouped(weights, bucket_bytes):
            slots, flat = flattened(tensors, group.device)
            header = torch.frombuffer(bytearray(json.dumps(slots).encode()), dtype=torch.uint8)
            group.broadcast(torch.tensor([len(header), len(flat)]))
            group.broadcast(header)
            group.broadcast(flat)
        group.broadcast(torch.tensor([0, 0]))


def receive(place: Rendezvous, rank: int) -> Iterator[tuple[str, Tensor]]:
    """What the sender sends, by name, on the device that the group talks from; `rank` counts the receivers from 1."""
    import torch

    with closing(_Group(place, rank)) as group:
        while True:
            described, size = group.broadcast(torch.zeros(2, dtype=torch.int64, device=group.device)).tolist()
            if not described:
                return
            header = group.broadcast(torch.zeros(described, dtype=torch.uint8, device=group.device))
            flat = group.broadcast(torch.zeros(size, dtype=torch.uint8, device=group.device))
            for name, dtype, shape, start in json.loads(bytes(header.tolist())):
                slot = Slot(name, dtype, tuple(shape), start)
                yield name, slot.shaped(flat[slot.start : slot.end])


class _Group:
    """A process group beside whatever group a process is in already."""

    def __init__(self, place: Rendezvous, rank: int) -> None:
        import torch

        self.device = torch.device("cuda" if place.backend == "nccl" else "cpu")
        self._place = place
        with self._in_words():
            limit = timedelta(seconds=place.time_limit)
            soon = min(limit, _REACHED)
            found = _torch().TCPStore(place.host, place.port, is_master=False, timeout=soon)
            found.set_timeout(limit)
            store = _torch().PrefixStore("weights", found)
            if place.backend == "nccl":
                self._group = _nccl(store, rank, place.size, limit)
            else:
                self._group = _gloo(store, rank, place.size, limit, _own_address([place.host]))

    def broadcast(self, tensor: Tensor) -> Tensor:
        here = tensor.to(self.device)
        with self._in_words():
            self._group.broadcast(here, _SENDER).wait()
        return here

    def close(self) -> None:
        if self._place.backend == "nccl":  # the other one goes with its last reference
            self._group.shutdown()

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            where = f"{self._place.size} processes that meet at {self._place.host}:{self._place.port}"
            raise TransferError(f"{where}: {str(error).splitlines()[0]}") from error


def _gloo(store: Any, rank: int, size: int, limit: timedelta, address: str) -> Any:
    gloo = _torch().ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = limit
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, limit: timedelta) -> Any:
    if not _torch().is_nccl_available():
        raise ValueError("transfer: nccl is between GPUs, and this build of torch has no NCCL: set gloo, or files")
    nccl = _torch().ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = limit
    return nccl(store, rank, size, options)


def _torch() -> Any:
    """Its groups and stores, which its types leave out."""
    from torch import distributed

    return distributed


def _own_address(hosts: Sequence[str]) -> str:
    """Of the network card that leads to them all; loopback only if it leads to each."""
    found = [_address_towards(host) for host in hosts]
    return next((address for address in found if not _is_loopback(address)), found[0])


def _address_towards(host: str) -> str:
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asked:
        asked.connect(address)  # nothing is sent
        return str(asked.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET

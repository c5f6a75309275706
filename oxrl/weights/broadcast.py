"""Weights broadcast over the network to remote engines: one process group of sender and receivers per transfer.

The process that runs the loop opens a `rendezvous` on the network interface that reaches the engines. The trainer's
rank 0 and all workers of the engines connect to it; rank 0 broadcasts one bucket after the other. The format is JSON
and bytes, no pickle. There is no authentication: use it on trusted networks only.
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
_CONNECT_LIMIT = timedelta(seconds=30)  # to connect to the store; a rendezvous that has closed fails soon


class TransferError(ConnectionError):
    """Members of a group did not connect, or lost the connection: not an error of the sender or of training ranks."""


@contextmanager
def rendezvous(
    hosts: Sequence[str], receivers: int, backend: str = "gloo", time_limit: float = 600.0
) -> Iterator[Rendezvous]:
    """Open a rendezvous inside the block, at this machine's address on the route to `hosts`; then all waits fail."""
    host = _own_address(hosts)
    store = listening_store(host, time_limit)
    try:
        yield Rendezvous(host, store.port, 1 + receivers, backend, time_limit)
    finally:
        del store


def listening_store(host: str, time_limit: float) -> Any:
    """Create a store of torch that listens at a free port of this address only, not on all interfaces."""
    listener = socket.create_server((host, 0), family=_family(host))
    return _torch().TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=time_limit),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def send(weights: Iterable[tuple[str, Tensor]], address: Rendezvous, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Broadcast weights to all receivers, bucket by bucket; return when all have been received."""
    import torch

    with closing(_Group(address, _SENDER)) as group:
        for tensors in grouped(weights, bucket_bytes):
            slots, flat = flattened(tensors, group.device)
            header = torch.frombuffer(bytearray(json.dumps(slots).encode()), dtype=torch.uint8)
            group.broadcast(torch.tensor([len(header), len(flat)]))
            group.broadcast(header)
            group.broadcast(flat)
        group.broadcast(torch.tensor([0, 0]))


def receive(address: Rendezvous, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the sender by name, on the device of the group; `rank` counts the receivers from 1."""
    import torch

    with closing(_Group(address, rank)) as group:
        while True:
            header_bytes, size = group.broadcast(torch.zeros(2, dtype=torch.int64, device=group.device)).tolist()
            if not header_bytes:
                return
            header = group.broadcast(torch.zeros(header_bytes, dtype=torch.uint8, device=group.device))
            flat = group.broadcast(torch.zeros(size, dtype=torch.uint8, device=group.device))
            for name, dtype, shape, start in json.loads(bytes(header.tolist())):
                slot = Slot(name, dtype, tuple(shape), start)
                yield name, slot.shaped(flat[slot.start : slot.end])


class _Group:
    """A process group that is independent of the default group of the process."""

    def __init__(self, address: Rendezvous, rank: int) -> None:
        import torch

        self.device = torch.device("cuda" if address.backend == "nccl" else "cpu")
        self._address = address
        with self._transfer_errors():
            limit = timedelta(seconds=address.time_limit)
            connect_limit = min(limit, _CONNECT_LIMIT)
            tcp_store = _torch().TCPStore(address.host, address.port, is_master=False, timeout=connect_limit)
            tcp_store.set_timeout(limit)
            store = _torch().PrefixStore("weights", tcp_store)
            if address.backend == "nccl":
                self._group = _nccl(store, rank, address.size, limit)
            else:
                self._group = _gloo(store, rank, address.size, limit, _own_address([address.host]))

    def broadcast(self, tensor: Tensor) -> Tensor:
        on_device = tensor.to(self.device)
        with self._transfer_errors():
            self._group.broadcast(on_device, _SENDER).wait()
        return on_device

    def close(self) -> None:
        if self._address.backend == "nccl":  # gloo shuts down with its last reference
            self._group.shutdown()

    @contextmanager
    def _transfer_errors(self) -> Iterator[None]:
        """Raise torch's errors inside the block as `TransferError` with the address."""
        try:
            yield
        except RuntimeError as error:
            group = f"weight transfer of {self._address.size} processes at {self._address.host}:{self._address.port}"
            raise TransferError(f"{group}: {str(error).splitlines()[0]}") from error


def _gloo(store: Any, rank: int, size: int, limit: timedelta, address: str) -> Any:
    gloo = _torch().ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = limit
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, limit: timedelta) -> Any:
    if not _torch().is_nccl_available():
        raise ValueError(
            "inference_engine.transfer: nccl needs GPUs, and this build of torch has no NCCL: set gloo or files"
        )
    nccl = _torch().ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = limit
    return nccl(store, rank, size, options)


def _torch() -> Any:
    """Return `torch.distributed`, untyped: its stubs lack groups and stores."""
    from torch import distributed

    return distributed


def _own_address(hosts: Sequence[str]) -> str:
    """Return this machine's address on the route to all hosts; loopback only if it reaches each of them."""
    found = [_local_address(host) for host in hosts]
    return next((address for address in found if not _is_loopback(address)), found[0])


def _local_address(host: str) -> str:
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # UDP: nothing is sent
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET

"""A Ray cluster to put processes on: an existing one, or one on this machine for as long as it is needed; and places.

A place holds one process, with a GPU each where the cluster has any, else with a core. Who runs there is the affair of
`backends.ray` and `generators.ray`, which share the places of one device when they are colocated.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

PLACE_LIMIT = 300.0  # seconds until the cluster has found room
LOCAL_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what this process may see of the devices, its actors may
    "RAY_worker_niceness": "0",  # by default 15: beside any other work, training would stand still
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as on those systems, a local cluster listens on loopback alone
}


@contextmanager
def ray_cluster(address: str | None = None, *, processes: int = 1, **options: Any) -> Iterator[None]:
    """Inside, this process is the driver of a Ray cluster; a local one has room for `processes` and ends with it.

    Enter it in a thread that outlives it, the main one best: when the thread that started it ends, Linux ends a local
    cluster with it, so that a driver that was killed leaves nothing behind. One that was entered before is used as it
    is. `options` go to `ray.init`.
    """
    if address is None:
        for name, value in LOCAL_SETTINGS.items():  # Ray reads them when it is imported
            os.environ.setdefault(name, value)
    ray = import_ray()
    if ray.is_initialized():
        yield
        return
    if address is None:
        options = {
            "address": "local",
            "num_cpus": max(processes, os.cpu_count() or 1),
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            **options,
        }
    else:
        options = {"address": address, **options}
    at_the_end = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(configure_logging=False, log_to_driver=False, **options)
    except ConnectionError as error:
        raise ValueError(
            f"there is no Ray cluster at {address!r} ({error}): start one, or leave ray_address out"
        ) from error
    handles = threading.current_thread() is threading.main_thread()
    if handles:
        # As an interrupt, while nobody else listens for it: Ray's own handler aborts.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        ray.shutdown()
        if handles:
            signal.signal(signal.SIGTERM, at_the_end)


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ValueError("Ray is not installed: pip install 'oxrl[ray]'") from error
    return ray


class Process(NamedTuple):
    """Where an actor runs."""

    node: str
    pid: int

    @classmethod
    def current(cls) -> Process:
        return cls(str(import_ray().get_runtime_context().get_node_id()), os.getpid())


def end_actor(actor: Any, process: Process | None = None) -> None:
    """At once, whatever it does. Ray asks a process to end; one on this machine that is stopped does not hear that."""
    ray = import_ray()
    if not ray.is_initialized():  # it ended with the cluster
        return
    ray.kill(actor, no_restart=True)
    if process is not None and process.node == ray.get_runtime_context().get_node_id():
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"ray::"):  # and not somebody else by now
                os.kill(process.pid, signal.SIGKILL)


class Bundles:
    """`reserve(2)`: places for two processes. `options` are what an actor is made with to get one, or a share of it."""

    def __init__(self, group: Any, bundles: Sequence[dict[str, float]]) -> None:
        self._group, self._bundles = group, list(bundles)

    def __len__(self) -> int:
        return len(self._bundles)

    @property
    def on_gpus(self) -> bool:
        return "GPU" in self._bundles[0]

    def options(self, index: int, share: float = 1.0) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundles[index]
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        options = {"num_cpus": bundle["CPU"] * share, "scheduling_strategy": strategy}
        return options | ({"num_gpus": bundle["GPU"] * share} if self.on_gpus else {})

    def free(self) -> None:
        from ray.util import remove_placement_group

        remove_placement_group(self._group)


def reserve(count: int, *, gpus_each: int = 1, time_limit: float = PLACE_LIMIT) -> Bundles:
    """Places on as few machines as possible; on a cluster without GPUs a core each. What does not fit is refused."""
    from ray.util import placement_group, remove_placement_group

    ray = import_ray()
    everything = ray.cluster_resources()
    bundle: dict[str, float] = {"CPU": 1.0} | ({"GPU": float(gpus_each)} if everything.get("GPU") else {})
    group = placement_group([dict(bundle) for _ in range(count)], strategy="PACK")
    if not group.wait(time_limit):
        free = {name: ray.available_resources().get(name, 0.0) for name in bundle}
        remove_placement_group(group)
        raise ValueError(
            f"the Ray cluster found no room for {count} processes with {_told(bundle)} each within {time_limit:g} s "
            f"({_told(free)} are free): lower run.training_gpus or run.rollout_gpus, or enlarge the cluster"
        )
    return Bundles(group, [bundle] * count)


def _told(resources: dict[str, float]) -> str:
    return " and ".join(f"{number:g} {name}" for name, number in resources.items())

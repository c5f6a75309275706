"""A Ray cluster for processes: an existing one, or a temporary one on this machine; and bundles of its resources.

A bundle is for one process, with a GPU if the cluster has any, else with a core. `backends.distributed.ray` and
`generators.ray` start their actors in bundles, and share them when they are colocated.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.machine.packages import missing_message

logger = logging.getLogger(__name__)

RESERVE_LIMIT = 300.0  # seconds until the cluster has free resources
LOCAL_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # actors see the devices that this process sees
    "RAY_worker_niceness": "0",  # by default 15: beside any other load, training would stall
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as on those systems, a local cluster listens on loopback only
}


@contextmanager
def ray_cluster(address: str | None = None, *, processes: int = 1, **options: Any) -> Iterator[None]:
    """Inside, this process is the driver of a Ray cluster; a local one has cores for `processes` and ends with it.

    Enter it in a thread that outlives it, preferably the main thread: when the thread that started a local cluster
    ends, Linux ends the cluster, so that a killed driver leaves nothing behind. A cluster that this process is already
    connected to is reused. `options` go to `ray.init`.
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
    previous = signal.getsignal(signal.SIGTERM)
    try:
        with _loopback_only(ray) if address is None else nullcontext():
            ray.init(configure_logging=False, log_to_driver=False, **options)
    except ConnectionError as error:
        raise ValueError(f"no Ray cluster at {address!r} ({error}): start one, or remove ray_address") from error
    handles = threading.current_thread() is threading.main_thread()
    if handles:
        # Handle it as an interrupt: Ray's own handler aborts the process.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        ray.shutdown()
        if handles:
            signal.signal(signal.SIGTERM, previous)


@contextmanager
def _loopback_only(ray: Any) -> Iterator[None]:
    """What LOCAL_SETTINGS say of the network, for a Ray that a script or vLLM imported before they were set."""
    constants = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ValueError(missing_message("ray")) from error
    return ray


class Process(NamedTuple):
    """The node and process id of an actor."""

    node: str
    pid: int

    @classmethod
    def current(cls) -> Process:
        return cls(str(import_ray().get_runtime_context().get_node_id()), os.getpid())


def end_actor(actor: Any, process: Process | None = None) -> None:
    """Kill an actor. Ray only requests its end, which a stopped process ignores: on this machine, send SIGKILL too."""
    ray = import_ray()
    if not ray.is_initialized():  # it ended with the cluster
        return
    ray.kill(actor, no_restart=True)
    if process is not None and process.node == ray.get_runtime_context().get_node_id():
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"ray::"):  # and not another process by now
                os.kill(process.pid, signal.SIGKILL)


class Bundles:
    """`reserve(2)`: bundles for two processes. `options` are those of an actor that uses one, or a share of it."""

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


def reserve(count: int, *, gpus_each: int = 1, time_limit: float = RESERVE_LIMIT) -> Bundles:
    """Reserve bundles on as few machines as possible, of a core each if the cluster has no GPUs; raise if none fit."""
    from ray.util import placement_group, remove_placement_group

    ray = import_ray()
    resources = ray.cluster_resources()
    bundle: dict[str, float] = {"CPU": 1.0} | ({"GPU": float(gpus_each)} if resources.get("GPU") else {})
    group = placement_group([dict(bundle) for _ in range(count)], strategy="PACK")
    if not group.wait(time_limit):
        free = {name: ray.available_resources().get(name, 0.0) for name in bundle}
        remove_placement_group(group)
        raise ValueError(
            f"no resources on the Ray cluster for {count} processes with {_describe(bundle)} each in {time_limit:g} s "
            f"({_describe(free)} are free): lower run.training_gpus or run.rollout_gpus, or enlarge the cluster"
        )
    return Bundles(group, [bundle] * count)


def _describe(resources: dict[str, float]) -> str:
    return " and ".join(f"{number:g} {name}" for name, number in resources.items())

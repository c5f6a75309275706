"""Devices, cores and memory of this machine, within the limits of this process."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple


class Device(NamedTuple):
    """`Device("cuda:0", "NVIDIA H200", 150_000_000_000, 149_000_000_000, bf16=True)`; memory in bytes."""

    device: str
    name: str
    memory: int
    free: int
    bf16: bool


class Hardware(NamedTuple):
    """`detect_hardware().devices[0]` is the device of a single-device run: the first GPU, else the CPU."""

    devices: tuple[Device, ...]
    cores: int
    memory: int
    free: int

    @property
    def gpus(self) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.device != "cpu")


def set_up_process() -> None:
    """Set environment variables that libraries read once, at first use; what the user has set is kept.

    Threads that spin while they wait starve each other on a machine with other load (measured: a step takes seven times
    as long beside one busy process, less than twice with threads that sleep). Segments of GPU memory that cannot grow
    fragment with rows of many lengths (measured: 118 GiB reserved to hold 63).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, which transformers imports, logs a warning


def detect_hardware() -> Hardware:
    """Read-only; imports torch."""
    import torch

    memory, free = _memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = []
    for index in range(torch.cuda.device_count()):
        free_bytes, total = torch.cuda.mem_get_info(index)
        bf16 = torch.cuda.get_device_capability(index) >= (8, 0)
        gpus.append(Device(f"cuda:{index}", torch.cuda.get_device_name(index), total, free_bytes, bf16))
    processor = Device("cpu", processor_name(), memory, free, bf16=False)  # supported, but slow
    return Hardware(tuple(gpus) or (processor,), cores, memory, free)


def _memory() -> tuple[int, int]:
    """Return total and free memory within the cgroup's limit: a container may have less than the machine.

    Memory of this process counts as free, because estimates of what fits include it.
    """
    file = Path("/proc/meminfo")
    if not file.exists():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
    total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    free += _own_memory()
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and limit < total:
        return limit, min(free, limit - (used or 0) + _own_memory())
    return total, min(free, total)


def _own_memory() -> int:
    """Return the bytes of anonymous memory: those of files count as free anyway."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024 if "RssAnon" in lines else 0


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.exists() else ""
    return int(text) if text.isdigit() else None


def processor_name() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())

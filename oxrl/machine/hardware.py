"""What this machine has to train with: devices, cores and memory, as the limits set on this process allow."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple


class Device(NamedTuple):
    """`Device("cuda:0", "NVIDIA H200", 150_000_000_000, 149_000_000_000, bf16=True)`; memory in bytes."""

    place: str
    name: str
    memory: int
    free: int
    bf16: bool


class Hardware(NamedTuple):
    """`detect_hardware().devices[0]` is where a run on one device goes: the first GPU, else the processor."""

    devices: tuple[Device, ...]
    cores: int
    memory: int
    free: int

    @property
    def gpus(self) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.place != "cpu")


def set_up_process() -> None:
    """Settings that libraries read once, when they are first used; what the user has set stays.

    Threads that spin while they wait starve each other as soon as the machine does anything else (measured: a step
    takes seven times as long beside one busy process, against less than twice with threads that sleep). Blocks of GPU
    memory that cannot grow leave gaps between rows of many lengths (measured: 118 GiB reserved to hold 63).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, where transformers finds it, remarks on it aloud


def detect_hardware() -> Hardware:
    """Looks, and changes nothing; imports torch."""
    import torch

    memory, free = _memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = []
    for index in range(torch.cuda.device_count()):
        unused, whole = torch.cuda.mem_get_info(index)
        bf16 = torch.cuda.get_device_capability(index) >= (8, 0)
        gpus.append(Device(f"cuda:{index}", torch.cuda.get_device_name(index), whole, unused, bf16))
    processor = Device("cpu", processor_name(), memory, free, bf16=False)  # it has bf16, but slowly
    return Hardware(tuple(gpus) or (processor,), cores, memory, free)


def _memory() -> tuple[int, int]:
    """Whole and free memory of this process's share of the machine: a container may have less than there is.

    What this process holds itself counts as free: whoever asks what fits counts it in.
    """
    facts = Path("/proc/meminfo")
    if not facts.exists():
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return whole, whole
    lines = dict(line.split(":", 1) for line in facts.read_text().splitlines())
    whole, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    free += _own()
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and limit < whole:
        return limit, min(free, limit - (used or 0) + _own())
    return whole, min(free, whole)


def _own() -> int:
    """Bytes that nobody else could have: not those of files, which count as free anyway."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024 if "RssAnon" in lines else 0


def _number(file: Path) -> int | None:
    said = file.read_text().strip() if file.exists() else ""
    return int(said) if said.isdigit() else None


def processor_name() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())

import os

import torch

from oxrl.machine.hardware import detect_hardware


def test_a_machine_has_a_device_with_memory_within_what_it_has():
    found = detect_hardware()
    assert len(found.gpus) == torch.cuda.device_count()
    assert all(0 < device.free <= device.memory for device in found.devices)
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.free <= found.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

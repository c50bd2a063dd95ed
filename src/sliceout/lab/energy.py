"""Energy that a GPU has used, by its own counter (NVML): through ``nvidia-ml-py``, or the driver's library itself.

The counter is of the whole GPU, in millijoules, and moves every few dozen milliseconds: differences over seconds are
good, differences over single steps are not.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch


def meter(device: torch.device) -> Callable[[], float] | None:
    """A function that returns the joules which ``device`` has used so far; ``None`` where nothing counts them."""
    if device.type != "cuda":
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    for find in (_by_package, _by_library):
        read = find(uuid)
        if read is not None:
            return read
    return None


def _by_package(uuid: str) -> Callable[[], float] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # not installed, no driver, or a GPU that does not count: each has errors of its own
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000


def _by_library(uuid: str) -> Callable[[], float] | None:
    library = _library()
    if library is None:
        return None
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None

    def read() -> float:
        library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return millijoules.value / 1000

    failed = library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
    return None if failed else read


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library

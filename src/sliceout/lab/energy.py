"""Energy that a GPU has used, by its own counter (NVML): through ``nvidia-ml-py``, or the driver's library itself.

The counter is of the whole GPU, in millijoules, and moves every few dozen milliseconds: differences over seconds are
good, differences over single steps are not.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

SECONDS = 2.0
"""Over less than this the counter's own steps are too coarse: power came out above what the GPU can draw."""


def of_a_step(row: Mapping[str, Any]) -> float | None:
    """Joules of a step by a benchmark's row; ``None`` if none were counted, or not for long enough."""
    seconds = (row.get("repeats") or 0) * (row.get("ms_mean") or row["ms"]) / 1000
    return row.get("energy_joules_per_step") if seconds >= SECONDS else None


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

"""Energy that a GPU has used, by its own counter (NVML), where ``nvidia-ml-py`` is installed.

The counter is of the whole GPU, in millijoules, and moves every few dozen milliseconds: differences over seconds are
good, differences over single steps are not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def meter(device: torch.device) -> Callable[[], float] | None:
    """A function that returns the joules which ``device`` has used so far; ``None`` where nothing counts them."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # not installed, no driver, or a GPU that does not count: each has errors of its own
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000

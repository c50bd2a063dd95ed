"""How much memory a training step needs at its peak, measured and not estimated, on the GPU and on the CPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.optim import Optimizer


def peak_growth(step: Callable[[], object], device: torch.device) -> int:
    """By how many bytes the live tensors on ``device`` grow, at most, while ``step()`` runs.

    On CUDA the caching allocator keeps this number. On the CPU the profiler reports every allocation and every release
    that goes through torch's allocator, temporaries inside a kernel included, and the running sum has the peak.

    Example:
        >>> def step():
        ...     a = torch.empty(1000, dtype=torch.uint8)
        ...     b = a.clone()
        ...     del a
        ...     return b.clone()
        >>> peak_growth(step, torch.device("cpu"))
        2000
    """
    gc.collect()  # otherwise Python may release older garbage during the step, which would hide some of its growth
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return max(0, *accumulate(_cpu_changes(step), initial=0))


def persistent(model: nn.Module, optimizer: Optimizer) -> int:
    """Bytes that live from step to step: parameters, buffers and the optimizer's state."""
    state = (v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor))
    return sum(t.untyped_storage().nbytes() for t in distinct((*model.parameters(), *model.buffers(), *state)))


def peak_of_step(model: nn.Module, optimizer: Optimizer, step: Callable[[], object]) -> int:
    """The most memory that training ``model`` takes during ``step()``: what persists, and what the step adds to it.

    Call it after a first step, when the optimizer has made its state. Gradients are released first, so that they count
    as part of the step.
    """
    optimizer.zero_grad(set_to_none=True)
    device = next(model.parameters()).device
    return persistent(model, optimizer) + peak_growth(step, device)


def _cpu_changes(step: Callable[[], object]) -> list[int]:
    """Every allocation (positive) and release (negative) on the CPU during ``step()``, in bytes, in order."""
    quiet = "KINETO_LOG_LEVEL"  # read when profiling first starts; otherwise it writes two lines into the progress bar
    unset = quiet not in os.environ
    if unset:
        os.environ[quiet] = "99"
    try:
        with profile(profile_memory=True) as profiler:
            step()
    finally:
        if unset:
            del os.environ[quiet]
    results: Any = profiler.kineto_results
    found = [e for e in results.events() if e.name() == "[memory]" and e.device_type() == torch.profiler.DeviceType.CPU]
    return [e.nbytes() for e in sorted(found, key=lambda e: e.start_ns())]


def steady_peaks(step: Callable[[], object], steps: int) -> dict[str, int]:
    """What the process needs on its GPU to go on: caches of the warm-up (trials, captures) are released first.

    ``max_reserved_process`` is what it held until then at most.
    """
    torch.cuda.synchronize()
    process = torch.cuda.max_memory_reserved()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return {
        "max_allocated": torch.cuda.max_memory_allocated(),
        "max_reserved": torch.cuda.max_memory_reserved(),
        "max_reserved_process": process,
    }


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """One tensor for each piece of memory: tied parameters count once."""
    return list({t.untyped_storage().data_ptr(): t for t in tensors}.values())

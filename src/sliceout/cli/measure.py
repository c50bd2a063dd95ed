"""Time, memory and energy of a training step that is repeated."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from ..capture import free_workspaces
from .memory import peak_of_step, steady_peaks
from .work import Work, step_of

WARMUP = 10
"""Steps on a GPU before anything is measured."""
STEADY = 3
"""Steps whose memory counts, after the warm-up."""


def measure(work: Work, seconds: float, meter: Callable[[], float] | None = None) -> dict[str, Any]:
    """Time and memory of the training step of ``work``, and its energy where ``meter`` counts joules."""
    torch.backends.cudnn.benchmark = True
    step, device = step_of(work, work.case.batch), work.device
    found = steady_memory(step, work, work.case.batch)
    first = step_times(step, device, 5)
    each = max(min(int(1000 * seconds / 3 / max(statistics.median(first), 1e-3)), 2000), 4)
    before, start = meter() if meter else 0.0, time.perf_counter()
    times = [t for _ in range(3) for t in step_times(step, device, each)]
    wall, joules = time.perf_counter() - start, meter() - before if meter else None
    cuts = statistics.quantiles(times, n=10)
    return found | {
        "ms": statistics.median(times),
        "ms_p10": cuts[0],
        "ms_p90": cuts[-1],
        "ms_mean": 1000 * wall / len(times),
        "repeats": len(times),
        "energy_joules_per_step": None if joules is None else joules / len(times),
    }


def step_times(step: Callable[[], Any], device: torch.device, n: int) -> list[float]:
    """Milliseconds of ``n`` steps: on a GPU, between events on the device, without waiting in between."""
    if device.type != "cuda":
        out = []
        for _ in range(n):
            start = time.perf_counter()
            step()
            out.append(1000 * (time.perf_counter() - start))
        return out
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    step()  # the queue is not empty when the first event is recorded
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def steady_memory(step: Callable[[], Any], work: Work, batch: int) -> dict[str, Any]:
    """Peak memory of a step, after warming up."""
    if work.device.type == "cuda":
        for _ in range(WARMUP):
            step()
        return dict(steady_peaks(step, STEADY))
    step(), step()
    inputs = sum(t.nbytes for t in work.batch(2)) * batch // 2  # the batch counts too, as it does on a GPU
    # several steps, since a slice that wraps around takes more
    peak = inputs + max(peak_of_step(work.net, work.optimizer, step) for _ in range(STEADY))
    return {"max_allocated": peak, "max_reserved": None, "max_reserved_process": None}


def held(row: dict[str, Any]) -> int | None:
    """Bytes: what the caching allocator reserved on a GPU, the peak of live tensors elsewhere."""
    return row["max_reserved"] or row["max_allocated"]


def release(work: Work) -> None:
    """Free everything that steps have allocated, CUDA graphs and their gradients included."""
    if work.device.type == "cuda":
        torch.cuda.synchronize()  # a graph must not be freed while it is replayed
    work.optimizer.zero_grad(set_to_none=True)  # gradients may lie in the memory of a graph, and keep all of it
    if work.case.compiled:
        torch._dynamo.reset()  # and the graphs of reduce-overhead
    gc.collect()
    if work.device.type == "cuda":
        free_workspaces()
        torch.cuda.empty_cache()

"""One case in a process of its own: ``python -m sliceout.lab.bench.worker '{...}'`` prints lines of JSON.

It imports, builds and converts at once, prints ``{"ready": true}`` and waits for a line on its standard input: the
parent starts several workers side by side, but lets one at a time use the device. Then it warms up, compiles or
captures, measures memory and time, and prints its row. Whatever goes wrong becomes the row's ``error``.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from ...capture import free_workspaces
from .. import energy
from ..memory import peak_of_step, steady_peaks
from . import profile
from .cases import case_of
from .files import held
from .work import WARMUP, Work, build, set_precision, step_of, tune

STEADY = 3
"""Steps whose memory counts, after the warm-up."""
MOST = 16
"""How many times the baseline's batch is tried at most when a larger one is looked for."""


def main() -> None:
    task = json.loads(sys.argv[1])
    out = sys.stdout
    sys.stdout = sys.stderr  # compilers print: the parent reads JSON
    case, device = case_of(task["case"]), torch.device(task["device"])
    row: dict[str, Any] = {**case.as_dict(), "error": None}
    started = time.perf_counter()
    try:
        torch.set_num_threads(task["threads"])
        set_precision(case.precision)
        work = build(case, device)
        row["parameters"] = sum(p.numel() for p in work.net.parameters())
        timed = not any(task.get(k) for k in ("compile_only", "profile")) and task.get("within") is None
        row["flops"] = count_flops(work) if timed else None
        print(json.dumps({"ready": True}), file=out, flush=True)
        if not sys.stdin.readline():  # the parent is gone
            return
        torch.backends.cudnn.benchmark = True
        if task.get("tune_first") and not task.get("compile_only"):
            tune(work, case.batch)
            release(work)
        if task.get("compile_only"):
            step = step_of(work, case.batch)
            step(), step(), step()
        elif task.get("within") is not None:
            row.update(largest_batch(work, task["within"]))
        elif task.get("profile"):
            row.update(profile.look(work, case.batch))
        else:
            row.update(measure(step_of(work, case.batch), work, task["seconds"]))
    except torch.OutOfMemoryError as error:
        row["error"] = "out of memory: " + str(error).partition(". ")[0]
    except Exception as error:
        told = (str(error).strip().splitlines() or [""])[0][:300]
        row["error"] = f"{type(error).__name__}: {told}"
        if task.get("verbose"):
            raise
    row["worker_seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(row), file=out, flush=True)


def count_flops(work: Work) -> int | None:
    """Of forward and backward of one step; counted on two samples, since every product here is linear in the batch."""
    from torch.utils.flop_counter import FlopCounterMode

    size = min(2, work.case.batch)
    x, y = work.batch(size)
    try:
        with FlopCounterMode(display=False, custom_mapping=_attention_on_cpu()) as counter, work.casting():
            work.loss(work.net(x), y).backward()
    except Exception as error:  # a counter that cannot follow a network is no reason not to time it
        print(f"FLOPs were not counted: {type(error).__name__}: {error}")
        return None
    finally:
        release(work)  # cuBLAS would keep workspaces for this pass, and they would count as the step's
    return counter.get_total_flops() * work.case.batch // size


def _attention_on_cpu() -> dict[Any, Any]:
    """torch counts the GPU's attention kernels, but not the CPU's."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    def forward(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return sdpa_flop_count(q, k, v)

    def backward(g: Any, q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return sdpa_backward_flop_count(g, q, k, v)

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(step: Callable[[], Any], work: Work, seconds: float) -> dict[str, Any]:
    """Time and memory of a step that is repeated."""
    device = work.device
    found = settled_memory(step, work, work.case.batch)
    first = step_times(step, device, 5)
    each = max(min(int(1000 * seconds / 3 / max(statistics.median(first), 1e-3)), 2000), 4)
    meter = energy.meter(device)
    before, start = meter() if meter else 0.0, time.perf_counter()
    times = [t for _ in range(3) for t in step_times(step, device, each)]
    wall, joules = time.perf_counter() - start, meter() - before if meter else None
    cuts = statistics.quantiles(times, n=10)
    found |= {
        "ms": statistics.median(times),
        "ms_p10": cuts[0],
        "ms_p90": cuts[-1],
        "ms_mean": 1000 * wall / len(times),
        "repeats": len(times),
        "energy_joules_per_step": None if joules is None else joules / len(times),
    }
    return found


def step_times(step: Callable[[], Any], device: torch.device, n: int) -> list[float]:
    """Milliseconds of ``n`` steps: on a GPU, between marks on the device, without waiting in between."""
    if device.type != "cuda":
        out = []
        for _ in range(n):
            start = time.perf_counter()
            step()
            out.append(1000 * (time.perf_counter() - start))
        return out
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    step()  # the queue is not empty when the first mark is set
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def settled_memory(step: Callable[[], Any], work: Work, batch: int) -> dict[str, Any]:
    """Of a step that has been warmed up."""
    if work.device.type != "cuda":
        return {"max_allocated": _peak_on_cpu(step, work, batch), "max_reserved": None, "max_reserved_process": None}
    for _ in range(WARMUP):
        step()
    return dict(steady_peaks(step, STEADY))


def _peak_on_cpu(step: Callable[[], Any], work: Work, batch: int) -> int:
    """The batch counts too, as it does on a GPU; several steps, since a slice that wraps around takes more."""
    step(), step()
    inputs = sum(t.nbytes for t in work.batch(2)) * batch // 2
    return inputs + max(peak_of_step(work.net, work.optimizer, step) for _ in range(STEADY))


# -- a larger batch at equal memory ------------------------------------------------------------------------------------


def largest_batch(work: Work, limit: int) -> dict[str, Any]:
    """The largest batch whose steady memory stays within ``limit`` bytes, found by bisection with real steps.

    Up to 1/32 of it: a search to the last sample would spend minutes of compiling on noise. ``tried`` has the memory of
    every batch that ran; ``None`` is one that did not fit into the device.
    """
    tried: dict[int, int | None] = {}

    def fits(batch: int) -> bool:
        if batch not in tried:
            tried[batch] = _memory_at(work, batch)
            release(work)  # here, where neither the step nor an error's frames hold anything any more
        used = tried[batch]
        return used is not None and used <= limit

    low, most = work.case.batch, MOST * work.case.batch
    if not fits(low):
        return {"error": f"needs more memory than the baseline at batch {low}", "tried": tried}
    while low < most and fits(2 * low):
        low *= 2
    grain = max(low // 32, 1)
    high = 2 * low if low < most else low
    while high - low > grain:
        middle = (low + high) // 2 // grain * grain
        low, high = (middle, high) if fits(middle) else (low, middle)
    return {"batch": low, "grain": grain, "capped": low >= most, "tried": tried}


def _memory_at(work: Work, batch: int) -> int | None:
    """Bytes that training with this batch holds; ``None`` if the device has not enough."""
    try:
        return held(settled_memory(step_of(work, batch), work, batch))
    except Exception as error:
        if not ran_out(error):
            raise
        return None


def ran_out(error: BaseException | None) -> bool:
    """Whether it is for want of memory. Libraries and failed captures raise errors of other kinds for it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(s in str(error) for s in _OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "not enough memory", "can't allocate memory")


def release(work: Work) -> None:
    """Give back everything that a trial took, graphs and their gradients included: the next one starts clean."""
    if work.device.type == "cuda":
        torch.cuda.synchronize()  # a graph that is still replayed must not go
    work.optimizer.zero_grad(set_to_none=True)  # gradients may lie in the memory of a graph, and keep all of it
    if work.case.compiled:
        torch._dynamo.reset()  # and the graphs of reduce-overhead
    gc.collect()
    if work.device.type == "cuda":
        free_workspaces()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

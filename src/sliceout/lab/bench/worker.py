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

from .. import energy
from .cases import case_of
from .work import Work, build, set_precision, step_of

WARMUP = 10


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
        row["flops"] = None if task.get("compile_only") else count_flops(work)
        print(json.dumps({"ready": True}), file=out, flush=True)
        if not sys.stdin.readline():  # the parent is gone
            return
        torch.backends.cudnn.benchmark = True
        if task.get("compile_only"):
            step = step_of(work, case.batch)
            step(), step(), step()
        elif task.get("within") is not None:
            row.update(largest_batch(work, task["within"], task["seconds"]))
        else:
            row.update(measure(step_of(work, case.batch), device, task["seconds"], work))
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
        work.net.zero_grad(set_to_none=True)
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


def measure(step: Callable[[], Any], device: torch.device, seconds: float, work: Work) -> dict[str, Any]:
    """Time and memory of a step that is repeated."""
    for _ in range(WARMUP if device.type == "cuda" else 2):
        step()
    found: dict[str, Any] = steady_memory(step, device)
    if device.type != "cuda":
        from ..memory import peak_of_step

        found["max_allocated"] = peak_of_step(work.net, work.optimizer, step)
    first = _times(step, device, 5)
    each = max(min(int(1000 * seconds / 3 / max(statistics.median(first), 1e-3)), 2000), 4)
    meter = energy.meter(device)
    before, start = meter() if meter else 0.0, time.perf_counter()
    times = [t for _ in range(3) for t in _times(step, device, each)]
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


def _times(step: Callable[[], Any], device: torch.device, n: int) -> list[float]:
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


def steady_memory(step: Callable[[], Any], device: torch.device, steps: int = 3) -> dict[str, Any]:
    """What the process needs to go on: caches of the warm-up (trials of algorithms, captures) are released first."""
    if device.type != "cuda":
        return {"max_allocated": None, "max_reserved": None, "max_reserved_process": None}
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


def largest_batch(work: Work, limit: int, seconds: float) -> dict[str, Any]:
    """The largest batch whose steady memory stays within ``limit`` bytes, found by bisection with real steps."""
    case = work.case
    grain = max(case.batch // 32, 1)
    tried: dict[int, int | None] = {}

    def fits(batch: int) -> bool:
        if batch not in tried:
            try:
                step = step_of(work, batch)
                for _ in range(3):
                    step()
                tried[batch] = steady_memory(step, work.device)["max_reserved"]
            except torch.OutOfMemoryError:
                tried[batch] = None
            step = None  # type: ignore[assignment]
            gc.collect()
            torch.cuda.empty_cache()
        used = tried[batch]
        return used is not None and used <= limit

    low = case.batch
    if not fits(low):
        return {"error": f"needs more memory than standard dropout at batch {low}", "tried": tried}
    while low < 16 * case.batch and fits(2 * low):
        low *= 2
    high = 2 * low if low < 16 * case.batch else low
    while high - low > grain:
        middle = (low + high) // 2 // grain * grain
        low, high = (middle, high) if fits(middle) else (low, middle)
    return {**measure(step_of(work, low), work.device, seconds, work), "batch": low, "tried": tried}


if __name__ == "__main__":
    main()

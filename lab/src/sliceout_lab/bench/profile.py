"""Where the time and the memory of a step go: ``sliceout-lab bench ... --profile``.

Time is that of the kernels of a few steady steps, summed by kind, and of the gaps between them. Memory is what can be
counted exactly (parameters, gradients, state, buffers, the batch), what libraries hold, and the rest; on a GPU also by
pool, since CUDA graphs have memory of their own that the allocator reserves but does not count as allocated. How high a
pool's live memory rose in each of the first steps tells what made it so large: algorithms that were tried out once, or
activations. On a CPU, what CUDA alone knows is left out.
"""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sliceout.capture import free_workspaces
from sliceout.cli import UserError
from sliceout.cli.floor import narrow_
from sliceout.cli.measure import WARMUP
from sliceout.cli.memory import distinct, peak_of_step, steady_peaks
from sliceout.cli.work import Work, step_of
from sliceout.nn.base import Sliced
from sliceout.ops import prefetch

STEPS = 3
"""Steps that are profiled."""
FIRST = 3
"""First steps whose memory is followed one by one: graphs are warmed up, recorded and replayed in them."""

PRODUCTS, SLICES, OPTIMIZER = "convolutions and matrix products", "take, put, store", "optimizer"
NORMS, POINTWISE, COPIES = "batch norm", "other pointwise and reductions", "memcpy and memset"
KINDS = (PRODUCTS, SLICES, OPTIMIZER, NORMS, POINTWISE, COPIES)

_PATTERNS = (  # the first that matches; Inductor names its kernels after everything that it fused into them
    (COPIES, r"^mem(cpy|set)\b"),
    (
        SLICES,
        r"^sliceout::|^triton_poi_fused_((_to_copy|permute|t|transpose)_)*((take|put|store)_)+\d+$",
    ),  # nothing else
    (OPTIMIZER, r"multi_tensor_apply|fused_?(adam|sgd)|^aten::_(fused|foreach)|^optimizer\."),
    (NORMS, r"bn_fw|bn_bw|batch_?norm"),
    (POINTWISE, r"^triton_(poi|red|per)_"),
    (
        PRODUCTS,
        r"gemm|gemv|cutlass|xmma|nvjet|splitk|wgrad|dgrad|fprop|conv(?!ert)|cudnn_generated|flash|fmha|attention|"
        r"^triton_|^aten::(addmm|mm|bmm|baddbmm|matmul|linear)\b|mkldnn",
    ),
)
_WAITING = re.compile(r"sync$|^stream wait", re.IGNORECASE)
"""What a profiler shows on the device although nothing runs."""


def look(work: Work, batch: int) -> dict[str, Any]:
    """``time`` and ``memory`` of a training step of ``work``, and the bytes that are known ``exactly``."""
    exactly = exact(work)
    gc.collect()  # the copy that was cut down is not to be in the way
    cuda = work.device.type == "cuda"
    follow = _Followed() if cuda else None
    step = step_of(work, batch)
    for i in range(WARMUP if cuda else 2):
        step()
        if follow is not None and i < FIRST:
            follow.mark()
    memory = on_cuda(step, work, batch, follow) if follow is not None else on_cpu(step, work, batch)
    try:
        time = times(step, work.device)
    except Exception as error:  # where the profiler does not work, memory is still measured
        time = {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"exactly": exactly, "memory": memory, "time": time}


# -- time --------------------------------------------------------------------------------------------------------------


def kind_of(name: str, ours: frozenset[str] = frozenset()) -> str:
    """What a kernel (or, on a CPU, an operation) does; ``ours`` names the kernels of this library.

    Example:
        >>> kind_of("sm90_xmma_fprop_implicit_gemm_bf16"), kind_of("triton_red_fused_add_native_batch_norm")
        ('convolutions and matrix products', 'batch norm')
        >>> kind_of("triton_poi_fused_take_0"), kind_of("triton_poi_fused_relu_take_6")
        ('take, put, store', 'other pointwise and reductions')
    """
    if name in ours:
        return OPTIMIZER if re.search("adam|sgd", name) else SLICES
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, name, re.IGNORECASE)), POINTWISE)


def our_kernels() -> frozenset[str]:
    """The names under which a profiler shows the library's Triton kernels."""
    from sliceout.compact import kernels as updates
    from sliceout.ops import kernels

    return frozenset(name for module in (kernels, updates) for name in vars(module) if name.endswith("_kernel"))


def times(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Milliseconds and kernels of one step by kind, the gaps between kernels, and the longest kernels by name."""
    if device.type != "cuda":
        with torch.profiler.profile() as profiler:
            for _ in range(STEPS):
                step()
        found = [(e.key, e.self_cpu_time_total, e.count) for e in profiler.key_averages()]
        return summed(((name, us, n) for name, us, n in found if not name.startswith("ProfilerStep")), frozenset())
    spans = kernels(step, STEPS)
    return summed(((name, end - start, 1) for name, start, end in spans), our_kernels()) | gaps(spans)


def kernels(step: Callable[[], Any], steps: int) -> list[tuple[str, float, float]]:
    """What ran on the GPU in so many ``steps``: name, beginning and end in microseconds."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    spans = []
    for event in profiler.events() or ():
        on_gpu = event.device_type == torch.profiler.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        if on_gpu and not _WAITING.search(event.name):
            spans.append((event.name, event.time_range.start, event.time_range.end))
    return spans


def summed(found: Iterable[tuple[str, float, int]], ours: frozenset[str]) -> dict[str, Any]:
    """Names with their microseconds and counts over ``STEPS`` steps, summed by kind, per step."""
    kinds: dict[str, list[float]] = {kind: [0.0, 0.0] for kind in KINDS}
    names: dict[str, list[float]] = {}
    for name, microseconds, count in found:
        for entry in (kinds[kind_of(name, ours)], names.setdefault(name[:100], [0.0, 0.0])):
            entry[0] += microseconds / 1000
            entry[1] += count
    for entry in (*kinds.values(), *names.values()):
        entry[:] = [total / STEPS for total in entry]
    longest = sorted(names.items(), key=lambda item: -item[1][0])[:15]
    return {
        "kinds": {k: {"ms": ms, "kernels": n} for k, (ms, n) in kinds.items()},
        "busy_ms": sum(ms for ms, _ in kinds.values()),
        "longest": [{"name": name, "kind": kind_of(name, ours), "ms": v[0], "kernels": v[1]} for name, v in longest],
    }


def gaps(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """How long nothing ran between the first kernel and the last, per step. Kernels may overlap."""
    idle, reached = 0.0, None
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        if reached is not None:
            idle += max(start - reached, 0.0)
        reached = end if reached is None else max(reached, end)
    return {"idle_ms": idle / 1000 / STEPS}


# -- memory ------------------------------------------------------------------------------------------------------------


def exact(work: Work) -> dict[str, int | None]:
    """Bytes from the shapes alone: all parameters, the part of them that slices keep, and the copies that a step takes.

    Copies are in the dtype of the products where they are weights; they live until the backward pass has used them.
    """
    full = sum(p.nbytes for p in distinct(work.net.parameters()))
    out: dict[str, int | None] = {"parameters": full, "kept": None, "copies": None}
    if work.case.scheme != "sliceout" or work.case.rate == 0:
        return out
    sliced = {name for name, module in work.net.named_modules() if isinstance(module, Sliced)}
    try:
        net = narrow_(copy.deepcopy(work.net))
    except UserError:  # a network that has no floor
        return out
    out["kept"] = sum(p.nbytes for p in distinct(net.parameters()))
    taken = [p for name, p in net.named_parameters() if name.rpartition(".")[0] in sliced]
    half = 1 if work.autocast is None else 2
    out["copies"] = sum(p.nbytes // (half if p.dim() > 1 else 1) for p in taken)
    return out


def counted(work: Work, batch: int) -> dict[str, int]:
    """Bytes that can be counted tensor by tensor, after a step."""
    net, state = work.net, work.optimizer.state.values()
    device = work.device.type
    tensors: dict[str, list[Tensor]] = {
        "parameters": list(net.parameters()),
        "buffers": list(net.buffers()),
        "optimizer state": [v for s in state for v in s.values() if isinstance(v, Tensor) and v.device.type == device],
        "small copies": list(_fetched(work)),
    }
    out = {name: sum(t.untyped_storage().nbytes() for t in distinct(found)) for name, found in tensors.items()}
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    out["gradients"] = sum(getattr(g, "small", g).nbytes for g in grads)  # compact ones hold the slice alone
    copies = 2 if work.case.mode.startswith("captured") else 1  # the graph has its own
    out["batch"] = copies * sum(t.nbytes for t in work.batch(2)) * batch // 2
    return out


def _fetched(work: Work) -> Iterable[Tensor]:
    """The slices that eager code on a GPU keeps until the next step; compiled graphs have theirs among activations."""
    for owner in {s.owner for m in work.net.modules() if isinstance(m, Sliced) for s in m.slices}:
        yield from prefetch.plan_of(owner).held()


def on_cpu(step: Callable[[], Any], work: Work, batch: int) -> dict[str, Any]:
    peak = peak_of_step(work.net, work.optimizer, step)
    parts = counted(work, batch)
    return {"counted": parts, "max_allocated": peak + parts["batch"], "rest": peak + parts["batch"] - _sum(parts)}


def on_cuda(step: Callable[[], Any], work: Work, batch: int, follow: _Followed) -> dict[str, Any]:
    torch.cuda.synchronize()
    history = follow.stop()
    peaks = steady_peaks(step, STEPS)
    between = torch.cuda.memory_allocated()
    parts = counted(work, batch)
    pools = by_pool(torch.cuda.memory_snapshot(), history)
    workspaces = between - torch.cuda.memory_allocated() if free_workspaces() else None
    rest = peaks["max_allocated"] - _sum(parts) - (workspaces or 0)
    return {
        "counted": parts,
        **peaks,
        "allocated_between_steps": between,
        "cublas_workspaces": workspaces,
        # with graphs, activations (and compiled ones' gradients) lie in their pools, and allocated says nothing of them
        "rest": None if any(any(p["pool"]) for p in pools) else rest,
        "pools": pools,
    }


def _sum(parts: dict[str, int]) -> int:
    return sum(parts.values())


class _Followed:
    """Every allocation of the first steps, which torch notes down; without stacks, which would take seconds."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)

    def mark(self) -> None:
        """A step has ended."""
        torch.cuda.synchronize()
        self.ends.append(len(self._entries()))

    def stop(self) -> list[list[dict[str, Any]]]:
        """What was noted in each step."""
        entries = self._entries()
        torch.cuda.memory._record_memory_history(None)
        return [entries[a:b] for a, b in zip([0, *self.ends], self.ends, strict=False)]

    def _entries(self) -> list[dict[str, Any]]:
        traces = torch.cuda.memory._snapshot()["device_traces"]
        return traces[torch.cuda.current_device()] if traces else []


def by_pool(segments: list[dict[str, Any]], history: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Reserved and allocated bytes of each pool, and how high its live memory rose in each of the first steps.

    Segments that were freed since then do not count: only what the pools still hold is followed.
    """
    pools: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for segment in segments:
        pools.setdefault(tuple(segment.get("segment_pool_id", (0, 0))), []).append(segment)
    out = []
    for pool, held in sorted(pools.items()):
        risen = [highest(part) for part in _lives(history, held)]
        out.append(
            {
                "pool": list(pool),
                "segments": len(held),
                "reserved": sum(s["total_size"] for s in held),
                "allocated": sum(s["allocated_size"] for s in held),
                "highest_by_step": [peak for peak, _ in risen],
                "largest_at_highest": max(risen, default=(0, []))[1],
            }
        )
    return out


def _lives(history: list[list[dict[str, Any]]], segments: list[dict[str, Any]]) -> list[list[tuple[int, int, int]]]:
    """For each step, ``(address, bytes, +1 or -1)`` of what happened inside these segments; it begins with what lives.

    A block is free when the request to free it comes: in a graph it is used again at once.
    """
    ranges = [(s["address"], s["address"] + s["total_size"]) for s in segments]
    living: dict[int, int] = {}
    out = []
    for entries in history:
        part = [(address, size, 1) for address, size in living.items()]
        for entry in entries:
            address, action = entry.get("addr", 0), entry["action"]
            if action not in ("alloc", "free_requested") or not any(a <= address < b for a, b in ranges):
                continue
            if address in living:  # also before an allocation: graphs are set back to earlier states without a word
                part.append((address, living.pop(address), -1))
            if action == "alloc":
                living[address] = entry["size"]
                part.append((address, entry["size"], 1))
        out.append(part)
    return out


def highest(changes: list[tuple[int, int, int]], shown: int = 8) -> tuple[int, list[int]]:
    """The most bytes that lived at once, and the largest blocks of that moment.

    Example:
        >>> highest([(0, 4, 1), (8, 2, 1), (0, 4, -1), (16, 1, 1)])
        (6, [4, 2])
    """
    living: dict[int, int] = {}
    total = peak = 0
    blocks: list[int] = []
    for address, size, sign in changes:
        total += sign * size
        if sign > 0:
            living[address] = size
        else:
            living.pop(address, None)
        if total > peak:
            peak, blocks = total, sorted(living.values(), reverse=True)[:shown]
    return peak, blocks

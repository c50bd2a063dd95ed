"""Which slices pay on this device, and which alignment of their widths: two layers with sliced units between them.

    python benchmarks/payoff.py                measure, write results/payoff/<device>-<dtype>.json
    python benchmarks/payoff.py --write-table  put what all these files say into src/sliceout/payoff_table.json

Forward and backward of ``layer - ReLU - layer`` at full width, as a plain narrow network, and sliced, with everything
that taking slices and putting gradients back costs; no optimizer, which costs the same. A depthwise convolution stands
between two of 1x1. On a GPU each is captured in a CUDA graph, as ``sliceout.capture`` would: an eager step has launches
on top. The file is written after every pair, most telling pairs first: a run that is cut off leaves what it has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sliceout
from sliceout.capture import free_workspaces
from sliceout.ops import tables, without_views
from sliceout_lab import machine

ROOT = Path(__file__).parents[1]
RESULTS, TABLE = ROOT / "results" / "payoff", ROOT / "src" / "sliceout" / "payoff_table.json"
RATES, ALIGNS = (0.1, 0.3, 0.5, 0.7), (1, 2, 4, 8, 16, 32, 64)
# kind, units outside, units between, rows of a linear layer or (images, side) of a convolution
GPU = [
    ("linear", 2048, 2048, 256), ("conv3", 320, 320, (128, 16)), ("linear", 1024, 4096, 16384),
    ("conv3", 64, 64, (128, 32)), ("linear", 64, 64, 256), ("depthwise", 24, 144, (128, 56)),
    ("linear", 256, 1024, 16384), ("conv3", 16, 16, (128, 32)), ("conv1", 256, 1024, (128, 14)),
    ("linear", 256, 256, 256), ("linear", 64, 64, 16384), ("conv3", 160, 160, (128, 32)),
    ("depthwise", 80, 480, (128, 14)), ("conv3", 640, 640, (128, 8)), ("linear", 64, 256, 16384),
    ("conv1", 24, 144, (128, 56)), ("conv3", 32, 32, (128, 32)), ("linear", 784, 2048, 256),
    ("linear", 512, 2048, 4096), ("conv3", 64, 64, (128, 8)), ("depthwise", 16, 96, (128, 112)),
    ("conv1", 80, 480, (128, 14)),
]  # fmt: skip
GPU_ALIGNS = [("linear", 1024, 2048, 16384), ("conv3", 256, 256, (128, 32)), ("linear", 2048, 2048, 256),
              ("conv3", 640, 640, (128, 8)), ("depthwise", 80, 512, (128, 14))]  # fmt: skip
CPU = [
    ("linear", 784, 2048, 256), ("linear", 256, 256, 256), ("linear", 64, 64, 256), ("linear", 16, 16, 32),
    ("conv3", 32, 32, (8, 32)), ("conv3", 16, 16, (8, 32)), ("conv3", 128, 128, (8, 8)), ("conv1", 24, 144, (8, 28)),
]  # fmt: skip
CPU_ALIGNS = [("linear", 784, 1024, 256), ("conv3", 128, 128, (8, 16))]


def layer(kind: str, inputs: int, outputs: int, into: Any = None, out: Any = None) -> nn.Module:
    given = {k: v for k, v in (("in_slice", into), ("out_slice", out)) if v is not None}
    if kind == "linear":
        return (sliceout.nn.Linear if given else nn.Linear)(inputs, outputs, **given)
    side, settings = (3, {"groups": inputs}) if kind == "depthwise" else (int(kind.removeprefix("conv")), {})
    conv = sliceout.nn.Conv2d if given else nn.Conv2d
    return conv(inputs, outputs, side, padding=side // 2, **settings, **given)


def pair(kind: str, outer: int, size: int, hidden: Any = None) -> nn.Module:
    around = "conv1" if kind == "depthwise" else kind
    between = [layer(kind, size, size, hidden, hidden), nn.ReLU()] if kind == "depthwise" else []
    first, last = layer(around, outer, size, out=hidden), layer(around, size, outer, into=hidden)
    return nn.Sequential(first, nn.ReLU(), *between, last)


class Clock:
    """Times forward and backward of a network on one device in one precision."""

    def __init__(self, device: torch.device, dtype: str, seconds: float) -> None:
        self.device, self.dtype, self.seconds = device, dtype, seconds

    def __call__(self, nets: list[nn.Module], outer: int, rows: Any) -> list[float]:
        """Milliseconds of each network: medians. On a CPU they take turns, so that other load falls on all alike."""
        steps = [self.step(net, outer, rows) for net in nets]
        if self.device.type == "cuda":
            return [self.captured(step) for step in steps]
        return self.in_turns(steps)

    def step(self, net: nn.Module, outer: int, rows: Any) -> Callable[[], None]:
        """Forward and backward on random numbers."""
        shape = (rows, outer) if isinstance(rows, int) else (rows[0], outer, rows[1], rows[1])
        x = torch.randn(*shape, device=self.device)
        net = net.to(self.device)
        if x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
            net = net.to(memory_format=torch.channels_last)
        x.requires_grad_()
        with torch.no_grad(), self.casting():
            g = torch.randn_like(net.eval()(x))
        net.train()

        def step() -> None:
            net.zero_grad(set_to_none=True)
            x.grad = None
            with self.casting():
                y = net(x)
            y.backward(g)

        return step

    def casting(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bf16", cache_enabled=False)

    def in_turns(self, steps: list[Callable[[], None]]) -> list[float]:
        times: list[list[float]] = [[] for _ in steps]
        end = time.perf_counter() + self.seconds * len(steps)
        for turn in itertools.count():
            if turn > 7 and time.perf_counter() > end:
                return [statistics.median(t[1:]) for t in times]
            for step, found in zip(steps, times, strict=True):
                start = time.perf_counter()
                step()
                found.append(1000 * (time.perf_counter() - start))
        raise AssertionError

    def captured(self, step: Callable[[], None], inside: int = 5) -> float:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        needed = tables.Arena(None, self.device)
        with torch.cuda.stream(side), without_views(), tables.into(needed):  # more than one step's
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        free_workspaces()
        graph = torch.cuda.CUDAGraph()
        held = tables.Arena(inside * needed.used + 1024, self.device)
        with torch.cuda.graph(graph), tables.into(held):
            for _ in range(inside):
                step()
        held.fill()
        free_workspaces()
        times = []
        end = time.perf_counter() + self.seconds
        graph.replay()
        while len(times) < 7 or time.perf_counter() < end:
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            graph.replay()
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b) / inside)
        return statistics.median(times)


def measure(device: torch.device, dtype: str, seconds: float, deadline: float, path: Path) -> dict[str, Any]:
    """Everything that can be measured before ``deadline``, into ``path``; a pair that fails is named in ``failed``."""
    clock, cuda = Clock(device, dtype, seconds), device.type == "cuda"
    data: dict[str, Any] = {
        "kind": "payoff", "schema": 1, "machine": machine.describe(device), "device": device.type, "dtype": dtype,
        "load_before": os.getloadavg()[0], "align": [], "pays": [], "failed": [],
    }  # fmt: skip
    pairs = [(_aligns, case) for case in (GPU_ALIGNS if cuda else CPU_ALIGNS)]
    for about, case in [*pairs, *((_pays, case) for case in (GPU if cuda else CPU))]:
        if time.monotonic() > deadline:
            print("time is up")
            break
        try:
            found = about(clock, *case)
        except Exception as error:  # the others are worth having
            print(f"{dtype} {case} failed: {type(error).__name__}: {error}")
            data["failed"].append({"case": case, "error": f"{type(error).__name__}: {error}"[:300]})
            continue
        data["align" if about is _aligns else "pays"] += found
        path.write_text(json.dumps(data, indent=1) + "\n")
    return data


def _aligns(clock: Clock, kind: str, outer: int, size: int, rows: Any) -> list[dict[str, Any]]:
    """Time per unit at widths that are multiples of each alignment, and of no coarser one."""
    widths = {a: a * (size // 2 // a - 1 + size // 2 // a % 2) for a in ALIGNS}
    widths = {a: w for a, w in widths.items() if w > 0}
    full, *found = clock([pair(kind, outer, w) for w in (size, *widths.values())], outer, rows)
    about = {"kind": kind, "outer": outer, "size": size, "rows": rows}
    shares = [ms / width * size / full for width, ms in zip(widths.values(), found, strict=True)]
    print(f"{clock.dtype} {kind} {outer}-{size} {rows} by align:", " ".join(f"{share:.0%}" for share in shares))
    return [
        {**about, "align": align, "width": width, "ms": ms, "per_unit_of_full": share}
        for (align, width), ms, share in zip(widths.items(), found, shares, strict=True)
    ]


def _pays(clock: Clock, kind: str, outer: int, size: int, rows: Any) -> list[dict[str, Any]]:
    slices = [s for s in (sliceout.Slice(size, rate) for rate in RATES) if s.width < size]
    nets = [pair(kind, outer, size)]
    nets += [net for s in slices for net in (pair(kind, outer, s.width), pair(kind, outer, size, s))]
    full, *found = clock(nets, outer, rows)
    out = []
    for s, narrow, sliced in zip(slices, found[::2], found[1::2], strict=True):
        about = {"kind": kind, "outer": outer, "size": size, "rows": rows, "rate": s.rate, "width": s.width}
        out.append({**about, "full_ms": full, "narrow_ms": narrow, "sliced_ms": sliced})
        share = f"{sliced / full:.0%} of full, floor {narrow / full:.0%}"
        print(f"{clock.dtype} {kind} {outer}-{size} {rows} rate {s.rate}: {share}", flush=True)
    return out


# -- from measurements to the table that the library reads ------------------------------------------------------------


def best_align(rows: list[dict[str, Any]], tolerance: float = 0.03) -> int | None:
    """The smallest align whose time per unit is within ``tolerance`` of the best one, in all layers measured."""
    layers: dict[Any, dict[int, float]] = {}
    for r in rows:
        layers.setdefault((r["kind"], r["size"], str(r["rows"])), {})[r["align"]] = r["per_unit_of_full"]
    if not layers:
        return None
    worst = {a: max(f[a] / min(f.values()) for f in layers.values() if a in f) for a in ALIGNS}
    least = min(worst.values())
    return next(a for a in ALIGNS if worst[a] <= least * (1 + tolerance))


def table(results: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, data in results:
        entry = {
            "dtype": data["dtype"],
            "file": name,
            "machine": data["machine"]["device"],
            "align": best_align(data["align"]),
            "pays": [
                [r["kind"], r["size"], _rows(r["rows"]), r["rate"], round(r["sliced_ms"] / r["full_ms"], 3)]
                for r in data["pays"]
            ],
        }
        out.setdefault(data["device"], []).append(entry)
    return out


def _rows(rows: Any) -> int:
    return rows if isinstance(rows, int) else rows[0] * rows[1] ** 2


def committed() -> list[tuple[str, dict[str, Any]]]:
    return [(f"results/payoff/{p.name}", json.loads(p.read_text())) for p in sorted(RESULTS.glob("*.json"))]


def table_text() -> str:
    """What ``--write-table`` writes: one measured row per line."""
    text = json.dumps(table(committed()), indent=1)
    return re.sub(r"\[\s+([^\[\]]+?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-table", action="store_true", help="only make the library's table from the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", default=None, help="of bf16, tf32, fp32; bf16,tf32 on a GPU and fp32 else")
    parser.add_argument("--seconds", type=float, default=None, help="per measurement")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds, after which the rest is left out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.write_table:
        TABLE.write_text(table_text())
        print(f"wrote {TABLE}")
        return
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True
    dtypes = (args.dtypes or ("bf16,tf32" if device.type == "cuda" else "fp32")).split(",")
    seconds = args.seconds or (0.03 if device.type == "cuda" else 0.3)
    start = time.monotonic()
    for i, dtype in enumerate(dtypes):
        torch.set_float32_matmul_precision("highest" if dtype == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = dtype != "fp32"
        deadline = start + args.limit * (i + 1) / len(dtypes)
        gpu = torch.cuda.get_device_name().lower().removeprefix("nvidia ") if device.type == "cuda" else "cpu"
        path = args.out / f"{re.sub('[^a-z0-9]+', '-', gpu)}-{dtype}.json"
        data = measure(device, dtype, seconds, deadline, path)
        print(f"wrote {path}: best align {best_align(data['align'])}, load before {data['load_before']:.1f}")


if __name__ == "__main__":
    main()

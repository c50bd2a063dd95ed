"""What slicing costs the host in a step on a GPU, measured without one: all Triton launches are stubbed.

    python benchmarks/host.py --out results/eager-host.json                          this revision
    python benchmarks/host.py --out results/eager-host-before.json --source DIR      that of another checkout
    python benchmarks/host.py --compiled --out results/compiled-host.json            torch.compile's default mode

Wide ResNet 28-1 on tiny images, SGD with momentum, one thread: its 12 sliced blocks make as many calls as those of
28-10, and the arithmetic is small. The networks take turns; the number is the 10th percentile of the thread's own time,
and what counts is the difference to the plain network. aten calls are those that Python makes, by torch's profiler.
Compiled, take and put are inlined as on a GPU; the kernels that Inductor makes are the CPU's, so that the difference is
that of guards, of the arrival of gradients and of the optimizer, and of some arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: no driver is asked for
CASES = (("plain", ""), ("dense", "circular"), ("dense", "window"), ("compact", "circular"))
PHASES = ("forward", "backward", "optimizer")
COUNTED = 8
"""Steps whose calls are counted: a slice that wraps around takes more."""


class Stub:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def build(kind: str, sampling: str, compiled: bool) -> list[Callable[[], Any]]:
    """The phases of a step, in their order."""
    import torch
    import torch.nn.functional as F

    import sliceout
    from sliceout_lab import models

    torch.manual_seed(0)
    net = models.build("wrn-28-1")
    if kind != "plain":
        example = torch.zeros(2, 3, 32, 32)
        sliceout.convert_(net, 0.5, example_inputs=example, align=1, sampling=sampling, grads=kind)
    net.to(memory_format=torch.channels_last)
    run = torch.compile(net, fullgraph=True, dynamic=False) if compiled else net
    optimizer = torch.optim.SGD(net.parameters(), 0.0, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    x, y = torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
    loss = []

    def forward() -> None:
        optimizer.zero_grad()
        loss[:] = [F.cross_entropy(run(x), y)]

    return [forward, lambda: loss[0].backward(), optimizer.step]


def calls(phase: Callable[[], Any]) -> int:
    """How many operations Python asks for in a phase."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        phase()
    return sum(e.name.startswith("aten::") and not _inside_another(e) for e in seen.events() or ())


def _inside_another(event: Any) -> bool:
    above = event.cpu_parent
    while above is not None and not above.name.startswith("aten::"):
        above = above.cpu_parent
    return above is not None


def measure(rounds: int, compiled: bool) -> dict[str, Any]:
    import torch

    from sliceout.compact import kernels as updates
    from sliceout.compact import optimizers as optim
    from sliceout.ops import inductor, kernels, prefetch

    torch.set_num_threads(1)
    torch.compiler.config.force_disable_caches = True  # others expect calls of take and put in code for the CPU
    inductor.DEVICES = ("cpu",)  # the paths of a GPU
    prefetch.usable = lambda full: True
    optim._on_gpu = lambda tensors: True
    for module in (kernels, updates):
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            setattr(module, name, Stub())
    steps = {f"{kind} {sampling}".strip(): build(kind, sampling, compiled) for kind, sampling in CASES}
    spent: dict[str, list[list[float]]] = {name: [] for name in steps}
    for i in range(rounds + 6):
        for name, phases in steps.items():
            marks = [time.thread_time()]
            for phase in phases:
                phase()
                marks.append(time.thread_time())
            if i >= 6:
                spent[name].append([1000 * (b - a) for a, b in pairwise(marks)])
    out = {}
    for name, phases in steps.items():
        asked = [[calls(phase) for phase in phases] for _ in range(COUNTED)]
        out[name] = {
            "ms": sorted(map(sum, spent[name]))[rounds // 10],
            "ms_by_phase": _by_phase(sorted(column)[rounds // 10] for column in zip(*spent[name], strict=True)),
            "aten_calls": _by_phase(sum(column) / COUNTED for column in zip(*asked, strict=True)),
        }
    return out


def _by_phase(values: Iterable[float]) -> dict[str, float]:
    return dict(zip(PHASES, values, strict=True))


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--rounds", type=int, default=120)
    asked.add_argument("--compiled", action="store_true", help="by torch.compile, in its default mode")
    asked.add_argument(
        "--source", type=Path, default=Path(__file__).parents[1], help="the checkout to measure, with lab/"
    )
    given = asked.parse_args()
    sys.path[:0] = [str(given.source / "src"), str(given.source / "lab" / "src")]
    import torch

    from sliceout_lab import machine

    load = os.getloadavg()[0]
    rows = measure(given.rounds, given.compiled)
    revision, dirty = machine.revision()  # of the checkout that was imported
    record = {"machine": machine.describe(torch.device("cpu")), "revision": revision, "dirty": dirty, "load": load}
    given.out.write_text(
        json.dumps({**record, "compiled": given.compiled, "rounds": given.rounds, "cases": rows}, indent=1) + "\n"
    )
    plain = rows["plain"]
    print(f"{'over the plain network':24}{'ms':>8}{'aten calls':>12}")
    for name, row in rows.items():
        more = sum(row["aten_calls"].values()) - sum(plain["aten_calls"].values())
        print(f"{name:24}{row['ms'] - plain['ms']:8.2f}{more:12.1f}")


if __name__ == "__main__":
    main()

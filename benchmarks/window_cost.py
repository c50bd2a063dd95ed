"""Why windows cost more than circular slices in one case: the MLP with dense gradients and Adam, captured.

    python benchmarks/window_cost.py --out results/h200-window-cost.json

Weights at the ends of two windows are rarely kept together, so that most of their gradients are zero and Adam's first
average decays into the denormal numbers. Here the same step is timed for some thousand steps, with what each kernel
takes at the beginning and at the end; then all that is next to nothing is set to zero.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sliceout.cli.cases import Case
from sliceout.cli.measure import WARMUP, step_times
from sliceout.cli.work import set_precision, step_of
from sliceout_lab import machine
from sliceout_lab.bench import profile
from sliceout_lab.bench.networks import PaperWork

KERNELS = {"take": "_take_kernel", "put": "_put_kernel", "Adam": "multi_tensor_apply"}
BLOCK, BLOCKS = 250, 10
"""Steps that are timed together, and how often."""


def measure(sampling: str, device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    names = ("mlp", "captured", "tf32") if on_gpu else ("mlp-3x64", "eager", "fp32")  # the CPU's is only a trial
    case = Case(names[0], 256, "sliceout", 0.5, *names[1:], sampling)
    set_precision(case.precision)
    work = PaperWork(case, device)
    step = step_of(work, case.batch)
    for _ in range(WARMUP):
        step()

    def microseconds(steps: int) -> float:
        return 1000 * statistics.median(step_times(step, device, steps))

    found: dict[str, Any] = {"kernels_at_first": kernels(step) if on_gpu else {}}
    found["us_by_block"] = [microseconds(BLOCK) for _ in range(BLOCKS)]
    found["kernels_at_last"] = kernels(step) if on_gpu else {}
    averages = [state["exp_avg"] for state in work.optimizer.state.values()]
    tiny = torch.finfo(torch.float32).tiny
    denormal = sum(int(((a != 0) & (a.abs() < tiny)).sum()) for a in averages)
    found["denormal"] = denormal / sum(a.numel() for a in averages)
    for a in averages:
        a.copy_(torch.where(a.abs() < 1e-30, 0.0, a))
    found["us_without"] = microseconds(BLOCK // 5)  # before others have come
    return found


def kernels(step: Callable[[], Any], steps: int = 20) -> dict[str, float]:
    """Microseconds of a step in kernels of each kind."""
    ran = profile.kernels(step, steps)
    return {
        kind: sum(end - start for name, start, end in ran if part in name) / steps for kind, part in KERNELS.items()
    }


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--device", default="cuda")
    given = asked.parse_args()
    device = torch.device(given.device)
    revision, dirty = machine.revision()
    record: dict[str, Any] = {"machine": machine.describe(device), "revision": revision, "dirty": dirty}
    record |= {"block": BLOCK, "samplings": {}}
    for sampling in ("circular", "window"):
        found = record["samplings"][sampling] = measure(sampling, device)
        print(sampling, json.dumps(found))
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

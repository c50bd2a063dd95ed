"""A training step of the paper's 784-2048-2048-2048-10 network on the CPU: dropout, nothing, narrow, SliceOut.

    python benchmarks/mlp_cpu.py            measure, print the table, write results/mlp-cpu.json
    python benchmarks/mlp_cpu.py --table    print the table of the committed file again

Eager, float32, stock Adam, batch 256, two threads. All networks live in one process and take turns step by step, in an
order shuffled anew each round. A round during which other processes took more than 5 % of the two cores is not counted,
and the next one waits until they leave the cores alone: on a busy machine this takes as long as it takes.
``narrow`` is a plain network of half the width, the floor for any method that computes half of the units. Compact
gradients are updated by torch's fused kernels whatever the optimizer was told; so the others are also run with those.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import sliceout
from sliceout.cli import memory
from sliceout_lab import machine
from sliceout_lab.models.mlp import mlp

RESULT = Path(__file__).parents[1] / "results" / "mlp-cpu.json"
RATE, BATCH, THREADS, WIDTHS = 0.5, 256, 2, (784, 2048, 2048, 2048, 10)
LIMIT = 0.05
NARROW = tuple(int(w * (1 - RATE)) if w == 2048 else w for w in WIDTHS)
LABELS = {
    "dropout": "`nn.Dropout(0.5)`",
    "none": "no dropout",
    "narrow": "narrow: a plain network of width 1024",
    "circular": "SliceOut, circular (default)",
    "compact": "SliceOut, circular, compact gradients",
    "window-flow": "SliceOut, window, flow norm",
    "window-probabilistic": "SliceOut, window, probabilistic norm",
    "dropout-fused": "`nn.Dropout(0.5)`, Adam with `fused=True`",
    "narrow-fused": "narrow, Adam with `fused=True`",
    "circular-fused": "SliceOut, circular, Adam with `fused=True`",
}


class Contender:
    """One network with its optimizer, and the times of its steps."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        fused, name = name.endswith("-fused"), name.removesuffix("-fused")
        if name == "dropout":
            self.model = mlp(WIDTHS, dropout=RATE)
        else:
            self.model = mlp(NARROW if name == "narrow" else WIDTHS)
        if name in ("circular", "compact"):
            sliceout.convert_(self.model, RATE, grads="compact" if name == "compact" else "dense")
        elif name.startswith("window"):
            sliceout.convert_(self.model, RATE, sampling="window", norm=name.removeprefix("window-"))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=fused or None)
        self.seconds: list[float] = []

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()


def measure(rounds: int, warmup: int) -> dict[str, Any]:
    """Let all take turns until ``rounds`` were undisturbed; collect medians and quartiles."""
    torch.set_num_threads(THREADS)
    contenders = {name: Contender(name) for name in LABELS}
    x, y = torch.rand(BATCH, WIDTHS[0]), torch.randint(WIDTHS[-1], (BATCH,))
    counted = disturbed = 0
    wait_for_quiet()
    while counted < rounds:
        seconds, others = {}, OtherProcesses()
        for name in random.Random(counted + disturbed).sample(list(contenders), len(contenders)):
            start = time.perf_counter()
            contenders[name].step(x, y)
            seconds[name] = time.perf_counter() - start
        if warmup > 0:
            warmup -= 1
        elif others.share() > LIMIT:
            disturbed += 1
            wait_for_quiet()
        else:
            counted += 1
            for name, value in seconds.items():
                contenders[name].seconds.append(value)
    rows = {}
    for name, c in contenders.items():
        low, median, high = (1000 * q for q in statistics.quantiles(c.seconds, n=4))
        peak = memory.peak_of_step(c.model, c.optimizer, lambda c=c: c.step(x, y))
        rows[name] = {"ms": median, "ms_quartiles": [low, high], "peak_bytes_of_step": peak}
    return {
        "what": "784-2048-2048-2048-10 ReLU, rate 0.5, batch 256, float32, eager, torch.optim.Adam; median step",
        "rounds": rounds,
        "rounds_discarded_as_disturbed": disturbed,
        "machine": machine.describe(torch.device("cpu")),
        "steps": rows,
    }


class OtherProcesses:
    """Which share of the cores they have taken since this object was made."""

    def __init__(self) -> None:
        self.start, self.before = time.perf_counter(), machine.cpu_seconds_of_others()

    def share(self) -> float:
        elapsed = time.perf_counter() - self.start
        return (machine.cpu_seconds_of_others() - self.before) / elapsed / THREADS


def wait_for_quiet() -> None:
    """Sleep until other processes have left the cores alone for a second."""
    while True:
        others = OtherProcesses()
        time.sleep(1)
        if others.share() < LIMIT:
            return


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    steps = result["steps"]
    lines = ["| network | ms per step (quartiles) | of dropout | peak memory of the step |", "|---|---|---|---|"]
    for name, label in LABELS.items():
        if name not in steps:  # a file from before it was measured
            continue
        row = steps[name]
        low, high = row["ms_quartiles"]
        share = row["ms"] / steps["dropout"]["ms"]
        peak = row["peak_bytes_of_step"] / 1e6
        lines.append(f"| {label} | {row['ms']:.1f} ({low:.1f} to {high:.1f}) | {share:.0%} | {peak:.0f} MB |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only print the table of the committed result")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if not args.table:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(measure(args.rounds, args.warmup), indent=1) + "\n")
    print(table(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()

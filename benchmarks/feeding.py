"""Does feeding limit training? The loop's own steps, batches and all, against the bare step on resident tensors.

Both take turns in one process, so that clocks and temperatures are the same::

    PYTHONPATH=src python benchmarks/feeding.py feeding.json                       # on a GPU: WRN-28-10, bf16, compiled
    PYTHONPATH=src python benchmarks/feeding.py feeding.json --width 1 --subset 1280 --mode eager --device cpu
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sliceout_lab import experiment as experiments
from sliceout_lab import machine
from sliceout_lab.train.clock import Clock
from sliceout_lab.train.distributed import Ranks
from sliceout_lab.train.loop import Record, example, make, steps
from sliceout_lab.train.progress import Show
from sliceout_lab.train.setup import Training
from sliceout_lab.train.stop import Stop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--experiment", default="cifar10-wrn-28-6")
    parser.add_argument("--scheme", default="sliceout")
    parser.add_argument("--model", default="wrn-28-10")
    parser.add_argument("--width", type=int, help="another width of the model")
    parser.add_argument("--subset", type=int)
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=4, help="epochs of the loop, each after as many bare steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path)
    given = parser.parse_args()
    result = measure(given)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"bare {result['bare_ms']:.3f} ms, in the loop {result['loop_ms']:.3f} ms: {result['ratio']:.4f}")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    declared = experiments.load(given.experiment)
    if declared.model != "mlp":
        declared = dataclasses.replace(declared, model=given.model)
    job = experiments.job(
        declared, {"scheme": given.scheme, "sampling": "circular", "exclusions": False}, device=given.device,
        mode=given.mode, precision=given.precision, width=given.width, subset=given.subset, epochs=given.rounds,
    )  # fmt: skip
    t = Training(job, Ranks(given.device), given.data)
    record, stop = Record(), Stop()
    show = Show("feeding", t.total, given.rounds, Console(), quiet=True)
    t.learner.train()
    make(t, record)
    x, y = (tensor.clone(memory_format=torch.preserve_format) for tensor in example(t))
    losses = torch.zeros((), device=t.device)
    bare, fed = [], []
    for number in range(given.rounds):
        _synchronise(t.device)
        began = time.perf_counter()
        for _ in range(t.steps):
            t.step(x, y)
        _synchronise(t.device)
        bare.append(1000 * (time.perf_counter() - began) / t.steps)
        clock = Clock(t.device, t.steps)
        steps(t, record, (number + 1) * t.steps, losses, clock, show, stop)
        clock.pause()
        fed.append(1000 * clock.seconds / t.steps)
        print(f"round {number + 1}: bare {bare[-1]:.3f} ms, in the loop {fed[-1]:.3f} ms", flush=True)
    revision, dirty = machine.revision()
    return {
        "kind": "feeding",
        "config": job.config,
        "steps": t.steps,
        "bare_ms": statistics.median(bare),
        "loop_ms": statistics.median(fed),
        "ratio": statistics.median(b / a for a, b in zip(bare, fed, strict=True)),
        "rounds": {"bare_ms": bare, "loop_ms": fed},
        "revision": revision,
        "dirty": dirty,
        "machine": machine.environment(t.device),
    }


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

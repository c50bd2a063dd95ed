"""Steps of several networks that take turns in one process, for cases that wait for the host.

    python benchmarks/turns.py --out results/h200-turns.json
    python benchmarks/turns.py --ways --modes eager compiled --out results/h200-ways.json

How fast a shared machine's host is changes from process to process and from second to second, by more than what is to
be measured. Here all networks meet the same host: each runs a few steps, then the next one, over and over; what counts
is the ratio to standard dropout within a round.

With ``--ways``, SliceOut also takes turns with itself while one of the ways of taking slices is switched off: what a
step would cost without it (``docs/architecture.md``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from sliceout.cli.cases import Case
from sliceout.cli.measure import WARMUP
from sliceout.cli.work import set_precision, step_of
from sliceout.compact import optimizers
from sliceout.nn import unitwise
from sliceout.ops import prefetch, reference, without_views
from sliceout_lab import machine
from sliceout_lab.bench.networks import PaperWork

SCHEMES = {"standard": {}, "floor": {}, "sliceout": {}, "sliceout compact": {"grads": "compact"}}


def replaced(module: Any, name: str, value: Any) -> Callable[[], Any]:
    """A context in which ``module.name`` is ``value``."""
    return lambda: mock.patch.object(module, name, value)


EAGER_WAYS: dict[str, Callable[[], Any]] = {
    "sliceout, no prefetch": replaced(prefetch, "usable", lambda full: False),
    "sliceout, no views": without_views,
    "sliceout, no views of statistics": replaced(unitwise, "in_place", lambda rows, full: False),
    "sliceout compact, no fused updates": replaced(optimizers, "_on_gpu", lambda tensors: False),
    "sliceout compact, no prefetch": replaced(prefetch, "usable", lambda full: False),
}
"""What is switched off in eager code."""
COMPILED_WAYS: dict[str, Callable[[], Any]] = {
    "sliceout, no registered take": replaced(torch.ops.sliceout, "take", lambda *args: reference.take(*args[:8])),
}
"""What is switched off in compiled code."""
AT_ONCE = 10
"""Steps of a turn."""


def measure(
    model: str, mode: str, batch: int, rounds: int, device: torch.device, ways: bool = False
) -> Iterator[dict[str, Any]]:
    """Milliseconds of a step, and what part of standard dropout's they are: median, 10th and 90th percentile."""
    precision = "bf16" if device.type == "cuda" else "fp32"
    set_precision(precision)
    torch.backends.cudnn.benchmark = True
    torch._dynamo.reset()
    steps = {}
    switched_off = EAGER_WAYS if mode == "eager" else COMPILED_WAYS
    contexts = {**dict.fromkeys(SCHEMES, contextlib.nullcontext), **(switched_off if ways else {})}
    for name, context in contexts.items():
        kind = name.split(",")[0]
        case = Case(model, batch, kind.split()[0], 0.5, mode, precision, **SCHEMES[kind])
        steps[name] = step_of(PaperWork(case, device), batch)
        with context():
            for _ in range(WARMUP):
                steps[name]()
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            with contexts[name]():
                step()  # finds its compiled code among that of the others
                _wait(device)
                start = time.perf_counter()
                for _ in range(AT_ONCE):
                    step()
                _wait(device)
                turns[name].append(1000 * (time.perf_counter() - start) / AT_ONCE)
    for name, times in turns.items():
        shares = [a / b for a, b in zip(times, turns["standard"], strict=True)]
        yield {"mode": mode, "batch": batch, "scheme": name, "ms": _spread(times), "of_standard": _spread(shares)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "p10": cuts[0], "p90": cuts[-1]}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--model", default="wrn-28-10")
    asked.add_argument("--modes", nargs="+", default=["eager", "compiled-default"])
    asked.add_argument("--batch", type=int, nargs="+", default=[128])
    asked.add_argument("--rounds", type=int, default=25)
    asked.add_argument("--device", default="cuda")
    asked.add_argument("--ways", action="store_true", help="also with single ways of taking slices switched off")
    given = asked.parse_args()
    device = torch.device(given.device)
    revision, dirty = machine.revision()
    record = {"machine": machine.describe(device), "revision": revision, "dirty": dirty, "model": given.model}
    record |= {"rounds": given.rounds, "at_once": AT_ONCE, "rows": []}
    for mode in given.modes:
        for batch in given.batch:
            for row in measure(given.model, mode, batch, given.rounds, device, given.ways):
                record["rows"].append(row)
                ms, share = row["ms"], row["of_standard"]
                print(
                    f"{given.model} {mode} b{batch:<5}{row['scheme']:36}{ms['median']:7.2f} ms "
                    f"({ms['p10']:.2f} to {ms['p90']:.2f})"
                    f"{share['median']:8.1%} of standard ({share['p10']:.1%} to {share['p90']:.1%})"
                )
            given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

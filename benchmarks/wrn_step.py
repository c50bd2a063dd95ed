"""One training step of WRN-28-10 on a GPU: standard dropout, the narrow floor and SliceOut, one process per case.

    PYTHONPATH=src python benchmarks/wrn_step.py CASE MODE BATCH

CASE is standard, narrow, sliceout or controlled; MODE is eager, compile or reduce-overhead. bfloat16 autocast,
channels_last, fused SGD. Prints one JSON line: the median of 40 steps timed one by one, the mean of 40 steps back to
back (what training sees), and the memory. The step runs once with synchronisation forbidden.
"""

from __future__ import annotations

import json
import statistics
import sys

import torch
import torch.nn.functional as F
from torch import nn

import sliceout
from sliceout.lab.models.wide_resnet import WideResNet

RATE, DEPTH, WIDTH = 0.5, 28, 10
MODES = {"eager": None, "compile": "default", "reduce-overhead": "reduce-overhead"}


def build(case: str) -> nn.Module:
    net = WideResNet(DEPTH, WIDTH, dropout=RATE if case == "standard" else 0.0, keep=RATE if case == "narrow" else 1.0)
    if case in ("sliceout", "controlled"):
        sliceout.convert_(net, RATE, scheme=case, example_inputs=torch.zeros(2, 3, 32, 32))
    elif case not in ("standard", "narrow"):
        sys.exit(f"{case}: expected standard, narrow, sliceout or controlled")
    return net.to("cuda", memory_format=torch.channels_last)


def main(case: str, mode: str, batch: int) -> None:
    if mode not in MODES:
        sys.exit(f"{mode}: expected one of {', '.join(MODES)}")
    torch.backends.cudnn.benchmark = True
    net = build(case)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True)
    x = torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,), device="cuda")
    model = net if MODES[mode] is None else torch.compile(net, fullgraph=True, mode=MODES[mode])

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    def timed(n: int) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(n):
            step()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / n

    for _ in range(12):
        step()
    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    row = {
        "case": case,
        "mode": mode,
        "batch": batch,
        "median_ms": round(statistics.median(timed(1) for _ in range(40)), 2),
        "stream_ms": round(timed(40), 2),
        "reserved_mib": torch.cuda.max_memory_reserved() >> 20,
        "allocated_mib": torch.cuda.max_memory_allocated() >> 20,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

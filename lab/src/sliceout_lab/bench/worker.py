"""The worker of ``sliceout-lab bench``: besides timing a case it compiles it ahead, profiles it, or finds a batch size.

``python -m sliceout_lab.bench.worker '{...}'``, as :mod:`sliceout.cli.worker`.
"""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO

import torch

from sliceout.cli.measure import held, measure, release, steady_memory
from sliceout.cli.work import Work, step_of
from sliceout.cli.worker import serve

from .. import energy
from . import profile
from .flops import count_flops
from .networks import PaperWork

MOST = 16
"""How many times the baseline's batch is tried at most when a larger one is looked for."""


def main() -> None:
    serve(json.loads(sys.argv[1]), PaperWork, prepare_and_act)


def prepare_and_act(work: Work, task: dict[str, Any], out: TextIO) -> dict[str, Any]:
    """Count FLOPs beside the preparations of other workers, wait for the parent's line, and then use the device."""
    timed = not any(task.get(k) for k in ("compile_only", "profile")) and task.get("within") is None
    flops = count_flops(work) if timed else None
    print(json.dumps({"ready": True}), file=out, flush=True)
    if not sys.stdin.readline():
        sys.exit("the parent is gone")
    torch.backends.cudnn.benchmark = True
    return {"flops": flops, **act(work, task)}


def act(work: Work, task: dict[str, Any]) -> dict[str, Any]:
    if task.get("compile_only"):
        step = step_of(work, work.case.batch)
        step(), step(), step()
        return {}
    if task.get("tune_first"):
        tune(work, work.case.batch)
        release(work)
    if task.get("within") is not None:
        return largest_batch(work, task["within"])
    if task.get("profile"):
        return profile.look(work, work.case.batch)
    return measure(work, task["seconds"], energy.meter(work.device))


def tune(work: Work, batch: int) -> None:
    """One eager pass, in which libraries choose their algorithms, before a graph is made.

    cuDNN tries algorithms out with workspaces of any size. Tried inside the memory of a CUDA graph, as in the first
    call of a model compiled with reduce-overhead, these would stay there.
    """
    x, y = work.batch(batch)
    with work.casting():
        loss = work.loss(work.net(x), y)
    loss.backward()
    work.optimizer.zero_grad(set_to_none=True)


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
        return held(steady_memory(step_of(work, batch), work, batch))
    except Exception as error:
        if not ran_out(error):
            raise
        return None


def ran_out(error: BaseException | None) -> bool:
    """Whether memory was the reason. Libraries and failed captures raise errors of other kinds for it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(s in str(error) for s in _OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "not enough memory", "can't allocate memory")


if __name__ == "__main__":
    main()

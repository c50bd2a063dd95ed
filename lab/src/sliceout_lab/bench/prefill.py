"""Compiling all cases ahead, several at a time, into Inductor's cache on disk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sliceout.cli.cases import Case

from .run import Worker


def prefill(cases: Sequence[Case], task: dict[str, Any], *, cache: Path, workers: int, deadline: float) -> list[str]:
    """Compile the cases; returns what failed.

    Kernels that were tuned while others kept the GPU busy were tuned wrongly: their choices are thrown away.
    """
    failed = []
    waiting = [c for c in cases if c.compiled]
    running: list[Worker] = []
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < workers:
                running.append(Worker(waiting.pop(0), {**task, "compile_only": True}, cache))
                running[-1].go()
            for worker in list(running):
                answer = worker.answer(time.monotonic() + 0.2)
                if answer is not None and "ready" not in answer:
                    if answer.get("error"):
                        failed.append(f"{worker.case.model} {worker.case.label}: {answer['error']}")
                    worker.stop()
                    running.remove(worker)
    finally:
        for worker in running:
            worker.stop()
    for choice in cache.rglob("*.best_config"):
        choice.unlink(missing_ok=True)
    return failed

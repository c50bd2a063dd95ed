"""Two processes that run jobs for tests, as ranks 0 and 1 of one gloo group; started once, because starting is slow."""

from __future__ import annotations

import datetime
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2
PATIENCE = 120  # seconds for one job; more is a deadlock


class Ranks:
    """``ranks(job, *args)`` runs ``job(rank, *args)`` on both and returns both results. Jobs live in a module."""

    def __init__(self) -> None:
        self.workers: list[tuple[Any, Any]] = []

    def __call__(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        if not self.workers:
            self._start()
        for _, pipe in self.workers:
            pipe.send((job, args))
        answers = []
        for rank, (_, pipe) in enumerate(self.workers):
            answers.append(pipe.recv() if pipe.poll(PATIENCE) else (False, f"no answer within {PATIENCE} s"))
            if not answers[-1][0]:
                self.stop()  # the other rank may wait for this one for ever
                raise AssertionError(f"rank {rank}: {answers[-1][1]}")
        return [answer for _, answer in answers]

    def _start(self) -> None:
        context = mp.get_context("spawn")
        handle, store = tempfile.mkstemp(prefix="sliceout-ranks-")  # a file, not a port: test runs may overlap
        os.close(handle)
        os.unlink(store)
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            self.workers.append((process, ours))

    def stop(self) -> None:
        for process, _ in self.workers:
            process.terminate()
        for process, _ in self.workers:
            process.join(10)
        self.workers = []


def _serve(rank: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=60)
    )
    while True:
        job, args = pipe.recv()
        torch.manual_seed(100 + rank)  # nothing may hang on the global random state being equal
        torch.set_default_dtype(torch.float64)
        try:
            pipe.send((True, job(rank, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))

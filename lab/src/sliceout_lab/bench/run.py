"""Workers side by side while they only prepare, and one at a time while they use the device.

A worker that is prepared prints ``{"ready": true}`` and waits for a line on its standard input.
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from sliceout.cli.cases import Case
from sliceout.cli.run import command, failed

MODULE = "sliceout_lab.bench.worker"
CASE_SECONDS = 240
"""A case that takes longer than this is stuck."""
_SETTINGS = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
"""Of every worker alike, since they are part of the cache's keys; several workers compile at once."""

Say = Callable[[str], None]


def default_cache() -> Path:
    """Where Inductor keeps what it has compiled, for all workers."""
    cache = Path(tempfile.gettempdir()) / f"sliceout-bench-{os.getuid()}"
    cache.mkdir(exist_ok=True)
    return cache


class Worker:
    """A process that prepares a case, waits, and measures it."""

    def __init__(self, case: Case, task: dict[str, Any], cache: Path) -> None:
        self.case = case
        self.log: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115
        how = command(MODULE, case, task)
        how["env"] |= {"TORCHINDUCTOR_CACHE_DIR": str(cache), **_SETTINGS}
        self.process = subprocess.Popen(**how, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log)
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # compilers print what they like
                self.lines.put(line)
        self.lines.put(None)

    def answer(self, until: float) -> dict[str, Any] | None:
        """The next line; ``None`` if time is up. A process that ended without an answer is an error row."""
        try:
            line = self.lines.get(timeout=max(until - time.monotonic(), 0.01))
        except queue.Empty:
            return None
        if line is not None:
            return json.loads(line)
        code = self.process.wait()
        self.log.seek(0)
        return failed(self.case, code, self.log.read())

    def go(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, as its answer will tell

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()


def run_cases(
    cases: Sequence[Case],
    task: dict[str, Any],
    *,
    cache: Path | None = None,
    prepare: int = 0,
    deadline: float = math.inf,
    seconds: float = CASE_SECONDS,
    say: Say = lambda _: None,
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Rows as they come; ends early at ``deadline`` (of ``time.monotonic``), without rows for what was cut off."""
    prepare = prepare or (8 if task["device"] == "cuda" else 1)
    for first in range(0, len(cases), prepare):
        if time.monotonic() > deadline:
            return
        group = [Worker(case, task, cache or default_cache()) for case in cases[first : first + prepare]]
        try:
            prepared = [(w, w.answer(min(deadline, time.monotonic() + CASE_SECONDS))) for w in group]
            for worker, answer in prepared:
                if answer is not None and "ready" in answer and time.monotonic() < deadline:
                    say(f"{worker.case.model} b{worker.case.batch} {worker.case.mode} {worker.case.label}")
                    worker.go()
                    answer = worker.answer(min(deadline, time.monotonic() + seconds))
                    if answer is None and time.monotonic() < deadline:
                        answer = {**worker.case.as_dict(), "error": f"not done after {seconds:g} s"}
                if answer is not None and "ready" not in answer:
                    yield worker.case, answer
                worker.stop()
        finally:
            for worker in group:
                worker.stop()

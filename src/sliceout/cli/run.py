"""Cases in processes of their own, one after another: nothing that one leaves behind reaches the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .cases import Case

CASE_SECONDS = 600
"""A case that takes longer than this is stuck."""


def task(device: str, seconds: float, **more: Any) -> dict[str, Any]:
    """The settings of a worker, besides its case."""
    threads = 2 if device == "cuda" else torch.get_num_threads()
    return {"device": device, "seconds": seconds, "threads": threads, **more}


def command(module: str, case: Case, task: dict[str, Any]) -> dict[str, Any]:
    """How the worker in ``module`` is started for a case: it imports what this process would."""
    path = os.pathsep.join(filter(None, sys.path))
    arguments = [sys.executable, "-m", module, json.dumps({"case": case.as_dict(), **task})]
    return {"args": arguments, "env": {**os.environ, "PYTHONPATH": path}, "text": True}


def failed(case: Case, code: int, log: str) -> dict[str, Any]:
    """The row of a worker that ended without one."""
    last = (log.strip().splitlines() or ["nothing printed"])[-1]
    return {**case.as_dict(), "error": f"the worker ended with code {code}: {last[:300]}"}


def run_cases(cases: Iterable[Case], task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The row of each case as it is measured; whatever goes wrong is in its ``error``."""
    for case in cases:
        try:
            done = subprocess.run(
                **command("sliceout.cli.worker", case, task), capture_output=True, timeout=CASE_SECONDS
            )
        except subprocess.TimeoutExpired:
            yield {**case.as_dict(), "error": f"not done after {CASE_SECONDS} s"}
            continue
        rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
        yield json.loads(rows[-1]) if rows else failed(case, done.returncode, done.stderr)

"""One case in a process of its own: ``python -m sliceout.cli.worker '{...}'`` prints lines of JSON.

It imports, builds and converts at once, prints ``{"ready": true}`` and waits for a line on its standard input: the
parent starts several workers side by side, but lets one at a time use the device. Then it warms up, compiles or
captures, measures memory and time, and prints its row. Whatever goes wrong becomes the row's ``error``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from .cases import case_of
from .measure import measure
from .work import Work, set_precision

Action = Callable[[Work, dict[str, Any]], dict[str, Any]]


def main() -> None:
    serve(json.loads(sys.argv[1]), Work, lambda work, task: measure(work, task["seconds"]))


def serve(task: dict[str, Any], build: type[Work], act: Action, prepare: Action = lambda work, task: {}) -> None:
    """Build the case of ``task``, wait for the parent's line, and print the row that ``prepare`` and ``act`` make.

    ``prepare`` runs beside the preparations of other workers, ``act`` has the device to itself.
    """
    out = sys.stdout
    sys.stdout = sys.stderr  # compilers print: the parent reads JSON
    case = case_of(task["case"])
    row: dict[str, Any] = {**case.as_dict(), "error": None}
    started = time.perf_counter()
    try:
        torch.set_num_threads(task["threads"])
        set_precision(case.precision)
        work = build(case, torch.device(task["device"]))
        row["parameters"] = sum(p.numel() for p in work.net.parameters())
        row.update(prepare(work, task))
        print(json.dumps({"ready": True}), file=out, flush=True)
        if not sys.stdin.readline():  # the parent is gone
            return
        torch.backends.cudnn.benchmark = True
        row.update(act(work, task))
    except torch.OutOfMemoryError as error:
        row["error"] = "out of memory: " + str(error).partition(". ")[0]
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0][:300]
        row["error"] = f"{type(error).__name__}: {first_line}"
    row["worker_seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(row), file=out, flush=True)


if __name__ == "__main__":
    main()

"""One case in a process of its own: ``python -m sliceout.cli.worker '{...}'`` prints its row as a line of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch

from .cases import case_of
from .measure import measure
from .work import Work, kept_weights, set_precision

Action = Callable[[Work, dict[str, Any], TextIO], dict[str, Any]]


def main() -> None:
    serve(json.loads(sys.argv[1]), Work, lambda work, task, out: measure(work, task["seconds"]))


def serve(task: dict[str, Any], build: type[Work], act: Action) -> None:
    """Build the case of ``task`` and print the row that ``act`` makes; whatever goes wrong is in its ``error``."""
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
        row["kept_weights"] = kept_weights(work.net)
        row.update(act(work, task, out))
    except torch.OutOfMemoryError as error:
        row["error"] = "out of memory: " + str(error).partition(". ")[0]
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0][:300]
        row["error"] = f"{type(error).__name__}: {first_line}"
    row["worker_seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(row), file=out, flush=True)


if __name__ == "__main__":
    main()

"""Results: one JSON line a run, appended whole or not at all.

Several processes may append to one file: a lock keeps them apart. What a killed process left of a line is set aside
in a file of its own before the next line is written, and skipped with a word when reading.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sliceout.cli import UserError

from . import machine
from .train.checkpoint import writing

NAME = "results.jsonl"


def _complain(message: str) -> None:
    print(f"sliceout-lab: {message}", file=sys.stderr)


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line to the file at ``path``; it is on the disk when this returns, or the file is as it was."""
    line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    with writing(path, "no result was lost, the run can be finished by the same command"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            end = _settle_end(handle, path)
            try:
                if os.pwrite(handle, line, end) < len(line):
                    raise OSError(28, "No space left on device")
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, end)
                raise
        finally:
            os.close(handle)


def read(path: Path, say: Callable[[str], None] = _complain) -> list[dict[str, Any]]:
    """All records in the file at ``path``; what is no JSON object is skipped, and ``say`` is told."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    records = []
    for number, line in enumerate(data.splitlines(), 1):
        record = _parsed(line)
        if record is not None:
            records.append(record)
        elif line.strip():
            say(f"{path}:{number}: not a whole result (was a process killed while it wrote?), skipped")
    return records


def by_id(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The newest record of every run; what lacks a result does not count as one."""
    return {r["id"]: r for r in records if "id" in r and r.get("final") and r.get("epochs")}


def _settle_end(handle: int, path: Path) -> int:
    """Where the next line begins; a torn one before it is moved to a file beside."""
    size = os.fstat(handle).st_size
    if size == 0:
        return 0
    data = os.pread(handle, size, 0)
    start = data.rfind(b"\n") + 1
    torn = data[start:]
    if not torn:
        return size
    if _parsed(torn) is not None:  # only the end of the line is missing
        os.pwrite(handle, b"\n", size)
        return size + 1
    with path.with_name(f"{path.name}.torn").open("ab") as aside:
        aside.write(torn + b"\n")
        aside.flush()
        os.fsync(aside.fileno())
    os.ftruncate(handle, start)
    return start


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


# -- where a result comes from -----------------------------------------------------------------------------------------


def environment(device: torch.device) -> dict[str, Any]:
    """The machine, for a record."""
    about = machine.describe(device)
    try:
        about["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        about["triton"] = None
    if device.type == "cuda":
        about["gpu_memory"] = torch.cuda.get_device_properties(device).total_memory
        about["cuda"] = torch.version.cuda
        about["cudnn"] = torch.backends.cudnn.version()
    return about


@functools.cache
def revision() -> tuple[str | None, bool | None]:
    """The git revision of this code, and whether it was changed since; ``$SLICEOUT_REVISION`` where there is no git."""
    if given := os.environ.get("SLICEOUT_REVISION"):
        return given.removesuffix("-dirty"), given.endswith("-dirty")
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "HEAD")
        return head, bool(_git(here, "status", "--porcelain", "--", str(here.parent)))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=20
    ).stdout.strip()

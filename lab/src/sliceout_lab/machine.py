"""Where a result comes from: the machine, the versions, the revision, and what else the machine was doing."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sliceout.cli.machine import describe

__all__ = ["cpu_seconds_of_others", "describe", "environment", "revision"]


def environment(device: torch.device) -> dict[str, Any]:
    """The machine, for a record."""
    about = describe(device)
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
    root = Path(__file__).parents[3]  # of the repository, in a checkout
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head, bool(_git(root, "status", "--porcelain", "--", "src", "lab/src"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=20
    ).stdout.strip()


def cpu_seconds_of_others() -> float:
    """CPU time that everything but this process has used since boot, what the hypervisor took included.

    The difference of two calls says whether a measurement between them was disturbed. Always 0 where there is no
    ``/proc/stat``.
    """
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, stolen = map(int, stat.read_text().split()[1:9])
    busy = (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")
    return busy - time.process_time()

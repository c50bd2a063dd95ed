"""docs/performance.md from the committed results."""

from pathlib import Path


def write() -> Path:
    raise NotImplementedError

"""``python -m sliceout_lab``."""

from __future__ import annotations

from .cli import script

if __name__ == "__main__":
    script()

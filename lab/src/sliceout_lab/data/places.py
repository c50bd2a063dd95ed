"""Where data is looked for: one list of folders for all data sets."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .files import present

VARIABLE = "SLICEOUT_DATA"


def roots(folder: Path | None = None) -> list[Path]:
    """The folder that was asked for and no other; else ``$SLICEOUT_DATA``, ``./data`` and ``~/.cache/sliceout``."""
    if folder is not None:
        return [Path(folder)]
    named = os.environ.get(VARIABLE)
    return [*([Path(named)] if named else []), Path("data"), Path.home() / ".cache" / "sliceout"]


def home(folder: Path | None = None) -> Path:
    """Where new data goes: the folder that was asked for, else ``$SLICEOUT_DATA``, else ``~/.cache/sliceout``."""
    if folder is not None:
        return Path(folder)
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "sliceout"


def find(places: Iterable[Path], inside: Iterable[str], files: Iterable[str]) -> Path | None:
    """The first folder that holds all the files (packed or not): in each place, the folders ``inside`` in turn.

    A file may also be a folder: ImageNet is told by its ``train`` and ``val``.
    """
    inside, files = tuple(inside), tuple(files)
    for place in places:
        for name in inside:
            if all(present(place / name, file) or (place / name / file).is_dir() for file in files):
                return place / name
    return None

"""Is a data set what it should be? Official checksums where they are known; otherwise everything is read."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .catalogue import Dataset, Layout
from .files import DataError, present, read
from .official import CONTENTS
from .sets import ImageFolder


def check(dataset: Dataset, folder: Path, layout: Layout) -> str:
    """Verify a data set that lies in ``folder``, and say how.

    Raises:
        DataError: naming the first file that is not what it should be.
    """
    known = CONTENTS.get(dataset.name, {})
    if all(file in known for file in layout.files):
        for file in layout.files:
            check_file(_there(folder, file), *known[file])
        return f"{len(layout.files)} files have their official checksums"
    if dataset.corpus is not None:
        corpus = dataset.corpus(folder)
        files = [*corpus.train, *corpus.valid, *corpus.test]
        for path in files:
            if not read(path).strip():
                raise DataError(f"{path}: holds no text")
        return f"{len(files)} files are whole (there are no official checksums of single files)"
    assert dataset.read is not None
    loaded = dataset.read(folder)
    what = f"{len(loaded.train):,} training and {len(loaded.test):,} test images"
    if isinstance(loaded, ImageFolder):
        return f"{what} are there; they are decoded when they are fed"
    return f"{what} are whole (there are no official checksums of single files)"


def check_file(path: Path, algorithm: str, expected: str) -> None:
    """Compare the contents of a file, unpacked, with its checksum."""
    found = hashlib.new(algorithm, read(path)).hexdigest()
    if found != expected:
        raise DataError(
            f"{path}: wrong checksum: {algorithm} {found}, the official file has {expected}. It is damaged, or "
            "another file under this name; remove it and run `sliceout-lab data get`"
        )


def _there(folder: Path, file: str) -> Path:
    path = present(folder, file)
    if path is None:
        raise DataError(f"{folder}: holds no {file}")
    return path

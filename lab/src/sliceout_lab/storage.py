"""Files that are written whole or not at all, and a plain message where they cannot be."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sliceout.cli import UserError


@contextlib.contextmanager
def whole_file(
    path: Path, kept: str = "", *, temporary: Path | None = None, previous: Path | None = None
) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of ``path`` when all of it is on the disk.

    Args:
        path: what is there stays until then.
        kept: for the error message: what is not lost if this fails.
        temporary: where it is written first.
        previous: keeps what was in ``path`` before.
    """
    temporary = temporary or path.with_name(f"{path.stem}.{os.getpid()}.writing")  # of this process alone
    try:
        with explained(path, kept):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if previous is not None:
                with contextlib.suppress(FileNotFoundError):
                    path.replace(previous)
            temporary.replace(path)
            _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def explained(path: Path, kept: str = "") -> Iterator[None]:
    """Turn an error of the system while writing into one that says what to do.

    Raises:
        UserError: naming ``path``, the reason and what is ``kept``.
    """
    try:
        yield
    except Exception as error:
        cause = _os_error(error)
        if cause is None:
            raise
        rest = f"; {kept}" if kept else ""
        if cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(f"{path}: the disk is full ({cause.strerror}){rest}. Make room and call again") from error
        raise UserError(f"{path}: cannot write there ({cause.strerror}){rest}") from error


def free_name(path: Path) -> Path:
    """``path``, or the first of ``path2``, ``path3``, ... where nothing is yet."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_stem(f"{path.stem}{number}")
    return free


def _os_error(error: BaseException | None) -> OSError | None:
    """The error of the system, also where torch's writer covers it with one of its own."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _sync_folder(folder: Path) -> None:
    """Force a rename in it to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

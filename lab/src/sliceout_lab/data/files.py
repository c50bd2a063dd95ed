"""Reading files so that whatever is wrong with one is said with its name."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import zlib
from pathlib import Path

from sliceout.cli import UserError

PACKED = ("", ".gz", ".xz")
GZIP, XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"


class DataError(UserError):
    """A data file is missing or is not what it should be; the message names the file."""


def present(folder: Path, name: str) -> Path | None:
    """The file under this name, or packed with gzip or xz."""
    return next((p for end in PACKED if (p := folder / f"{name}{end}").is_file()), None)


def read(path: Path) -> bytes:
    """The content of a file, unpacked if it is a gzip or xz file (known by its first bytes, not by its name).

    Raises:
        DataError: if the file cannot be read or is damaged.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        if raw.startswith(GZIP):
            return gzip.decompress(raw)
        if raw.startswith(XZ):
            return lzma.decompress(raw)
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: damaged {'gzip' if raw.startswith(GZIP) else 'xz'} file ({error})") from error
    return raw


def read_text(path: Path) -> str:
    """Like ``read``, as UTF-8 text with ``\\n`` at the ends of lines."""
    try:
        text = read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text (byte {error.start}: {error.reason})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def may_write(folder: Path) -> bool:
    """Whether a folder (or the nearest one above it that is there) is meant to be written to.

    The superuser can write anywhere; a folder that nobody has leave to write to is left alone all the same.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def digest(path: Path, algorithm: str) -> str:
    """The hash of a file as it lies on disk, read piece by piece: archives may be larger than memory."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, algorithm).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error

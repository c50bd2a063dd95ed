"""Checkpoints that survive a kill at any moment: written beside the last one, checked when read, never half there.

A file is what ``torch.save`` writes, followed by its length and checksum. It is written under another name, forced to
the disk and then renamed. The one before it is kept, for the case that the newest is damaged by something else.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sliceout.cli import UserError

SCHEMA = 1
_TRAILER = struct.Struct("<8sQI")
_MAGIC = b"sliceout"


class Checkpoints:
    """The checkpoints of one run, in its own folder."""

    def __init__(self, folder: Path, say: Callable[[str], None] = print) -> None:
        self.folder, self.say = folder, say
        self.newest, self.previous = folder / "checkpoint.pt", folder / "checkpoint.previous.pt"
        self.writing = folder / "checkpoint.writing"
        self._lock: Any = None

    def claim(self, wait: float = 0.0) -> None:
        """Keep other processes from training the same run in the same folder at the same time.

        ``wait`` so many seconds for one that is about to stop.
        """
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("a+")
        until = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if time.monotonic() < until:
                    time.sleep(0.1)
                    continue
                self.release()
                told = f"{self.folder}: another process is training this run: wait for it, or stop it"
                raise UserError(told) from error

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def save(self, state: dict[str, Any]) -> None:
        """Write ``state``; until it is whole on the disk, the last one stays."""
        temporary = self.writing
        try:
            with writing(self.newest, "the last checkpoint is as it was"):
                with temporary.open("wb") as raw:
                    file: Any = _Checked(raw)
                    torch.save({"schema": SCHEMA, **state}, file)
                    raw.write(_TRAILER.pack(_MAGIC, file.length, file.checksum))
                    raw.flush()
                    os.fsync(raw.fileno())
                if self.newest.exists():
                    self.newest.replace(self.previous)
                temporary.replace(self.newest)
                sync_folder(self.folder)
        finally:
            temporary.unlink(missing_ok=True)

    def load(self) -> dict[str, Any] | None:
        """The newest good state; ``None`` if there is none yet.

        A damaged file is set aside, never overwritten: the one before it takes its place.

        Raises:
            UserError: if there are checkpoints, but none is good.
        """
        found = [p for p in (self.newest, self.previous) if p.exists()]
        problems = []
        for path in found:
            try:
                state = read(path)
            except ValueError as error:
                problems.append(f"{path}: {error}")
                continue
            for damaged in found[: found.index(path)]:
                aside = _free_name(damaged.with_name("checkpoint.damaged.pt"))
                damaged.replace(aside)
                self.say(f"{problems[0]}. It is kept as {aside.name}; going on from the checkpoint before it")
            return state
        if problems:
            raise UserError(f"{'; '.join(problems)}. To train this run anew, add --fresh")
        return None

    def remove(self) -> None:
        """The run is finished, or is to start anew."""
        for path in (self.newest, self.previous, self.writing):
            path.unlink(missing_ok=True)

    def remove_folder(self) -> None:
        """When nothing in it is needed any more."""
        self.remove()
        if not {p.name for p in self.folder.iterdir()} - {"lock", "job.json"}:
            shutil.rmtree(self.folder, ignore_errors=True)


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint.

    Raises:
        ValueError: saying what is wrong with the file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    body = memoryview(data)[: -_TRAILER.size]
    if len(data) < _TRAILER.size:
        raise ValueError(f"damaged: only {len(data)} bytes")
    magic, length, checksum = _TRAILER.unpack(data[-_TRAILER.size :])
    if magic != _MAGIC or length != len(body):
        raise ValueError(f"damaged: cut off after {len(data)} bytes")
    if zlib.crc32(body) != checksum:
        raise ValueError("damaged: its checksum does not fit")
    state = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    if state.get("schema") != SCHEMA:
        raise ValueError(f"was written by another version (schema {state.get('schema')}, expected {SCHEMA})")
    return state


class _Checked(io.RawIOBase):
    """A file that counts and sums up what passes through it."""

    def __init__(self, file: Any) -> None:
        self.file, self.length, self.checksum = file, 0, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.length += len(data)
        self.checksum = zlib.crc32(data, self.checksum)
        return self.file.write(data)

    def flush(self) -> None:
        if not self.file.closed:
            self.file.flush()


class writing:
    """Say plainly why something could not be written."""

    def __init__(self, path: Path, kept: str = "") -> None:
        self.path, self.kept = path, kept

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: Any) -> None:
        cause = _os_error(error)
        if cause is None:
            return
        rest = f"; {self.kept}" if self.kept else ""
        if cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(
                f"{self.path}: the disk is full ({cause.strerror}){rest}. Make room and call again"
            ) from error
        raise UserError(f"{self.path}: cannot write there ({cause.strerror}){rest}") from error


def _os_error(error: BaseException | None) -> OSError | None:
    """The error of the system, also where torch's writer covers it with one of its own."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def sync_folder(folder: Path) -> None:
    """Force a rename in it to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free_name(path: Path) -> Path:
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_stem(f"{path.stem}{number}")
    return free

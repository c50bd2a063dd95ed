"""Checkpoints that survive a kill at any moment: written beside the last one, checked when read, never half there.

The one before the newest is kept, for the case that the newest is damaged by something else.
"""

from __future__ import annotations

import fcntl
import io
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sliceout.cli import UserError

from ..storage import explained, free_name, whole_file

SCHEMA = 1


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
        with explained(self.folder):
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
                message = f"{self.folder}: another process is training this run: wait for it, or stop it"
                raise UserError(message) from error

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def save(self, state: dict[str, Any]) -> None:
        """Write ``state``; until it is whole on the disk, the last one stays."""
        kept = "the last checkpoint is as it was"
        with whole_file(self.newest, kept, temporary=self.writing, previous=self.previous) as file:
            torch.save({"schema": SCHEMA, **state}, file)

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
                aside = free_name(damaged.with_name("checkpoint.damaged.pt"))
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
    """The state in a checkpoint: a zip file, as ``torch.save`` writes it, with a checksum for every tensor.

    Raises:
        ValueError: saying what is wrong with the file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()  # torch.load does not compare the checksums
    except zipfile.BadZipFile as error:
        raise ValueError(f"damaged: cut off after {len(data)} bytes") from error
    if damaged is not None:
        raise ValueError(f"damaged: the checksum of {damaged} does not fit")
    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if state.get("schema") != SCHEMA:
        raise ValueError(f"was written by another version (schema {state.get('schema')}, expected {SCHEMA})")
    return state

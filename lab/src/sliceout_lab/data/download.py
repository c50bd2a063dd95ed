"""Fetching official files: continued where a download broke off, checked, and only then put in place.

Everything is written under ``.downloads`` in the data folder first. A file gets its real name by a rename, after its
checksum was found right: what has that name is whole. A file of that name that is there already is never written over.
"""

from __future__ import annotations

import errno
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from .files import DataError, digest, may_write
from .official import Download

PIECE = 2**20
TIMEOUT = 30.0
AGENT = "sliceout"
Progress = Callable[[int, int | None], None]
"""Called with the bytes that are there and, if known, all there will be."""


class Unreachable(DataError):
    """A server did not answer: there may be no internet here."""


def fetch(download: Download, dest: Path, progress: Progress = lambda done, total: None) -> list[Path]:
    """Fetch one file into the data folder ``dest``; an archive is unpacked there.

    Returns:
        What was put in place.

    Raises:
        Unreachable: if the server cannot be reached or breaks off; what has arrived is kept, and the next call goes on.
        DataError: if the checksum is wrong, or the folder cannot be written to or is full.
    """
    if not may_write(dest):
        raise DataError(f"{dest}: cannot write there (read-only); choose another folder with --to DIR")
    scratch = dest / ".downloads"
    part = scratch / f"{download.name}.part"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        if not (part.is_file() and digest(part, download.algorithm) == download.checksum):
            _verified(download, part, progress)
        if download.archive:
            placed = _unpack(part, download.name, scratch, dest)
            part.unlink()
        else:
            placed = [_place(part, dest / download.folder / download.name)]
    except OSError as error:
        raise DataError(_complaint(error, dest)) from error
    shutil.rmtree(scratch / "unpacked", ignore_errors=True)
    if not any(scratch.iterdir()):
        scratch.rmdir()
    return placed


def _verified(download: Download, part: Path, progress: Progress) -> None:
    """Fetch into ``part`` and check it. What an earlier attempt left may be bad: then once more from the beginning."""
    continued = part.is_file() and part.stat().st_size > 0
    _transfer(download.url, part, progress)
    found = digest(part, download.algorithm)
    if found != download.checksum and continued:
        part.unlink()
        _transfer(download.url, part, progress)
        found = digest(part, download.algorithm)
    if found != download.checksum:
        part.unlink()
        raise DataError(
            f"{download.url}: wrong checksum: {download.algorithm} {found}, expected {download.checksum}. Nothing was "
            "put in place; try again later, or place the file by hand"
        )


def _transfer(url: str, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"User-Agent": AGENT})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            have = have if answer.status == http.client.PARTIAL_CONTENT else 0  # or the server sends all of it again
            length = answer.headers.get("Content-Length")
            total = have + int(length) if length is not None else None
            _room_for(part, total, have)
            with part.open("ab" if have else "wb") as file:
                progress(have, total)
                while piece := _received(answer, url):
                    file.write(piece)
                    have += len(piece)
                    progress(have, total)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # all of it is there already, or it is not this file: the checksum decides
        raise Unreachable(f"{url}: the server answers {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise Unreachable(f"{url}: cannot be reached ({error.reason})") from error
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise Unreachable(f"{url}: does not answer ({type(error).__name__})") from error
    if total is not None and have < total:
        raise Unreachable(f"{url}: broke off after {have:,} of {total:,} bytes; run the command again to continue")


def _received(answer: http.client.HTTPResponse, url: str) -> bytes:
    """The next piece. Errors of the network are told from errors of the disk here: both are ``OSError``."""
    try:
        return answer.read(PIECE)
    except (http.client.HTTPException, OSError) as error:
        raise Unreachable(f"{url}: broke off ({type(error).__name__}); run the command again to continue") from error


def _room_for(part: Path, total: int | None, have: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if total is not None and total - have > free:
        raise OSError(errno.ENOSPC, f"{total - have:,} bytes are needed, {free:,} are free")


def _unpack(archive: Path, name: str, scratch: Path, dest: Path) -> list[Path]:
    """Unpack aside, then put every top folder in place."""
    aside = scratch / "unpacked"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        if name.endswith(".zip"):
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(aside)
        else:
            if not hasattr(tarfile, "data_filter"):
                raise DataError(f"{archive}: only Python 3.11.4 and newer can unpack it safely; unpack it by hand")
            with tarfile.open(archive) as tar:
                tar.extractall(aside, filter="data")  # nothing outside of the folder, no links, no devices
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive}: damaged archive ({error})") from error
    return [_place(entry, dest / entry.name) for entry in sorted(aside.iterdir())]


def _place(source: Path, target: Path) -> Path:
    """Give a file or folder its name; what has that name already is kept beside it as ``NAME.old``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        old, n = target.with_name(f"{target.name}.old"), 1
        while old.exists():
            n += 1
            old = target.with_name(f"{target.name}.old{n}")
        os.replace(target, old)
    os.replace(source, target)
    return target


def _complaint(error: OSError, dest: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{dest}: the disk is full ({error.strerror}); what has arrived is kept, make room and run it again"
    return f"{dest}: cannot write there ({error.strerror or error}); choose another folder with --to DIR"

"""Results of training: one JSON file a run, named after its id, written whole or not at all.

Processes that write into one folder do not meet: each run has a file of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sliceout.cli import UserError

from .storage import explained, free_name, whole_file

NAME = "results"
"""The folder beside the checkpoints of an experiment."""


def _warn(message: str) -> None:
    print(f"sliceout-lab: {message}", file=sys.stderr)


def write(folder: Path, record: dict[str, Any]) -> None:
    """Keep ``record``; it is on the disk when this returns, or what was there before is as it was.

    An earlier result of the same run stays beside it under another name: the newest counts.
    """
    text = json.dumps(record, allow_nan=False, indent=1) + "\n"
    path, kept = folder / f"{record['id']}.json", "no result was lost, the run can be finished by the same command"
    with explained(path, kept):
        folder.mkdir(parents=True, exist_ok=True)
    with whole_file(path, kept, previous=free_name(path.with_stem(f"{path.stem}.earlier"))) as file:
        file.write(text.encode())


def read(folder: Path, say: Callable[[str], None] = _warn) -> list[dict[str, Any]]:
    """All records in ``folder``, oldest first; ``say`` is called for files that are none."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_bytes())
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            say(f"{path}: not a whole result, skipped")
    return sorted(records, key=date_of)


def by_id(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The records by run; what lacks a result does not count as one."""
    return {r["id"]: r for r in records if "id" in r and r.get("final") and r.get("epochs")}


def date_of(record: dict[str, Any]) -> str:
    """When it was written down, in a form that sorts."""
    return str((record.get("machine") or {}).get("date", ""))

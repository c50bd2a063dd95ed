"""What was measured: training runs and benchmarks, JSON files that say by their ``kind`` what they are.

A file that cannot be used is left out and named, on the console and on the page: that must cost neither the other
files nor the reader's trust.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sliceout.cli import UserError

from ..results import date_of

SCHEMA = 1
NEEDED = ("config", "seed", "epochs", "final")
"""Fields without which a training run says nothing."""


@dataclass(frozen=True)
class Run:
    """One finished training run, and where it stands."""

    record: dict[str, Any]
    where: str

    @property
    def config(self) -> dict[str, Any]:
        return self.record["config"]

    @property
    def scaled(self) -> dict[str, Any]:
        """What was scaled down: ``{"epochs": [declared, used]}``."""
        return self.record.get("scaled") or {}

    @property
    def alone(self) -> bool:
        """Whether it had the device for itself. If not, its time and energy say nothing about the method.

        A CPU is never known to do nothing else.
        """
        on_cpu = str((self.record.get("machine") or {}).get("torch")).endswith("+cpu")
        return not on_cpu and int(self.record.get("concurrent") or 1) <= 1


@dataclass
class Measured:
    """Everything that a report is made of."""

    runs: list[Run] = field(default_factory=list)
    benches: list[dict[str, Any]] = field(default_factory=list)
    """Benchmark files; each has ``where`` added."""
    warnings: list[str] = field(default_factory=list)


def load(results: Iterable[Path], bench: Iterable[Path] = ()) -> Measured:
    """Read training results and benchmarks.

    Args:
        results: JSON files of training runs or benchmarks, or folders with such files.
        bench: JSON files of ``sliceout-lab bench``, or folders with such files.
    """
    found = Measured()
    for path in _files(results):
        _read(path, found, named=path in map(Path, results), of_train=True)
    seen = {b["where"] for b in found.benches}
    for path in _files(bench):
        if str(path) not in seen:
            _read(path, found, named=path in map(Path, bench), of_train=False)
    found.runs.sort(key=lambda run: (str(Path(run.where).parent), date_of(run.record)))
    found.runs = _newest(found)
    return found


def _files(paths: Iterable[Path]) -> list[Path]:
    """The files among ``paths``, and all JSON files in the folders among them, each once."""
    found = [p for path in map(Path, paths) for p in (sorted(path.rglob("*.json")) if path.is_dir() else [path])]
    return list(dict.fromkeys(found))


def _read(path: Path, found: Measured, *, named: bool, of_train: bool) -> None:
    """A file of another kind is passed over in a folder, and an error where the user named it."""
    try:
        record = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file or folder") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        found.warnings.append(f"{path}:{error.lineno}: not complete JSON, left out ({error.msg})")
        return
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in ("bench", "train") or (kind == "train" and not of_train):
        if named:
            expected = 'training (no "kind": "train")' if of_train else 'sliceout bench (no "kind": "bench")'
            raise UserError(f"{path}: not a result of {expected}")
    elif problem := _problem(record):
        found.warnings.append(f"{path}: {problem}, left out")
    elif kind == "bench":
        found.benches.append({**record, "where": str(path)})
    else:
        found.runs.append(Run(record, str(path)))


def _problem(record: dict[str, Any]) -> str | None:
    if record.get("schema") != SCHEMA:
        return f"schema {record.get('schema')!r}, this version reads {SCHEMA}"
    if record["kind"] == "bench":
        return None
    missing = [name for name in NEEDED if name not in record]
    if missing:
        return f"no field {missing[0]!r}"
    if not isinstance(record["config"], dict) or not isinstance(record["epochs"], list):
        return "config is not an object, or epochs is not a list"
    lacking = [name for name in ("data", "model", "scheme") if not record["config"].get(name)]
    return f"config has no {lacking[0]!r}" if lacking else None


def _newest(found: Measured) -> list[Run]:
    """The same run kept twice counts once: the later one."""
    by_id: dict[str, Run] = {}
    for run in found.runs:
        key = run.record.get("id") or run.where
        if key in by_id:
            old, run = sorted((by_id.pop(key), run), key=lambda r: date_of(r.record))
            found.warnings.append(f"{old.where}: the same run stands again in {run.where}, which counts")
        by_id[key] = run
    return list(by_id.values())

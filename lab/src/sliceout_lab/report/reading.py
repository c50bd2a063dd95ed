"""What was measured: training runs (``*.jsonl``) and benchmarks (``*.json``), read with care.

A line that cannot be used is left out and named with its file and line, on the console and on the page: a killed
process leaves half a line behind, and that must cost neither the other lines nor the reader's trust.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sliceout.cli import UserError

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
        """Whether it had the device for itself. If not, its time and energy say nothing about the method."""
        return int(self.record.get("concurrent") or 1) <= 1


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
        results: files of one JSON object a line, or folders with such files (and, in a folder, benchmarks as well).
        bench: JSON files of ``sliceout-lab bench``, or folders with such files.
    """
    found = Measured()
    lines, benches = [], []
    for path in map(Path, results):
        if path.is_dir():
            lines += sorted(path.rglob("*.jsonl"))
            benches += sorted(path.rglob("*.json"))
        elif path.suffix == ".json":
            benches.append(path)
        else:
            lines.append(path)
    for path in map(Path, bench):
        benches += sorted(path.rglob("*.json")) if path.is_dir() else [path]
    asked = {Path(p) for p in (*results, *bench) if not Path(p).is_dir()}
    for path in dict.fromkeys(lines):
        _read_runs(path, found)
    for path in dict.fromkeys(benches):
        _read_bench(path, found, named=path in asked)
    found.runs = _newest(found)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file or folder") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _read_runs(path: Path, found: Measured) -> None:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            found.warnings.append(f"{where}: not a complete JSON line, left out ({error.msg} at column {error.colno})")
            continue
        if problem := _problem(record):
            found.warnings.append(f"{where}: {problem}, left out")
        else:
            found.runs.append(Run(record, where))


def _problem(record: Any) -> str | None:
    if not isinstance(record, dict):
        return f"a {type(record).__name__} where a JSON object is expected"
    if record.get("kind") != "train":
        return f"kind {record.get('kind')!r}, expected 'train'"
    if record.get("schema") != SCHEMA:
        return f"schema {record.get('schema')!r}, this version reads {SCHEMA}"
    missing = [name for name in NEEDED if name not in record]
    if missing:
        return f"no field {missing[0]!r}"
    if not isinstance(record["config"], dict) or not isinstance(record["epochs"], list):
        return "config is not an object, or epochs is not a list"
    lacking = [name for name in ("data", "model", "scheme") if not record["config"].get(name)]
    return f"config has no {lacking[0]!r}" if lacking else None


def _read_bench(path: Path, found: Measured, *, named: bool) -> None:
    """A file of another kind is passed over in a folder, and an error where the user named it."""
    try:
        record = json.loads(_text(path))
    except json.JSONDecodeError as error:
        found.warnings.append(f"{path}:{error.lineno}: not complete JSON, left out ({error.msg})")
        return
    if not isinstance(record, dict) or record.get("kind") != "bench":
        if named:
            raise UserError(f'{path}: not a result of sliceout bench (no "kind": "bench")')
    elif record.get("schema") != SCHEMA:
        found.warnings.append(f"{path}: schema {record.get('schema')!r}, this version reads {SCHEMA}, left out")
    else:
        found.benches.append({**record, "where": str(path)})


def _newest(found: Measured) -> list[Run]:
    """The same run written twice counts once: the later line."""
    by_id: dict[str, Run] = {}
    for run in found.runs:
        key = run.record.get("id") or run.where
        if key in by_id:
            found.warnings.append(f"{by_id[key].where}: the same run stands again in {run.where}, which counts")
            del by_id[key]
        by_id[key] = run
    return list(by_id.values())

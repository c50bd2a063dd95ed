"""The paper's approach 2: a larger batch in the memory that standard dropout needs.

The batch is searched for in one process, with real steps, and then measured in a process of its own, exactly as the
baseline was: libraries and allocators keep nothing from the search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sliceout.cli.cases import Case, case_of
from sliceout.cli.measure import held

from .run import CASE_SECONDS, Say, run_cases

SEARCH_SECONDS = 5 * CASE_SECONDS
"""A search makes about ten steps of other shapes, and each may be compiled."""
KEYS = ("model", "mode", "precision", "rate", "sampling", "grads", "align", "stages", "size", "parts")


def baseline_of(case: Case, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The row of standard dropout at the same rate, or of no dropout where the network has none."""
    good = [r for r in rows if r["error"] is None and case_of(r).setting == case.setting]
    standard = next((r for r in good if r["scheme"] == "standard" and r["rate"] == case.rate), None)
    return standard or next((r for r in good if r["scheme"] == "none"), None)


def key_of(entry: dict[str, Any]) -> tuple[Any, ...]:
    """What an entry was measured for: an entry that is there is not measured again."""
    return (entry["standard"]["batch"], *(entry.get(k, 1 if k == "parts" else None) for k in KEYS))


def match(
    rows: list[dict[str, Any]],
    cases: Sequence[Case],
    there: Sequence[dict[str, Any]],
    task: dict[str, Any],
    *,
    cache: Path,
    deadline: float,
    say: Say,
) -> Iterator[dict[str, Any]]:
    """For each SliceOut case with a baseline beside it: its largest batch at equal memory, and how fast that is.

    Memory is what the caching allocator reserves on a GPU, and the peak of live tensors on a CPU.
    """
    done = {key_of(entry) for entry in there}
    for case in (c for c in cases if c.scheme == "sliceout"):
        base = baseline_of(case, rows)
        if base is None or not held(base):
            say(f"{case.model} b{case.batch} {case.mode} {case.label}: no baseline was measured to match")
            continue
        entry = {k: getattr(case, k) for k in KEYS} | {
            "baseline": base["scheme"], "standard": _shown(base), "sliceout": None, "capped": False, "tried": {},
        }  # fmt: skip
        if key_of(entry) in done:
            continue
        limit = held(base)
        say(f"searching for the largest batch within {limit / 2**20:,.1f} MiB")  # type: ignore[operator]
        how: dict[str, Any] = {"cache": cache, "prepare": 1, "deadline": deadline, "say": say}
        found = next((r for _, r in run_cases([case], {**task, "within": limit}, seconds=SEARCH_SECONDS, **how)), None)
        if found is None:  # time is up
            return
        entry |= {"tried": found.get("tried", {}), "capped": found.get("capped", False), "error": found["error"]}
        if found["error"] is None:
            row = _measured(case, found, limit, task, how)  # type: ignore[arg-type]
            if row is None:
                return
            entry |= {"sliceout": None if row["error"] else _shown(row), "error": row["error"]}
        yield entry


def _measured(
    case: Case, found: dict[str, Any], limit: int, task: dict[str, Any], how: dict[str, Any]
) -> dict[str, Any] | None:
    """The batch that was found, in a fresh process; a bit less if that should need more than the search did."""
    batch = found["batch"]
    while True:
        row = next((r for _, r in run_cases([replace(case, batch=batch)], task, **how)), None)
        if row is None or row["error"] or (held(row) or 0) <= limit:
            return row
        if batch <= max(case.batch, found["batch"] - 3 * found["grain"]):
            return {**row, "error": f"batch {batch} takes {held(row)} bytes in a process of its own, more than {limit}"}
        batch = max(batch - found["grain"], case.batch)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    names = ("batch", "ms", "ms_p10", "ms_p90", "ms_mean", "repeats", "max_reserved", "max_allocated")
    shown = {k: row.get(k) for k in (*names, "energy_joules_per_step")}
    return shown | {"samples_per_second": 1000 * row["batch"] / row["ms"]}

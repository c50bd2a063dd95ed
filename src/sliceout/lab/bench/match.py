"""The paper's approach 2: a larger batch in the memory that standard dropout needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .cases import Case, case_of
from .run import Say, run_cases


def match(
    rows: list[dict[str, Any]],
    cases: Sequence[Case],
    task: dict[str, Any],
    *,
    cache: Path,
    deadline: float,
    say: Say,
) -> Iterator[dict[str, Any]]:
    """For each SliceOut case with a row of standard dropout beside it: its largest batch at equal reserved memory."""
    for case in (c for c in cases if c.scheme == "sliceout"):
        partner = replace(case, scheme="standard", sampling="circular", grads="dense", align=None)
        standard = next((r for r in rows if case_of(r) == partner and r["error"] is None), None)
        if standard is None or not standard["max_reserved"]:
            continue
        limited = {**task, "within": standard["max_reserved"]}
        for _, row in run_cases([case], limited, cache=cache, prepare=1, deadline=deadline, say=say):
            found = None if row["error"] else _shown(row, row["batch"])
            yield {
                **{k: getattr(case, k) for k in ("model", "mode", "precision", "rate", "sampling", "grads")},
                "standard": _shown(standard, case.batch),
                "sliceout": found,
                "tried": row.get("tried"),
                "error": row["error"],
            }


def _shown(row: dict[str, Any], batch: int) -> dict[str, Any]:
    kept = {k: row[k] for k in ("ms", "ms_p10", "ms_p90", "max_reserved", "max_allocated", "energy_joules_per_step")}
    return {"batch": batch, **kept, "samples_per_second": 1000 * batch / row["ms"]}

"""Rows of results compared with each other, and printed as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from .cases import case_of
from .measure import held

HEADINGS = (
    "model", "mode", "scheme", "ms", "p10 to p90", "% of standard", "% of floor", "reserved", "% of standard",
)  # fmt: skip
CAPTION = "* of no dropout: there was no row of standard dropout to compare with"

Row = dict[str, Any]


def compared(rows: list[Row]) -> list[Row]:
    """The rows with ``of_standard``, ``of_floor``, ``memory_of_standard``... as fractions.

    Without a row of standard dropout, a row is compared to the one without dropout; ``reference`` says which.
    """
    out = []
    for row in rows:
        case = case_of(row)
        same = [r for r in rows if case_of(r).setting == case.setting and r["error"] is None]
        standard = _find(same, "standard", None if case.scheme == "none" else case.rate) or _find(same, "none", None)
        floor = _find(same, "floor", case.rate) if case.scheme != "none" else None
        out.append(
            {
                **row,
                "reference": standard and standard["scheme"],
                "of_standard": _ratio(row, standard, "ms"),
                "of_floor": _ratio(row, floor, "ms"),
                "memory_of_standard": _ratio(row, standard, "max_reserved") or _ratio(row, standard, "max_allocated"),
                "memory_of_floor": _ratio(row, floor, "max_reserved") or _ratio(row, floor, "max_allocated"),
            }
        )
    return out


def _find(rows: list[Row], scheme: str, rate: float | None) -> Row | None:
    found = [r for r in rows if r["scheme"] == scheme]
    return next((r for r in found if rate is None or r["rate"] == rate), None)


def _ratio(row: Row, to: Row | None, key: str) -> float | None:
    if to is None or not row.get(key) or not to.get(key):
        return None
    return row[key] / to[key]


def cells(row: Row) -> list[str]:
    """A compared row as texts, one for each of ``HEADINGS``; of a failed case only the first three."""
    case = case_of(row)
    stages = f", {case.stages} stages" if case.stages else ""
    where = [f"{case.model} b{case.batch}{stages}", f"{case.mode} {case.precision}", case.label]
    if row["error"]:
        return where
    star = "*" if row["reference"] == "none" else ""
    memory = held(row)
    return [
        *where,
        milliseconds(row["ms"]),
        f"{milliseconds(row['ms_p10'])} to {milliseconds(row['ms_p90'])}",
        percent(row["of_standard"]) + star,
        percent(row["of_floor"], 1),
        "" if memory is None else f"{memory / 2**20:,.0f} MiB" + _beside(row),
        percent(row["memory_of_standard"]) + star,
    ]


def _beside(row: Row) -> str:
    """Where nothing is reserved, what else the number is; the peak of the process, where the warm-up needed more."""
    if not row["max_reserved"]:
        return " (allocated)"
    process = row.get("max_reserved_process") or 0
    return f" ({process / 2**20:,.0f} at first)" if process > row["max_reserved"] else ""


def table(
    rows: list[Row],
    title: str,
    headings: Sequence[str] = HEADINGS,
    compare: Callable[[list[Row]], list[Row]] = compared,
    texts: Callable[[Row], list[str]] = cells,
) -> RenderableType:
    """A small table for each setting, under its name: what is the same for all its rows takes no columns."""
    found: dict[Any, list[Row]] = {}
    for row in compare(in_order(rows)):
        found.setdefault(case_of(row).setting, []).append(row)
    out: list[RenderableType] = [title]
    for same in found.values():
        out += ["", ", ".join(texts(same[0])[:2]), _of_setting(same, headings[2:], texts)]
        out += [f"{texts(r)[2]} failed: {r['error']}" for r in same if r["error"]]
    if any(r["reference"] == "none" and not r["error"] for same in found.values() for r in same):
        out.append(CAPTION)
    return Group(*out)


def _of_setting(rows: list[Row], headings: Sequence[str], texts: Callable[[Row], list[str]]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, heading in enumerate(headings):
        out.add_column(heading, justify="right" if i else "left", no_wrap=not i)
    for row in rows:
        if not row["error"]:
            out.add_row(*texts(row)[2:], style="bold" if row["scheme"] == "sliceout" else "")
    return out


def in_order(rows: list[Row]) -> list[Row]:
    """Rows that are compared stand together, in the order in which the first of them was measured."""
    order: dict[Any, int] = {}
    for row in rows:
        order.setdefault(case_of(row).setting, len(order))
    rank = {"none": 0, "standard": 1, "controlled": 2, "floor": 3, "sliceout": 4}
    return sorted(
        rows,
        key=lambda r: (order[case_of(r).setting], r["rate"] or 0, rank[r["scheme"]], r.get("parts") or 1),
    )


def milliseconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def percent(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"

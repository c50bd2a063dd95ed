"""Rows of results compared with each other, and printed as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
        standard = _find(same, "standard", case.rate) or _find(same, "none", None)
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
    star = "*" if row["reference"] == "none" and case.scheme != "none" else ""
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
) -> Table:
    out = Table(title=title, title_justify="left", caption_justify="left")
    for i, heading in enumerate(headings):
        out.add_column(heading, justify="left" if i < 3 else "right", no_wrap=i in (0, 2))
    before: Any = None
    found = compare(in_order(rows))
    for row in found:
        setting = case_of(row).setting
        if before not in (None, setting):
            out.add_section()
        before = setting
        if row["error"]:
            out.add_row(*texts(row)[:3], "-", row["error"][:40], *[""] * (len(headings) - 5), style="red")
        else:
            out.add_row(*texts(row), style="bold" if row["scheme"] == "sliceout" else "")
    if any(r["reference"] == "none" and r["scheme"] != "none" for r in found):
        out.caption = CAPTION
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

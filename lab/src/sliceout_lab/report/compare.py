"""The paper's table with our numbers in it: cell by cell paper, ours, difference, and what keeps them apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .groups import Estimate, Group, choose, scaling_in_words
from .paper import Number
from .timing import Step, pair

NOT_RUN = "not run here"
CIRCULAR = {"scheme": "sliceout", "sampling": "circular"}


@dataclass(frozen=True)
class Cell:
    """One cell. ``notes`` say what to know before comparing; ``comparable``, whether the setting is the paper's."""

    metric: str
    match: Mapping[str, Any]
    paper: Number | None
    ours: Estimate | None
    notes: tuple[str, ...] = ()
    comparable: bool = False
    change: bool = False
    """Whether the number is a change in percent (-25 %) and not a part of a whole (75 %)."""

    @property
    def difference(self) -> float | None:
        """Ours less the paper's; None unless the setting is the paper's."""
        known = self.paper is not None and self.ours is not None and self.comparable
        return self.ours.mean - self.paper.value if known else None  # type: ignore[union-attr]

    @property
    def error(self) -> float:
        """Of the difference: both standard errors, and the rounding of the paper's number."""
        parts = [0.0 if self.ours is None or self.ours.se is None else self.ours.se]
        if self.paper is not None:
            parts += [self.paper.plus_minus or 0.0, (0.05 if self.metric != "time" else 0.5) / math.sqrt(3)]
        return math.hypot(*parts)


@dataclass(frozen=True)
class Compared:
    """One of the paper's tables, compared. Columns past the paper's own are ours."""

    table: dict[str, Any]
    columns: list[dict[str, Any]]
    rows: list[tuple[str, list[Cell]]] = field(default_factory=list)

    @property
    def run(self) -> bool:
        """Whether any of it was run here."""
        return any(cell.ours for _, cells in self.rows for cell in cells)

    @property
    def cells(self) -> list[Cell]:
        return [cell for _, row in self.rows for cell in row]


def compare(table: dict[str, Any], groups: Sequence[Group], steps: Sequence[Step]) -> Compared:
    """Fill one table of the paper. Circular slices, which the paper does not have, get a column of their own."""
    columns = [*table["columns"], *_ours(table)]
    out = Compared(table, columns)
    for row in table["rows"]:
        cells = []
        for i, column in enumerate(columns):
            number = Number.of(row["cells"][i]) if i < len(row["cells"]) else None
            match = {**table["match"], **column["match"], **row["match"]}
            if "of" in column:
                of = {**row["match"], **column["of"]} if "scheme" in column["of"] else column["of"]
                cells.append(_relative(column, match, of, number, steps, table.get("batch")))
            else:
                cells.append(_score(column, match, number, groups, table.get("statistic", "last")))
        out.rows.append((row["title"], cells))
    return out


def _ours(table: dict[str, Any]) -> list[dict[str, Any]]:
    """A column with circular slices beside the paper's SliceOut columns of accuracy or perplexity."""
    wanted = [
        c
        for c in table["columns"]
        if c["metric"] in ("accuracy", "perplexity") and c["match"].get("sampling") == "window"
    ]
    if not wanted:
        return []
    match = {k: v for k, v in wanted[-1]["match"].items() if k not in ("sampling", "norm")}
    return [{"title": "SliceOut, circular (ours)", "metric": wanted[-1]["metric"], "match": {**match, **CIRCULAR}}]


def _score(
    column: Mapping[str, Any], match: Mapping[str, Any], number: Number | None, groups: Sequence[Group], statistic: str
) -> Cell:
    if match.get("rate") == 0 and match["scheme"] not in ("standard", "none"):
        return Cell(column["metric"], match, number, None)  # without dropout there is one network, not four
    group = choose(groups, match, statistic)
    ours = group.score(statistic) if group else None
    if group is None or ours is None:
        return Cell(column["metric"], match, number, None)
    notes = []
    if group.scaled:
        notes.append(f"scaled down: {scaling_in_words(group.scaled)}")
    if match.get("rate") == "best":
        notes.append(f"best rate of those run here: {group.rate:g}")
    return Cell(column["metric"], match, number, ours, tuple(notes), not group.scaled)


def _relative(
    column: Mapping[str, Any],
    match: Mapping[str, Any],
    of: Mapping[str, Any],
    number: Number | None,
    steps: Sequence[Step],
    batch: int | None,
) -> Cell:
    metric, change = column["metric"], column["as"] == "change"
    if number is None:
        return Cell(metric, match, None, None, change=change)
    base = {k: v for k, v in of.items() if k != "rate"} if of.get("scheme") in ("standard", "none") else of
    found = pair(steps, match, base, batch)
    value = None if found is None else found.time if metric == "time" else found.memory
    if found is None or value is None:
        return Cell(metric, match, number, None, change=change)
    notes = [found.step.where]
    if stands_in := found.step.stands_in(match):
        notes.append(stands_in)
    if found.step.scaled:
        notes.append(f"scaled down: {found.step.scaled}")
    ours = Estimate(value - 100 * change, None, found.step.n)
    return Cell(metric, match, number, ours, tuple(notes), not found.step.scaled, change)

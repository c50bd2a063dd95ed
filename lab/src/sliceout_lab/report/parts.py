"""The section of ``docs/performance.md`` about parts: what was measured, and what the traffic of weights predicts.

Each part of a batch has small weights of its own, ``[parts, ...]`` where one slice has ``[...]``. Products with them
are the same arithmetic for any number of parts; making, reading and adding up the stack is traffic that grows with
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sliceout.cli.cases import Case, case_of
from sliceout.cli.table import milliseconds

from ..bench.files import compared
from .render import grid

MOST = 0.06
"""What parts may cost: of one slice a step, and above the floor."""


@dataclass(frozen=True)
class Peaks:
    """What a GPU can do at most, by its maker's data sheet."""

    flops: dict[str, float]
    bandwidth: float


PEAKS = {"H200": Peaks({"bf16": 989e12, "tf32": 494e12}, 4.8e12)}
"""Dense arithmetic a second, and bytes of memory a second, by a word in the device's name."""
TRAFFIC = {"bf16": 4 + 2 + 2 + 2 + 2 + 2, "tf32": 6 * 4, "fp32": 6 * 4}
"""Bytes for each kept weight of each part: ``take`` reads it (32 bits) and writes it, the products of the forward and
the backward pass read it, the backward pass writes its gradient, ``put`` reads that."""


def section(found: list[tuple[str, dict[str, Any]]]) -> dict[str, Any] | None:
    """What the template needs; ``None`` where no file holds a case with parts."""
    files = [_file(name, data) for name, data in found if any(r.get("parts", 1) > 1 for r in data["cases"])]
    if not files:
        return None
    return {"most": f"{MOST:.0%}".replace("%", " %"), "bytes": TRAFFIC["bf16"], "roofs": _roofs(), "files": files}


def break_even_rows(parts: int, peaks: Peaks, precision: str = "bf16") -> float:
    """Rows (samples by tokens) of a weight at which its parts cost ``MOST`` of its products at the peak.

    The three products of a step are 6 operations for every weight and row; the parts beyond the first move
    ``TRAFFIC`` bytes for every weight, whatever the rows are.
    """
    extra = (parts - 1) * TRAFFIC[precision] / peaks.bandwidth
    return extra / (MOST * 6 / peaks.flops[precision])


def _roofs() -> str:
    lines = []
    for name, peaks in PEAKS.items():
        rows = [f"{break_even_rows(parts, peaks):,.0f}" for parts in (4, 8, 16)]
        ratio = peaks.flops["bf16"] / peaks.bandwidth
        lines.append([f"{name}, bf16", f"{ratio:.0f}", *rows])
    headings = ["GPU", "operations for a byte", *(f"{parts} parts" for parts in (4, 8, 16))]
    return grid(headings, lines)


def _file(name: str, data: dict[str, Any]) -> dict[str, Any]:
    device = data["machine"]["device"]
    peaks = next((p for word, p in PEAKS.items() if word in device), None)
    good = [r for r in compared(data["cases"]) if r["error"] is None and r["scheme"] == "sliceout"]
    by_case = {case_of(r): r for r in good}
    lines = []
    for case, row in sorted(by_case.items(), key=lambda pair: _order(pair[0], list(by_case))):
        one = by_case.get(replace(case, parts=1))
        if one is None or not any(replace(case, parts=c.parts) == c and c.parts > 1 for c in by_case):
            continue
        lines.append(_line(case, row, one, peaks))
    headings = [
        "case", "parts", "ms", "of one part", "expected", "of the floor", "of standard", f"{MOST:.0%} at batch",
    ]  # fmt: skip
    return {"name": name.removesuffix(".json"), "device": device, "table": grid(headings, lines)}


def _order(case: Case, known: list[Case]) -> tuple[int, int]:
    return next(i for i, c in enumerate(known) if replace(c, parts=1) == replace(case, parts=1)), case.parts


def _line(case: Case, row: dict[str, Any], one: dict[str, Any], peaks: Peaks | None) -> list[str]:
    size = f" x {case.size}" if case.size else ""
    cells = [
        f"{case.model} b{case.batch}{size}, {case.mode}, p={case.rate:g}",
        str(case.parts),
        milliseconds(row["ms"]),
    ]
    if case.parts == 1:
        return [*cells, "", "", _share(row["of_floor"], case.parts), _plain(row["of_standard"]), ""]
    expected = batch = ""
    if peaks is not None and row.get("kept_weights"):
        traffic = (case.parts - 1) * row["kept_weights"] * TRAFFIC[case.precision]
        more = 1000 * traffic / peaks.bandwidth / one["ms"]
        expected = f"{1 + more:.1%} ({traffic / 1e9:.2g} GB)"
        batch = f"{case.batch * more / MOST:,.0f}"
    shares = [_share(row["ms"] / one["ms"], case.parts), expected, _share(row["of_floor"], case.parts)]
    return [*cells, *shares, _plain(row["of_standard"]), batch]


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _share(value: float | None, parts: int) -> str:
    """In bold where parts cost more than they may."""
    text = _plain(value)
    return f"**{text}**" if value is not None and parts > 1 and value > 1 + MOST else text

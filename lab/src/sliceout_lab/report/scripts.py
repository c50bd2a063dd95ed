"""Sections of ``docs/performance.md`` about what scripts in ``benchmarks/`` measured beside the bench."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .render import grid


def turns(folder: Path) -> list[dict[str, Any]]:
    """Steps that take turns (``benchmarks/turns.py``)."""
    parts = []
    for origin, data in _found(folder, "turns"):
        lines = []
        for row in data["rows"]:
            ms, share = row["ms"], row["of_standard"]
            lines.append(
                [
                    f"{data['model']} b{row['batch']}, {row['mode']}, {row['scheme']}",
                    f"{ms['median']:.2f} ({ms['p10']:.2f} to {ms['p90']:.2f})",
                    f"{share['median']:.1%} ({share['p10']:.1%} to {share['p90']:.1%})",
                ]
            )
        table = grid(["case", "ms (p10 to p90)", "of standard, within a round (p10 to p90)"], lines)
        parts.append({"at_once": data["at_once"], "rounds": data["rounds"], "origin": origin, "table": table})
    return parts


def windows(folder: Path) -> list[dict[str, Any]]:
    """What the difference is made of with dense gradients and Adam (``benchmarks/window_cost.py``)."""
    headings = ["slices", "first steps, µs", "last", "denormal", "take, put, Adam at first", "at last", "set to zero"]
    parts = []
    for origin, data in _found(folder, "window-cost"):
        lines = []
        for sampling, row in data["samplings"].items():
            kernels = [", ".join(f"{us:.1f}" for us in row[when].values()) for when in _WHEN]
            first, last = row["us_by_block"][0], row["us_by_block"][-1]
            cells = [sampling, f"{first:.1f}", f"{last:.1f}", f"{row['denormal']:.2%}", *kernels]
            lines.append([*cells, f"{row['us_without']:.1f}"])
        steps = len(data["samplings"]["window"]["us_by_block"]) * data["block"]
        table = grid(headings, lines)
        parts.append({"block": data["block"], "steps": f"{steps:,}", "origin": origin, "table": table})
    return parts


_WHEN = ("kernels_at_first", "kernels_at_last")


def _found(folder: Path, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Result files of this kind, each with a line that says where it comes from."""
    for path in sorted((folder / "results").glob(f"*-{kind}.json")):
        data = json.loads(path.read_text())
        about, script = data["machine"], f"benchmarks/{kind.replace('-', '_')}.py"
        yield (
            f"`python {script}`, {about['device']}, revision {data['revision'][:12]}, {about['date'][:10]}, torch "
            f"{about['torch']} ([results/{path.name}](../results/{path.name})).",
            data,
        )

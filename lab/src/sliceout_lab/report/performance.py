"""``docs/performance.md``: when slicing pays, with every number taken from a committed result file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sliceout.cli import UserError
from sliceout.cli.cases import case_of
from sliceout.cli.measure import held
from sliceout.cli.table import in_order
from sliceout.conversion.profitability import MANY

from ..bench import show
from ..bench.files import compared, read
from ..bench.suites import declared
from . import parts, profiles, scripts
from .render import grid, render

NOT_YET = "Not measured yet: no file in `results/bench` holds these cases."


def root() -> Path:
    here = Path(__file__).parents[4]
    if not (here / "pyproject.toml").is_file():
        raise UserError("--docs writes a page of the repository: run it from a checkout, not from an installed package")
    return here


def write() -> Path:
    """Write the page; returns where."""
    path = root() / "docs" / "performance.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(page(root()))
    return path.relative_to(root())


def page(folder: Path) -> str:
    """The text of the page for the result files under ``folder``."""
    found = [(p.name, read(p)) for p in sorted((folder / "results" / "bench").glob("*.json"))]
    return render(
        "performance.md.jinja",
        not_yet=NOT_YET,
        tolerance=f"{show.TOLERANCE:.0%}",
        many=f"{MANY:,}",
        targets=_targets(found),
        turns=scripts.turns(folder),
        samplings=_samplings(found),
        windows=scripts.windows(folder),
        parts=parts.section(found),
        files=[_file(folder, name, data) for name, data in found],
        profiles=profiles.sections(folder),
        layers=_layers(folder),
    )


def _file(folder: Path, name: str, data: dict[str, Any]) -> dict[str, Any]:
    """What the page says about one result file."""
    about, cases = data["machine"], data["cases"]
    triton = f", Triton {about['triton']}" if about.get("triton") else ""
    allocator = f", allocator {about['allocator']}" if about.get("allocator") else ""
    matched = [show.match_cells(e) for e in data["match_memory"]]
    return {
        "name": name.removesuffix(".json"),
        "device": about["device"],
        "command": data["command"],
        "revision": data["revision"],
        "date": about["date"][:10],
        "versions": f"torch {about['torch']}{triton}, {about['threads']} threads{allocator}",
        "notes": show.scaling_notes(cases),
        "picture": (folder / "results" / "bench" / name.replace(".json", ".png")).is_file(),
        "table": steps_table(cases),
        "starred": any(r["reference"] == "none" for r in compared(cases)),
        "match": grid(show.MATCH_HEADINGS, matched, left=2) if matched else "",
    }


def steps_table(rows: list[dict[str, Any]]) -> str:
    """The table that ``bench`` prints, in Markdown."""
    lines = []
    for row in compared(in_order(rows)):
        cells = show.cells(row)
        if row["error"]:
            cells = [*cells[:3], "failed", row["error"].replace("|", "/")[:80], *[""] * (len(show.HEADINGS) - 5)]
        lines.append(cells)
    return grid(show.HEADINGS, lines, left=3)


# -- targets -----------------------------------------------------------------------------------------------------------


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets for which ``rows`` hold a SliceOut case and one to compare it with, each with what was measured.

    A captured step of a compiled model counts as compiled. Where a target does not say which gradients, the kind counts
    that misses fewest of its figures, then the faster one; ``others`` names those it was chosen from.
    """
    found = []
    ours = [
        r for r in compared(rows)
        if r["scheme"] == "sliceout" and r["sampling"] == "circular" and r.get("parts", 1) == 1
        and (r["error"] or any(_figures(r).values()))
    ]  # fmt: skip
    for target in declared()["target"]:
        alike: dict[Any, list[dict[str, Any]]] = {}
        modes = target["mode"], f"captured-{target['mode']}"
        for row in ours:
            if row["mode"] in modes and all(row[k] == target.get(k, row[k]) for k in _SAME):
                alike.setdefault(case_of(row).setting, []).append({**row, "wanted": target, "measured": _figures(row)})
        for same in alike.values():
            best = min(same, key=_misses)
            found.append({**best, "others": [r["grads"] for r in same if r is not best]})
    return found


_SAME = ("model", "batch", "rate", "grads")


def _figures(row: dict[str, Any]) -> dict[str, float | None]:
    return {"time": row["of_standard"], "floor": row["of_floor"], "memory": row["memory_of_standard"]}


def _misses(row: dict[str, Any]) -> tuple[bool, int, float]:
    """For sorting: failed cases last, then by how many figures are missed, then by time."""
    pairs = [(row["measured"][k], row["wanted"][k]) for k in row["measured"] if k in row["wanted"]]
    missed = sum(value is None or value > most for value, most in pairs)
    return row["error"] is not None, missed, row.get("ms") or 0.0


def _targets(found: list[tuple[str, dict[str, Any]]]) -> str:
    lines = []
    for name, data in found:
        if "cuda" not in data["machine"]:  # the targets are about an H200
            continue
        for row in judged(data["cases"]):
            than = f" (better than {', '.join(row['others'])})" if row["others"] else ""
            cells = [f"{row['model']} b{row['batch']}, {row['mode']}, {row['grads']}{than}"]
            for key in ("time", "floor", "memory"):
                cells.append(_verdict(row["measured"][key], row["wanted"].get(key)))
            cells.append(_floor_itself(row))
            lines.append([*cells, row["error"] or name])
    floor = "the floor itself, of standard: time, memory"
    headings = ["case", "of standard", "of floor", "memory of standard", floor, "file"]
    return grid(headings, lines, left=len(headings)) if lines else ""


def _samplings(found: list[tuple[str, dict[str, Any]]]) -> str:
    """What slices that may wrap around the end cost beside slices that lie inside, in the same file."""
    lines = []
    for name, data in found:
        good = {case_of(r): r for r in data["cases"] if r["error"] is None}
        for case, window in good.items():
            circular = good.get(replace(case, sampling="circular"))
            if case.sampling != "window" or circular is None:
                continue
            times = [f"{r['ms']:.4g} ({r['ms_p10']:.4g} to {r['ms_p90']:.4g})" for r in (circular, window)]
            shares = [f"{circular['ms'] / window['ms'] - 1:+.1%}", f"{held(circular) / held(window) - 1:+.1%}"]  # type: ignore[operator]
            where = f"{case.model} b{case.batch}, {case.mode}, {case.grads}"
            lines.append([where, *times, *shares, name])
    kinds = [f"{kind}, ms (p10 to p90)" for kind in ("circular", "window")]
    headings = ["case", *kinds, "time, of window", "memory, of window", "file"]
    return grid(headings, lines, left=len(headings)) if lines else ""


def _floor_itself(row: dict[str, Any]) -> str:
    """What a plain narrow network takes: a target below it is out of reach of any slicing."""
    pairs = (("of_standard", "of_floor"), ("memory_of_standard", "memory_of_floor"))
    shares = [f"{row[a] / row[b]:.1%}" if row[a] and row[b] else "not measured" for a, b in pairs]
    return ", ".join(shares)


def _verdict(value: float | None, wanted: float | None) -> str:
    if value is None:
        return "not measured" if wanted is not None else ""
    if wanted is None:
        return f"{value:.1%}"
    return f"{value:.1%}, {'met' if value <= wanted else '**missed**'} (at most {wanted:.1%})"


# -- single layers -----------------------------------------------------------------------------------------------------


def _layers(folder: Path) -> list[dict[str, Any]]:
    """What ``benchmarks/payoff.py`` measured, file by file."""
    out = []
    for path in sorted((folder / "results" / "payoff").glob("*.json")):
        data = json.loads(path.read_text())
        rates = sorted({r["rate"] for r in data["pays"]})
        layers: dict[Any, dict[float, dict[str, Any]]] = {}
        for r in data["pays"]:
            key = (r["kind"], f"{r['outer']}-{r['size']}-{r['outer']}", _rows(r["rows"]))
            layers.setdefault(key, {})[r["rate"]] = r
        lines = [[*key, *(_share(found.get(rate)) for rate in rates)] for key, found in layers.items()]
        headings = ["layers", "units", "rows", *(f"rate {r:g} (floor)" for r in rates)]
        about = {k: data["machine"][k] for k in ("device", "torch", "threads")}
        out.append(
            {
                **about,
                "dtype": data["dtype"],
                "load": f"{data['load_before']:.1f}",
                "name": path.name,
                "table": grid(headings, lines),
                "aligns": _aligns(data["align"]),
            }
        )
    return out


def _share(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['sliced_ms'] / row['full_ms']:.0%} ({row['narrow_ms'] / row['full_ms']:.0%})"


def _rows(rows: Any) -> str:
    return str(rows) if isinstance(rows, int) else f"{rows[0]} x {rows[1]} x {rows[1]}"


def _aligns(rows: list[dict[str, Any]]) -> str:
    """Time per unit by alignment of the width, in percent of the time per unit of the full layer."""
    aligns = sorted({r["align"] for r in rows})
    layers: dict[Any, dict[int, float]] = {}
    for r in rows:
        key = f"{r['kind']} {r['outer']}-{r['size']}, {_rows(r['rows'])} rows"
        layers.setdefault(key, {})[r["align"]] = r["per_unit_of_full"]
    lines = [[name, *(f"{found[a]:.0%}" if a in found else "" for a in aligns)] for name, found in layers.items()]
    return grid(["time per unit, width a multiple of", *map(str, aligns)], lines)

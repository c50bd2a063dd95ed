"""Profiles for people: the tables that ``sliceout-lab bench --profile`` prints and ``--docs`` puts on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sliceout.cli.cases import case_of

from ..bench.profile import KINDS
from .render import grid


def sections(folder: Path) -> list[dict[str, Any]]:
    """What the page says about each file under ``folder``."""
    out = []
    for path in sorted((folder / "results" / "profile").glob("*.json")):
        data = json.loads(path.read_text())
        about = {"device": data["machine"]["device"], "torch": data["machine"]["torch"], "name": path.name}
        origin = {"command": data["command"], "revision": data["revision"], "date": data["machine"]["date"][:10]}
        out.append({**about, **origin, "parts": tables(data["cases"])})
    return out


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """Time, memory, pools, and what follows from shapes alone, in Markdown."""
    good = [r for r in rows if r["error"] is None]
    out = [_time([r for r in good if "error" not in r["time"]]), _memory(good)]
    notes = [*_failures(rows), *(note for r in good for note in _pools(r)), *_live(good), *_least(good)]
    return [text for text in out if text] + (["\n".join(f"- {note}" for note in notes)] if notes else [])


def _label(row: dict[str, Any]) -> str:
    return f"{row['model']} b{row['batch']} {row['mode']}, {case_of(row).label}"


def _time(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        time = row["time"]
        cells = [f"{time['kinds'][k]['ms']:.3f} ({time['kinds'][k]['kernels']:.0f})" for k in KINDS]
        idle = "" if "idle_ms" not in time else f"{time['idle_ms']:.3f}"
        lines.append([_label(row), *cells, idle, f"{time['busy_ms'] + time.get('idle_ms', 0.0):.3f}"])
    return grid(["time", *KINDS, "nothing runs", "all"], lines) if lines else ""


def _memory(rows: list[dict[str, Any]]) -> str:
    lines, names = [], list(rows[0]["memory"]["counted"]) if rows else []
    for row in rows:
        memory = row["memory"]
        graphs = [p for p in memory.get("pools", []) if any(p["pool"])]
        cells = [*(memory["counted"][n] for n in names), memory.get("cublas_workspaces"), memory["rest"]]
        cells += [memory["max_allocated"], sum(p["reserved"] for p in graphs) if "pools" in memory else None]
        cells.append(memory.get("max_reserved"))
        lines.append([_label(row), *(_mib(c) for c in cells)])
    headings = ["memory", *names, "cuBLAS", "rest", "max allocated", "graphs' pools", "max reserved"]
    return grid(headings, lines) if lines else ""


def _failures(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{_label(r)}: failed, {r['error']}" for r in rows if r["error"]] + [
        f"{_label(r)}: the time was not profiled, {r['time']['error']}"
        for r in rows
        if r["error"] is None and "error" in r["time"]
    ]


def _pools(row: dict[str, Any]) -> list[str]:
    """What rose how high in the memory of graphs, step by step: trials in the first, what is replayed in the last."""
    out = []
    for pool in row["memory"].get("pools", []):
        if any(pool["pool"]) and any(pool["highest_by_step"]):
            steps = ", ".join(_mib(n) for n in pool["highest_by_step"])
            blocks = ", ".join(_mib(n) for n in pool["largest_at_highest"][:5])
            out.append(
                f"{_label(row)}: a graph's pool holds {_mib(pool['reserved'])} MiB; live in the first steps at most "
                f"{steps}; the largest blocks at the highest point: {blocks}."
            )
    return out


def _live(rows: list[dict[str, Any]]) -> list[str]:
    """How much of a compiled step's memory lives at once, and what the floor's activations would leave of it.

    The first step tries algorithms, the second is recorded: what lives then lives in every replay.
    """
    out = []
    with_graphs = [r for r in rows if r["mode"] == "compiled" and "pools" in r["memory"]]
    for setting in dict.fromkeys(case_of(r).setting for r in with_graphs):
        alike = [r for r in with_graphs if case_of(r).setting == setting]
        found = [(_outside(r), _recorded(r)) for r in alike]
        by_scheme = {r["scheme"]: both for r, both in zip(alike, found, strict=True)}
        standard, floor = by_scheme.get("standard"), by_scheme.get("floor")
        if standard is None:
            continue
        shares = [
            f"{case_of(r).label} {_mib(sum(both))} MiB ({sum(both) / sum(standard):.1%})"
            for r, both in zip(alike, found, strict=True)
        ]
        text = (
            f"{alike[0]['model']} b{alike[0]['batch']} compiled: parameters, buffers, state and batch, with the most "
            f"that lived in the graphs' pools while they were recorded: {', '.join(shares)}. What is held beyond that "
            "is room between blocks."
        )
        if floor is not None:
            text += (
                " As long as parameters and state are kept in full, the floor's pools on top of them leave "
                f"{(standard[0] + floor[1]) / sum(standard):.1%} at the least."
            )
        out.append(text)
    return out


def _outside(row: dict[str, Any]) -> int:
    return sum(row["memory"]["counted"][name] for name in ("parameters", "buffers", "optimizer state", "batch"))


def _recorded(row: dict[str, Any]) -> int:
    return sum(p["highest_by_step"][1] for p in row["memory"]["pools"] if any(p["pool"]))


def _least(rows: list[dict[str, Any]]) -> list[str]:
    """The least that full-size parameters and state leave of the baseline's memory, activations and libraries aside."""
    out = {}
    for row in rows:
        kept, full, copies = (row["exactly"][k] for k in ("kept", "parameters", "copies"))
        if kept is None:
            continue
        state = row["memory"]["counted"]["optimizer state"]
        dense, least = 2 * full + state, full + state + kept
        out[(*case_of(row).setting, row["rate"])] = (
            f"{row['model']} b{row['batch']} {row['mode']}, from shapes alone: parameters {_mib(full)} MiB, optimizer "
            f"state {_mib(state)}, gradients {_mib(full)} in full or {_mib(kept)} of the slices' size, small copies of "
            f"weights {_mib(copies)}. Parameters and state in full, gradients of the slices' size: {least / dense:.1%} "
            f"of the {_mib(dense)} MiB of standard dropout; a network of the slices' size: {kept / full:.1%}."
        )
    return list(out.values())


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value / 2**20:,.1f}" if value < 100 * 2**20 else f"{value / 2**20:,.0f}"

"""Results on the terminal: tables, and plots of the scaling suite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from sliceout.cli import table as comparing
from sliceout.cli.cases import Case, case_of
from sliceout.cli.measure import held
from sliceout.cli.table import milliseconds, percent

from .files import compared

HEADINGS = (
    "model", "mode", "scheme", "ms", "p10 to p90", "% of standard", "% of floor", "paper", "reserved", "% of standard",
    "paper", "GFLOPs",
)  # fmt: skip


def table(rows: list[dict[str, Any]], title: str) -> RenderableType:
    return comparing.table(rows, title, HEADINGS, compared, cells)


def cells(row: dict[str, Any]) -> list[str]:
    """The cells of ``sliceout bench``, the paper's numbers behind its percentages, and the FLOPs."""
    found = comparing.cells(row)
    if row["error"]:
        return found
    found.insert(7, percent(row["paper_time"]))
    flops = "" if row["flops"] is None else f"{row['flops'] / 1e9:,.1f}"
    return [*found, percent(row["paper_memory"]), flops]


def match_table(entries: list[dict[str, Any]]) -> Table:
    out = Table(title="A larger batch at equal memory (the paper's approach 2)", title_justify="left")
    for i, heading in enumerate(MATCH_HEADINGS):
        out.add_column(heading, justify="left" if i < 2 else "right")
    for entry in entries:
        out.add_row(*match_cells(entry))
    return out


MATCH_HEADINGS = (
    "model", "mode", "standard: batch", "memory", "samples/s", "SliceOut: batch", "memory", "samples/s",
    "samples/s more",
)  # fmt: skip


def match_cells(entry: dict[str, Any]) -> list[str]:
    a, b = entry["standard"], entry["sliceout"]
    how = [f"{entry['mode']} {entry['precision']} p={entry['rate']:g}"]
    how += [str(entry[k]) for k, usual in (("sampling", "circular"), ("grads", "dense")) if entry[k] != usual]
    how += [f"{entry['parts']} parts"] if entry.get("parts", 1) > 1 else []
    where = [entry["model"], " ".join(how)]
    none = " (no dropout)" if entry.get("baseline") == "none" else ""
    first = [f"{a['batch']}{none}", _held(a), f"{a['samples_per_second']:,.0f}"]
    if entry["error"]:
        return [*where, *first, entry["error"], "", "", ""]
    more = "at least " if entry.get("capped") else ""
    second = [f"{more}{b['batch']}", _held(b), f"{b['samples_per_second']:,.0f}"]
    return [*where, *first, *second, f"{100 * (b['samples_per_second'] / a['samples_per_second'] - 1):+.0f} %"]


def _held(side: dict[str, Any]) -> str:
    """On a CPU nothing is reserved: the peak of live tensors."""
    memory = held(side) or 0
    digits = 0 if memory >= 100 * 2**20 else 1
    return f"{memory / 2**20:,.{digits}f} MiB"


# -- scaling -----------------------------------------------------------------------------------------------------------

TOLERANCE = 0.02
"""By how much a curve may go the wrong way from one point to the next and still count as monotone: it is noise."""

Points = list[tuple[float, dict[str, Any]]]


def series(rows: Iterable[dict[str, Any]], along: str) -> dict[str, Points]:
    """Curves of the scaling suite along ``"rate"`` or ``"width"``: rows that differ in nothing else, three at least."""
    found: dict[Case, Points] = {}
    for row in (r for r in rows if r["error"] is None):
        case = case_of(row)
        if along == "rate" and case.scheme == "sliceout":
            found.setdefault(replace(case, rate=0.0), []).append((case.rate, row))
        elif along == "width":
            family, _, width = case.model.rpartition("x" if case.model.startswith("mlp-") else "-")
            if width.isdigit():
                found.setdefault(replace(case, model=family), []).append((float(width), row))
    curves = {k: sorted(v, key=lambda pair: pair[0]) for k, v in found.items() if len({x for x, _ in v}) > 2}
    names = {case: _curve_name(case, along) for case in curves}
    several = {n for n in names.values() if list(names.values()).count(n) > 1}
    how = {c: f", b{c.batch} {c.mode} {c.precision} {c.sampling}" if names[c] in several else "" for c in curves}
    return {names[case] + how[case]: points for case, points in curves.items()}


def _curve_name(case: Case, along: str) -> str:
    if along == "width":
        return f"{case.model} {case.label}"
    words = [case.model, case.scheme, *([case.grads] if case.grads != "dense" else [])]
    return " ".join([*words, *([f"{case.parts} parts"] if case.parts > 1 else [])])


def monotone(values: Sequence[float], rising: bool) -> tuple[float, int]:
    """The largest step the wrong way, as a fraction of the value before it, and where it leads; 0 if there is none."""
    sign = 1 if rising else -1
    return max((sign * (a - b) / a, i) for i, (a, b) in enumerate([(1.0, 1.0), *pairwise(values)]))


def scaling_notes(rows: list[dict[str, Any]]) -> list[str]:
    """For each curve, whether time and memory fall with the rate and rise with the width, as measured."""
    notes = []
    for along in ("rate", "width"):
        for name, points in series(rows, along).items():
            for key, what in (("ms", "step time"), ("memory", "memory")):
                values = [_value(row, key) for _, row in points]
                wrong, at = monotone(values, along == "width")
                how = "is monotone" if wrong <= TOLERANCE else "is NOT monotone"
                if wrong > 0:
                    limit = f" up to {TOLERANCE:.0%}" if wrong <= TOLERANCE else ""
                    how += f"{limit} (largest step the wrong way: {wrong:.1%}, to {points[at][0]:g})"
                ends = f"{_point(points[0], key)} to {_point(points[-1], key)}"
                notes.append(f"{name}: {what} against {along} {how}, from {ends}.")
    return notes


def _value(row: dict[str, Any], key: str) -> float:
    """Milliseconds, or bytes."""
    return row["ms"] if key == "ms" else held(row) or 0


def _point(point: tuple[float, dict[str, Any]], key: str) -> str:
    value = _value(point[1], key)
    return (f"{milliseconds(value)} ms" if key == "ms" else f"{value / 2**20:,.0f} MiB") + f" at {point[0]:g}"


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> list[Path]:
    """Step time above memory, against the rate in percent of the lowest rate, and against each kind of width."""
    from matplotlib import pyplot as plt

    curves = [("rate", "rate", series(rows, "rate"))] if series(rows, "rate") else []
    for family in dict.fromkeys(name.split()[0] for name in series(rows, "width")):
        chosen = {n: points for n, points in series(rows, "width").items() if n.split()[0] == family}
        what = "units of a layer" if family.startswith("mlp") else "width"
        curves.append(("width", f"{family}: {what}", dict(sorted(chosen.items(), reverse=True))))  # standard first
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "sliceout"}):
        size = (max(4.4 * len(curves), 8.8), 6.4)  # the title needs some
        figure, axes = plt.subplots(2, len(curves), figsize=size, layout="constrained", squeeze=False)
        for column, (along, xlabel, lines) in enumerate(curves):
            for ax, (key, what, unit) in zip(axes[:, column], _AXES, strict=True):
                for name, points in lines.items():
                    values = [_value(r, key) for _, r in points]
                    by = values[0] / 100 if along == "rate" else 2.0**20 if key == "memory" else 1.0
                    ax.plot([x for x, _ in points], [v / by for v in values], marker="o", markersize=4, label=name)
                ax.set(xlabel=xlabel, ylabel=f"{what}, {'% of the lowest rate' if along == 'rate' else unit}")
                ax.set_ylim(0, None)
                ax.grid(alpha=0.25)
                ax.legend(frameon=False, fontsize=8)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        written = [path.with_suffix(".png"), path.with_suffix(".svg")]
        for target in written:
            figure.savefig(target, dpi=130, metadata={"Date": None} if target.suffix == ".svg" else None)
        plt.close(figure)
    return written


_AXES = (("ms", "step time", "ms"), ("memory", "memory", "MiB"))

"""Every picture of the report. The paper is dashed with hollow marks, ours is solid; a scheme keeps its colour."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from . import paper
from .compare import Compared
from .figures import COLOURS, Drawn, colour, legend, panel
from .groups import Group, name_of, scaling_in_words

DASHED: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.2, "alpha": 0.9}
HOLLOW: dict[str, Any] = {"marker": "o", "markerfacecolor": "none", "markersize": 4.5}
FAMILIES = (("Wide ResNets", "wrn-"), ("EfficientNets", "efficientnet-"), ("Transformers", "lm-"), ("MLP", "mlp"))


def by_rate(compared: Compared, title: str) -> list[Drawn]:
    """A table whose rows are rates: each scheme over the rate, the paper's and ours with standard errors."""
    out: list[Drawn] = []
    table, metric = compared.table, compared.columns[0]["metric"]
    words = {
        "accuracy": "highest test accuracy, %",
        "time": "time, % of standard dropout",
        "memory": "memory, % of standard dropout",
    }
    about = f"{title}. {_what_is_what(compared, metric)}"
    if metric == "accuracy":
        lowest = min(v for _, row in compared.rows for c in row for v in _values(c))
        about += f" Rate 0.9 may lie below the picture (down to {lowest:.1f})."
    if scaled := sorted({note for c in compared.cells for note in c.notes if note.startswith("scaled down")}):
        about += f" Ours {'; '.join(scaled)}."
    with panel(table["name"], title, about, out, title=title) as axes:
        for i, column in enumerate(compared.columns):
            points = [(cells[i].match["rate"], cells[i]) for _, cells in compared.rows if cells[i].match.get("rate")]
            shade, label = colour(column["match"]), column["title"]
            if theirs := [(r, c.paper) for r, c in points if c.paper]:
                x, y = [r for r, _ in theirs], [n.value for _, n in theirs]
                axes.errorbar(
                    x,
                    y,
                    [n.plus_minus or 0 for _, n in theirs],
                    color=shade,
                    label=f"{label}, paper",
                    **DASHED,
                    **HOLLOW,
                )
            if ours := [(r, c.ours) for r, c in points if c.ours]:
                x, y = [r for r, _ in ours], [e.mean for _, e in ours]
                label = label.removesuffix(" (ours)")
                axes.errorbar(
                    x, y, [e.se or 0 for _, e in ours], color=shade, label=f"{label}, ours", marker="o", capsize=2
                )
        if metric != "accuracy":
            axes.axhline(100, color=COLOURS["standard"], linewidth=1)
        else:
            shown = [v for _, row in compared.rows for c in row if c.match.get("rate", 1) <= 0.8 for v in _values(c)]
            low, high = min(shown), max(shown)
            axes.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
        axes.set_xlabel("dropout rate")
        axes.set_ylabel(words[metric])
        legend(axes)
    return out


def _values(cell: Any) -> list[float]:
    return [*([cell.paper.value] if cell.paper else []), *([cell.ours.mean] if cell.ours else [])]


def _what_is_what(compared: Compared, metric: str) -> str:
    ours = "Solid: ours"
    if any(c.ours and c.ours.se for c in compared.cells):
        ours += ", with standard errors over seeds"
    if not compared.run:
        ours = "Ours: not run here"
    elif metric != "accuracy":
        ours += ", of a step; the table below says on what"
        if any(_coincide(cells) for _, cells in compared.rows):
            ours += ". Marks of schemes that share one measurement lie on each other"
    return f"Dashed, hollow: the paper. {ours}."


def _coincide(cells: Sequence[Any]) -> bool:
    means = [c.ours.mean for c in cells if c.ours]
    return len(set(means)) < len(means)


def curves(
    groups: Sequence[Group],
    theirs: str | None,
    name: str,
    title: str,
    only: float | None = None,
    absent: str = "Ours: not run here.",
) -> list[Drawn]:
    """Score over epochs (or thousands of steps): the mean over seeds and, shaded, the range; the paper's dashed.

    Args:
        groups: ours; none draws the paper's curves alone.
        theirs: name of the paper's curves. Beside ours only those are drawn whose rates were run.
        only: this rate, and no dropout.
        absent: what the caption says if there is none of ours.
    """
    out: list[Drawn] = []
    chosen = [g for g in groups if only is None or g.rate in (0.0, only)]
    source = paper.read(theirs) if theirs else None
    lines = source["curves"] if source else []
    if chosen:
        lines = [c for c in lines if c["match"].get("rate", 0.0) in {g.rate for g in chosen}]
    metric = chosen[0].metric if chosen else source["metric"] if source else "accuracy"
    settled: list[float] = []  # what the axis must show: the start of training may leave it
    with panel(name, title, _about(chosen, bool(lines), absent), out, title=title) as axes:
        for curve in lines:
            x, y = zip(*curve["points"], strict=True)
            look = {**DASHED, "linewidth": _width(curve["match"].get("rate"))}
            axes.plot(x, y, color=colour(curve["match"]), label=f"{curve['title']}, paper", **look)
            settled += y[len(y) // 8 :]
        for group in chosen:
            epochs, scores = group.curve()
            if not epochs:
                continue
            steps = group.number("steps_per_epoch", alone=False)
            per = steps.mean / 1000 if metric == "perplexity" and steps else 1
            x = tuple(e * per for e in epochs)
            mean, shade = [statistics.fmean(s) for s in scores], colour(group.config)
            label = name_of(group.config) + (f", rate {group.rate:g}" if group.rate and only is None else "")
            dot = "o" if len(x) == 1 else None  # one epoch is no line
            axes.plot(x, mean, color=shade, marker=dot, label=f"{label}, ours" if lines else label)
            axes.fill_between(
                x, [min(s) for s in scores], [max(s) for s in scores], color=shade, alpha=0.18, linewidth=0
            )
            settled += mean[len(mean) // 8 :]
        if settled:
            low, high = min(settled), max(settled)
            pad = 0.05 * (high - low) or 1.0
            axes.set_ylim(low - pad, high + pad)
        axes.set_xlabel("thousands of steps" if metric == "perplexity" else "epoch")
        axes.set_ylabel("test perplexity" if metric == "perplexity" else "test accuracy, %")
        legend(axes)
    return out


def _about(groups: Sequence[Group], theirs: bool, absent: str) -> str:
    said = []
    if groups:
        seeds = sorted({len(g.runs) for g in groups})
        many = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        mean = f"mean over {many} seeds, shaded from lowest to highest"
        said.append(f"Solid: ours, {mean if seeds[-1] > 1 else 'one seed'}.")
    else:
        said.append(absent)
    if scaled := sorted({scaling_in_words(g.scaled) for g in groups if g.scaled}):
        said.append(f"Scaled down: {'; '.join(scaled)}.")
    return " ".join([*said, *(["Dashed: the paper's curves."] if theirs else [])])


def _width(rate: float | None) -> float:
    """The same scheme at several rates: the higher, the thinner."""
    return {0.1: 2.0, 0.2: 1.4, 0.3: 0.9}.get(rate or 0.0, 1.4)

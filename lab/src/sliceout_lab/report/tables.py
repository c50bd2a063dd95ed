"""Tables of the results page: the paper's with ours in them, time and memory by network, and every run."""

from __future__ import annotations

from collections.abc import Sequence

from . import paper
from .compare import NOT_RUN, Cell, Compared
from .groups import Estimate, Group, name_of, scaling_in_words
from .page import Block, Table, Text
from .timing import Pair, Step

Speeds = Sequence[tuple[str, Pair | None, Step | None, float | None]]
"""Network, SliceOut beside its baseline, the floor, and the paper's time in percent."""
NOTHING = "-"
MARKS = "abcdefghijklmnopqrstuvwxyz"


def of_paper(one: Compared) -> list[Block]:
    """One of the paper's tables: in each cell the paper, ours and the difference."""
    table = one.table
    runs = f"{table['runs']} runs" if table.get("runs") else "number of runs not said"
    lines = f"lines {table['lines'][0]} to {table['lines'][1]} of the .tex"
    lead = f"Paper: `{table['label']}`, {lines}; {table['hardware']}; {runs}."
    if table.get("statistic"):
        kind = "Perplexity" if one.columns[0]["metric"] == "perplexity" else "Accuracy"
        used = "best of all epochs" if table["statistic"] == "best" else "last"
        lead += f" {kind} used: **{used}** ({table['why']})."
    theirs = len(table["columns"])
    if not one.run:
        rows = [[title, *(_paper(c) for c in cells[:theirs])] for title, cells in one.rows]
        return [Text(f"{lead} Ours: **{NOT_RUN}**."), Table(["", *(c["title"] for c in table["columns"])], rows)]
    marks: dict[str, str] = {}
    rows = []
    for title, cells in one.rows:
        if any(c.ours for c in cells):
            rows.append([title, *(_cell(c, marks) for c in cells)])
        else:
            extra = [NOTHING] * (len(cells) - theirs)
            rows.append([f"{title}\n*{NOT_RUN}*", *(_paper(c) for c in cells[:theirs]), *extra])
    notes = [f"{mark}) {note}" for note, mark in marks.items()]
    return [Text(lead), Table(["", *(c["title"] for c in one.columns)], rows, notes=notes)]


def _paper(cell: Cell) -> str:
    if cell.paper is None:
        return NOTHING
    text = f"{signed(cell.paper.value)} %" if cell.change else f"{cell.paper.value:.1f}"
    return text + (f" ± {cell.paper.plus_minus:g}" if cell.paper.plus_minus is not None else "")


def _cell(cell: Cell, marks: dict[str, str]) -> str:
    if cell.paper is None and cell.ours is None:
        return NOTHING
    if cell.ours is None:
        return f"*paper {_paper(cell)}*\n{NOT_RUN}"
    lines = [f"*paper {_paper(cell)}*"] if cell.paper else ["*not in the paper*"]
    signs = " ".join(f"{marks.setdefault(note, _mark(len(marks)))})" for note in cell.notes)
    lines.append(f"ours **{_ours(cell, cell.ours)}** {signs}".rstrip())
    if cell.difference is not None:
        points = cell.metric in ("time", "memory")
        lines.append(f"difference {signed(cell.difference, 1 if points else 2)}{' points' if points else ''}")
    elif cell.paper is not None:
        lines.append("*another setting*")
    return "\n".join(lines)


def _mark(i: int) -> str:
    return MARKS[i] if i < len(MARKS) else f"{MARKS[i // len(MARKS) - 1]}{MARKS[i % len(MARKS)]}"


def _ours(cell: Cell, ours: Estimate) -> str:
    if cell.metric in ("time", "memory"):
        return f"{signed(ours.mean)} %" if cell.change else f"{ours.mean:.1f}"
    return with_error(ours)


def signed(value: float, digits: int = 0) -> str:
    """With its sign, and zero without one.

    Example:
        >>> signed(-25.2), signed(0.04, 1), signed(-0.01)
        ('-25', '0.0', '0')
    """
    text = f"{value:+.{digits}f}"
    return text if float(text) else f"{0:.{digits}f}"


def with_error(value: Estimate, digits: int = 2) -> str:
    """Mean, standard error and number of runs; one run has no error.

    Example:
        >>> with_error(Estimate(90.416, 0.05, 2)), with_error(Estimate(90.416, None, 1))
        ('90.42 ± 0.05 (n=2)', '90.42 (n=1)')
    """
    error = f" ± {value.se:.{digits}f}" if value.se is not None else ""
    return f"{value.mean:.{digits}f}{error} (n={value.n})"


def of_speeds(speeds: Speeds) -> list[Block]:
    """Time and memory of a step by network, the paper's beside ours."""
    devices = {pair.step.device for _, pair, _, _ in speeds if pair}
    rows = []
    for model, pair, floor, theirs in speeds:
        said = f"{theirs:.0f} %" if theirs else NOTHING
        if pair is None:
            rows.append([f"{model}\n*{NOT_RUN}*", said, *[NOTHING] * 4])
            continue
        step = pair.step
        where = step.where if len(devices) > 1 else step.where.removeprefix(f"{step.device}, ")
        where += f"; scaled down: {step.scaled}" if step.scaled else ""
        spread = f"\n*{step.spread[0]:.3g} to {step.spread[1]:.3g}*" if step.spread else ""
        rows.append([
            f"{model}, rate {step.rate:g}", said, f"**{pair.time:.0f} %**\n*{where}*",
            f"{step.ms:.3g} of {pair.base.ms:.3g} ms{spread}",
            NOTHING if floor is None else f"{100 * step.ms / floor.ms:.0f} %",
            NOTHING if pair.memory is None else f"{pair.memory:.0f} %",
        ])  # fmt: skip
    columns = (
        "network",
        "time, paper",
        "time, ours",
        "median step\n*10th to 90th percentile*",
        "of the floor",
        "memory",
    )
    note = (
        "Percent of the same network without SliceOut: standard dropout, or none where the network has none "
        "(EfficientNets). "
        "The mode is the one in which that baseline is fastest. The floor is a plain network of the sliced widths."
    )
    on = [f"Measured on {', '.join(sorted(devices))}."] if devices else []
    others = {pair.step.stands_in({"sampling": "window"}) for _, pair, _, theirs in speeds if pair and theirs} - {None}
    on += [f"The paper slices windows; ours here were {text}." for text in sorted(map(str, others))]
    return [Table(columns, rows, caption="Time and memory of a training step", notes=[note, *on])]


def of_all(groups: Sequence[Group]) -> list[Block]:
    """Every configuration that was read."""
    if not groups:
        return [Text(f"*{NOT_RUN.capitalize()}.*")]
    rows = []
    for g in sorted(groups, key=_order):
        best, last, time = g.score("best"), g.score("last"), g.number("ms_per_step")
        shared = sum(not r.alone for r in g.runs)
        memory = g.number("max_reserved", alone=False) or g.number("max_allocated", alone=False)
        how = [f"{len(g.runs[0].record['epochs'])} epochs"]
        how += [str(g.config[k]) for k in ("precision", "mode", "grads") if g.config.get(k)]
        how += [f"**scaled down**: {scaling_in_words(g.scaled)}"] if g.scaled else []
        rows.append([
            f"{g.config['data']}, {g.config['model']}", name_of(g.config) + (f", rate {g.rate:g}" if g.rate else ""),
            NOTHING if best is None else with_error(best), NOTHING if last is None else with_error(last),
            f"{time.mean:.3g} ms" if time else f"device shared ({shared} of {len(g.runs)})" if shared else NOTHING,
            NOTHING if memory is None else f"{memory.mean / 1e9:.2f} GB", f"{', '.join(how)}\n*{g.device}*",
        ])  # fmt: skip
    columns = ("data, network", "scheme", "best of all epochs", "last epoch", "step", "memory", "how")
    about = (
        "Accuracy in percent, or perplexity: mean ± standard error over seeds. No run that could be read is left out."
    )
    return [Text(about), Table(columns, rows, caption=f"{len(groups)} configurations", folded=len(groups) > 12)]


def _order(g: Group) -> tuple[object, ...]:
    """Schemes from none to SliceOut, each by its rate: runs that trained side by side end in any order."""
    schemes = ("none", "standard", "controlled", "spatial", "dropblock", "patch", "sliceout")
    place = schemes.index(g.scheme) if g.scheme in schemes else len(schemes)
    return g.config["data"], g.config["model"], place, name_of(g.config), g.rate


def in_words() -> list[Block]:
    """The paper's tables without results: what schemes cost, and hyperparameters."""
    out: list[Block] = []
    for t in paper.read("in-words")["tables"]:
        caption = f"{t['title']} (`{t['label']}`, lines {t['lines'][0]} to {t['lines'][1]})"
        out.append(Table(t["columns"], t["rows"], caption=caption, folded=True))
    return out

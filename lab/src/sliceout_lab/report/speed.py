"""Pictures of time and memory: by rate, and by architecture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..bench.suites import default_batch
from . import paper
from .figures import COLOURS, Drawn, legend, panel
from .groups import name_of
from .paper import Number
from .plots import DASHED, HOLLOW
from .tables import Speeds
from .timing import Pair, Step, pair


def steps_by_rate(steps: Sequence[Step]) -> list[Drawn]:
    """Time and memory of a benchmark over the rate, one picture a network and a kind of number."""
    out: list[Drawn] = []
    for model in sorted({s.model for s in steps}, key=_by_number):
        rates, alike = _longest_curve([s for s in steps if s.model == model])
        if len(rates) < 3:
            continue
        pairs = [(r, p) for r in rates if (p := _pair(alike, model, r)) is not None]
        for what, unit in (("time", "time of a step"), ("memory", "memory held by the allocator")):
            points = [(r, v) for r, p in pairs if (v := getattr(p, what)) is not None]
            floor = [
                (r, 100 * _part(f, what) / _part(p.base, what))
                for r, p in pairs
                if (f := _floor(alike, p.step)) and _part(f, what)
            ]
            if len(points) < 2:
                continue
            base = name_of({"scheme": pairs[0][1].base.scheme})
            title = f"{model}: {unit} by rate"
            caption = f"Percent of {base}. {pairs[0][1].step.where}."
            with panel(f"{what}-by-rate-{model}", title, caption, out, title=title) as axes:
                axes.plot(
                    *zip(*points, strict=True), color=COLOURS["sliceout-circular"], marker="o", label="SliceOut, ours"
                )
                if floor:
                    axes.plot(
                        *zip(*floor, strict=True),
                        color=COLOURS["floor"],
                        label="narrow network: the floor",
                        marker="|",
                        linewidth=1.2,
                    )
                if theirs := _papers_by_rate(model, what):
                    axes.plot(
                        *zip(*theirs, strict=True),
                        color=COLOURS["sliceout-probabilistic"],
                        label="SliceOut, paper",
                        **DASHED,
                        **HOLLOW,
                    )
                axes.axhline(100, color=COLOURS["standard"], linewidth=1)
                axes.set_ylim(0, max(105, *(v for _, v in points)) * 1.05)
                axes.set_xticks(rates)
                axes.set_xlabel("dropout rate")
                axes.set_ylabel(f"% of {base}")
                legend(axes, 3)
    return out


def _longest_curve(steps: Sequence[Step]) -> tuple[list[float], list[Step]]:
    """The rates at which one kind of SliceOut was timed in one setting, where there are most, and the steps there."""
    rates: dict[Any, set[float]] = {}
    for s in steps:
        if s.scheme == "sliceout":
            rates.setdefault((s.setting, s.allocator, s.grads, s.sampling), set()).add(s.rate)
    if not rates:
        return [], []
    setting, allocator, *kind = best = max(rates, key=lambda key: len(rates[key]))
    alike = [
        s for s in steps
        if (s.setting, s.allocator) == (setting, allocator)
        and (s.scheme != "sliceout" or [s.grads, s.sampling] == kind)
    ]  # fmt: skip
    return sorted(rates[best]), alike


def _pair(steps: Sequence[Step], model: str, rate: float) -> Pair | None:
    match, batch = {"model": model, "scheme": "sliceout", "rate": rate}, default_batch(model)
    return pair(steps, match, {"scheme": "standard"}, batch) or pair(steps, match, {"scheme": "none"}, batch)


def _floor(steps: Iterable[Step], step: Step) -> Step | None:
    same = (
        s
        for s in steps
        if s.scheme == "floor" and (s.model, s.rate, s.setting) == (step.model, step.rate, step.setting)
    )
    return next(same, None)


def _part(step: Step, what: str) -> float:
    return step.ms if what == "time" else step.reserved or 0.0


def _papers_by_rate(model: str, what: str) -> list[tuple[float, float]]:
    table, column = {
        "mlp": (f"fashion-mnist-{what}", 0),
        "wrn-40-10": ("wide-resnet-channel", 2 if what == "time" else 3),
    }.get(model, ("", 0))
    if not table:
        return []
    shift = 100 if model != "mlp" else 0
    rows = [
        (row["match"]["rate"], Number.of(row["cells"][column]))
        for row in paper.read(table)["rows"]
        if row["match"].get("data") != "cifar-100"
    ]
    return [(rate, shift + number.value) for rate, number in rows if number]


def papers_speedup(model: str) -> tuple[float, float] | None:
    """The rate and the time (percent of the baseline) that the paper gives for a network."""
    if model.startswith("wrn-"):
        got, rate = paper.lookup("wide-resnet-sizes", {"data": "cifar-100", "model": model}, 2), 0.5
        return (rate, 100 + got.value) if got else None
    if model in ("lm-1024", "lm-2048"):
        got = paper.lookup("transformer", {"model": model, "rate": 0.3}, 3)
        return (0.3, 100 + got.value) if got else None
    if model == "mlp":
        got = paper.lookup("fashion-mnist-time", {"rate": 0.5}, 0)
        return (0.5, got.value) if got else None
    if model in (f"efficientnet-b{i}" for i in range(4)):
        column = 4 + int(model[-1])
        sliced, plain = (
            paper.lookup("efficientnet-imagenet", m, column)
            for m in ({"scheme": "sliceout", "rate": 0.5}, {"scheme": "none"})
        )
        return (0.5, 100 * (100 + sliced.value) / (100 + plain.value)) if sliced and plain else None
    return None


def _by_number(model: str) -> list[tuple[int, str]]:
    """For sorting: mlp-3x512 before mlp-3x1024."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", model)]


def speedups(steps: Sequence[Step]) -> tuple[list[Drawn], Speeds]:
    """Time saved by architecture, paper's and ours at the paper's rate; and the rows it is drawn from."""
    known = [
        "mlp",
        *(f"wrn-{a}" for a in ("28-6", "34-8", "40-10", "46-12", "52-14")),
        *(f"efficientnet-b{i}" for i in range(4)),
        "lm-1024",
        "lm-2048",
    ]
    others = sorted({s.model for s in steps if s.scheme == "sliceout"} - set(known), key=_by_number)
    rows = []
    for model in [*known, *others]:
        theirs = papers_speedup(model)
        ours = (
            _pair(steps, model, theirs[0])
            if theirs
            else next((p for r in (0.5, 0.3) if (p := _pair(steps, model, r))), None)
        )
        rows.append((model, ours, _floor(steps, ours.step) if ours else None, theirs[1] if theirs else None))
    out: list[Drawn] = []
    caption = (
        "Time of a training step in percent of the same network without SliceOut (standard dropout; EfficientNets: "
        "none). Shorter is faster."
    )
    if not any(p for _, p, _, _ in rows):
        caption += " Ours: not run here."
    with panel(
        "speedup-by-architecture",
        "Time of a step by architecture",
        caption,
        out,
        title="Time of a step with SliceOut",
        figsize=(5.6, 0.42 * len(rows) + 1.4),
    ) as axes:
        for y, (_, ours, floor, theirs_) in enumerate(rows):
            if theirs_ and not (ours and ours.step.scaled):
                axes.barh(
                    y - 0.2,
                    theirs_,
                    0.36,
                    color="none",
                    edgecolor=COLOURS["sliceout-probabilistic"],
                    linewidth=1.2,
                    label="paper",
                )
            if ours:
                axes.barh(y + 0.2, ours.time, 0.36, color=COLOURS["sliceout-circular"], label="ours")
                end = max(ours.time, 100 * floor.ms / ours.base.ms if floor else 0.0)  # not under the floor's mark
                axes.text(end + 1.5, y + 0.2, f"{ours.time:.0f}", va="center", fontsize=8)
            if ours and floor:
                axes.plot(
                    [100 * floor.ms / ours.base.ms] * 2,
                    [y + 0.02, y + 0.38],
                    color=COLOURS["floor"],
                    linewidth=2.5,
                    label="narrow network: the floor",
                )
        axes.axvline(100, color=COLOURS["standard"], linewidth=1)
        names = [f"{model} (scaled down)" if pair and pair.step.scaled else model for model, pair, _, _ in rows]
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("% of the time without SliceOut")
        legend(axes, 3)
    return out, rows

"""How the demo looks: a live progress bar for every scheme, a table of results and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files; needs no display

import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from .demo import DROPOUT, NONE, SLICEOUT, Scheme

COLOURS = {NONE: "#8a8f98", DROPOUT: "#d9822b", SLICEOUT: "#2364aa"}


def follow(running: Iterable[Scheme], contenders: Sequence[Scheme], epochs: int, steps: int, console: Console) -> None:
    """Run the training to its end, showing where each scheme stands (one line an epoch where there is no terminal)."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        TextColumn("{task.fields[status]}"),
        TextColumn("{task.fields[left]}", style="dim"),
        console=console,
        refresh_per_second=4,  # the bar runs beside the steps it times
        disable=not console.is_terminal,
    )
    total = epochs * steps
    with bar:
        tasks = {s.name: bar.add_task(f"{s.name:10}", total=total, status="", left="") for s in contenders}
        for scheme in running:
            status, left = _status(scheme, epochs), _left(contenders, total)
            bar.update(tasks[scheme.name], completed=len(scheme.steps), status=status)
            bar.update(tasks[contenders[-1].name], left=left)
            if not console.is_terminal and len(scheme.curve) == scheme.epoch:
                console.print(f"{scheme.name:10} {status}  {left}", soft_wrap=True)


def _status(scheme: Scheme, epochs: int) -> str:
    accuracy = f"{scheme.accuracy:.1%}" if scheme.curve else "-"
    epoch = f"{scheme.epoch}/{epochs}"
    return f"epoch {epoch:>5} loss {scheme.loss:.3f} acc {accuracy:>5} {scheme.milliseconds:5.1f} ms/step"


def _left(contenders: Sequence[Scheme], total: int) -> str:
    """Time left for all: each scheme's remaining steps at its own pace, or at the mean pace while that is unknown."""
    known = [s.milliseconds for s in contenders if s.steps]
    usual = sum(known) / len(known)
    left = sum((total - len(s.steps)) * (s.milliseconds if s.steps else usual) for s in contenders) / 1000
    return f"{timedelta(seconds=round(left))}".removeprefix("0:") + " left"


def table(contenders: Sequence[Scheme], title: str) -> Table:
    """The results side by side; percentages are of standard dropout."""
    reference = next(s for s in contenders if s.name == DROPOUT)
    out = Table(title=title, title_justify="left", caption_justify="left")
    out.add_column("scheme")
    for heading in ("time per step\n(median)", "relative\ntime", "peak memory\nof the step", "relative\nmemory"):
        out.add_column(heading, justify="right")
    out.add_column("test\naccuracy", justify="right")
    for s in contenders:
        out.add_row(
            s.name,
            f"{s.milliseconds:.1f} ms",
            f"{s.milliseconds / reference.milliseconds:.0%}",
            f"{s.peak / 1e6:.1f} MB",
            f"{s.peak / reference.peak:.0%}",
            f"{s.accuracy:.1%}",
            style="bold" if s.name == SLICEOUT else "",
        )
    return out


def notes(contenders: Sequence[Scheme]) -> list[str]:
    """What a reader of the table should know."""
    by_name = {s.name: s for s in contenders}
    sliced, dropout, none = by_name[SLICEOUT], by_name[DROPOUT], by_name[NONE]
    seconds = sum(sliced.steps)
    others = (f"{s.name} had {_reached(s.accuracy_after(seconds))}" for s in (dropout, none))
    out = [
        f"All trained for as many epochs, which took SliceOut {seconds:.1f} s and dropout {sum(dropout.steps):.1f} s. "
        f"After {seconds:.1f} s, {' and '.join(others)}."
    ]
    if sliced.peak >= 0.97 * dropout.peak:
        out.append(
            "Nearly all of the peak memory is parameters, gradients and Adam's state and temporaries, which SliceOut "
            "leaves at full size. It makes activations smaller, and this network has few of them."
        )
    return out


def _reached(accuracy: float) -> str:
    return "not finished an epoch" if math.isnan(accuracy) else f"reached {accuracy:.1%}"


def plot(contenders: Sequence[Scheme], title: str, path: Path) -> None:
    """Accuracy over seconds of training, and the time of a step, as a PNG."""
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), width_ratios=(3, 2), layout="constrained")
        for s in contenders:
            seconds, right_answers = zip(*s.curve, strict=True)
            percent = [100 * a for a in right_answers]
            left.plot(seconds, percent, marker="o", markersize=3.5, color=COLOURS[s.name], label=s.name)
        left.set_xlabel("seconds of training (evaluation not counted)")
        left.set_ylabel("test accuracy, %")
        left.grid(alpha=0.25)
        left.legend(frameon=False, loc="lower right")
        bars = right.bar(
            [s.name for s in contenders],
            [s.milliseconds for s in contenders],
            color=[COLOURS[s.name] for s in contenders],
            width=0.6,
        )
        right.bar_label(bars, fmt="%.1f ms", padding=3)
        right.set_ylabel("median time of a training step, ms")
        right.margins(y=0.12)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.savefig(path, dpi=150)
        plt.close(figure)

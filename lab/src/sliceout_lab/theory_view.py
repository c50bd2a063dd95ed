"""What ``sliceout-lab theory`` prints and plots."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

from rich.table import Table

from sliceout.slices import Slice

from .theory import architectures, compare

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def keep_plot(s: Slice, columns: int = 64, lines: int = 6) -> str:
    """The probability of each unit being kept, as text: units from left to right, probability upwards."""
    probability = s.keep_probability.tolist()
    columns = min(columns, s.size)
    edges = [i * s.size // columns for i in range(columns + 1)]
    heights = [sum(probability[a:b]) / (b - a) for a, b in pairwise(edges)]
    rows = []
    for line in reversed(range(lines)):
        label = {lines - 1: "1.0", 0: "0.0"}.get(line, "   ")
        cells = (min(max(round((h * lines - line) * 8), 0), 8) for h in heights)
        rows.append(f"{label} |" + "".join(_EIGHTHS[c] for c in cells))
    ends = f"    0{str(s.size - 1).rjust(columns - 1)}" if columns > 4 else ""
    return "\n".join([*rows, f"    +{'-' * columns}", ends])


def table(size: int, rate: float, align: int | None) -> Table:
    """Networks and moments of every scheme."""
    out = Table(title=f"output of a random layer that reads {size} units at rate {rate}, over all draws")
    for name in ("scheme", "norm", "networks sampled", "mean off by", "second moment off by"):
        out.add_column(name, justify="left" if name in ("scheme", "norm") else "right")
    for line in compare(size, rate, align):
        errors = (f"{100 * e:.3g} %" if e > 1e-9 else "0" for e in (line.mean_error, line.second_error))
        out.add_row(line.scheme, line.norm, _count(line.networks), *errors)
    return out


def scenarios(s: Slice) -> str:
    """Appendix C for three hidden layers of this width."""
    one, both = architectures(s), architectures(s, s)
    return (
        f"distinct masks of the weight between two layers of {s.size}: {_count(one)} if one of them is sliced "
        f"(linear), {_count(both)} if both are (quadratic)"
    )


def _count(n: int) -> str:
    if n < 10**7:
        return f"{n:,}"
    digits = math.log10(n)
    return f"10^{digits:,.0f}"


def plot(size: int, rate: float, align: int | None, path: Path) -> None:
    """Keep probabilities of both samplings as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for sampling, style in (("window", "-"), ("circular", "--")):
        s = Slice(size, rate, sampling=sampling, align=align)
        axes.plot(
            s.keep_probability.numpy(), style, label=f"{sampling} ({len(s.starts)} starts)", drawstyle="steps-mid"
        )
    axes.set(xlabel="unit", ylabel="probability of being kept", ylim=(0, 1.05), xlim=(0, size - 1))
    axes.set_title(f"{s.width} of {size} units kept", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)

"""``sliceout-lab theory``: the numbers behind the method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sliceout.cli import UserError
from sliceout.cli.options import make_folder

FORMATS = (".png", ".svg", ".pdf")


def command(
    size: Annotated[int, typer.Option(help="Units of the layer.")] = 2048,
    rate: Annotated[float, typer.Option(help="Fraction of them that is dropped.")] = 0.5,
    sampling: Annotated[str, typer.Option(help="window (the paper) or circular: what is drawn as text.")] = "window",
    align: Annotated[int | None, typer.Option(help="Starts and widths are multiples of it.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Save a picture of the keep probabilities here (png, svg, pdf).")
    ] = None,
) -> None:
    """Print how often units are kept, how many networks are sampled and which moments of a layer's output survive."""
    from rich.console import Console

    from sliceout import Slice

    from .. import theory_view

    console = Console(highlight=False)
    try:
        drawn = Slice(size, rate, sampling=sampling, align=align)
    except ValueError as error:
        raise UserError(str(error)) from error
    if plot is not None:
        if plot.suffix not in FORMATS:
            raise UserError(f"--plot {plot}: expected a name that ends in {', '.join(FORMATS)}")
        make_folder(plot.parent, "--plot")
    console.print(f"probability of being kept: {drawn.width} of {size} units, {len(drawn.starts)} starts ({sampling})")
    console.print(theory_view.keep_plot(drawn), style="cyan", soft_wrap=True)
    console.print(theory_view.scenarios(drawn))
    console.print(theory_view.table(size, rate, align))
    if plot is not None:
        theory_view.plot(size, rate, align, plot)
        console.print(f"Plot: {plot}", soft_wrap=True)

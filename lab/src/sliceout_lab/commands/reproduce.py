"""``sliceout-lab reproduce``: all rows of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sliceout.cli.options import find_device, make_folder


def command(
    table: Annotated[
        str, typer.Argument(help="A table of the paper or an experiment: see `sliceout-lab train --list`.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="The small form that the experiment declares.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only these schemes; may be given several times.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs to train at once: for networks that leave a GPU idle.")] = 1,
    seeds: Annotated[str | None, typer.Option(help="Such as 0,1,2.", show_default="the experiment's")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    width: Annotated[int | None, typer.Option(help="Another width of the same network.")] = None,
    subset: Annotated[int | None, typer.Option(help="Only so many training samples.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a step.")] = None,
    mode: Annotated[str, typer.Option(help="auto, eager, compiled or captured.")] = "auto",
    precision: Annotated[str | None, typer.Option(help="fp32, tf32 or bf16.", show_default="the experiment's")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    data: Annotated[Path | None, typer.Option(help="Folder with the data.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results and report.", show_default="runs/TABLE[-quick]")
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="First compile the steps of all rows at once, then train one by one.")
    ] = False,
    report: Annotated[bool, typer.Option(help="Write the report at the end.")] = True,
) -> None:
    """Train all rows of a table for all seeds, skipping what is there, and show them beside the paper's numbers."""
    from ..reproduce import Plan, reproduce

    where = find_device(device)
    plan = Plan.of(
        table, quick=quick, only=tuple(only or ()), seeds=seeds, device=where, mode=mode, precision=precision,
        epochs=epochs, width=width, subset=subset, batch=batch,
    )  # fmt: skip
    out = Path("runs", f"{plan.name}-quick" if quick else plan.name) if out is None else out
    make_folder(out)
    if quick and where == "cpu" and jobs == 1:
        import torch

        torch.set_num_threads(1)  # small networks gain little from more, and lose a lot where others use the cores too
    code = reproduce(plan, out, device=where, data=data, jobs=jobs, prepare=prepare, report=report)
    if code:
        raise typer.Exit(code)

"""The ``sliceout-lab`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from sliceout.cli.app import run

from .commands import bench, data, demo, report, reproduce, theory, train

PROGRAM = "sliceout-lab"

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def sliceout_lab() -> None:
    """Reproduce the paper on SliceOut: demo, data, training, benchmarks and report pages."""


app.command("demo")(demo.command)
app.command("theory")(theory.command)
app.add_typer(data.app, name="data")
app.command("bench")(bench.command)
app.command("train")(train.command)
app.command("reproduce")(reproduce.command)
app.command("report")(report.command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run(app, PROGRAM, arguments)


def script() -> None:
    sys.exit(main())

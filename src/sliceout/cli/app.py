"""The typer application of ``sliceout``, and how a typer application is run without tracebacks for user errors."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from . import UserError, bench, inspect

INTERRUPTED = 130  # the exit code that shells use for Ctrl-C

app = typer.Typer(no_args_is_help=True, add_completion=False)


def _version(asked: bool) -> None:
    if asked:
        print(f"sliceout {importlib.metadata.version('sliceout')}")
        raise typer.Exit


@app.callback()
def sliceout(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """SliceOut: train on one random contiguous slice of every layer."""


app.command("inspect")(inspect.command)
app.command("bench")(bench.command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``sliceout`` and return its exit code."""
    return run(app, "sliceout", arguments)


def run(app: typer.Typer, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run a typer application and return its exit code. User errors are printed in one line, without a traceback."""
    try:
        result: Any = app(arguments, prog_name=program, standalone_mode=False)
    except UserError as error:
        return _fail(program, str(error), error.code)
    except (typer.Abort, KeyboardInterrupt):
        result = INTERRUPTED
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's usage errors have it, whichever click is inside
            raise
        return _fail(program, error.format_message(), 2)
    if result == INTERRUPTED:  # newer typers return this instead of raising
        return _fail(program, "stopped", INTERRUPTED)
    return result if isinstance(result, int) else 0


def _fail(program: str, message: str, code: int) -> int:
    if message:  # without arguments typer has printed the help, and there is nothing to add
        print(f"{program}: {message}", file=sys.stderr)
    return code

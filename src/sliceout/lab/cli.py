"""The command line: finds the commands, and says plainly what a user can put right."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import typer

from . import LabError

INTERRUPTED = 130  # the exit code that shells use for it
COMMANDS = ("demo", "inspect", "theory", "data", "bench", "train", "reproduce", "report")
"""Modules of ``commands``, in the order of the help."""

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def sliceout() -> None:
    """SliceOut: train on one random contiguous slice of every layer."""


for _name in COMMANDS:
    _module = importlib.import_module(f".commands.{_name}", __package__)
    if hasattr(_module, "app"):
        app.add_typer(_module.app, name=_name)
    else:
        app.command(_name)(_module.command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. What a user can put right is said plainly, without a traceback."""
    try:
        result: Any = app(arguments, prog_name="sliceout", standalone_mode=False)
    except LabError as error:
        return _fail(str(error), error.code)
    except (typer.Abort, KeyboardInterrupt):
        result = INTERRUPTED
    except Exception as error:
        if not hasattr(error, "format_message"):  # how typer's own usage errors are known, whichever click is inside
            raise
        return _fail(error.format_message(), 2)
    if result == INTERRUPTED:  # newer typers turn the interrupt into this
        return _fail("stopped", INTERRUPTED)
    return result if isinstance(result, int) else 0


def _fail(message: str, code: int) -> int:
    if message:  # without arguments, the help has been printed and there is nothing to add
        print(f"sliceout: {message}", file=sys.stderr)
    return code

"""``sliceout inspect``: what convert_ would do to a model."""

from __future__ import annotations

import json
import shutil
from typing import Annotated

import typer

from . import UserError
from .options import Stages

Model = Annotated[str, typer.Argument(help="timm:NAME, torchvision:NAME, hf:TYPE or package.module:factory.")]


def command(
    model: Model,
    rate: Annotated[float, typer.Option(help="Fraction of the units that is dropped.")] = 0.5,
    attention: Annotated[str, typer.Option(help="dims, values, heads or off.")] = "dims",
    parts: Annotated[int, typer.Option(help="Equal parts of the batch, each with slices of its own.")] = 1,
    stages: Stages = None,
    json_: Annotated[bool, typer.Option("--json", help="Print plain data instead of a table.")] = False,
) -> None:
    """Show what convert_ would slice in a model, what it would leave alone and why, and what that should save."""
    from .. import convert_
    from .models import find_model_and_inputs

    if parts < 1:
        raise UserError(f"--parts {parts}: expected at least 1")
    net, inputs = find_model_and_inputs(model)
    try:
        report = convert_(net, rate, attention=attention, stages=stages, parts=parts, example_inputs=inputs)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    columns = shutil.get_terminal_size((160, 24)).columns  # of a file
    print(json.dumps(report.as_dict(), indent=1) if json_ else report.text(min(columns, 160)))

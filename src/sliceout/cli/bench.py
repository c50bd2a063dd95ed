"""``sliceout bench``: time and memory of a training step of a model, under every scheme, against the floor."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import UserError
from .options import BenchOptions, find_device, make_folder, with_bench_options


@with_bench_options
def command(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="timm:NAME, torchvision:NAME, hf:TYPE, package.module:factory.")
    ],
    *,
    options: BenchOptions,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers into this JSON file.")] = None,
) -> None:
    """Measure training steps without dropout, with dropout, at the narrow floor and with SliceOut, a process each."""
    import torch
    from rich.console import Console

    from . import cases, machine, run, table
    from .models import find_model

    kind = find_device(options.device)
    chosen = cases.from_options(models, kind, options)
    cases.check_device(chosen, kind)
    for model in models:
        find_model(model)  # on the meta device: a name that is wrong is found before anything is measured
    if out is not None:
        make_folder(out.parent)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    rows: list[dict[str, Any]] = []
    data: dict[str, Any] = {"kind": "bench", "schema": 1, "machine": machine.describe(torch.device(kind))}
    data |= {"command": shlex.join(["sliceout", *sys.argv[1:]]), "cases": rows}
    for row in run.run_cases(chosen, run.task(kind, options.seconds)):
        rows.append(row)
        console.print(f"{len(rows)} of {len(chosen)}: {row['model']} {row['mode']} {row['scheme']}", style="dim")
        if out is not None:
            write_text(out, json.dumps(data, indent=1) + "\n")
    about = data["machine"]
    console.print(table.table(rows, f"{about['device']}, torch {about['torch']}: one training step"))
    if out is not None:
        console.print(f"Numbers: {out}", soft_wrap=True)
    raise_for_failures(rows, len(chosen))


def raise_for_failures(rows: list[dict[str, Any]], total: int, hint: str = "") -> None:
    if failed := [r["error"] for r in rows if r["error"]]:
        first = failed[0].strip().splitlines()[0]
        raise UserError(f"{len(failed)} of {total} cases failed, the first with: {first}{hint}")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a process that is killed leaves the old file or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error

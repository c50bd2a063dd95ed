"""Command-line options that several commands have, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from . import UserError

T = TypeVar("T")

Batch = Annotated[str, typer.Option(help="Batch sizes, separated by commas.")]
Rates = Annotated[str, typer.Option(help="Fractions of the units that are dropped.")]
Schemes = Annotated[str, typer.Option(help="Of none, standard, controlled, floor, sliceout.")]
Modes = Annotated[str, typer.Option(help="Of eager, compiled, compiled-default, captured, captured-compiled.")]
Precision = Annotated[str, typer.Option(help="bf16, tf32 or fp32; by default bf16 on a GPU, fp32 else.")]
Sampling = Annotated[str, typer.Option(help="Of circular, window.")]
Grads = Annotated[str, typer.Option(help="Of dense, compact.")]
Align = Annotated[int | None, typer.Option(help="Starts and widths are multiples of it.")]
Stages = Annotated[int | None, typer.Option(help="Only so many stages of inverted bottlenecks.")]
Size = Annotated[int | None, typer.Option(help="Side of the images, or tokens in a sequence.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Seconds = Annotated[float, typer.Option(help="Seconds of timed steps in each case; 2 and more for energy.")]


def find_device(name: str) -> str:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device that torch can use; try --device cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def make_folder(path: Path, option: str = "--out") -> None:
    """Make a folder for results, so that a place that cannot be written to is found before anything is computed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".writable").touch()
        (path / ".writable").unlink()
    except OSError as error:
        raise UserError(f"{option} {path}: cannot write there ({error.strerror})") from error


def split(option: str, text: str, of: Callable[[str], T]) -> list[T]:
    """The values of an option that are separated by commas; only ``--batch`` may be empty."""
    try:
        found = [of(part.strip()) for part in text.split(",") if part.strip()]
        if not found and option != "--batch":
            raise ValueError
        return found
    except ValueError as error:
        kinds = {"str": "names", "int": "whole numbers", "float": "numbers"}
        raise UserError(f"{option} {text!r}: expected {kinds[of.__name__]}, separated by commas") from error

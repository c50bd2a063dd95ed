"""Command-line options that several commands have, and their checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from . import UserError

T = TypeVar("T")

Stages = Annotated[int | None, typer.Option(help="Only so many stages of inverted bottlenecks.")]


def _option(text: str) -> Any:
    return typer.Option(help=text)


@dataclass(frozen=True)
class BenchOptions:
    """What ``bench`` measures and how, in the library's command and in the lab's; see :func:`with_bench_options`."""

    batch: Annotated[
        str, _option("Batch sizes, separated by commas; 128 by default, or the paper's for its networks.")
    ] = ""
    rates: Annotated[str, _option("Fractions of the units that are dropped.")] = "0.5"
    schemes: Annotated[str, _option("Of none, standard, controlled, floor, sliceout.")] = "none,standard,floor,sliceout"
    modes: Annotated[str, _option("Of eager, compiled, compiled-default, captured, captured-compiled.")] = "eager"
    precision: Annotated[str, _option("bf16, tf32 or fp32; by default bf16 on a GPU, fp32 else.")] = ""
    sampling: Annotated[str, _option("Of circular, window, prefix.")] = "circular"
    parts: Annotated[str, _option("Equal parts of the batch, each with slices of its own, such as 1,4,8.")] = "1"
    grads: Annotated[str, _option("Of dense, compact.")] = "dense"
    align: Annotated[int | None, _option("Starts and widths are multiples of it.")] = None
    stages: Stages = None
    size: Annotated[int | None, _option("Side of the images, or tokens in a sequence.")] = None
    device: Annotated[str, _option("auto, cpu or cuda.")] = "auto"
    seconds: Annotated[float, _option("Seconds of timed steps in each case; 2 and more for energy.")] = 1.2


def with_bench_options(command: Callable[..., None]) -> Callable[..., None]:
    """For typer: ``command`` with an option for each field of :class:`BenchOptions` in place of its ``options``."""
    fields = inspect.signature(BenchOptions, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters
    each = [p for name in own for p in (fields.values() if name == "options" else [own[name]])]

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        command(options=BenchOptions(**{name: given.pop(name) for name in fields}), **given)

    flat.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in each])  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in each}
    return flat


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

"""The command line: each command is thin, checks what it is given and hands over to the module that does the work."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from . import LabError

INTERRUPTED = 130  # the exit code that shells use for it

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def sliceout() -> None:
    """SliceOut: train on one random contiguous slice of every layer."""


@app.command()
def demo(
    full: Annotated[bool, typer.Option("--full", help="The whole FashionMNIST, if it is on this machine.")] = False,
    data: Annotated[Path | None, typer.Option(help="Folder with its four files; implies --full.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data.", show_default="12, or 3 with --full")
    ] = None,
    rate: Annotated[float, typer.Option(help="Fraction of the hidden units that is dropped.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the weights, the batches and the slices.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for demo.png and demo.json.")] = Path("runs/demo"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Train a 784-2048-2048-2048-10 network without dropout, with dropout and with SliceOut, side by side."""
    from rich.console import Console

    from . import show
    from .data import fashion_mnist
    from .demo import Settings, schemes, steps_per_epoch, summary, train

    whole = full or data is not None
    settings = Settings(rate, (3 if whole else 12) if epochs is None else epochs, seed, device=_device(device))
    settings.check()
    images = fashion_mnist(full=whole, folder=data)
    _make_folder(out)
    console = Console(highlight=False)
    widths = [images.train[0].numel(), *settings.hidden, images.classes]
    contenders = schemes(settings, widths)
    title = f"{'-'.join(map(str, widths))} on {images.name}, rate {rate}"
    console.print(title)
    steps = steps_per_epoch(len(images.train), settings.batch)
    show.follow(train(contenders, images, settings), contenders, settings.epochs, steps, console)
    result = summary(contenders, images, settings)
    (out / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
    where = "{device}, {threads} thread(s), torch {torch}".format(**result["machine"])
    show.plot(contenders, f"{title}\n{where}", out / "demo.png")
    console.print(show.table(contenders, where))
    for note in show.notes(contenders):
        console.print(note)
    console.print(f"Plot: {out / 'demo.png'}   Numbers: {out / 'demo.json'}", soft_wrap=True)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="timm:NAME, torchvision:NAME, hf:TYPE or package.module:factory.")],
    rate: Annotated[float, typer.Option(help="Fraction of the units that is dropped.")] = 0.5,
    attention: Annotated[str, typer.Option(help="dims, heads or off.")] = "dims",
    stages: Annotated[int | None, typer.Option(help="Only so many stages of inverted bottlenecks.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print plain data instead of a table.")] = False,
) -> None:
    """Show what convert_ would slice in a model, what it would leave alone and why, and what that should save."""
    from .. import convert_
    from .find_model import find_model

    try:
        report = convert_(find_model(model), rate, attention=attention, stages=stages)
    except ValueError as error:
        raise LabError(str(error)) from error
    print(json.dumps(report.as_dict(), indent=1) if json_ else report)


@app.command()
def theory(
    size: Annotated[int, typer.Option(help="Units of the layer.")] = 2048,
    rate: Annotated[float, typer.Option(help="Fraction of them that is dropped.")] = 0.5,
    sampling: Annotated[str, typer.Option(help="window (the paper) or circular: what is drawn as text.")] = "window",
    align: Annotated[int | None, typer.Option(help="Starts and widths are multiples of it.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Save a picture of the keep probabilities here (.png).")] = None,
) -> None:
    """Print how often units are kept, how many networks are sampled and which moments of a layer's output survive."""
    from rich.console import Console

    from .. import Slice
    from . import show_theory

    console = Console(highlight=False)
    try:
        drawn = Slice(size, rate, sampling=sampling, align=align)
    except ValueError as error:
        raise LabError(str(error)) from error
    if plot is not None:
        _make_folder(plot.parent, "--plot")
    console.print(f"probability of being kept: {drawn.width} of {size} units, {len(drawn.starts)} starts ({sampling})")
    console.print(show_theory.keep_plot(drawn), style="cyan", soft_wrap=True)
    console.print(show_theory.scenarios(drawn))
    console.print(show_theory.table(size, rate, align))
    if plot is not None:
        show_theory.plot(size, rate, align, plot)
        console.print(f"Plot: {plot}", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. What a user can put right is said plainly, without a traceback."""
    try:
        result: Any = app(arguments, prog_name="sliceout", standalone_mode=False)
    except LabError as error:
        return _fail(str(error), 1)
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


def _device(name: str) -> str:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise LabError(f"--device {name}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise LabError("--device cuda: this machine has no CUDA device that torch can use; try --device cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _make_folder(path: Path, option: str = "--out") -> None:
    """Before anything is trained: a result that cannot be saved is found out early."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".writable").touch()
        (path / ".writable").unlink()
    except OSError as error:
        raise LabError(f"{option} {path}: cannot write there ({error.strerror})") from error

"""``sliceout-lab demo``: three networks side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sliceout.cli.options import find_device, make_folder


def command(
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

    from .. import demo_view
    from ..data import fashion_mnist
    from ..demo import Settings, schemes, steps_per_epoch, summary, train

    whole = full or data is not None
    settings = Settings(rate, (3 if whole else 12) if epochs is None else epochs, seed, device=find_device(device))
    settings.check()
    images = fashion_mnist(full=whole, folder=data)
    make_folder(out)
    console = Console(highlight=False)
    widths = [images.train[0].numel(), *settings.hidden, images.classes]
    contenders = schemes(settings, widths)
    title = f"{'-'.join(map(str, widths))} on {images.name}, rate {rate}"
    console.print(title)
    steps = steps_per_epoch(len(images.train), settings.batch)
    demo_view.follow(train(contenders, images, settings), contenders, settings.epochs, steps, console)
    result = summary(contenders, images, settings)
    (out / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
    where = "{device}, {threads} thread(s), torch {torch}".format(**result["machine"])
    demo_view.plot(contenders, f"{title}\n{where}", out / "demo.png")
    console.print(demo_view.table(contenders, where))
    for note in demo_view.notes(contenders):
        console.print(note)
    console.print(f"Plot: {out / 'demo.png'}   Numbers: {out / 'demo.json'}", soft_wrap=True)

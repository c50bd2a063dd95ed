"""``sliceout-lab train``: one run of an experiment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from sliceout.cli import UserError
from sliceout.cli.options import find_device, make_folder

_SCHEME = "none, standard, controlled, sliceout, spatial, dropblock or patch."


def command(
    experiment: Annotated[
        str | None, typer.Argument(help="Its name (see --list), or a TOML file of your own.", show_default=False)
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Show all experiments and stop.")] = False,
    scheme: Annotated[str | None, typer.Option(help=_SCHEME, show_default="the experiment's")] = None,
    rate: Annotated[float | None, typer.Option(help="Fraction of units that is dropped.")] = None,
    sampling: Annotated[str | None, typer.Option(help="circular, window or prefix.")] = None,
    norm: Annotated[str | None, typer.Option(help="probabilistic or flow.")] = None,
    grads: Annotated[str | None, typer.Option(help="dense, or compact: gradients of the slice only.")] = None,
    parts: Annotated[int | None, typer.Option(help="Equal parts of the batch, each with slices of its own.")] = None,
    attention: Annotated[str | None, typer.Option(help="dims, values, heads or off.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights, the batches and the slices.")] = 0,
    quick: Annotated[bool, typer.Option(help="The small form, as of reproduce: what comes with the package.")] = False,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data; schedules shrink with them.")] = None,
    width: Annotated[int | None, typer.Option(help="Another width of the same network.")] = None,
    subset: Annotated[int | None, typer.Option(help="Only so many training samples.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a step, of all processes together.")] = None,
    mode: Annotated[str, typer.Option(help="auto, eager, compiled or captured.")] = "auto",
    precision: Annotated[str | None, typer.Option(help="fp32, tf32 or bf16.", show_default="the experiment's")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    data: Annotated[Path | None, typer.Option(help="Folder with the data.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results and checkpoints.", show_default="runs/EXPERIMENT")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Go on where it was stopped, or start anew.")] = True,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Save after an epoch unless the last checkpoint is younger; 0 saves after each.")
    ] = 10.0,
    save_model: Annotated[bool, typer.Option(help="Keep the final weights.")] = True,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard logs too.")] = False,
) -> None:
    """Train one run of an experiment with the paper's hyperparameters; the result is one JSON file."""
    from .. import experiment as experiments

    if list_all:
        return _list()
    if experiment is None:
        raise UserError("which experiment? `sliceout-lab train --list` shows them all")
    declared = experiments.load(experiment)
    where = find_device(device)
    chosen = {"scheme": scheme, "rate": rate, "sampling": sampling, "norm": norm, "grads": grads, "parts": parts}
    chosen["attention"] = attention
    if scheme == "none" and rate:
        raise UserError(f"--scheme none --rate {rate}: nothing is dropped there; leave out --rate")
    for option, value in (("--sampling", sampling), ("--norm", norm), ("--grads", grads), ("--parts", parts)):
        if value is not None and scheme in ("none", "standard", "spatial", "dropblock"):
            raise UserError(f"{option} {value} is a setting of sliced schemes: leave it out with --scheme {scheme}")
    if not 0 <= seed < 2**32:
        raise UserError(f"--seed {seed}: expected 0 <= seed < 2**32")
    scale: dict[str, Any] = {"epochs": epochs, "width": width, "subset": subset, "batch": batch}
    if quick:
        declared, small, scaled = experiments.quickened(declared)
        scale |= {name: value for name, value in small.items() if scale[name] is None} | {"scaled": scaled}
    job = experiments.job(
        declared, chosen, seed=seed, mode=mode, precision=precision, device=where,
        world=int(os.environ.get("WORLD_SIZE", "1")), **scale,
    )  # fmt: skip
    out = Path("runs", declared.name) if out is None else out
    make_folder(out)
    _train(job, out, where, data, resume, checkpoint_seconds, save_model, tensorboard)


def _train(
    job: object,
    out: Path,
    device: str,
    data: Path | None,
    resume: bool,
    checkpoint_seconds: float,
    save_model: bool,
    tensorboard: bool,
) -> None:
    from rich.console import Console

    from .. import results
    from ..experiment import Job
    from ..train import Settings, Stopped, run

    assert isinstance(job, Job)
    console = Console(highlight=False)
    there = not resume or job.id in results.by_id(results.read(out / results.NAME))
    settings = Settings(out, device, data, not resume, checkpoint_seconds, save_model, tensorboard)
    try:
        result = run(job, settings, console)
    except Stopped as stopped:
        error = UserError(str(stopped))
        error.code = stopped.code
        raise error from None
    if int(os.environ.get("RANK", "0")):
        return
    if there and resume:
        console.print(f"This run is in {out / results.NAME} already: --fresh trains it anew.", soft_wrap=True)
    score = result["final"]
    if "accuracy" in score:
        score_text = f"test accuracy {score['accuracy']:.2%} (best {score['best']:.2%} in epoch {score['at_epoch']})"
    else:
        score_text = f"perplexity {score['perplexity']:.2f} (best {score['best']:.2f} in epoch {score['at_epoch']})"
    if chosen := score.get("chosen"):
        score_text += (
            f", test word perplexity {chosen['word_perplexity']:.2f} at epoch {chosen['epoch']} (validation's)"
        )
    console.print(
        f"{job.experiment} {job.label}: {score_text}, {result['ms_per_step']:.3g} ms per step, "
        f"{result['seconds']:.1f} s of training.  Result {job.id} in {out / results.NAME}",
        soft_wrap=True,
    )


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    from .. import experiment as experiments
    from ..experiment_file import names

    table = Table(box=None, pad_edge=False)
    for heading in ("experiment", "table", "what"):
        table.add_column(heading, no_wrap=heading != "what")
    for name in names():
        one = experiments.load(name)
        table.add_row(name, one.table, one.title + (f" (stands in for {one.stands_in})" if one.stands_in else ""))
    Console(highlight=False).print(table)

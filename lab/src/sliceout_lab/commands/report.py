"""``sliceout-lab report``: results as tables, pictures and one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sliceout.cli import UserError
from sliceout.cli.options import make_folder

if TYPE_CHECKING:
    from ..report import Carbon


def command(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Training results (.json) or folders with them.", show_default="results/train, else runs"),
    ] = None,
    bench: Annotated[
        list[Path] | None,
        typer.Option(help="Results of sliceout-lab bench (.json) or folders.", show_default="results/bench"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html, Markdown and figures.")] = Path("runs/report"),
    carbon_intensity: Annotated[
        float | None,
        typer.Option(help="Grams of CO2 per kWh of electricity.", show_default="480, world average of 2023"),
    ] = None,
    carbon_source: Annotated[str | None, typer.Option(help="Where that number comes from.")] = None,
    docs: Annotated[
        bool, typer.Option("--docs", help="Bring docs/ and the README of this repository up to date instead.")
    ] = False,
) -> None:
    """Turn results into the paper's tables with ours beside them, curves, the frontier, CO2, and one HTML page."""
    from .. import report

    carbon = _carbon(carbon_intensity, carbon_source)
    if docs:
        from ..report.docs import update

        for path in update(Path.cwd(), results=results, bench=bench, carbon=carbon, say=_warn):
            print(f"updated {path}")
        return
    found, benches = list(results or ()), list(bench or ())
    if results is None and bench is None:
        found, benches = default_results(Path.cwd())
    for path in (*found, *benches):
        if not path.exists():
            raise UserError(f"{path}: there is no such file or folder")
    make_folder(out)
    print(f"Report: {report.write(found, out, bench=benches, carbon=carbon, say=_warn)}")


def default_results(folder: Path) -> tuple[list[Path], list[Path]]:
    """The committed results of the repository, or else what was run here."""
    train, bench, runs = folder / "results" / "train", folder / "results" / "bench", folder / "runs"
    found, benches = [p for p in (train,) if p.is_dir()], [p for p in (bench,) if p.is_dir()]
    if not found and not benches:
        found = [p for p in (runs,) if any(p.rglob("*.json"))]
    if not found and not benches:
        raise UserError("no results in results/train, results/bench or runs: name a file or a folder")
    return found, benches


def _carbon(intensity: float | None, source: str | None) -> Carbon:
    from ..report import Carbon

    if intensity is None:
        if source is not None:
            raise UserError("--carbon-source without --carbon-intensity: give both")
        return Carbon()
    if not 0 <= intensity < 10_000:
        raise UserError(f"--carbon-intensity {intensity:g}: expected grams of CO2 per kWh, such as 480")
    return Carbon(intensity, source or "source not given")


def _warn(message: str) -> None:
    print(f"sliceout-lab: {message}", file=sys.stderr)

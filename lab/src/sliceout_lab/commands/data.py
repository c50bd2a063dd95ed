"""``sliceout-lab data``: which data sets are here, fetching them, checking them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sliceout.cli import UserError

if TYPE_CHECKING:
    from ..data.catalogue import Dataset

app = typer.Typer(no_args_is_help=True, help="List, fetch and check data sets.")
DataOption = Annotated[Path | None, typer.Option("--data", help="Look in this folder only.")]


@app.command("list")
def list_(data: DataOption = None) -> None:
    """Show which data sets are on this machine, where, how large, and how to get the others."""
    from rich.console import Console
    from rich.table import Table

    from ..data import fashion, places
    from ..data.catalogue import BUNDLED, DATASETS

    table = Table("data set", "here", "size", "where, or how to get it")
    table.add_row(BUNDLED, "yes", _size(fashion.SUBSET), "comes with the package")
    for name, dataset in DATASETS.items():
        found = dataset.locate(data)
        if found is None:
            table.add_row(name, "no", "", _how(name), style="dim")
        else:
            where, layout = found
            table.add_row(name, "yes", "" if name == "imagenet" else _size(where, layout.files), str(where))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"Looked in {', '.join(map(str, places.roots(data)))}.", soft_wrap=True)


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="A data set, as `sliceout-lab data list` names it.")],
    to: Annotated[
        Path | None, typer.Option(help="Data folder.", show_default="$SLICEOUT_DATA or ~/.cache/sliceout")
    ] = None,
) -> None:
    """Download a data set, check it and put it in place; a download that broke off goes on where it stopped."""
    from ..data import places
    from ..data.check import check
    from ..data.download import Unreachable
    from ..data.files import DataError
    from ..data.official import DOWNLOADS

    dataset = _dataset(name)
    found = dataset.locate(to)
    if found is not None:
        print(f"{name} is in {found[0]} already: {check(dataset, *found)}")
        return
    dest = places.home(to)
    if name not in DOWNLOADS:
        raise DataError(f"{name} cannot be downloaded. {_by_hand(dataset, dest)}")
    try:
        _download(name, dest)
    except Unreachable as error:
        raise DataError(f"{error}.\n{_by_hand(dataset, dest)}") from error
    found = dataset.locate(dest)
    if found is None:
        raise DataError(f"{dest}: the download was unpacked there, but {dataset.title} is still not whole")
    print(f"{name} is in {found[0]}: {check(dataset, *found)}")


@app.command("check")
def check_(
    name: Annotated[str, typer.Argument(help="A data set, as `sliceout-lab data list` names it.")],
    data: DataOption = None,
) -> None:
    """Verify the files of a data set: their official checksums, or that all of them can be read."""
    from ..data.check import check

    dataset = _dataset(name)
    found = dataset.locate(data)
    if found is None:
        raise UserError(dataset.missing(data))
    print(f"{name} in {found[0]}: {check(dataset, *found)}")


def _download(name: str, dest: Path) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from ..data.download import fetch
    from ..data.official import DOWNLOADS

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        for download in DOWNLOADS[name]:
            if not download.archive and (dest / download.folder / download.name).is_file():
                continue  # of an earlier attempt: it got its name because it was right, and is checked at the end
            bar = bars.add_task(download.name, total=None)
            fetch(download, dest, lambda done, total, bar=bar: bars.update(bar, completed=done, total=total))  # type: ignore[misc]


def _dataset(name: str) -> Dataset:
    from ..data.catalogue import BUNDLED, DATASETS

    if name == BUNDLED:
        raise UserError(f"{name} comes with the package: there is nothing to fetch or to check")
    if name not in DATASETS:
        raise UserError(f"unknown data set {name!r}; known: {', '.join(DATASETS)}")
    return DATASETS[name]


def _how(name: str) -> str:
    from ..data.official import DOWNLOADS

    return f"sliceout-lab data get {name}" if name in DOWNLOADS else f"by hand: sliceout-lab data get {name} says how"


def _by_hand(dataset: Dataset, dest: Path) -> str:
    """Exactly which files go where."""
    from ..data.official import BY_HAND, DOWNLOADS, OTHER_ARCHIVES

    lines = [BY_HAND[dataset.name]] if dataset.name in BY_HAND else []
    downloads = DOWNLOADS.get(dataset.name, ())
    if downloads:
        lines.append("To place it by hand, fetch on another machine")
        for d in (*downloads, *OTHER_ARCHIVES.get(dataset.name, ())):
            alternative = "" if d in downloads else " (or this form)"
            lines.append(f"  {d.url}  {d.algorithm} {d.checksum}{alternative}")
        lines.append(f"and {'unpack it' if downloads[0].archive else 'copy them'} so that these files are there:")
    else:
        lines.append("These files must be there:")
    forms = []
    for layout in dataset.layouts:
        inside = dest / layout.folders[0]
        forms.append("\n".join(f"  {inside / file}" for file in layout.files))
    lines.append("\n or\n".join(forms))
    if dataset.name == "fashion-mnist":
        lines.append("Debian and Ubuntu have it as a package: apt-get install dataset-fashion-mnist")
    return "\n".join(lines)


def _size(folder: Path, files: tuple[str, ...] | None = None) -> str:
    from ..data.files import present

    if files is None:
        paths = list(folder.iterdir())
    elif any((folder / file).parent != folder for file in files):  # files in folders: all that lies there
        paths = list(folder.rglob("*"))
    else:
        paths = [p for file in files if (p := present(folder, file))]
    return f"{sum(p.stat().st_size for p in paths if p.is_file()) / 1e6:,.1f} MB"

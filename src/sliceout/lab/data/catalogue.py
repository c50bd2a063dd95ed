"""Every data set by name: which files it is made of, in which folders they are looked for, and who reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from . import cifar, fashion, places
from .files import DataError
from .sets import ImageFolder, Images, Tokens

Loaded = Images | Tokens | ImageFolder


@dataclass(frozen=True)
class Layout:
    """One form in which a data set may lie on disk: the folders to look into (``.``: the place itself), its files."""

    folders: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    """A data set that can be loaded by name."""

    name: str
    title: str
    layouts: tuple[Layout, ...]
    read: Callable[[Path], Loaded]
    elsewhere: tuple[Path, ...] = ()
    """Further places, after the usual ones."""

    def roots(self, folder: Path | None = None) -> list[Path]:
        return [*places.roots(folder), *(self.elsewhere if folder is None else ())]

    def locate(self, folder: Path | None = None) -> tuple[Path, Layout] | None:
        """The folder that holds the data set, and in which form."""
        for root in self.roots(folder):
            for layout in self.layouts:
                found = places.find([root], layout.folders, layout.files)
                if found is not None:
                    return found, layout
        return None

    def require(self, folder: Path | None = None) -> Path:
        """The folder that holds the data set.

        Raises:
            DataError: saying which files go where.
        """
        found = self.locate(folder)
        if found is None:
            raise DataError(self.missing(folder))
        return found[0]

    def missing(self, folder: Path | None = None) -> str:
        roots = self.roots(folder)
        forms = []
        for layout in self.layouts:
            files = "".join(f"\n  {places.home(folder) / layout.folders[0] / file}" for file in layout.files)
            forms.append(f"{files}\n")
        return (
            f"{self.title} is not in {' or '.join(map(str, roots))}. Run `sliceout data get {self.name}`, or place"
            f" these files{'or'.join(forms)}or name the folder that holds them with --data DIR."
        )


def _fashion_mnist(folder: Path) -> Images:
    return fashion.read_folder(folder, "FashionMNIST")


def _mnist(folder: Path) -> Images:
    return fashion.read_folder(folder, "MNIST")


_IDX = tuple(f"{name}" for name in fashion.FILES)
DATASETS = {
    d.name: d
    for d in (
        Dataset("mnist", "MNIST", (Layout(("mnist", "MNIST/raw", "."), _IDX),), _mnist),
        Dataset(
            "fashion-mnist",
            "FashionMNIST",
            (Layout(("fashion-mnist", "FashionMNIST/raw", "."), _IDX),),
            _fashion_mnist,
            elsewhere=(fashion.DEBIAN,),
        ),
        Dataset(
            "cifar-10",
            "CIFAR-10",
            (
                Layout(
                    ("cifar-10-batches-bin", "cifar-10", "."), tuple(f"{b}.bin" for b in (*cifar.BATCHES, "test_batch"))
                ),
                Layout(("cifar-10-batches-py", "cifar-10", "."), (*cifar.BATCHES, "test_batch")),
            ),
            cifar.cifar_10,
        ),
        Dataset(
            "cifar-100",
            "CIFAR-100",
            (
                Layout(("cifar-100-binary", "cifar-100", "."), ("train.bin", "test.bin")),
                Layout(("cifar-100-python", "cifar-100", "."), ("train", "test")),
            ),
            cifar.cifar_100,
        ),
    )
}
NAMES = ("fashion-mnist-8k", *DATASETS)


def load(name: str, folder: Path | str | None = None, *, subset: int | None = None) -> Loaded:
    """Load a data set by name.

    Args:
        name: one of ``NAMES``.
        folder: where to look; ``None`` looks in ``$SLICEOUT_DATA``, ``./data`` and ``~/.cache/sliceout``.
        subset: only so many training samples: of images, the first ones of every class alike; of text, the first
            tokens. The test data stays whole.

    Raises:
        DataError: if the data set is unknown, not there or damaged.

    Example:
        >>> len(load("fashion-mnist-8k", subset=1000).train)
        1000
    """
    if name == "fashion-mnist-8k":
        loaded: Loaded = fashion.fashion_mnist()
    elif name in DATASETS:
        loaded = DATASETS[name].read(DATASETS[name].require(None if folder is None else Path(folder)))
    else:
        raise DataError(f"unknown data set {name!r}; known: {', '.join(NAMES)}")
    loaded = replace(loaded, name=name)
    if subset is None:
        return loaded
    if not 1 <= subset <= len(loaded.train):
        raise DataError(f"subset={subset}: expected 1 to {len(loaded.train)}, the training samples of {name}")
    return loaded.first(subset)

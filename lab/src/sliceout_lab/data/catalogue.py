"""Every data set by name: which files it is made of, in which folders they are looked for, and who reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import cifar, fashion, folder, places, text, tiny
from .bpe import Corpus
from .files import DataError, present, read
from .official import CONTENTS
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
    read: Callable[..., Loaded] | None = None
    """Reads a folder; images that have one size only on request take it as a second argument."""
    corpus: Callable[[Path], Corpus] | None = None
    """For text, instead of ``read``: finds the files in a folder."""
    sized: bool = False
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
            f"{self.title} is not in {' or '.join(map(str, roots))}. Run `sliceout-lab data get {self.name}`, or place"
            f" these files{'or'.join(forms)}or name the folder that holds them with --data DIR."
        )


def _idx(name: str, title: str) -> Callable[[Path], Images]:
    """MNIST and FashionMNIST have files of the same names: whoever mixes them up is told so by their labels."""

    def load(folder: Path) -> Images:
        images = fashion.read_folder(folder, title)
        labels = fashion.FILES[1]
        path = present(folder, labels)
        assert path is not None
        found = hashlib.sha256(read(path)).hexdigest()
        other = next((n for n in ("mnist", "fashion-mnist") if n != name and CONTENTS[n][labels][1] == found), None)
        if other is not None:
            raise DataError(f"{path}: is a file of {other}, not of {name}")
        return images

    return load


_BINARY = tuple(f"{batch}.bin" for batch in (*cifar.BATCHES, "test_batch"))
_LM1B = (
    f"{text.LM1B_TRAIN}/{text.LM1B_SHARDS[0]}",
    *(f"{text.LM1B_HELD_OUT}/{shard}" for shard in (text.LM1B_TEST, text.LM1B_VALID)),
)
_LM1B_FOLDER = "1-billion-word-language-modeling-benchmark-r13output"
_TXT = ("train.txt", "valid.txt", "test.txt")


def _wiki(name: str) -> tuple[Layout, ...]:
    splits = ("train", "valid", "test")
    return (
        Layout((name, "."), tuple(f"wiki.{split}.tokens" for split in splits)),
        Layout((f"{name}-raw", name, "."), tuple(f"wiki.{split}.raw" for split in splits)),
    )


DATASETS = {
    d.name: d
    for d in (
        Dataset("mnist", "MNIST", (Layout(("mnist", "MNIST/raw", "."), fashion.FILES),), _idx("mnist", "MNIST")),
        Dataset(
            "fashion-mnist",
            "FashionMNIST",
            (Layout(("fashion-mnist", "FashionMNIST/raw", "."), fashion.FILES),),
            _idx("fashion-mnist", "FashionMNIST"),
            elsewhere=(fashion.DEBIAN,),
        ),
        Dataset(
            "cifar-10",
            "CIFAR-10",
            (
                Layout(("cifar-10-batches-bin", "cifar-10", "."), _BINARY),
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
        Dataset("imagenet", "ImageNet", (Layout(("imagenet", "."), ("train", "val")),), folder.image_folder),
        Dataset(
            "tiny-imagenet",
            "Tiny ImageNet",
            (Layout(("tiny-imagenet-200", "tiny-imagenet", "."), ("wnids.txt", "val/val_annotations.txt")),),
            tiny.tiny_imagenet,
            sized=True,
        ),
        Dataset(
            "tiny-imagenet-100",
            "Tiny ImageNet, 100 of its classes",
            (Layout(("tiny-imagenet-100", "."), ("index.json", "train-0.bin", "val.bin")),),
            tiny.tiny_imagenet_100,
            sized=True,
        ),
        Dataset("wikitext-2", "WikiText-2", _wiki("wikitext-2"), corpus=text.wikitext),
        Dataset("wikitext-103", "WikiText-103", _wiki("wikitext-103"), corpus=text.wikitext),
        Dataset("lm1b", "LM1B", (Layout((_LM1B_FOLDER, "lm1b", "."), _LM1B),), corpus=text.lm1b),
        Dataset(
            "lm1b-slice",
            "a slice of LM1B's held-out sentences",
            (Layout(("lm1b-slice", "."), ("dev.tokens", "test.tokens")),),
            corpus=text.lm1b_slice,
        ),
        Dataset("english-books", "English books", (Layout(("english-books", "."), _TXT),), corpus=text.splits),
    )
}
BUNDLED = "fashion-mnist-8k"
NAMES = (BUNDLED, *DATASETS)

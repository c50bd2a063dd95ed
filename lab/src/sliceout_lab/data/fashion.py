"""FashionMNIST: 8,000 of its images come with the package, the whole of it is looked for on this machine.

FashionMNIST is (c) 2017 Zalando SE, under the MIT licence (see NOTICE). ``tools/make_fashion_subset.py`` chose the
8,000: the first 600 training and the first 200 test images of each of the ten classes, in their original order.
"""

from __future__ import annotations

from pathlib import Path

from . import places
from .files import DataError, present
from .idx import read_idx
from .sets import Images

SUBSET = Path(__file__).parent / "fashion-mnist-8k"
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def fashion_mnist(*, full: bool = False, folder: Path | None = None) -> Images:
    """FashionMNIST, as the subset in the package or as a whole.

    Args:
        full: the whole data set: 60,000 training and 10,000 test images.
        folder: where the whole data set is (the files themselves, or a folder ``fashion-mnist`` with them); ``None``
            looks in ``$SLICEOUT_DATA``, ``./data``, ``~/.cache/sliceout`` and where Debian's package
            ``dataset-fashion-mnist`` puts it.

    Raises:
        DataError: if the files are not there or are damaged.

    Example:
        >>> fashion_mnist().train.shape
        torch.Size([6000, 28, 28])
    """
    if not full:
        return read_folder(SUBSET, "8,000 images of FashionMNIST")
    roots = [*places.roots(folder), *([DEBIAN] if folder is None else [])]
    found = places.find(roots, ("fashion-mnist", "."), FILES)
    if found is not None:
        return read_folder(found, "FashionMNIST")
    listing = "\n".join(f"  {name}.gz" for name in FILES)
    raise DataError(
        f"the whole FashionMNIST is not in {' or '.join(map(str, roots))}. Put these four files\n{listing}\n"
        f"into {places.home(folder) / 'fashion-mnist'}, or name the folder that holds them with --data DIR."
    )


def read_folder(folder: Path, name: str) -> Images:
    """Read the four files in ``folder`` and check that they fit each other."""
    paths = {}
    for file in FILES:
        path = present(folder, file)
        if path is None:
            raise DataError(f"{folder}: holds no {file}.gz")
        paths[file] = path
    train, train_labels, test, test_labels = (read_idx(p, 3 if "images" in f else 1) for f, p in paths.items())
    for file, images, labels in ((FILES[1], train, train_labels), (FILES[3], test, test_labels)):
        if len(images) != len(labels):
            raise DataError(f"{paths[file]}: holds {len(labels)} labels for {len(images)} images")
        if labels.max() > 9:
            raise DataError(f"{paths[file]}: holds the label {int(labels.max())}, expected 0 to 9")
    if train.shape[1:] != test.shape[1:]:
        raise DataError(f"{folder}: training images are {[*train.shape[1:]]}, test images {[*test.shape[1:]]}")
    return Images(name, train, train_labels, test, test_labels)

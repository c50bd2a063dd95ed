"""Make the subset of FashionMNIST that ships with the package.

    python tools/make_fashion_subset.py FOLDER_WITH_THE_FOUR_OFFICIAL_FILES

Takes the first 600 training and the first 200 test images of every class, in their original order, so that anybody
with the official files gets the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from sliceout_lab.data import fashion, fashion_mnist, write_idx


def first_of_each_class(labels: Tensor, count: int) -> Tensor:
    """Indices, in ascending order, of the first ``count`` entries of each of the ten classes."""
    chosen = [(labels == label).nonzero().flatten()[:count] for label in range(10)]
    assert all(len(c) == count for c in chosen), f"a class has fewer than {count} images"
    return torch.cat(chosen).sort().values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, default=fashion.SUBSET)
    args = parser.parse_args()
    data = fashion_mnist(full=True, folder=args.source)
    train, test = first_of_each_class(data.train_labels, 600), first_of_each_class(data.test_labels, 200)
    args.out.mkdir(parents=True, exist_ok=True)
    parts = (data.train[train], data.train_labels[train], data.test[test], data.test_labels[test])
    for name, part in zip(fashion.FILES, parts, strict=True):
        path = args.out / f"{name}.gz"
        write_idx(path, part)
        print(f"{path}  {tuple(part.shape)}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

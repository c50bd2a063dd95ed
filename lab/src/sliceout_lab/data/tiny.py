"""Tiny ImageNet: its official folders, or the packed form with 100 of its classes; both decoded into memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import DataError, read, read_text
from .jpeg import decode
from .sets import Images

SIDE = 64


def tiny_imagenet(folder: Path, size: int | None = None) -> Images:
    """The official layout: ``wnids.txt``, ``train/<wnid>/images/*.JPEG``, ``val/images``, ``val_annotations.txt``."""
    wnids = read_text(folder / "wnids.txt").split()
    if not wnids or len(set(wnids)) != len(wnids):
        raise DataError(f"{folder / 'wnids.txt'}: holds no list of different classes")
    number = {wnid: i for i, wnid in enumerate(sorted(wnids))}
    train, labels = [], []
    for wnid, label in number.items():
        images = sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
        if not images:
            raise DataError(f"{folder / 'train' / wnid / 'images'}: holds no .JPEG files")
        train += images
        labels += [label] * len(images)
    annotations = folder / "val" / "val_annotations.txt"
    test, test_labels = [], []
    for i, line in enumerate(read_text(annotations).splitlines(), 1):
        fields = line.split("\t")
        if len(fields) < 2 or fields[1] not in number:
            raise DataError(f"{annotations}: line {i} names no image and known class: {line[:60]!r}")
        test.append(folder / "val" / "images" / fields[0])
        test_labels.append(number[fields[1]])
    if not test:
        raise DataError(f"{annotations}: is empty")
    return Images(
        "Tiny ImageNet",
        *_decoded(train, str, size), torch.tensor(labels),
        *_decoded(test, str, size), torch.tensor(test_labels),
        len(number),
    )  # fmt: skip


def tiny_imagenet_100(folder: Path, size: int | None = None) -> Images:
    """Concatenated JPEGs (``train-0.bin`` ..., ``val.bin``) with their sizes and labels in ``index.json``."""
    path = folder / "index.json"
    try:
        index = json.loads(read_text(path))
        classes, parts = len(index["classes"]), index["splits"]
        names = sorted(name for name in parts if name.startswith("train"))
        entries = {n: (list(map(int, parts[n]["sizes"])), list(map(int, parts[n]["labels"]))) for n in (*names, "val")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: is not the index of a packed Tiny ImageNet ({type(error).__name__}: {error})"
        ) from error
    if not names:
        raise DataError(f"{path}: names no training images")

    def split(files: Sequence[str]) -> tuple[Tensor, Tensor]:
        images, labels = [], []
        for name in files:
            images.append(_unpacked(folder / f"{name}.bin", *entries[name], classes, size))
            labels += entries[name][1]
        return torch.cat(images), torch.tensor(labels)

    return Images("Tiny ImageNet-100", *split(names), *split(["val"]), classes)


def _unpacked(path: Path, sizes: list[int], labels: list[int], classes: int, size: int | None) -> Tensor:
    if len(sizes) != len(labels) or not sizes:
        raise DataError(f"{path}: the index has {len(sizes)} sizes and {len(labels)} labels for it")
    if min(labels) < 0 or max(labels) >= classes:
        raise DataError(f"{path}: the index has the labels {min(labels)} to {max(labels)}, expected 0 to {classes - 1}")
    raw = read(path)
    if sum(sizes) != len(raw) or min(sizes) <= 0:
        raise DataError(f"{path}: holds {len(raw)} bytes, but the index promises {sum(sizes)}")
    ends = torch.tensor(sizes).cumsum(0).tolist()
    images = [raw[end - n : end] for n, end in zip(sizes, ends, strict=True)]
    numbers = {id(image): i for i, image in enumerate(images)}
    return _decoded(images, lambda image: f"{path}, image {numbers[id(image)]}", size)[0]


def _decoded(images: Sequence[Any], name: Callable[[Any], str], size: int | None) -> tuple[Tensor]:
    """All of the images in one tensor; Pillow lets other threads work while it decodes."""
    side = size or SIDE
    out = torch.empty(len(images), 3, side, side, dtype=torch.uint8)

    def one(i: int) -> None:
        picture, _ = decode(images[i], size, name(images[i]))
        if picture.shape != out.shape[1:]:
            raise DataError(f"{name(images[i])}: is {picture.shape[2]}x{picture.shape[1]}, expected {side}x{side}")
        out[i] = picture

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(one, range(len(images)), chunksize=256):
            pass
    return (out,)

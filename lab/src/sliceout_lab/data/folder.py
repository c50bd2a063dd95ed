"""ImageNet as folders: ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, the classes numbered by their names."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from .files import DataError
from .sets import ImageFolder

ENDINGS = (".jpeg", ".jpg", ".png")


def image_folder(folder: Path) -> ImageFolder:
    """List the images; they are decoded when they are fed.

    Raises:
        DataError: if a class has no images, or the two splits have different classes.
    """
    classes = _classes(folder / "train")
    if other := set(classes) ^ set(_classes(folder / "val")):
        raise DataError(
            f"{folder / 'val'}: its classes are not those of train: {', '.join(sorted(other)[:3])}"
            f"{' ...' if len(other) > 3 else ''} in one of them only. The images of val belong into a folder per class."
        )
    return ImageFolder("ImageNet", *_images(folder / "train", classes), *_images(folder / "val", classes), len(classes))


def _classes(split: Path) -> list[str]:
    try:
        with os.scandir(split) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{split}: cannot be read ({error.strerror})") from error
    if not names:
        raise DataError(f"{split}: holds no folders, expected one per class")
    return names


def _images(split: Path, classes: list[str]) -> tuple[tuple[Path, ...], Tensor]:
    paths: list[Path] = []
    counts = []
    for name in classes:
        with os.scandir(split / name) as entries:
            files = sorted(entry.name for entry in entries if entry.name.lower().endswith(ENDINGS))
        if not files:
            raise DataError(f"{split / name}: holds no images ({', '.join(ENDINGS)})")
        paths += [split / name / file for file in files]
        counts.append(len(files))
    return tuple(paths), torch.arange(len(classes)).repeat_interleave(torch.tensor(counts))

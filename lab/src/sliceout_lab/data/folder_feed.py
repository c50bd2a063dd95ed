"""Batches of images that are too many for memory: processes decode them, the device crops, mirrors and scales them.

A worker squeezes each image to a square somewhat larger than what the network sees and sends it as bytes. Crops are
drawn in the image's own proportions, which travel along, and read out of the squares for the whole batch at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from . import augment as aug
from .feeds import Batch, Feed, Share, scaling, to_device
from .files import DataError
from .jpeg import decode
from .sets import ImageFolder

LARGER = 10 / 7  # what is decoded by what is seen: a crop of half of the image's area is not yet blown up


class FolderFeed(Feed):
    """Image files, decoded by processes of their own."""

    def __init__(
        self,
        data: ImageFolder,
        share: Share,
        device: torch.device,
        augment: str,
        normalise: str,
        channels_last: bool,
        size: int,
        workers: int | None,
    ) -> None:
        self.data, self.share, self.device, self.batch = data, share, device, share.batch
        self.augment, self.size = augment, size
        self.steps = share.steps(len(data.train))
        self.workers = min(os.cpu_count() or 1, 16) if workers is None else workers
        self._order = torch.channels_last if channels_last else torch.contiguous_format
        self._scale, self._shift = (t.to(device) for t in scaling(normalise, 3))

    def epoch(self, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        order = torch.randperm(len(self.data.train), generator=aug.generator(seed, epoch))
        mine = self.share.of(order, self.steps)[start:]
        for step, (pixels, aspects, rows) in enumerate(self._decoded(self.data.train, mine.tolist()), start):
            if self.augment == "imagenet":
                together = self.batch * self.share.world
                chance = torch.rand(together, 5, generator=aug.generator(seed, epoch, step), dtype=torch.float64)
                boxes = aug.random_boxes(aspects, chance.view(self.share.world, self.batch, 5)[self.share.rank])
            else:
                boxes = aug.centre_boxes(aspects)
            yield self._finished(pixels, boxes), to_device(self.data.train_labels[rows].long(), self.device)

    def test(self, split: Literal["test", "valid"] = "test") -> Iterator[Batch]:
        batches = [rows.tolist() for rows in torch.arange(len(self.data.test)).split(self.batch)]
        for pixels, aspects, rows in self._decoded(self.data.test, batches):
            labels = to_device(self.data.test_labels[rows].long(), self.device)
            yield self._finished(pixels, aug.centre_boxes(aspects)), labels

    def inputs_like(self) -> Batch:
        x = torch.zeros(self.batch, 3, self.size, self.size, device=self.device)
        labels = torch.zeros(self.batch, dtype=torch.long, device=self.device)
        return x.contiguous(memory_format=self._order), labels

    def _finished(self, pixels: Tensor, boxes: Tensor) -> Tensor:
        images = pixels.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        seen = aug.resample(images, to_device(boxes, self.device), self.size)
        return (seen * self._scale + self._shift).contiguous(memory_format=self._order)

    def _decoded(self, paths: Sequence[Path], batches: list[list[int]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Pixels ``[b, side, side, 3]``, width by height, and which images they are."""
        loader = DataLoader(
            _Files(paths, round(self.size * LARGER)),
            batch_sampler=batches,
            num_workers=self.workers,
            collate_fn=_together,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=4 if self.workers else None,
            generator=aug.generator("workers"),  # or it would draw from torch's global one
        )
        for message, *content in loader:
            if message:
                raise DataError(message)
            yield tuple(content)  # type: ignore[misc]


class _Files(Dataset[Any]):
    def __init__(self, paths: Sequence[Path], side: int) -> None:
        self.paths, self.side = paths, side

    def __getitem__(self, row: int) -> tuple[int, Tensor | str, float]:
        try:
            return row, *decode(self.paths[row], self.side, str(self.paths[row]))
        except DataError as error:  # raised by the process that feeds: a worker would wrap it into a traceback
            return row, str(error), 0.0


def _together(samples: list[tuple[int, Tensor | str, float]]) -> tuple[str, Tensor, Tensor, Tensor]:
    wrong = [picture for _, picture, _ in samples if isinstance(picture, str)]
    pictures = [picture.permute(1, 2, 0) for _, picture, _ in samples if isinstance(picture, Tensor)]
    return (
        "; ".join(wrong),
        torch.empty(0) if wrong else torch.stack(pictures),
        torch.tensor([aspect for *_, aspect in samples], dtype=torch.float64),
        torch.tensor([row for row, *_ in samples]),
    )

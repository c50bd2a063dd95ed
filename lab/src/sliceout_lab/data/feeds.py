"""Batches for training: on the device, of one shape, and a pure function of the seed, the epoch and the rank.

The data lives on the device. Several batches are made at once (shuffled, cropped, scaled) by a handful of kernels and
then handed out as views: a step that takes a fifth of a millisecond has no time for kernels of its own. Nothing waits
for the device, and what is random is drawn from generators of its own: torch's global state is never touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from sliceout.cli import UserError

from . import augment as aug
from .sets import Images, Tokens

Batch = tuple[Tensor, Tensor]
MADE_AT_ONCE = 32 * 2**20
"""Bytes of inputs that are made at once: dozens of small batches, one large one."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Share:
    """Which rows of a shuffled epoch belong to this process.

    Row ``(step * world + rank) * batch + i`` is sample ``i`` of a step: two processes with batches of 64 together see
    what one sees with batches of 128, and never the same sample.
    """

    def __init__(self, batch: int, rank: int, world: int) -> None:
        self.batch, self.rank, self.world = batch, rank, world

    def steps(self, samples: int) -> int:
        """Full batches of an epoch."""
        return samples // (self.batch * self.world)

    def of(self, rows: Tensor, steps: int) -> Tensor:
        """This process's part of per-sample ``rows``, one entry per step first: ``[steps, batch, ...]``."""
        kept = rows[: steps * self.world * self.batch]
        return kept.view(steps, self.world, self.batch, *rows.shape[1:])[:, self.rank]


class Feed(ABC):
    """Batches ``(inputs, targets)`` of one data set on one device."""

    steps: int
    """Batches of an epoch, all of them full."""
    batch: int
    """Samples of a batch."""

    @abstractmethod
    def epoch(self, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The training batches of an epoch, from batch ``start`` on: the same ones for the same arguments, always.

        They are views of larger tensors: read them, do not write into them.
        """

    @abstractmethod
    def test(self, split: Literal["test", "valid"] = "test") -> Iterator[Batch]:
        """The test data in order, each sample once; the last batch may be short (weigh by ``len(targets)``)."""

    @abstractmethod
    def inputs_like(self) -> Batch:
        """A batch of zeros with the shapes, types and memory order of every training batch."""


class ImageFeed(Feed):
    """Images that live on the device."""

    def __init__(
        self,
        data: Images,
        share: Share,
        device: torch.device,
        augment: str,
        flatten: bool,
        normalise: str,
        channels_last: bool,
    ) -> None:
        self.data, self.share, self.device, self.batch = data, share, device, share.batch
        self.augment, self.flatten = augment, flatten
        self.steps = share.steps(len(data.train))
        scale, shift = _scaling(data, normalise)
        self._scale, self._shift = scale.to(device), (shift.to(device) if shift.any() else None)
        self._order = torch.channels_last if channels_last else torch.contiguous_format
        self._train, self._test = (self._resident(images) for images in (data.train, data.test))
        self._labels, self._test_labels = (labels.to(device).long() for labels in (data.train_labels, data.test_labels))
        if augment == "crop-flip":
            self._train = aug.pad(self._train)
        self._at_once = max(1, MADE_AT_ONCE // max(1, 4 * self.batch * data.train[0].numel()))

    def epoch(self, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        count = len(self.data.train)
        mine = self._to_device(self.share.of(torch.randperm(count, generator=aug.generator(seed, epoch)), self.steps))
        drawn = self._draws(count, aug.generator(seed, epoch, self.augment))
        draws = None if drawn is None else self._to_device(self.share.of(drawn, self.steps))
        for first in range(start, self.steps, self._at_once):
            some = slice(first, min(first + self._at_once, self.steps))
            rows = mine[some].flatten()
            x = self._images(self._train, rows, None if draws is None else draws[some].flatten(0, 1))
            yield from zip(x.split(self.batch), self._labels[rows].split(self.batch), strict=True)

    def test(self, split: Literal["test", "valid"] = "test") -> Iterator[Batch]:
        size = max(self.batch, min(1000, self._at_once * self.batch))
        for images, labels in zip(self._test.split(size), self._test_labels.split(size), strict=True):
            yield self._scaled(images), labels

    def inputs_like(self) -> Batch:
        rows = torch.zeros(self.batch, dtype=torch.long, device=self.device)
        draws = self._draws(self.batch, aug.generator("like"))
        x = self._images(self._train, rows, None if draws is None else self._to_device(draws))
        return torch.zeros_like(x), torch.zeros_like(rows)

    def _draws(self, count: int, rng: torch.Generator) -> Tensor | None:
        if self.augment == "crop-flip":
            return aug.draw_crops(count, rng)
        if self.augment == "imagenet":
            aspect = self.data.train.shape[-1] / self.data.train.shape[-2]
            chance = torch.rand(count, 5, generator=rng, dtype=torch.float64)
            return aug.random_boxes(torch.full((count,), aspect, dtype=torch.float64), chance)
        return None

    def _images(self, images: Tensor, rows: Tensor, draws: Tensor | None) -> Tensor:
        if draws is None:
            return self._scaled(_select(images, rows))
        if self.augment == "crop-flip":
            return self._scaled(aug.crop(images, rows, draws))
        seen = aug.resample(_select(images, rows), draws, images.shape[-1])
        return self._scaled(seen.contiguous(memory_format=self._order))  # of a batch of one, grid_sample loses it

    def _scaled(self, images: Tensor) -> Tensor:
        x = images * self._scale  # uint8 by float32: converted and scaled by one kernel
        if self._shift is not None:
            x += self._shift
        return x.flatten(1) if self.flatten else x

    def _resident(self, images: Tensor) -> Tensor:
        images = images.to(self.device)
        images = images[:, None] if images.dim() == 3 else images
        return images.contiguous(memory_format=self._order)

    def _to_device(self, drawn: Tensor) -> Tensor:
        return to_device(drawn, self.device)


class TokenFeed(Feed):
    """Windows of a stream of tokens; the targets are the next tokens.

    Every epoch cuts the stream at another random offset into windows, and shuffles them.
    """

    def __init__(self, data: Tokens, share: Share, device: torch.device, sequence: int) -> None:
        self.data, self.share, self.device, self.batch, self.sequence = data, share, device, share.batch, sequence
        windows = (len(data.train) - sequence) // sequence  # what is left at the largest offset, less a last target
        self.windows, self.steps = windows, share.steps(max(0, windows))
        self._train = data.train.to(device)
        self._at_once = max(1, MADE_AT_ONCE // (16 * self.batch * sequence))

    def epoch(self, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        if not self.steps:
            raise UserError(f"{self.data.name}: has no text to train on, it is for evaluation only")
        rng = aug.generator(seed, epoch)
        order = torch.randperm(self.windows, generator=rng)
        offset = int(torch.randint(self.sequence, (), generator=rng))
        mine = to_device(self.share.of(order, self.steps) * self.sequence + offset, self.device)
        for first in range(start, self.steps, self._at_once):
            starts = mine[first : min(first + self._at_once, self.steps)].flatten()
            at = starts[:, None] + torch.arange(self.sequence, device=self.device)
            x, y = self._train[at].long(), self._train[at + 1].long()
            yield from zip(x.split(self.batch), y.split(self.batch), strict=True)

    def test(self, split: Literal["test", "valid"] = "test") -> Iterator[Batch]:
        """Every token but the first is a target once; a batch may be short, and the last one is a row ``[1, rest]``."""
        stream = getattr(self.data, split).to(self.device)
        windows = max(0, len(stream) - 1) // self.sequence
        end = windows * self.sequence
        if windows:
            x, y = (stream[i : end + i].view(windows, self.sequence).long() for i in (0, 1))
            yield from zip(x.split(self.batch), y.split(self.batch), strict=True)
        if len(stream) - 1 > end:
            yield stream[None, end:-1].long(), stream[None, end + 1 :].long()

    def inputs_like(self) -> Batch:
        x = torch.zeros(self.batch, self.sequence, dtype=torch.long, device=self.device)
        return x, x.clone()


def to_device(drawn: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting for what the device is still doing."""
    drawn = drawn.contiguous()
    return drawn.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else drawn.to(device)


def scaling(normalise: str, channels: int) -> tuple[Tensor, Tensor]:
    """Factor and summand of each channel ``[channels, 1, 1]`` for pixels of 0 to 255; not for ``"standard"``."""
    mean, deviation = {
        "unit": ((0.0,), (1.0,)),
        "imagenet": (IMAGENET_MEAN, IMAGENET_STD),
        "lite": ((127 / 255,), (128 / 255,)),
        "none": ((0.0,), (1 / 255,)),
    }[normalise]
    if len(mean) not in (1, channels):
        raise UserError(f"normalise={normalise!r}: is for {len(mean)} channels, the images have {channels}")
    m, d = (torch.tensor(v, dtype=torch.float64).expand(channels)[:, None, None] for v in (mean, deviation))
    return (1 / (255 * d)).float(), (-m / d).float()


def _scaling(data: Images, normalise: str) -> tuple[Tensor, Tensor]:
    images = data.train[:, None] if data.train.dim() == 3 else data.train
    if normalise != "standard":
        return scaling(normalise, images.shape[1])
    counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in images.unbind(1)]).double()
    values = torch.arange(256, dtype=torch.float64)
    total = counts.sum(1)
    mean = (counts * values).sum(1) / total
    deviation = ((counts * values**2).sum(1) / total - mean**2).clamp(min=0).sqrt().clamp(min=1e-3)
    return (1 / deviation).float()[:, None, None], (-mean / deviation).float()[:, None, None]


def _select(images: Tensor, rows: Tensor) -> Tensor:
    """``images[rows]`` in the memory order of ``images``."""
    if images.is_contiguous():
        return images.index_select(0, rows)
    return images.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)

"""The feed for a data set, with its settings checked."""

from __future__ import annotations

from typing import Any

import torch

from sliceout.cli import UserError

from .feeds import Feed, ImageFeed, Share, TokenFeed
from .folder_feed import FolderFeed
from .sets import ImageFolder, Images, Tokens

AUGMENT = ("none", "crop-flip", "imagenet")
NORMALISE = ("unit", "standard", "imagenet", "lite", "none")


def feed(
    loaded: Images | Tokens | ImageFolder,
    batch: int,
    device: torch.device | str,
    *,
    augment: str = "none",
    flatten: bool = False,
    sequence: int = 64,
    normalise: str = "unit",
    channels_last: bool = False,
    rank: int = 0,
    world: int = 1,
    size: int = 224,
    workers: int | None = None,
) -> Feed:
    """Batches of a data set, made on the device.

    Args:
        loaded: from ``load``.
        batch: samples of a batch of one process; ``world`` processes together take ``world * batch`` a step.
        device: where the batches are to be.
        augment: ``"none"``, ``"crop-flip"`` (a margin of 4 black pixels, a random crop, mirrored half the time) or
            ``"imagenet"`` (random resized crop, mirrored half the time).
        flatten: images as rows ``[batch, pixels]``.
        sequence: tokens of a training window.
        normalise: ``"unit"`` (0 to 1), ``"standard"`` (each channel of the training set to mean 0 and variance 1),
            ``"imagenet"`` (ImageNet's usual mean and deviation), ``"lite"`` (``(x - 127) / 128``) or ``"none"``
            (0 to 255).
        channels_last: images in that memory order.
        rank: which of the ``world`` processes this is: their batches of a step are different parts of one large batch.
        world: how many processes train together.
        size: side of the images that come out of an ``ImageFolder``.
        workers: processes that decode an ``ImageFolder``; ``None`` is one per core.

    Raises:
        UserError: for a value that cannot be, and if there are fewer samples than one step needs.

    Example:
        >>> noise, labels = torch.randint(256, (9, 3, 32, 32)).byte(), torch.arange(9)
        >>> images = Images("noise", noise, labels, test=noise[:2], test_labels=labels[:2])
        >>> batches = feed(images, 4, "cpu", augment="crop-flip")
        >>> [tuple(x.shape) for x, y in batches.epoch(seed=0, epoch=0)]
        [(4, 3, 32, 32), (4, 3, 32, 32)]
    """
    _check(loaded, batch, augment, normalise, sequence, rank, world)
    share = Share(batch, rank, world)
    if isinstance(loaded, Tokens):
        return TokenFeed(loaded, share, torch.device(device), sequence)
    if isinstance(loaded, ImageFolder):
        return FolderFeed(loaded, share, torch.device(device), augment, normalise, channels_last, size, workers)
    return ImageFeed(loaded, share, torch.device(device), augment, flatten, normalise, channels_last)


def _check(loaded: Any, batch: int, augment: str, normalise: str, sequence: int, rank: int, world: int) -> None:
    if augment not in AUGMENT:
        raise UserError(f"augment={augment!r}: expected one of {', '.join(AUGMENT)}")
    if normalise not in NORMALISE:
        raise UserError(f"normalise={normalise!r}: expected one of {', '.join(NORMALISE)}")
    for name, value in (("batch", batch), ("sequence", sequence), ("world", world)):
        if value < 1:
            raise UserError(f"{name}={value}: expected at least 1")
    if not 0 <= rank < world:
        raise UserError(f"rank={rank}: expected 0 <= rank < world = {world}")
    count = len(loaded.train)
    if isinstance(loaded, Tokens):
        if not count:
            return  # text for evaluation only
        if augment != "none":
            raise UserError(f"augment={augment!r}: is for images, {loaded.name} is text")
        need, what = sequence * (batch * world + 1), "tokens"
    else:
        need, what = batch * world, "training images"
    if count < need:
        raise UserError(
            f"batch={batch}: {loaded.name} has {count} {what}, one step of {world} process(es) needs {need}"
        )

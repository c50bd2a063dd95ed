"""Random crops, flips and resized crops of a whole batch at once, on the device that holds it.

What is drawn is drawn on the CPU (a few numbers per image): the same seed then gives the same images on every device.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor

PAD = 4
SCALES, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)  # of random resized crops: parts of the area, width by height
CENTRE = 7 / 8  # of the shorter side is what a test image shows: 224 of 256


def generator(*key: int | str) -> torch.Generator:
    """A random generator of its own for every key; torch's global one is never touched."""
    seed = hashlib.sha256(repr(key).encode()).digest()[:8]
    return torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1)


def pad(images: Tensor, margin: int = PAD) -> Tensor:
    """``[n, c, h, w]`` with black margins, in the memory order of ``images``: done once, then crops are plain reads."""
    if images.is_contiguous():
        return F.pad(images, (margin,) * 4)
    return F.pad(images.permute(0, 2, 3, 1), (0, 0, margin, margin, margin, margin)).permute(0, 3, 1, 2)


def draw_crops(n: int, rng: torch.Generator, margin: int = PAD) -> Tensor:
    """How ``n`` images are cropped: ``[n, 3]`` of row, column and 0 or 1 for mirrored."""
    corners = torch.randint(2 * margin + 1, (n, 2), generator=rng)
    return torch.cat((corners, torch.randint(2, (n, 1), generator=rng)), 1)


def crop(padded: Tensor, rows: Tensor, draws: Tensor, margin: int = PAD) -> Tensor:
    """Crop and mirror: ``out[i] = mirror(padded[rows[i]][:, y:y+h, x:x+w])`` for ``y, x, mirrored = draws[i]``.

    One read of the whole batch, without a copy of the padded images and without a loop over them.

    Args:
        padded: uint8 ``[n, c, h + 2 * margin, w + 2 * margin]``; the result has the same memory order.
        rows: which images, ``[b]``.
        draws: from ``draw_crops``, ``[b, 3]``, on the device of ``padded``.
    """
    _, c, h, w = padded.shape
    h, w = h - 2 * margin, w - 2 * margin
    y, x, mirrored = draws.unbind(1)
    across = torch.arange(w, device=padded.device)
    lines = y[:, None] + torch.arange(h, device=padded.device)
    columns = x[:, None] + torch.where(mirrored[:, None] > 0, across.flip(0), across)
    if padded.is_contiguous():
        channels = torch.arange(c, device=padded.device)[None, :, None, None]
        return padded[rows[:, None, None, None], channels, lines[:, None, :, None], columns[:, None, None, :]]
    last = padded.permute(0, 2, 3, 1)
    return last[rows[:, None, None], lines[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def random_boxes(aspects: Tensor, chance: Tensor) -> Tensor:
    """Random resized crops: ``[n, 5]`` of x and y of the centre, width, height, and 1 or -1 (mirrored).

    All are parts of the image's own width and height. As usual for ImageNet: a part of the area between 0.08 and 1, a
    ratio of width by height between 3/4 and 4/3. A box that would not fit is cut down to the image's size.

    Args:
        aspects: width by height of each image, ``[n]``.
        chance: evenly distributed between 0 and 1, ``[n, 5]``.
    """
    area = SCALES[0] + (SCALES[1] - SCALES[0]) * chance[:, 0]
    low, high = map(math.log, RATIOS)
    ratio = torch.exp(low + (high - low) * chance[:, 1])
    width = (area * ratio / aspects).sqrt().clamp(max=1)
    height = (area / ratio * aspects).sqrt().clamp(max=1)
    x, y = width / 2 + (1 - width) * chance[:, 2], height / 2 + (1 - height) * chance[:, 3]
    return torch.stack((x, y, width, height, torch.where(chance[:, 4] < 0.5, 1.0, -1.0)), 1).float()


def centre_boxes(aspects: Tensor) -> Tensor:
    """The square in the middle of each image, 7/8 of its shorter side, in the form of ``random_boxes``."""
    width, height = CENTRE * (1 / aspects).clamp(max=1), CENTRE * aspects.clamp(max=1)
    half, one = torch.full_like(width, 0.5), torch.ones_like(width)
    return torch.stack((half, half, width, height, one), 1).float()


def resample(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Read the boxes out of ``[b, c, h, w]`` images and scale them to ``size`` by ``size``: float, 0 to 255."""
    x, y, width, height, mirror = boxes.unbind(1)
    zero = torch.zeros_like(x)
    across = torch.stack((width * mirror, zero, 2 * x - 1), 1)
    down = torch.stack((zero, height, 2 * y - 1), 1)
    grid = F.affine_grid(
        torch.stack((across, down), 1), [len(images), images.shape[1], size, size], align_corners=False
    )
    return F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)

"""DropBlock (Ghiasi et al., 2018): whole squares of a feature map are dropped, in every channel for itself."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 7
"""Side of a block, as in the original paper; clipped to the map."""


def drop_block(x: Tensor, rate: float, block: int = BLOCK) -> Tensor:
    """Drop blocks of ``x`` (``[batch, channels, *map]``) so that a share ``rate`` of its entries is expected to go.

    The original seeds blocks with a rate that is right only if blocks never overlap: at ``rate=0.5`` it drops a good
    third. Here the rate of the seeds is solved for exactly. What is kept is divided by the share that was kept in this
    call, as in the original.

    Example:
        >>> kept = drop_block(torch.ones(64, 8, 20, 20), 0.3) > 0
        >>> abs(kept.double().mean().item() - 0.7) < 0.05
        True
    """
    if not 0 <= rate < 1:
        raise ValueError(f"rate={rate}: expected 0 <= rate < 1")
    if rate == 0:
        return x
    sides = list(x.shape[2:])
    blocks = [min(block, n) for n in sides]
    room = [n - b + 1 for n, b in zip(sides, blocks, strict=True)]
    seeds = torch.rand(*x.shape[:2], *room, device=x.device) < seed_rate(rate, sides, blocks)
    around = [b - 1 for b in reversed(blocks) for _ in range(2)]
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(sides) - 1]
    kept = 1 - pool(F.pad(seeds.float(), around), blocks, stride=1)  # each seed grows to the block it is the corner of
    return x * (kept * (kept.numel() / kept.sum().clamp_min(1))).to(x.dtype)


def seed_rate(rate: float, sides: list[int], blocks: list[int]) -> float:
    """The rate of seeds at which a share ``rate`` of the map is dropped on average, edges and overlaps included."""
    covered = [
        Counter(min(i, n - b) - max(0, i - b + 1) + 1 for i in range(n)) for n, b in zip(sides, blocks, strict=True)
    ]
    cells = [
        (math.prod(seeds for seeds, _ in cell), math.prod(count for _, count in cell))
        for cell in product(*(c.items() for c in covered))
    ]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        kept = sum(count * (1 - middle) ** seeds for seeds, count in cells) / math.prod(sides)
        low, high = (middle, high) if kept > 1 - rate else (low, middle)
    return (low + high) / 2


seed_rate._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""What ``torch.compiler.assume_constant_result`` says, without importing the compiler for it."""

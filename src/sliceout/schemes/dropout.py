"""What the paper compares SliceOut with, at the same places and through the same verb.

==============  ======================================================================================================
``none``        nothing is dropped; the model's own dropouts inside the groups rest
``standard``    single activations, where the layers that read a group read it (torch's ``dropout``)
``spatial``     whole channels, for each sample (SpatialDropout: torch's ``dropout1d`` to ``dropout3d``)
``dropblock``   squares of the feature map, in every channel for itself (DropBlock, Ghiasi et al., 2018)
``controlled``  a random subset of units, gathered into small tensors: slices of another kind (``subset``)
``patch``       a window of the feature map through the residual branch (``patch``)
==============  ======================================================================================================

The first four are made here. The layers that read a group are given a subclass that drops from its input and then does
what it always did. Several readers of one activation draw a mask each; one that reads a pooled copy to gate the others
(squeeze-and-excite) is left alone. Masks come from torch's global random state, as everywhere in torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..nn.base import Sliced
from ..slices import Slice

DROPS = ("none", "standard", "spatial", "dropblock")


class Drop(Slice):
    """The dropout of one group: a slice that cuts nothing, but says what is dropped, how much, and whether at all."""

    def __init__(self, size: int, rate: float, scheme: str) -> None:
        super().__init__(size, 0.0, norm="none" if scheme == "none" else "flow")
        self.rate = 0.0 if scheme == "none" else rate
        self.sampling = scheme

    @property
    def sliced(self) -> bool:
        return self.on

    @property
    def share(self) -> str:
        return f"all {self.size}" if self.sampling == "none" else f"{1 - self.rate:.3g} of {self.size}"

    def kept_at(self, rate: float) -> float:
        if not 0 <= rate < 1:
            raise ValueError(f"rate={rate}: expected 0 <= rate < 1")
        return 1.0 if self.sampling == "none" else 1 - float(rate)

    def rerate_(self, rate: float) -> None:
        self.kept_at(rate)  # raises
        self.rate = 0.0 if self.sampling == "none" else float(rate)


class Dropping(Sliced):
    """A layer that drops from its input before it reads it."""

    roles = ("in",)
    _name_prefix = "Dropping"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        s = self.axes["in"].slice
        if self.training and s.on and s.rate:
            drop: Any = _DROP[s.sampling]
            batched = s.sampling == "standard" or x.dim() == len(self.kernel_size) + 2  # type: ignore[attr-defined]
            x = drop(x, s.rate) if batched else drop(x.unsqueeze(0), s.rate).squeeze(0)
        return super().forward(x, *args, **kwargs)  # type: ignore[misc]


_DROP: dict[str, Callable[[Tensor, float], Tensor]] = {
    "standard": F.dropout,
    "spatial": lambda x, rate: (F.dropout1d, F.dropout2d, F.dropout3d)[x.dim() - 3](x, rate),
    "dropblock": lambda x, rate: drop_block(x, rate),
}


# -- DropBlock ---------------------------------------------------------------------------------------------------------


def drop_block(x: Tensor, rate: float, block: int = 7) -> Tensor:
    """Drop blocks of ``x`` (``[batch, channels, *map]``) so that a share ``rate`` of its entries is expected to go.

    The original seeds blocks with a rate that is right only if blocks never overlap: at ``rate=0.5`` it drops a good
    third. Here the rate of the seeds is solved for exactly. What is kept is divided by the share that was kept in this
    call, and ``block``, the side of a block, is 7, both as in the original; it is clipped to the map.

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

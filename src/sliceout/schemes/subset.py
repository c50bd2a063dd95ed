"""Controlled dropout: a random subset of units is kept instead of a range, by gathering rows and columns.

A :class:`Subset` is a :class:`~sliceout.Slice` whose units do not lie side by side. Every sliced layer takes it as it
is; the products are as small as SliceOut's, and only ``take`` has to gather single rows and columns. It is the paper's
baseline (Ko et al., 2017), and what tells the effect of contiguity from the effect of dropping.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..drawing import MASK_32, mix
from ..slices import Slice


class Subset(Slice):
    """A random subset of ``width`` out of ``size`` units, redrawn at every optimizer step; all are equally likely.

    What is drawn is the number of one of 2**30 subsets; the units follow from hashing each with that number and keeping
    those with the smallest hashes. ``start`` is the table that the ops read, ``[2, size]``: the units, kept ones first,
    and the place of every unit in that order.

    Args:
        size, rate, align, norm, fold, seed: see :class:`~sliceout.Slice`. The two normalisations coincide.

    Example:
        >>> hidden = Subset(10, rate=0.4)
        >>> hidden.width, hidden.keep_probability[0].item(), len(hidden.kept)
        (6, 0.6, 6)
    """

    contiguous = False

    def __init__(
        self,
        size: int,
        rate: float = 0.5,
        *,
        align: int | None = None,
        norm: str = "probabilistic",
        fold: str = "consumer",
        seed: int = 0,
    ) -> None:
        super().__init__(size, rate, align=align, norm=norm, fold=fold, seed=seed)
        self.sampling = "subset"

    @property
    def rule(self) -> tuple[int, int, int]:
        return 1 << 30, 1, (1 << 30) - 1

    @property
    def starts(self) -> tuple[int, ...]:
        raise ValueError(
            f"a subset has no starts to enumerate: any {self.width} of {self.size} units are kept together, "
            f"which is {math.comb(self.size, self.width):.3g} choices"
        )

    @property
    def keep_probability(self) -> Tensor:
        return torch.full((self.size,), self.width / self.size, dtype=torch.float64, device="cpu")

    @property
    def kept(self) -> Tensor:
        return self.start_as_tensor()[0, : self.width]

    def start_as_tensor(self) -> Tensor:
        return tables([self.start_on_host], self.size, self.width)[0]

    @staticmethod
    def after_draw(members: list[Subset]) -> None:
        """Make the tables of subsets that got new numbers."""
        alike: dict[tuple[int, int], list[Subset]] = {}
        for s in members:
            alike.setdefault((s.size, s.width), []).append(s)
        for (size, width), same in alike.items():
            made = tables([s.start_on_host for s in same], size, width)
            for s, row in zip(same, made, strict=True):
                if s.start.shape == row.shape:
                    s.start.copy_(row, non_blocking=True)
                else:  # it is being made
                    s.start = row.clone()


def tables(numbers: list[int], size: int, width: int) -> Tensor:
    """What ``Subset.start`` is for each of these subsets: int64 ``[len(numbers), 2, size]``."""
    number = torch.tensor(numbers, dtype=torch.int64, device="cpu")[:, None]
    units = torch.arange(size, device="cpu")
    keys = mix((mix(number) + units * 0x9E3779B9) & MASK_32)
    order = keys.argsort(dim=1, stable=True)
    kept, dropped = order[:, :width].sort(dim=1).values, order[:, width:]
    order = torch.cat([kept, dropped], 1)
    return torch.stack([order, order.argsort(dim=1)], 1)

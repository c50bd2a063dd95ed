"""Which part of a parameter a layer uses: slices along its dimensions, and in how many parts of the batch.

A :class:`Take` says which axes a parameter is sliced along, a :class:`ConcatAxis` puts several along one dimension.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .slices import Axis, Slice


@dataclass(frozen=True)
class ConcatAxis:
    """Axes one after the other along a dimension: the sections of a fused projection, each with its own slice."""

    sections: tuple[Axis, ...]

    @property
    def slice(self) -> Slice:
        """The first one: all sections are sliced or none."""
        return self.sections[0].slice

    @property
    def slices(self) -> list[Slice]:
        return [a.slice for a in self.sections]

    @property
    def size(self) -> int:
        return sum(a.size for a in self.sections)

    @property
    def width(self) -> int:
        return sum(a.width for a in self.sections)

    @property
    def kept(self) -> Tensor:
        """Indices along the dimension that are kept now."""
        offsets = itertools.accumulate((a.size for a in self.sections), initial=0)
        return torch.cat([a.kept + offset for a, offset in zip(self.sections, offsets, strict=False)])

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.sections))


class Take(NamedTuple):
    """Which part of a parameter a layer uses: the slices along dimensions 0 and 1, and which normalisations go in.

    The one description of a take: layers make it, ``ops.take`` carries it out, and compact gradients are placed by it.
    """

    rows: Axis | ConcatAxis | None
    cols: Axis | ConcatAxis | None = None
    scale_rows: bool = False
    scale_cols: bool = False

    @property
    def axes(self) -> list[Axis | ConcatAxis]:
        """Those that are sliced."""
        return [a for a in (self.rows, self.cols) if a is not None]

    @property
    def simple(self) -> bool:
        """Whether it is at most one run of units along each dimension, up to wrapping: no fused sections, no subset."""
        return all(isinstance(a, Axis) and a.slice.contiguous for a in self.axes)

    @property
    def simple_axes(self) -> tuple[Axis | None, Axis | None]:
        """Rows and columns of a take that is :attr:`simple`."""
        return self.rows, self.cols  # type: ignore[return-value]

    @property
    def compact(self) -> bool:
        """Whether gradients come back slice-sized: what all its slices must want."""
        return bool(self.axes) and self.simple and all(a.slice.grads == "compact" for a in self.axes)

    @property
    def factors(self) -> tuple[float, Tensor | None, Tensor | None]:
        """``gain, row_scale, col_scale``: the normalisations as one number, and as vectors where units differ."""
        if not self.scale_rows and not self.scale_cols:
            return 1.0, None, None
        gain, scales = 1.0, list[Tensor | None]((None, None))
        for dim, (axis, wanted) in enumerate(((self.rows, self.scale_rows), (self.cols, self.scale_cols))):
            if axis is not None and wanted:
                if axis.slice.gain is None:
                    scales[dim] = axis.slice.scale
                else:
                    gain *= axis.slice.gain
        return gain, scales[0], scales[1]


def parts_of(samples: int, *axes: Axis | ConcatAxis | None) -> int:
    """How many parts a batch has whose units are sliced so: the largest number up to theirs that divides it.

    Example:
        >>> [parts_of(samples, Slice(64, parts=8).axis()) for samples in (32, 12, 7, 1)]
        [8, 6, 7, 1]
    """
    parts = 1
    for axis in axes:
        if axis is not None:
            for s in axis.slices:
                parts = s.parts if s.parts > parts else parts
    while parts > 1 and samples % parts:
        parts -= 1
    return parts

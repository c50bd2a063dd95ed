"""Where a take lies, as numbers, and how full and small tensors lie in memory.

A ``Take`` names slices, which move on. A :class:`Placement` is what it was at one draw: autograd nodes and gradients
keep it until the backward pass or the optimizer step, whatever has been drawn since.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..slices import Axis
from ..takes import Take
from . import reference

# -- tensors in memory -------------------------------------------------------------------------------------------------


class TensorSpec(NamedTuple):
    """What a tensor of the kind of another one is made from."""

    shape: tuple[int, ...]
    channels_last: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, t: Tensor) -> TensorSpec:
        return cls(tuple(t.shape), is_channels_last(t), t.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """Uninitialised memory without gaps, whatever the strides of the original."""
        layout = format_of(len(self.shape), self.channels_last)
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=layout)


def is_channels_last(t: Tensor) -> bool:
    """Whether ``t`` has these strides; ``is_contiguous`` cannot tell for 1x1 and depthwise kernels."""
    return t.dim() in (4, 5) and t.stride(1) == 1 and t.stride(-1) == t.shape[1]


def format_of(ndim: int, channels_last: bool) -> torch.memory_format:
    """The memory format of that name for so many dimensions."""
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last if ndim == 4 else torch.channels_last_3d


def memory_format(t: Tensor) -> torch.memory_format:
    """The format of what is made from ``t``."""
    return format_of(t.dim(), is_channels_last(t))


@functools.lru_cache(1024)
def strides_of(shape: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    """Of a tensor of this shape without gaps."""
    return TensorSpec(shape, channels_last, torch.float32).empty(torch.device("meta")).stride()


def dense(t: Tensor, channels_last: bool) -> Tensor:
    """``t`` without gaps and with the strides of the format, also where ``contiguous`` sees no difference."""
    t = t.contiguous(memory_format=format_of(t.dim(), channels_last))
    return t.as_strided(t.shape, strides_of(tuple(t.shape), channels_last))


def small_shape(shape: Sequence[Any], rows: list[int], cols: list[int], parts: int = 0) -> list[Any]:
    """The shape of what ``take`` makes of a tensor of this ``shape``: one of them, or ``parts`` behind each other."""
    out = list(shape)
    for dim, geometry in enumerate((rows, cols)):
        if geometry:
            _, width, blocks, inner = geometry
            out[dim] = width * blocks * inner
    return [parts, *out] if parts else out


def empty_small(
    full: Tensor, rows: list[int], cols: list[int], dtype: torch.dtype | None = None, parts: int = 0
) -> Tensor:
    """Memory for what ``take`` makes of ``full``, in the memory format of ``full``; without one for ``parts``."""
    shape, layout = small_shape(full.shape, rows, cols, parts), memory_format(full)
    layout = torch.contiguous_format if parts else layout
    return torch.empty(shape, dtype=dtype or full.dtype, device=full.device, memory_format=layout)


def address_key(tensors: Sequence[Tensor]) -> list[Any]:
    """What a kernel's table says of these tensors: the same as long as they lie there, in that way."""
    return [*map(Tensor.data_ptr, tensors), *layout_key(tensors)]


def layout_key(tensors: Sequence[Tensor]) -> list[Any]:
    """:func:`address_key` of tensors that are new every time."""
    return [*map(Tensor.stride, tensors), *map(_dtype_and_shape, tensors)]


_dtype_and_shape = operator.attrgetter("dtype", "shape")


# -- a take at one draw ------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a slice lay along a dimension when it was taken."""

    start: int
    geometry: list[int]
    """``[size, width, blocks, inner]`` (see ``Axis``)."""
    axis: Axis | None = None
    """``None`` if the model is gone."""

    def start_on(self, device: torch.device) -> Tensor:
        """The start in device memory: the slice's own as long as it has not moved on, so that graphs can read it."""
        if self.axis is not None:
            live = self.axis.slice
            if live.parts == 1 and live.start_on_host == self.start and live.start.device == device:
                return live.start
        return torch.tensor([self.start], device=device)


class Placement(NamedTuple):
    """What a :class:`~sliceout.takes.Take` was at one draw: places along dimensions 0 and 1, and normalisations."""

    rows: Place | None = None
    cols: Place | None = None
    gain: float = 1.0
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None

    @classmethod
    def now(cls, t: Take, part: int = 0) -> Placement:
        """Of a simple take; ``part`` of the batch, where slices have several."""
        rows, cols = (None if a is None else Place(a.slice.start_of(part), a.geometry, a) for a in t.simple_axes)
        return cls(rows, cols, *t.factors)

    @property
    def geometries(self) -> tuple[list[int], list[int]]:
        """As the ops take them: empty where the dimension is whole."""
        rows, cols = ([] if p is None else p.geometry for p in (self.rows, self.cols))
        return rows, cols

    @property
    def uniform(self) -> bool:
        """Whether one number says all of the normalisation."""
        return self.row_scale is None and self.col_scale is None

    def scaled(self, small: Tensor) -> Tensor:
        """``small`` with the normalisations multiplied in, in float32 at least: the caller rounds once, at the end."""
        small = small.to(torch.promote_types(small.dtype, torch.float32))
        for dim, place, scale in ((0, self.rows, self.row_scale), (1, self.cols, self.col_scale)):
            if place is not None and scale is not None:
                unit = reference.sources(place.start_on(small.device), place.geometry)[1]
                small = reference.scaled(small, scale[unit], dim)
        return small if self.gain == 1 else small * self.gain

    def lies_at(self, other: Placement) -> bool:
        """Whether both hold the same entries."""
        return [p and p[:2] for p in self[:2]] == [p and p[:2] for p in other[:2]]


# -- gradients of the slice's size -------------------------------------------------------------------------------------

CompactGradient = Callable[[Tensor, TensorSpec, Placement], Tensor]
_make_compact: CompactGradient | None = None


def register_compact_gradient(make: CompactGradient) -> None:
    """Say what a gradient is made of that holds the entries of a slice alone: ``sliceout.compact`` does so."""
    global _make_compact
    _make_compact = make


def compact_gradient(small: Tensor, spec: TensorSpec, at: Placement) -> Tensor:
    """The gradient of a parameter like ``spec`` of which only the entries ``small`` at ``at`` are not zero."""
    assert _make_compact is not None
    return _make_compact(small, spec, at)

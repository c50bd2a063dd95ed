"""Layers that mix units: weights with rows and columns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import host_knows_start, take
from ..slices import Axis, ConcatAxis, Take
from .base import Sliced, _attach, _autocast_dtype, _check_size


class Mixing(Sliced):
    """A weight whose one dimension is the ``out`` axis and whose other is the ``in`` axis."""

    roles = ("in", "out")
    transposed = False
    weight: Tensor
    bias: Any

    def _small(self, out: Axis | None, into: Axis | None, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """The kept part of weight and bias, normalisation included, in the dtype the product will run in."""
        weight, bias = self._found("weight"), self._found("bias")
        dtype = None if weight.dtype == torch.float64 else _autocast_dtype(like)  # autocast leaves float64 alone
        takes, leaves = self._takes(out, into), self._gradient_leaves
        small = take(weight, takes["weight"], dtype, leaves.get("weight"))
        return small, None if bias is None else take(bias, takes["bias"], dtype, leaves.get("bias"))

    def takes(self) -> dict[str, Take]:
        return self._takes(self.axes.get("out"), self.axes.get("in"))

    def _takes(self, out: Axis | None, into: Axis | None) -> dict[str, Take]:
        """How weight and bias are taken if these slices are live."""
        scale_out = out is not None and out.slice.fold == "producer"
        scale_in = into is not None and into.slice.fold == "consumer"
        weight = Take(into, out, scale_in, scale_out) if self.transposed else Take(out, into, scale_out, scale_in)
        return {"weight": weight, "bias": Take(out, None, scale_out)}


class Linear(Mixing, nn.Linear):
    """``nn.Linear`` with slices on its input, its output or both.

    Example:
        >>> from sliceout import Slice
        >>> hidden = Slice(8, rate=0.5)
        >>> Linear(3, 8, out_slice=hidden)(torch.zeros(5, 3)).shape
        torch.Size([5, 4])
    """

    def bind(self, axes: dict[str, Axis]) -> None:
        _check_size(self, axes.get("in"), self.in_features, "in_features")
        _check_size(self, axes.get("out"), self.out_features, "out_features")

    def forward(self, x: Tensor) -> Tensor:
        out, into = self._started(), self._arrived("in", x.shape[-1])
        if out is None and into is None:
            return super().forward(x)
        if host_knows_start(x) and _autocast_dtype(x) is None:
            return _linear_by_views(x, self.weight, self.bias, out, into, self.transposed)
        return F.linear(x, *self._small(out, into, x))

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of this call; ``None`` if nothing is sliced."""
        out, into = self._started(), self._arrived("in", x.shape[-1])
        return None if out is None and into is None else self._small(out, into, x)


class Conv1D(Mixing, nn.Module):
    """GPT-2's ``Conv1D(nf, nx)``: a linear layer whose weight is stored as ``[nx, nf]``."""

    transposed = True

    def __init__(self, nf: int, nx: int, *, in_slice: Any = None, out_slice: Any = None) -> None:
        nn.Module.__init__(self)
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)
        _attach(self, {"in": in_slice, "out": out_slice})

    def bind(self, axes: dict[str, Axis]) -> None:
        _check_size(self, axes.get("in"), self.weight.shape[0], "nx")
        _check_size(self, axes.get("out"), self.weight.shape[1], "nf")

    def forward(self, x: Tensor) -> Tensor:
        out, into = self._started(), self._arrived("in", x.shape[-1])
        if host_knows_start(x) and (out or into) and _autocast_dtype(x) is None:
            return _linear_by_views(x, self.weight, self.bias, out, into, self.transposed)
        weight, bias = self._small(out, into, x)
        y = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)  # type: ignore[arg-type]  # as in transformers
        return y.view(*x.shape[:-1], y.shape[-1])


class Conv(Mixing):
    """Convolutions: slices on channels; with ``groups``, either inside every group or whole groups."""

    in_channels: int
    out_channels: int
    groups: int
    kernel_size: tuple[int, ...]

    def bind(self, axes: dict[str, Axis]) -> None:
        _check_size(self, axes.get("in"), self.in_channels, "in_channels")
        _check_size(self, axes.get("out"), self.out_channels, "out_channels")
        if self.groups == 1 or _whole_groups(axes, self.groups):
            return
        for role, axis in axes.items():
            if axis.blocks != self.groups:
                raise ValueError(
                    f"{role}_slice={axis} does not fit groups={self.groups}: slice inside every group with "
                    f"axis(blocks={self.groups}), or whole groups with one Slice({self.groups}) for input and output"
                )

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor | None, int] | None:
        """Weight, bias and groups of this call; ``None`` if nothing is sliced."""
        into, groups = self._arrived("in", x.shape[-1 - len(self.kernel_size)]), self.groups  # there may be no batch
        if groups > 1 and _whole_groups(self.axes, groups):
            if into is None:
                return None
            whole, groups = self.axes["out"], into.blocks * into.slice.width
            leaves = self._gradient_leaves
            weight = take(self.weight, Take(whole), leaf=leaves.get("weight"))
            bias = None if self.bias is None else take(self.bias, Take(whole), leaf=leaves.get("bias"))
            return weight, bias, groups
        out = self._started()
        if out is None and into is None:
            return None
        return *self._small(out, self._columns(into), x), groups

    def _columns(self, into: Axis | None) -> Axis | None:
        """How the input's slice lies along the columns of the weight: every group holds its own."""
        return into.slice.axis(inner=into.inner) if into is not None and self.groups > 1 else into

    def takes(self) -> dict[str, Take]:
        out, into = self.axes.get("out"), self.axes.get("in")
        if self.groups > 1 and _whole_groups(self.axes, self.groups):
            return {"weight": Take(out), "bias": Take(out)}
        return self._takes(out, self._columns(into))

    def forward(self, x: Tensor) -> Tensor:
        parts = self._parts(x)
        if parts is None:
            return super().forward(x)  # type: ignore[misc]
        weight, bias, groups = parts
        if self.padding_mode != "zeros":  # type: ignore[attr-defined]
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)  # type: ignore[attr-defined]
        padding = self.padding if self.padding_mode == "zeros" else 0  # type: ignore[attr-defined]
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
        return convolve(x, weight, bias, self.stride, padding, self.dilation, groups)  # type: ignore[attr-defined]


def _whole_groups(axes: dict[str, Axis], groups: int) -> bool:
    """Depthwise and the like: input and output keep the same whole groups."""
    into, out = axes.get("in"), axes.get("out")
    return (
        into is not None
        and out is not None
        and into.slice is out.slice
        and into.blocks * into.slice.size == out.blocks * out.slice.size == groups
    )


class Conv1d(Conv, nn.Conv1d):
    """``nn.Conv1d`` with slices on its channels."""


class Conv2d(Conv, nn.Conv2d):
    """``nn.Conv2d`` with slices on its channels.

    Example:
        >>> from sliceout import Slice
        >>> channels = Slice(8, rate=0.5)
        >>> depthwise = Conv2d(8, 8, 3, groups=8, in_slice=channels, out_slice=channels)
        >>> depthwise(torch.zeros(1, 4, 5, 5)).shape
        torch.Size([1, 4, 3, 3])
    """


class Conv3d(Conv, nn.Conv3d):
    """``nn.Conv3d`` with slices on its channels."""


LAYERS = (Linear, Conv1d, Conv2d, Conv3d)
"""Those that torch's own layers become."""


def _gain(axis: Axis | ConcatAxis) -> float | None:
    """The normalisation if it is one number along the whole axis."""
    gains = {s.gain for s in axis.slices}
    return gains.pop() if len(gains) == 1 else None


def _linear_by_views(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Axis | None, into: Axis | None, transposed: bool
) -> Tensor:
    """Eager CPU: where the normalisation is one number, the product applies it, and no weight is copied at all."""
    out_gain = _gain(out) if out is not None and out.slice.fold == "producer" else 1.0
    in_gain = _gain(into) if into is not None and into.slice.fold == "consumer" else 1.0
    scale_out, scale_in = out_gain is None, in_gain is None
    if transposed:
        small = take(weight, Take(into, out, scale_in, scale_out))
    else:
        small = take(weight, Take(out, into, scale_out, scale_in)).t()
    beta = out_gain or 1.0
    alpha = beta * (in_gain or 1.0)
    flat = x.reshape(-1, x.shape[-1])
    if bias is None:
        y = torch.addmm(flat.new_zeros(()), flat, small, beta=0, alpha=alpha)
    else:
        y = torch.addmm(take(bias, Take(out, None, scale_out)), flat, small, beta=beta, alpha=alpha)
    return y.view(*x.shape[:-1], y.shape[-1])

"""Layers that mix units: weights with rows and columns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import host_knows_start, take
from ..slices import Axis
from ..takes import Take
from .base import Sliced, _attach, _autocast_dtype, _check_size


class Mixing(Sliced):
    """A weight whose one dimension is the ``out`` axis and whose other is the ``in`` axis."""

    roles = ("in", "out")
    transposed = False
    weight: Tensor
    bias: Any

    def _live(self, x: Tensor) -> tuple[Axis | None, Axis | None]:
        """The slices of the output and of the input that are live in this call."""
        into = self._arrived("in", x.shape[-1])
        return self._started(), into

    def _small_for(self, x: Tensor) -> dict[str, Any] | None:
        """What a forward reads instead of the full parameters, by attribute; ``None`` if nothing is sliced."""
        out, into = self._live(x)
        return None if out is None and into is None else self._small(out, into, x)

    def _small(self, out: Axis | None, into: Axis | None, like: Tensor, parts: int = 1) -> dict[str, Any]:
        """The kept part of weight and bias, normalisation included, in the dtype the product will run in."""
        weight, bias = self._found("weight"), self._found("bias")
        dtype = None if weight.dtype == torch.float64 else _autocast_dtype(like)  # autocast leaves float64 alone
        takes, leaves = self._takes(out, into), self._gradient_leaves
        weight = take(weight, takes["weight"], dtype, leaves.get("weight"), parts)
        if bias is not None:  # whole, it is the same for all parts: its gradient is then one sum
            bias = take(bias, takes["bias"], dtype, leaves.get("bias"), 1 if out is None else parts)
        return {"weight": weight, "bias": bias}

    def takes(self) -> dict[str, Take]:
        return self._takes(self.axes.get("out"), self.axes.get("in"))

    def _takes(self, out: Axis | None, into: Axis | None) -> dict[str, Take]:
        """How weight and bias are taken if these slices are live."""
        scale_out = out is not None and out.slice.fold == "producer"
        scale_in = into is not None and into.slice.fold == "consumer"
        weight = Take(into, out, scale_in, scale_out) if self.transposed else Take(out, into, scale_out, scale_in)
        return {"weight": weight, "bias": Take(out, None, scale_out)}

    def _linear_by_views(self, x: Tensor, out: Axis | None, into: Axis | None) -> Tensor:
        """Eager CPU: where the normalisation is one number, the product applies it, and no weight is copied at all."""
        takes = self._takes(out, into)
        weight, alpha = _without_gain(takes["weight"])
        small = take(self.weight, weight)
        small = small if self.transposed else small.t()
        flat = x.reshape(-1, x.shape[-1])
        if self.bias is None:
            y = torch.addmm(flat.new_zeros(()), flat, small, beta=0, alpha=alpha)
        else:
            bias, beta = _without_gain(takes["bias"])
            y = torch.addmm(take(self.bias, bias), flat, small, beta=beta, alpha=alpha)
        return y.view(*x.shape[:-1], y.shape[-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``, also with a weight and a bias for each part of the batch: ``[parts, out(, in)]``."""
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    x = x if _autocast_dtype(x) is None else x.to(weight.dtype)  # in its own shape: what made it can then do it as well
    # In two steps: Inductor sees that [batch, time, d] is [batch * time, d], but copies it for [parts, rows, d].
    y = _PartsProduct.apply(x.flatten(0, -2).unflatten(0, (weight.shape[0], -1)), weight)
    if bias is not None:
        y = y + (bias[:, None] if bias.dim() == 2 else bias)
    return y.flatten(0, 1).view(*x.shape[:-1], y.shape[-1])


class _PartsProduct(torch.autograd.Function):
    """``x @ weight.mT`` for each part. The gradient of the weight lies as the weight does, for ``put`` to read by rows.

    That of ``bmm`` would lie transposed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x, weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad
        of_weight = None
        if for_weight:
            by_rows = weight.stride(-1) == 1
            of_weight = torch.bmm(grad.mT, x) if by_rows else torch.bmm(x.mT, grad).mT
        return torch.bmm(grad, weight) if for_x else None, of_weight


def _without_gain(t: Take) -> tuple[Take, float]:
    """``t`` without those normalisations that are one number along a whole axis, and the product of these."""
    gain, scaled = 1.0, [False, False]
    for dim, (axis, wanted) in enumerate(((t.rows, t.scale_rows), (t.cols, t.scale_cols))):
        if axis is not None and wanted:
            gains = {s.gain for s in axis.slices}
            one = gains.pop() if len(gains) == 1 else None
            scaled[dim], gain = one is None, gain * (one or 1.0)
    return Take(t.rows, t.cols, *scaled), gain


class Linear(Mixing, nn.Linear):
    """``nn.Linear`` with slices on its input, its output or both.

    Example:
        >>> from sliceout import Slice
        >>> hidden = Slice(8, rate=0.5)
        >>> Linear(3, 8, out_slice=hidden)(torch.zeros(5, 3)).shape
        torch.Size([5, 4])
    """

    sizes = ("in_features", "out_features")

    def forward(self, x: Tensor) -> Tensor:
        out, into = self._live(x)
        if out is None and into is None:
            return super().forward(x)
        parts = self._parts(x, out, into)
        if parts == 1 and host_knows_start(x) and _autocast_dtype(x) is None:
            return self._linear_by_views(x, out, into)
        return linear(x, **self._small(out, into, x, parts))


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

    @classmethod
    def bind(cls, layer: Any, axes: dict[str, Axis]) -> None:
        _check_size(layer, axes.get("in"), layer.weight.shape[0], "nx")
        _check_size(layer, axes.get("out"), layer.weight.shape[1], "nf")

    def forward(self, x: Tensor) -> Tensor:
        out, into = self._live(x)
        parts = self._parts(x, out, into)
        if parts == 1 and host_knows_start(x) and (out or into) and _autocast_dtype(x) is None:
            return self._linear_by_views(x, out, into)
        small = self._small(out, into, x, parts)
        if parts > 1:
            return linear(x, small["weight"].mT, small["bias"])
        y = torch.addmm(small["bias"], x.reshape(-1, x.shape[-1]), small["weight"])  # as in transformers
        return y.view(*x.shape[:-1], y.shape[-1])


class Conv(Mixing):
    """Convolutions: slices on channels; with ``groups``, either inside every group or whole groups."""

    sizes = ("in_channels", "out_channels")
    one_part = "with 8 parts a Wide ResNet learned worse (docs/design.md)"
    groups: int
    kernel_size: tuple[int, ...]

    @classmethod
    def bind(cls, layer: Any, axes: dict[str, Axis]) -> None:
        super().bind(layer, axes)
        if layer.groups == 1 or _whole_groups(axes, layer.groups):
            return
        for role, axis in axes.items():
            if axis.blocks != layer.groups:
                raise ValueError(
                    f"{role}_slice={axis} does not fit groups={layer.groups}: slice inside every group with "
                    f"axis(blocks={layer.groups}), or whole groups with one Slice({layer.groups}) for input and output"
                )

    def _live(self, x: Tensor) -> tuple[Axis | None, Axis | None]:
        into = self._arrived("in", self._channels(x))
        if self.groups > 1 and _whole_groups(self.axes, self.groups):
            return (None, None) if into is None else (self.axes["out"], into)
        return self._started(), into

    def _channels(self, x: Tensor) -> int:
        return x.shape[-1 - len(self.kernel_size)]  # there may be no batch

    def _takes(self, out: Axis | None, into: Axis | None) -> dict[str, Take]:
        if self.groups > 1 and into is not None:
            if _whole_groups(self.axes, self.groups):
                return {"weight": Take(out), "bias": Take(out)}
            into = into.slice.axis(inner=into.inner)  # the weight of every group has its own columns
        return super()._takes(out, into)

    def _small_for(self, x: Tensor) -> dict[str, Any] | None:
        small = super()._small_for(x)
        if small is not None:
            small["groups"] = self._channels(x) // small["weight"].shape[1]  # fewer if whole groups are sliced
        return small

    def forward(self, x: Tensor) -> Tensor:
        small = self._small_for(x)
        if small is None:
            return super().forward(x)  # type: ignore[misc]
        mode, padding = self.padding_mode, self.padding  # type: ignore[attr-defined]
        if mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=mode), 0  # type: ignore[attr-defined]
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel_size) - 1]
        return convolve(x, **small, stride=self.stride, padding=padding, dilation=self.dilation)  # type: ignore[attr-defined]


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

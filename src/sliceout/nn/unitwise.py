"""Layers that treat every unit by itself: norms, per-unit factors, and dropout, which rests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import in_place, store_, take
from ..ops.statistics import InPlace
from ..slices import Axis
from ..takes import ConcatAxis, Take
from .base import Sliced, _attach, _check_size


class _Unitwise(Sliced):
    """Layers whose parameters have an entry for every unit; ``_forward(x, axis)`` is what they do with sliced input."""

    _forward: Any
    unit_dim = 1
    """Dimension of the input along which the units lie."""

    def forward(self, input: Tensor) -> Tensor:
        axis = self._arrived("unit", input.shape[self.unit_dim])
        return super().forward(input) if axis is None else self._forward(input, axis)  # type: ignore[misc, no-any-return]

    def takes(self) -> dict[str, Take]:
        return {name: Take(self.axes.get("unit")) for name in self._parameters}  # type: ignore[attr-defined]

    def _small(self, name: str, axis: Axis, parts: int = 1) -> Any:
        """The kept entries of a parameter, if there is one."""
        p = self._found(name)
        return None if p is None else take(p, Take(axis), leaf=self._gradient_leaves.get(name), parts=parts)

    def _pair(self, axis: Axis) -> tuple[Any, Any]:
        """Those of weight and bias."""
        return self._small("weight", axis), self._small("bias", axis)

    def _in_parts(self, x: Tensor, name: str, axis: Axis, parts: int) -> tuple[Tensor, Any]:
        """``x`` with its parts as a dimension in front, and the kept entries of a parameter to go with it."""
        x, small, dim = x.unflatten(0, (parts, -1)), self._small(name, axis, parts), self.unit_dim
        if small is not None:
            small = small.view(parts, *(-1 if d == dim % (x.dim() - 1) else 1 for d in range(x.dim() - 1)))
        return x, small

    def _affine(self, x: Tensor, axis: Axis, parts: int) -> Tensor:
        """What a norm does last, with a weight and a bias for each part of the batch."""
        for name, combine in (("weight", torch.mul), ("bias", torch.add)):
            if name in self._parameters:  # type: ignore[attr-defined]  # RMSNorm has no bias
                y, small = self._in_parts(x, name, axis, parts)
                x = x if small is None else combine(y, small).flatten(0, 1)
        return x


class _BatchNorm(_Unitwise):
    """Batch norm over the kept channels; the running statistics of the others stay as they are."""

    sizes = ("num_features",)
    one_part = "the whole batch shares the statistics of a batch norm"
    _made_anew = (*Sliced._made_anew, "_statistics")
    _statistics: InPlace | None = None
    momentum: float | None

    def _forward(self, x: Tensor, axis: Axis) -> Tensor:
        self._check_input_dim(x)  # type: ignore[attr-defined]
        mean, var = self._found("running_mean"), self._found("running_var")
        tracked = self._found("num_batches_tracked")
        momentum = self.momentum
        if self.training and tracked is not None and momentum is None:
            raise ValueError(
                "momentum=None (a cumulative average) needs every channel in every batch: "
                "call sliceout.off_(model) before you re-estimate batch-norm statistics"
            )
        weight, bias = self._pair(axis)
        updates = self.training and mean is not None and var is not None
        if updates and torch.compiler.is_compiling() and not isinstance(axis, ConcatAxis):
            # What is 0 and has momentum 1 becomes the statistics of the batch, so none are taken. Inductor would write
            # means and variances in a kernel each, as they share too little to be fused, and the count in a third.
            batch = mean.new_zeros(axis.width), var.new_zeros(axis.width)
            y = F.batch_norm(x, *batch, weight, bias, True, 1.0, self.eps)  # type: ignore[attr-defined]
            where = axis.slice.start, axis.geometry
            torch.ops.sliceout.update_statistics_(mean, var, tracked, *batch, *where, momentum or 0.0)
            return y
        if self.training and tracked is not None:
            tracked.add_(1)
        kept = None
        if updates and in_place(axis, mean):
            kept = self._statistics
            if kept is None or not kept.serves(mean, var):
                kept = self._statistics = InPlace((mean, var))
            both: Any = kept.at(axis.slice.start_on_host, axis.geometry)
        else:
            both = [None if t is None else take(t, Take(axis)) for t in (mean, var)]
        training = self.training or mean is None
        mean_of, var_of = both
        y = F.batch_norm(x, mean_of, var_of, weight, bias, training, momentum or 0.0, self.eps)  # type: ignore[attr-defined]
        if kept is not None:
            kept.done()
        elif updates:
            store_((mean, var), both, axis)
        return y


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` over a sliced axis."""


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` over a sliced axis."""


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` over a sliced axis."""


class GroupNorm(_Unitwise, nn.GroupNorm):
    """``nn.GroupNorm`` over a slice of whole groups, or over the same slice inside every group."""

    sizes = ("num_channels",)

    @classmethod
    def bind(cls, layer: Any, axes: dict[str, Axis]) -> None:
        super().bind(layer, axes)
        axis, groups = axes["unit"], layer.num_groups
        if groups not in (axis.blocks, axis.blocks * axis.slice.size):
            raise ValueError(
                f"slice={axis} cuts through the {groups} groups of this norm: slice whole groups with "
                f"Slice({groups}).axis(inner={layer.num_channels // groups}), "
                f"or inside every group with axis(blocks={groups})"
            )

    def _forward(self, x: Tensor, axis: Axis) -> Tensor:
        groups = self.num_groups if axis.blocks == self.num_groups else axis.blocks * axis.slice.width
        parts = self._parts(x, axis)
        if parts > 1:
            return self._affine(F.group_norm(x, groups, eps=self.eps), axis, parts)
        return F.group_norm(x, groups, *self._pair(axis), self.eps)


class _LastNorm(_Unitwise):
    """Norms over a sliced last dimension."""

    unit_dim = -1

    @classmethod
    def bind(cls, layer: Any, axes: dict[str, Axis]) -> None:
        shape = tuple(layer.normalized_shape)
        if len(shape) != 1:
            raise ValueError(f"normalized_shape={shape}: only a norm over the last dimension alone can be sliced")
        _check_size(layer, axes["unit"], shape[0], "normalized_shape")


class LayerNorm(_LastNorm, nn.LayerNorm):
    """``nn.LayerNorm`` over a sliced last dimension: mean and variance are those of the kept units."""

    def _forward(self, x: Tensor, axis: Axis) -> Tensor:
        parts = self._parts(x, axis)
        if parts > 1:
            return self._affine(F.layer_norm(x, (axis.width,), eps=self.eps), axis, parts)
        return F.layer_norm(x, (axis.width,), *self._pair(axis), self.eps)


class RMSNorm(_LastNorm, nn.RMSNorm):
    """``nn.RMSNorm`` over a sliced last dimension: the mean square is that of the kept units."""

    def _forward(self, x: Tensor, axis: Axis) -> Tensor:
        parts = self._parts(x, axis)
        if parts > 1:
            return self._affine(F.rms_norm(x, (axis.width,), eps=self.eps), axis, parts)
        return F.rms_norm(x, (axis.width,), self._small("weight", axis), self.eps)


class PReLU(_Unitwise, nn.PReLU):
    """``nn.PReLU`` with one parameter per unit of a sliced dimension 1."""

    sizes = ("num_parameters",)

    def _forward(self, x: Tensor, axis: Axis) -> Tensor:
        parts = self._parts(x, axis)
        if parts > 1:
            y, weight = self._in_parts(x, "weight", axis, parts)
            return torch.where(y > 0, y, y * weight).flatten(0, 1)
        return F.prelu(x, self._small("weight", axis))


class LayerScale(_Unitwise, nn.Module):
    """``x * gamma``, one learned factor per unit of the last dimension; also what timm's ``LayerScale`` becomes."""

    def __init__(self, dim: int, init_values: float = 1e-5, inplace: bool = False, *, slice: Any = None) -> None:
        nn.Module.__init__(self)
        self.inplace = inplace
        self.gamma = nn.Parameter(torch.full((dim,), init_values))
        _attach(self, {"unit": slice})

    @classmethod
    def bind(cls, layer: Any, axes: dict[str, Axis]) -> None:
        _check_size(layer, axes["unit"], layer.gamma.shape[0], "dim")

    unit_dim = -1

    def forward(self, x: Tensor) -> Tensor:
        axis = self._arrived("unit", x.shape[-1])
        parts = self._parts(x, axis)
        if axis is not None and parts > 1:
            y, gamma = self._in_parts(x, "gamma", axis, parts)
            return (y.mul_(gamma) if self.inplace else y * gamma).flatten(0, 1)
        gamma = self.gamma if axis is None else self._small("gamma", axis)
        return x.mul_(gamma) if self.inplace else x * gamma


class _Dropout(Sliced):
    """A dropout that rests while the units it would drop from are sliced."""

    def __init__(self, *args: Any, slice: Any, **kwargs: Any) -> None:
        super().__init__(*args, slice=slice, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        resting = self.training and self.axes["unit"].slice.sliced
        return x if resting else super().forward(x)  # type: ignore[misc, no-any-return]


class Dropout(_Dropout, nn.Dropout):
    """``nn.Dropout`` that rests while its slice is on."""


class Dropout1d(_Dropout, nn.Dropout1d):
    """``nn.Dropout1d`` that rests while its slice is on."""


class Dropout2d(_Dropout, nn.Dropout2d):
    """``nn.Dropout2d`` that rests while its slice is on."""


class Dropout3d(_Dropout, nn.Dropout3d):
    """``nn.Dropout3d`` that rests while its slice is on."""


LAYERS = (
    BatchNorm1d, BatchNorm2d, BatchNorm3d, GroupNorm, LayerNorm, RMSNorm, PReLU,
    Dropout, Dropout1d, Dropout2d, Dropout3d,
)  # fmt: skip
"""Those that torch's own layers become."""

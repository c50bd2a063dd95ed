"""Compact gradients: what ``parameter.grad`` is when only a slice of the parameter got one.

A :class:`SlicedGrad` has the shape of its parameter but holds the entries of the slice alone; the others are zero and
take no memory. What training loops do with gradients (adding up, clipping, unscaling, zeroing) is done on the small
tensor. Any other operation sees the full gradient, zeros included, so nothing can go wrong, only slower.

The slice-only optimizer update that goes with it is in ``optim``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .ops import reference, take, views
from .slices import Axis

aten = torch.ops.aten


@dataclass(frozen=True)
class Place:
    """Where a slice lay along a dimension when the gradient was made: later draws do not move it."""

    axis: Axis
    start: int
    geometry: tuple[int, ...]

    @classmethod
    def now(cls, axis: Axis | None) -> Place | None:
        return None if axis is None else cls(axis, axis.slice.start_on_host, tuple(axis.geometry))

    @property
    def cut(self) -> views.Cut:
        return self.start, list(self.geometry)

    def start_on(self, device: torch.device) -> Tensor:
        """The start in device memory: the slice's own as long as it has not moved on, so that graphs can read it."""
        live = self.axis.slice
        if live.start_on_host == self.start and live.start.device == device:
            return live.start
        return torch.tensor([self.start], device=device)


class SlicedGrad(Tensor):
    """A gradient that is zero outside a slice. Made by autograd; see the module's text.

    Attributes:
        small: the entries of the slice, before ``gain``, ``row_scale`` and ``col_scale`` are multiplied in.
        rows, cols: where they lie along dimensions 0 and 1; ``None`` means all of it.
        full: the whole gradient, once somebody has changed it in a way that is not confined to the slice.
    """

    small: Tensor
    rows: Place | None
    cols: Place | None
    gain: float
    row_scale: Tensor | None
    col_scale: Tensor | None
    full: Tensor | None

    @staticmethod
    def __new__(
        cls: Any,
        small: Tensor,
        like: views.Like,
        rows: Place | None,
        cols: Place | None,
        gain: float = 1.0,
        row_scale: Tensor | None = None,
        col_scale: Tensor | None = None,
    ) -> SlicedGrad:
        shape, channels_last, dtype = like
        strides = _strides(shape, channels_last)
        self = Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=small.device)
        self = cast("SlicedGrad", self)
        self.small, self.rows, self.cols, self.gain = small, rows, cols, gain
        self.row_scale, self.col_scale, self.full = row_scale, col_scale, None
        return self

    def values(self) -> Tensor:
        """The entries of the slice in the dtype of the gradient, everything multiplied in."""
        if self.gain != 1 or self.row_scale is not None or self.col_scale is not None or self.small.dtype != self.dtype:
            small = self.small.to(torch.promote_types(self.dtype, torch.float32))
            sides = ((0, self.rows, self.row_scale), (1, self.cols, self.col_scale))
            for dim, place, scale in sides:
                if place is not None and scale is not None:
                    unit = reference.sources(place.start_on(small.device), list(place.geometry))[1]
                    small = reference.scaled(small, scale[unit], dim)
            self.small = (small if self.gain == 1 else small * self.gain).to(self.dtype)
            self.gain, self.row_scale, self.col_scale = 1.0, None, None
        return self.small

    def dense(self) -> Tensor:
        """The whole gradient, as an ordinary tensor."""
        if self.full is not None:
            return self.full
        starts = [None if p is None else p.start_on(self.device) for p in (self.rows, self.cols)]
        geometries = [[] if p is None else list(p.geometry) for p in (self.rows, self.cols)]
        channels_last = views.is_channels_last(self)
        return torch.ops.sliceout.put(
            self.values(), *starts, *geometries, None, None, self.shape, channels_last, self.dtype
        )

    def rectangles(self, *fulls: Tensor) -> list[tuple[Tensor, ...]]:
        """Views of the small tensor and of each full one (the parameter, its state) that hold the same entries."""
        row, col = (views.WHOLE if p is None else p.cut for p in (self.rows, self.cols))
        values = self.values()
        pairs = [list(views._rectangles(full, values, row, col)) for full in fulls]
        return [(same[0][1], *(big for big, _ in same)) for same in zip(*pairs, strict=True)]

    def _with(self, small: Tensor, dtype: torch.dtype | None = None) -> SlicedGrad:
        like = (tuple(self.shape), views.is_channels_last(self), dtype or self.dtype)
        return SlicedGrad(small, like, self.rows, self.cols)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        kept = "all" if self.full is not None else list(self.small.shape)
        return f"SlicedGrad({kept} of {list(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = _ON_SLICES.get(func)
        if known is not None:
            out = known(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        return _on_full(func, args, kwargs)


def same_place(a: SlicedGrad, b: SlicedGrad) -> bool:
    """Whether both hold the same entries of the same parameter shape."""
    return (
        a.full is None and b.full is None and a.shape == b.shape
        and [p and p.cut for p in (a.rows, a.cols)] == [p and p.cut for p in (b.rows, b.cols)]
    )  # fmt: skip


def _strides(shape: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    order = [*range(len(shape))]
    if channels_last:
        order = [0, *range(2, len(shape)), 1]
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


# -- operations --------------------------------------------------------------------------------------------------------


def _on_full(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on whole gradients; those that it changes stay whole from then on."""
    met: dict[int, tuple[SlicedGrad, Tensor]] = {}

    def whole(x: Any) -> Any:
        if not isinstance(x, SlicedGrad):
            return x
        if id(x) not in met:
            met[id(x)] = x, x.dense()
        return met[id(x)][1]

    out = func(*tree_map(whole, args), **tree_map(whole, kwargs))
    if not func._schema.is_mutable:
        return out
    changed = {id(full): grad for grad, full in met.values()}
    for grad, full in met.values():
        if _writes_to(func, args, kwargs, grad):
            grad.full = full
    return tree_map(lambda x: changed.get(id(x), x), out)


def _writes_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grad: SlicedGrad) -> bool:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if value is grad or (isinstance(value, (list, tuple)) and any(v is grad for v in value)):
                return True
    return False


def _is_number(x: Any) -> bool:
    return not isinstance(x, Tensor) or (x.numel() == 1 and not isinstance(x, SlicedGrad))


def _copy(func: Any, grad: SlicedGrad, **kwargs: Any) -> Any:
    if grad.full is not None:
        return NotImplemented
    small = grad.small.clone() if func is aten.clone.default else grad.small
    like = (tuple(grad.shape), views.is_channels_last(grad), grad.dtype)
    return SlicedGrad(small, like, grad.rows, grad.cols, grad.gain, grad.row_scale, grad.col_scale)


def _cast(func: Any, grad: SlicedGrad, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    elsewhere = device is not None and torch.device(device) != grad.device
    if grad.full is not None or elsewhere or dtype is None or not dtype.is_floating_point:
        return NotImplemented
    return grad._with(grad.values().to(dtype), dtype)


def _times(func: Any, grad: Any, other: Any, *rest: Any, **kwargs: Any) -> Any:
    """Factors that are one number leave zeros zero."""
    if not isinstance(grad, SlicedGrad) or grad.full is not None or not _is_number(other):
        return NotImplemented
    out = func(grad.values(), other, *rest, **kwargs)
    return grad if func._schema.is_mutable else grad._with(out)


def _plus(func: Any, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    if not (isinstance(a, SlicedGrad) and isinstance(b, SlicedGrad) and same_place(a, b)):
        return NotImplemented
    out = func(a.values(), b.values(), alpha=alpha)
    return a if func._schema.is_mutable else a._with(out)


def _one(func: Any, grad: SlicedGrad, *args: Any, **kwargs: Any) -> Any:
    """Operations of one gradient in place."""
    if grad.full is not None:
        return NotImplemented
    func(grad.values(), *args, **kwargs)
    return grad


def _norm(func: Any, grad: SlicedGrad, ord: Any = 2, dim: Any = None, *rest: Any, **kwargs: Any) -> Any:
    if grad.full is not None or dim not in (None, []) or float(ord) <= 0 or (rest and rest[0]) or kwargs.get("keepdim"):
        return NotImplemented
    return func(grad.values(), ord, **kwargs)


def _each(func: Any, grads: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Multi-tensor operations that leave zeros zero, or norms."""
    if any(isinstance(g, SlicedGrad) and g.full is not None for g in grads) or not all(
        _is_number(x) for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])
    ):
        return NotImplemented
    if func is aten._foreach_norm.Scalar and args and float(args[0]) <= 0:
        return NotImplemented
    return func([g.values() if isinstance(g, SlicedGrad) else g for g in grads], *args, **kwargs)


_ON_SLICES: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _copy,
    aten.alias.default: _copy,
    aten.clone.default: _copy,
    aten._to_copy.default: _cast,
    aten.zero_.default: _one,
    aten.neg.default: lambda func, grad: NotImplemented if grad.full is not None else grad._with(-grad.values()),
    aten.linalg_vector_norm.default: _norm,
    **dict.fromkeys((aten.add.Tensor, aten.add_.Tensor), _plus),
    **dict.fromkeys(
        (
            aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.mul_.Scalar,
            aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar, aten.div_.Scalar,
        ),
        _times,
    ),
    **dict.fromkeys(
        (
            aten._foreach_norm.Scalar, aten._foreach_zero_.default,
            aten._foreach_mul_.Scalar, aten._foreach_mul_.Tensor, aten._foreach_mul_.ScalarList,
            aten._foreach_div_.Scalar, aten._foreach_div_.Tensor, aten._foreach_div_.ScalarList,
            aten._amp_foreach_non_finite_check_and_unscale_.default,
        ),
        _each,
    ),
}  # fmt: skip
"""Operations that are done on the slice alone, because what is zero stays zero (or counts nothing)."""


# -- where they come from ----------------------------------------------------------------------------------------------


class Take(views._Function):
    """``ops.take`` of a parameter, whose gradient comes back as a :class:`SlicedGrad`."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, rows: Axis | None, cols: Axis | None, settings: dict[str, Any]) -> Tensor:
        ctx.like = tuple(full.shape), views.is_channels_last(full), full.dtype
        ctx.rows, ctx.cols = Place.now(rows), Place.now(cols)
        ctx.factors = _factors(rows, cols, settings)
        return take(full.detach(), rows, cols, **settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sliced = SlicedGrad(grad, ctx.like, ctx.rows, ctx.cols, *ctx.factors)
        whole = torch.is_grad_enabled()  # second derivatives are asked for: an ordinary tensor has them
        return sliced.dense() if whole else sliced, None, None, None


def _factors(
    rows: Axis | None, cols: Axis | None, settings: dict[str, Any]
) -> tuple[float, Tensor | None, Tensor | None]:
    """``gain, row_scale, col_scale``: what the entries were multiplied with."""
    gain, scales = 1.0, []
    for axis, wanted in ((rows, settings["scale_rows"]), (cols, settings["scale_cols"])):
        scales.append(None)
        if axis is not None and wanted:
            if axis.slice.gain is None:
                scales[-1] = axis.slice.scale
            else:
                gain *= axis.slice.gain
    return gain, scales[0], scales[1]

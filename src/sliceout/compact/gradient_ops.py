"""What torch's operations do to a ``SlicedGrad``: on the slice if they leave zeros zero, else on the whole gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .gradient import ON_SLICES, SlicedGrad, same_place

aten = torch.ops.aten


def _on(*ops: Any) -> Callable[[Any], Any]:
    """A decorator: what these operations do to a gradient. ``NotImplemented`` where they need the whole one."""

    def enter(done: Any) -> Any:
        ON_SLICES.update(dict.fromkeys(ops, done))
        return done

    return enter


def _is_number(x: Any, ndim: int = 1) -> bool:
    return not isinstance(x, Tensor) or (x.numel() == 1 and x.dim() <= ndim and not isinstance(x, SlicedGrad))


@_on(aten.detach.default, aten.alias.default)
def _alias(func: Any, grad: SlicedGrad) -> Any:
    """The same gradient in another wrapper: what is done to one is done to both."""
    out = Tensor._make_wrapper_subclass(  # autograd asks for one for every gradient it stores
        SlicedGrad, grad.shape, strides=grad.stride(), dtype=grad.dtype, device=grad.device
    )
    out.__dict__ = grad.__dict__
    return out


@_on(aten.clone.default)
def _clone(func: Any, grad: SlicedGrad, *, memory_format: Any = torch.preserve_format) -> Any:
    if grad.full is not None or memory_format is not torch.preserve_format:
        return NotImplemented
    out = grad.like(grad.values().clone())
    out.empty = grad.empty
    return out


@_on(aten.new_empty_strided.default)
def _new(func: Any, grad: SlicedGrad, size: Any, stride: Any, **kwargs: Any) -> Any:
    """What autograd copies a gradient into that somebody else holds too."""
    wanted = (tuple(size), tuple(stride), kwargs.get("dtype") or grad.dtype, kwargs.get("device") or grad.device)
    if grad.full is not None or wanted != (tuple(grad.shape), grad.stride(), grad.dtype, grad.device):
        return NotImplemented
    return grad.like(torch.empty_like(grad.small, dtype=grad.dtype))


@_on(aten._to_copy.default)
def _cast(func: Any, grad: SlicedGrad, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    elsewhere = device is not None and torch.device(device) != grad.device
    if grad.full is not None or elsewhere or dtype is None or not dtype.is_floating_point:
        return NotImplemented
    return grad.like(func(grad.values(), dtype=dtype))


_OUT_OF_PLACE = {
    aten.mul_.Tensor: aten.mul.Tensor, aten.mul_.Scalar: aten.mul.Scalar,
    aten.div_.Tensor: aten.div.Tensor, aten.div_.Scalar: aten.div.Scalar,
}  # fmt: skip


@_on(*_OUT_OF_PLACE, *_OUT_OF_PLACE.values())
def _times(func: Any, grad: Any, other: Any, *rest: Any, **kwargs: Any) -> Any:
    """Factors that are one number leave zeros zero."""
    if isinstance(other, SlicedGrad) and func is aten.mul.Tensor:
        grad, other = other, grad
    if not isinstance(grad, SlicedGrad) or grad.full is not None or not _is_number(other, grad.dim()):
        return NotImplemented
    if not func._schema.is_mutable:
        return grad.like(func(grad.values(), other, *rest, **kwargs))
    values = grad.values()
    if grad.owned:
        func(values, other, *rest, **kwargs)
    else:  # into memory of its own, without copying first
        grad.replace_(_OUT_OF_PLACE[func](values, other, *rest, **kwargs).to(grad.dtype))
    return grad


@_on(aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor)
def _plus(func: Any, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    if not (isinstance(a, SlicedGrad) and isinstance(b, SlicedGrad)) or b.full is not None:
        return NotImplemented
    if same_place(a, b):
        if func._schema.is_mutable:
            func(a.writable(), b.values(), alpha=alpha)
            return a
        return a.like(func(a.values(), b.values(), alpha=alpha))
    if a.full is None and a.empty and a.shape == b.shape and func is aten.add_.Tensor:
        plain = alpha == 1 and a.dtype == b.dtype
        a._become(b, b.values() if plain else (b.values() * alpha).to(a.dtype), owned=not plain)
        if plain:
            b.owned = False  # both hold it now
        return a
    return NotImplemented


@_on(aten.copy_.default)
def _overwrite(func: Any, a: Any, b: Any, *rest: Any) -> Any:
    if not (isinstance(a, SlicedGrad) and isinstance(b, SlicedGrad) and same_place(a, b)):
        return NotImplemented
    func(a.writable(), b.values(), *rest)
    return a


@_on(aten.zero_.default)
def _zero(func: Any, grad: SlicedGrad) -> Any:
    if grad._viewed:
        return NotImplemented
    grad.full = None
    grad.writable().zero_()
    grad.empty = True
    return grad


@_on(
    aten.clamp_.default, aten.clamp_min_.default, aten.clamp_max_.default,
    aten._foreach_clamp_min_.Scalar, aten._foreach_clamp_max_.Scalar,
)  # fmt: skip
def _clamp(func: Any, grad: Any, *limits: Any) -> Any:
    """Limits with zero between them leave zeros zero."""
    low, high = (None, *limits) if "clamp_max" in func._schema.name else (*limits, None, None)[:2]
    known = all(limit is None or isinstance(limit, (int, float)) for limit in (low, high))
    if not known or not (low or 0) <= 0 <= (high or 0):
        return NotImplemented
    if not isinstance(grad, SlicedGrad):
        return _each(func, grad, *limits)
    if grad.full is not None:
        return NotImplemented
    func(grad.writable(), *limits)
    return grad


@_on(aten.neg.default)
def _negative(func: Any, grad: SlicedGrad) -> Any:
    return NotImplemented if grad.full is not None else grad.like(-grad.values())


@_on(aten.linalg_vector_norm.default)
def _norm(func: Any, grad: SlicedGrad, ord: Any = 2, dim: Any = None, *rest: Any, **kwargs: Any) -> Any:
    if grad.full is not None or dim not in (None, []) or float(ord) <= 0 or (rest and rest[0]) or kwargs.get("keepdim"):
        return NotImplemented
    return func(grad.values(), ord, **kwargs)


@_on(
    aten._foreach_norm.Scalar,
    aten._foreach_mul_.Scalar, aten._foreach_mul_.Tensor, aten._foreach_mul_.ScalarList,
    aten._foreach_div_.Scalar, aten._foreach_div_.Tensor, aten._foreach_div_.ScalarList,
    aten._amp_foreach_non_finite_check_and_unscale_.default,
)  # fmt: skip
def _each(func: Any, grads: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Multi-tensor operations that leave zeros zero, or norms."""
    numbers = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
    if any(isinstance(g, SlicedGrad) and g.full is not None for g in grads) or not all(map(_is_number, numbers)):
        return NotImplemented
    norms = func is aten._foreach_norm.Scalar
    if norms and args and float(args[0]) <= 0:
        return NotImplemented
    read: Any = SlicedGrad.values if norms else SlicedGrad.writable
    return func([read(g) if isinstance(g, SlicedGrad) else g for g in grads], *args, **kwargs)


@_on(aten._foreach_zero_.default)
def _zero_each(func: Any, grads: list[Tensor]) -> None:
    for g in grads:
        g.zero_()

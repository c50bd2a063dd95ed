"""Compact gradients: what ``parameter.grad`` is when only a slice of the parameter got one.

A :class:`SlicedGrad` has the shape of its parameter but holds the entries of the slice alone; the others are zero and
take no memory. What training loops do with gradients (adding up, clipping, unscaling, zeroing) is done on the small
tensor. Any other operation sees the full gradient, zeros included, so nothing can go wrong, only slower. Looking at it
changes nothing; once somebody has written outside the slice, it is an ordinary dense gradient to the optimizer.

The slice-only optimizer update that goes with it is in ``optimizers``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..ops import library, views
from ..ops.placement import Placement, TensorSpec, register_compact_gradient, small_shape, strides_of


class SlicedGrad(Tensor):
    """A gradient that is zero outside a slice. Made by autograd; see the module's text.

    Attributes:
        small: the entries of the slice, before the normalisations of ``at`` are multiplied in.
        at: where they lie.
        full: the whole gradient, once somebody has changed it in a way that need not be confined to the slice, or holds
            a view of it. All operations go there from then on.
        owned: whether ``small`` is ours to write to: what autograd hands out may be shared (``a + b`` hands one tensor
            to both).
        offset: what the optimizer subtracts from the step count of the parameter: those before these entries were in.
        empty: it was zeroed, so that it may move to the slice of whatever is added next.
    """

    small: Tensor
    at: Placement
    full: Tensor | None
    owned: bool
    whole = False
    offset = 0
    empty: bool
    _viewed: bool

    @staticmethod
    def __new__(cls: Any, small: Tensor, spec: TensorSpec, at: Placement, owned: bool = False) -> SlicedGrad:
        shape, channels_last, dtype = spec
        strides = strides_of(shape, channels_last)
        self = Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=small.device)
        self = cast("SlicedGrad", self)
        self.small, self.at, self.full = small, at, None
        self.owned, self.empty, self._viewed = owned, False, False
        return self

    def values(self) -> Tensor:
        """The entries of the slice in the dtype of the gradient, everything multiplied in."""
        if self.at.gain != 1 or not self.at.uniform or self.small.dtype != self.dtype:
            self.small = self.at.scaled(self.small).to(self.dtype)
            self.at, self.owned = Placement(*self.at[:2]), True
        return self.small

    def writable(self) -> Tensor:
        """:meth:`values`, to be changed in place."""
        small = self.values()
        if not self.owned:
            self.small, self.owned = small.clone(), True
        self.empty = False
        return self.small

    def replace_(self, values: Tensor) -> None:
        """Hold these values at the same place instead: memory of ours from now on."""
        self._become(self, values, owned=True)

    def dense(self) -> Tensor:
        """The whole gradient, as an ordinary tensor."""
        if self.full is not None:
            return self.full
        values = self.values()  # which may change what ``at`` says
        return library.put(values, TensorSpec.of(self), self.at)

    def is_sliced(self) -> bool:
        """Whether it is zero outside the slice, and ``values()`` holds the rest: if not, it counts as dense."""
        if self.full is not None:
            kept = views.take_copy(self.full, self.at)
            if int(kept.count_nonzero()) != int(self.full.count_nonzero()):
                return False
            self.replace_(kept)
            if not self._viewed:
                self.full = None
        return True

    def _become(self, other: SlicedGrad, values: Tensor, owned: bool) -> None:
        """Hold these values at the place of ``other``."""
        self.small, self.at, self.owned, self.empty = values, Placement(*other.at[:2]), owned, other.empty

    def rectangles(self, *fulls: Tensor) -> list[tuple[Tensor, ...]]:
        """Views of the small tensor and of each full one (the parameter, its state) that hold the same entries."""
        values = self.values()
        pairs = [list(views.rectangles(full, values, self.at)) for full in fulls]
        return [(same[0][1], *(big for big, _ in same)) for same in zip(*pairs, strict=True)]

    def like(self, small: Tensor) -> SlicedGrad:
        """A new gradient at the same place, with these values."""
        return SlicedGrad(small, TensorSpec.of(self)._replace(dtype=small.dtype), Placement(*self.at[:2]), owned=True)

    def tolist(self) -> Any:
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.dense().numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kept = "all" if self.full is not None else list(self.small.shape)
        return f"SlicedGrad({kept} of {list(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        known = ON_SLICES.get(func)
        out = NotImplemented if known is None else known(func, *args, **kwargs or {})
        return _on_full(func, args, kwargs or {}) if out is NotImplemented else out


class Region:
    """Some entries of a dense gradient: what a :class:`SlicedGrad` is to updates, but read where they lie."""

    whole = True

    def __init__(self, grad: Tensor, at: Placement, offset: int) -> None:
        self.grad, self.at, self.offset = grad, at, offset

    @property
    def small(self) -> Tensor:
        """Its shape and dtype, for the tables of kernels; the entries are not copied."""
        return _without_memory(tuple(small_shape(self.grad.shape, *self.at.geometries)), self.grad.dtype)

    def values(self) -> Tensor:
        return self.grad

    def replace_(self, values: Tensor) -> None:
        self.grad = values

    def rectangles(self, *fulls: Tensor) -> list[tuple[Tensor, ...]]:
        """Views of the gradient and of each full tensor that hold the same entries."""
        found = [[full for full, _ in views.rectangles(t, t, self.at)] for t in (self.grad, *fulls)]
        return list(zip(*found, strict=True))


@functools.lru_cache(1024)
def _without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


Work = list[tuple[Tensor, SlicedGrad | Region]]
"""Parameters and their gradients, which an optimizer is to step over: either all compact, or all regions."""


def same_place(a: SlicedGrad, b: SlicedGrad) -> bool:
    """Whether both hold the same entries of the same parameter shape."""
    return a.full is None and b.full is None and a.shape == b.shape and a.at.lies_at(b.at)


# -- what torch's operations do to it ----------------------------------------------------------------------------------

ON_SLICES: dict[Any, Callable[..., Any]] = {}
"""Operations that are done on the slice alone, because what is zero stays zero."""
aten = torch.ops.aten


def _on_full(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on whole gradients; those that it changes or makes a view of stay whole from then on."""
    met: dict[int, tuple[SlicedGrad, Tensor]] = {}

    def whole(x: Any) -> Any:
        if not isinstance(x, SlicedGrad):
            return x
        if id(x) not in met:
            met[id(x)] = x, x.dense()
        return met[id(x)][1]

    whole_args, whole_kwargs = tree_map(whole, args), tree_map(whole, kwargs)
    out = func(*whole_args, **whole_kwargs)
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for x in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(x, SlicedGrad) and not whole(x).is_inference():
                    x.full = whole(x)
                    x._viewed |= not argument.alias_info.is_write  # others may write to what they hold of it
    changed = {id(full): grad for grad, full in met.values()}
    return tree_map(lambda x: changed.get(id(x), x), out)


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


register_compact_gradient(SlicedGrad)

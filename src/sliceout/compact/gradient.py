"""Compact gradients: what ``parameter.grad`` is when only a slice of the parameter got one.

A :class:`SlicedGrad` has the shape of its parameter but holds the entries of the slice alone; the others are zero and
take no memory. What training loops do with gradients (adding up, clipping, unscaling, zeroing) is done on the small
tensor. Any other operation sees the full gradient, zeros included, so nothing can go wrong, only slower. Looking at it
changes nothing; once somebody has written outside the slice, it is an ordinary dense gradient to the optimizer.

What each operation does is in ``gradient_ops``, the slice-only optimizer update that goes with it in ``optimizers``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch.utils._pytree import tree_map

from ..ops import library, views
from ..ops.placement import Placement, TensorSpec, register_compact_gradient, strides_of


class SlicedGrad(Tensor):
    """A gradient that is zero outside a slice. Made by autograd; see the module's text.

    Attributes:
        small: the entries of the slice, before the normalisations of ``at`` are multiplied in.
        at: where they lie.
        full: the whole gradient, once somebody has changed it in a way that need not be confined to the slice, or holds
            a view of it. All operations go there from then on.
        owned: whether ``small`` is ours to write to: what autograd hands out may be shared (``a + b`` hands one tensor
            to both).
        empty: it was zeroed, so that it may move to the slice of whatever is added next.
    """

    small: Tensor
    at: Placement
    full: Tensor | None
    owned: bool
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


Work = list[tuple[Tensor, SlicedGrad]]
"""Parameters and their gradients, which an optimizer is to step over."""


def same_place(a: SlicedGrad, b: SlicedGrad) -> bool:
    """Whether both hold the same entries of the same parameter shape."""
    return a.full is None and b.full is None and a.shape == b.shape and a.at.lies_at(b.at)


# -- what torch's operations do to it ----------------------------------------------------------------------------------

ON_SLICES: dict[Any, Callable[..., Any]] = {}
"""Operations that are done on the slice alone, because what is zero stays zero: filled in by ``gradient_ops``."""


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


register_compact_gradient(SlicedGrad)

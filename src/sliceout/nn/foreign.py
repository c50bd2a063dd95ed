"""Layers of other people's classes: their own forward runs, and is shown the small parameters while it does.

timm's ``BatchNormAct2d`` and ``Conv2dSame``, an ``RmsNorm`` of somebody's own: each reads ``self.weight`` and a few
numbers and computes something we need not know, as long as it treats units one by one or hands the weight to a
convolution as it is (the trace has checked that). For the length of a call those names answer with what ``take`` gives.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from ..ops import store_, take
from ..slices import Axis, Take
from . import mixing as _mixing
from . import unitwise
from .base import Sliced, adopt

_MIXING = {nn.Linear: _mixing.Linear, nn.Conv1d: _mixing.Conv1d, nn.Conv2d: _mixing.Conv2d, nn.Conv3d: _mixing.Conv3d}
_NUMBERS = ("normalized_shape", "num_features", "num_channels", "num_groups")


def mixing_base(plain: type[nn.Module]) -> Any:
    """The sliced class whose roles a subclass of a linear layer or convolution with its own forward has, if any."""
    return next((made for base, made in _MIXING.items() if issubclass(plain, base)), None)


def is_unitwise(module: nn.Module) -> bool:
    """Whether all a module holds of its own are vectors (or vectors with dimensions of size 1 around them)."""
    held = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    return bool(held) and all(sum(n > 1 for n in t.shape) <= 1 and t.dim() <= 4 for t in held)


class Borrowed(Sliced):
    """A layer that keeps its own forward."""

    _shown: dict[str, Any] | None
    _unit_dim: int
    """Dimension of the input along which the units of a unitwise layer lie."""

    def bind(self, axes: dict[str, Axis]) -> None:
        """The trace has matched sizes already."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        shown = self.show(x)
        if shown is None:
            return type(self)._plain.forward(self, x, *args, **kwargs)  # type: ignore[arg-type]
        self._shown = shown
        try:
            y = type(self)._plain.forward(self, x, *args, **kwargs)  # type: ignore[arg-type]
        finally:
            self._shown = None
        self.keep(shown)
        return y

    def show(self, x: Tensor) -> dict[str, Any] | None:
        """What the forward shall see instead of its full parameters; ``None`` to leave them."""
        axis = self._arrived("unit", x.shape[self._unit_dim])
        if axis is None:
            return None
        shown: dict[str, Any] = {}
        for name, taken in self.takes().items():
            shown[name] = take(self._found(name), taken, leaf=self._gradient_leaves.get(name))
        for name in _NUMBERS:
            value = self.__dict__.get(name)
            if value is not None:
                shown[name] = _smaller(name, value, axis)
        return shown

    def takes(self) -> dict[str, Take]:
        axis = self.axes["unit"]
        held = (*self._parameters.items(), *self._buffers.items())  # type: ignore[attr-defined]
        return {
            name: Take(axis) if t.shape[0] == axis.size else Take(None, axis)
            for name, t in held
            if t is not None and axis.size in t.shape
        }

    def keep(self, shown: dict[str, Any]) -> None:
        """Write changed statistics back."""
        if self.training:
            for name, t in self._buffers.items():  # type: ignore[attr-defined]
                if name in shown and t.dim() == 1 and t.is_floating_point():
                    store_([t], [shown[name]], self.axes["unit"])


class BorrowedMixing(Borrowed):
    """The same for a linear layer or convolution: comes before its sliced class, whose arithmetic it uses."""

    def takes(self) -> dict[str, Take]:
        return super(Borrowed, self).takes()

    def show(self, x: Tensor) -> dict[str, Any] | None:
        parts = self._parts(x)  # type: ignore[attr-defined]
        return None if parts is None else dict(zip(("weight", "bias", "groups"), parts, strict=False))


def _smaller(name: str, value: Any, axis: Axis) -> Any:
    if name == "num_groups":
        return value if value == axis.blocks else axis.blocks * axis.slice.width
    if name == "normalized_shape":
        return (axis.width,) if tuple(value) == (axis.size,) else value
    return axis.width if value == axis.size else value


def borrow_(module: Any, axes: dict[str, Axis], dim: int) -> nn.Module:
    """Give a layer with a forward of its own slices, in place."""
    mixing = mixing_base(type(module))
    if mixing is not None:
        mixing.bind(module, axes)
    elif isinstance(module, nn.GroupNorm):
        unitwise.GroupNorm.bind(module, axes)  # type: ignore[arg-type]
    names = tuple(n for n in (*module._parameters, *module._buffers, *_NUMBERS, "groups") if hasattr(module, n))
    module._shown, module._unit_dim = None, dim
    module._own = {n: vars(module)[n] for n in names if n in vars(module)}  # properties of these names will hide them
    plain: Any = type(module)
    adopt(module, _borrowing(plain, mixing, names), axes)
    return module  # type: ignore[no-any-return]


@functools.cache
def _borrowing(plain: Any, mixing: Any, names: tuple[str, ...]) -> type[nn.Module]:
    bases = (Borrowed, plain) if mixing is None else (BorrowedMixing, mixing, plain)
    body: dict[str, Any] = {name: _property(name) for name in names}
    body |= {"_plain": plain, "__doc__": plain.__doc__, "__reduce_ex__": _reduce}
    return type(f"Sliced{plain.__name__}", bases, body)


def _property(name: str) -> property:
    def get(self: Any) -> Any:
        if self._shown is not None and name in self._shown:
            return self._shown[name]
        for held in (self._parameters, self._buffers):
            if name in held:
                return held[name]
        return self._own[name]

    def put(self: Any, value: Any) -> None:
        if name in self._buffers:
            self._buffers[name] = value
        else:
            self._own[name] = self.__dict__[name] = value

    return property(get, put)


def _reduce(self: Any, protocol: Any) -> Any:
    names = tuple(n for n, v in vars(type(self)).items() if isinstance(v, property))
    return _rebuild, (type(self)._plain, names), self.__getstate__()


def _rebuild(plain: Any, names: tuple[str, ...]) -> nn.Module:
    made = _borrowing(plain, mixing_base(plain), names)
    return made.__new__(made)

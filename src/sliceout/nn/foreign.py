"""Layers of other people's classes: their own forward runs, and some attributes answer with something else meanwhile.

timm's ``BatchNormAct2d`` and ``Conv2dSame``, an ``RmsNorm`` of somebody's own: each reads ``self.weight`` and a few
numbers and computes something we need not know, as long as it treats units one by one or hands the weight to a
convolution as it is (the trace has checked that). For the length of a call those names answer with what ``take`` gives.
``attention_numbers`` has the other case: numbers alone, for as long as the layer trains.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..ops import store_, take
from ..slices import Axis, Take
from . import mixing, unitwise
from .base import Sliced, adopt, sliced_subclass

NUMBERS = ("normalized_shape", "num_features", "num_channels", "num_groups")


def mixing_base(plain: type[nn.Module]) -> Any:
    """The sliced class whose roles a subclass of a linear layer or convolution with its own forward has, if any."""
    return next((made for made in mixing.LAYERS if issubclass(plain, made._plain)), None)


def is_unitwise(module: nn.Module) -> bool:
    """Whether all a module holds of its own are vectors (or vectors with dimensions of size 1 around them)."""
    held = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    return bool(held) and all(sum(n > 1 for n in t.shape) <= 1 and t.dim() <= 4 for t in held)


class Substituting(Sliced):
    """A layer some of whose attributes are substituted while it is sliced.

    What they were stays where it was, in ``__dict__``, ``_parameters`` or ``_buffers``, hidden by properties.
    """

    _kept_for_slices = (*Sliced._kept_for_slices, "_originals")

    _substituted: tuple[str, ...]
    """The names of these attributes; a class has a property for each."""

    _substitutes: dict[str, Any] | None
    """What those among them that are live answer with now."""

    _originals: dict[str, Any]
    """What the properties hide in ``__dict__``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls).get("_substituted", ()):
            setattr(cls, name, _property(name))


def _property(name: str) -> property:
    def get(self: Any) -> Any:
        substitutes = self._substitutes
        if substitutes is not None and name in substitutes:
            return substitutes[name]
        for held in (self._parameters, self._buffers):
            if name in held:
                return held[name]
        return self._originals[name]

    def put(self: Any, value: Any) -> None:
        if name in self._buffers:
            self._buffers[name] = value
        else:
            self._originals[name] = self.__dict__[name] = value

    return property(get, put)


def substitute_(module: Any, axes: dict[str, Axis], names: tuple[str, ...], *sliced: type) -> None:
    """Give ``module`` slices and properties of these names, in place."""
    module._originals = {name: vars(module)[name] for name in names if name in vars(module)}
    adopt(module, sliced_subclass(type(module), *sliced, _substituted=names), axes)


class ForeignLayer(Substituting):
    """A layer that keeps its own forward."""

    _kept_for_slices = (*Substituting._kept_for_slices, "_substitutes", "_unit_dim")
    _unit_dim: int
    """Dimension of the input along which the units of a unitwise layer lie."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        substitutes = self._substitutes_for(x)
        if substitutes is None:
            return type(self)._plain.forward(self, x, *args, **kwargs)  # type: ignore[arg-type]
        self._substitutes = substitutes
        try:
            y = type(self)._plain.forward(self, x, *args, **kwargs)  # type: ignore[arg-type]
        finally:
            self._substitutes = None
        if self.training:
            for name, t in self._buffers.items():  # type: ignore[attr-defined]
                if name in substitutes and t.dim() == 1 and t.is_floating_point():  # statistics, which may have changed
                    store_([t], [substitutes[name]], self.axes["unit"])
        return y

    def _substitutes_for(self, x: Tensor) -> dict[str, Any] | None:
        """What the forward shall see instead of its full parameters; ``None`` to leave them."""
        axis = self._arrived("unit", x.shape[self._unit_dim])
        if axis is None:
            return None
        shown: dict[str, Any] = {}
        for name, taken in self.takes().items():
            shown[name] = take(self._found(name), taken, leaf=self._gradient_leaves.get(name))
        for name in NUMBERS:
            value = self.__dict__.get(name)
            if value is not None:
                shown[name] = smaller(name, value, axis)
        return shown

    def takes(self) -> dict[str, Take]:
        axis = self.axes["unit"]
        held = (*self._parameters.items(), *self._buffers.items())  # type: ignore[attr-defined]
        return {
            name: Take(axis) if t.shape[0] == axis.size else Take(None, axis)
            for name, t in held
            if t is not None and axis.size in t.shape
        }


class ForeignMixing(ForeignLayer):
    """The same for a linear layer or convolution: comes before its sliced class, whose arithmetic it uses."""

    def takes(self) -> dict[str, Take]:
        return super(Substituting, self).takes()

    def _substitutes_for(self, x: Tensor) -> dict[str, Any] | None:
        parts = self._parts(x)  # type: ignore[attr-defined]
        return None if parts is None else dict(zip(("weight", "bias", "groups"), parts, strict=False))


def smaller(name: str, value: Any, axis: Axis) -> Any:
    """What a number of a unitwise layer (one of ``NUMBERS``) is while ``axis`` is sliced."""
    if name == "num_groups":
        return value if value == axis.blocks else axis.blocks * axis.slice.width
    if name == "normalized_shape":
        return (axis.width,) if tuple(value) == (axis.size,) else value
    return axis.width if value == axis.size else value


def slice_foreign_(module: Any, axes: dict[str, Axis], dim: int) -> nn.Module:
    """``factory.give_slices_`` for a layer with a forward of its own."""
    base = mixing_base(type(module))
    if base is not None:
        base.bind(module, axes)
    elif isinstance(module, nn.GroupNorm):
        unitwise.GroupNorm.bind(module, axes)  # type: ignore[arg-type]
    names = tuple(n for n in (*module._parameters, *module._buffers, *NUMBERS, "groups") if hasattr(module, n))
    module._substitutes, module._unit_dim = None, dim
    substitute_(module, axes, names, *((ForeignLayer,) if base is None else (ForeignMixing, base)))
    return module  # type: ignore[no-any-return]

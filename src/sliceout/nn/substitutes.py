"""Attributes that answer with something else while a layer is sliced, so that its own code runs unchanged.

What they were stays where it was, in the layer's ``__dict__``, ``_parameters`` or ``_buffers``, hidden by properties.
"""

from __future__ import annotations

from typing import Any

from ..slices import Axis
from .base import Sliced, adopt, sliced_subclass


class Substituting(Sliced):
    """A layer some of whose attributes are substituted."""

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

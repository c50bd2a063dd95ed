"""From plain layers to sliced ones and back, in place."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import drawing
from .base import ITS_OWN, Sliced, _argument, _axes, adopt, place_after_loading
from .mixing import Conv1D, Conv1d, Conv2d, Conv3d, Linear
from .unitwise import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    GroupNorm,
    LayerNorm,
    LayerScale,
    PReLU,
    RMSNorm,
)

_SLICED = (
    Linear, Conv1d, Conv2d, Conv3d, BatchNorm1d, BatchNorm2d, BatchNorm3d, GroupNorm, LayerNorm, RMSNorm, PReLU,
    Dropout, Dropout1d, Dropout2d, Dropout3d,
)  # fmt: skip
_DUCKS = {("transformers", "Conv1D"): Conv1D, ("timm", "LayerScale"): LayerScale}  # by name: the core needs neither


def sliced_class(plain: type[nn.Module]) -> type[nn.Module] | None:
    """The sliced form of a layer class, or ``None`` if there is none.

    A subclass of a torch layer qualifies if it computes what that layer does, that is, leaves ``forward`` alone.
    """
    if plain in _made:
        return _made[plain]
    if issubclass(plain, Sliced):
        return None
    for sliced in _SLICED:
        base: Any = sliced._plain
        if plain is base:
            return sliced
        if issubclass(plain, base) and all(
            getattr(plain, f, None) is getattr(base, f, None) for f in ("forward", "_conv_forward")
        ):
            return _make(plain, sliced)
    duck = _DUCKS.get((plain.__module__.partition(".")[0], plain.__name__))
    return _make(plain, duck) if duck is not None else None


_made: dict[type[nn.Module], Any] = {}


def _make(plain: type[nn.Module], sliced: Any) -> type[nn.Module]:
    _made[plain] = type(f"Sliced{plain.__name__}", (sliced, plain), {"_plain": plain, "__doc__": sliced.__doc__})
    return _made[plain]


def _rebuild(plain: type[nn.Module]) -> nn.Module:
    made = sliced_class(plain)
    assert made is not None
    return made.__new__(made)


def slice_(module: nn.Module, *, in_slice: Any = None, out_slice: Any = None, slice: Any = None) -> nn.Module:
    """Give a plain layer slices, in place: the same object, parameters and keys under a sliced class.

    Args:
        module: a layer of a kind listed in this module.
        in_slice, out_slice: a :class:`Slice` or :class:`Axis`, for layers that mix units (linear, convolution).
        slice: the same for layers that treat each unit by itself (norms, PReLU, layer scale).
    """
    name = type(module).__name__
    if isinstance(module, Sliced):
        raise ValueError(f"{name} is sliced already: call plain_ on it first")
    made: Any = sliced_class(type(module))
    if made is None:
        known = sorted(c.__name__ for c in (*_SLICED, *_DUCKS.values()))
        raise TypeError(f"{name} has no sliced form: there is one for {', '.join(known)}")
    axes = _axes({"in": in_slice, "out": out_slice, "unit": slice})
    if not axes or not axes.keys() <= set(made.roles):
        given = ", ".join(_argument(role) for role in axes) or "no slice"
        raise TypeError(f"{name} was given {given}: it takes {' and '.join(_argument(r) for r in made.roles)}")
    made.bind(module, axes)
    adopt(module, made, axes)
    return module


_KEPT_BESIDE = ("_shown", "_unit_dim", "_own", "_numbers", "_projection")
"""What foreign layers and attention modules keep beside their slices."""


def plain_(module: nn.Module) -> nn.Module:
    """Take the slices off a layer, whichever way it got them: the original class and attributes again, in place."""
    if not isinstance(module, Sliced):
        raise TypeError(f"{type(module).__name__} is not sliced")
    plain: Any = type(module)._plain
    if plain is nn.Module or "_plain" not in vars(type(module)):  # a subclass of a sliced layer is more than that layer
        raise TypeError(f"{type(module).__name__} was made sliced and has no plain form to return to")
    drawing.unregister(module)
    del module.axes
    for name in (*ITS_OWN, *_KEPT_BESIDE):
        vars(module).pop(name, None)
    hooks: Any = module._load_state_dict_post_hooks
    for key in [k for k, hook in hooks.items() if hook is place_after_loading]:
        del hooks[key]
    module.__class__ = plain
    return module

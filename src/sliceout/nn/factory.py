"""From plain layers to sliced ones and back, in place."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import drawing
from ..slices import Axis
from . import mixing, unitwise
from .attention import MultiheadAttention
from .base import Sliced, _argument, _axes, adopt, sliced_subclass
from .foreign import slice_foreign_

_SLICED = (*mixing.LAYERS, *unitwise.LAYERS)
_DUCKS = {("transformers", "Conv1D"): mixing.Conv1D, ("timm", "LayerScale"): unitwise.LayerScale}
"""By library and name: the core needs neither."""


def sliced_class(plain: type[nn.Module]) -> type[nn.Module] | None:
    """The sliced form of a layer class, or ``None`` if there is none.

    A subclass of a torch layer qualifies if it computes what that layer does, that is, leaves ``forward`` alone.
    """
    if issubclass(plain, Sliced):
        return None
    for sliced in _SLICED:
        base: Any = sliced._plain
        same = (getattr(plain, f, None) is getattr(base, f, None) for f in ("forward", "_conv_forward"))
        if issubclass(plain, base) and all(same):
            return sliced if plain is base else sliced_subclass(plain, sliced)
    duck = _DUCKS.get((plain.__module__.partition(".")[0], plain.__name__))
    return None if duck is None else sliced_subclass(plain, duck)


def _class_for(module: nn.Module) -> Any:
    """The sliced class for a module, torch's attention included, which has roles of its own that no trace finds."""
    if isinstance(module, Sliced):
        raise ValueError(f"{type(module).__name__} is sliced already: call plain_ on it first")
    return MultiheadAttention if type(module) is nn.MultiheadAttention else sliced_class(type(module))


def slice_(module: nn.Module, **slices: Any) -> nn.Module:
    """Give a plain layer slices, in place: the same object, parameters and keys under a sliced class.

    Args:
        module: a layer of a kind that ``sliceout.nn`` has.
        slices: a :class:`Slice` or :class:`Axis` by the argument that the sliced class has for it: ``in_slice`` and
            ``out_slice`` for layers that mix units (linear, convolution), ``slice`` for those that treat each unit by
            itself (norms, PReLU, dropout), ``qk_slice`` and ``v_slice``, or ``heads_slice``, for attention.
    """
    name, made = type(module).__name__, _class_for(module)
    if made is None:
        known = sorted(c.__name__ for c in (*_SLICED, MultiheadAttention, *_DUCKS.values()))
        raise TypeError(f"{name} has no sliced form: there is one for {', '.join(known)}")
    roles = {_argument(role): role for role in made.roles}
    given = {argument: s for argument, s in slices.items() if s is not None}
    if not given or not given.keys() <= roles.keys():
        raise TypeError(f"{name} was given {', '.join(given) or 'no slice'}: it takes {' and '.join(roles)}")
    return give_slices_(module, _axes({roles[argument]: s for argument, s in given.items()}))


def give_slices_(module: nn.Module, axes: dict[str, Axis], dim: int = 1) -> nn.Module:
    """Give any plain module that a trace found fit for them the slices of these roles, in place.

    Args:
        module: of a kind that :func:`slice_` knows, or a layer with a forward of its own.
        axes: by role.
        dim: dimension of the input along which the units lie, for a unitwise layer with a forward of its own.
    """
    made = _class_for(module)
    if made is None:
        return slice_foreign_(module, axes, dim)
    made.bind(module, axes)
    adopt(module, made, axes)
    return module


def plain_(module: nn.Module) -> nn.Module:
    """Take the slices of a module away, in place: the original class and attributes again."""
    if not isinstance(module, Sliced):
        raise TypeError(f"{type(module).__name__} is not sliced")
    plain: Any = type(module)._plain
    if plain is nn.Module or "_plain" not in vars(type(module)):  # a subclass of a sliced layer is more than that layer
        raise TypeError(f"{type(module).__name__} was made sliced and has no plain form to return to")
    drawing.unregister(module)
    for name in (*module._kept_for_slices, *module._made_anew):
        vars(module).pop(name, None)
    hooks: Any = module._load_state_dict_post_hooks
    for key in [k for k, hook in hooks.items() if hook is Sliced._place]:
        del hooks[key]
    module.__class__ = plain
    return module

"""The floor: a plain network built at the widths that SliceOut computes. No method that slices can be faster.

It is made from the converted network itself: every sliced layer is cut down to the units it keeps now and becomes
the plain layer it was, so the floor has exactly the widths of the slices, for any network that ``convert_`` knows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..nn.base import Sliced
from ..nn.factory import plain_
from ..nn.foreign import NUMBERS, AttentionNumbers, RotaryValues, smaller
from ..slices import Axis
from . import UserError
from .floor_attention import narrow_attention_

_NUMBERS = {"in": ("in_features", "in_channels", "nx"), "out": ("out_features", "out_channels", "nf")}
"""How layers that mix units call their sizes."""


def narrow_(model: nn.Module) -> nn.Module:
    """Cut every sliced layer of a converted model down to the units it keeps, for good.

    Raises:
        UserError: if a layer cannot be cut.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, Sliced):
            try:
                _cut(module, module.axes)
            except (TypeError, NotImplementedError) as error:
                raise UserError(f"no floor for this network: {name}: {error}") from error
    return model


def _cut(module: Any, axes: dict[str, Axis]) -> None:
    if isinstance(module, nn.MultiheadAttention):
        return narrow_attention_(module, axes)
    if isinstance(module, AttentionNumbers):
        return _fix_numbers(module)
    if isinstance(module, RotaryValues):
        return _fix_values(module, axes["unit"])
    plain_(module)
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = 0.0  # it rested
    elif "unit" in axes:
        axis = axes["unit"]
        held = (*module._parameters.items(), *module._buffers.items())
        _keep(
            module,
            {n: {t.shape.index(axis.size): axis.kept} for n, t in held if t is not None and axis.size in t.shape},
        )
        for name in (n for n in NUMBERS if n in vars(module)):
            setattr(module, name, smaller(name, getattr(module, name), axis))
    else:
        _cut_mixing(module, axes)


def _fix_numbers(module: Any) -> None:
    """What attention code counts by (``head_dim``, ``scale``) is what it was while the module was sliced, for good."""
    numbers = dict(module.train()._substitutes or {})
    plain_(module)
    vars(module).update(numbers)


def _fix_values(module: Any, axis: Axis) -> None:
    """The rewritten forward stays: values have a width of their own, which queries and keys do not share."""
    forward, size, width = type(module).forward, axis.slice.size, axis.slice.width

    def by_head(self: nn.Module, values: Tensor, *shape: Any) -> Tensor:
        sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        return values.view([*sizes[:-1], width if sizes[-1] == size else sizes[-1]])

    plain: Any = type(plain_(module))
    module.__class__ = type(f"Narrow{plain.__name__}", (plain,), {"forward": forward, "_by_head": by_head})


def _cut_mixing(module: Any, axes: dict[str, Axis]) -> None:
    groups = getattr(module, "groups", 1)
    if groups > 1 and (groups != module.in_channels or len(axes) < 2):
        raise NotImplementedError("a convolution in groups of several channels")
    rows, cols = ("in", "out") if hasattr(module, "nx") else ("out", "in")
    index = {0: axes[rows].kept} if rows in axes else {}
    if cols in axes and groups == 1:
        index[1] = axes[cols].kept
    _keep(module, {"weight": index, "bias": {0: axes["out"].kept} if "out" in axes else {}})
    if groups > 1:
        module.groups = axes["in"].width
    for role, axis in axes.items():
        for number in (n for n in _NUMBERS[role] if hasattr(module, n)):
            setattr(module, number, axis.width)


def _keep(module: nn.Module, parts: dict[str, dict[int, Tensor]]) -> None:
    """Replace parameters and buffers by the kept entries along some dimensions."""
    for name, dims in parts.items():
        full = getattr(module, name, None)
        if not isinstance(full, Tensor):
            continue
        small = full.detach()
        for dim, kept in dims.items():
            small = small.index_select(dim, kept.to(small.device))
        if isinstance(full, nn.Parameter):
            setattr(module, name, nn.Parameter(small.contiguous(), requires_grad=full.requires_grad))
        else:
            module._buffers[name] = small.contiguous()

"""Sliced layers: torch's own layers that use the kept part of their parameters while they train.

Each class is the plain layer plus one or two slices. Written by hand::

    hidden = sliceout.Slice(2048, rate=0.5)
    self.fc1 = sliceout.nn.Linear(784, 2048, out_slice=hidden)
    self.norm = sliceout.nn.BatchNorm1d(2048, slice=hidden)
    self.fc2 = sliceout.nn.Linear(2048, 10, in_slice=hidden)

or made from an existing layer in place, which keeps its parameters, its keys and its identity: :func:`slice_`.

A *producer* (``out_slice``) starts a slice while it is in training mode. Whatever follows goes by the width of what
arrives: full input, full layer. So ``eval()`` runs the plain code of the plain class, and a frozen batch norm (in
``eval()`` inside a network that trains) still lines up.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import draws
from .ops import by_views, store_, take
from .slices import Axis, Joint, Slice

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1D",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "GroupNorm",
    "LayerNorm",
    "LayerScale",
    "Linear",
    "PReLU",
    "RMSNorm",
    "plain_",
    "slice_",
]


class Sliced:
    """What all sliced layers share: where their slices are kept, moved, saved and printed."""

    _plain: type[nn.Module]
    """The class this one adds slices to; :func:`plain_` goes back to it."""

    roles: tuple[str, ...] = ("unit",)
    """The axes this layer has; see ``axes``."""

    training: bool
    axes: dict[str, Axis]
    """The slices by role: ``in`` and ``out``, or ``unit`` for a layer that treats each unit by itself."""

    def bind(self, axes: dict[str, Axis]) -> None:
        """Accept the slices; raises before anything is changed."""
        raise NotImplementedError

    @property
    def slices(self) -> list[Slice]:
        return list(dict.fromkeys(s for a in self.axes.values() for s in a.slices))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        module = super()._apply(*args, **kwargs)  # type: ignore[misc]
        self._place()
        return module

    def _place(self) -> None:
        """Keep the slices where the parameters are; a norm without any leaves that to its neighbours."""
        for t in itertools.chain(self.parameters(), self.buffers()):  # type: ignore[attr-defined]
            for s in self.slices:
                s.to(t.device)
            return

    def train(self, mode: bool = True) -> Any:
        if self.training and not mode and "out" in self.axes and not self.axes["out"].slice.family.drawn:
            draws.notice(self.axes["out"].slice.family, self.weight, forward=False)  # type: ignore[attr-defined]
        return super().train(mode)  # type: ignore[misc]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        draws.watch(self)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = type(self)._plain
        if _made.get(plain) is type(self):  # a class made on the fly cannot be pickled by name
            return _rebuild, (plain,), self.__getstate__()
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = type(self).__new__(type(self))  # as parametrized layers do it, which refuse to pickle
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        metadata = getattr(destination, "_metadata", None)  # beside the keys: an unconverted model loads them as ever
        if metadata is not None:
            metadata[prefix[:-1]]["sliceout"] = {
                role: [draws.position(s) for s in a.slices] for role, a in self.axes.items()
            }

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)  # type: ignore[misc]
        self._place()  # assign=True may have brought parameters of another device
        for s in self.slices:
            s.family.witness = None  # loading is not training: see draws.notice
        for role, positions in local_metadata.get("sliceout", {}).items():
            if role in self.axes:
                for s, position in zip(self.axes[role].slices, positions, strict=False):
                    draws.seek(s, position)

    def extra_repr(self) -> str:
        axes = ", ".join(f"{_argument(role)}={a}" for role, a in self.axes.items())
        plain = super().extra_repr()  # type: ignore[misc]
        return f"{plain}, {axes}" if plain else axes

    # -- which slices are live in this call ----------------------------------------------------------------------------

    def _arrived(self, role: str, width: int) -> Axis | None:
        """The axis if the input comes in sliced, ``None`` if it comes in full."""
        axis = self.axes.get(role)
        return axis if axis is not None and width == axis.width and width != axis.size else None

    def _started(self) -> Axis | None:
        """The output axis if this call makes it sliced."""
        axis = self.axes.get("out")
        if axis is None or not self.training or not axis.slice.sliced:  # type: ignore[attr-defined]
            return None
        if not torch.compiler.is_compiling() and not axis.slice.family.drawn:
            draws.notice(axis.slice.family, self.weight)  # type: ignore[attr-defined]
        return axis


# -- layers that mix units: weights with rows and columns --------------------------------------------------------------


class _Mixing(Sliced):
    """A weight whose one dimension is the ``out`` axis and whose other is the ``in`` axis."""

    roles = ("in", "out")
    transposed = False
    weight: Tensor
    bias: Any

    def _small(self, out: Axis | None, into: Axis | None, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """The kept part of weight and bias, normalisation included, in the dtype the product will run in."""
        dtype = None if self.weight.dtype == torch.float64 else _autocast_dtype(like)  # autocast leaves float64 alone
        scale_out = out is not None and out.slice.fold == "producer"
        scale_in = into is not None and into.slice.fold == "consumer"
        if self.transposed:
            weight = take(self.weight, into, out, scale_rows=scale_in, scale_cols=scale_out, dtype=dtype)
        else:
            weight = take(self.weight, out, into, scale_rows=scale_out, scale_cols=scale_in, dtype=dtype)
        bias = None if self.bias is None else take(self.bias, out, scale_rows=scale_out, dtype=dtype)
        return weight, bias


class Linear(_Mixing, nn.Linear):
    """``nn.Linear`` with slices on its input, its output or both.

    Example:
        >>> hidden = Slice(8, rate=0.5)
        >>> Linear(3, 8, out_slice=hidden)(torch.zeros(5, 3)).shape
        torch.Size([5, 4])
    """

    _plain = nn.Linear

    def __init__(self, *args: Any, in_slice: Any = None, out_slice: Any = None, **kwargs: Any) -> None:
        nn.Linear.__init__(self, *args, **kwargs)
        _attach(self, {"in": in_slice, "out": out_slice})

    def bind(self, axes: dict[str, Axis]) -> None:
        _check_size(self, axes.get("in"), self.in_features, "in_features")
        _check_size(self, axes.get("out"), self.out_features, "out_features")

    def forward(self, x: Tensor) -> Tensor:
        out, into = self._started(), self._arrived("in", x.shape[-1])
        if out is None and into is None:
            return super().forward(x)
        if by_views(x) and _autocast_dtype(x) is None:
            return _linear_by_views(x, self.weight, self.bias, out, into, self.transposed)
        return F.linear(x, *self._small(out, into, x))

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of this call; ``None`` if nothing is sliced."""
        out, into = self._started(), self._arrived("in", x.shape[-1])
        return None if out is None and into is None else self._small(out, into, x)


class Conv1D(_Mixing, nn.Module):
    """GPT-2's ``Conv1D(nf, nx)``: a linear layer whose weight is stored as ``[nx, nf]``."""

    _plain = nn.Module
    transposed = True

    def __init__(self, nf: int, nx: int, *, in_slice: Any = None, out_slice: Any = None) -> None:
        nn.Module.__init__(self)
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)
        _attach(self, {"in": in_slice, "out": out_slice})

    def bind(self, axes: dict[str, Axis]) -> None:
        _check_size(self, axes.get("in"), self.weight.shape[0], "nx")
        _check_size(self, axes.get("out"), self.weight.shape[1], "nf")

    def forward(self, x: Tensor) -> Tensor:
        out, into = self._started(), self._arrived("in", x.shape[-1])
        if by_views(x) and (out or into) and _autocast_dtype(x) is None:
            return _linear_by_views(x, self.weight, self.bias, out, into, self.transposed)
        weight, bias = self._small(out, into, x)
        y = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)  # type: ignore[arg-type]  # as in transformers
        return y.view(*x.shape[:-1], y.shape[-1])


class _Conv(_Mixing):
    """Convolutions: slices on channels; with ``groups``, either inside every group or whole groups."""

    in_channels: int
    out_channels: int
    groups: int

    def bind(self, axes: dict[str, Axis]) -> None:
        _check_size(self, axes.get("in"), self.in_channels, "in_channels")
        _check_size(self, axes.get("out"), self.out_channels, "out_channels")
        if self.groups == 1 or _whole_groups(axes, self.groups):
            return
        for role, axis in axes.items():
            if axis.blocks != self.groups:
                raise ValueError(
                    f"{role}_slice={axis} does not fit groups={self.groups}: slice inside every group with "
                    f"axis(blocks={self.groups}), or whole groups with one Slice({self.groups}) for input and output"
                )

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor | None, int] | None:
        """Weight, bias and groups of this call; ``None`` if nothing is sliced."""
        into, groups = self._arrived("in", x.shape[1 - self.weight.dim()]), self.groups  # there may be no batch
        if groups > 1 and _whole_groups(self.axes, groups):
            if into is None:
                return None
            whole, groups = self.axes["out"], into.blocks * into.slice.width
            return take(self.weight, whole), None if self.bias is None else take(self.bias, whole), groups
        out = self._started()
        if out is None and into is None:
            return None
        if into is not None and groups > 1:
            into = into.slice.axis(inner=into.inner)  # every group holds its own columns
        return *self._small(out, into, x), groups

    def forward(self, x: Tensor) -> Tensor:
        parts = self._parts(x)
        if parts is None:
            return super().forward(x)  # type: ignore[misc]
        weight, bias, groups = parts
        if self.padding_mode != "zeros":  # type: ignore[attr-defined]
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)  # type: ignore[attr-defined]
        padding = self.padding if self.padding_mode == "zeros" else 0  # type: ignore[attr-defined]
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
        return convolve(x, weight, bias, self.stride, padding, self.dilation, groups)  # type: ignore[attr-defined]


def _whole_groups(axes: dict[str, Axis], groups: int) -> bool:
    """Depthwise and the like: input and output keep the same whole groups."""
    into, out = axes.get("in"), axes.get("out")
    return (
        into is not None
        and out is not None
        and into.slice is out.slice
        and into.blocks * into.slice.size == out.blocks * out.slice.size == groups
    )


class Conv1d(_Conv, nn.Conv1d):
    """``nn.Conv1d`` with slices on its channels."""

    _plain = nn.Conv1d

    def __init__(self, *args: Any, in_slice: Any = None, out_slice: Any = None, **kwargs: Any) -> None:
        nn.Conv1d.__init__(self, *args, **kwargs)
        _attach(self, {"in": in_slice, "out": out_slice})


class Conv2d(_Conv, nn.Conv2d):
    """``nn.Conv2d`` with slices on its channels.

    Example:
        >>> channels = Slice(8, rate=0.5)
        >>> depthwise = Conv2d(8, 8, 3, groups=8, in_slice=channels, out_slice=channels)
        >>> depthwise(torch.zeros(1, 4, 5, 5)).shape
        torch.Size([1, 4, 3, 3])
    """

    _plain = nn.Conv2d

    def __init__(self, *args: Any, in_slice: Any = None, out_slice: Any = None, **kwargs: Any) -> None:
        nn.Conv2d.__init__(self, *args, **kwargs)
        _attach(self, {"in": in_slice, "out": out_slice})


class Conv3d(_Conv, nn.Conv3d):
    """``nn.Conv3d`` with slices on its channels."""

    _plain = nn.Conv3d

    def __init__(self, *args: Any, in_slice: Any = None, out_slice: Any = None, **kwargs: Any) -> None:
        nn.Conv3d.__init__(self, *args, **kwargs)
        _attach(self, {"in": in_slice, "out": out_slice})


# -- layers that treat every unit by itself ----------------------------------------------------------------------------


class _BatchNorm(Sliced):
    """Batch norm over the kept channels; the running statistics of the others stay as they are."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None

    def bind(self, axes: dict[str, Axis]) -> None:
        _check_size(self, axes.get("unit"), self.num_features, "num_features")  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        axis = self._arrived("unit", x.shape[1])
        if axis is None:
            return super().forward(x)  # type: ignore[misc]
        self._check_input_dim(x)  # type: ignore[attr-defined]
        mean, var, momentum = self.running_mean, self.running_var, self.momentum
        if self.training and self.num_batches_tracked is not None:
            if momentum is None:
                raise ValueError(
                    "momentum=None (a cumulative average) needs every channel in every batch: "
                    "call sliceout.off_(model) before you re-estimate batch-norm statistics"
                )
            self.num_batches_tracked.add_(1)
        if mean is not None and var is not None:
            mean, var = take(mean, axis), take(var, axis)
        weight, bias = (None if p is None else take(p, axis) for p in (self.weight, self.bias))  # type: ignore[attr-defined]
        y = F.batch_norm(x, mean, var, weight, bias, self.training or mean is None, momentum or 0.0, self.eps)  # type: ignore[attr-defined]
        for full, small in ((self.running_mean, mean), (self.running_var, var)):
            if self.training and full is not None and small is not None:
                store_(full, small, axis)
        return y


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` over a sliced axis."""

    _plain = nn.BatchNorm1d

    def __init__(self, *args: Any, slice: Any = None, **kwargs: Any) -> None:
        nn.BatchNorm1d.__init__(self, *args, **kwargs)
        _attach(self, {"unit": slice})


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` over a sliced axis."""

    _plain = nn.BatchNorm2d

    def __init__(self, *args: Any, slice: Any = None, **kwargs: Any) -> None:
        nn.BatchNorm2d.__init__(self, *args, **kwargs)
        _attach(self, {"unit": slice})


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` over a sliced axis."""

    _plain = nn.BatchNorm3d

    def __init__(self, *args: Any, slice: Any = None, **kwargs: Any) -> None:
        nn.BatchNorm3d.__init__(self, *args, **kwargs)
        _attach(self, {"unit": slice})


class GroupNorm(Sliced, nn.GroupNorm):
    """``nn.GroupNorm`` over a slice of whole groups, or over the same slice inside every group."""

    _plain = nn.GroupNorm

    def __init__(self, *args: Any, slice: Any = None, **kwargs: Any) -> None:
        nn.GroupNorm.__init__(self, *args, **kwargs)
        _attach(self, {"unit": slice})

    def bind(self, axes: dict[str, Axis]) -> None:
        axis = axes["unit"]
        _check_size(self, axis, self.num_channels, "num_channels")
        if self.num_groups not in (axis.blocks, axis.blocks * axis.slice.size):
            raise ValueError(
                f"slice={axis} cuts through the {self.num_groups} groups of this norm: slice whole groups with "
                f"Slice({self.num_groups}).axis(inner={self.num_channels // self.num_groups}), "
                f"or inside every group with axis(blocks={self.num_groups})"
            )

    def forward(self, x: Tensor) -> Tensor:
        axis = self._arrived("unit", x.shape[1])
        if axis is None:
            return super().forward(x)
        groups = self.num_groups if axis.blocks == self.num_groups else axis.blocks * axis.slice.width
        weight, bias = (None if p is None else take(p, axis) for p in (self.weight, self.bias))
        return F.group_norm(x, groups, weight, bias, self.eps)


class LayerNorm(Sliced, nn.LayerNorm):
    """``nn.LayerNorm`` over a sliced last dimension: mean and variance are those of the kept units."""

    _plain = nn.LayerNorm

    def __init__(self, *args: Any, slice: Any = None, **kwargs: Any) -> None:
        nn.LayerNorm.__init__(self, *args, **kwargs)
        _attach(self, {"unit": slice})

    def bind(self, axes: dict[str, Axis]) -> None:
        _check_last(self, axes["unit"], self.normalized_shape)

    def forward(self, input: Tensor) -> Tensor:
        axis = self._arrived("unit", input.shape[-1])
        if axis is None:
            return super().forward(input)
        weight, bias = (None if p is None else take(p, axis) for p in (self.weight, self.bias))
        return F.layer_norm(input, (axis.width,), weight, bias, self.eps)


class RMSNorm(Sliced, nn.RMSNorm):
    """``nn.RMSNorm`` over a sliced last dimension: the mean square is that of the kept units."""

    _plain = nn.RMSNorm

    def __init__(self, *args: Any, slice: Any = None, **kwargs: Any) -> None:
        nn.RMSNorm.__init__(self, *args, **kwargs)
        _attach(self, {"unit": slice})

    def bind(self, axes: dict[str, Axis]) -> None:
        _check_last(self, axes["unit"], self.normalized_shape)

    def forward(self, x: Tensor) -> Tensor:
        axis = self._arrived("unit", x.shape[-1])
        if axis is None:
            return super().forward(x)
        return F.rms_norm(x, (axis.width,), None if self.weight is None else take(self.weight, axis), self.eps)


class PReLU(Sliced, nn.PReLU):
    """``nn.PReLU`` with one parameter per unit of a sliced dimension 1."""

    _plain = nn.PReLU

    def __init__(self, *args: Any, slice: Any = None, **kwargs: Any) -> None:
        nn.PReLU.__init__(self, *args, **kwargs)
        _attach(self, {"unit": slice})

    def bind(self, axes: dict[str, Axis]) -> None:
        _check_size(self, axes["unit"], self.num_parameters, "num_parameters")

    def forward(self, input: Tensor) -> Tensor:
        axis = self._arrived("unit", input.shape[1])
        return super().forward(input) if axis is None else F.prelu(input, take(self.weight, axis))


class LayerScale(Sliced, nn.Module):
    """``x * gamma``, one learned factor per unit of the last dimension; also what timm's ``LayerScale`` becomes."""

    _plain = nn.Module

    def __init__(self, dim: int, init_values: float = 1e-5, inplace: bool = False, *, slice: Any = None) -> None:
        nn.Module.__init__(self)
        self.inplace = inplace
        self.gamma = nn.Parameter(torch.full((dim,), init_values))
        _attach(self, {"unit": slice})

    def bind(self, axes: dict[str, Axis]) -> None:
        _check_size(self, axes["unit"], self.gamma.shape[0], "dim")

    def forward(self, x: Tensor) -> Tensor:
        axis = self._arrived("unit", x.shape[-1])
        gamma = self.gamma if axis is None else take(self.gamma, axis)
        return x.mul_(gamma) if self.inplace else x * gamma


class _Dropout(Sliced):
    """A dropout that rests while the units it would drop from are sliced."""

    def bind(self, axes: dict[str, Axis]) -> None:
        """Any slice will do: dropout has no size."""

    def forward(self, x: Tensor) -> Tensor:
        resting = self.training and self.axes["unit"].slice.sliced
        return x if resting else super().forward(x)  # type: ignore[misc, no-any-return]


class Dropout(_Dropout, nn.Dropout):
    """``nn.Dropout`` that rests while its slice is on."""

    _plain = nn.Dropout

    def __init__(self, *args: Any, slice: Any, **kwargs: Any) -> None:
        nn.Dropout.__init__(self, *args, **kwargs)
        _attach(self, {"unit": slice})


class Dropout1d(_Dropout, nn.Dropout1d):
    """``nn.Dropout1d`` that rests while its slice is on."""

    _plain = nn.Dropout1d

    def __init__(self, *args: Any, slice: Any, **kwargs: Any) -> None:
        nn.Dropout1d.__init__(self, *args, **kwargs)
        _attach(self, {"unit": slice})


class Dropout2d(_Dropout, nn.Dropout2d):
    """``nn.Dropout2d`` that rests while its slice is on."""

    _plain = nn.Dropout2d

    def __init__(self, *args: Any, slice: Any, **kwargs: Any) -> None:
        nn.Dropout2d.__init__(self, *args, **kwargs)
        _attach(self, {"unit": slice})


class Dropout3d(_Dropout, nn.Dropout3d):
    """``nn.Dropout3d`` that rests while its slice is on."""

    _plain = nn.Dropout3d

    def __init__(self, *args: Any, slice: Any, **kwargs: Any) -> None:
        nn.Dropout3d.__init__(self, *args, **kwargs)
        _attach(self, {"unit": slice})


# -- from plain to sliced and back -------------------------------------------------------------------------------------

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
        raise TypeError(
            f"{name} has no sliced form: there is one for {', '.join(n for n in __all__ if n[0].isupper())}"
        )
    axes = _axes({"in": in_slice, "out": out_slice, "unit": slice})
    if not axes or not axes.keys() <= set(made.roles):
        given = ", ".join(_argument(role) for role in axes) or "no slice"
        raise TypeError(f"{name} was given {given}: it takes {' and '.join(_argument(r) for r in made.roles)}")
    made.bind(module, axes)
    adopt(module, made, axes)
    return module


def adopt(module: nn.Module, made: type[nn.Module], axes: dict[str, Axis]) -> None:
    """Change the class of ``module`` to a sliced one; ``axes`` must have been checked."""
    module.__class__ = made
    _attach(module, axes, checked=True)


def plain_(module: nn.Module) -> nn.Module:
    """Undo :func:`slice_`: the original class again, in place."""
    if not isinstance(module, Sliced):
        raise TypeError(f"{type(module).__name__} is not sliced")
    plain: Any = type(module)._plain
    if plain is nn.Module or "_plain" not in vars(type(module)):  # a subclass of a sliced layer is more than that layer
        raise TypeError(f"{type(module).__name__} was made sliced and has no plain form to return to")
    draws.unwatch(module)
    del module.axes
    module.__class__ = plain
    return module


def _argument(role: str) -> str:
    return "slice" if role == "unit" else f"{role}_slice"


def _axes(given: dict[str, Any]) -> dict[str, Axis]:
    for role, s in given.items():
        if not isinstance(s, Slice | Axis | Joint | None):
            raise TypeError(f"{_argument(role)}={s!r}: expected a Slice, or an Axis from Slice.axis")
    return {role: s.axis() if isinstance(s, Slice) else s for role, s in given.items() if s is not None}


def _attach(module: Any, given: dict[str, Any], checked: bool = False) -> None:
    axes = _axes(given)
    if not checked and axes:
        module.bind(axes)
    module.axes = axes
    module._place()
    draws.watch(module)


def _check_size(module: Any, axis: Axis | None, expected: int, name: str) -> None:
    if axis is not None and axis.size != expected:
        what = f"slice of size {axis.slice.size}" + (f" (axis of {axis.size})" if axis.size != axis.slice.size else "")
        raise ValueError(f"{what} does not match {name}={expected} of {type(module).__name__}")


def _check_last(module: Any, axis: Axis, shape: tuple[int, ...]) -> None:
    if len(shape) != 1:
        raise ValueError(f"normalized_shape={tuple(shape)}: only a norm over the last dimension alone can be sliced")
    _check_size(module, axis, shape[0], "normalized_shape")


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype autocast would cast the weight to: take writes it directly, so no full-precision copy is made."""
    kind = x.device.type
    if kind == "meta":  # a dry run
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _gain(axis: Axis | Joint) -> float | None:
    """The normalisation if it is one number along the whole axis."""
    gains = {s.gain for s in axis.slices}
    return gains.pop() if len(gains) == 1 else None


def _linear_by_views(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Axis | None, into: Axis | None, transposed: bool
) -> Tensor:
    """Eager CPU: where the normalisation is one number, the product applies it, and no weight is copied at all."""
    out_gain = _gain(out) if out is not None and out.slice.fold == "producer" else 1.0
    in_gain = _gain(into) if into is not None and into.slice.fold == "consumer" else 1.0
    scale_out, scale_in = out_gain is None, in_gain is None
    if transposed:
        small = take(weight, into, out, scale_rows=scale_in, scale_cols=scale_out)
    else:
        small = take(weight, out, into, scale_rows=scale_out, scale_cols=scale_in).t()
    beta = out_gain or 1.0
    alpha = beta * (in_gain or 1.0)
    flat = x.reshape(-1, x.shape[-1])
    if bias is None:
        y = torch.addmm(flat.new_zeros(()), flat, small, beta=0, alpha=alpha)
    else:
        y = torch.addmm(take(bias, out, scale_rows=scale_out), flat, small, beta=beta, alpha=alpha)
    return y.view(*x.shape[:-1], y.shape[-1])

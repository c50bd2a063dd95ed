"""What all sliced layers share, and how a layer is given its slices."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from .. import compact, drawing, stepping
from ..compact import gradient_leaves
from ..ops import GradientLeaf
from ..slices import Axis, Slice
from ..takes import ConcatAxis, Take, parts_of
from . import refusals


class _Signature:
    """What ``help`` shows of a layer's arguments: those of the plain class, then the slices."""

    def __get__(self, layer: Any, kind: Any) -> inspect.Signature | None:
        if layer is not None or kind.__init__ is not Sliced.__init__ or not hasattr(kind, "_plain"):
            return None  # inspect looks for itself
        plain = inspect.signature(kind._plain)
        slices = [inspect.Parameter(_argument(r), inspect.Parameter.KEYWORD_ONLY, default=None) for r in kind.roles]
        return plain.replace(parameters=sorted([*plain.parameters.values(), *slices], key=lambda p: p.kind))


class Sliced:
    """What all sliced layers share: where their slices are kept, moved, saved and printed.

    A layer is made with the arguments of its plain class and one keyword for each of its ``roles``: ``in_slice``,
    ``out_slice``, or ``slice`` for the role ``unit``. Each is a :class:`~sliceout.Slice` or an axis of one.
    """

    __signature__ = _Signature()

    _plain: type[nn.Module]
    """The class this one adds slices to, its last base; :func:`plain_` goes back to it."""

    _name_prefix = "Sliced"
    """How the names of classes begin that ``sliced_subclass`` makes of this one."""

    roles: tuple[str, ...] = ("unit",)
    """The axes this layer has; see ``axes``."""

    sizes: tuple[str, ...] = ()
    """The attributes that say how many units there are, role by role; none where any slice will do."""

    _path = ""
    """The name of the layer in the model that was converted, for errors."""

    _kept_for_slices: tuple[str, ...] = ("axes", "_path")
    """Attributes of a layer that its plain class knows nothing of."""

    _made_anew: tuple[str, ...] = ("_gradient_leaves",)
    """More of them, which a layer makes for itself and a copy of it anew."""

    one_part: str = ""
    """Why its slices have one start for the whole batch; empty if each part of a batch may have its own."""

    training: bool
    axes: dict[str, Axis]
    """The slices by role: ``in`` and ``out``, or ``unit`` for a layer that treats each unit by itself."""

    _gradient_leaves: dict[str, GradientLeaf] = {}  # noqa: RUF012 (replaced, never changed)
    """What receives compact gradients in compiled graphs; see ``sliceout.compact.gradient_leaves``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        plain: Any = cls.__bases__[-1]
        if not issubclass(plain, Sliced) and not hasattr(cls, "_plain"):
            cls._plain = plain

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = {role: kwargs.pop(_argument(role), None) for role in self.roles}
        super().__init__(*args, **kwargs)
        _attach(self, given)

    @classmethod
    def bind(cls, layer: Any, axes: dict[str, Axis]) -> None:
        """Check that the slices fit ``layer``, which may be plain yet, and raise if not."""
        if cls.one_part and any(s.parts > 1 for a in axes.values() for s in a.slices):
            raise ValueError(f"{type(layer).__name__} takes slices with parts=1 only: {cls.one_part}")
        for role, name in zip(cls.roles, cls.sizes, strict=False):
            _check_size(layer, axes.get(role), getattr(layer, name), name)

    def takes(self) -> dict[str, Take]:
        """What is taken of which parameter while all slices are live, as far as its gradient may be compact."""
        return {}

    def taken(self) -> list[tuple[nn.Parameter, Take]]:
        """All parameters that are sliced, compact or not, and what is taken of each."""
        held: dict[str, nn.Parameter | None] = self._parameters  # type: ignore[attr-defined]
        return [(p, t) for name, t in self.takes().items() if (p := held.get(name)) is not None]

    @property
    def slices(self) -> list[Slice]:
        return list(dict.fromkeys(s for a in self.axes.values() for s in a.slices))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        module = super()._apply(*args, **kwargs)  # type: ignore[misc]
        self._place()
        return module

    def _place(self, incompatible_keys: Any = None) -> None:
        """Keep the slices where the parameters are; a norm without any leaves that to its neighbours. Also a hook."""
        for t in itertools.chain(self.parameters(), self.buffers()):  # type: ignore[attr-defined]
            for s in self.slices:
                s.to(t.device)
            break
        gradient_leaves.refresh(self)

    def train(self, mode: bool = True) -> Any:
        if mode and self._gradient_leaves:
            gradient_leaves.refresh(self)  # a parameter may have got hooks
        if self.training and not mode and "out" in self.axes and not self.axes["out"].slice.owner.drawn:
            stepping.check_drawn(self.axes["out"].slice.owner, self.weight, forward=False)  # type: ignore[attr-defined]
        return super().train(mode)  # type: ignore[misc]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        watch(self)  # type: ignore[arg-type]
        gradient_leaves.refresh(self)

    def __getstate__(self) -> dict[str, Any]:
        return self._without_made_anew(super().__getstate__())

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = vars(type(self)).get("_made_from")
        return super().__reduce_ex__(protocol) if parts is None else (_empty_layer, parts, self.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = type(self).__new__(type(self))  # as parametrized layers do it, which refuse to pickle
        copied.__setstate__(copy.deepcopy(self._without_made_anew(self.__dict__), memo))
        return copied

    def _without_made_anew(self, state: Any) -> dict[str, Any]:
        return {key: value for key, value in state.items() if key not in self._made_anew}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        metadata = getattr(destination, "_metadata", None)  # beside the keys: an unconverted model loads them as ever
        if metadata is not None:
            metadata[prefix[:-1]]["sliceout"] = {
                role: [
                    {"seed": s.seed, "stream": s.stream, "step": s.owner.step, "entered": s.entered} for s in a.slices
                ]
                for role, a in self.axes.items()
            }

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)  # type: ignore[misc]
        self._place()  # assign=True may have brought parameters of another device
        for s in self.slices:
            s.owner.observed = None  # loading is not training: see stepping.check_drawn
        for role, positions in local_metadata.get("sliceout", {}).items():
            if role in self.axes:
                for s, position in zip(self.axes[role].slices, positions, strict=False):
                    s.seed, s.stream, s.entered = position["seed"], position["stream"], position.get("entered", ())
                    s.owner.seek_(position["step"])

    def extra_repr(self) -> str:
        axes = ", ".join(f"{_argument(role)}={a}" for role, a in self.axes.items())
        plain = super().extra_repr()  # type: ignore[misc]
        return f"{plain}, {axes}" if plain else axes

    # -- tools of torch that read or replace layers: they would fail in other words, or pass over sliced ones ----------

    def __prepare_scriptable__(self) -> Any:
        raise refusals.refused_by(self, "torch.jit.script")

    def _refuse_quantisation(self, value: Any) -> None:
        raise refusals.refused_by(self, "torch.ao.quantization")

    qconfig = property(None, _refuse_quantisation)  # which quantisation sets before all else

    def _found(self, name: str) -> Any:
        """``getattr`` for a parameter or buffer, which a module finds slowly: last, and by Python."""
        if not torch.compiler.is_compiling():
            for held in (self._parameters, self._buffers):  # type: ignore[attr-defined]
                if name in held:
                    return held[name]
        return getattr(self, name)

    # -- which slices are live in this call, and in how many parts of the batch ----------------------------------------

    def _arrived(self, role: str, width: int) -> Axis | None:
        """The axis if the input comes in sliced, ``None`` if it comes in full."""
        if type(width) is not int and isinstance(width, torch.fx.Proxy):
            raise refusals.refused_by(self, "torch.fx")
        axis = self.axes.get(role)
        if axis is None or width == axis.size:
            return None
        if width != axis.width:
            raise refusals.wrong_width(self, width, axis.size, axis.width)
        return axis

    @staticmethod
    def _parts(x: Tensor, *axes: Axis | None) -> int:
        """How many parts the batch ``x`` has; one if it is a single sample without that dimension."""
        return parts_of(x.shape[0], *axes) if x.dim() > 1 else 1

    def _started(self) -> Axis | None:
        """The output axis if this call makes it sliced."""
        axis = self.axes.get("out")
        if axis is None or not self.training or not axis.slice.sliced:  # type: ignore[attr-defined]
            return None
        if not torch.compiler.is_compiling() and not axis.slice.owner.drawn:
            stepping.check_drawn(axis.slice.owner, self.weight)  # type: ignore[attr-defined]
        return axis


def sliced_subclass(plain: type[nn.Module], *sliced: type, **attributes: Any) -> type[nn.Module]:
    """The subclass of ``plain`` that puts ``sliced`` in front of it; the same one whenever it is asked for.

    No module holds it by name, so it cannot be pickled by name: what it was made from is pickled instead.

    Args:
        plain: the class that ``plain_`` returns to.
        sliced: subclasses of ``Sliced``, in the order in which Python shall look methods up.
        attributes: further class attributes: values that can be hashed and pickled. What else the class needs
            (properties, code), ``__init_subclass__`` makes from them.
    """
    return _make(plain, sliced, tuple(attributes.items()))  # type: ignore[arg-type]


@functools.cache
def _make(plain: Any, sliced: Any, attributes: Any) -> type[nn.Module]:
    body = {"_plain": plain, "_made_from": (plain, sliced, attributes), "__doc__": plain.__doc__, **dict(attributes)}
    return type(f"{sliced[0]._name_prefix}{plain.__name__}", (*sliced, plain), body)


def _empty_layer(*made_from: Any) -> nn.Module:
    """A layer of the class that was made from these, for ``pickle`` to fill."""
    made = _make(*made_from)
    return made.__new__(made)


def watch(layer: Any) -> None:
    """Draw the slices of this layer after every optimizer step that updates it."""
    drawing.register(layer)
    stepping.observe_optimizers()
    refusals.observe()
    compact.data_parallel.observe()
    if any(s.grads == "compact" for s in layer.slices):
        compact.observe()
    if any(map(compact.growth.grows, layer.slices)):
        compact.optimizers.observe()


def adopt(module: nn.Module, made: type[nn.Module], axes: dict[str, Axis]) -> None:
    """Change the class of ``module`` to a sliced one; ``axes`` must have been checked."""
    module.__class__ = made
    _attach(module, axes, checked=True)
    if any(True for _ in module.children()):  # loading with assign=True reaches the children last
        module.register_load_state_dict_post_hook(Sliced._place)


def _argument(role: str) -> str:
    return "slice" if role == "unit" else f"{role}_slice"


def _axes(given: dict[str, Any]) -> dict[str, Axis]:
    for role, s in given.items():
        if not isinstance(s, Slice | Axis | ConcatAxis | None):
            raise TypeError(f"{_argument(role)}={s!r}: expected a Slice, or an Axis from Slice.axis")
    return {role: s.axis() if isinstance(s, Slice) else s for role, s in given.items() if s is not None}


def _attach(module: Any, given: dict[str, Any], checked: bool = False) -> None:
    axes = _axes(given)
    if not checked and axes:
        module.bind(module, axes)
    module.axes = axes
    module._place()
    watch(module)


def _check_size(module: Any, axis: Axis | None, expected: int, name: str) -> None:
    if axis is not None and axis.size != expected:
        what = f"slice of size {axis.slice.size}" + (f" (axis of {axis.size})" if axis.size != axis.slice.size else "")
        raise ValueError(f"{what} does not match {name}={expected} of {type(module).__name__}")


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype autocast would cast the weight to: take writes it directly, so no full-precision copy is made."""
    kind = "cuda" if x.is_cuda else x.device.type
    if kind == "meta":  # a dry run
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

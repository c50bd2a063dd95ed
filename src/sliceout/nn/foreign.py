"""Layers of other people's classes: their own forward runs, and some attributes answer with something else meanwhile.

timm's ``BatchNormAct2d`` and ``Conv2dSame``, an ``RmsNorm`` of somebody's own: each reads ``self.weight`` and a few
numbers and computes something we need not know, as long as it treats units one by one or hands the weight to a
convolution as it is (the trace has checked that). For the length of a call those names answer with what ``take`` gives.
Of attention code the numbers alone are substituted, for as long as it trains, or one call of its forward is rewritten.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..ops import store_, take
from ..slices import Axis, Slice
from ..takes import Take
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

    _substituted: tuple[str, ...]
    """The names of these attributes; a class has a property for each."""

    _substitutes: dict[str, Any] | None = None
    """What those among them that are live answer with now."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls).get("_substituted", ()):
            setattr(cls, name, _property(name))


def _property(name: str) -> property:
    def get(self: Any) -> Any:
        for held in (self._substitutes, self._parameters, self._buffers):
            if held is not None and name in held:
                return held[name]
        return self.__dict__[name]

    def put(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    return property(get, put)


# -- layers ------------------------------------------------------------------------------------------------------------


class ForeignLayer(Substituting):
    """A layer that keeps its own forward, in front of the class that says what is taken of it (``_small_for``)."""

    _kept_for_slices = (*Sliced._kept_for_slices, "_substitutes", "_unit_dim")
    one_part = "it keeps its own forward, which knows of one weight"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        small = self._small_for(x)  # type: ignore[attr-defined]
        if small is None:
            return type(self)._plain.forward(self, x, *args, **kwargs)  # type: ignore[arg-type]
        self._substitutes = small
        try:
            y = type(self)._plain.forward(self, x, *args, **kwargs)  # type: ignore[arg-type]
        finally:
            self._substitutes = None
        if self.training and "unit" in self.axes:
            for name, t in self._buffers.items():  # type: ignore[attr-defined]
                if name in small and t.is_floating_point():  # statistics, which may have changed
                    self._store(name, t, small[name])
        return y

    def __setattr__(self, name: str, value: Any) -> None:
        substitutes = self._substitutes
        if substitutes is not None and name in substitutes and name in self._buffers:  # type: ignore[attr-defined]
            substitutes[name] = value  # a forward that replaces its statistics knows of the kept units alone
        else:
            super().__setattr__(name, value)

    def _store(self, name: str, full: Tensor, small: Any) -> None:
        axis = self.axes["unit"]
        if not isinstance(small, Tensor) or small.numel() != axis.width:
            found = f"a tensor of shape {tuple(small.shape)}" if isinstance(small, Tensor) else repr(small)
            raise RuntimeError(
                f"{type(self)._plain.__name__} has replaced its buffer {name!r} by {found}: while it is sliced, that "
                f"must have an entry for each of the {axis.width} kept units. Leave this layer out of convert_ (filter)"
            )
        small = small.detach() if small.requires_grad else small
        if full.dim() > 1:
            full, small = full.view(-1), small.reshape(-1)
        store_([full], [small], axis)


class ForeignUnits(Sliced):
    """What is taken of a layer that treats units one by one: whatever has as many entries as there are units."""

    _unit_dim: int
    """Dimension of the input along which the units lie."""

    def _small_for(self, x: Tensor) -> dict[str, Any] | None:
        axis = self.axes["unit"]
        if x.shape[self._unit_dim] != axis.width or axis.width == axis.size:
            return None  # full, or of a shape that only its own forward knows
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
        unitwise.GroupNorm.bind(module, axes)
    names = tuple(n for n in (*module._parameters, *module._buffers, *NUMBERS, "groups") if hasattr(module, n))
    module._unit_dim, module._substitutes = dim, None  # its own from the start: compiled code asks whether it has any
    adopt(module, sliced_subclass(type(module), ForeignLayer, base or ForeignUnits, _substituted=names), axes)
    return module  # type: ignore[no-any-return]


# -- attention code ----------------------------------------------------------------------------------------------------


class WidthPower(NamedTuple):
    """A number that is ``times * width**exponent``."""

    times: int = 1
    exponent: float = 1


class AttentionNumbers(Substituting):
    """A module some of whose numbers follow a slice: ``head_dim`` in a view, ``scale`` as the softmax temperature."""

    _kept_for_slices = (*Sliced._kept_for_slices, "_powers")
    _powers: dict[str, WidthPower]

    @property
    def _substitutes(self) -> dict[str, Any] | None:  # type: ignore[override]
        s = self.axes["unit"].slice
        if not self.training or not s.sliced:
            return None
        return {name: p.times * s.width**p.exponent for name, p in self._powers.items()}


def follow_width_(module: Any, s: Slice, powers: dict[str, WidthPower]) -> nn.Module:
    """Let these attributes of ``module`` follow the width of ``s`` while it is sliced, in place."""
    module._powers = powers
    adopt(module, sliced_subclass(type(module), AttentionNumbers, _substituted=tuple(powers)), {"unit": s.axis()})
    return module  # type: ignore[no-any-return]


class RotaryValues(Sliced):
    """Rotary attention, whose values may have a width of their own: queries and keys cannot be sliced there.

    Attention code reshapes all three by one number: ``self.v_proj(x).view(*shape, -1, self.head_dim)``. So its forward
    is compiled again with this one call replaced by ``self._by_head(self.v_proj(x), ...)``, which puts in the width of
    what it is given. All else is the model's own (masks, caches, norms); a class without such a call is left alone.
    """

    _projection: str
    """The attribute that projects to values; a class whose forward is rewritten for it says so."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_projection" in vars(cls):
            cls.forward = _rewritten_forward(cls._plain, cls._projection)  # type: ignore[arg-type, attr-defined]

    def _by_head(self, values: Tensor, *shape: Any) -> Tensor:
        """``values.view(*shape)``, by heads of the width they have."""
        sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        s = self.axes["unit"].slice
        if self.training and s.sliced and sizes[-1] == s.size:
            sizes[-1] = s.width
        return values.view(sizes)


def slice_rotary_values_(module: nn.Module, projection: str, s: Slice) -> bool:
    """Let the output of ``module.<projection>`` be viewed by the width of ``s``; false if the code forbids it."""
    plain: Any = type(module)
    if _rewritten_forward(plain, projection) is None:
        return False
    adopt(module, sliced_subclass(plain, RotaryValues, _projection=projection), {"unit": s.axis()})
    return True


@functools.cache
def _rewritten_forward(plain: Any, projection: str) -> Any:
    """The forward of ``plain`` with that one call replaced; ``None`` if it cannot be."""
    forward: Any = inspect.unwrap(plain.forward)
    if forward.__code__.co_freevars:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):
        return None
    function: Any = tree.body[0]
    function.decorator_list = []
    calls = [node for node in ast.walk(function) if _views(node, projection)]
    if len(calls) != 1:
        return None
    call: Any = calls[0]
    call.args.insert(0, call.func.value)
    call.func = ast.Attribute(ast.Name("self", ast.Load()), "_by_head", ast.Load())
    ast.fix_missing_locations(tree)
    made: dict[str, Any] = {}
    code = compile(tree, inspect.getfile(forward), "exec")  # with this file's __future__: annotations stay text
    exec(code, forward.__globals__, made)
    return made["forward"]


def _views(node: ast.AST, projection: str) -> bool:
    """Whether it is ``self.<projection>(...).view(...)``."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=projects), attr="view" | "reshape")):
            return ast.unparse(projects) == f"self.{projection}"
    return False

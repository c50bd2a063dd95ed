"""Attention: heads are sliced inside (the paper) or as a whole, and the code around them is told the new numbers.

The trace finds two kinds of groups in an attention layer: the units *inside* every head (for queries and keys they
are contracted against each other; for values they reach the output projection), and the heads themselves. What it
cannot see are the numbers that attention code computes with: ``self.head_dim`` in a view, ``self.scale`` as the
softmax temperature. Those become properties that follow the slice, so the model's own forward runs unchanged.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from torch import nn

from ..groups import Group
from ..nn import Sliced, adopt
from ..slices import Slice
from ..trace import Trace

INSIDE = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_kv", "key_value_proj_dim", "attn_head_dim",
          "dim_per_head", "d_head", "per_head_dim", "hidden_size_per_attention_head", "attention_hidden_size")  # fmt: skip
HEADS = ("num_heads", "n_heads", "n_head", "heads", "nhead", "num_attention_heads", "num_key_value_heads",
         "num_kv_heads", "n_kv_heads", "num_q_heads")  # fmt: skip
TOTAL = ("attn_dim", "all_head_size", "inner_dim", "split_size", "kv_dim", "d_attn", "q_dim", "key_dim", "value_dim")
SCALES = ("scale", "scaling", "softmax_scale", "attn_scale", "scale_factor", "norm_factor", "inv_norm_factor",
          "scale_attn", "qk_scale", "attention_scale", "normalize_fact")  # fmt: skip


def arrange(model: nn.Module, groups: list[Group], trace: Trace, attention: str) -> None:
    """Say which attention groups cannot be sliced in this mode."""
    modules = dict(model.named_modules())
    inside = [g for g in groups if g.contracted]
    where = {name for g in inside for name in g.contracted}
    for group in groups:
        if not group.contracted and any(_around(m.module, where) for m in group.members) and group.family == "mlp":
            group.family = "attention"
    for group in groups:
        if group.family != "attention":
            continue
        if attention == "off":
            group.reason = group.reason or "attention='off'"
        elif group.contracted and group.reason is None:
            names = set(group.contracted)
            if not all(n in trace.default_scale or _scale_of(modules[n], group.size) for n in names):
                group.reason = "no softmax temperature found that could follow the slice"


def _around(module: str, where: set[str]) -> bool:
    return any(module.startswith(name + ".") for name in where)


def preference(group: Group, attention: str) -> int:
    """Which of two ways to slice the same layers comes first."""
    inside = bool(group.contracted)
    return (2 if inside else 1) if attention == "dims" else (1 if inside else 2)


def _scale_of(module: nn.Module, size: int) -> dict[str, int]:
    """Attributes that hold the temperature for heads of ``size``: name -> the exponent of the size."""
    found = {}
    for name in SCALES:
        value = getattr(module, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            for exponent in (-0.5, 0.5):
                if math.isclose(value, size**exponent, rel_tol=1e-6):
                    found[name] = exponent
    return found


def adapt(model: nn.Module, groups: list[Group], made: dict[Group, Slice]) -> list[nn.Module]:
    """Let the numbers of each attention module follow its slices."""
    modules = dict(model.named_modules())
    touched = []
    for group in groups:
        if group.family != "attention":
            continue
        s = made[group]
        homes = set(group.contracted) or {_home(group)}
        for name in sorted(homes):
            numbers = _numbers(modules[name], s, bool(group.contracted))
            if numbers and not isinstance(modules[name], Sliced):
                _follow(modules[name], s, numbers)
                touched.append(modules[name])
    return touched


def _home(group: Group) -> str:
    """The closest module around all layers of a group."""
    paths = [m.module.split(".")[:-1] for m in group.members]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _numbers(module: nn.Module, s: Slice, inside: bool) -> dict[str, float]:
    """What the attributes of an attention module become while it is sliced."""
    out: dict[str, float] = {}
    own = vars(module)
    exact, scaled = (INSIDE, TOTAL) if inside else (HEADS, TOTAL)
    for name in exact:
        if own.get(name) == s.size:
            out[name] = s.width
    for name in scaled:
        value = own.get(name)
        if isinstance(value, int) and value % s.size == 0:
            out[name] = value // s.size * s.width
    if inside:
        for name, exponent in _scale_of(module, s.size).items():
            out[name] = s.width**exponent
    return out


class Following(Sliced):
    """A module some of whose numbers follow a slice. They stay in its ``__dict__``, hidden by properties."""

    small: dict[str, Any]

    def bind(self, axes: Any) -> None:
        """Anything goes: the numbers were computed from this slice."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self)._plain, tuple(self.small)), self.__getstate__()  # type: ignore[attr-defined]


def _follow(module: Any, s: Slice, numbers: dict[str, float]) -> None:
    module.small = numbers
    adopt(module, _following(type(module), tuple(numbers)), {"unit": s.axis()})


@functools.cache
def _following(plain: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    body: dict[str, Any] = {name: _property(name) for name in names}
    return type(f"Sliced{plain.__name__}", (Following, plain), {**body, "_plain": plain, "__doc__": plain.__doc__})


def _rebuild(plain: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    made = _following(plain, names)
    return made.__new__(made)


def _property(name: str) -> property:
    def get(self: Any) -> Any:
        live = self.training and self.axes["unit"].slice.sliced
        return self.small[name] if live else self.__dict__[name]

    def put(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    return property(get, put)

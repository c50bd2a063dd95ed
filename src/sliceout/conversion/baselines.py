"""The paper's baselines, put where SliceOut would slice: which layers drop, and why some groups have none that can."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from ..nn.base import Sliced, adopt
from ..nn.factory import plain_, slice_
from ..schemes.dropout import DROPS, Drop, dropping_class
from ..slices import Slice
from .groups import CONVS, Group
from .reasons import Skip
from .trace import Trace, size

SCHEMES = ("sliceout", "controlled", "patch", *DROPS)


def drop_(
    model: nn.Module, groups: list[Group], rates: dict[Group, float], scheme: str, trace: Trace
) -> dict[Group, Slice]:
    """Let the readers of ``groups`` drop, in place; a group that has none for this scheme gets the reason why."""
    modules: dict[str, Any] = dict(model.named_modules())
    plan: dict[Group, list[str]] = {}
    taken: set[str] = set()
    for group in groups:
        names = readers(group, trace)
        flat = next((n for n in names if not isinstance(modules[n], CONVS)), None)
        if not names:
            why = f"no layer reads these units by themselves: scheme={scheme!r} has no place here"
            group.reason = Skip.NO_READER(why)
        elif scheme in ("spatial", "dropblock") and flat is not None:
            group.reason = Skip.NOT_A_MAP(f"{flat} is not a convolution: scheme={scheme!r} drops from feature maps")
        elif taken & set(names):
            group.reason = Skip.NO_READER("its reader reads another group too, which drops already")
        else:
            plan[group] = names
            taken.update(names)
    made: dict[Group, Slice] = {g: Drop(g.size, rates[g], scheme) for g in plan}
    done: list[nn.Module] = []
    try:
        for group, names in plan.items():
            for name in names:
                plain: Any = type(modules[name])
                adopt(modules[name], dropping_class(plain), {"in": made[group].axis()})
                done.append(modules[name])
            for name in group.dropouts:
                if not isinstance(modules[name], Sliced):
                    done.append(slice_(modules[name], slice=made[group]))
    except BaseException:
        for module in done:
            plain_(module)
        raise
    return made


def readers(group: Group, trace: Trace) -> list[str]:
    """The layers that read the units and do not hand them on, except those that read a pooled copy of them."""
    handed_on = set(group.names("out"))
    found = [n for n in dict.fromkeys(group.names("in")) if n not in handed_on]
    positions = {n: _positions(trace, n) for n in found}
    return [n for n in found if positions[n] > 1 or max(positions.values()) == 1]


def _positions(trace: Trace, name: str) -> int:
    """Pixels or tokens in what a layer reads, for one sample."""
    sizes = [size(dim) for dim in trace.inputs.get(name, [])]
    use = next((u for u in trace.uses if u.module == name and u.key == "weight"), None)
    maps = use is not None and len(use.dims) > 2
    return math.prod(sizes[2:] if maps else sizes[1:-1])

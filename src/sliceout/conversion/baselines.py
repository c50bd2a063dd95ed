"""The paper's baselines, put where SliceOut would slice: which layers drop, and why some groups have none that can."""

from __future__ import annotations

import math

from torch import nn

from ..nn.base import Sliced, adopt
from ..nn.factory import slice_
from ..schemes import SCHEMES
from ..schemes.dropout import dropping_class
from ..slices import Slice
from .groups import CONVS, Group
from .reasons import Skip
from .trace import Trace, size


def readers_by_group(
    groups: list[Group], scheme: str, modules: dict[str, nn.Module], trace: Trace
) -> dict[Group, list[str]]:
    """The layers that drop from each group; one that has none for this scheme gets the reason why."""
    found: dict[Group, list[str]] = {}
    taken: set[str] = set()
    for group in groups:
        names = readers(group, trace)
        flat = next((n for n in names if not isinstance(modules[n], CONVS)), None)
        if not names:
            why = f"no layer reads these units by themselves: scheme={scheme!r} has no place here"
            group.reason = Skip.NO_READER(why)
        elif SCHEMES[scheme].place == "convolutions" and flat is not None:
            group.reason = Skip.NOT_A_MAP(f"{flat} is not a convolution: scheme={scheme!r} drops from feature maps")
        elif taken & set(names):
            group.reason = Skip.NO_READER("its reader reads another group too, which drops already")
        else:
            found[group] = names
            taken.update(names)
    return found


def drop_(model: nn.Module, readers: dict[Group, list[str]], made: dict[Group, Slice]) -> None:
    """Let the readers of groups drop, in place."""
    modules = dict(model.named_modules())
    for group, names in readers.items():
        for name in names:
            adopt(modules[name], dropping_class(type(modules[name])), {"in": made[group].axis()})
        for name in group.dropouts:
            if not isinstance(modules[name], Sliced):
                slice_(modules[name], slice=made[group])


def readers(group: Group, trace: Trace) -> list[str]:
    """The layers that read the units and do not hand them on, except those that read a pooled copy of them."""
    handed_on = set(group.names("out"))
    found = [n for n in dict.fromkeys(group.names("in")) if n not in handed_on]
    positions = {n: _positions(trace, n) for n in found}
    return [n for n in found if positions[n] > 1 or max(positions.values()) == 1]


def _positions(trace: Trace, name: str) -> int:
    """Pixels or tokens in what a layer reads, for one sample."""
    sizes = [size(dim) for dim in trace.last_input(name)]
    maps = len(trace.uses.get(f"{name}.weight", [])) > 2
    return math.prod(sizes[2:] if maps else sizes[1:-1])

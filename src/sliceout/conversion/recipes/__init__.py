"""What is special about a family of models, one file each. The trace finds the groups; the recipes know their ways.

``mlp``        labels; nothing else is special
``residual``   blocks between two points of a residual stream; the paper's exclusions
``mbconv``     inverted bottlenecks; how many stages
``attention``  heads and their dims: temperature, and the numbers that attention code computes shapes with
"""

from __future__ import annotations

from torch import nn

from ...slices import Slice
from ..groups import RIVAL, Group
from ..trace import Trace
from . import attention as _attention
from . import mbconv, residual


def arrange(
    model: nn.Module, groups: list[Group], trace: Trace, *, attention: str, stages: int | None, paper_exclusions: bool
) -> None:
    """Name the family of each group and apply its options; a group that is left out gets the reason."""
    mbconv.arrange(model, groups, stages)
    residual.arrange(groups, paper_exclusions)
    _attention.arrange(model, groups, trace, attention)


def choose(groups: list[Group]) -> None:
    """Where two groups want the same dimension of a layer (heads and their dims, say), keep one of them."""
    taken: dict[tuple[str, str, int], Group] = {}
    wanted = [g for g in groups if g.reason is None]
    for group in sorted(wanted, key=lambda g: -g.size):
        rival = next((taken[key] for key in _wants(group) if key in taken), None)
        if rival is not None:
            group.reason = f"{RIVAL} ({rival.size} units of {rival.name})"
        else:
            taken.update(dict.fromkeys(_wants(group), group))


def _wants(group: Group) -> list[tuple[str, str, int]]:
    return [(m.module, m.role, m.offset) for m in group.members]


def adapt(model: nn.Module, groups: list[Group], made: dict[Group, Slice]) -> list[nn.Module]:
    """Change what must change around the sliced layers; returns the modules touched."""
    return _attention.adapt(model, groups, made)


def refuses(group: Group, width: int, before: Trace, after: Trace) -> str | None:
    """What a recipe has against a group that was tried, judging by the traces of the full and the sliced model."""
    return _attention.refuses(group, width, before, after)

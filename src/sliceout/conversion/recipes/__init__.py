"""What is special about a kind of model, one file each. The trace finds the groups; recipes label and choose them.

``mlp``        labels; nothing else is special
``residual``   blocks between two points of a residual stream; the paper's exclusions
``mbconv``     inverted bottlenecks; how many stages
``attention``  heads and their dims: temperature, and the numbers that attention code computes shapes with
"""

from __future__ import annotations

from torch import nn

from ..groups import Group
from ..reasons import CONFLICT, Skip
from ..trace import Trace
from . import attention as _attention
from . import mbconv, residual
from .attention import adapt, objection

__all__ = ["adapt", "arrange", "choose", "objection"]


def arrange(
    model: nn.Module, groups: list[Group], trace: Trace, *, attention: str, stages: int | None, paper_exclusions: bool
) -> None:
    """Label each group with its kind and apply the options of that kind; a group that is left out gets the reason."""
    mbconv.arrange(model, groups, stages)
    residual.arrange(groups, paper_exclusions)
    _attention.arrange(model, groups, trace, attention)


def choose(groups: list[Group]) -> None:
    """Where two groups want the same dimension of a layer (heads and their dims, say), keep one of them."""
    taken: dict[tuple[str, str, int], Group] = {}
    wanted = [g for g in groups if g.reason is None]
    for group in sorted(wanted, key=lambda g: -g.size):
        dims = [(m.module, m.role, m.offset) for m in group.members]
        other = next((taken[dim] for dim in dims if dim in taken), None)
        if other is not None:
            group.reason = Skip.CONFLICT(f"{CONFLICT} ({other.size} units of {other.name})")
        else:
            taken.update(dict.fromkeys(dims, group))

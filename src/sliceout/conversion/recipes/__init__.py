"""What is special about a kind of model, one file each. The trace finds the groups; recipes label and choose them.

``convolutions``  inverted bottlenecks: how many stages; residual blocks: the paper's exclusions
``attention``     heads and their dims: temperature, and the numbers that attention code computes shapes with
"""

from __future__ import annotations

from torch import nn

from ..groups import Group
from ..trace import Trace
from . import attention as _attention
from . import convolutions
from .attention import adapt, objection

__all__ = ["adapt", "arrange", "objection"]


def arrange(
    model: nn.Module, groups: list[Group], trace: Trace, *, attention: str, stages: int | None, paper_exclusions: bool
) -> None:
    """Label each group with its kind and apply the options of that kind; a group that is left out gets the reason."""
    convolutions.inverted_bottlenecks(model, groups, stages)
    convolutions.residual_blocks(groups, paper_exclusions)
    _attention.arrange(model, groups, trace, attention)

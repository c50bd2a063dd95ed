"""Schedules for those who do not write their own training loop: one thin file per framework, imported only by name.

Redrawing needs no callback: slices follow the optimizer whoever calls it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..schedule import Stages, Tail


class Scheduled:
    """Moves a schedule on before every step.

    Args:
        make: builds the schedule from the model when training begins; by default the paper's tail of 10 %.
    """

    schedule: Stages

    def __init__(self, make: Callable[[nn.Module], Stages] = Tail) -> None:
        self.make = make

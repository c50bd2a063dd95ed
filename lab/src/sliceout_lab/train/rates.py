"""Learning rates as plain functions of progress: nothing to save, and a shorter run has the same curve."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR

from sliceout.cli import UserError

KINDS = ("constant", "steps", "exponential", "inverse-sqrt", "linear", "one-cycle")
ONE_CYCLE_FIRST, ONE_CYCLE_LAST = 1 / 25, 1 / 25e4
"""Of the highest learning rate: where torch's ``OneCycleLR`` begins and ends."""


def learning_rate(lr: float, schedule: Mapping[str, Any], tail: float = 0.0) -> Callable[[float], float]:
    """The learning rate at a progress from 0 to 1.

    Args:
        lr: the first one, or the highest where it rises first (``inverse-sqrt``, ``linear``, ``one-cycle``).
        schedule: ``name`` and what it takes: ``steps`` multiplies by ``factor`` wherever progress passes one of ``at``;
            ``exponential`` multiplies by ``factor`` every ``every`` of ``of`` epochs; ``inverse-sqrt`` rises in
            proportion until ``warmup`` and then falls with the root of progress; ``linear`` falls to 0 in proportion,
            after a ``warmup`` if there is one; ``one-cycle`` is torch's ``OneCycleLR``: a cosine up until ``warmup``
            (0.3 by default), another one down to next to nothing. ``tail_lr`` holds in the tail.
        tail: last part of training without slicing.

    Example:
        >>> rate = learning_rate(0.1, {"name": "steps", "at": [0.3, 0.6, 0.8], "factor": 0.2})
        >>> [round(rate(p), 5) for p in (0, 0.3, 0.7, 0.99)]
        [0.1, 0.02, 0.004, 0.0008]
    """
    kind = schedule.get("name", "constant")
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, 1)
        hint = f": did you mean {close[0]}?" if close else ""
        raise UserError(f"schedule {kind!r}: expected one of {', '.join(KINDS)}{hint}")
    warmup = schedule.get("warmup", 0.3 if kind == "one-cycle" else 0.0)
    if kind in ("linear", "one-cycle") and not 0 <= warmup < 1:
        raise UserError(f"schedule.warmup = {warmup}: expected a part of training, from 0 to below 1")

    def rate(progress: float) -> float:
        if tail and "tail_lr" in schedule and progress >= 1 - tail:
            return float(schedule["tail_lr"])
        if kind == "steps":
            return lr * schedule["factor"] ** sum(progress >= at - 1e-9 for at in schedule["at"])
        if kind == "exponential":
            return lr * schedule["factor"] ** math.floor(progress * schedule["of"] / schedule["every"] + 1e-9)
        if kind == "inverse-sqrt":
            warm = max(progress, 1e-6) / schedule["warmup"]
            return lr * min(warm, warm**-0.5)
        rising = progress < warmup
        if kind == "linear":
            return lr * (progress / warmup if rising else (1 - progress) / (1 - warmup))
        if kind == "one-cycle":
            at = progress / warmup if rising else (progress - warmup) / (1 - warmup)
            first, last = (ONE_CYCLE_FIRST, 1.0) if rising else (1.0, ONE_CYCLE_LAST)
            return lr * (last + (first - last) * (1 + math.cos(math.pi * at)) / 2)
        return lr

    return rate


def constant_tail(
    optimizer: Optimizer, scheduler: LRScheduler, total: int, fraction: float = 0.1, lr: float = 1e-4
) -> SequentialLR:
    """``scheduler``, but a constant learning rate for the last ``fraction`` of ``total`` steps.

    The paper's EfficientNets end so, at 1e-4. Steps are those of the scheduler: epochs, if it is stepped once an epoch.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        >>> both = constant_tail(optimizer, decay, total=4, fraction=0.5, lr=0.01)
        >>> for epoch in range(4):
        ...     print(optimizer.param_groups[0]["lr"], end=" ")
        ...     optimizer.step(), both.step()  # doctest: +ELLIPSIS
        0.5 (...)
        0.25 (...)
        0.01 (...)
        0.01 (...)
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction={fraction}: expected a part of training, between 0 and 1")
    start = round((1 - fraction) * total)
    if not 0 < start < total:
        raise ValueError(f"total={total}, fraction={fraction}: the tail would begin at step {start}")
    flat = LambdaLR(optimizer, [_Constant(lr / group["initial_lr"]) for group in optimizer.param_groups])
    return SequentialLR(optimizer, [scheduler, flat], [start])


@dataclass
class _Constant:
    """A factor that does not change; a class of its own, because schedulers are saved and lambdas are not."""

    factor: float

    def __call__(self, step: int) -> float:
        return self.factor

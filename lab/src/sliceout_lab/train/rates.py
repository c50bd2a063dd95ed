"""Learning rates as plain functions of progress: nothing to save, and a shorter run has the same curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sliceout.cli import UserError

KINDS = ("constant", "steps", "exponential", "inverse-sqrt")


def learning_rate(lr: float, schedule: Mapping[str, Any], tail: float = 0.0) -> Callable[[float], float]:
    """The learning rate at a progress from 0 to 1.

    Args:
        lr: the first one, or for ``inverse-sqrt`` the highest.
        schedule: ``name`` and what it takes: ``steps`` multiplies by ``factor`` wherever progress passes one of ``at``;
            ``exponential`` multiplies by ``factor`` every ``every`` of ``of`` epochs; ``inverse-sqrt`` rises in
            proportion until ``warmup`` and then falls with the root of progress. ``tail_lr`` holds in the tail.
        tail: last part of training without slicing.

    Example:
        >>> rate = learning_rate(0.1, {"name": "steps", "at": [0.3, 0.6, 0.8], "factor": 0.2})
        >>> [round(rate(p), 5) for p in (0, 0.3, 0.7, 0.99)]
        [0.1, 0.02, 0.004, 0.0008]
    """
    kind = schedule.get("name", "constant")
    if kind not in KINDS:
        raise UserError(f"schedule {kind!r}: expected one of {', '.join(KINDS)}")

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
        return lr

    return rate

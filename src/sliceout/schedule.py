"""When to slice how much: the full network at the end, rates that grow in a few steps, statistics of the full network.

Everything here is called with the progress of the run and changes the model; no framework is needed::

    schedule = sliceout.Tail(model, fraction=0.1)
    for step, batch in enumerate(loader):
        schedule.step(step, total)
        ...

A changed rate is a changed width, hence new graphs for ``torch.compile`` (one per rate, kept if a rate comes back) and
a new capture for CUDA graphs that were captured by hand. So rates change in few steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from .compact import gradient_leaves
from .drawing import off_, on_
from .drawing import slices as slices_of
from .nn.base import Sliced


class Schedule:
    """Rates that follow the progress of training, as fractions of the rates that the model was converted with.

    Args:
        model: a converted model.
        factors: from progress (0 to 1) to what the rates are multiplied by from there on; 0 turns SliceOut off. Before
            the first entry the factor is 1.

    Example:
        >>> from sliceout import convert_
        >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        >>> widths = convert_(model, 0.5).slices
        >>> schedule = Schedule(model, {0.0: 0.5, 0.2: 1.0, 0.9: 0.0})
        >>> for step in (0, 30, 95):
        ...     schedule.step(step, 100), next(iter(widths))
        (0.5, Slice(48 of 64, circular))
        (1.0, Slice(32 of 64, circular))
        (0.0, Slice(32 of 64, circular, off))
    """

    def __init__(self, model: nn.Module, factors: Mapping[float, float]) -> None:
        for at, factor in factors.items():
            if not 0 <= at <= 1:
                raise ValueError(f"progress {at}: expected 0 to 1")
            if factor < 0:
                raise ValueError(f"factor {factor} at progress {at}: expected 0 (off), 1 (the full rate) or between")
        self.model = model
        self.factors = dict(sorted(factors.items()))
        self.rates = {s: s.rate for s in slices_of(model)}
        worst = max(self.rates.values()) * max(self.factors.values(), default=1.0)
        if worst >= 1:
            raise ValueError(f"the factors would raise a rate to {worst:g}: expected rates below 1")
        self.factor: float | None = None

    def at(self, progress: float) -> float:
        """The factor at this progress."""
        return next((f for at, f in reversed(self.factors.items()) if progress >= at), 1.0)

    def step(self, progress: float, total: float | None = None) -> float:
        """Set the rates for ``progress`` from 0 to 1, or for step ``progress`` of ``total``; returns the factor.

        Call it before every step, or at every epoch: it does nothing unless the factor changes. Progress may go back,
        as after loading a checkpoint.
        """
        if total is not None:
            if total <= 0:
                raise ValueError(f"total={total}: expected the number of steps of the whole run")
            progress = progress / total
        factor = self.at(progress)
        if factor != self.factor:
            if factor == 0:
                off_(self.model)
            else:
                on_(self.model)
                for s, rate in self.rates.items():
                    s.rerate_(factor * rate)
                for layer in self.model.modules():
                    if isinstance(layer, Sliced):
                        gradient_leaves.refresh(layer)
            self.factor = factor
        return factor


class Tail(Schedule):
    """The full network for the last ``fraction`` of training (the paper: 10 %, or 1 % for its language models)."""

    def __init__(self, model: nn.Module, fraction: float = 0.1) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction={fraction}: expected 0 to 1")
        super().__init__(model, {1 - fraction: 0.0} if fraction else {})


class WarmUp(Schedule):
    """Rates that rise to their full value until progress ``until``, in ``steps`` equal steps; optionally with a tail.

    Example: ``WarmUp(model, until=0.3, steps=3)`` at rate 0.5 trains at 1/6, 1/3 and 1/2.
    """

    def __init__(self, model: nn.Module, until: float, steps: int = 3, tail: float = 0.0) -> None:
        if steps < 2:
            raise ValueError(f"steps={steps}: expected at least 2")
        if not 0 < until <= 1 - tail <= 1:
            raise ValueError(f"until={until}, tail={tail}: expected 0 < until <= 1 - tail <= 1")
        factors = {until * i / (steps - 1): (i + 1) / steps for i in range(steps)}
        super().__init__(model, factors | ({1 - tail: 0.0} if tail else {}))


def recalibrate_(model: nn.Module, loader: Iterable[Any], device: torch.device | int | None = None) -> nn.Module:
    """Estimate the batch-norm statistics of the full network anew from ``loader``, without touching a weight.

    Sub-networks have other statistics than the whole. torch's ``update_bn`` does the work; meanwhile SliceOut is off
    and ``nn.Dropout`` layers let everything pass. Whatever was on, off or in training mode is so again afterwards.

    Args:
        model: converted or not.
        loader: batches; of a tuple or list the first entry is what the model is called with.
        device: where batches are moved to.
    """
    sliced = {s for m in model.modules() if isinstance(m, Sliced) for s in m.slices}
    dropouts = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    before: list[tuple[Any, str, Any]] = [(m, "training", m.training) for m in model.modules()]
    before += [*((s, "on", s.on) for s in sliced), *((m, "p", m.p) for m in dropouts)]
    try:
        for s in sliced:
            s.on = False
        for m in dropouts:
            m.p = 0.0
        update_bn(loader, model, device=device)
    finally:
        for changed, name, value in before:
            setattr(changed, name, value)
    return model

"""When to slice how much: the full network at the end, rates that rise, widths that grow; statistics of the whole.

Everything here is called with the progress of the run and changes the model; no framework is needed::

    schedule = sliceout.Tail(model, fraction=0.1)
    for step, batch in enumerate(loader):
        schedule.step(step, total)
        ...

A changed rate is a changed width, hence a new graph for ``torch.compile`` (kept if a rate comes back) and for
``sliceout.capture``. So rates change in few steps, and a schedule says beforehand how many sets of widths it has.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from .compact import gradient_leaves, growth
from .drawing import off_, on_
from .drawing import slices as slices_of
from .nn.base import Sliced
from .slices import Axis, Slice, as_float
from .takes import ConcatAxis

logger = logging.getLogger(__name__)


class Stages:
    """What all schedules share: a value that holds from some progress on, and the rates that it means.

    Args:
        model: a converted model.
        values: from progress (0 to 1) to the value from there on; 0 is the full network.
        before: the value before the first of them.
    """

    def __init__(self, model: nn.Module, values: Mapping[float, float], before: float) -> None:
        for at in values:
            if not 0 <= as_float("progress", at) <= 1:
                raise ValueError(f"progress {at}: expected 0 to 1")
        self.model, self.before = model, before
        self.stages = dict(sorted(values.items()))
        self.value: float | None = None
        used = [*([] if 0 in self.stages else [before]), *self.stages.values()]
        owner = slices_of(model)
        self.sets = len({tuple(s.kept_at(rate) for s, rate in self.rates_at(value).items()) for value in used})
        owner.caches["sets of widths"] = self.sets
        logger.info("%r: torch.compile and sliceout.capture make a graph for each set of widths", self)
        limit = getattr(getattr(sys.modules.get("torch._dynamo"), "config", None), "recompile_limit", 8)
        if self.sets > limit:
            warnings.warn(
                f"sliceout: {self!r}: torch.compile makes at most {limit} graphs of one forward and runs the rest "
                "without it. Use fewer steps, or raise torch._dynamo.config.recompile_limit",
                stacklevel=4,
            )

    def rates_at(self, value: float) -> dict[Slice, float]:
        """The rate of every slice of the model at this value."""
        raise NotImplementedError

    def at(self, progress: float) -> float:
        """The value at this progress."""
        return next((value for at, value in reversed(self.stages.items()) if progress >= at), self.before)

    def step(self, progress: float, total: float | None = None) -> float:
        """Set the rates for ``progress`` from 0 to 1, or for step ``progress`` of ``total``; returns the value.

        Call it before every step, or at every epoch: it does nothing unless the value changes. Progress may go back,
        as after loading a checkpoint.
        """
        if total is not None:
            if total <= 0:
                raise ValueError(f"total={total}: expected the number of steps of the whole run")
            progress = progress / total
        value = self.at(progress)
        if value != self.value:
            self._apply(value)
            self.value = value
        return value

    def _apply(self, value: float) -> None:
        if value == 0:
            off_(self.model)
            return
        on_(self.model)
        for s, rate in self.rates_at(value).items():
            s.rerate_(rate)
        for layer in self.model.modules():
            if isinstance(layer, Sliced):
                gradient_leaves.refresh(layer)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.stages}, {self.sets} set{'s' * (self.sets != 1)} of widths)"


class Schedule(Stages):
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
            if factor < 0:
                raise ValueError(f"factor {factor} at progress {at}: expected 0 (off), 1 (the full rate) or between")
        self.rates = {s: s.rate for s in slices_of(model)}
        worst = max(self.rates.values()) * max(factors.values(), default=1.0)
        if worst >= 1:
            raise ValueError(f"the factors would raise a rate to {worst:g}: expected rates below 1")
        super().__init__(model, factors, before=1.0)

    @property
    def factor(self) -> float | None:
        """The factor that holds now; ``None`` before the first step."""
        return self.value

    def rates_at(self, value: float) -> dict[Slice, float]:
        return {s: value * rate for s, rate in self.rates.items()}


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


class Grow(Stages):
    """Widths that grow: one rate for all slices of the model, by progress, whatever rate it was converted with.

    Made for ``sampling="prefix"``: training begins with a narrow network, and units enter in a few steps. Those that
    are not in yet are left alone by torch's SGD, Adam and AdamW: no decay, no momentum, no averages. They begin theirs
    when they enter, and Adam's bias correction counts from there. Any other sampling is drawn at the rates as ever.

    The loss does not jump when units enter, as long as what they make is multiplied by zero at first: see ``silent``.
    A jump remains where something depends on the width itself: ``norm="flow"``, queries and keys (the temperature of
    attention follows their width), layer and group norms over the units that grow. For other samplings than ``prefix``
    a change of rate changes the network as it does in every schedule.

    Args:
        model: a converted model.
        rates: from progress (0 to 1) to the rate from there on; 0 is the full network. Before the first entry the first
            rate holds: a network that grows does not begin wider than it goes on.
        silent: at the first ``step()``, set the outgoing weights of units that have not been in yet to zero (the
            columns of the layers that read them, in a ``prefix`` slice). Then the loss is the same before and after
            they enter, and the full network in ``eval()`` computes what the narrow one in training does. Incoming
            weights stay, so units that enter learn at once. ``False`` keeps weights that were trained elsewhere.

    Example:
        >>> from sliceout import convert_
        >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        >>> widths = convert_(model, 0.5, sampling="prefix").slices
        >>> grow = Grow(model, {0: 0.5, 0.5: 0.25, 0.75: 0.0})
        >>> grow
        Grow({0: 0.5, 0.5: 0.25, 0.75: 0.0}, 3 sets of widths)
        >>> for step in (0, 50, 75):
        ...     grow.step(step, 100), next(iter(widths))
        (0.5, Slice(32 of 64, prefix))
        (0.25, Slice(48 of 64, prefix))
        (0.0, Slice(48 of 64, prefix, off))
    """

    def __init__(self, model: nn.Module, rates: Mapping[float, float], *, silent: bool = True) -> None:
        if not isinstance(rates, Mapping) or not rates:
            raise ValueError(f"rates={rates!r}: expected rates by progress, such as {{0: 0.5, 0.5: 0.0}}")
        self.slices, self.silent = list(slices_of(model)), silent
        super().__init__(model, rates, before=rates[min(rates)])

    def rates_at(self, value: float) -> dict[Slice, float]:
        return dict.fromkeys(self.slices, value)

    def step(self, progress: float, total: float | None = None) -> float:
        first, rate = self.value is None, super().step(progress, total)
        now = progress if total is None else progress / total
        if first and self.silent and rate == min([self.before, *(r for at, r in self.stages.items() if at <= now)]):
            for layer in self.model.modules():  # unless more have been in before: those have learned something
                for weight, dim, axis in _outgoing(layer):
                    _silence(weight, dim, axis)
        return rate


def _outgoing(layer: Any) -> Iterator[tuple[Tensor, int, Axis | ConcatAxis]]:
    """The weights that multiply sliced input of this layer, the dimension along which they do, and its axis."""
    if isinstance(layer, Sliced) and ("in" in layer.axes or isinstance(layer, nn.MultiheadAttention)):
        dim = 0 if getattr(layer, "transposed", False) else 1
        for weight, taken in layer.taken():
            axis = taken.cols if dim else taken.rows
            if weight.dim() > 1 and axis is not None:
                yield weight, dim, axis


@torch.no_grad()
def _silence(weight: Tensor, dim: int, axis: Axis | ConcatAxis) -> None:
    """Set what belongs to units of a prefix that are out to zero."""
    if all(growth.grows(s) and s.sliced for s in axis.slices):
        out = torch.ones(axis.size, dtype=torch.bool)
        out[axis.kept] = False
        weight.index_fill_(dim, out.nonzero().flatten().to(weight.device), 0)


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

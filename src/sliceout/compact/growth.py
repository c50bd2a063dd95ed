"""Units of a prefix that are not in yet: optimizers leave them alone, and count their steps from when they enter.

With ``sampling="prefix"`` the units from ``width`` on get no gradient. torch's optimizers would decay their weights all
the same, and Adam would correct the new averages of a unit that enters at step 1000 as if they were 1000 steps old: its
first steps would be up to six times too large. So a parameter that has units out, or units that entered at different
times, is cut into regions whose entries were in at the same steps (an entry is in when its row and its column are), and
each is updated by itself (``optimizers``), with a step count of its own. Units that leave keep weight and state. Once
all units are in and their counts make no difference any more, the step is torch's own.

What is in is looked at before every step, whoever has changed it (a schedule, ``off_``), and noted in
``Slice.entered``: checkpoints hold it. Steps are draws there. The count of a parameter may lag behind them, since a
scaler skips steps: it is looked up once, when units enter, or else in the first step after a checkpoint was loaded.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import drawing
from ..ops import views
from ..ops.placement import Place, Placement, TensorSpec
from ..slices import Axis, Slice
from ..takes import ConcatAxis, Take
from .gradient import Region, SlicedGrad


class FixedPlace(Place):
    """A place that no draw moves: its start is made once, so that graphs can read it."""

    __slots__ = ()

    def start_on(self, device: torch.device) -> Tensor:
        return _start_on(self.start, device)


@functools.cache
def _start_on(start: int, device: torch.device) -> Tensor:
    return torch.tensor([start], device=device)


class Segment(NamedTuple):
    """A part of a dimension whose units have always been in together."""

    full: Place | None = None
    """``None`` for the whole dimension."""
    compact: Place | None = None
    """Where it lies in a gradient of the size of the slice."""
    slice: Slice | None = None
    last: int = 0
    """It is in as long as so many units of the slice are."""

    def was_in(self, step: float) -> bool:
        """Whether it took part in this step."""
        if self.slice is None:
            return True
        (width, _), *later = self.slice.entered
        return next((w for w, at in reversed(later) if at <= step), width) >= self.last


def _segments(axis: Axis | ConcatAxis | None, ages: bool) -> Iterator[Segment]:
    """What of a dimension is in, cut where units entered at different times if their ``ages`` matter."""
    if axis is None or (isinstance(axis, Axis) and not grows(axis.slice)):
        yield Segment()
        return
    offset = 0
    for a in [axis] if isinstance(axis, Axis) else axis.sections:
        s = a.slice
        width = s.entered[-1][0] if grows(s) else s.size
        cuts = sorted({0, width, *(w for w, _ in s.entered if ages and w < width)})
        for low, high in itertools.pairwise(cuts):
            if a is axis:
                full, compact = (FixedPlace(low, [n, high - low, a.blocks, a.inner]) for n in (s.size, width))
                yield Segment(full, compact, s, high)
                continue
            for block in range(a.blocks):  # runs of a fused dimension
                at, length = offset + (block * s.size + low) * a.inner, (high - low) * a.inner
                yield Segment(FixedPlace(at, [axis.size, length, 1, 1]), None, s if grows(s) else None, high)
        offset += a.size


def grows(s: Slice) -> bool:
    """Whether it has units that are in or not in, rather than kept or dropped by chance."""
    return s.sampling == "prefix"


class Growing:
    """A parameter with units that enter, as one optimizer sees it."""

    def __init__(self, t: Take) -> None:
        self.take = t
        self.slices = [s for axis in t.axes for s in axis.slices if grows(s)]
        self.key: Any = None
        self.offsets: dict[tuple[int, ...], int] = {}

    def fits(self, p: Tensor) -> bool:
        """Whether ``p`` is the tensor that the take speaks of, and neither a shard of it nor something special."""
        sides = zip(p.shape, self.take[:2], strict=False)
        plain = type(p.grad) in (Tensor, SlicedGrad) and p.is_floating_point()
        return plain and all(a is None or a.size == n for n, a in sides)

    def lies_at(self, grad: SlicedGrad) -> bool:
        """Whether a compact gradient holds what is in now: the widths may have changed since."""
        sides = [(a.slice, place) for a, place in zip(self.take[:2], grad.at[:2], strict=False) if a is not None]
        return all((place.geometry[1] if place else s.size) == s.entered[-1][0] for s, place in sides if grows(s))

    @property
    def all_in(self) -> bool:
        return all(s.entered[-1][0] == s.size for s in self.slices)

    def regions(self, ages: bool) -> list[tuple[Segment, Segment, tuple[int, ...]]]:
        """Rows, columns, and the steps at which the entries there came in or went out; ``()`` if always in."""
        key = ages, *(s.entered for s in self.slices)
        if self.key != key:
            steps = sorted({step for s in self.slices for _, step in s.entered[1:]}) if ages else []
            self.key, self.kept = key, []
            for rows, cols in itertools.product(*(list(_segments(a, ages)) for a in self.take[:2])):
                were = [rows.was_in(step) and cols.was_in(step) for step in (-1, *steps)]
                changes = tuple(s for s, a, b in zip(steps, were, were[1:], strict=False) if a != b)
                self.kept.append((rows, cols, changes))
        return self.kept

    def parts(self, grad: Tensor, state: dict[str, Any], memory: float) -> list[SlicedGrad | Region] | None:
        """The gradient region by region, each with what to subtract from the step count; ``None``: all is as ever.

        ``memory`` is the decay of the optimizer's slowest bias-corrected average, 0 if it has none.
        """
        now, regions = self.slices[0].owner.step, self.regions(ages=memory > 0)
        offsets = [self._offset(changes, now, state) for *_, changes in regions]
        if self.all_in:
            resolution = torch.finfo(grad.dtype).eps
            if all(not n or memory ** (now - c[-1]) < resolution for n, (*_, c) in zip(offsets, regions, strict=True)):
                return None
        if isinstance(grad, SlicedGrad) and not any(offsets):
            return None  # its own place is the one region
        parts: list[SlicedGrad | Region] = []
        for (rows, cols, _), offset in zip(regions, offsets, strict=True):
            if not isinstance(grad, SlicedGrad):
                parts.append(Region(grad, Placement(rows.full, cols.full), offset))
                continue
            small = views.take(grad.values(), Placement(rows.compact, cols.compact))
            at = Placement(rows.full or grad.at.rows, cols.full or grad.at.cols)  # the latter were drawn by chance
            part = SlicedGrad(small, TensorSpec.of(grad), at)
            part.offset = offset
            parts.append(part)
        return parts

    def _offset(self, changes: tuple[int, ...], now: int, state: dict[str, Any]) -> int:
        """How many steps of the parameter went by without these entries."""
        if changes not in self.offsets:
            counted = int(state["step"]) if "step" in state else 0
            if len(changes) % 2:  # out at first: the steps since are all that they had
                seen = sum(b - a for a, b in zip(changes[::2], (*changes[1::2], now), strict=True))
                missed = counted - seen
            else:
                missed = sum(b - a for a, b in zip(changes[::2], changes[1::2], strict=True))
            self.offsets[changes] = min(max(missed, 0), counted)
        return self.offsets[changes]


_held: weakref.WeakKeyDictionary[Optimizer, tuple[list[Any], dict[int, Growing]]] = weakref.WeakKeyDictionary()


def look(optimizer: Optimizer) -> dict[int, Growing]:
    """The parameters of ``optimizer`` with units that enter, by id; what is in now is noted."""
    params = [id(p) for group in optimizer.param_groups for p in group["params"]]
    key = [id(optimizer.state), drawing.generation, params]
    before, found = _held.get(optimizer, ([None], {}))
    if before != key:
        takes: dict[int, set[Take]] = {id_: set() for id_ in params}
        for layer in list[Any](drawing.layers):
            for p, t in layer.taken() if any(map(grows, layer.slices)) else ():
                takes.get(id(p), set()).add(t)
        one = {id_: Growing(*ways) for id_, ways in takes.items() if len(ways) == 1}  # not shared in two ways
        for id_, g in one.items():
            if before[0] == key[0] and id_ in found and found[id_].take == g.take:  # a loaded state has its own counts
                g.offsets = found[id_].offsets
        found = {id_: g for id_, g in one.items() if g.slices}
        _held[optimizer] = key, found
    for s in dict.fromkeys(s for g in found.values() for s in g.slices):
        width = s.width if s.on else s.size
        if not s.entered or s.entered[-1][0] != width:
            s.entered = (*s.entered, (width, s.owner.step))
    return found


_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def warn(optimizer: Optimizer) -> None:
    """Say once that this optimizer does not know of units that are not in yet, if there are any."""
    if optimizer not in _warned and not all(g.all_in for g in look(optimizer).values()):
        _warned.add(optimizer)
        warnings.warn(
            f"sliceout: {type(optimizer).__name__} steps over units that are not in yet as well: its weight decay and "
            "averages do not wait for them. Use torch's SGD without dampening, Adam or AdamW, and do not compile their "
            "step; or set weight_decay=0",
            stacklevel=3,
        )

"""Slices: which units a layer keeps at this training step, and how they are re-normalised.

A :class:`Slice` keeps ``width`` consecutive units out of ``size``. The width never changes; the *start* is drawn
anew for every optimizer step. Everything that must agree on the kept units (the rows of one weight, the batch norm
after it, the columns of the next weight) holds the *same* ``Slice`` object, so nothing can fall out of step.

The start lives twice: as an int64 tensor on the model's device, which kernels and compiled graphs read, and as a
Python int, which eager CPU code uses to make views. ``draw`` writes both; a forward pass only ever reads them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SAMPLINGS = ("circular", "window", "prefix")
NORMS = ("probabilistic", "flow", "none")
FOLDS = ("consumer", "producer")
GRADS = ("dense", "compact")


class Slice:
    """One random contiguous range of ``width`` out of ``size`` units, redrawn at every optimizer step.

    Args:
        size: number of units of the full layer.
        rate: fraction of the units that is dropped, ``0 <= rate < 1``.
        align: widths and starts are multiples of this (memory and tensor cores like 8 or more). ``None`` takes the
            largest power of two up to 8 that divides ``size``, or 1 below 64 units.
        sampling: ``"circular"`` wraps around the end, so all units are kept equally often; ``"window"`` stays inside
            the layer (the paper); ``"prefix"`` always keeps the first units.
        norm: ``"probabilistic"`` divides a unit by its own probability of being kept, ``"flow"`` all units by the kept
            fraction, ``"none"`` leaves them. For circular slices the first two coincide.
        fold: where the normalisation is multiplied into the small weight: the columns of the ``"consumer"`` (the
            paper's delayed normalisation) or the rows of the ``"producer"`` (immediate).
        seed: draws depend on ``(seed, stream, step)`` only, never on the global random state.
        grads: ``"compact"`` gives slice-sized weight gradients and slice-only optimizer updates (``sliceout.optim``).

    Example:
        >>> hidden = Slice(10, rate=0.4, sampling="window")
        >>> hidden.width, hidden.starts
        (6, (0, 1, 2, 3, 4))
    """

    def __init__(
        self,
        size: int,
        rate: float = 0.5,
        *,
        align: int | None = None,
        sampling: str = "circular",
        norm: str = "probabilistic",
        fold: str = "consumer",
        seed: int = 0,
        grads: str = "dense",
    ) -> None:
        _one_of("grads", grads, GRADS)
        _one_of("sampling", sampling, SAMPLINGS)
        _one_of("norm", norm, NORMS)
        _one_of("fold", fold, FOLDS)
        self.size = _whole("size", size)
        self.rate = _number("rate", rate)
        self.width, self.align = width_of(self.size, self.rate, align)
        self.sampling = sampling
        self.norm = norm
        self.fold = fold
        self.grads = grads
        self.seed = _whole("seed", seed)
        self.stream = 0
        self.on = True
        self._axes: dict[tuple[int, int], Axis] = {}
        self.gain, self.scale = self._scale()
        self.start = torch.zeros(1, dtype=torch.int64, device="cpu")  # whatever the default device is
        self.start_on_host = 0
        self.family = Slices([self])

    # -- what can be drawn -------------------------------------------------------------------------------------------

    @property
    def rule(self) -> tuple[int, int, int]:
        """``(count, stride, last)``: the i-th of ``count`` eligible starts is ``min(i * stride, last)``."""
        room = self.size - self.width
        if self.sampling == "prefix" or room == 0:
            return 1, self.align, 0
        if self.sampling == "window":
            return math.ceil(room / self.align) + 1, self.align, room
        stride = math.gcd(self.align, self.size)  # equal steps around the whole ring keep every unit equally often
        return self.size // stride, stride, self.size - stride

    @property
    def starts(self) -> tuple[int, ...]:
        """All eligible starts; each is drawn with the same probability."""
        count, stride, last = self.rule
        return tuple(min(i * stride, last) for i in range(count))

    @property
    def keep_probability(self) -> Tensor:
        """Probability of each unit being kept (float64, ``[size]``); it sums to ``width``."""
        kept = torch.zeros(2 * self.size + 1, dtype=torch.float64, device="cpu")
        starts = torch.tensor(self.starts, device="cpu")
        kept.index_add_(0, starts, kept.new_ones(len(starts)))
        kept.index_add_(0, starts + self.width, -kept.new_ones(len(starts)))
        kept = kept.cumsum(0)
        return (kept[: self.size] + kept[self.size : 2 * self.size]) / len(starts)

    def _scale(self) -> tuple[float | None, Tensor | None]:
        """The normalisation as ``(gain, scale)``: one number if it is the same for all units, and the full vector."""
        if self.norm == "none" or self.width == self.size:
            return 1.0, None
        if self.norm == "flow":
            scale = torch.full((self.size,), self.size / self.width, dtype=torch.float64, device="cpu")
        else:
            probability = self.keep_probability
            scale = torch.where(probability > 0, 1 / probability, 1.0)  # never-kept units of a prefix stay finite
        gain = float(scale[0])
        if not bool((scale == gain).all()):
            return None, scale
        return gain, None if gain == 1.0 else scale

    # -- the live start ----------------------------------------------------------------------------------------------

    @property
    def sliced(self) -> bool:
        """Whether this slice drops anything now (false at rate 0 and after ``off_``)."""
        return self.on and self.width < self.size

    @property
    def kept(self) -> Tensor:
        """Indices of the units kept now, in the order in which the small tensors hold them."""
        return (self.start_on_host + torch.arange(self.width, device="cpu")) % self.size

    def to(self, device: torch.device) -> None:
        """Keep the start (and the scale) on ``device``. Does nothing if they are there."""
        if device in (self.start.device, torch.device("meta")):
            return
        self.start = self._start_as_tensor().to(device)
        tensors = [self.start]
        if self.scale is not None:
            self.scale = self.scale.to(device)
            tensors.append(self.scale)
        if device.type == "cuda":
            for t in tensors:  # CUDA graphs read them in place instead of copying them in
                torch._dynamo.mark_static_address(t, guard=False)

    def _start_as_tensor(self) -> Tensor:
        return torch.tensor([self.start_on_host], dtype=torch.int64, device="cpu")

    @classmethod
    def settle(cls, members: list[Any]) -> None:
        """Called when these slices of this class got new starts; more than a start follows from it in subclasses."""

    def rerate_(self, rate: float) -> None:
        """Change the rate and with it the width. Tensors change in place: graphs of an earlier rate stay valid."""
        self.width, _ = width_of(self.size, _number("rate", rate), self.align)
        self.rate = float(rate)
        self.gain, scale = self._scale()
        if self.scale is None:
            self.scale = None if scale is None else scale.to(self.start.device)
        elif scale is not None:
            self.scale.copy_(scale)
        self.family.seek_(self.family.step)

    @property
    def share(self) -> str:
        """What is kept, in words."""
        return f"{self.width} of {self.size}"

    def axis(self, blocks: int = 1, inner: int = 1) -> Axis:
        """This slice along a dimension that holds it ``blocks`` times over, ``inner`` entries to a unit.

        ``axis(blocks=heads)`` slices every head alike; ``axis(inner=49)`` is a 7x7 map flattened behind its channels.
        """
        if (blocks, inner) not in self._axes:
            self._axes[blocks, inner] = Axis(self, blocks, inner)
        return self._axes[blocks, inner]

    def __repr__(self) -> str:
        extra = "" if self.norm == "probabilistic" else f", norm={self.norm}"
        extra += "" if self.fold == "consumer" else f", fold={self.fold}"
        extra += "" if self.grads == "dense" else f", grads={self.grads}"
        return f"{type(self).__name__}({self.share}, {self.sampling}{extra}{'' if self.on else ', off'})"


@dataclass(frozen=True)
class Axis:
    """How a slice lies along one dimension of a tensor: ``[blocks, slice.size, inner]`` entries in this order."""

    slice: Slice
    blocks: int = 1
    inner: int = 1

    def __post_init__(self) -> None:
        for name in ("blocks", "inner"):
            value = _whole(name, getattr(self, name))
            if value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")
            object.__setattr__(self, name, value)

    @property
    def size(self) -> int:
        return self.blocks * self.slice.size * self.inner

    @property
    def width(self) -> int:
        return self.blocks * self.slice.width * self.inner

    @property
    def geometry(self) -> list[int]:
        """``[size, width, blocks, inner]``, as the ops take it."""
        return [self.slice.size, self.slice.width, self.blocks, self.inner]

    @property
    def kept(self) -> Tensor:
        """Indices along the dimension that are kept now."""
        s = self.slice
        block = torch.arange(self.blocks, device="cpu")[:, None, None] * s.size
        return ((block + s.kept[:, None]) * self.inner + torch.arange(self.inner, device="cpu")).flatten()

    @property
    def slices(self) -> list[Slice]:
        return [self.slice]

    def __repr__(self) -> str:
        tile = "".join(f", {n}={v}" for n, v in (("blocks", self.blocks), ("inner", self.inner)) if v > 1)
        return f"{self.slice}{tile}"


def factors(
    rows: Axis | None, cols: Axis | None, scale_rows: bool, scale_cols: bool
) -> tuple[float, Tensor | None, Tensor | None]:
    """``gain, row_scale, col_scale``: the wanted normalisations as one number, and as vectors where units differ."""
    if not scale_rows and not scale_cols:
        return 1.0, None, None
    gain, scales = 1.0, list[Tensor | None]()
    for axis, wanted in ((rows, scale_rows), (cols, scale_cols)):
        scales.append(None)
        if axis is not None and wanted:
            if axis.slice.gain is None:
                scales[-1] = axis.slice.scale
            else:
                gain *= axis.slice.gain
    return gain, scales[0], scales[1]


@dataclass(frozen=True)
class Joint:
    """Axes one after the other along a dimension: the parts of a fused projection, each with a slice of its own."""

    parts: tuple[Axis, ...]

    @property
    def slice(self) -> Slice:
        """The first one: all parts are sliced or none."""
        return self.parts[0].slice

    @property
    def slices(self) -> list[Slice]:
        return [a.slice for a in self.parts]

    @property
    def size(self) -> int:
        return sum(a.size for a in self.parts)

    @property
    def width(self) -> int:
        return sum(a.width for a in self.parts)

    @property
    def kept(self) -> Tensor:
        """Indices along the dimension that are kept now."""
        offset, out = 0, []
        for a in self.parts:
            out.append(a.kept + offset)
            offset += a.size
        return torch.cat(out)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))


class Slices:
    """The slices of one model: drawn together, with one step count, so that a run can be repeated and resumed."""

    def __init__(self, slices: Iterable[Slice], step: int = 0) -> None:
        self.members = list(slices)
        self.drawn = 0  # how often draw_ was called on this object
        self.stamp = 0  # changes whenever starts may have
        self.witness: int | None = None  # see draws.notice
        self.version = self.changes = 0
        self._ahead: Ahead | None = None
        self.fetched: Any = None  # see ops.gather
        self._tell_apart()
        for s in self.members:
            s.family = self
        self.seek_(step)

    def _tell_apart(self) -> None:
        """No two slices may draw alike."""
        if len({(s.seed, s.stream) for s in self.members}) < len(self.members):
            for stream, s in enumerate(self.members):
                s.stream = stream

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def draw_(self) -> None:
        """Move on to the next step's starts."""
        self.drawn += 1
        self.stamp += 1
        self.step += 1
        if self._ahead is None or not self._ahead.knows(self.step):
            if self._ahead is None:
                self._tell_apart()  # what was loaded may have come from before they met
            self._ahead = Ahead(self.members, self.step, AHEAD)
        self._ahead.draw(self.step)

    def seek_(self, step: int) -> None:
        """Go to the starts of ``step``, as after loading a checkpoint."""
        self.step = step
        self.stamp += 1
        self._ahead = None  # made anew at the next draw
        Ahead(self.members, step, 1).draw(step)

    def state_dict(self) -> dict[str, Any]:
        """What to save where checkpoints do not keep the metadata of ``model.state_dict()`` (safetensors, DCP)."""
        return {"step": self.step, "slices": [[s.seed, s.stream, s.size, s.width] for s in self.members]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        here, there = [[s.size, s.width] for s in self.members], [list(x[2:]) for x in state["slices"]]
        if here != there:
            raise ValueError(f"saved slices [size, width] {there}, but this model's are {here}: convert it alike first")
        for s, (seed, stream, *_) in zip(self.members, state["slices"], strict=True):
            s.seed, s.stream = seed, stream
        self.seek_(state["step"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "witness": None, "version": 0, "changes": 0, "_ahead": None, "fetched": None}

    def __repr__(self) -> str:
        return f"Slices(step={self.step}, {self.members})"


def width_of(size: int, rate: float, align: int | None) -> tuple[int, int]:
    """``(width, align)``: the kept units, ``(1 - rate) * size`` rounded to a multiple of ``align``."""
    if size < 1:
        raise ValueError(f"size={size}: expected at least one unit")
    if not 0 <= rate < 1:
        raise ValueError(f"rate={rate}: expected 0 <= rate < 1")
    if align is None:
        align = math.gcd(size, 8) if size >= 64 else 1
    align = _whole("align", align)
    if align < 1:
        raise ValueError(f"align={align}: expected a positive whole number")
    if rate == 0:
        return size, align
    if size < align:
        raise ValueError(f"size={size} is smaller than align={align}: choose a smaller align")
    width = align * math.floor((1 - rate) * size / align + 0.5)
    if width == 0:
        raise ValueError(
            f"rate={rate} of size={size} keeps {(1 - rate) * size:.3g} units, which is 0 at align={align}: "
            "choose a lower rate or a smaller align"
        )
    return min(width, size - size % align), align


# -- drawing: a counter-based generator, so that (seed, stream, step) says it all --------------------------------------

_M32 = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijective 32-bit hash (Wellons' lowbias32) on int64 tensors.

    The second multiplier is written as a negative number, equal modulo 2**32, so that no product leaves int64.
    """
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _M32
    x = ((x ^ (x >> 15)) * (0x846CA68B - (1 << 32))) & _M32
    return x ^ (x >> 16)


def table(slices: list[Slice]) -> Tensor:
    """What the draw needs to know of each slice: int64 ``[n, 5]``, rows of ``(seed, stream, *Slice.rule)``."""
    return torch.tensor([(s.seed & _M32, s.stream, *s.rule) for s in slices], dtype=torch.int64, device="cpu")


def starts_at(step: int | Tensor, table: Tensor) -> Tensor:
    """The starts of all slices at ``step``: plain integer arithmetic, so CPU and GPU agree.

    ``step`` is a number, or an int64 tensor on the table's device where the draw itself is part of a captured graph.
    """
    seed, stream, count, stride, last = table.unbind(1)
    bits = _mix((_mix((_mix(seed) + step) & _M32) + stream * 0x9E3779B9) & _M32)
    return torch.minimum(((bits * count) >> 32) * stride, last)


AHEAD = 64
"""Steps whose starts are computed together: one at a time would cost eager training half a millisecond a step."""


class Ahead:
    """The starts of ``slices`` at ``count`` steps from ``first`` on, on the host and on the devices."""

    def __init__(self, slices: list[Slice], first: int, count: int) -> None:
        self.slices, self.first = slices, first
        starts = starts_at(torch.arange(first, first + count, device="cpu")[:, None], table(slices))
        self.on_host: list[list[int]] = starts.tolist()
        self.tensors = [s.start for s in slices]
        on_device: dict[torch.device, list[int]] = {}
        for i, s in enumerate(slices):
            if len(s.start) == 1:
                on_device.setdefault(s.start.device, []).append(i)
        self.on_device = [
            ([self.tensors[i] for i in members], starts[:, members, None].to(device, non_blocking=True))  # no waiting
            for device, members in on_device.items()
        ]
        kinds: list[Any] = list(dict.fromkeys(map(type, slices)))
        self.kinds = [(k, [s for s in slices if type(s) is k]) for k in kinds if k is not Slice]

    def knows(self, step: int) -> bool:
        """Whether ``step`` is among them, and the starts are still kept in the same places."""
        return 0 <= step - self.first < len(self.on_host) and all(
            s.start is t for s, t in zip(self.slices, self.tensors, strict=True)
        )

    def draw(self, step: int) -> None:
        """Set all starts to those of ``step``: one copy on each device."""
        row = step - self.first
        for s, start in zip(self.slices, self.on_host[row], strict=True):
            s.start_on_host = start
        for tensors, values in self.on_device:
            torch._foreach_copy_(tensors, values[row].unbind())
        for kind, members in self.kinds:
            kind.settle(members)


# -- checking what was passed ------------------------------------------------------------------------------------------


def _whole(name: str, value: Any) -> int:
    """``value`` as an int, numpy's and the like included."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: expected a whole number")
    return operator.index(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}={value!r}: expected a number")
    return float(value)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")

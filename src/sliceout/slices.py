"""Slices: which units a layer keeps at this training step, and how they are re-normalised.

A :class:`Slice` keeps ``width`` consecutive units out of ``size``. The width never changes; the *start* is drawn
anew for every optimizer step (``drawing``). Everything that must agree on the kept units (the rows of one weight, the
batch norm after it, the columns of the next weight) holds the *same* ``Slice`` object, so nothing can fall out of step.
With ``parts``, a batch is cut into that many equal parts along dimension 0, and each part has a start of its own.

An :class:`Axis` is a slice along one dimension of a tensor; ``takes`` has what is made of several of them. This module
knows nothing of the rest of the library.

Starts live twice: as an int64 tensor on the model's device, which kernels and compiled graphs read, and as Python
ints, which eager code uses to make views. ``drawing`` writes both; a forward pass only ever reads them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SAMPLINGS = ("circular", "window", "prefix")
NORMS = ("probabilistic", "flow", "none")
FOLDS = ("consumer", "producer")
GRADS = ("dense", "compact")
RANKS = ("spread", "equal")


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
        grads: ``"compact"`` gives slice-sized weight gradients and slice-only optimizer updates (``sliceout.compact``).
        parts: the batch (dimension 0) is cut into so many equal parts, each with a start of its own. Circular starts
            are spread evenly over the ring, so that every unit is kept by equally many parts (up to one); window starts
            are independent. A batch that ``parts`` does not divide has the largest number of parts that does.
        ranks: in distributed training with ``parts``, ``"spread"`` treats the parts of all ranks as one batch;
            ``"equal"`` draws the same starts on every rank.

    Example:
        >>> hidden = Slice(10, rate=0.4, sampling="window")
        >>> hidden.width, hidden.starts
        (6, (0, 1, 2, 3, 4))
    """

    contiguous = True
    """Whether the kept units lie side by side, so that one start says which they are; if not, see ``Subset``."""

    entered: tuple[tuple[int, int], ...] = ()
    """Of a prefix that has been trained: how many units were in from which step on (``compact.growth``)."""

    follows_torch = False
    """Whether ``convert_`` took the seed from ``torch.manual_seed``: ranks whose torch is seeded otherwise agree."""

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
        parts: int = 1,
        ranks: str = "spread",
    ) -> None:
        check_choice("grads", grads, GRADS)
        check_choice("ranks", ranks, RANKS)
        check_choice("sampling", sampling, SAMPLINGS)
        check_choice("norm", norm, NORMS)
        check_choice("fold", fold, FOLDS)
        self.size = as_int("size", size)
        self.rate = as_float("rate", rate)
        self.width, self.align = width_of(self.size, self.rate, align)
        self.sampling = sampling
        self.norm = norm
        self.fold = fold
        self.grads = grads
        self.parts, self.ranks = as_int("parts", parts), ranks
        if self.parts < 1:
            raise ValueError(f"parts={parts}: expected at least 1")
        if self.parts > 1 and grads == "compact":
            raise ValueError(
                f"grads='compact' with parts={parts}: together the parts train nearly every unit, so that gradients of "
                "the slice's size would save nothing. Choose grads='dense', or parts=1"
            )
        self.seed = as_int("seed", seed)
        self.stream = 0
        self.on = True
        self._axes: dict[tuple[int, int], Axis] = {}
        self.gain, self.scale = self._scale()
        self.start = torch.zeros(self.parts, dtype=torch.int64, device="cpu")  # whatever the default device is
        self.starts_on_host: Sequence[int] = [0] * self.parts
        self.owner: Any = None  # the Slices that draws this slice together with others; ``drawing`` sets it

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
        starts = torch.tensor(self.starts, device="cpu")
        begun = torch.bincount(starts, minlength=self.size).double().repeat(2).cumsum(0)  # twice around the ring
        return (begun[self.size :] - begun[self.size - self.width : -self.width]) / len(starts)

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
    def start_on_host(self) -> int:
        """The start as a Python number; of the first part, if there are several."""
        return self.starts_on_host[0]

    @start_on_host.setter
    def start_on_host(self, start: int) -> None:
        self.starts_on_host = [start] * self.parts

    def start_of(self, part: int) -> int:
        """The start of one part as a Python number; a slice with one start has it for all parts."""
        return self.starts_on_host[part if self.parts > 1 else 0]

    @property
    def kept(self) -> Tensor:
        """Indices of the units kept now, in the order of the small tensors; of the first part, if there are several."""
        return (self.start_on_host + torch.arange(self.width, device="cpu")) % self.size

    def to(self, device: torch.device) -> None:
        """Keep the start (and the scale) on ``device``. Does nothing if they are there."""
        if device in (self.start.device, torch.device("meta")):
            return
        self.start = self.start_as_tensor().to(device)
        tensors = [self.start]
        if self.scale is not None:
            self.scale = self.scale.to(device)
            tensors.append(self.scale)
        if device.type == "cuda":
            for t in tensors:  # CUDA graphs read them in place instead of copying them in
                torch._dynamo.mark_static_address(t, guard=False)

    def start_as_tensor(self) -> Tensor:
        """What ``start`` holds, made anew on the host."""
        return torch.tensor(self.starts_on_host, dtype=torch.int64, device="cpu")

    def kept_at(self, rate: float) -> float:
        """What is kept at another rate: the width of a slice. Raises if there is none."""
        return width_of(self.size, as_float("rate", rate), self.align)[0]

    def rerate_(self, rate: float) -> None:
        """Change the rate and with it the width. Tensors change in place: graphs of an earlier rate stay valid."""
        self.width, self.rate = int(self.kept_at(rate)), float(rate)
        self.gain, scale = self._scale()
        if self.scale is None:
            self.scale = None if scale is None else scale.to(self.start.device)
        elif scale is not None:
            self.scale.copy_(scale)
        if self.owner is not None:
            self.owner.seek_(self.owner.step)

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
        extra += "" if self.parts == 1 else f", {self.parts} parts"
        return f"{type(self).__name__}({self.share}, {self.sampling}{extra}{'' if self.on else ', off'})"


@dataclass(frozen=True)
class Axis:
    """How a slice lies along one dimension of a tensor: ``[blocks, slice.size, inner]`` entries in this order."""

    slice: Slice
    blocks: int = 1
    inner: int = 1

    def __post_init__(self) -> None:
        for name in ("blocks", "inner"):
            value = as_int(name, getattr(self, name))
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


def width_of(size: int, rate: float, align: int | None) -> tuple[int, int]:
    """``(width, align)``: the kept units, ``(1 - rate) * size`` rounded to a multiple of ``align``."""
    if size < 1:
        raise ValueError(f"size={size}: expected at least one unit")
    if not 0 <= rate < 1:
        raise ValueError(f"rate={rate}: expected 0 <= rate < 1")
    if align is None:
        align = math.gcd(size, 8) if size >= 64 else 1
    align = as_int("align", align)
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


# -- checking what was passed ------------------------------------------------------------------------------------------


def as_int(name: str, value: Any) -> int:
    """``value`` as an int, numpy's and the like included."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: expected a whole number")
    return operator.index(value)


def as_float(name: str, value: Any) -> float:
    """``value`` as a float; text is not taken for a number."""
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}={value!r}: expected a number")
    return float(value)


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")

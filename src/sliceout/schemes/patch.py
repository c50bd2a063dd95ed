"""Patch-SliceOut: a window of the feature map goes through the residual branch and is added back into its place.

``docs/design.md`` says how we read the paper where it leaves this open: ``rate`` is of the area, the shortcut is whole,
norms in the branch see the window only, and the window of a strided block is drawn on the map that it writes.

Both starts, row and column, are slices like all others: in device memory, redrawn at every optimizer step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import stepping
from ..nn.base import Sliced, adopt, sliced_subclass
from ..ops import host_knows_start
from ..ops.placement import is_channels_last
from ..slices import Slice


class Side(Slice):
    """One side of a window on the map that a block writes.

    Args:
        size: length of the map's side.
        rate: share of the *area* that is dropped.
        reads: length of the same side of the map that the branch reads; ``size`` times the stride of the block.
        align, settings: ``norm`` and ``seed``; see :class:`~sliceout.Slice`.
    """

    across: Side
    """The other side."""

    def __init__(self, size: int, rate: float, *, reads: int, align: int = 1, **settings: Any) -> None:
        super().__init__(size, side_rate(rate), align=align, sampling="window", **settings)
        self.rate = rate
        self.reads = reads
        self.stride = -(-reads // size)

    @property
    def reads_width(self) -> int:
        """How much of the branch's input the window covers; a map that the stride does not divide ends early."""
        return self.stride * self.width - (self.stride * self.size - self.reads)

    def kept_at(self, rate: float) -> float:
        return super().kept_at(side_rate(rate))

    @property
    def share(self) -> str:
        return f"{self.width}x{self.across.width} of {self.size}x{self.across.size}"


def side_rate(rate: float) -> float:
    """What is dropped of each side so that ``rate`` is dropped of the area."""
    return 1 - math.sqrt(1 - rate) if 0 <= rate < 1 else rate  # the rest is for Slice to refuse


def window(reads: tuple[int, int], writes: tuple[int, int], rate: float = 0.5, **settings: Any) -> tuple[Side, Side]:
    """Row and column slice for a block that reads and writes maps of these sizes.

    Args:
        reads, writes: height and width of the maps.
        rate: share of the area that is dropped.
        settings: of :class:`Side`.
    """
    row, col = (Side(n, rate, reads=m, **settings) for m, n in zip(reads, writes, strict=True))
    row.across, col.across = col, row
    return row, col


# -- the window of an activation ---------------------------------------------------------------------------------------


def cut(x: Tensor, row: Side, col: Side) -> Tensor:
    """The part of ``x`` that lies under the window."""
    if host_knows_start(x):
        top, left = row.start_on_host * row.stride, col.start_on_host * col.stride
        return x[..., top : top + row.reads_width, left : left + col.reads_width]
    return _Move.apply(x, row.start * row.stride, col.start * col.stride, (row.reads_width, col.reads_width), False)


def paste(small: Tensor, row: Side, col: Side) -> Tensor:
    """``small`` in its window of a map of zeros."""
    if host_knows_start(small):
        top, left = row.start_on_host, col.start_on_host
        return F.pad(small, (left, col.size - left - col.width, top, row.size - top - row.width))
    return _Move.apply(small, row.start, col.start, (row.size, col.size), True)


def scaled(small: Tensor, row: Side, col: Side) -> Tensor:
    """``small`` with each position divided by its probability of being in the window."""
    units = (s.start + torch.arange(s.width, device=s.start.device) for s in (row, col))
    rows, cols = (i.new_ones(()) if s.scale is None else s.scale[i] for s, i in zip((row, col), units, strict=True))
    factor = rows[..., None] * cols
    return (small * factor.to(small.device, torch.promote_types(small.dtype, torch.float32))).to(small.dtype)


class _Move(torch.autograd.Function):
    """A window out of a map, or ``back`` into one of zeros: each is the gradient of the other.

    Starts are data, so that one graph serves all; both directions gather, so that no two writes meet.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, top: Tensor, left: Tensor, shape: tuple[int, int], back: bool) -> Tensor:
        ctx.shape, ctx.back = x.shape[-2:], back
        ctx.save_for_backward(top, left)
        places = zip((top, left), (torch.arange(n, device=x.device) for n in shape), strict=True)
        rows, cols = (i - at.to(x.device) if back else i + at.to(x.device) for at, i in places)
        if back:
            height, width = ctx.shape
            inside = ((rows >= 0) & (rows < height))[:, None] & (cols >= 0) & (cols < width)
            full = x[..., rows.clamp(0, height - 1)[:, None], cols.clamp(0, width - 1)]
            moved = torch.where(inside, full, full.new_zeros(()))
        else:
            moved = x[..., rows[:, None], cols]
        return moved.contiguous(memory_format=torch.channels_last) if is_channels_last(x) else moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _Move.apply(grad, *ctx.saved_tensors, ctx.shape, not ctx.back), None, None, None, None


# -- residual blocks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """How a residual block is put together."""

    convs: int
    norm: str
    """``bn`` or ``norm``: what the norms are called, before their number."""
    norm_first: bool
    """Norm and activation in front of each convolution (Wide ResNet), or behind it (ResNet)."""
    act: str | None
    """The activation: an attribute (``#`` stands for its number), ``relu()`` the function, or ``None``: in the norm."""
    shortcut: str | None
    """The attribute that projects the shortcut, if the class has one."""
    activated: bool
    """Whether the shortcut projects what the first norm and activation have made of the input."""

    def enter(self, block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the branch reads and what the shortcut is."""
        y = self._act(block, 1, self._norm(block, 1, x)) if self.norm_first else x
        project = getattr(block, self.shortcut, None) if self.shortcut else None
        return y, x if project is None else project(y if self.activated else x)

    def branch(self, block: Any, y: Tensor) -> Tensor:
        """From the input of the first convolution to the sum. Dropouts rest; stochastic depth does not."""
        for i in range(1, self.convs + 1):
            y = getattr(block, f"conv{i}")(y)
            if self.norm_first and i < self.convs:
                y = self._act(block, i + 1, self._norm(block, i + 1, y))
            if not self.norm_first:
                y = self._norm(block, i, y)
                y = self._act(block, i, y) if i < self.convs else y
        for name in ("se", "drop_path"):
            layer = getattr(block, name, None)
            y = y if layer is None else layer(y)
        return y

    def leave(self, block: Any, y: Tensor) -> Tensor:
        """What follows the sum."""
        return y if self.norm_first else self._act(block, self.convs, y)

    def __call__(self, block: Any, x: Tensor) -> Tensor:
        y, shortcut = self.enter(block, x)
        return self.leave(block, shortcut + self.branch(block, y))

    def _norm(self, block: Any, i: int, x: Tensor) -> Tensor:
        return getattr(block, f"{self.norm}{i}")(x)

    def _act(self, block: Any, i: int, x: Tensor) -> Tensor:
        if self.act is None:
            return x
        return F.relu(x) if self.act == "relu()" else getattr(block, self.act.replace("#", str(i)))(x)


class PatchBlock(Sliced):
    """A residual block whose branch sees one window of its input while it trains."""

    roles = ("row", "col")
    _name_prefix = "Patch"
    _form: Form

    def forward(self, x: Tensor) -> Tensor:
        sides: Any = self.slices
        row, col = sides
        if not self.training or not (row.sliced or col.sliced):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        if not torch.compiler.is_compiling() and not row.owner.drawn:
            stepping.check_drawn(row.owner, next(self.parameters()))  # type: ignore[attr-defined]
        form = self._form
        y, shortcut = form.enter(self, x)
        if tuple(y.shape[-2:]) != (row.reads, col.reads):
            raise ValueError(
                f"this block reads a map of {'x'.join(map(str, y.shape[-2:]))}, but its window was made for "
                f"{row.reads}x{col.reads}: convert_ with example_inputs of the size that you train on"
            )
        branch, gain = form.branch(self, cut(y, row, col)), 1.0
        if row.gain is None or col.gain is None:
            branch = scaled(branch, row, col)
        else:
            gain = row.gain * col.gain
        return form.leave(self, torch.add(shortcut, paste(branch, row, col), alpha=gain))


def patch_(block: nn.Module, form: Form, row: Side, col: Side) -> nn.Module:
    """Let the branch of a residual block see the window of ``row`` and ``col``, in place."""
    made = sliced_subclass(type(block), PatchBlock, _form=form)
    adopt(block, made, {"row": row.axis(), "col": col.axis()})
    return block

"""The slices of one fetch: their memory, their one launch, and the one autograd node that stands for all of them."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..slices import Slice, Take
from . import library, views
from .placement import (
    Place,
    Placement,
    TensorSpec,
    address_key,
    compact_gradient,
    is_channels_last,
    memory_format,
    small_shape,
    strides_of,
)

if TYPE_CHECKING:
    from . import multi_tensor

_users = getattr(torch._C, "_storage_Use_Count", None)  # how many tensors share a memory; without it none is kept


class TakeLayout:
    """Shapes and numbers of a take. Held by the graph, so it must not hold the slices, which hold what was fetched."""

    def __init__(self, full: Tensor, t: Take, dtype: torch.dtype | None) -> None:
        from . import multi_tensor  # needs triton: only where it is used

        axes = t.simple_axes
        self.starts = [a.slice.start for a in t.axes]
        self.widths = [a.slice.width for a in t.axes]
        self.spec, self.strides = TensorSpec.of(full), full.stride()
        self.dtype = dtype or full.dtype
        self.rows, self.cols = (None if a is None else (a.slice.start, a.geometry) for a in axes)
        self.small_shape = small_shape(full.shape, *([] if a is None else a.geometry for a in axes))
        self.small_strides = strides_of(tuple(self.small_shape), is_channels_last(full))
        self.memory_format = memory_format(full)
        self.put_strides = strides_of(*self.spec[:2])
        self.factors = t.factors
        self.compact = t.compact
        self.take_row: list[int] | None = None
        self.put_row: list[int] | None = None
        self.readable, self.piece_of = multi_tensor.supports(full), multi_tensor.Piece

    def fits(self, full: Tensor, slices: list[Slice]) -> bool:
        for s, start, width in zip(slices, self.starts, self.widths, strict=True):
            if s.start is not start or s.width != width:
                return False
        shape, _, dtype = self.spec
        return full.stride() == self.strides and full.dtype is dtype and full.shape == shape

    def empty(self, device: torch.device) -> Tensor:
        """Memory for the full tensor's gradient."""
        return torch.empty_strided(self.spec.shape, self.put_strides, dtype=self.spec.dtype, device=device)

    def piece(self, full: Tensor, small: Tensor, row: list[int] | None) -> multi_tensor.Piece:
        return self.piece_of(full, small, self.rows, self.cols, *self.factors, layout=row)


class Batch:
    """Slices that are fetched in one launch, and the memory they are put in.

    Whoever asks is given other tensors over that memory; as long as one of them is alive, it has more users than at
    first.
    """

    used = -1  # the round it served last

    def __init__(self, takes: list[Take], layouts: list[TakeLayout], fulls: list[Tensor]) -> None:
        from . import multi_tensor

        self.key = address_key(fulls)
        self.addresses = self.key[: len(fulls)]
        self.layout = BatchLayout(takes, layouts)
        self.cuts = [(s, s.start, s.width) for s in _slices(takes)]
        self.steady = _users is not None and all(form.readable for form in self.layout.entries)
        self.copies = []
        pieces = []
        with torch.inference_mode(False):  # memory that autograd may see at another time
            for form, full in zip(self.layout.entries, fulls, strict=True):
                small = torch.empty(
                    form.small_shape, dtype=form.dtype, device=full.device, memory_format=form.memory_format
                )
                source = full
                if not form.readable:
                    source = full.detach().contiguous(memory_format=form.memory_format)
                    self.copies.append(source)
                piece = form.piece(source, small, form.take_row)
                if piece.layout is None:
                    piece.layout = form.take_row = multi_tensor.layout(piece, walk_full=False)
                pieces.append(piece)
        self.plan, self.multi_tensor = multi_tensor.TakePlan(pieces), multi_tensor
        self.memory = [piece.small for piece in pieces]
        self.storages = [t.untyped_storage() for t in self.memory]
        self.cells = [s._cdata for s in self.storages]
        self.unused = self.users()

    def serves(self, fulls: list[Tensor]) -> bool:
        """Whether it would be the same if it were made anew for its portion, and nobody else has its memory."""
        return (
            address_key(fulls) == self.key
            and all(s.start is start and s.width == width for s, start, width in self.cuts)
            and self.users() == self.unused
        )

    def users(self) -> list[int]:
        """How many tensors have each memory, and how many objects hold it as a storage."""
        return [*map(_users, self.cells), *map(sys.getrefcount, self.storages)] if _users else []

    def fill(self) -> tuple[Tensor, ...]:
        """The slices as they are now."""
        self.multi_tensor.take(self.plan)
        return tuple([t.data for t in self.memory])


def _slices(takes: list[Take]) -> list[Slice]:
    return list(dict.fromkeys(a.slice for t in takes for a in t.axes))


class BatchLayout:
    """What a graph needs of a batch. It must not hold the slices, which hold what was fetched."""

    def __init__(self, takes: list[Take], layouts: list[TakeLayout]) -> None:
        self.entries = layouts
        slices = _slices(takes)
        axes = list(dict.fromkeys(a for t in takes for a in t.simple_axes if a is not None))
        self.slices = [weakref.ref(s) for s in slices]
        self.axes = [(weakref.ref(a), slices.index(a.slice), a.geometry) for a in axes]
        self.sides = [[None if a is None else axes.index(a) for a in t.simple_axes] for t in takes]
        self.dense = not any(form.compact for form in self.entries)
        self.puts: multi_tensor.PutPlan | None = None  # once it is known how gradients come

    def starts(self) -> list[int | None]:
        """Where the slices lie now; ``None`` if the model is gone."""
        live = [ref() for ref in self.slices]
        return [None if s is None else s.start_on_host for s in live]

    def usual(self, grads: tuple[Tensor | None, ...]) -> bool:
        """Whether all gradients have come, and lie as they do in every step."""
        return all(
            grad is not None and grad.stride() == form.small_strides
            for form, grad in zip(self.entries, grads, strict=True)
        )

    def put(self, grads: tuple[Tensor, ...]) -> list[Tensor]:
        """All of them in their places in full tensors."""
        from . import multi_tensor

        device = grads[0].device
        fulls = [form.empty(device) for form in self.entries]
        if self.puts is None:
            self.puts = multi_tensor.PutPlan(
                [f.piece(full, g, None) for f, full, g in zip(self.entries, fulls, grads, strict=True)]
            )
        self.puts.put(fulls, grads)
        return fulls

    def placements(self, starts: list[int]) -> list[Placement]:
        """Where the entries lay when the slices had these starts."""
        places = [Place(starts[s], geometry, axis()) for axis, s, geometry in self.axes]
        found = []
        for sides, form in zip(self.sides, self.entries, strict=True):
            rows, cols = (None if a is None else places[a] for a in sides)
            found.append(Placement(rows, cols, *form.factors))
        return found


class Gather(views.Function):
    """All slices of a portion; backward puts all gradients into place, or hands on slice-sized ones."""

    @staticmethod
    def forward(ctx: Any, batch: Batch, *fulls: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.starts = batch.layout, batch.layout.starts()
        smalls = batch.fill()
        if frozen := [s for s, f in zip(smalls, fulls, strict=True) if not f.requires_grad]:
            ctx.mark_non_differentiable(*frozen)
        return smalls

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        from . import multi_tensor

        layout, needed = ctx.layout, ctx.needs_input_grad[1:]
        whole = torch.is_grad_enabled()  # second derivatives are asked for: ordinary operations have them
        moved = ctx.starts != layout.starts()
        if layout.dense and not (whole or moved) and layout.usual(grads):
            return None, *layout.put(grads)
        out: list[Tensor | None] = [None] * len(grads)
        pieces, apart = [], []
        for i, (form, grad, wanted) in enumerate(zip(layout.entries, grads, needed, strict=True)):
            if grad is None or not wanted:
                continue
            if whole or moved or form.compact:
                apart.append((i, grad))
                continue
            full = out[i] = form.empty(grad.device)
            piece = form.piece(full, grad, form.put_row)
            if piece.layout is None:
                piece.layout = form.put_row = multi_tensor.layout(piece, walk_full=True)
            pieces.append(piece)
        if pieces:
            multi_tensor.put(pieces)
        if apart:
            at = layout.placements(ctx.starts)
            for i, grad in apart:
                form = layout.entries[i]
                make = compact_gradient if form.compact and not whole else library.put
                out[i] = make(grad, form.spec, at[i])
        return None, *out

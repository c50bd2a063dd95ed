"""The slices of one fetch: their memory, their one launch, and the one autograd node that stands for all of them.

Needs Triton: imported by ``prefetch`` where it fetches.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..takes import Take
from . import library, multi_tensor, reference, views
from .placement import Place, Placement, TensorSpec, address_key, compact_gradient, empty_small, memory_format

_users = getattr(torch._C, "_storage_Use_Count", None)  # how many tensors share a memory; without it none is kept


class TakeLayout:
    """Shapes and numbers of a take. Held by the graph, so it must not hold the slices, which hold what was fetched."""

    def __init__(self, full: Tensor, t: Take, dtype: torch.dtype | None, parts: int = 0) -> None:
        axes = t.simple_axes
        self.parts = parts
        self.cuts = [(a.slice.start, a.slice.width) for a in t.axes]
        self.spec, self.strides = TensorSpec.of(full), full.stride()
        self.dtype = dtype or full.dtype
        self.row_geometry, self.col_geometry = ([] if a is None else a.geometry for a in axes)
        self.rows, self.cols = (None if a is None else (a.slice.start, a.geometry) for a in axes)
        self.factors = t.factors
        self.compact = t.compact
        self.readable = multi_tensor.supports(full)
        self.put_row: tuple[int, ...] | None = None  # of a table

    def fits(self, full: Tensor, t: Take) -> bool:
        every = zip(t.axes, self.cuts, strict=True)
        same_cuts = all(a.slice.start is start and a.slice.width == width for a, (start, width) in every)
        shape, _, dtype = self.spec
        return same_cuts and full.stride() == self.strides and full.dtype is dtype and full.shape == shape

    def put_piece(self, full: Tensor, small: Tensor) -> multi_tensor.Piece:
        """To put a gradient into place; those of several parts are added up."""
        piece = multi_tensor.Piece(full, small, self.rows, self.cols, *self.factors, parts=max(self.parts, 1))
        if self.put_row is None:
            self.put_row = multi_tensor.layout(piece, walk_full=True)
        piece.layout = self.put_row
        return piece

    def take_pieces(self, full: Tensor, small: Tensor) -> list[multi_tensor.Piece]:
        """To take from ``full``; a piece for each part."""
        if not self.parts:
            return [multi_tensor.Piece(full, small, self.rows, self.cols, *self.factors)]
        pieces = []
        for i in range(self.parts):
            rows, cols = (s and (reference.start_of(s[0], i), s[1]) for s in (self.rows, self.cols))
            pieces.append(multi_tensor.Piece(full, small[i], rows, cols, *self.factors))
        return pieces


class Batch:
    """Slices that are fetched in one launch, and the memory they are put in.

    Whoever asks is given other tensors over that memory; as long as one of them is alive, it has more users than at
    first.
    """

    used = -1  # the round it served last

    def __init__(self, takes: list[Take], layouts: list[TakeLayout], fulls: list[Tensor]) -> None:
        self.key = address_key(fulls)
        self.addresses = self.key[: len(fulls)]
        self.cuts = [(s, s.start, s.width) for s in dict.fromkeys(a.slice for t in takes for a in t.axes)]
        self.steady = _users is not None and all(form.readable for form in layouts)
        pieces, self.memory, self.copies = [], list[Tensor](), list[Tensor]()
        with torch.inference_mode(False):  # memory that autograd may see at another time
            for form, full in zip(layouts, fulls, strict=True):
                small = empty_small(full, form.row_geometry, form.col_geometry, form.dtype, form.parts)
                source = full if form.readable else full.detach().contiguous(memory_format=memory_format(full))
                pieces += form.take_pieces(source, small)
                self.memory.append(small)
                self.copies += [] if form.readable else [source]
        self.plan = multi_tensor.LaunchPlan(pieces, walk_full=False, fixed=True)
        del pieces, small  # which share the memory whose users are counted
        self.layout = BatchLayout(takes, layouts, [t.stride() for t in self.memory])
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
        multi_tensor.take(self.plan)
        return tuple([t.data for t in self.memory])


class BatchLayout:
    """What a graph needs of a batch. It must not hold the slices, which hold what was fetched."""

    def __init__(self, takes: list[Take], layouts: list[TakeLayout], small_strides: list[Any]) -> None:
        axes = list(dict.fromkeys(a for t in takes for a in t.simple_axes if a is not None))
        self.axes = [(weakref.ref(a), a.geometry) for a in axes]
        self.sides = [[None if a is None else axes.index(a) for a in t.simple_axes] for t in takes]
        self.entries, self.small_strides = layouts, small_strides
        self.dense = not any(form.compact for form in layouts)
        self.puts: multi_tensor.LaunchPlan | None = None  # once it is known how gradients come

    def starts(self) -> list[Sequence[int] | None]:
        """Where the slices lie now, part by part; ``None`` if the model is gone."""
        live = [ref() for ref, _ in self.axes]
        return [None if a is None else a.slice.starts_on_host for a in live]

    def usual(self, grads: tuple[Tensor | None, ...]) -> bool:
        """Whether all gradients have come, and lie as they do in every step."""
        every = zip(grads, self.small_strides, strict=True)
        return all(grad is not None and grad.stride() == strides for grad, strides in every)

    def put(self, grads: tuple[Tensor, ...]) -> list[Tensor]:
        """All of them in their places in full tensors."""
        fulls = [form.spec.empty(grads[0].device) for form in self.entries]
        if self.puts is None:
            every = zip(self.entries, fulls, grads, strict=True)
            pieces = [form.put_piece(full, grad) for form, full, grad in every]
            self.puts = multi_tensor.LaunchPlan(pieces, walk_full=True)
        for column, tensors in enumerate((fulls, grads)):
            self.puts.replace(column, map(Tensor.data_ptr, tensors))
        multi_tensor.put(self.puts)
        return fulls

    def placements(self, i: int, starts: list[Sequence[int]]) -> list[Placement]:
        """Where the entries of the ``i``-th take lay when the slices had these starts, part by part."""
        found = []
        for part in range(max(self.entries[i].parts, 1)):
            places: list[Place | None] = []
            for a in self.sides[i]:
                axis, geometry = (None, []) if a is None else self.axes[a]
                places.append(None if a is None else Place(starts[a][part % len(starts[a])], geometry, axis()))  # type: ignore[misc]
            rows, cols = places
            found.append(Placement(rows, cols, *self.entries[i].factors))
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
            full = out[i] = form.spec.empty(grad.device)
            pieces.append(form.put_piece(full, grad))
        if pieces:
            multi_tensor.put(pieces)
        for i, grad in apart:
            form, at = layout.entries[i], layout.placements(i, ctx.starts)
            make = compact_gradient if form.compact and not whole else library.put
            each = zip(grad if form.parts else [grad], at, strict=True)
            out[i] = functools.reduce(torch.add, [make(small, form.spec, one) for small, one in each])
        return None, *out

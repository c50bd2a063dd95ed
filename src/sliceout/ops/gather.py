"""All slices of a step in one launch, for eager code on a GPU, which waits for launches and for Python.

Nobody declares what a forward pass will take: it is learned. The first pass takes its slices one by one and notes them;
from then on the first take after a draw fetches everything that was noted, and the other takes find theirs waiting. One
autograd node stands for all of them, so backward is one launch as well.

What is waiting is used as long as it is true: the slices have not moved, the parameter has not changed, gradients are
wanted or not wanted as before, and no capture has begun or ended. Parameters are fetched in a few portions rather than
all together, so that gradients keep arriving during the backward pass (data parallel training starts to send them).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import reference, tables, views

if TYPE_CHECKING:
    from ..slices import Axis, Slices

PORTION = 1 << 26
"""Bytes of parameters that are fetched together (torch's data parallel buckets hold 25 MB)."""
FORGET = 64
"""Rounds without use after which a note is thrown away."""


def take(
    full: Tensor, rows: Axis | None, cols: Axis | None, scale_rows: bool, scale_cols: bool, dtype: torch.dtype | None
) -> Tensor | None:
    """The slice of ``full`` from what was fetched, or ``None``: then it must be taken by itself this time."""
    if not tables.possible(full.device) or type(full) not in _PLAIN or not full.is_leaf or views._transformed():
        return None
    family = (rows or cols).slice.family  # type: ignore[union-attr]
    if rows is not None and cols is not None and rows.slice.family is not cols.slice.family:
        return None
    plan = _plans.get(family)
    if plan is None:
        plan = _plans[family] = Plan()
    return plan.take(family, full, (id(full), rows, cols, scale_rows, scale_cols, dtype))


_PLAIN = (Tensor, torch.nn.Parameter)
_plans: weakref.WeakKeyDictionary[Slices, Plan] = weakref.WeakKeyDictionary()
Key = tuple[int, "Axis | None", "Axis | None", bool, bool, "torch.dtype | None"]


class Note:
    """A take that has been seen and will be fetched with the others."""

    def __init__(self, full: Tensor, key: Key, used: int) -> None:
        self.full = weakref.ref(full)
        _, self.rows, self.cols, self.scale_rows, self.scale_cols, dtype = key
        self.dtype = dtype or full.dtype
        self.portion = -1
        self.used = used
        self.version = -1
        self.address = 0
        self.small: dict[bool, Tensor] = {}  # by whether gradients are wanted

    def holds(self, full: Tensor) -> bool:
        """Whether what was fetched is still what ``full`` is."""
        return self.version == full._version and self.address == full.data_ptr()


class Plan:
    """What the forward passes of one model take."""

    def __init__(self) -> None:
        self.notes: dict[Key, Note] = {}
        self.portions: list[list[Note]] = []
        self.stamp: tuple[Any, ...] = ()
        self.round = 0
        self.stale = False

    def take(self, family: Slices, full: Tensor, key: Key) -> Tensor | None:
        stamp = family.stamp, tables.capturing(full.device)
        if stamp != self.stamp:
            self.begin(stamp)
        note = self.notes.get(key)
        if note is None or note.full() is not full:
            self.notes[key] = Note(full, key, self.round)
            self.stale = True
            return None
        note.used = self.round
        wanted = torch.is_grad_enabled()
        if wanted not in note.small or not note.holds(full):
            if self.stale:
                self.arrange()
            self.fetch(self.portions[note.portion], wanted)
        return note.small[wanted]

    def begin(self, stamp: tuple[Any, ...]) -> None:
        """A new round: nothing that was fetched is true any more."""
        self.stamp = stamp
        self.round += 1
        for note in self.notes.values():
            note.small = {}

    def arrange(self) -> None:
        """Put the notes into portions, parameters apart from statistics, which change during a pass."""
        alive = [(key, note) for key, note in self.notes.items() if note.full() is not None]
        self.notes = {key: note for key, note in alive if note.used > self.round - FORGET}
        self.portions, room = [], {True: 0, False: 0}
        open_portion: dict[Any, int] = {}
        for note in self.notes.values():
            full = note.full()
            assert full is not None
            kind = full.requires_grad, full.device
            if kind not in open_portion or room[full.requires_grad] < full.nbytes:
                open_portion[kind] = len(self.portions)
                self.portions.append([])
                room[full.requires_grad] = PORTION
            room[full.requires_grad] -= full.nbytes
            note.portion = open_portion[kind]
            self.portions[note.portion].append(note)
        self.stale = False

    def fetch(self, portion: list[Note], wanted: bool) -> None:
        """Take every slice of ``portion`` in one launch."""
        fulls = [note.full() for note in portion]
        alive = [(n, f) for n, f in zip(portion, fulls, strict=True) if f is not None]
        notes, tensors = [n for n, _ in alive], [f for _, f in alive]
        graph = wanted and any(f.requires_grad for f in tensors)
        smalls = Gather.apply(notes, *tensors) if graph else _gather(notes, tensors)
        for note, full, small in zip(notes, tensors, smalls, strict=True):
            if not note.holds(full):
                note.small, note.version, note.address = {}, full._version, full.data_ptr()
            note.small[wanted] = small


def _cut(axis: Axis | None) -> tuple[Tensor, list[int]] | None:
    return None if axis is None else (axis.slice.start, axis.geometry)


def _scale(axis: Axis | None, wanted: bool) -> tuple[float, Tensor | None]:
    """The normalisation of an axis as one number, or a vector where units differ."""
    if axis is None or not wanted:
        return 1.0, None
    return (axis.slice.gain, None) if axis.slice.gain is not None else (1.0, axis.slice.scale)


def _piece(note: Note, full: Tensor, small: Tensor) -> Any:
    from .many import Piece

    row_gain, row_scale = _scale(note.rows, note.scale_rows)
    col_gain, col_scale = _scale(note.cols, note.scale_cols)
    return Piece(full, small, _cut(note.rows), _cut(note.cols), row_gain * col_gain, row_scale, col_scale)


def _gather(notes: list[Note], fulls: list[Tensor]) -> tuple[Tensor, ...]:
    from . import many

    pieces = []
    for note, full in zip(notes, fulls, strict=True):
        rows, cols = ([] if a is None else a.geometry for a in (note.rows, note.cols))
        small = views.empty_small(full, rows, cols, note.dtype)
        source = full.detach()
        if not many.supports(source):
            source = source.contiguous(memory_format=views.memory_format(full))
        pieces.append(_piece(note, source, small))
    many.take(pieces)
    return tuple(p.small for p in pieces)


class Gather(views._Function):
    """All slices of a portion; backward puts all gradients into place, or hands on slice-sized ones."""

    @staticmethod
    def forward(ctx: Any, notes: list[Note], *fulls: Tensor) -> tuple[Tensor, ...]:
        from ..grads import Place

        ctx.set_materialize_grads(False)
        ctx.notes = notes
        ctx.likes = [(tuple(f.shape), views.is_channels_last(f), f.dtype) for f in fulls]
        ctx.places = [(Place.now(n.rows), Place.now(n.cols)) for n in notes]
        smalls = _gather(notes, list(fulls))
        ctx.mark_non_differentiable(*(s for s, f in zip(smalls, fulls, strict=True) if not f.requires_grad))
        return smalls

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        from ..grads import SlicedGrad
        from . import many

        out: list[Tensor | None] = [None] * len(grads)
        pieces = []
        dense = torch.is_grad_enabled()  # second derivatives are asked for: ordinary operations have them
        for i, (note, grad) in enumerate(zip(ctx.notes, grads, strict=True)):
            if grad is None or not ctx.needs_input_grad[i + 1]:
                continue
            rows, cols = ctx.places[i]
            (row_gain, row_scale), (col_gain, col_scale) = (
                _scale(note.rows, note.scale_rows), _scale(note.cols, note.scale_cols),
            )  # fmt: skip
            compact = all(a is None or a.slice.grads == "compact" for a in (note.rows, note.cols))
            if compact and not dense:
                out[i] = SlicedGrad(grad, ctx.likes[i], rows, cols, row_gain * col_gain, row_scale, col_scale)
                continue
            starts = [None if p is None else p.start_on(grad.device) for p in (rows, cols)]
            geometries = [[] if p is None else list(p.geometry) for p in (rows, cols)]
            shape, channels_last, dtype = ctx.likes[i]
            if dense:
                put = torch.ops.sliceout.put
                small = grad if row_gain * col_gain == 1 else grad * (row_gain * col_gain)
                out[i] = put(small, *starts, *geometries, row_scale, col_scale, shape, channels_last, dtype)
                continue
            full = torch.empty(
                shape, dtype=dtype, device=grad.device, memory_format=views.format_of(len(shape), channels_last)
            )
            row, col = (None if s is None else (s, g) for s, g in zip(starts, geometries, strict=True))
            pieces.append(many.Piece(full, grad, row, col, row_gain * col_gain, row_scale, col_scale))
            out[i] = full
        if pieces:
            many.put(pieces)
        return None, *out


def usable(full: Tensor, rows: Axis | None, cols: Axis | None) -> bool:
    """Whether a slice of this tensor may be fetched with others: plain slices of eager code on a GPU."""
    return full.is_cuda and not any(a is not None and reference.is_table(a.slice.start) for a in (rows, cols))

"""All slices of a step in one launch, for eager code on a GPU, which waits for launches and for Python.

Nobody declares what a forward pass will take: it is learned. The first pass takes its slices one by one and notes them;
from then on the first take after a draw fetches everything that was noted, and the other takes find theirs waiting. One
autograd node stands for all of them, so backward is one launch as well.

What is waiting is used as long as it is true: the slices have not moved, the parameter has not changed, gradients are
wanted or not wanted as before, and no capture has begun or ended. In data parallel training parameters are fetched in
a few portions rather than all together, so that gradients keep arriving, and are sent, during the backward pass.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import reference, tables, views

if TYPE_CHECKING:
    from ..grads import SlicedGrad
    from ..slices import Axis
    from .many import Piece

PORTION = 1 << 26
"""Bytes of parameters that are fetched together in data parallel training (torch's own buckets hold 25 MB)."""
FORGET = 64
"""Rounds without use after which a note is thrown away."""


def take(
    full: Tensor, rows: Any, cols: Any, scale_rows: bool, scale_cols: bool, dtype: torch.dtype | None
) -> Tensor | None:
    """The slice of ``full`` from what was fetched, or ``None``: then it must be taken by itself this time."""
    if _transformed():
        return None
    family = (cols if rows is None else rows).slice.family
    plan: Plan = family.fetched
    if plan is None:
        plan = family.fetched = Plan()
    capturing = tables.capturing(full.device)
    if family.stamp != plan.stamp or capturing is not plan.capturing:
        if capturing and not tables.possible(full.device):
            return None
        plan.begin(family.stamp, capturing)
    key = id(full), id(rows), id(cols), scale_rows, scale_cols, dtype
    note = plan.notes.get(key)
    if note is None or note.full() is not full:
        plan.learn(key, Note(full, rows, cols, scale_rows, scale_cols, dtype, plan.round))
        return None
    if note.alone:
        return None
    note.used = plan.round
    wanted = torch.is_grad_enabled()
    small = note.small.get(wanted)
    if small is None or note.version != full._version or note.address != full.data_ptr():
        plan.fetch(note, wanted)
        small = note.small[wanted]
    return small


_PLAIN = (Tensor, torch.nn.Parameter)
_transformed = torch._C._are_functorch_transforms_active
Key = tuple[int, int, int, bool, bool, "torch.dtype | None"]


class Note:
    """A take that has been seen and will be fetched with the others."""

    def __init__(
        self, full: Tensor, rows: Any, cols: Any, scale_rows: bool, scale_cols: bool, dtype: Any, used: int
    ) -> None:
        self.full = weakref.ref(full)
        self.rows, self.cols, self.scale_rows, self.scale_cols = rows, cols, scale_rows, scale_cols
        self.dtype = dtype or full.dtype
        self.alone = not _fits(full, rows, cols)
        self.portion = -1
        self.used = used
        self.version = -1
        self.address = 0
        self.small: dict[bool, Tensor] = {}  # by whether gradients are wanted
        self._form: Form | None = None

    def holds(self, full: Tensor) -> bool:
        """Whether what was fetched is still what ``full`` is."""
        return self.version == full._version and self.address == full.data_ptr()

    def form(self, full: Tensor) -> Form:
        """What does not change from step to step; made anew if the slices got another width or device."""
        key = [(a.slice.start.data_ptr(), a.slice.width) for a in (self.rows, self.cols) if a is not None]
        if self._form is None or self._form.key != key:
            self._form = Form(key, full, self)
        return self._form

    def place(self) -> tuple[int, int]:
        """The starts now."""
        rows, cols = self.rows, self.cols
        return 0 if rows is None else rows.slice.start_on_host, 0 if cols is None else cols.slice.start_on_host


class Form:
    """Shapes and numbers of a take."""

    def __init__(self, key: list[tuple[int, int]], full: Tensor, note: Note) -> None:
        self.key = key
        self.rows, self.cols = (None if a is None else (a.slice.start, a.geometry) for a in (note.rows, note.cols))
        geometries = ([] if cut is None else cut[1] for cut in (self.rows, self.cols))
        self.small_shape = views.small_shape(full.shape, *geometries)
        self.like = tuple(full.shape), views.is_channels_last(full), full.dtype
        self.memory_format = views.memory_format(full)
        row_gain, self.row_scale = _scale(note.rows, note.scale_rows)
        col_gain, self.col_scale = _scale(note.cols, note.scale_cols)
        self.gain = row_gain * col_gain
        self.compact = all(a is None or a.slice.grads == "compact" for a in (note.rows, note.cols))
        self.take_layout: list[int] | None = None
        self.put_layout: list[int] | None = None

    def piece(self, full: Tensor, small: Tensor, layout: list[int] | None) -> Piece:
        from .many import Piece

        return Piece(
            full, small, self.rows, self.cols, self.gain, self.row_scale, self.col_scale, layout=layout
        )  # fmt: skip


def _scale(axis: Axis | None, wanted: bool) -> tuple[float, Tensor | None]:
    """The normalisation of an axis as one number, or a vector where units differ."""
    if axis is None or not wanted:
        return 1.0, None
    return (axis.slice.gain, None) if axis.slice.gain is not None else (1.0, axis.slice.scale)


def _fits(full: Tensor, rows: Any, cols: Any) -> bool:
    """Whether it can be fetched with others: a plain parameter or buffer, and slices of one family."""
    axes = [a for a in (rows, cols) if a is not None]
    return (
        type(full) in _PLAIN
        and full.is_leaf
        and not any(hasattr(a, "parts") or reference.is_table(a.slice.start) for a in axes)
        and len({a.slice.family for a in axes}) == 1
        and all(full.shape[d] == a.size for d, a in enumerate((rows, cols)) if a is not None)
    )


class Plan:
    """What the forward passes of one model take."""

    def __init__(self) -> None:
        self.notes: dict[Key, Note] = {}
        self.portions: list[list[Note]] = []
        self.stamp = -1
        self.capturing = False
        self.round = 0
        self.stale = False

    def begin(self, stamp: int, capturing: bool) -> None:
        """A new round: nothing that was fetched is true any more."""
        self.stamp, self.capturing = stamp, capturing
        self.round += 1
        for note in self.notes.values():
            note.small = {}

    def learn(self, key: Key, note: Note) -> None:
        self.notes[key] = note
        self.stale = True

    def arrange(self) -> None:
        """Put the notes into portions, parameters apart from statistics, which change during a pass."""
        alive = [(key, note) for key, note in self.notes.items() if note.full() is not None]
        self.notes = {key: note for key, note in alive if note.used > self.round - FORGET}
        together = [note for note in self.notes.values() if not note.alone]
        limit = PORTION if torch.distributed.is_available() and torch.distributed.is_initialized() else math.inf
        self.portions, room = [], {True: 0.0, False: 0.0}
        open_portion: dict[Any, int] = {}
        for note in together:
            full = note.full()
            assert full is not None
            kind = full.requires_grad, full.device
            if kind not in open_portion or room[full.requires_grad] < full.nbytes:
                open_portion[kind] = len(self.portions)
                self.portions.append([])
                room[full.requires_grad] = limit
            room[full.requires_grad] -= full.nbytes
            note.portion = open_portion[kind]
            self.portions[note.portion].append(note)
        self.stale = False

    def fetch(self, note: Note, wanted: bool) -> None:
        """Take every slice that belongs to the portion of ``note`` in one launch."""
        if self.stale:
            self.arrange()
        portion = self.portions[note.portion]
        fulls = [note.full() for note in portion]
        alive = [(n, f) for n, f in zip(portion, fulls, strict=True) if f is not None]
        notes, tensors = [n for n, _ in alive], [f for _, f in alive]
        graph = wanted and any(f.requires_grad for f in tensors)
        smalls = Gather.apply(notes, *tensors) if graph else _gather(notes, tensors)
        for note, full, small in zip(notes, tensors, smalls, strict=True):
            if not note.holds(full):
                note.small, note.version, note.address = {}, full._version, full.data_ptr()
            note.small[wanted] = small


def _gather(notes: list[Note], fulls: list[Tensor]) -> tuple[Tensor, ...]:
    from . import many

    pieces = []
    for note, full in zip(notes, fulls, strict=True):
        form = note.form(full)
        small = torch.empty(form.small_shape, dtype=note.dtype, device=full.device, memory_format=form.memory_format)
        if not many.supports(full):
            full = full.detach().contiguous(memory_format=form.memory_format)
        piece = form.piece(full, small, form.take_layout)
        if piece.layout is None:
            piece.layout = form.take_layout = many.layout(piece, walk_full=False)
        pieces.append(piece)
    many.take(pieces)
    return tuple(p.small for p in pieces)


class Gather(views._Function):
    """All slices of a portion; backward puts all gradients into place, or hands on slice-sized ones."""

    @staticmethod
    def forward(ctx: Any, notes: list[Note], *fulls: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        smalls = _gather(notes, list(fulls))
        ctx.notes, ctx.forms, ctx.starts = notes, [n._form for n in notes], [n.place() for n in notes]
        frozen = [s for s, f in zip(smalls, fulls, strict=True) if not f.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return smalls

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        from . import many

        whole = torch.is_grad_enabled()  # second derivatives are asked for: ordinary operations have them
        out: list[Tensor | None] = [None] * len(grads)
        pieces = []
        for i, (note, form, starts, grad) in enumerate(zip(ctx.notes, ctx.forms, ctx.starts, grads, strict=True)):
            if grad is None or not ctx.needs_input_grad[i + 1]:
                continue
            if whole or form.compact or starts != note.place():
                sliced = _sliced(note, form, starts, grad)
                out[i] = sliced if form.compact and not whole else sliced.dense()
                continue
            shape, _, dtype = form.like
            full = torch.empty(shape, dtype=dtype, device=grad.device, memory_format=form.memory_format)
            piece = form.piece(full, grad, form.put_layout)
            if piece.layout is None:
                piece.layout = form.put_layout = many.layout(piece, walk_full=True)
            pieces.append(piece)
            out[i] = full
        if pieces:
            many.put(pieces)
        return None, *out


def _sliced(note: Note, form: Form, starts: tuple[int, int], grad: Tensor) -> SlicedGrad:
    """The gradient of one parameter by itself."""
    from ..grads import Place, SlicedGrad

    rows, cols = (
        None if cut is None else Place(axis, start, tuple(cut[1]))  # type: ignore[arg-type]
        for axis, start, cut in zip((note.rows, note.cols), starts, (form.rows, form.cols), strict=True)
    )
    return SlicedGrad(grad, form.like, rows, cols, form.gain, form.row_scale, form.col_scale)


def usable(full: Tensor) -> bool:
    """Where launches are what eager code waits for."""
    return full.is_cuda

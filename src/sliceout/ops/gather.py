"""All slices of a step in one launch, for eager code on a GPU, which waits for launches and for Python.

Nobody declares what a forward pass will take: it is learned. The first pass takes its slices one by one and notes them;
from then on the first take of a pass fetches everything that was noted, and the other takes find theirs waiting. One
autograd node stands for all of them, so backward is one launch as well.

What is waiting is used as long as it is true: the slices have not moved, the parameter has not changed, gradients are
wanted or not wanted as before, and it is the same stream, captured or not. The next pass fetches anew even if nothing
seems to have changed: writing to ``parameter.data`` is not counted by anybody. In data parallel training parameters are
fetched in a few portions rather than all together, so that gradients keep arriving, and are sent, during the backward
pass.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import reference, tables, views

if TYPE_CHECKING:
    from ..grads import SlicedGrad
    from ..slices import Axis, Slice
    from .many import Piece

PORTION = 1 << 26
"""Bytes of parameters that are fetched together in data parallel training (torch's own buckets hold 25 MB)."""
FORGET = 64
"""Rounds without use after which a note is thrown away."""


def take(
    full: Tensor, rows: Any, cols: Any, scale_rows: bool, scale_cols: bool, dtype: torch.dtype | None
) -> Tensor | None:
    """The slice of ``full`` from what was fetched, or ``None``: then it must be taken by itself."""
    if _transformed() or _watched():
        return None
    where = tables.where(full.device)
    if where[1] and not tables.possible(full.device):
        return None
    family = (cols if rows is None else rows).slice.family
    plan: Plan = family.fetched
    if plan is None:
        plan = family.fetched = Plan()
    if family.stamp != plan.stamp or where != plan.where:
        plan.begin(family.stamp, where)
    key = id(full), id(rows), id(cols), scale_rows, scale_cols, dtype
    note = plan.notes.get(key)
    if note is None or note.full() is not full:
        note = plan.learn(key, Note(full, rows, cols, scale_rows, scale_cols, dtype))
    if note.alone:
        return None
    note.used = plan.round
    small = note.small.get(_kind(full))
    if small is None or note.leads or not note.holds(full):
        return plan.fetch(note)
    return small


_PLAIN = (Tensor, torch.nn.Parameter)
_transformed = torch._C._are_functorch_transforms_active
_watched = torch._C._len_torch_dispatch_stack  # a mode that wants to see every operation, such as a tracer
Key = tuple[int, int, int, bool, bool, "torch.dtype | None"]


def _kind(full: Tensor) -> bool | None:
    """What a slice of ``full`` is to autograd now: part of a graph, or not, or nothing it may ever see."""
    return None if torch.is_inference_mode_enabled() else full.requires_grad and torch.is_grad_enabled()


class Note:
    """A take that has been seen and will be fetched with the others."""

    def __init__(self, full: Tensor, rows: Any, cols: Any, scale_rows: bool, scale_cols: bool, dtype: Any) -> None:
        self.full = weakref.ref(full)
        self.rows, self.cols, self.scale_rows, self.scale_cols, self.dtype = rows, cols, scale_rows, scale_cols, dtype
        self.slices = [a.slice for a in (rows, cols) if a is not None]
        self.alone = not _fits(full, rows, cols)
        self.portion = -1
        self.used = 0
        self.version = -1
        self.address = 0
        self.leads = False  # it was fetched because it was asked for: when it is asked for again, a new pass has begun
        self.small: dict[bool | None, Tensor] = {}
        self._form: Form | None = None

    def holds(self, full: Tensor) -> bool:
        """Whether what was fetched is still what ``full`` is."""
        return self.version == full._version and self.address == full.data_ptr()

    def form(self, full: Tensor) -> Form:
        """What does not change from step to step; made anew if slices or parameter changed in kind."""
        form = self._form
        if form is None or not form.fits(full, self.slices):
            form = self._form = Form(full, self)
        return form


class Form:
    """Shapes and numbers of a take. Held by the graph, so it must not hold the slices, which hold what was fetched."""

    def __init__(self, full: Tensor, note: Note) -> None:
        axes = note.rows, note.cols
        self.axes = [None if a is None else weakref.ref(a) for a in axes]
        self.starts = [s.start for s in note.slices]
        self.widths = [s.width for s in note.slices]
        self.shape, self.strides, self.full_dtype = full.shape, full.stride(), full.dtype
        self.dtype = note.dtype or full.dtype
        self.rows, self.cols = (None if a is None else (a.slice.start, a.geometry) for a in axes)
        geometries = ([] if cut is None else cut[1] for cut in (self.rows, self.cols))
        self.small_shape = views.small_shape(full.shape, *geometries)
        self.like = tuple(full.shape), views.is_channels_last(full), full.dtype
        self.memory_format = views.memory_format(full)
        row_gain, self.row_scale = _scale(note.rows, note.scale_rows)
        col_gain, self.col_scale = _scale(note.cols, note.scale_cols)
        self.gain = row_gain * col_gain
        self.compact = all(s.grads == "compact" for s in note.slices)
        self.take_layout: list[int] | None = None
        self.put_layout: list[int] | None = None
        from . import many  # needs triton: only where it is used

        self.readable, self.piece_of = many.supports(full), many.Piece

    def fits(self, full: Tensor, slices: list[Slice]) -> bool:
        for s, start, width in zip(slices, self.starts, self.widths, strict=True):
            if s.start is not start or s.width != width:
                return False
        return full.stride() == self.strides and full.dtype is self.full_dtype and full.shape == self.shape

    def place(self) -> list[int | None]:
        """The starts now; ``None`` if the model is gone."""
        live = [ref() for ref in self.axes if ref is not None]
        return [None if axis is None else axis.slice.start_on_host for axis in live]

    def piece(self, full: Tensor, small: Tensor, layout: list[int] | None) -> Piece:
        return self.piece_of(
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
        and not full.is_inference()  # which counts no changes
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
        self.where = (0, False)
        self.round = 0
        self.stale = False

    def begin(self, stamp: int, where: tuple[int, bool]) -> None:
        """A new round: nothing that was fetched is true any more."""
        self.stamp, self.where = stamp, where
        self.round += 1
        self.stale |= self.round % FORGET == 0
        for note in self.notes.values():
            note.small = {}

    def learn(self, key: Key, note: Note) -> Note:
        self.notes[key] = note
        self.stale = True
        return note

    def arrange(self) -> None:
        """Put the notes into portions, parameters apart from statistics, which change during a pass."""
        alive = [(key, note) for key, note in self.notes.items() if note.full() is not None]
        self.notes = {key: note for key, note in alive if note.used > self.round - FORGET}
        together = [note for note in self.notes.values() if not note.alone]
        limit = PORTION if torch.distributed.is_available() and torch.distributed.is_initialized() else math.inf
        self.portions = []
        open_portion: dict[Any, tuple[int, float]] = {}
        for note in together:
            full = note.full()
            assert full is not None
            kind = full.requires_grad, full.device
            at, room = open_portion.get(kind, (-1, 0.0))
            if room < full.nbytes:
                at, room = len(self.portions), limit
                self.portions.append([])
            open_portion[kind] = at, room - full.nbytes
            note.portion = at
            self.portions[at].append(note)
        self.stale = False

    def fetch(self, asked: Note) -> Tensor:
        """What ``asked`` wants, and in the same launch every slice that belongs to its portion.

        The first pass fetches one by one, by the same means: recomputed activations save what they saved before.
        """
        if self.stale and asked.version >= 0:
            self.arrange()
        notes, fulls = [], []
        for note in self._portion(asked):
            full = note.full()
            if full is not None and (note is asked or not full._backward_hooks):
                notes.append(note)
                fulls.append(full)
        kinds = [_kind(full) for full in fulls]
        smalls = Gather.apply(notes, *fulls) if True in kinds else _gather(notes, fulls)
        for note, full, kind, small in zip(notes, fulls, kinds, smalls, strict=True):
            if not note.holds(full):
                note.small, note.version, note.address = {}, full._version, full.data_ptr()
            note.small[kind] = small
            note.leads = note is asked
            if note is asked:
                wanted = small
        return wanted

    def _portion(self, asked: Note) -> list[Note]:
        full = asked.full()
        if asked.portion < 0 or (full is not None and full._backward_hooks):
            return [asked]  # hooks of a parameter that a pass does not use must not run: see Gather.backward
        return self.portions[asked.portion]


def _gather(notes: list[Note], fulls: list[Tensor]) -> tuple[Tensor, ...]:
    from . import many

    pieces = []
    for note, full in zip(notes, fulls, strict=True):
        form = note.form(full)
        small = torch.empty(form.small_shape, dtype=form.dtype, device=full.device, memory_format=form.memory_format)
        if not form.readable:
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
        ctx.forms = [n.form(f) for n, f in zip(notes, fulls, strict=True)]
        ctx.starts = [form.place() for form in ctx.forms]
        frozen = [s for s, f in zip(smalls, fulls, strict=True) if not f.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return smalls

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        from . import many

        whole = torch.is_grad_enabled()  # second derivatives are asked for: ordinary operations have them
        out: list[Tensor | None] = [None] * len(grads)
        pieces = []
        for i, (form, starts, grad) in enumerate(zip(ctx.forms, ctx.starts, grads, strict=True)):
            if grad is None or not ctx.needs_input_grad[i + 1]:
                continue
            if whole or form.compact or starts != form.place():
                sliced = _sliced(form, starts, grad)
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


def _sliced(form: Form, starts: list[int], grad: Tensor) -> SlicedGrad:
    """The gradient of one parameter by itself."""
    from ..grads import Place, SlicedGrad

    left = iter(starts)
    rows, cols = (
        None if ref is None or cut is None else Place(ref(), next(left), tuple(cut[1]))
        for ref, cut in zip(form.axes, (form.rows, form.cols), strict=True)
    )
    return SlicedGrad(grad, form.like, rows, cols, form.gain, form.row_scale, form.col_scale)


def usable(full: Tensor) -> bool:
    """Where launches are what eager code waits for, and there are kernels for it."""
    return full.is_cuda and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether the kernels over many tensors can be had; eager code does without them."""
    return importlib.util.find_spec("triton") is not None

"""All slices of a step in one launch, for eager code on a GPU, which waits for launches and for Python.

Nobody declares what a forward pass will take: it is learned. The first pass takes its slices one by one and notes them;
from then on the first take of a pass fetches everything that was noted, and the other takes find theirs waiting. One
autograd node stands for all of them, so backward is one launch as well.

What is waiting is used as long as it is true: the slices have not moved, the parameter has not changed, gradients are
wanted or not wanted as before, and it is the same stream, captured or not. The next pass fetches anew even if nothing
seems to have changed: writing to ``parameter.data`` is not counted by anybody. In data parallel training parameters are
fetched in a few portions rather than all together, so that gradients keep arriving, and are sent, during the backward
pass.

The memory of the slices is kept for the next pass, which then has nothing to allocate and no addresses to send. It is
written again only when nobody but us refers to it: neither a graph that may still be run backwards, nor a user.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..slices import ConcatAxis, Take
from . import reference, tables, views

if TYPE_CHECKING:
    from ..compact.gradient import SlicedGrad
    from ..slices import Slice
    from . import multi_tensor as many
    from .multi_tensor import Piece

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
    owner = (cols if rows is None else rows).slice.owner
    plan = _plans.get(id(owner))
    if where[1] and not tables.possible(full.device):
        if plan is not None:
            plan.release()  # what waits holds nodes of an earlier pass, and those wait for its stream, not the captured
        return None
    if plan is None:
        plan = plan_of(owner)
    if owner.stamp != plan.stamp or where != plan.where:
        plan.begin(owner.stamp, where)
    tracking = _tracking()
    key = id(full), id(rows), id(cols), scale_rows, scale_cols, dtype
    note = plan.notes.get(key)
    if note is None or note.full() is not full:
        note = plan.learn(Note(key, full, rows, cols, scale_rows, scale_cols, dtype))
    note.used = plan.round
    found = note.found[tracking]
    if found is not None:
        small, fetched, version, address, kind = found
        if (
            fetched == plan.round
            and version == full._version
            and address == full.data_ptr()
            and kind is (tracking and full.requires_grad)
        ):
            return small
    return None if note.alone else plan.fetch(note, full)


_PLAIN = (Tensor, torch.nn.Parameter)
_transformed = torch._C._are_functorch_transforms_active
_watched = torch._C._len_torch_dispatch_stack  # a mode that wants to see every operation, such as a tracer
_tracking = torch.is_grad_enabled
_users = getattr(torch._C, "_storage_Use_Count", None)  # how many tensors share a memory; without it none is kept
Key = tuple[int, int, int, bool, bool, "torch.dtype | None"]
Found = tuple[Tensor, int, int, int, bool]
"""A slice that waits, and what it is true for: round, version and address of its parameter, whether that is tracked."""


class Note:
    """A take that has been seen and will be fetched with the others."""

    def __init__(
        self, key: Key, full: Tensor, rows: Any, cols: Any, scale_rows: bool, scale_cols: bool, dtype: Any
    ) -> None:
        self.key = key
        self.full = weakref.ref(full)
        self.rows, self.cols, self.scale_rows, self.scale_cols, self.dtype = rows, cols, scale_rows, scale_cols, dtype
        self.slices = [a.slice for a in (rows, cols) if a is not None]
        self.alone = not _fits(full, rows, cols)
        self.portion = -1  # none yet: it is fetched by itself
        self.used = 0
        self.known = False  # it has been fetched
        self.found: list[Found | None] = [None, None]  # where gradients are not wanted, and where they are
        self._form: Form | None = None

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
        self.starts = [s.start for s in note.slices]
        self.widths = [s.width for s in note.slices]
        self.shape, self.strides, self.full_dtype = full.shape, full.stride(), full.dtype
        self.dtype = note.dtype or full.dtype
        self.rows, self.cols = (None if a is None else (a.slice.start, a.geometry) for a in axes)
        geometries = ([] if cut is None else cut[1] for cut in (self.rows, self.cols))
        self.small_shape = views.small_shape(full.shape, *geometries)
        self.small_strides = views.strides(tuple(self.small_shape), views.is_channels_last(full))
        self.like = views.like_of(full)
        self.memory_format = views.memory_format(full)
        self.put_strides = views.strides(*self.like[:2])
        self.gain, self.row_scale, self.col_scale = Take(note.rows, note.cols, note.scale_rows, note.scale_cols).factors
        self.compact = all(s.grads == "compact" for s in note.slices)
        self.take_layout: list[int] | None = None
        self.put_layout: list[int] | None = None
        from . import multi_tensor as many  # needs triton: only where it is used

        self.readable, self.piece_of = many.supports(full), many.Piece

    def fits(self, full: Tensor, slices: list[Slice]) -> bool:
        for s, start, width in zip(slices, self.starts, self.widths, strict=True):
            if s.start is not start or s.width != width:
                return False
        return full.stride() == self.strides and full.dtype is self.full_dtype and full.shape == self.shape

    def empty(self, device: torch.device) -> Tensor:
        """Memory for the full tensor's gradient."""
        return torch.empty_strided(self.shape, self.put_strides, dtype=self.full_dtype, device=device)

    def piece(self, full: Tensor, small: Tensor, layout: list[int] | None) -> Piece:
        return self.piece_of(
            full, small, self.rows, self.cols, self.gain, self.row_scale, self.col_scale, layout=layout
        )  # fmt: skip


def _fits(full: Tensor, rows: Any, cols: Any) -> bool:
    """Whether it can be fetched with others: a plain parameter or buffer, and slices that are drawn together."""
    axes = [a for a in (rows, cols) if a is not None]
    return (
        type(full) in _PLAIN
        and full.is_leaf
        and not full.is_inference()  # which counts no changes
        and not any(isinstance(a, ConcatAxis) or reference.is_table(a.slice.start) for a in axes)
        and len({a.slice.owner for a in axes}) == 1
        and all(full.shape[d] == a.size for d, a in enumerate((rows, cols)) if a is not None)
    )


class Plan:
    """What the forward passes of one model take."""

    def __init__(self) -> None:
        self.notes: dict[Key, Note] = {}
        self.portions: list[list[Note]] = []
        self.kept: dict[int, Batch] = {}  # by portion
        self.stamp = -1
        self.where = (0, False)
        self.round = 0
        self.stale = False
        self.untracked = False  # slices wait that want no gradients

    def begin(self, stamp: int, where: tuple[int, bool]) -> None:
        """A new round: nothing that was fetched is true any more."""
        last = self.round if where == self.where else -1  # memory of another stream may still be read there
        self.kept = {at: batch for at, batch in self.kept.items() if batch.used == last}
        self.stamp, self.where = stamp, where
        self.round += 1
        self.stale |= self.round % FORGET == 0
        if self.untracked:
            self.untracked = False
            for note in self.notes.values():
                note.found[False] = None

    def held(self) -> list[Tensor]:
        """The slices whose memory waits for the next pass, or for the rest of this one."""
        kept = [t for batch in self.kept.values() for t in batch.memory]
        return kept + [found[0] for note in self.notes.values() for found in note.found if found is not None]

    def release(self) -> None:
        """Let go of all memory, but not of what was learned."""
        self.kept = {}
        for note in self.notes.values():
            note.found = [None, None]

    def learn(self, note: Note) -> Note:
        self.notes[note.key] = note
        self.stale = True
        return note

    def arrange(self) -> None:
        """Put the notes into portions, parameters apart from statistics, which change during a pass."""
        alive = [(key, note) for key, note in self.notes.items() if note.full() is not None]
        self.notes = {key: note for key, note in alive if note.used > self.round - FORGET}
        together = [note for note in self.notes.values() if not note.alone]
        limit = PORTION if torch.distributed.is_available() and torch.distributed.is_initialized() else math.inf
        self.portions, self.kept = [], {}
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

    def fetch(self, asked: Note, wanted: Tensor) -> Tensor:
        """The slice of ``wanted``, and in the same launch every slice that belongs to its portion.

        The first pass fetches one by one, by the same means: recomputed activations save what they saved before.
        """
        if self.stale and asked.known:
            self.arrange()
        at, portion = asked.portion, [asked]
        if wanted._backward_hooks:  # which must not run for a pass that does not use it: see Gather.backward
            at = -1
        if at >= 0:
            portion = self.portions[at]
        tracking = _tracking()
        self.untracked |= not tracking
        for note in portion:
            note.found[tracking] = None  # its memory may be what is written next, and it may hold its parameter
        notes, fulls = [], []
        for note in portion:
            full = note.full()
            if full is not None and (note is asked or not full._backward_hooks):
                notes.append(note)
                fulls.append(full)
        batch = self.kept.pop(at, None)
        if batch is None or not batch.serves(fulls):
            batch = None  # gives its memory back first
            batch = Batch(notes, fulls)
        kinds = [tracking and full.requires_grad for full in fulls]
        smalls = Gather.apply(batch, *fulls) if True in kinds else batch.fill()
        if batch.settled and at >= 0 and not self.where[1]:  # what a captured graph uses is its own
            self.kept[at], batch.used = batch, self.round
        now = self.round
        for note, small, full, address, kind in zip(notes, smalls, fulls, batch.addresses, kinds, strict=True):
            note.found[tracking] = small, now, full._version, address, kind
        asked.known, asked.found[tracking] = True, None  # asked again, it begins another pass
        return smalls[notes.index(asked)]


_plans: dict[int, Plan] = {}
"""By the id of what draws the slices."""


def plan_of(owner: Any) -> Plan:
    """The plan of the model whose slices ``owner`` draws; made if there is none."""
    plan = _plans.get(id(owner))
    if plan is None:
        plan = _plans[id(owner)] = Plan()
        weakref.finalize(owner, _plans.pop, id(owner), None)
    return plan


def release(owner: Any) -> None:
    """Let go of the slices of a model that wait for somebody to take them once more."""
    if id(owner) in _plans:
        _plans[id(owner)].release()


class Batch:
    """Slices that are fetched in one launch, and the memory they are put in.

    Whoever asks is given other tensors over that memory; as long as one of them is alive, it has more users than at
    first.
    """

    used = -1  # the round it served last

    def __init__(self, notes: list[Note], fulls: list[Tensor]) -> None:
        from . import multi_tensor as many

        self.looks = views.looks(fulls)
        self.addresses = self.looks[: len(fulls)]
        self.shapes = Shapes(notes, fulls)
        self.cuts = [(s, s.start, s.width) for s in _slices(notes)]
        self.settled = _users is not None and all(form.readable for form in self.shapes.forms)
        self.copies = []
        pieces = []
        with torch.inference_mode(False):  # memory that autograd may see at another time
            for form, full in zip(self.shapes.forms, fulls, strict=True):
                small = torch.empty(
                    form.small_shape, dtype=form.dtype, device=full.device, memory_format=form.memory_format
                )
                source = full
                if not form.readable:
                    source = full.detach().contiguous(memory_format=form.memory_format)
                    self.copies.append(source)
                piece = form.piece(source, small, form.take_layout)
                if piece.layout is None:
                    piece.layout = form.take_layout = many.layout(piece, walk_full=False)
                pieces.append(piece)
        self.pieces, self.many = many.Settled(pieces), many
        self.memory = [piece.small for piece in pieces]
        self.storages = [t.untyped_storage() for t in self.memory]
        self.cells = [s._cdata for s in self.storages]
        self.unused = self.users()

    def serves(self, fulls: list[Tensor]) -> bool:
        """Whether it would be the same if it were made anew for its portion, and nobody else has its memory."""
        return (
            views.looks(fulls) == self.looks
            and all(s.start is start and s.width == width for s, start, width in self.cuts)
            and self.users() == self.unused
        )

    def users(self) -> list[int]:
        """How many tensors have each memory, and how many objects hold it as a storage."""
        return [*map(_users, self.cells), *map(sys.getrefcount, self.storages)] if _users else []

    def fill(self) -> tuple[Tensor, ...]:
        """The slices as they are now."""
        self.many.take(self.pieces)
        return tuple([t.data for t in self.memory])


def _slices(notes: list[Note]) -> list[Slice]:
    return list(dict.fromkeys(s for note in notes for s in note.slices))


class Shapes:
    """What a graph needs of a batch. It must not hold the slices, which hold what was fetched."""

    def __init__(self, notes: list[Note], fulls: list[Tensor]) -> None:
        self.forms = [note.form(full) for note, full in zip(notes, fulls, strict=True)]
        slices = _slices(notes)
        axes = list(dict.fromkeys(a for note in notes for a in (note.rows, note.cols) if a is not None))
        self.slices = [weakref.ref(s) for s in slices]
        self.axes = [(weakref.ref(a), slices.index(a.slice), tuple(a.geometry)) for a in axes]
        self.sides = [[None if a is None else axes.index(a) for a in (note.rows, note.cols)] for note in notes]
        self.dense = not any(form.compact for form in self.forms)
        self.puts: many.Gradients | None = None  # once it is known how gradients come

    def starts(self) -> list[int | None]:
        """Where the slices lie now; ``None`` if the model is gone."""
        live = [ref() for ref in self.slices]
        return [None if s is None else s.start_on_host for s in live]

    def usual(self, grads: tuple[Tensor | None, ...]) -> bool:
        """Whether all gradients have come, and lie as they do in every step."""
        return all(
            grad is not None and grad.stride() == form.small_strides
            for form, grad in zip(self.forms, grads, strict=True)
        )

    def put(self, grads: tuple[Tensor, ...]) -> list[Tensor]:
        """All of them in their places in full tensors."""
        from . import multi_tensor as many

        device = grads[0].device
        fulls = [form.empty(device) for form in self.forms]
        if self.puts is None:
            self.puts = many.Gradients(
                [f.piece(full, g, None) for f, full, g in zip(self.forms, fulls, grads, strict=True)]
            )
        self.puts.put(fulls, grads)
        return fulls

    def sliced(self, grads: list[tuple[int, Tensor]], starts: list[int]) -> list[SlicedGrad]:
        """Gradients, each with its number in the batch, by themselves: at the places that ``starts`` say."""
        from ..compact.gradient import Place, SlicedGrad

        places = [Place(axis(), starts[s], geometry) for axis, s, geometry in self.axes]
        made = []
        for i, grad in grads:
            form = self.forms[i]
            rows, cols = (None if a is None else places[a] for a in self.sides[i])
            made.append(SlicedGrad(grad, form.like, rows, cols, form.gain, form.row_scale, form.col_scale))
        return made


class Gather(views._Function):
    """All slices of a portion; backward puts all gradients into place, or hands on slice-sized ones."""

    @staticmethod
    def forward(ctx: Any, batch: Batch, *fulls: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shapes, ctx.starts = batch.shapes, batch.shapes.starts()
        smalls = batch.fill()
        if frozen := [s for s, f in zip(smalls, fulls, strict=True) if not f.requires_grad]:
            ctx.mark_non_differentiable(*frozen)
        return smalls

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        from . import multi_tensor as many

        shapes, needed = ctx.shapes, ctx.needs_input_grad[1:]
        whole = torch.is_grad_enabled()  # second derivatives are asked for: ordinary operations have them
        moved = ctx.starts != shapes.starts()
        if shapes.dense and not (whole or moved) and shapes.usual(grads):
            return None, *shapes.put(grads)
        out: list[Tensor | None] = [None] * len(grads)
        pieces, apart = [], []
        for i, (form, grad, wanted) in enumerate(zip(shapes.forms, grads, needed, strict=True)):
            if grad is None or not wanted:
                continue
            if whole or moved or form.compact:
                apart.append((i, grad))
                continue
            full = out[i] = form.empty(grad.device)
            piece = form.piece(full, grad, form.put_layout)
            if piece.layout is None:
                piece.layout = form.put_layout = many.layout(piece, walk_full=True)
            pieces.append(piece)
        if pieces:
            many.put(pieces)
        if apart:
            for (i, _), sliced in zip(apart, shapes.sliced(apart, ctx.starts), strict=True):
                out[i] = sliced if shapes.forms[i].compact and not whole else sliced.dense()
        return None, *out


def usable(full: Tensor) -> bool:
    """Where launches are what eager code waits for, and there are kernels for it."""
    return full.is_cuda and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether the kernels over many tensors can be had; eager code does without them."""
    return importlib.util.find_spec("triton") is not None

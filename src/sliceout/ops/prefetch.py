"""All slices of a step in one launch, for eager code on a GPU, which waits for launches and for Python.

Nobody declares what a forward pass will take: it is learned. The first pass takes its slices one by one and records
them; from then on the first take of a pass fetches everything that was recorded, and the other takes find theirs
waiting. One autograd node stands for all of them, so backward is one launch as well.

A slice that was fetched is used only while it is current: the slices have not moved, the parameter has not changed,
gradients are wanted or not wanted as before, and it is the same stream, captured or not. The next pass fetches anew
even if nothing seems to have changed: writing to ``parameter.data`` is not counted by anybody. In data parallel
training parameters are fetched in a few portions rather than all together, so that gradients keep arriving, and are
sent, during the backward pass.

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

from ..slices import Slice, Take
from . import library, tables, views
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

PORTION = 1 << 26
"""Bytes of parameters that are fetched together in data parallel training (torch's own buckets hold 25 MB)."""
FORGET = 64
"""Rounds without use after which an entry is thrown away."""


def usable(full: Tensor) -> bool:
    """Where launches are what eager code waits for, and there are kernels for it."""
    return full.is_cuda and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether the kernels over many tensors are available; eager code does without them."""
    return importlib.util.find_spec("triton") is not None


def take(full: Tensor, t: Take, dtype: torch.dtype | None) -> Tensor | None:
    """The slice of ``full`` from what was fetched, or ``None``: then it must be taken by itself."""
    if views.transformed() or dispatch_modes():
        return None
    rows, cols, scale_rows, scale_cols = t
    where = tables.where(full.device)
    owner = (cols if rows is None else rows).slice.owner  # type: ignore[union-attr]
    plan: Plan | None = owner.caches.get("prefetch")
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
    entry = plan.entries.get(key)
    if entry is None or entry.full() is not full:
        entry = plan.learn(Entry(key, full, t, dtype))
    entry.used = plan.round
    found = entry.found[tracking]
    if found is not None:
        small, fetched, version, address, kind = found
        if (
            fetched == plan.round
            and version == full._version
            and address == full.data_ptr()
            and kind is (tracking and full.requires_grad)
        ):
            return small
    return None if entry.alone else plan.fetch(entry, full)


_PLAIN = (Tensor, torch.nn.Parameter)
dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many modes want to see every operation, such as a tracer."""
_tracking = torch.is_grad_enabled
_users = getattr(torch._C, "_storage_Use_Count", None)  # how many tensors share a memory; without it none is kept
Key = tuple[int, int, int, bool, bool, "torch.dtype | None"]
Found = tuple[Tensor, int, int, int, bool]
"""A slice that waits, and what it was fetched for: round, version and address of its parameter, if it is tracked."""


class Entry:
    """A take that has been seen and will be fetched with the others."""

    def __init__(self, key: Key, full: Tensor, t: Take, dtype: torch.dtype | None) -> None:
        self.key = key
        self.full = weakref.ref(full)
        self.take, self.dtype = t, dtype
        self.slices = [a.slice for a in t.axes]
        self.alone = not _fits(full, t)
        self.portion = -1  # none yet: it is fetched by itself
        self.used = 0
        self.known = False  # it has been fetched
        self.found: list[Found | None] = [None, None]  # where gradients are not wanted, and where they are
        self._layout: EntryLayout | None = None

    def layout(self, full: Tensor) -> EntryLayout:
        """What does not change from step to step; made anew if slices or parameter changed in kind."""
        layout = self._layout
        if layout is None or not layout.fits(full, self.slices):
            layout = self._layout = EntryLayout(full, self)
        return layout


class EntryLayout:
    """Shapes and numbers of a take. Held by the graph, so it must not hold the slices, which hold what was fetched."""

    def __init__(self, full: Tensor, entry: Entry) -> None:
        from . import multi_tensor  # needs triton: only where it is used

        axes = entry.take.simple_axes
        self.starts = [s.start for s in entry.slices]
        self.widths = [s.width for s in entry.slices]
        self.spec, self.strides = TensorSpec.of(full), full.stride()
        self.dtype = entry.dtype or full.dtype
        self.rows, self.cols = (None if a is None else (a.slice.start, a.geometry) for a in axes)
        self.small_shape = small_shape(full.shape, *([] if a is None else a.geometry for a in axes))
        self.small_strides = strides_of(tuple(self.small_shape), is_channels_last(full))
        self.memory_format = memory_format(full)
        self.put_strides = strides_of(*self.spec[:2])
        self.factors = entry.take.factors
        self.compact = entry.take.compact
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


def _fits(full: Tensor, t: Take) -> bool:
    """Whether it can be fetched with others: a plain parameter or buffer, and slices that are drawn together."""
    return (
        type(full) in _PLAIN
        and full.is_leaf
        and not full.is_inference()  # which counts no changes
        and t.simple
        and len({a.slice.owner for a in t.axes}) == 1
        and all(full.shape[d] == a.size for d, a in enumerate(t[:2]) if a is not None)
    )


class Plan:
    """What the forward passes of one model take."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}
        self.portions: list[list[Entry]] = []
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
            for entry in self.entries.values():
                entry.found[False] = None

    def held(self) -> list[Tensor]:
        """The slices whose memory waits for the next pass, or for the rest of this one."""
        kept = [t for batch in self.kept.values() for t in batch.memory]
        return kept + [found[0] for entry in self.entries.values() for found in entry.found if found is not None]

    def release(self) -> None:
        """Let go of all memory, but not of what was learned."""
        self.kept = {}
        for entry in self.entries.values():
            entry.found = [None, None]

    def learn(self, entry: Entry) -> Entry:
        self.entries[entry.key] = entry
        self.stale = True
        return entry

    def arrange(self) -> None:
        """Put the entries into portions, parameters apart from statistics, which change during a pass."""
        alive = [(key, entry) for key, entry in self.entries.items() if entry.full() is not None]
        self.entries = {key: entry for key, entry in alive if entry.used > self.round - FORGET}
        together = [entry for entry in self.entries.values() if not entry.alone]
        limit = PORTION if torch.distributed.is_available() and torch.distributed.is_initialized() else math.inf
        self.portions, self.kept = [], {}
        open_portion: dict[Any, tuple[int, float]] = {}
        for entry in together:
            full = entry.full()
            assert full is not None
            kind = full.requires_grad, full.device
            at, room = open_portion.get(kind, (-1, 0.0))
            if room < full.nbytes:
                at, room = len(self.portions), limit
                self.portions.append([])
            open_portion[kind] = at, room - full.nbytes
            entry.portion = at
            self.portions[at].append(entry)
        self.stale = False

    def fetch(self, asked: Entry, wanted: Tensor) -> Tensor:
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
        for entry in portion:
            entry.found[tracking] = None  # its memory may be what is written next, and it may hold its parameter
        entries, fulls = [], []
        for entry in portion:
            full = entry.full()
            if full is not None and (entry is asked or not full._backward_hooks):
                entries.append(entry)
                fulls.append(full)
        batch = self.kept.pop(at, None)
        if batch is None or not batch.serves(fulls):
            batch = None  # gives its memory back first
            batch = Batch(entries, fulls)
        kinds = [tracking and full.requires_grad for full in fulls]
        smalls = Gather.apply(batch, *fulls) if True in kinds else batch.fill()
        if batch.steady and at >= 0 and not self.where[1]:  # what a captured graph uses is its own
            self.kept[at], batch.used = batch, self.round
        now = self.round
        for entry, small, full, address, kind in zip(entries, smalls, fulls, batch.addresses, kinds, strict=True):
            entry.found[tracking] = small, now, full._version, address, kind
        asked.known, asked.found[tracking] = True, None  # asked again, it begins another pass
        return smalls[entries.index(asked)]


def plan_of(owner: Any) -> Plan:
    """The plan of the model whose slices ``owner`` draws; made if there is none."""
    return owner.caches.setdefault("prefetch", Plan())  # type: ignore[no-any-return]


def release(owner: Any) -> None:
    """Let go of the slices of a model that wait for somebody to take them once more."""
    if "prefetch" in owner.caches:
        plan_of(owner).release()


class Batch:
    """Slices that are fetched in one launch, and the memory they are put in.

    Whoever asks is given other tensors over that memory; as long as one of them is alive, it has more users than at
    first.
    """

    used = -1  # the round it served last

    def __init__(self, entries: list[Entry], fulls: list[Tensor]) -> None:
        from . import multi_tensor

        self.key = address_key(fulls)
        self.addresses = self.key[: len(fulls)]
        self.layout = BatchLayout(entries, fulls)
        self.cuts = [(s, s.start, s.width) for s in _slices(entries)]
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
        self.plan, self.launch = multi_tensor.TakePlan(pieces), multi_tensor.take
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
        self.launch(self.plan)
        return tuple([t.data for t in self.memory])


def _slices(entries: list[Entry]) -> list[Slice]:
    return list(dict.fromkeys(s for entry in entries for s in entry.slices))


class BatchLayout:
    """What a graph needs of a batch. It must not hold the slices, which hold what was fetched."""

    def __init__(self, entries: list[Entry], fulls: list[Tensor]) -> None:
        self.entries = [entry.layout(full) for entry, full in zip(entries, fulls, strict=True)]
        slices = _slices(entries)
        axes = list(dict.fromkeys(a for entry in entries for a in entry.take.simple_axes if a is not None))
        self.slices = [weakref.ref(s) for s in slices]
        self.axes = [(weakref.ref(a), slices.index(a.slice), a.geometry) for a in axes]
        self.sides = [[None if a is None else axes.index(a) for a in entry.take.simple_axes] for entry in entries]
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

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
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..takes import Take
from . import tables, views

if TYPE_CHECKING:
    from .gather import Batch, TakeLayout

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


def take(full: Tensor, t: Take, dtype: torch.dtype | None, parts: int = 0) -> Tensor | None:
    """The slice of ``full`` from what was fetched, or ``None``: then it must be taken by itself."""
    if views.transformed() or dispatch_modes():
        return None
    rows, cols, scale_rows, scale_cols = t
    where = tables.where(full.device)
    owner = (cols if rows is None else rows).slice.owner  # type: ignore[union-attr]
    if owner is None:  # a slice that no layer has is drawn by nobody: its starts may be set by hand
        return None
    plan = owner.caches.get("prefetch") or plan_of(owner)
    if where[1] and not tables.possible(full.device):
        plan.release()  # what waits holds nodes of an earlier pass, and those wait for its stream, not the captured
        if t.compact and full.requires_grad and full.is_leaf and _tracking():
            raise RuntimeError(
                "this step cannot be captured with compact gradients: its slices would be frozen. "
                "Use sliceout.capture, or grads='dense'"
            )
        return None
    if owner.stamp != plan.stamp or where != plan.where:
        plan.begin(owner.stamp, where)
    tracking = _tracking()
    key = id(full), id(rows), id(cols), scale_rows, scale_cols, dtype, parts
    entry = plan.entries.get(key)
    if entry is None or entry.full() is not full:
        entry = plan.entries[key] = Entry(full, t, dtype, parts)
        plan.stale = True
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
Key = tuple[int, int, int, bool, bool, "torch.dtype | None", int]
Found = tuple[Tensor, int, int, int, bool]
"""A slice that waits, and what it was fetched for: round, version and address of its parameter, if it is tracked."""


class Entry:
    """A take that has been seen and will be fetched with the others."""

    def __init__(self, full: Tensor, t: Take, dtype: torch.dtype | None, parts: int) -> None:
        self.full = weakref.ref(full)
        self.take, self.dtype, self.parts = t, dtype, parts
        self.alone = not _fits(full, t)
        self.portion = -1  # none yet: it is fetched by itself
        self.used = 0
        self.known = False  # it has been fetched
        self.found: list[Found | None] = [None, None]  # where gradients are not wanted, and where they are
        self.layout: TakeLayout | None = None  # what does not change from step to step


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

    def arrange(self) -> None:
        """Put the entries into portions, parameters apart from statistics, which change during a pass."""
        since = self.round - FORGET
        self.entries = {k: e for k, e in self.entries.items() if e.used > since and e.full() is not None}
        limit = PORTION if torch.distributed.is_available() and torch.distributed.is_initialized() else math.inf
        self.portions, self.kept = [], {}
        open_portion: dict[Any, tuple[int, float]] = {}
        for entry in self.entries.values():
            full = entry.full()
            if full is None or entry.alone:
                continue
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
        from .gather import Batch, Gather, TakeLayout  # needs triton: only where it is used

        if self.stale and asked.known:
            self.arrange()
        at = -1 if wanted._backward_hooks else asked.portion  # hooks must not run for a pass that does not use it
        portion = [asked] if at < 0 else self.portions[at]
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
            layouts = []
            for entry, full in zip(entries, fulls, strict=True):
                if entry.layout is None or not entry.layout.fits(full, entry.take):  # changed in kind
                    entry.layout = TakeLayout(full, entry.take, entry.dtype, entry.parts)
                layouts.append(entry.layout)
            batch = Batch([entry.take for entry in entries], layouts, fulls)
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

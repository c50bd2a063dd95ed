"""Numbers that a kernel reads from device memory instead of its arguments: what makes one launch serve many tensors.

While a CUDA graph is captured nothing can be copied to the device, but the numbers (addresses above all) are only
needed when the graph is replayed. So inside :func:`deferred` tables are laid out at once and filled at the end. Their
memory is set aside before the capture: what is allocated during one is used by other tensors earlier in every replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class Arena:
    """Memory for the tables of one captured graph; it must live as long as the graph."""

    def __init__(self, entries: int, device: torch.device) -> None:
        self.memory = torch.empty(entries, dtype=torch.int64, device=device)
        self.used = 0
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def make(self, values: Tensor) -> Tensor:
        begin, self.used = self.used, self.used + _room(values.numel())
        if self.used > len(self.memory):
            raise RuntimeError(f"the tables of this graph need more than the {len(self.memory)} entries set aside")
        table = self.memory[begin : begin + values.numel()].view(values.shape)
        self.waiting.append((table, values.clone()))
        return table

    def fill(self) -> None:
        for table, values in self.waiting:
            table.copy_(values)
        self.waiting = []


def _room(entries: int) -> int:
    """Tables begin at multiples of 16 bytes, as kernels like it."""
    return -(-entries // 2) * 2


class Tally:
    """How many entries the tables of some code need."""

    entries = 0


_arena: Arena | None = None
_tally: Tally | None = None


def capturing(device: torch.device) -> bool:
    """Whether work on ``device`` is being captured in a graph."""
    return where(device)[1]


def where(device: torch.device) -> tuple[int, bool]:
    """The stream that work on ``device`` goes to now, and whether it is being captured."""
    if device.type != "cuda":
        return 0, False
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return stream, stream != 0 and torch.cuda.is_current_stream_capturing()  # the default stream cannot be


def possible(device: torch.device) -> bool:
    """Whether tables can be made now: not inside a capture that nobody will complete."""
    return _arena is not None or not capturing(device)


def make(values: Tensor, device: torch.device) -> Tensor:
    """A table on ``device`` with these int64 ``values``, which may change as soon as this returns."""
    if _arena is not None and capturing(device):
        return _arena.make(values)
    count(values.numel())
    return values.to(device, non_blocking=True, copy=True)  # pageable memory is staged at once: no synchronisation


def count(entries: int) -> None:
    """Here a table is used; whoever keeps it from an earlier time calls this instead of :func:`make`."""
    if _tally is not None:
        _tally.entries += _room(entries)


@contextlib.contextmanager
def counted() -> Iterator[Tally]:
    """Around a step that is about to be captured."""
    global _tally
    before, _tally = _tally, Tally()
    try:
        yield _tally
    finally:
        _tally = before


@contextlib.contextmanager
def deferred(entries: int, device: torch.device) -> Iterator[Arena]:
    """Around a capture, whose tables will hold at most so many ``entries``."""
    global _arena
    before, _arena = _arena, Arena(entries, device)
    try:
        yield _arena
        _arena.fill()
    finally:
        _arena = before

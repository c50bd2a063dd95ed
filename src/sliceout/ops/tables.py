"""Numbers that a kernel reads from device memory instead of its arguments: what makes one launch serve many tensors.

While a CUDA graph is captured nothing can be copied to the device, but the numbers (addresses above all) are only
needed when the graph is replayed. So while tables go :func:`into` an :class:`Arena` they are laid out at once, and
filled after the capture. Its memory is set aside before: what is allocated during a capture is used by other tensors
earlier in every replay.

Arenas are found by the stream that is captured: backward passes run in threads of their own, but on that stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class Arena:
    """Memory for the tables of one captured graph; it must live as long as the graph.

    With ``entries=None`` it has none, and counts how many entries a step that is about to be captured needs.
    """

    def __init__(self, entries: int | None, device: torch.device) -> None:
        self.device = device
        self.memory = None if entries is None else torch.empty(entries, dtype=torch.int64, device=device)
        self.used = 0
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def reserve(self, entries: int) -> int:
        """Where a table of so many entries begins: at a multiple of 16 bytes, as kernels like it."""
        begin, self.used = self.used, self.used + -(-entries // 2) * 2
        if self.memory is not None and self.used > len(self.memory):
            raise RuntimeError(f"the tables of this graph need more than the {len(self.memory)} entries set aside")
        return begin

    def fill(self) -> None:
        """Write the numbers, once the capture is over."""
        for table, values in self.waiting:
            table.copy_(values)
        self.waiting = []


_arenas: dict[int, Arena] = {}


def where(device: torch.device) -> tuple[int, bool]:
    """The stream that work on ``device`` goes to now, and whether it is being captured."""
    if device.type != "cuda":
        return 0, False
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return stream, stream != 0 and torch.cuda.is_current_stream_capturing()  # the default stream cannot be


def capturing(device: torch.device) -> bool:
    """Whether work on ``device`` is being captured in a graph."""
    return where(device)[1]


def possible(device: torch.device) -> bool:
    """Whether tables can be made now: not inside a capture that nobody will complete."""
    stream, captured = where(device)
    return not captured or stream in _arenas


def make(values: Tensor, device: torch.device) -> Tensor:
    """A table on ``device`` with these int64 ``values``, which may change as soon as this returns."""
    arena = _arenas.get(where(device)[0])
    begin = 0 if arena is None else arena.reserve(values.numel())
    if arena is None or arena.memory is None:
        return values.to(device, non_blocking=True, copy=True)  # pageable memory is staged at once: no synchronisation
    table = arena.memory[begin : begin + values.numel()].view(values.shape)
    arena.waiting.append((table, values.clone()))
    return table


def count(entries: int, device: torch.device) -> None:
    """Here a table is used; whoever keeps it from an earlier time calls this instead of :func:`make`."""
    if _arenas and (arena := _arenas.get(where(device)[0])):
        arena.reserve(entries)


@contextlib.contextmanager
def into(arena: Arena) -> Iterator[Arena]:
    """On the stream of a step, inside its capture or around a step that is counted: its tables go into this arena."""
    stream = where(arena.device)[0]
    _arenas[stream] = arena
    try:
        yield arena
    finally:
        del _arenas[stream]

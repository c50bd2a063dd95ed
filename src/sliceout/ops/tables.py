"""Numbers that a kernel reads from device memory instead of its arguments: what makes one launch serve many tensors.

While a CUDA graph is captured nothing can be copied to the device, but the numbers (addresses above all) are only
needed when the graph is replayed. So inside :func:`deferred` tables are allocated at once and filled at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_waiting: list[tuple[Tensor, Tensor]] | None = None


def capturing(device: torch.device) -> bool:
    """Whether work on ``device`` is being captured in a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def possible(device: torch.device) -> bool:
    """Whether tables can be made now: not inside a capture that nobody will complete."""
    return _waiting is not None or not capturing(device)


def make(rows: list[list[int]], device: torch.device) -> Tensor:
    """An int64 table on ``device``."""
    values = torch.tensor(rows, dtype=torch.int64)
    if _waiting is not None and capturing(device):
        table = torch.empty(values.shape, dtype=torch.int64, device=device)
        _waiting.append((table, values))
        return table
    return values.to(device, non_blocking=True)  # pageable memory is staged at once: no synchronisation


@contextlib.contextmanager
def deferred() -> Iterator[list[Tensor]]:
    """Around a capture: yields a list that holds its tables afterwards, which must live as long as the graph."""
    global _waiting
    before, _waiting = _waiting, []
    tables: list[Tensor] = []
    try:
        yield tables
        for table, values in _waiting:
            table.copy_(values)
            tables.append(table)
    finally:
        _waiting = before

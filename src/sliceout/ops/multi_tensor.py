"""Many parameters in one launch: the tables that the kernels over many tensors read (``kernels``).

A :class:`Piece` is a full tensor, its slice, and the small tensor that goes with it. Each becomes one row of a table in
device memory. What stays the same from step to step is made once: a :class:`LaunchPlan`.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import kernels, tables
from .placement import is_channels_last, memory_format

BLOCK = 2048
FIELDS = 26
"""Of a row of the table: 0 full, 1 small, 2-4 state, 5 step; 6 rows and 7 columns of the tensor that is walked,
8 columns of the other one, 9 whether its runs are groups of VECTOR; start, size, width, inner of 10-13 rows and
14-17 columns, in entries; 18 row scale, 19 column scale, 20 gain; 21 parts of the batch that are added up, 22 entries
of ``small`` for each, steps from the start of one part to that of the next in 23 rows, 24 columns; 25 the first tile.
"""
_ADDRESSES = 6
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


@dataclass
class Piece:
    """A full tensor and the small one that holds its slice; ``rows`` and ``cols`` are a start and a geometry."""

    full: Tensor
    small: Tensor
    rows: tuple[Tensor, list[int]] | None
    cols: tuple[Tensor, list[int]] | None
    gain: float = 1.0
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    state: tuple[Tensor, ...] = ()
    step: Tensor | None = None
    parts: int = 1
    """If more than one: ``small`` has so many in front, which ``put`` adds up."""

    layout: tuple[int, ...] | None = None
    """What :func:`layout` says of this piece, where somebody has kept it."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the full tensor, the small one and the state."""
        return self.full.dtype, self.small.dtype, (self.state or (self.full,))[0].dtype

    @property
    def addresses(self) -> list[int]:
        """Of its tensors, its state and its step count; a count that is kept on the host is given itself."""
        both = [self.full.data_ptr(), self.small.data_ptr()]
        if not self.state and self.step is None:
            return both
        state = [t.data_ptr() for t in self.state]
        step = 0 if self.step is None else self.step.data_ptr() if self.step.is_cuda else int(self.step)
        return [*both, *state, *[0] * (3 - len(state)), step]


def supports(*tensors: Tensor) -> bool:
    """Whether the kernels can address these tensors: known dtypes, no gaps, and not too many entries."""
    return all(
        t.dtype in _DTYPES and t.is_contiguous(memory_format=memory_format(t)) and t.numel() < 1 << 31 for t in tensors
    )


# -- rows of a table ---------------------------------------------------------------------------------------------------


def layout(piece: Piece, walk_full: bool) -> tuple[int, ...]:
    """The fields of the table that stay the same from step to step, and how many tiles the piece takes."""
    sides = [None if side is None else (side[0].data_ptr(), *side[1]) for side in (piece.rows, piece.cols)]
    scales = [0 if s is None else s.data_ptr() for s in (piece.row_scale, piece.col_scale)]
    full = piece.full
    small = piece.small.shape[1:] if piece.parts > 1 else piece.small.shape
    each = [int(piece.parts > 1 and side is not None and len(side[0]) > 1) for side in (piece.rows, piece.cols)]
    return _layout(
        walk_full,
        full.shape,
        small,
        is_channels_last(full),
        full.device,
        piece.gain,
        *sides,
        *scales,
        piece.parts,
        *each,
    )


@functools.lru_cache(4096)
def _layout(
    walk_full: bool, full: torch.Size, small: torch.Size, channels_last: bool, device: torch.device, gain: float,
    rows: tuple[int, ...] | None, cols: tuple[int, ...] | None, row_scale: int, col_scale: int,
    parts: int, row_step: int, col_step: int,
) -> tuple[int, ...]:  # fmt: skip
    """:func:`layout` by shapes and addresses.

    The kernels see rows and columns, of which there are always some to be cut. Where only rows are, all of them are one
    row: a slice of rows is a run of entries as well.
    """
    walked, mapped = (full, small) if walk_full else (small, full)
    scales, steps = (row_scale, col_scale), (row_step, col_step)
    if cols is None:
        rows, cols, scales, steps, behind = None, rows, scales[::-1], steps[::-1], math.prod(full[1:])
        n_rows, n_cols, mapped_cols = 1, math.prod(walked), math.prod(mapped)
    else:
        behind = 1 if channels_last else math.prod(full[2:])
        n_rows, n_cols, mapped_cols = walked[0], math.prod(walked[1:]), math.prod(mapped[1:])
    row_run, col_run = _run(rows, n_rows, 1, device), _run(cols, n_cols, behind, device)
    together = all(n % kernels.VECTOR == 0 for n in (n_cols, mapped_cols, *col_run[1:3]))
    in_groups = together and all(s % 16 == 0 for s in scales)
    gain_bits = struct.unpack("q", struct.pack("d", gain))[0]
    tiles = triton.cdiv(n_rows * n_cols, BLOCK)
    runs = *row_run, *col_run
    return (
        n_rows,
        n_cols,
        mapped_cols,
        int(in_groups),
        *runs,
        *scales,
        gain_bits,
        parts,
        math.prod(small),
        *steps,
        tiles,
    )


def _run(side: tuple[int, ...] | None, whole: int, behind: int, device: torch.device) -> tuple[int, int, int, int]:
    """The address of the start; the entries of a block, of its kept part and of a unit, ``behind`` at each place."""
    if side is None:
        return _zero(device).data_ptr(), whole, whole, 1
    start, size, width, _, inner = side
    return start, size * inner * behind, width * inner * behind, inner * behind


@functools.cache
def _zero(device: torch.device) -> Tensor:
    """Where the start of an axis that is not sliced is read."""
    return torch.zeros(1, dtype=torch.int64, device=device)


class _Rows:
    """A table on the host, whose addresses are written anew each time."""

    def __init__(self, layouts: tuple[tuple[int, ...], ...]) -> None:
        self.tiles = tuple(fields[-1] for fields in layouts)
        self.total = sum(self.tiles)
        first = itertools.accumulate(self.tiles, initial=0)
        self.numbers = array("q")
        for fields, at in zip(layouts, first, strict=False):
            self.numbers.extend((*[0] * _ADDRESSES, *fields[:-1], at))
        self.tensor = torch.frombuffer(self.numbers, dtype=torch.int64)

    def filled(self, columns: Iterable[Sequence[int]]) -> Tensor:
        """The table with these addresses, from the first column on; the next call overwrites it."""
        for column, values in enumerate(columns):
            self.numbers[column::FIELDS] = array("q", values)
        return self.tensor


_rows = functools.lru_cache(64)(_Rows)
"""Kept, since most steps need the same."""


def _owners(tiles: tuple[int, ...], device: torch.device) -> Tensor:
    """Which piece each tile belongs to, given how many each has."""
    if tables.capturing(device):  # a graph keeps its tables itself: others come and go
        return tables.make(_owners_on("cpu", tiles), device)
    owners = _owners_on(device, tiles)
    tables.count(len(owners), device)
    return owners


@functools.lru_cache(256)
def _owners_on(device: torch.device | str, tiles: tuple[int, ...]) -> Tensor:
    pieces = torch.arange(len(tiles), device="cpu")  # whatever the default device is
    return pieces.repeat_interleave(torch.tensor(tiles, device="cpu")).to(device)


# -- from pieces to launches -------------------------------------------------------------------------------------------


@dataclass
class Group:
    """Pieces of the same dtypes; ``members`` are their numbers among all."""

    kinds: tuple[torch.dtype, ...]
    members: list[int]
    rows: _Rows
    columns: list[Sequence[int]]
    """The addresses of the pieces."""
    device: torch.device
    sent: tuple[Tensor, Tensor] | None = None
    """The table and the owners of its tiles on the device, if they stay as they are."""

    def send(self) -> tuple[Tensor, Tensor]:
        return tables.make(self.rows.filled(self.columns), self.device), _owners(self.rows.tiles, self.device)


class LaunchPlan:
    """Pieces that are launched together, step by step.

    It holds addresses and no tensors: whoever keeps it must know that they are still true, or :meth:`replace` them.

    Args:
        walk_full: whether the kernel walks the full tensors, or the small ones.
        dtypes: how many of a piece's dtypes the kernel wants to know.
        fixed: nothing will be replaced: the tables are sent now, and once.
    """

    def __init__(self, pieces: list[Piece], walk_full: bool, dtypes: int = 2, fixed: bool = False) -> None:
        self.groups: list[Group] = []
        alike: dict[tuple[torch.dtype, ...], list[int]] = {}
        for i, piece in enumerate(pieces):
            alike.setdefault(piece.dtypes[:dtypes], []).append(i)
        for kinds, members in alike.items():
            chosen = [pieces[i] for i in members]
            rows = _rows(tuple([p.layout or layout(p, walk_full) for p in chosen]))
            columns: list[Sequence[int]] = list(zip(*(p.addresses for p in chosen), strict=True))
            if rows.total:
                self.groups.append(Group(kinds, members, rows, columns, chosen[0].full.device))
        if fixed:
            for group in self.groups:
                group.sent = group.send()

    def replace(self, column: int, numbers: Iterable[int]) -> None:
        """Put these numbers, in the order of the pieces, into a column of the table."""
        numbers = list(numbers)
        for group in self.groups:
            group.columns[column] = [numbers[i] for i in group.members]

    def run(self, kernel: Any, *args: Any, **flags: Any) -> None:
        """One launch for each group."""
        for group in self.groups:
            table, owners = group.sent or group.send()
            with torch.cuda.device_of(table):
                kernel[(group.rows.total,)](
                    table, owners, *args, *(_DTYPES[d] for d in group.kinds), torch.float64 in group.kinds,
                    FIELDS, kernels.VECTOR, BLOCK, **flags,
                )  # fmt: skip


def take(pieces: list[Piece] | LaunchPlan) -> None:
    """Fill ``small`` of every piece from ``full``."""
    plan = pieces if isinstance(pieces, LaunchPlan) else LaunchPlan(pieces, walk_full=False)
    plan.run(kernels.take_kernel)


def put(pieces: list[Piece] | LaunchPlan) -> None:
    """Fill ``full`` of every piece (uninitialised memory) with ``small`` in its place and zeros elsewhere.

    In a plan the small tensors must have the memory format of the full ones.
    """
    if isinstance(pieces, LaunchPlan):
        plan = pieces
    else:
        for p in pieces:
            layout = memory_format(p.full) if p.parts == 1 else torch.contiguous_format
            p.small = p.small.contiguous(memory_format=layout)
        plan = LaunchPlan(pieces, walk_full=True)
    plan.run(kernels.put_kernel)

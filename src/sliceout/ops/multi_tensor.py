"""Many parameters in one launch: the tables that the kernels over many tensors read (``kernels``).

A :class:`Piece` is a full tensor, its slice, and the small tensor that goes with it. Each becomes one row of a table in
device memory. What stays the same from step to step is made once: :class:`TakePlan` and :class:`PutPlan`.
"""

from __future__ import annotations

import itertools
import math
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import kernels, tables
from .placement import format_of, is_channels_last, memory_format

BLOCK = 2048
FIELDS = 22
"""Of a row of the table: 0 full, 1 small, 2-4 state, 5 step; 6 rows and 7 columns of the tensor that is walked,
8 columns of the other one, 9 whether its runs are groups of VECTOR; start, size, width, inner of 10-13 rows and
14-17 columns, in entries; 18 row scale, 19 column scale, 20 gain; 21 the first tile."""
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

    layout: list[int] | None = None
    """What :func:`layout` says of this piece, where somebody has kept it."""


CHANNELS_LAST = -2
"""Where a layout says whether the full tensor is."""


def layout(piece: Piece, walk_full: bool) -> list[int]:
    """The fields of the table that stay the same from step to step, and behind them what only the host needs: whether
    the full tensor is channels_last, and how many tiles it takes.

    The same list for the same fields: see :func:`_rows`.
    """
    sides = [None if side is None else (side[0].data_ptr(), *side[1]) for side in (piece.rows, piece.cols)]
    scales = [None if s is None else s.data_ptr() for s in (piece.row_scale, piece.col_scale)]
    full, channels_last = piece.full, is_channels_last(piece.full)
    key = (walk_full, full.shape, piece.small.shape, channels_last, full.device, piece.gain, *sides, *scales)
    if key not in _layouts:
        if len(_layouts) > 4096:
            _layouts.clear()
        _layouts[key] = _layout(piece, walk_full)
    return _layouts[key]


_layouts: dict[Any, list[int]] = {}


def _layout(piece: Piece, walk_full: bool) -> list[int]:
    row_geometry, col_geometry = ([] if side is None else side[1] for side in (piece.rows, piece.cols))
    shape = _Matrix(piece.full, piece.small, row_geometry, col_geometry, walk_full)
    sides, scales = (piece.rows, piece.cols), (piece.row_scale, piece.col_scale)
    if shape.turned:
        sides, scales = sides[::-1], scales[::-1]
    in_groups = shape.in_groups and all(s is None or s.data_ptr() % 16 == 0 for s in scales)
    zero = _zero(piece.full.device)
    rows, cols = ((zero if side is None else side[0]).data_ptr() for side in sides)
    row_run = (shape.n_rows, shape.n_rows, 1) if sides[0] is None else shape.rows
    return [
        shape.n_rows, shape.n_cols, shape.mapped_cols, int(in_groups), rows, *row_run, cols, *shape.cols,
        *(0 if s is None else s.data_ptr() for s in scales), struct.unpack("q", struct.pack("d", piece.gain))[0],
        int(is_channels_last(piece.full)), triton.cdiv(shape.n_rows * shape.n_cols, BLOCK),
    ]  # fmt: skip


def supports(*tensors: Tensor) -> bool:
    """Whether the kernels can address these tensors: known dtypes, no gaps, and not too many entries."""
    return all(
        t.dtype in _DTYPES and t.is_contiguous(memory_format=memory_format(t)) and t.numel() < 1 << 31 for t in tensors
    )


class TakePlan:
    """Pieces that stay where they are: their tables are made once, and :func:`take` only launches."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.launches = _launches(pieces, walk_full=False)
        self.count = len(pieces)

    def __len__(self) -> int:
        return self.count


class PutPlan:
    """Pieces to be put whose tensors are new every time, but always of the same kind: only addresses are sent."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.groups = group_pieces(pieces, walk_full=True, dtypes=take_dtypes)

    def put(self, fulls: Sequence[Tensor], smalls: Sequence[Tensor]) -> None:
        """:func:`put`, in their order; nothing is checked."""
        full_at, small_at = (list(map(Tensor.data_ptr, tensors)) for tensors in (fulls, smalls))
        for group in self.groups:
            group.launch([full_at[i] for i in group.members], [small_at[i] for i in group.members]).run(
                kernels.put_kernel
            )


@dataclass
class Launch:
    """Pieces of the same dtypes, on the device."""

    table: Tensor
    owners: Tensor
    tiles: int
    kinds: tuple[torch.dtype, ...]

    def run(self, kernel: Any, *args: Any, **flags: Any) -> None:
        with torch.cuda.device_of(self.table):
            kernel[(self.tiles,)](
                self.table, self.owners, *args,
                *(_DTYPES[d] for d in self.kinds), torch.float64 in self.kinds, FIELDS, kernels.VECTOR, BLOCK, **flags,
            )  # fmt: skip


@dataclass
class Group:
    """Pieces of the same dtypes, on the host; ``members`` are their numbers among all."""

    kinds: tuple[torch.dtype, ...]
    members: list[int]
    rows: _Rows
    device: torch.device

    def addresses(self, pieces: list[Piece]) -> list[Sequence[int]]:
        """Of its members, column by column."""
        return list(zip(*(_addresses(pieces[i]) for i in self.members), strict=True))

    def launch(self, *columns: Sequence[int]) -> Launch:
        """Its members at these addresses."""
        table = tables.make(self.rows.filled(*columns), self.device)
        return Launch(table, _owners(self.rows.tiles, self.device), self.rows.total, self.kinds)


def group_pieces(pieces: list[Piece], walk_full: bool, dtypes: Callable[[Piece], Any]) -> list[Group]:
    """One for each kind of piece, ``dtypes(piece)``, that has any entries."""
    alike: dict[Any, list[int]] = {}
    for i, piece in enumerate(pieces):
        alike.setdefault(dtypes(piece), []).append(i)
    found = []
    for kinds, members in alike.items():
        rows = _rows([pieces[i].layout or layout(pieces[i], walk_full) for i in members])
        found.append(Group(kinds, members, rows, pieces[members[0]].full.device))
    return [group for group in found if group.rows.total]


def _launches(pieces: list[Piece], walk_full: bool) -> list[Launch]:
    """Of take or put: one for each kind of piece."""
    return [group.launch(*group.addresses(pieces)) for group in group_pieces(pieces, walk_full, take_dtypes)]


def take_dtypes(piece: Piece) -> tuple[torch.dtype, ...]:
    return piece.full.dtype, piece.small.dtype


class _Rows:
    """A table on the host, whose addresses are written anew each time."""

    def __init__(self, layouts: list[list[int]]) -> None:
        self.layouts = layouts  # so that no id is used again: see _rows
        self.tiles = tuple(fields[-1] for fields in layouts)
        self.total = sum(self.tiles)
        first = itertools.accumulate(self.tiles, initial=0)
        self.numbers = array("q")
        for fields, at in zip(layouts, first, strict=False):
            self.numbers.extend((*[0] * _ADDRESSES, *fields[:-2], at))
        self.tensor = torch.frombuffer(self.numbers, dtype=torch.int64) if layouts else None

    def filled(self, *columns: Sequence[int]) -> Tensor:
        """The table with these addresses: of the full tensors, of the small ones, and so on; the next call overwrites
        it."""
        for column, values in enumerate(columns):
            self.numbers[column::FIELDS] = array("q", values)
        assert self.tensor is not None
        return self.tensor


def _addresses(piece: Piece) -> list[int]:
    """Of its tensors, its state and its step count; a count that is kept on the host is given itself."""
    both = [piece.full.data_ptr(), piece.small.data_ptr()]
    if not piece.state and piece.step is None:
        return both
    state = [t.data_ptr() for t in piece.state]
    step = 0 if piece.step is None else piece.step.data_ptr() if piece.step.is_cuda else int(piece.step)
    return [*both, *state, *[0] * (3 - len(state)), step]


def _rows(layouts: list[list[int]]) -> _Rows:
    """The table of these layouts; kept, since most steps need the same."""
    key = tuple(map(id, layouts))
    if key not in _known:
        if len(_known) > 64:
            _known.clear()
        _known[key] = _Rows(layouts)
    return _known[key]


_ADDRESSES = 6
_known: dict[tuple[int, ...], _Rows] = {}
_zeros: dict[torch.device, Tensor] = {}
_kept: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _zero(device: torch.device) -> Tensor:
    """Where the start of an axis that is not sliced is read."""
    if device not in _zeros:
        _zeros[device] = torch.zeros(1, dtype=torch.int64, device=device)
    return _zeros[device]


def _owners(tiles: tuple[int, ...], device: torch.device) -> Tensor:
    """Which piece each tile belongs to, given how many each has; the same from step to step, so it is kept."""
    if tables.capturing(device):  # a graph keeps its tables itself: others come and go
        return tables.make(_owners_on_host(tiles), device)
    key = tiles, device
    if key not in _kept:
        if len(_kept) > 256:
            _kept.clear()
        _kept[key] = _owners_on_host(tiles).to(device)
    tables.count(len(_kept[key]), device)
    return _kept[key]


def _owners_on_host(tiles: tuple[int, ...]) -> Tensor:
    return torch.arange(len(tiles), device="cpu").repeat_interleave(_on_host(tiles))


def _on_host(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")  # whatever the default device is


class _Matrix:
    """How the kernels see a tensor and its slice: as rows and columns, of which there are always some to be cut.

    Where only rows are, all of them are one (``turned``): a slice of rows is a run of entries as well.
    """

    def __init__(self, full: Tensor, small: Tensor, rows: list[int], cols: list[int], walk_full: bool) -> None:
        walked, mapped = (full, small) if walk_full else (small, full)
        self.turned = not cols
        if self.turned:
            rows, cols, behind = [], rows, math.prod(full.shape[1:])
            self.n_rows, self.n_cols, self.mapped_cols = 1, walked.numel(), mapped.numel()
        else:
            self.n_rows = len(walked)
            self.n_cols, self.mapped_cols = math.prod(walked.shape[1:]), math.prod(mapped.shape[1:])
            behind = 1 if full.dim() < 3 or is_channels_last(full) else math.prod(full.shape[2:])
        self.rows, self.cols = _run(rows, 1), _run(cols, behind)
        self.in_groups = all(n % kernels.VECTOR == 0 for n in (self.n_cols, self.mapped_cols, *self.cols[:2]))


def _run(geometry: list[int], behind: int) -> tuple[int, int, int]:
    """The entries of a block, those that are kept of it, and those of a unit, if there are ``behind`` at each place."""
    size, width, _, inner = geometry or (1, 1, 1, 1)
    return size * inner * behind, width * inner * behind, inner * behind


def take(pieces: list[Piece] | TakePlan) -> None:
    """Fill ``small`` of every piece from ``full``."""
    for launch in (pieces if isinstance(pieces, TakePlan) else TakePlan(pieces)).launches:
        launch.run(kernels.take_kernel)


def put(pieces: list[Piece]) -> None:
    """Fill ``full`` of every piece (uninitialised memory) with ``small`` in its place and zeros elsewhere."""
    for p in pieces:
        p.layout = p.layout or layout(p, walk_full=True)
        p.small = p.small.contiguous(memory_format=format_of(p.full.dim(), p.layout[CHANNELS_LAST] == 1))
    for launch in _launches(pieces, walk_full=True):
        launch.run(kernels.put_kernel)

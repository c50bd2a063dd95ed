"""Many parameters in one launch: take, put and the slice-only optimizer updates as multi-tensor Triton kernels.

A :class:`Piece` is a full tensor, its slice, and the small tensor that goes with it. Each becomes one row of a table in
device memory; a program looks up the piece that its tile belongs to. As in ``kernels``, starts are read from device
memory, so that one captured graph serves every draw, and entries are moved side by side where all runs allow it.
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

from . import tables
from .kernels import SIDE, Matrix, _source, _target
from .views import format_of, is_channels_last, memory_format

BLOCK = 2048
FIELDS = 22
"""Of a row of the table: 0 full, 1 small, 2-4 state, 5 step; 6 rows and 7 columns of the tensor that is walked,
8 columns of the other one, 9 whether its runs are groups of SIDE; start, size, width, inner of 10-13 rows and
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
    geometries = ([] if side is None else side[1] for side in (piece.rows, piece.cols))
    shape = Matrix(piece.full, piece.small, *geometries, walk_full=walk_full)
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


class Settled:
    """Pieces that stay where they are: their tables are made once, and :func:`take` only launches."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.launches = _launches(pieces, walk_full=False)
        self.count = len(pieces)

    def __len__(self) -> int:
        return self.count


class Gradients:
    """Pieces to be put whose tensors are new every time, but always of the same kind: only addresses are sent."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.groups = _groups(pieces, walk_full=True, dtypes=_both)

    def put(self, fulls: Sequence[Tensor], smalls: Sequence[Tensor]) -> None:
        """:func:`put`, in their order; nothing is checked."""
        full_at, small_at = (list(map(Tensor.data_ptr, tensors)) for tensors in (fulls, smalls))
        for group in self.groups:
            group.launch([full_at[i] for i in group.members], [small_at[i] for i in group.members]).run(_put_kernel)


class Updates:
    """Pieces whose slices an optimizer updates, step by step: gradients are new, and counts that live on the host.

    It holds addresses and no tensors: whoever keeps it must know that they are still true.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self.count = len(pieces)
        self.counted = pieces[0].step is not None and not pieces[0].step.is_cuda  # on the host
        self.groups = [(g, g.addresses(pieces)) for g in _groups(pieces, walk_full=False, dtypes=_kinds)]

    def __len__(self) -> int:
        return self.count

    def renew(self, smalls: Sequence[Tensor], steps: Sequence[Tensor]) -> None:
        """Take these gradients and counts, in the order of the pieces."""
        small_at = list(map(Tensor.data_ptr, smalls))
        for group, columns in self.groups:
            columns[1] = [small_at[i] for i in group.members]
            if self.counted:
                columns[5] = [int(steps[i]) for i in group.members]

    def launches(self) -> list[_Launch]:
        return [group.launch(*columns) for group, columns in self.groups]


@dataclass
class _Launch:
    """Pieces of the same dtypes, on the device."""

    table: Tensor
    owners: Tensor
    tiles: int
    kinds: tuple[torch.dtype, ...]

    def run(self, kernel: Any, *args: Any, **flags: Any) -> None:
        with torch.cuda.device_of(self.table):
            kernel[(self.tiles,)](
                self.table, self.owners, *args,
                *(_DTYPES[d] for d in self.kinds), torch.float64 in self.kinds, FIELDS, SIDE, BLOCK, **flags,
            )  # fmt: skip


@dataclass
class _Group:
    """Pieces of the same dtypes, on the host; ``members`` are their numbers among all."""

    kinds: tuple[torch.dtype, ...]
    members: list[int]
    rows: _Rows
    device: torch.device

    def addresses(self, pieces: list[Piece]) -> list[Sequence[int]]:
        """Of its members, column by column."""
        return list(zip(*(_addresses(pieces[i]) for i in self.members), strict=True))

    def launch(self, *columns: Sequence[int]) -> _Launch:
        """Its members at these addresses."""
        table = tables.make(self.rows.filled(*columns), self.device)
        return _Launch(table, _owners(self.rows.tiles, self.device), self.rows.total, self.kinds)


def _groups(pieces: list[Piece], walk_full: bool, dtypes: Callable[[Piece], Any]) -> list[_Group]:
    """One for each kind of piece, ``dtypes(piece)``, that has any entries."""
    alike: dict[Any, list[int]] = {}
    for i, piece in enumerate(pieces):
        alike.setdefault(dtypes(piece), []).append(i)
    found = []
    for kinds, members in alike.items():
        rows = _rows([pieces[i].layout or layout(pieces[i], walk_full) for i in members])
        found.append(_Group(kinds, members, rows, pieces[members[0]].full.device))
    return [group for group in found if group.rows.total]


def _launches(pieces: list[Piece], walk_full: bool) -> list[_Launch]:
    """Of take or put: one for each kind of piece."""
    return [group.launch(*group.addresses(pieces)) for group in _groups(pieces, walk_full, _both)]


def _both(piece: Piece) -> tuple[torch.dtype, ...]:
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
    tables.count(len(_kept[key]))
    return _kept[key]


def _owners_on_host(tiles: tuple[int, ...]) -> Tensor:
    return torch.arange(len(tiles), device="cpu").repeat_interleave(_on_host(tiles))


def _on_host(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")  # whatever the default device is


# -- index arithmetic --------------------------------------------------------------------------------------------------


@triton.jit
def _tile(table, owner, FIELDS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The row of the table, the first entry of this tile, and whether entries can be moved side by side."""
    program = tl.program_id(0)
    d = table + tl.load(owner + program) * FIELDS
    first = (program - tl.load(d + 21).to(tl.int32)) * BLOCK
    start = tl.load(tl.load(d + 14).to(tl.pointer_type(tl.int64))) * tl.load(d + 17)
    addresses = tl.load(d) | tl.load(d + 1) | tl.load(d + 2) | tl.load(d + 3) | tl.load(d + 4)
    return d, first, (tl.load(d + 9) != 0) & (start % SIDE == 0) & (addresses % 16 == 0)


@triton.jit
def _run(d, SIDE: tl.constexpr):
    """Start, size and width of the rows (``d + 10``) or columns (``d + 14``) that are kept."""
    start = tl.load(tl.load(d).to(tl.pointer_type(tl.int64))).to(tl.int32) * tl.load(d + 3).to(tl.int32)
    return start // SIDE, tl.load(d + 1).to(tl.int32) // SIDE, tl.load(d + 2).to(tl.int32) // SIDE


@triton.jit
def _walk(d, first, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Of the walked tensor: the entries of this tile as groups of ``SIDE``, their rows and columns, which there are."""
    i = first // SIDE + tl.arange(0, BLOCK // SIDE)
    across = tl.load(d + 7).to(tl.int32) // SIDE
    r = i // across
    return i, r, i % across, r < tl.load(d + 6).to(tl.int32)


@triton.jit
def _at(i, SIDE: tl.constexpr):
    return i.to(tl.int64)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]


@triton.jit
def _mapped(d, rr, cc, SIDE: tl.constexpr):
    return _at(rr.to(tl.int64) * (tl.load(d + 8) // SIDE) + cc, SIDE)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, SIDE: tl.constexpr):
    """What lies there; groups are moved together only where it is a multiple of 16."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if SIDE > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _scaled(value, d, row_place, col_place, kept, SIDE: tl.constexpr):
    """Times what the slices are normalised with, where it is kept."""
    value = value * tl.load(d + 20).to(tl.float64, bitcast=True).to(value.dtype)
    at = tl.load(d + 18)
    if at != 0:
        unit = row_place // tl.load(d + 13).to(tl.int32)
        scale = tl.load(at.to(tl.pointer_type(tl.float64)) + unit, mask=kept, other=0)
        value = value * scale.to(value.dtype)[:, None]
    at = tl.load(d + 19)
    if at != 0:
        scales = _pointer(at, tl.float64, SIDE)
        unit = col_place[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
        inner = tl.load(d + 17).to(tl.int32)
        if inner == 1:  # side by side, as they are
            value = value * tl.load(scales + unit, mask=kept[:, None], other=0).to(value.dtype)
        else:
            value = value * tl.load(scales + unit // inner, mask=kept[:, None], other=0).to(value.dtype)
    return value


# -- take and put ------------------------------------------------------------------------------------------------------


@triton.jit
def _take_kernel(
    table, owner, FULL: tl.constexpr, SMALL: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _copy(table, owner, False, FULL, SMALL, WIDE, FIELDS, SIDE, BLOCK)


@triton.jit
def _put_kernel(
    table, owner, FULL: tl.constexpr, SMALL: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _copy(table, owner, True, FULL, SMALL, WIDE, FIELDS, SIDE, BLOCK)


@triton.jit
def _copy(
    table, owner, PUT: tl.constexpr, FULL: tl.constexpr, SMALL: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """take or put: two kernels, so that a profile tells them apart."""
    d, first, together = _tile(table, owner, FIELDS, SIDE, BLOCK)
    if together:
        _copy_tile(d, first, PUT, FULL, SMALL, WIDE, SIDE, BLOCK)
    else:
        _copy_tile(d, first, PUT, FULL, SMALL, WIDE, 1, BLOCK)


@triton.jit
def _copy_tile(
    d, first, PUT: tl.constexpr, FULL: tl.constexpr, SMALL: tl.constexpr, WIDE: tl.constexpr,
    SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, r, c, inside = _walk(d, first, SIDE, BLOCK)
    full = _pointer(tl.load(d), FULL, SIDE)
    small = _pointer(tl.load(d + 1), SMALL, SIDE)
    if PUT:
        rr, row_kept, row_place = _target(r, *_run(d + 10, 1))
        cc, col_kept, col_place = _target(c, *_run(d + 14, SIDE))
        kept = inside & row_kept & col_kept
        value = tl.load(small + _mapped(d, rr, cc, SIDE), mask=kept[:, None], other=0)
    else:
        rr, row_place = _source(r, *_run(d + 10, 1))
        cc, col_place = _source(c, *_run(d + 14, SIDE))
        kept = inside
        value = tl.load(full + _mapped(d, rr, cc, SIDE), mask=kept[:, None], other=0)
    value = _scaled(value.to(tl.float64 if WIDE else tl.float32), d, row_place, col_place, kept, SIDE)
    if PUT:
        tl.store(full + _at(i, SIDE), value.to(FULL), mask=inside[:, None])
    else:
        tl.store(small + _at(i, SIDE), value.to(SMALL), mask=inside[:, None])


def take(pieces: list[Piece] | Settled) -> None:
    """Fill ``small`` of every piece from ``full``."""
    for launch in (pieces if isinstance(pieces, Settled) else Settled(pieces)).launches:
        launch.run(_take_kernel)


def put(pieces: list[Piece]) -> None:
    """Fill ``full`` of every piece (uninitialised memory) with ``small`` in its place and zeros elsewhere."""
    for p in pieces:
        p.layout = p.layout or layout(p, walk_full=True)
        p.small = p.small.contiguous(memory_format=format_of(p.full.dim(), p.layout[CHANNELS_LAST] == 1))
    for launch in _launches(pieces, walk_full=True):
        launch.run(_put_kernel)


# -- optimizers --------------------------------------------------------------------------------------------------------


@triton.jit
def _gradient(
    d, first, found_inf, grad_scale, SMALL: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
    FOUND_INF: tl.constexpr, GRAD_SCALE: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """Where this tile lies in the full tensors, what of it is to be updated, and its gradient."""
    i, r, c, inside = _walk(d, first, SIDE, BLOCK)
    if FOUND_INF:  # GradScaler met an overflow: nothing is touched
        inside = inside & (tl.load(found_inf + 0 * r) == 0)
    rr, row_place = _source(r, *_run(d + 10, 1))
    cc, col_place = _source(c, *_run(d + 14, SIDE))
    g = tl.load(_pointer(tl.load(d + 1), SMALL, SIDE) + _at(i, SIDE), mask=inside[:, None], other=0).to(tl.float32)
    g = _scaled(g, d, row_place, col_place, inside, SIDE)
    if GRAD_SCALE:
        g = g / tl.load(grad_scale)
    if MAXIMIZE:
        g = -g
    return _mapped(d, rr, cc, SIDE), inside[:, None], g


@triton.jit
def _adam_kernel(
    table, owner, lr, found_inf, grad_scale, less_beta1, less_beta2, log2_beta1, log2_beta2, weight_decay, eps,
    FULL: tl.constexpr, SMALL: tl.constexpr, STATE: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
    LR_LIVES_ON_DEVICE: tl.constexpr, STEP_LIVES_ON_DEVICE: tl.constexpr, FOUND_INF: tl.constexpr,
    GRAD_SCALE: tl.constexpr, DECOUPLED: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    d, first, together = _tile(table, owner, FIELDS, SIDE, BLOCK)
    if LR_LIVES_ON_DEVICE:
        lr = tl.load(lr)
    step = tl.load(d + 5)
    if STEP_LIVES_ON_DEVICE:
        step = tl.load(step.to(tl.pointer_type(tl.float32)))
    count = step.to(tl.float64)  # in float32, 1 - 0.999 ** 1 would be four digits
    correction1 = (1 - tl.exp2(count * log2_beta1)).to(tl.float32)
    correction2 = (1 - tl.exp2(count * log2_beta2)).to(tl.float32)
    if together:
        _adam_tile(
            d, first, lr, found_inf, grad_scale, less_beta1, less_beta2, correction1, correction2, weight_decay, eps,
            FULL, SMALL, STATE, SIDE, BLOCK, FOUND_INF, GRAD_SCALE, DECOUPLED, AMSGRAD, MAXIMIZE,
        )  # fmt: skip
    else:
        _adam_tile(
            d, first, lr, found_inf, grad_scale, less_beta1, less_beta2, correction1, correction2, weight_decay, eps,
            FULL, SMALL, STATE, 1, BLOCK, FOUND_INF, GRAD_SCALE, DECOUPLED, AMSGRAD, MAXIMIZE,
        )  # fmt: skip


@triton.jit
def _adam_tile(
    d, first, lr, found_inf, grad_scale, less_beta1, less_beta2, correction1, correction2, weight_decay, eps,
    FULL: tl.constexpr, SMALL: tl.constexpr, STATE: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
    FOUND_INF: tl.constexpr, GRAD_SCALE: tl.constexpr, DECOUPLED: tl.constexpr, AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
):  # fmt: skip
    at, inside, g = _gradient(d, first, found_inf, grad_scale, SMALL, SIDE, BLOCK, FOUND_INF, GRAD_SCALE, MAXIMIZE)
    params = _pointer(tl.load(d), FULL, SIDE) + at
    averages = _pointer(tl.load(d + 2), STATE, SIDE) + at
    squares = _pointer(tl.load(d + 3), STATE, SIDE) + at
    p = tl.load(params, mask=inside, other=0).to(tl.float32)
    m = tl.load(averages, mask=inside, other=0).to(tl.float32)
    v = tl.load(squares, mask=inside, other=0).to(tl.float32)
    if DECOUPLED:
        p = p * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m = m + less_beta1 * (g - m)
    v = v + less_beta2 * (g * g - v)
    tl.store(averages, m.to(STATE), mask=inside)
    tl.store(squares, v.to(STATE), mask=inside)
    if AMSGRAD:
        most = _pointer(tl.load(d + 4), STATE, SIDE) + at
        v = tl.maximum(v, tl.load(most, mask=inside, other=0).to(tl.float32))
        tl.store(most, v.to(STATE), mask=inside)
    p = p - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(params, p.to(FULL), mask=inside)


@triton.jit
def _sgd_kernel(
    table, owner, lr, found_inf, grad_scale, momentum, weight_decay,
    FULL: tl.constexpr, SMALL: tl.constexpr, STATE: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
    LR_LIVES_ON_DEVICE: tl.constexpr, FOUND_INF: tl.constexpr, GRAD_SCALE: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    d, first, together = _tile(table, owner, FIELDS, SIDE, BLOCK)
    if LR_LIVES_ON_DEVICE:
        lr = tl.load(lr)
    if together:
        _sgd_tile(
            d, first, lr, found_inf, grad_scale, momentum, weight_decay,
            FULL, SMALL, STATE, SIDE, BLOCK, FOUND_INF, GRAD_SCALE, MOMENTUM, NESTEROV, MAXIMIZE,
        )  # fmt: skip
    else:
        _sgd_tile(
            d, first, lr, found_inf, grad_scale, momentum, weight_decay,
            FULL, SMALL, STATE, 1, BLOCK, FOUND_INF, GRAD_SCALE, MOMENTUM, NESTEROV, MAXIMIZE,
        )  # fmt: skip


@triton.jit
def _sgd_tile(
    d, first, lr, found_inf, grad_scale, momentum, weight_decay,
    FULL: tl.constexpr, SMALL: tl.constexpr, STATE: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
    FOUND_INF: tl.constexpr, GRAD_SCALE: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
):  # fmt: skip
    at, inside, g = _gradient(d, first, found_inf, grad_scale, SMALL, SIDE, BLOCK, FOUND_INF, GRAD_SCALE, MAXIMIZE)
    params = _pointer(tl.load(d), FULL, SIDE) + at
    p = tl.load(params, mask=inside, other=0).to(tl.float32)
    g = g + weight_decay * p
    if MOMENTUM:
        buffers = _pointer(tl.load(d + 2), STATE, SIDE) + at
        b = momentum * tl.load(buffers, mask=inside, other=0).to(tl.float32) + g
        tl.store(buffers, b.to(STATE), mask=inside)
        if NESTEROV:  # noqa: SIM108
            g = g + momentum * b
        else:
            g = b
    tl.store(params, (p - lr * g).to(FULL), mask=inside)


def _kinds(piece: Piece) -> tuple[torch.dtype, ...]:
    return piece.full.dtype, piece.small.dtype, piece.state[0].dtype if piece.state else piece.full.dtype


def adam(
    updates: Updates,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
    decoupled: bool,
    amsgrad: bool,
    maximize: bool,
    found_inf: Tensor | None,
    grad_scale: Tensor | None,
) -> None:
    """Adam over the slices of ``full`` and of ``state``; ``small`` is the gradient, ``step`` has been counted up."""
    for launch in updates.launches():
        launch.run(
            _adam_kernel, lr, found_inf, grad_scale, *(1 - b for b in betas),
            *(math.log2(b) if b else -math.inf for b in betas), weight_decay, eps,
            LR_LIVES_ON_DEVICE=isinstance(lr, Tensor), STEP_LIVES_ON_DEVICE=not updates.counted,
            FOUND_INF=found_inf is not None, GRAD_SCALE=grad_scale is not None,
            DECOUPLED=decoupled, AMSGRAD=amsgrad, MAXIMIZE=maximize,
        )  # fmt: skip


def sgd(
    updates: Updates,
    *,
    lr: float | Tensor,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    found_inf: Tensor | None,
    grad_scale: Tensor | None,
) -> None:
    """SGD over the slices of ``full`` and of ``state``; ``small`` is the gradient."""
    for launch in updates.launches():
        launch.run(
            _sgd_kernel, lr, found_inf, grad_scale, momentum, weight_decay,
            LR_LIVES_ON_DEVICE=isinstance(lr, Tensor), FOUND_INF=found_inf is not None,
            GRAD_SCALE=grad_scale is not None, MOMENTUM=momentum != 0, NESTEROV=nesterov, MAXIMIZE=maximize,
        )  # fmt: skip

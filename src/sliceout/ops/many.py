"""Many parameters in one launch: take, put and the slice-only optimizer updates as multi-tensor Triton kernels.

A :class:`Piece` is a full tensor, its slice, and the small tensor that goes with it. Each becomes one row of a table in
device memory; a program looks up the piece that its tile belongs to. As in ``kernels``, starts are read from device
memory, so that one captured graph serves every draw, and index arithmetic is per row and column of a tile.
"""

from __future__ import annotations

import itertools
import math
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tables
from .kernels import _matrix
from .views import format_of, is_channels_last, memory_format

BLOCK_R, BLOCK_C = 4, 256
FIELDS = 23
"""Of a row of the table: 0 full, 1 small, 2-4 state, 5 step; 6 rows, 7 columns and 8 rest of the tensor that is walked,
9 columns of the other one, 10 channels_last; start, size, width, inner of 11-14 rows and 15-18 columns; 19 row scale,
20 column scale, 21 gain; 22 the first tile."""
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


CHANNELS_LAST = 4
"""Where a layout says whether the full tensor is."""


def layout(piece: Piece, walk_full: bool) -> list[int]:
    """The fields of the table that stay the same from step to step, and behind them how many tiles it takes.

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
    walked, mapped = (piece.full, piece.small) if walk_full else (piece.small, piece.full)
    n_rows, n_cols, rest = _matrix(walked)
    mapped_rows, mapped_cols, _ = _matrix(mapped)
    rows, cols, scales = piece.rows, piece.cols, (piece.row_scale, piece.col_scale)
    if piece.full.dim() == 1:  # a vector is one row of columns
        rows, cols, scales = cols, rows, scales[::-1]
    zero = _zero(piece.full.device)
    sides: list[int] = []
    for side, here, there in ((rows, n_rows, mapped_rows), (cols, n_cols, mapped_cols)):
        start, (size, width, _, inner) = side or (zero, (max(here, there), max(here, there), 1, 1))
        sides += [start.data_ptr(), size, width, inner]
    return [
        n_rows, n_cols, rest, mapped_cols, int(is_channels_last(piece.full)), *sides,
        *(0 if s is None else s.data_ptr() for s in scales), struct.unpack("q", struct.pack("d", piece.gain))[0],
        triton.cdiv(n_rows, BLOCK_R) * triton.cdiv(n_cols * rest, BLOCK_C),
    ]  # fmt: skip


def supports(*tensors: Tensor) -> bool:
    """Whether the kernels can address these tensors: known dtypes, and no gaps."""
    return all(t.dtype in _DTYPES and t.is_contiguous(memory_format=memory_format(t)) for t in tensors)


class Settled:
    """Pieces that stay where they are: their tables are made once, and :func:`take` only launches."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.launches = _launches(pieces, False, _both)
        self.count = len(pieces)

    def __len__(self) -> int:
        return self.count


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
                *(_DTYPES[d] for d in self.kinds), torch.float64 in self.kinds, FIELDS, BLOCK_R, BLOCK_C, **flags,
            )  # fmt: skip


def _launches(pieces: list[Piece], walk_full: bool, dtypes: Callable[[Piece], Any]) -> list[_Launch]:
    """One launch for each kind of piece, ``dtypes(piece)``."""
    alike: dict[Any, list[Piece]] = {}
    for piece in pieces:
        alike.setdefault(dtypes(piece), []).append(piece)
    made = []
    for kinds, same in alike.items():
        device = same[0].full.device
        rows = _rows([p.layout or layout(p, walk_full) for p in same])
        if rows.total:
            made.append(_Launch(tables.make(rows.at(same), device), _owners(rows.tiles, device), rows.total, kinds))
    return made


def _launch(kernel: Any, pieces: list[Piece], walk_full: bool, dtypes: Any, *args: Any, **flags: Any) -> None:
    for launch in _launches(pieces, walk_full, dtypes):
        launch.run(kernel, *args, **flags)


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
            self.numbers.extend((*[0] * _ADDRESSES, *fields[:-1], at))
        self.tensor = torch.frombuffer(self.numbers, dtype=torch.int64) if layouts else None

    def at(self, pieces: list[Piece]) -> Tensor:
        """The table for pieces that lie there; the next call overwrites it."""
        for column, values in enumerate(zip(*map(_addresses, pieces), strict=True)):
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
    return _kept[key]


def _owners_on_host(tiles: tuple[int, ...]) -> Tensor:
    return torch.arange(len(tiles), device="cpu").repeat_interleave(_on_host(tiles))


def _on_host(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")  # whatever the default device is


# -- index arithmetic --------------------------------------------------------------------------------------------------


@triton.jit
def _tile(table, owner, FIELDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """The row of the table, and the rows and entries of this tile."""
    program = tl.program_id(0)
    d = table + tl.load(owner + program) * FIELDS
    n_rows = tl.load(d + 6).to(tl.int32)
    n_cols = tl.load(d + 7).to(tl.int32)
    rest = tl.load(d + 8).to(tl.int32)
    tile = program - tl.load(d + 22).to(tl.int32)
    across = tl.cdiv(n_cols * rest, BLOCK_C)
    r = tile // across * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tile % across * BLOCK_C + tl.arange(0, BLOCK_C)
    if tl.load(d + 10) != 0:  # channels_last: the column is the fastest index
        c = e % n_cols
        k = e // n_cols
    else:
        c = e // rest
        k = e % rest
    return d, r, e, c, k, n_rows, n_cols * rest, rest


@triton.jit
def _source(i, d):
    """Small index -> (full index, unit), by a start, size, width and inner at ``d``."""
    start = tl.load(tl.load(d).to(tl.pointer_type(tl.int64))).to(tl.int32)
    size = tl.load(d + 1).to(tl.int32)
    width = tl.load(d + 2).to(tl.int32)
    inner = tl.load(d + 3).to(tl.int32)
    unit = start + i // inner % width
    unit = tl.where(unit >= size, unit - size, unit)
    return (i // (width * inner) * size + unit) * inner + i % inner, unit


@triton.jit
def _target(i, d):
    """Full index -> (small index, kept, unit)."""
    start = tl.load(tl.load(d).to(tl.pointer_type(tl.int64))).to(tl.int32)
    size = tl.load(d + 1).to(tl.int32)
    width = tl.load(d + 2).to(tl.int32)
    inner = tl.load(d + 3).to(tl.int32)
    unit = i // inner % size
    offset = unit - start
    offset = tl.where(offset < 0, offset + size, offset)
    return (i // (size * inner) * width + offset) * inner + i % inner, offset < width, unit


@triton.jit
def _mapped(d, rr, cc, k, rest):
    mapped_cols = tl.load(d + 9).to(tl.int32)
    if tl.load(d + 10) != 0:  # noqa: SIM108
        e = k * mapped_cols + cc
    else:
        e = cc * rest + k
    return rr.to(tl.int64)[:, None] * (mapped_cols * rest) + e[None, :]


@triton.jit
def _scaled(value, d, row_unit, col_unit, row_in, col_in):
    """Times what the slices are normalised with."""
    value = value * tl.load(d + 21).to(tl.float64, bitcast=True).to(value.dtype)
    at = tl.load(d + 19)
    if at != 0:
        scale = tl.load(at.to(tl.pointer_type(tl.float64)) + row_unit, mask=row_in, other=0)
        value = value * scale.to(value.dtype)[:, None]
    at = tl.load(d + 20)
    if at != 0:
        scale = tl.load(at.to(tl.pointer_type(tl.float64)) + col_unit, mask=col_in, other=0)
        value = value * scale.to(value.dtype)[None, :]
    return value


# -- take and put ------------------------------------------------------------------------------------------------------


@triton.jit
def _take_kernel(
    table, owner, FULL: tl.constexpr, SMALL: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    d, r, e, c, k, n_rows, n_entries, rest = _tile(table, owner, FIELDS, BLOCK_R, BLOCK_C)
    row_in = r < n_rows
    col_in = e < n_entries
    inside = row_in[:, None] & col_in[None, :]
    rr, row_unit = _source(r, d + 11)
    cc, col_unit = _source(c, d + 15)
    full = tl.load(d).to(tl.pointer_type(FULL))
    small = tl.load(d + 1).to(tl.pointer_type(SMALL))
    value = tl.load(full + _mapped(d, rr, cc, k, rest), mask=inside, other=0)
    value = _scaled(value.to(tl.float64 if WIDE else tl.float32), d, row_unit, col_unit, row_in, col_in)
    tl.store(small + r.to(tl.int64)[:, None] * n_entries + e[None, :], value.to(SMALL), mask=inside)


@triton.jit
def _put_kernel(
    table, owner, FULL: tl.constexpr, SMALL: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    d, r, e, c, k, n_rows, n_entries, rest = _tile(table, owner, FIELDS, BLOCK_R, BLOCK_C)
    row_in = r < n_rows
    col_in = e < n_entries
    rr, row_kept, row_unit = _target(r, d + 11)
    cc, col_kept, col_unit = _target(c, d + 15)
    inside = row_in[:, None] & col_in[None, :]
    kept = inside & row_kept[:, None] & col_kept[None, :]
    full = tl.load(d).to(tl.pointer_type(FULL))
    small = tl.load(d + 1).to(tl.pointer_type(SMALL))
    value = tl.load(small + _mapped(d, rr, cc, k, rest), mask=kept, other=0)
    value = _scaled(value.to(tl.float64 if WIDE else tl.float32), d, row_unit, col_unit, row_in, col_in)
    tl.store(full + r.to(tl.int64)[:, None] * n_entries + e[None, :], value.to(FULL), mask=inside)


def take(pieces: list[Piece] | Settled) -> None:
    """Fill ``small`` of every piece from ``full``."""
    for launch in (pieces if isinstance(pieces, Settled) else Settled(pieces)).launches:
        launch.run(_take_kernel)


def put(pieces: list[Piece]) -> None:
    """Fill ``full`` of every piece (uninitialised memory) with ``small`` in its place and zeros elsewhere."""
    for p in pieces:
        p.layout = p.layout or layout(p, walk_full=True)
        p.small = p.small.contiguous(memory_format=format_of(p.full.dim(), p.layout[CHANNELS_LAST] == 1))
    _launch(_put_kernel, pieces, True, _both)


# -- optimizers --------------------------------------------------------------------------------------------------------


@triton.jit
def _gradient(
    table, owner, found_inf, grad_scale, SMALL: tl.constexpr,
    FIELDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    FOUND_INF: tl.constexpr, GRAD_SCALE: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """The row of the table, where this tile lies in the full tensors, what of it is to be updated, and its gradient."""
    d, r, e, c, k, n_rows, n_entries, rest = _tile(table, owner, FIELDS, BLOCK_R, BLOCK_C)
    row_in = r < n_rows
    col_in = e < n_entries
    if FOUND_INF:  # GradScaler met an overflow: nothing is touched
        row_in = row_in & (tl.load(found_inf + 0 * r) == 0)
    inside = row_in[:, None] & col_in[None, :]
    rr, row_unit = _source(r, d + 11)
    cc, col_unit = _source(c, d + 15)
    grads = tl.load(d + 1).to(tl.pointer_type(SMALL)) + r.to(tl.int64)[:, None] * n_entries + e[None, :]
    g = tl.load(grads, mask=inside, other=0).to(tl.float32)
    g = _scaled(g, d, row_unit, col_unit, row_in, col_in)
    if GRAD_SCALE:
        g = g / tl.load(grad_scale)
    if MAXIMIZE:
        g = -g
    return d, _mapped(d, rr, cc, k, rest), inside, g


@triton.jit
def _adam_kernel(
    table, owner, lr, found_inf, grad_scale, less_beta1, less_beta2, log2_beta1, log2_beta2, weight_decay, eps,
    FULL: tl.constexpr, SMALL: tl.constexpr, STATE: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    LR_LIVES_ON_DEVICE: tl.constexpr, STEP_LIVES_ON_DEVICE: tl.constexpr, FOUND_INF: tl.constexpr,
    GRAD_SCALE: tl.constexpr, DECOUPLED: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    d, at, inside, g = _gradient(
        table, owner, found_inf, grad_scale, SMALL, FIELDS, BLOCK_R, BLOCK_C, FOUND_INF, GRAD_SCALE, MAXIMIZE
    )
    params = tl.load(d).to(tl.pointer_type(FULL)) + at
    averages = tl.load(d + 2).to(tl.pointer_type(STATE)) + at
    squares = tl.load(d + 3).to(tl.pointer_type(STATE)) + at
    if LR_LIVES_ON_DEVICE:
        lr = tl.load(lr)
    step = tl.load(d + 5)
    if STEP_LIVES_ON_DEVICE:
        step = tl.load(step.to(tl.pointer_type(tl.float32)))
    count = step.to(tl.float64)  # in float32, 1 - 0.999 ** 1 would be four digits
    correction1 = (1 - tl.exp2(count * log2_beta1)).to(tl.float32)
    correction2 = (1 - tl.exp2(count * log2_beta2)).to(tl.float32)

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
        most = tl.load(d + 4).to(tl.pointer_type(STATE)) + at
        v = tl.maximum(v, tl.load(most, mask=inside, other=0).to(tl.float32))
        tl.store(most, v.to(STATE), mask=inside)
    p = p - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(params, p.to(FULL), mask=inside)


@triton.jit
def _sgd_kernel(
    table, owner, lr, found_inf, grad_scale, momentum, weight_decay,
    FULL: tl.constexpr, SMALL: tl.constexpr, STATE: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    LR_LIVES_ON_DEVICE: tl.constexpr, FOUND_INF: tl.constexpr, GRAD_SCALE: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    d, at, inside, g = _gradient(
        table, owner, found_inf, grad_scale, SMALL, FIELDS, BLOCK_R, BLOCK_C, FOUND_INF, GRAD_SCALE, MAXIMIZE
    )
    params = tl.load(d).to(tl.pointer_type(FULL)) + at
    if LR_LIVES_ON_DEVICE:
        lr = tl.load(lr)
    p = tl.load(params, mask=inside, other=0).to(tl.float32)
    g = g + weight_decay * p
    if MOMENTUM:
        buffers = tl.load(d + 2).to(tl.pointer_type(STATE)) + at
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
    pieces: list[Piece],
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
    _launch(
        _adam_kernel, pieces, False, _kinds,
        lr, found_inf, grad_scale, *(1 - b for b in betas), *(math.log2(b) if b else -math.inf for b in betas),
        weight_decay, eps,
        LR_LIVES_ON_DEVICE=isinstance(lr, Tensor), STEP_LIVES_ON_DEVICE=pieces[0].step.is_cuda,  # type: ignore[union-attr]
        FOUND_INF=found_inf is not None, GRAD_SCALE=grad_scale is not None,
        DECOUPLED=decoupled, AMSGRAD=amsgrad, MAXIMIZE=maximize,
    )  # fmt: skip


def sgd(
    pieces: list[Piece],
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
    _launch(
        _sgd_kernel, pieces, False, _kinds, lr, found_inf, grad_scale, momentum, weight_decay,
        LR_LIVES_ON_DEVICE=isinstance(lr, Tensor), FOUND_INF=found_inf is not None, GRAD_SCALE=grad_scale is not None,
        MOMENTUM=momentum != 0, NESTEROV=nesterov, MAXIMIZE=maximize,
    )  # fmt: skip

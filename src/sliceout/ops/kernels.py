"""take and put as Triton kernels that read the start from device memory.

Because the start is data and not an argument, one compiled graph or one captured CUDA graph serves every draw.

A weight is a matrix of rows, each of them everything that lies behind dimension 0. Along rows as along columns a slice
keeps, of each block of ``size`` entries, one run of ``width`` entries, which may go around the end of the block: with
``inner`` entries to a unit, or a whole kernel of them, that is true for contiguous and for channels_last weights. Where
all runs begin and end at multiples of :data:`SIDE` entries, so many are moved side by side: one index, one access to
memory. Otherwise entries go one by one.

Set ``TRITON_INTERPRET=1`` before importing this to run the same code on the CPU.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import is_table
from .views import empty_small, is_channels_last, memory_format

SIDE = 8
"""Entries that are moved together: 16 bytes of the narrowest dtype, the most that one access can move."""


@triton.jit
def _source(i, start, size, width):
    """Place along the small axis -> (place along the full one, place in its block)."""
    at = start + i % width
    at = tl.where(at >= size, at - size, at)
    return i // width * size + at, at


@triton.jit
def _target(i, start, size, width):
    """Place along the full axis -> (place along the small one, whether it is kept, place in its block)."""
    at = i % size
    offset = at - start
    offset = tl.where(offset < 0, offset + size, offset)
    return i // size * width + offset, offset < width, at


@triton.jit
def _any_source(i, units, start, size, width, inner, inside, TABLE: tl.constexpr):
    """:func:`_source`, or what it is for a subset, whose table says which units are kept, in order."""
    if TABLE:
        at = tl.load(units + i % width // inner, mask=inside, other=0).to(i.dtype) * inner + i % inner
        return i // width * size + at, at
    else:
        return _source(i, start, size, width)


@triton.jit
def _any_target(i, units, start, size, width, inner, inside, TABLE: tl.constexpr):
    """:func:`_target`, or what it is for a subset: behind the units, its table says where each is in that order."""
    if TABLE:
        at = i % size
        offset = tl.load(units + (size + at) // inner, mask=inside, other=0).to(i.dtype) * inner + i % inner
        return i // size * width + offset, offset < width, at
    else:
        return _target(i, start, size, width)


@triton.jit
def _copy(
    src, dst, row_start, col_start, row_scale, col_scale,
    n_rows, n_cols, mapped_cols,
    row_size, row_width, row_inner, col_size, col_width, col_inner,
    MODE: tl.constexpr, ROWS: tl.constexpr, ROW_SCALE: tl.constexpr, COL_SCALE: tl.constexpr, WIDE: tl.constexpr,
    ROW_TABLE: tl.constexpr, COL_TABLE: tl.constexpr, LARGE: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the tensor that is walked in order; the other one is addressed through the slice.

    take reads mapped, writes walked (small); put reads mapped, writes walked (full); store reads walked (small),
    writes mapped. The walked tensor has ``n_rows`` rows of ``n_cols`` entries. Sizes and widths are in entries.
    """
    row_at = 0
    col_at = 0
    if ROWS and not ROW_TABLE:
        row_at = tl.load(row_start).to(tl.int64 if LARGE else tl.int32) * row_inner
    if not COL_TABLE:
        col_at = tl.load(col_start).to(tl.int64 if LARGE else tl.int32) * col_inner
    if SIDE > 1:  # noqa: SIM102  # the first is known when this is compiled
        if col_at % SIDE == 0:
            _copy_tile(
                src, dst, row_start, col_start, row_scale, col_scale, row_at, col_at, n_rows, n_cols, mapped_cols,
                row_size, row_width, row_inner, col_size, col_width, col_inner,
                MODE, ROWS, ROW_SCALE, COL_SCALE, WIDE, ROW_TABLE, COL_TABLE, LARGE, SIDE, BLOCK,
            )  # fmt: skip
            return
    _copy_tile(
        src, dst, row_start, col_start, row_scale, col_scale, row_at, col_at, n_rows, n_cols, mapped_cols,
        row_size, row_width, row_inner, col_size, col_width, col_inner,
        MODE, ROWS, ROW_SCALE, COL_SCALE, WIDE, ROW_TABLE, COL_TABLE, LARGE, 1, BLOCK,
    )  # fmt: skip


@triton.jit
def _copy_tile(
    src, dst, row_start, col_start, row_scale, col_scale, row_at, col_at,
    n_rows, n_cols, mapped_cols,
    row_size, row_width, row_inner, col_size, col_width, col_inner,
    MODE: tl.constexpr, ROWS: tl.constexpr, ROW_SCALE: tl.constexpr, COL_SCALE: tl.constexpr, WIDE: tl.constexpr,
    ROW_TABLE: tl.constexpr, COL_TABLE: tl.constexpr, LARGE: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """:func:`_copy`, ``SIDE`` entries side by side: places along the columns are counted in such groups."""
    tile = tl.program_id(0)
    if LARGE:
        tile = tile.to(tl.int64)
    i = tile * (BLOCK // SIDE) + tl.arange(0, BLOCK // SIDE)
    r = i // (n_cols // SIDE)
    c = i % (n_cols // SIDE)
    inside = r < n_rows
    kept = inside
    rr = r
    row_place = r
    col_at = col_at // SIDE
    size = col_size // SIDE
    width = col_width // SIDE
    if MODE == "put":
        if ROWS:
            rr, there, row_place = _any_target(r, row_start, row_at, row_size, row_width, row_inner, inside, ROW_TABLE)
            kept = kept & there
        cc, there, col_place = _any_target(c, col_start, col_at, size, width, col_inner, inside, COL_TABLE)
        kept = kept & there
    else:
        if ROWS:
            rr, row_place = _any_source(r, row_start, row_at, row_size, row_width, row_inner, inside, ROW_TABLE)
        cc, col_place = _any_source(c, col_start, col_at, size, width, col_inner, inside, COL_TABLE)
    side = tl.arange(0, SIDE)[None, :]
    walked = i.to(tl.int64)[:, None] * SIDE + side
    mapped = (rr.to(tl.int64) * (mapped_cols // SIDE) + cc)[:, None] * SIDE + side
    if MODE == "store":
        tl.store(dst + mapped, tl.load(src + walked, mask=inside[:, None]), mask=inside[:, None])
    else:
        value = tl.load(src + mapped, mask=kept[:, None], other=0)
        if ROW_SCALE or COL_SCALE:
            value = value.to(tl.float64 if WIDE else tl.float32)
        if ROW_SCALE:
            scale = tl.load(row_scale + row_place // row_inner, mask=kept, other=0).to(value.dtype)
            value = value * scale[:, None]
        if COL_SCALE:
            unit = (col_place[:, None] * SIDE + side) // col_inner
            value = value * tl.load(col_scale + unit, mask=kept[:, None], other=0).to(value.dtype)
        tl.store(dst + walked, value, mask=inside[:, None])


@triton.jit
def _entries(starts, n, inner, TABLE: tl.constexpr, BLOCK: tl.constexpr):
    """Those of a vector that this program walks, which of them there are, and where the slice starts."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = 0
    if not TABLE:
        start = tl.load(starts).to(tl.int32) * inner
    return i, i < n, start


@triton.jit
def _copy_pair(
    first, second, first_out, second_out, starts, n, size, width, inner,
    PUT: tl.constexpr, TABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Two vectors along one slice, each in its own dtype; the results are walked in order."""
    i, inside, start = _entries(starts, n, inner, TABLE, BLOCK)
    if PUT:
        at, kept, _place = _any_target(i, starts, start, size, width, inner, inside, TABLE)
        kept = kept & inside
    else:
        at, _place = _any_source(i, starts, start, size, width, inner, inside, TABLE)
        kept = inside
    tl.store(first_out + i, tl.load(first + at, mask=kept, other=0), mask=inside)
    tl.store(second_out + i, tl.load(second + at, mask=kept, other=0), mask=inside)


@triton.jit
def _update_statistics(
    mean, var, batches, batch_mean, batch_var, starts, n, size, width, inner,
    OLD: tl.constexpr, NEW: tl.constexpr, COUNTED: tl.constexpr, WIDE: tl.constexpr,
    TABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The kept entries become ``OLD`` times what they were plus ``NEW`` times those of the batch."""
    i, inside, start = _entries(starts, n, inner, TABLE, BLOCK)
    at, _place = _any_source(i, starts, start, size, width, inner, inside, TABLE)
    kind = tl.float64 if WIDE else tl.float32
    old = tl.full((), OLD, kind)  # an argument would arrive in float32
    new = tl.full((), NEW, kind)
    value = tl.load(mean + at, mask=inside).to(kind) * old + tl.load(batch_mean + i, mask=inside).to(kind) * new
    tl.store(mean + at, value, mask=inside)
    value = tl.load(var + at, mask=inside).to(kind) * old + tl.load(batch_var + i, mask=inside).to(kind) * new
    tl.store(var + at, value, mask=inside)
    if COUNTED:  # noqa: SIM102  # there may be no such pointer
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + 1)


def take(
    full: Tensor,
    row_start: Tensor | None,
    col_start: Tensor | None,
    rows: list[int],
    cols: list[int],
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    full = full.contiguous(memory_format=memory_format(full))
    small = empty_small(full, rows, cols, dtype)
    _launch(full, small, (row_start, col_start), (rows, cols), (row_scale, col_scale), "take")
    return small


def put(
    small: Tensor,
    full: Tensor,
    row_start: Tensor | None,
    col_start: Tensor | None,
    rows: list[int],
    cols: list[int],
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Tensor:
    """Fill ``full`` (uninitialised memory) with ``small`` in its place and zeros elsewhere."""
    small = small.contiguous(memory_format=memory_format(full))
    _launch(full, small, (row_start, col_start), (rows, cols), (row_scale, col_scale), "put")
    return full


def store_(full: Tensor, small: Tensor, start: Tensor, geometry: list[int]) -> None:
    """Write ``small`` into its place in the vector ``full``, which must be contiguous, and leave the rest."""
    _launch(full, small.contiguous(), (start, None), (geometry, []), (None, None), "store")


def copy_pair(
    sources: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], start: Tensor, geometry: list[int], put: bool
) -> tuple[Tensor, Tensor]:
    """:func:`take` or :func:`put` of two vectors into ``out`` (uninitialised memory), in one launch."""
    first, second = (t.contiguous() for t in sources)
    size, width, _, inner = geometry
    n = out[0].shape[0]
    block = min(triton.next_power_of_2(n), 512)
    with torch.cuda.device_of(first):
        _copy_pair[(triton.cdiv(n, block),)](
            first, second, *out, start, n, size * inner, width * inner, inner, put, is_table(start), block
        )  # fmt: skip
    return out


def update_statistics_(
    mean: Tensor,
    var: Tensor,
    batches: Tensor | None,
    batch_mean: Tensor,
    batch_var: Tensor,
    start: Tensor,
    geometry: list[int],
    momentum: float,
) -> None:
    """Move the kept entries of ``mean`` and ``var``, which must be contiguous, towards the batch's; count the batch."""
    size, width, _, inner = geometry
    n = batch_mean.shape[0]
    block = min(triton.next_power_of_2(n), 512)
    wide = torch.float64 in (mean.dtype, var.dtype)
    with torch.cuda.device_of(mean):
        _update_statistics[(triton.cdiv(n, block),)](
            mean, var, batches, batch_mean.contiguous(), batch_var.contiguous(),
            start, n, size * inner, width * inner, inner,
            1 - momentum, momentum, batches is not None, wide, is_table(start), block,
        )  # fmt: skip


def _launch(
    full: Tensor,
    small: Tensor,
    starts: tuple[Tensor | None, Tensor | None],
    geometries: tuple[list[int], list[int]],
    scales: tuple[Tensor | None, Tensor | None],
    mode: str,
) -> None:
    entries = (full if mode == "put" else small).numel()
    if entries == 0:
        return
    shape = Matrix(full, small, *geometries, walk_full=mode == "put")
    if shape.turned:
        starts, scales = starts[::-1], scales[::-1]
    src, dst = (full, small) if mode == "take" else (small, full)
    aligned = src.data_ptr() % 16 == dst.data_ptr() % 16 == 0
    side = SIDE if shape.in_groups and aligned and not is_table(starts[1]) else 1
    block = min(triton.next_power_of_2(entries), 1024 if entries < 1 << 21 else 2048)
    with torch.cuda.device_of(src):
        _copy[(triton.cdiv(entries, block),)](
            src, dst, *starts, *scales, shape.n_rows, shape.n_cols, shape.mapped_cols, *shape.rows, *shape.cols,
            mode, starts[0] is not None, scales[0] is not None, scales[1] is not None,
            torch.float64 in (src.dtype, dst.dtype), is_table(starts[0]), is_table(starts[1]),
            max(full.numel(), entries) >= 1 << 31, side, block,
        )  # fmt: skip


class Matrix:
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
        self.in_groups = all(n % SIDE == 0 for n in (self.n_cols, self.mapped_cols, *self.cols[:2]))


def _run(geometry: list[int], behind: int) -> tuple[int, int, int]:
    """The entries of a block, those that are kept of it, and those of a unit, if there are ``behind`` at each place."""
    size, width, _, inner = geometry or (1, 1, 1, 1)
    return size * inner * behind, width * inner * behind, inner * behind

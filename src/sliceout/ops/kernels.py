"""take and put as Triton kernels that read the start from device memory.

Because the start is data and not an argument, one compiled graph or one captured CUDA graph serves every draw. A
weight is seen as a matrix of ``rows`` by everything behind them; the columns inside a row are ``[cols, rest]`` for a
contiguous weight and ``[rest, cols]`` for a channels_last one. Index arithmetic is done per row and per column of a
tile, not per entry, so the kernels run at the speed of memory.

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


@triton.jit
def _source(i, starts, start, size, width, inner, inside, SLICED: tl.constexpr, TABLE: tl.constexpr):
    """Small index -> (full index, unit)."""
    if SLICED:
        if TABLE:  # the units of a subset, kept ones first
            unit = tl.load(starts + i // inner % width, mask=inside, other=0).to(tl.int32)
        else:
            unit = start + i // inner % width
            unit = tl.where(unit >= size, unit - size, unit)
        return (i // (width * inner) * size + unit) * inner + i % inner, unit
    else:
        return i, i


@triton.jit
def _target(i, starts, start, size, width, inner, inside, SLICED: tl.constexpr, TABLE: tl.constexpr):
    """Full index -> (small index, kept, unit)."""
    if SLICED:
        unit = i // inner % size
        if TABLE:  # the place of every unit in that order
            offset = tl.load(starts + size + unit, mask=inside, other=0).to(tl.int32)
        else:
            offset = unit - start
            offset = tl.where(offset < 0, offset + size, offset)
        return (i // (size * inner) * width + offset) * inner + i % inner, offset < width, unit
    else:
        return i, i >= 0, i


@triton.jit
def _copy(
    src, dst, row_start, col_start, row_scale, col_scale,
    n_rows, n_cols, mapped_cols, rest,
    row_size, row_width, row_inner, col_size, col_width, col_inner,
    MODE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, LAST: tl.constexpr,
    ROW_SCALE: tl.constexpr, COL_SCALE: tl.constexpr, WIDE: tl.constexpr,
    ROW_TABLE: tl.constexpr, COL_TABLE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One tile of the tensor that is walked in order; the other one is addressed through the slice.

    take reads mapped, writes walked (small); put reads mapped, writes walked (full); store reads walked (small),
    writes mapped. The walked tensor has ``n_rows`` rows of ``n_cols * rest`` entries.
    """
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    if LAST:  # channels_last: the column is the fastest index
        c = e % n_cols
        k = e // n_cols
    else:
        c = e // rest
        k = e % rest
    row_at = 0
    col_at = 0
    if ROWS and not ROW_TABLE:
        row_at = tl.load(row_start).to(tl.int32)
    if COLS and not COL_TABLE:
        col_at = tl.load(col_start).to(tl.int32)
    row_in = r < n_rows
    col_in = e < n_cols * rest
    inside = row_in[:, None] & col_in[None, :]
    if MODE == "put":
        rr, row_kept, row_unit = _target(r, row_start, row_at, row_size, row_width, row_inner, row_in, ROWS, ROW_TABLE)
        cc, col_kept, col_unit = _target(c, col_start, col_at, col_size, col_width, col_inner, col_in, COLS, COL_TABLE)
        kept = inside & row_kept[:, None] & col_kept[None, :]
    else:
        rr, row_unit = _source(r, row_start, row_at, row_size, row_width, row_inner, row_in, ROWS, ROW_TABLE)
        cc, col_unit = _source(c, col_start, col_at, col_size, col_width, col_inner, col_in, COLS, COL_TABLE)
        kept = inside
    if LAST:  # noqa: SIM108
        mapped_e = k * mapped_cols + cc
    else:
        mapped_e = cc * rest + k
    mapped = rr.to(tl.int64)[:, None] * (mapped_cols * rest) + mapped_e[None, :]
    walked = r.to(tl.int64)[:, None] * (n_cols * rest) + e[None, :]
    if MODE == "store":
        tl.store(dst + mapped, tl.load(src + walked, mask=inside), mask=inside)
    else:
        value = tl.load(src + mapped, mask=kept, other=0)
        if ROW_SCALE or COL_SCALE:
            value = value.to(tl.float64 if WIDE else tl.float32)
        if ROW_SCALE:
            scale = tl.load(row_scale + row_unit, mask=row_in, other=0).to(value.dtype)
            value = value * scale[:, None]
        if COL_SCALE:
            scale = tl.load(col_scale + col_unit, mask=col_in, other=0).to(value.dtype)
            value = value * scale[None, :]
        tl.store(dst + walked, value, mask=inside)


@triton.jit
def _entries(starts, n, TABLE: tl.constexpr, BLOCK: tl.constexpr):
    """Those of a vector that this program walks, which of them there are, and where the slice starts."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = 0
    if not TABLE:
        start = tl.load(starts).to(tl.int32)
    return i, i < n, start


@triton.jit
def _copy_pair(
    first, second, first_out, second_out, starts, n, size, width, inner,
    PUT: tl.constexpr, TABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Two vectors along one slice, each in its own dtype; the results are walked in order."""
    i, inside, start = _entries(starts, n, TABLE, BLOCK)
    if PUT:
        at, kept, _unit = _target(i, starts, start, size, width, inner, inside, True, TABLE)
        kept = kept & inside
    else:
        at, _unit = _source(i, starts, start, size, width, inner, inside, True, TABLE)
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
    i, inside, start = _entries(starts, n, TABLE, BLOCK)
    at, _unit = _source(i, starts, start, size, width, inner, inside, True, TABLE)
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
            first, second, *out, start, n, size, width, inner, put, is_table(start), block
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
            mean, var, batches, batch_mean.contiguous(), batch_var.contiguous(), start, n, size, width, inner,
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
    if full.dim() == 1:  # a vector is one row of columns
        starts, geometries, scales = starts[::-1], geometries[::-1], scales[::-1]
    walked, mapped = (full, small) if mode == "put" else (small, full)
    if walked.numel() == 0:
        return
    n_rows, n_cols, rest = _matrix(walked)
    mapped_cols = _matrix(mapped)[1]
    block_c = min(triton.next_power_of_2(n_cols * rest), 512)
    block_r = min(2048 // block_c, triton.next_power_of_2(n_rows))
    grid = (triton.cdiv(n_rows, block_r), triton.cdiv(n_cols * rest, block_c))
    src, dst = (full, small) if mode == "take" else (small, full)
    row_size, row_width, _, row_inner = geometries[0] or (1, 1, 1, 1)
    col_size, col_width, _, col_inner = geometries[1] or (1, 1, 1, 1)
    with torch.cuda.device_of(src):
        _copy[grid](
            src, dst, *starts, *scales,
            n_rows, n_cols, mapped_cols, rest,
            row_size, row_width, row_inner, col_size, col_width, col_inner,
            mode, bool(geometries[0]), bool(geometries[1]), is_channels_last(full),
            scales[0] is not None, scales[1] is not None, torch.float64 in (src.dtype, dst.dtype),
            is_table(starts[0]), is_table(starts[1]), block_r, block_c,
        )  # fmt: skip


def _matrix(t: Tensor) -> tuple[int, int, int]:
    """``t`` as ``(rows, cols, rest)``."""
    if t.dim() == 1:
        return 1, t.shape[0], 1
    return t.shape[0], t.shape[1], math.prod(t.shape[2:])

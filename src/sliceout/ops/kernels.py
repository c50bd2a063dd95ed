"""take and put as Triton kernels over many tensors, which read starts from device memory.

Because the start is data and not an argument, one captured CUDA graph serves every draw.

A weight is a matrix of rows, each of them everything that lies behind dimension 0. Along rows as along columns a slice
keeps, of each block of ``size`` entries, one run of ``width`` entries, which may go around the end of the block: with
``inner`` entries to a unit, or a whole kernel of them, that is true for contiguous and for channels_last weights. Where
all runs begin and end at multiples of :data:`VECTOR` entries, so many are moved together: one index, one access to
memory. Otherwise entries go one by one.

Each tensor has a row in a table in device memory (``multi_tensor``); a program looks up the row of its tile.
Set ``TRITON_INTERPRET=1`` before importing this to run the same code on the CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

VECTOR = 8
"""Entries that are moved together: 16 bytes of the narrowest dtype, the most that one access can move."""


# -- index arithmetic --------------------------------------------------------------------------------------------------


@triton.jit
def source(i, start, size, width):
    """Place along the small axis -> (place along the full one, place in its block)."""
    at = start + i % width
    at = tl.where(at >= size, at - size, at)
    return i // width * size + at, at


@triton.jit
def target(i, start, size, width):
    """Place along the full axis -> (place along the small one, whether it is kept, place in its block)."""
    at = i % size
    offset = at - start
    offset = tl.where(offset < 0, offset + size, offset)
    return i // size * width + offset, offset < width, at


@triton.jit
def find_tile(table, owner, FIELDS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """The row of the table, the first entry of this tile, and whether entries can be moved together."""
    program = tl.program_id(0)
    d = table + tl.load(owner + program) * FIELDS
    first = (program - tl.load(d + 25).to(tl.int32)) * BLOCK
    starts = tl.load(d + 14).to(tl.pointer_type(tl.int64))
    rest = tl.load(starts) * tl.load(d + 17) % VECTOR
    for part in range(1, tl.load(d + 21).to(tl.int32)):
        rest += tl.load(starts + part * tl.load(d + 24)) * tl.load(d + 17) % VECTOR
    addresses = tl.load(d) | tl.load(d + 1) | tl.load(d + 2) | tl.load(d + 3) | tl.load(d + 4)
    return d, first, (tl.load(d + 9) != 0) & (rest == 0) & (addresses % 16 == 0)


@triton.jit
def run_of(d, VECTOR: tl.constexpr, at=0):
    """Start, size and width of the rows (``d + 10``) or columns (``d + 14``) that are kept; ``at``: which start."""
    start = tl.load(tl.load(d).to(tl.pointer_type(tl.int64)) + at).to(tl.int32) * tl.load(d + 3).to(tl.int32)
    return start // VECTOR, tl.load(d + 1).to(tl.int32) // VECTOR, tl.load(d + 2).to(tl.int32) // VECTOR


@triton.jit
def walk(d, first, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Of the walked tensor: the entries of this tile in groups of ``VECTOR``, their rows and columns, which exist."""
    i = first // VECTOR + tl.arange(0, BLOCK // VECTOR)
    across = tl.load(d + 7).to(tl.int32) // VECTOR
    r = i // across
    return i, r, i % across, r < tl.load(d + 6).to(tl.int32)


@triton.jit
def entries(i, VECTOR: tl.constexpr):
    return i.to(tl.int64)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def mapped_entries(d, rr, cc, VECTOR: tl.constexpr):
    return entries(rr.to(tl.int64) * (tl.load(d + 8) // VECTOR) + cc, VECTOR)


@triton.jit
def pointer_to(address, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """What lies there; groups are moved together only where it is a multiple of 16."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if VECTOR > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def scaled(value, d, row_place, col_place, kept, VECTOR: tl.constexpr):
    """Times what the slices are normalised with, where it is kept."""
    value = value * tl.load(d + 20).to(tl.float64, bitcast=True).to(value.dtype)
    at = tl.load(d + 18)
    if at != 0:
        unit = row_place // tl.load(d + 13).to(tl.int32)
        scale = tl.load(at.to(tl.pointer_type(tl.float64)) + unit, mask=kept, other=0)
        value = value * scale.to(value.dtype)[:, None]
    at = tl.load(d + 19)
    if at != 0:
        scales = pointer_to(at, tl.float64, VECTOR)
        unit = col_place[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
        inner = tl.load(d + 17).to(tl.int32)
        if inner == 1:  # together, as they are
            value = value * tl.load(scales + unit, mask=kept[:, None], other=0).to(value.dtype)
        else:
            value = value * tl.load(scales + unit // inner, mask=kept[:, None], other=0).to(value.dtype)
    return value


# -- take and put ------------------------------------------------------------------------------------------------------


@triton.jit
def take_kernel(
    table, owner, FULL: tl.constexpr, SMALL: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _copy(table, owner, False, FULL, SMALL, WIDE, FIELDS, VECTOR, BLOCK)


@triton.jit
def put_kernel(
    table, owner, FULL: tl.constexpr, SMALL: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _copy(table, owner, True, FULL, SMALL, WIDE, FIELDS, VECTOR, BLOCK)


@triton.jit
def _copy(
    table, owner, PUT: tl.constexpr, FULL: tl.constexpr, SMALL: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """take or put: two kernels, so that a profile tells them apart."""
    d, first, together = find_tile(table, owner, FIELDS, VECTOR, BLOCK)
    if together:
        _copy_tile(d, first, PUT, FULL, SMALL, WIDE, VECTOR, BLOCK)
    else:
        _copy_tile(d, first, PUT, FULL, SMALL, WIDE, 1, BLOCK)


@triton.jit
def _added_up(d, r, c, inside, small, WIDE: tl.constexpr, VECTOR: tl.constexpr):
    """What the parts of the batch put there, part after part; and the places in their blocks."""
    rr, row_kept, row_place = target(r, *run_of(d + 10, 1))
    cc, col_kept, col_place = target(c, *run_of(d + 14, VECTOR))
    there = (inside & row_kept & col_kept)[:, None]
    value = tl.load(small + mapped_entries(d, rr, cc, VECTOR), mask=there, other=0).to(
        tl.float64 if WIDE else tl.float32
    )
    for part in range(1, tl.load(d + 21).to(tl.int32)):
        rr, row_kept, row_place = target(r, *run_of(d + 10, 1, part * tl.load(d + 23)))
        cc, col_kept, col_place = target(c, *run_of(d + 14, VECTOR, part * tl.load(d + 24)))
        there = (inside & row_kept & col_kept)[:, None]
        at = small + part * tl.load(d + 22) + mapped_entries(d, rr, cc, VECTOR)
        value += tl.load(at, mask=there, other=0).to(tl.float64 if WIDE else tl.float32)
    return value, row_place, col_place


@triton.jit
def _copy_tile(
    d, first, PUT: tl.constexpr, FULL: tl.constexpr, SMALL: tl.constexpr, WIDE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, r, c, inside = walk(d, first, VECTOR, BLOCK)
    full = pointer_to(tl.load(d), FULL, VECTOR)
    small = pointer_to(tl.load(d + 1), SMALL, VECTOR)
    if PUT:
        value, row_place, col_place = _added_up(d, r, c, inside, small, WIDE, VECTOR)
    else:
        rr, row_place = source(r, *run_of(d + 10, 1))
        cc, col_place = source(c, *run_of(d + 14, VECTOR))
        value = tl.load(full + mapped_entries(d, rr, cc, VECTOR), mask=inside[:, None], other=0)
        value = value.to(tl.float64 if WIDE else tl.float32)
    value = scaled(value, d, row_place, col_place, inside, VECTOR)
    if PUT:
        tl.store(full + entries(i, VECTOR), value.to(FULL), mask=inside[:, None])
    else:
        tl.store(small + entries(i, VECTOR), value.to(SMALL), mask=inside[:, None])

"""take and put as index arithmetic in plain torch: the definition, on any device.

The other implementations are tested against this one; compiled graphs use ``store`` as it stands.

``rows`` and ``cols`` describe dimensions 0 and 1 as ``[size, width, blocks, inner]`` (see ``Axis``); an empty list
leaves the dimension whole. A start has one entry, or one for each part of the batch; a matrix ``[2, size]`` is the
table of a ``Subset``: its units in order, kept ones first, and the place of each unit in that order.

``put`` gathers instead of scattering: each full entry looks up where it would lie in the small tensor. So nothing is
zero-filled first, and no two writes meet. With ``parts``, ``take`` stacks what each part takes, and ``put`` adds up
what each part puts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_table(start: Tensor | None) -> bool:
    """Whether this is the table of a subset rather than the start of a slice."""
    return start is not None and start.dim() == 2


def start_of(start: Any, part: int) -> Any:
    """The start of one part, itself a tensor of one entry; what has one for all parts, and a table, is what it was."""
    return start if start is None or is_table(start) or start.shape[0] == 1 else start[part : part + 1]


def sources(start: Tensor, geometry: list[int]) -> tuple[Tensor, Tensor]:
    """For each entry of the small dimension: its index in the full dimension, and its unit in the slice."""
    size, width, blocks, inner = geometry
    i = torch.arange(blocks * width * inner, device=start.device)
    unit = i // inner % width
    unit = start[0, unit] if is_table(start) else (start + unit) % size
    return (i // (width * inner) * size + unit) * inner + i % inner, unit


def targets(start: Tensor, geometry: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """For each entry of the full dimension: its index in the small one, whether it is kept, and its unit."""
    size, width, blocks, inner = geometry
    i = torch.arange(blocks * size * inner, device=start.device)
    unit = i // inner % size
    offset = start[1, unit] if is_table(start) else (unit - start) % size
    kept = offset < width
    return (i // (size * inner) * width + offset.clamp_max(width - 1)) * inner + i % inner, kept, unit


def take(
    full: Tensor, row_start: Tensor | None, col_start: Tensor | None, rows: list[int], cols: list[int],
    row_scale: Tensor | None, col_scale: Tensor | None, dtype: torch.dtype | None, parts: int = 0,
) -> Tensor:  # fmt: skip
    if parts:
        starts = ((start_of(row_start, i), start_of(col_start, i)) for i in range(parts))
        return torch.stack([take(full, *start, rows, cols, row_scale, col_scale, dtype) for start in starts])
    out = full
    for dim, start, geometry, scale in ((0, row_start, rows, row_scale), (1, col_start, cols, col_scale)):
        if start is not None:
            index, unit = sources(start, geometry)
            out = out.index_select(dim, index)
            if scale is not None:
                out = scaled(out, scale[unit], dim)
    return out.to(dtype or full.dtype)


def put(
    small: Tensor, row_start: Tensor | None, col_start: Tensor | None, rows: list[int], cols: list[int],
    row_scale: Tensor | None, col_scale: Tensor | None, dtype: torch.dtype, parts: int = 0,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(torch.promote_types(small.dtype, dtype), torch.float32)
    if parts:
        starts = ((start_of(row_start, i), start_of(col_start, i)) for i in range(parts))
        each = zip(small.to(wide), starts, strict=True)
        return sum(put(one, *start, rows, cols, row_scale, col_scale, wide) for one, start in each).to(dtype)  # type: ignore[union-attr]
    out = small.to(torch.promote_types(small.dtype, dtype))
    for dim, start, geometry, scale in ((1, col_start, cols, col_scale), (0, row_start, rows, row_scale)):
        if start is not None:
            index, kept, unit = targets(start, geometry)
            out = out.index_select(dim, index)
            if scale is not None:
                out = scaled(out, scale[unit], dim)
            out = torch.where(along(kept, dim, out.dim()), out, out.new_zeros(()))
    return out.to(dtype)


def store(full: Tensor, small: Tensor, start: Tensor, geometry: list[int]) -> Tensor:
    """``full`` with its kept entries (dimension 0) replaced by ``small``."""
    index, kept, _ = targets(start, geometry)
    return torch.where(along(kept, 0, full.dim()), small.to(full.dtype).index_select(0, index), full)


def scaled(t: Tensor, scale: Tensor, dim: int) -> Tensor:
    """``t`` times a factor for each entry along ``dim``, in float32 at least: the caller rounds once, at the end."""
    return t * along(scale.to(torch.promote_types(t.dtype, torch.float32)), dim, t.dim())


def along(vector: Tensor, dim: int, ndim: int) -> Tensor:
    return vector.view(*(-1 if d == dim else 1 for d in range(ndim)))

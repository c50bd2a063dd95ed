"""take and put as Inductor's own code: the index arithmetic of ``reference``, entry by entry.

An entry is computed where it is needed, so that Inductor fuses it with what is around it: the weight of a norm is taken
inside the kernel that normalises. A put adds up all parts of the batch in registers: no two writes meet. Places along a
dimension are numbers of 32 bits, as dimensions are shorter than that. Imported by ``inductor`` once Inductor is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.ir import Pointwise
from torch._inductor.lowering import mutate_to
from torch._inductor.virtualized import ops
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from .placement import small_shape

INDEX = torch.int32


def _split(i: Any, length: int, inner: int) -> tuple[Any, Any, Any]:
    """A place along an axis whose blocks have ``length`` units: block, unit, place in the unit."""
    return FloorDiv(i, length * inner), ModularIndexing(i, inner, length), ModularIndexing(i, 1, inner)


def _source(i: Any, start: Any, geometry: Sequence[int], part: Any = 0) -> tuple[Any, Any]:
    """Place along the small axis -> (place along the full one, its unit), as ``reference.sources``."""
    size, width, blocks, inner = geometry
    block, unit, rest = _split(i, width, inner)
    if len(start.get_size()) == 2:  # the table of a subset
        at = _load(start, 0, unit)
    else:
        at = ops.add(_load_start(start, part), ops.index_expr(unit, INDEX))
        at = ops.where(ops.ge(at, _number(size)), ops.sub(at, _number(size)), at)
    place = ops.add(ops.index_expr(block * (size * inner) + rest, INDEX), ops.mul(at, _number(inner)))
    return _index(place, blocks * size * inner), at


def _target(i: Any, start: Any, geometry: Sequence[int], part: int = 0) -> tuple[Any, Any, Any]:
    """Place along the full axis -> (place along the small one, whether it is kept, its unit): ``reference.targets``."""
    size, width, blocks, inner = geometry
    block, unit, rest = _split(i, size, inner)
    if len(start.get_size()) == 2:  # the table of a subset
        offset = _load(start, 1, unit)
    else:
        offset = ops.sub(ops.index_expr(unit, INDEX), _load_start(start, part))
        offset = ops.where(ops.lt(offset, _number(0)), ops.add(offset, _number(size)), offset)
    place = ops.add(ops.index_expr(block * (width * inner) + rest, INDEX), ops.mul(offset, _number(inner)))
    return _index(place, blocks * width * inner), ops.lt(offset, _number(width)), ops.index_expr(unit, INDEX)


def _load(start: Any, *at: Any) -> Any:
    """An entry of a start or a subset's table."""
    return ops.to_dtype(start.make_loader()(list(at)), INDEX)


def _load_start(start: Any, part: Any) -> Any:
    """The start of a part; there may be one for all of them."""
    return _load(start, 0 if start.get_size()[0] == 1 else part)


def _number(number: int) -> Any:
    return ops.constant(number, INDEX)


def _index(value: Any, length: int) -> Any:
    return ops.indirect_indexing(value, length, check=False, wrap_neg=False)


def _sides(*sides: tuple[Any, Any, Any]) -> list[tuple[int, Any, Any, Any]]:
    """Dimension, start, geometry and scale of those that are sliced."""
    return [(dim, *side) for dim, side in enumerate(sides) if side[0] is not None]


def _scaled(value: Any, sides: list[tuple[int, Any, Any, Any]], units: list[Any], wide: torch.dtype) -> Any:
    for (*_, scale), unit in zip(sides, units, strict=True):
        if scale is not None:
            factor = scale.make_loader()([_index(unit, scale.get_size()[0])])
            value = ops.mul(ops.to_dtype(value, wide), ops.to_dtype(factor, wide))
    return value


def _pointwise(like: Any, shape: Sequence[Any], dtype: torch.dtype, entry: Callable[[Any], Any]) -> Any:
    return Pointwise.create(device=like.get_device(), dtype=dtype, inner_fn=entry, ranges=list(shape))


def _take(full, row_start, col_start, rows, cols, row_scale, col_scale, dtype, leaf=None, parts=0):  # type: ignore[no-untyped-def]
    sides = _sides((row_start, rows, row_scale), (col_start, cols, col_scale))
    wide = torch.promote_types(full.get_dtype(), torch.float32)
    load, dtype = full.make_loader(), dtype or full.get_dtype()

    def entry(index: Any) -> Any:
        part, at, units = index[0] if parts else 0, list(index[1:] if parts else index), []
        for dim, start, geometry, _ in sides:
            at[dim], unit = _source(at[dim], start, geometry, part)
            units.append(unit)
        return ops.to_dtype(_scaled(load(at), sides, units, wide), dtype)

    return _pointwise(full, small_shape(full.get_size(), rows, cols, parts), dtype, entry)


def _put(small, row_start, col_start, rows, cols, row_scale, col_scale, shape, channels_last, dtype, parts=0):  # type: ignore[no-untyped-def]
    sides = _sides((row_start, rows, row_scale), (col_start, cols, col_scale))
    wide = torch.promote_types(torch.promote_types(small.get_dtype(), dtype), torch.float32)
    load = small.make_loader()

    def from_part(index: Any, part: int) -> tuple[Any, list[Any]]:
        at, kept, units = list(index), None, []
        for dim, start, geometry, _ in sides:
            at[dim], here, unit = _target(index[dim], start, geometry, part)
            kept = here if kept is None else ops.and_(kept, here)
            units.append(unit)
        place = [part, *at] if parts else at
        return ops.masked(kept, lambda: ops.to_dtype(load(place), wide), 0.0), units

    def entry(index: Any) -> Any:
        there = [from_part(index, part) for part in range(max(parts, 1))]
        total = functools.reduce(ops.add, [value for value, _ in there])
        return ops.to_dtype(_scaled(total, sides, there[0][1], wide), dtype)  # all parts scale a unit alike

    return _pointwise(small, shape, dtype, entry)


def _update_statistics(mean, var, batches, batch_mean, batch_var, start, rows, momentum):  # type: ignore[no-untyped-def]
    def moved(full: Any, batch: Any) -> Any:
        dtype = full.get_dtype()
        wide = torch.promote_types(dtype, torch.float32)
        load, new = full.make_loader(), batch.make_loader()

        def entry(index: Any) -> Any:
            at, kept, _ = _target(index[0], start, rows)
            old = load(index)
            there = ops.masked(kept, lambda: ops.to_dtype(new([at]), wide), 0.0)
            mixed = ops.add(
                ops.mul(ops.to_dtype(old, wide), ops.constant(1 - momentum, wide)),
                ops.mul(there, ops.constant(momentum, wide)),
            )
            return ops.where(kept, ops.to_dtype(mixed, dtype), old)

        return _pointwise(full, full.get_size(), dtype, entry)

    for full, batch in ((mean, batch_mean), (var, batch_var)):
        mutate_to(full, moved(full, batch))
    if batches is not None:
        count, dtype = batches.make_loader(), batches.get_dtype()
        more = _pointwise(batches, batches.get_size(), dtype, lambda i: ops.add(count(i), ops.constant(1, dtype)))
        mutate_to(batches, more)


INLINE: dict[str, Callable[..., Any]] = {"take": _take, "put": _put, "update_statistics_": _update_statistics}
"""By the name of the operation, with the arguments that it takes."""

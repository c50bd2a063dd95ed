"""take: the small part of a parameter that this step uses. put, its adjoint, is what autograd runs backwards.

All slicing in the library goes through :func:`take` (and :func:`store_` for running statistics). One question, which
implementation, is answered here:

- eager on a GPU: all slices of a step in one launch (``gather``), once a first pass has shown what they are;
- other eager code: views (``views``), except for subsets, whose units do not lie side by side;
- everything else: the registered op (``library``), which on CUDA is one Triton kernel (``kernels``).

In a compiled graph that is replayed the op stands by itself although Inductor could melt it into its neighbours: the
index arithmetic then runs once per activation instead of once per parameter, and the step was slower for it
(``results/h200-wrn-28-10.md``, call 1). Of vectors it is the launches that cost, so there those of one layer share one
(:func:`one_launch`). In a compiled graph that is not replayed, each call of an op costs the host more than that: there
they are melted in (``inlined``, ``lowerings``).
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..slices import Axis, ConcatAxis
from . import library, prefetch, reference, tables, views

__all__ = ["by_views", "in_place", "library", "one_launch", "store_", "take", "take_pair", "without_views"]


StandIn = tuple[weakref.ref[Tensor], Tensor, Any]
"""A parameter (not kept alive), what receives its compact gradient in compiled graphs, and what it was made for
(``sliceout.stand_ins``)."""

_views = True


def by_views(t: Tensor) -> bool:
    """Whether slices of ``t`` are taken as views now: in eager code, where the host knows the start."""
    if torch.compiler.is_compiling() or not _views:
        return False
    return t.is_cpu or (t.is_cuda and not tables.capturing(t.device))


@contextlib.contextmanager
def without_views() -> Iterator[None]:
    """Call the registered ops in eager code too, so that a trace sees them."""
    global _views
    _views = False
    try:
        yield
    finally:
        _views = True


def take(
    full: Tensor,
    rows: Axis | ConcatAxis | None = None,
    cols: Axis | ConcatAxis | None = None,
    *,
    scale_rows: bool = False,
    scale_cols: bool = False,
    dtype: torch.dtype | None = None,
    stand_in: StandIn | None = None,
) -> Tensor:
    """The part of ``full`` that the slices ``rows`` (dimension 0) and ``cols`` (dimension 1) keep now.

    Args:
        full: a parameter or buffer of 1 to 5 dimensions.
        rows, cols: how a slice lies along the dimension; ``None`` leaves it whole.
        scale_rows, scale_cols: multiply each unit by its slice's normalisation.
        dtype: of the result; the gradient comes back in the dtype of ``full``.
        stand_in: a parameter and what receives its compact gradient in a compiled graph (``sliceout.stand_ins``).
    """
    if rows is None and cols is None:
        return full if dtype is None else full.to(dtype)
    if not torch.compiler.is_compiling() and prefetch.usable(full):
        small = prefetch.take(full, rows, cols, scale_rows, scale_cols, dtype)
        if small is not None:
            return small
    if isinstance(rows, ConcatAxis) or isinstance(cols, ConcatAxis):
        return _take_parts(full, rows, cols, scale_rows=scale_rows, scale_cols=scale_cols, dtype=dtype)
    for dim, axis in enumerate((rows, cols)):
        if axis is not None and full.shape[dim] != axis.size:
            raise ValueError(
                f"dimension {dim} of shape {tuple(full.shape)} does not match {axis}, which covers {axis.size}"
            )
    table = any(a is not None and reference.is_table(a.slice.start) for a in (rows, cols))
    if full.requires_grad and not table and _wants_compact(full, rows, cols):
        from ..compact.gradient import Take

        settings = {"scale_rows": scale_rows, "scale_cols": scale_cols, "dtype": dtype}
        return Take.apply(full, rows, cols, settings)
    if by_views(full) and not table:
        return _take_view(full, rows, cols, scale_rows, scale_cols, dtype)
    args = (
        None if rows is None else rows.slice.start,
        None if cols is None else cols.slice.start,
        [] if rows is None else rows.geometry,
        [] if cols is None else cols.geometry,
        rows.slice.scale if rows is not None and scale_rows else None,
        cols.slice.scale if cols is not None and scale_cols else None,
    )
    if stand_in is not None and _receives(stand_in, full, args[2], args[3]):
        return torch.ops.sliceout.take_for(stand_in[1], full.detach(), *args, dtype)
    return torch.ops.sliceout.take(full, *args, dtype)


def _receives(stand_in: StandIn, full: Tensor, rows: list[int], cols: list[int]) -> bool:
    """Whether the gradient of this take can go to the stand-in: in a compiled graph, while all slices are live."""
    parameter, leaf, _ = stand_in
    return (
        torch.compiler.is_compiling()
        and parameter() is full  # FSDP, functional_call and export put other tensors in its place
        and full.requires_grad
        and list(leaf.shape) == views.small_shape(full.shape, rows, cols)
    )


def _wants_compact(full: Tensor, rows: Axis | None, cols: Axis | None) -> bool:
    """Whether the gradient comes back slice-sized; compiled graphs go about it in another way (``stand_in``)."""
    return (
        all(a is None or a.slice.grads == "compact" for a in (rows, cols))
        and full.is_leaf
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not views._transformed()
    )


def _take_parts(full: Tensor, rows: Any, cols: Any, **settings: Any) -> Tensor:
    """Fused projections: each part of a ``ConcatAxis`` axis is taken by its own slice."""
    dim, joint = (0, rows) if isinstance(rows, ConcatAxis) else (1, cols)
    taken, offset = [], 0
    for part in joint.sections:
        section = full.narrow(dim, offset, part.size)
        taken.append(take(section, *((part, cols) if dim == 0 else (rows, part)), **settings))
        offset += part.size
    return torch.cat(taken, dim)


def take_pair(
    first: Tensor | None,
    second: Tensor | None,
    rows: Axis | ConcatAxis,
    stand_ins: tuple[StandIn | None, StandIn | None] = (None, None),
) -> tuple[Tensor | None, Tensor | None]:
    """:func:`take` of two vectors, such as weight and bias, if there are two: in a compiled graph in one launch."""
    if first is not None and second is not None and one_launch(rows) and first.shape == second.shape == (rows.size,):
        where = rows.slice.start, rows.geometry
        leaves = [s[1] for s, t in zip(stand_ins, (first, second)) if s is not None and _receives(s, t, where[1], [])]  # noqa: B905
        if not leaves:
            return torch.ops.sliceout.take_pair(first, second, *where)  # type: ignore[no-any-return]
        if len(leaves) == 2:
            return torch.ops.sliceout.take_pair_for(*leaves, first.detach(), second.detach(), *where)  # type: ignore[no-any-return]
    one = None if first is None else take(first, rows, stand_in=stand_ins[0])
    return one, None if second is None else take(second, rows, stand_in=stand_ins[1])


def one_launch(rows: Axis | ConcatAxis) -> TypeGuard[Axis]:
    """Whether the ops over several vectors along ``rows`` are called: in compiled graphs, if it is but one slice.

    Eager code has its own ways (views, ``gather``), and a trace is to see each take by itself.
    """
    return torch.compiler.is_compiling() and not isinstance(rows, ConcatAxis)


def in_place(rows: Axis | ConcatAxis, full: Tensor) -> TypeGuard[Axis]:
    """Whether eager code lets the kept entries of a vector without gradient be changed where they are."""
    return (
        by_views(full)
        and not isinstance(rows, ConcatAxis)
        and not reference.is_table(rows.slice.start)
        and not views._transformed()
        and not prefetch._watched()
        and not full.is_inference()
    )


def store_(fulls: Sequence[Tensor], smalls: Sequence[Tensor], rows: Axis | ConcatAxis) -> None:
    """Write each of ``smalls`` over the kept entries of its vector in ``fulls``, which get no gradient."""
    if not torch.compiler.is_compiling() and all(s._base is f for s, f in zip(smalls, fulls, strict=True)):
        return  # views: what was written to them is in place
    if isinstance(rows, ConcatAxis):
        sizes, widths = ([getattr(part, what) for part in rows.sections] for what in ("size", "width"))
        sections = zip(*(f.split(sizes) for f in fulls)), zip(*(s.split(widths) for s in smalls))  # noqa: B905
        for section, kept, part in zip(*sections, rows.sections, strict=True):
            store_(section, kept, part)
        return
    start, geometry = rows.slice.start, rows.geometry
    pairs = list(zip(fulls, smalls, strict=True))
    if torch.compiler.is_compiling():
        for full, small in pairs:
            full.copy_(reference.store(full, small, start, geometry))
    elif by_views(fulls[0]) and not reference.is_table(start):
        if views._transformed():  # its views do not show their base, and a tensor must not be copied onto itself
            pairs = [(full, small.clone()) for full, small in pairs]
        apart = [(full, small) for full, small in pairs if small._base is not full]  # a view has written through
        if apart:
            views.store_([f for f, _ in apart], [s for _, s in apart], (rows.slice.start_on_host, geometry))
    else:
        for full, small in pairs:
            torch.ops.sliceout.store_(full, small, start, geometry)


def _take_view(
    full: Tensor, rows: Axis | None, cols: Axis | None, scale_rows: bool, scale_cols: bool, dtype: torch.dtype | None
) -> Tensor:
    row, col = (views.WHOLE if a is None else (a.slice.start_on_host, a.geometry) for a in (rows, cols))
    scales = [(d, a) for d, a, wanted in ((0, rows, scale_rows), (1, cols, scale_cols)) if wanted and a is not None]
    if all(a.slice.gain is not None for _, a in scales):
        gain = math.prod(a.slice.gain or 1.0 for _, a in scales)
        return views.take_with_grad(full, row, col, gain, dtype or full.dtype)
    small = views.take_with_grad(full, row, col, 1.0, full.dtype)
    for dim, axis in scales:
        if axis.slice.scale is not None:
            kept = views.take(axis.slice.scale, (axis.slice.start_on_host, axis.slice.axis().geometry), views.WHOLE)
            kept = kept.repeat_interleave(axis.inner).repeat(axis.blocks)
            small = reference.scaled(small, kept, dim)
    return small.to(dtype or full.dtype)

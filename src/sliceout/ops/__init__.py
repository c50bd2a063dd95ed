"""take: the small part of a parameter that this step uses. put, its adjoint, is what autograd runs backwards.

All slicing in the library goes through :func:`take` (and :func:`store_` for running statistics). One question, which
implementation, is answered here:

- eager on a GPU: all slices of a step in one launch (``prefetch``), once a first pass has shown what they are;
- other eager code: views (``views``), except for subsets, whose units do not lie side by side;
- everything else: the registered op (``library``), which compiled code for a GPU inlines (``inductor``).

``docs/architecture.md`` says what each of them is for, and what a step would cost without it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..slices import Axis
from ..takes import ConcatAxis, Take
from . import library, prefetch, reference, tables, views
from .placement import Place, Placement, small_shape

__all__ = ["GradientLeaf", "host_knows_start", "in_place", "library", "store_", "take", "without_views"]


class GradientLeaf(NamedTuple):
    """What receives the compact gradient of a parameter in compiled graphs (``sliceout.compact.gradient_leaves``)."""

    parameter: weakref.ref[Tensor]
    """Not kept alive."""
    leaf: Tensor
    take: Take
    """What it was made for."""


_views_allowed: ContextVar[bool] = ContextVar("sliceout_views_allowed", default=True)


def host_knows_start(t: Tensor) -> bool:
    """Whether slices of ``t`` are taken by Python numbers now: in eager code that is not being captured."""
    if torch.compiler.is_compiling() or not _views_allowed.get():
        return False
    return t.is_cpu or (t.is_cuda and not tables.capturing(t.device))


@contextlib.contextmanager
def without_views() -> Iterator[None]:
    """Call the registered ops in eager code too, so that a trace sees them."""
    before = _views_allowed.set(False)
    try:
        yield
    finally:
        _views_allowed.reset(before)


def take(
    full: Tensor, t: Take, dtype: torch.dtype | None = None, leaf: GradientLeaf | None = None, parts: int = 1
) -> Tensor:
    """The part of ``full`` that ``t`` describes, at the starts of this step.

    Args:
        full: a parameter or buffer of 1 to 5 dimensions.
        t: which slices lie along dimensions 0 and 1, and which normalisations are multiplied in.
        dtype: of the result; the gradient comes back in the dtype of ``full``.
        leaf: what receives the compact gradient of ``full`` in a compiled graph.
        parts: of the batch (see ``takes.parts_of``). From two on the result has one more dimension in front, with what
            each part takes.
    """
    rows, cols, scale_rows, scale_cols = t
    stacked = parts if parts > 1 else 0
    if rows is None and cols is None:
        whole = full if dtype is None else full.to(dtype)
        return whole.expand(parts, *full.shape) if stacked else whole
    compiling = torch.compiler.is_compiling()
    if not compiling and prefetch.usable(full):
        small = prefetch.take(full, t, dtype, stacked)
        if small is not None:
            return small
    if isinstance(rows, ConcatAxis) or isinstance(cols, ConcatAxis):
        return _take_sections(full, t, dtype, parts)
    for dim, axis in enumerate((rows, cols)):
        if axis is not None and full.shape[dim] != axis.size:
            raise ValueError(
                f"dimension {dim} of shape {tuple(full.shape)} does not match {axis}, which covers {axis.size}"
            )
    if host_knows_start(full) and t.simple:
        if stacked and not views.transformed():
            at = [Placement.now(t, part) for part in range(parts)]
            return views.TakeParts.apply(full, at, dtype or full.dtype)  # type: ignore[no-any-return]
        if stacked:
            each = (views.take_with_grad(full, Placement.now(t, i), dtype or full.dtype) for i in range(parts))
            return torch.stack(list(each))
        compact = t.compact and full.is_leaf and not views.transformed()
        return views.take_with_grad(full, Placement.now(t), dtype or full.dtype, compact)
    args = (
        None if rows is None else _starts(rows, stacked),
        None if cols is None else _starts(cols, stacked),
        [] if rows is None else rows.geometry,
        [] if cols is None else cols.geometry,
        rows.slice.scale if rows is not None and scale_rows else None,
        cols.slice.scale if cols is not None and scale_cols else None,
        dtype,
    )
    if leaf is not None and compiling and _receives(leaf, full, args[2], args[3]):
        return torch.ops.sliceout.take(full.detach(), *args, leaf.leaf)  # type: ignore[no-any-return]
    return torch.ops.sliceout.take(full, *args, None, stacked)  # type: ignore[no-any-return]


def _starts(axis: Axis, stacked: int) -> Tensor:
    """As the op reads them: a batch that cannot be cut into parts has the start of the first."""
    s = axis.slice
    return s.start if stacked or s.parts == 1 else s.start[:1]


def _receives(leaf: GradientLeaf, full: Tensor, rows: list[int], cols: list[int]) -> bool:
    """Whether the gradient of this take can go to the leaf: while all slices are live."""
    return (
        leaf.parameter() is full  # FSDP, functional_call and export put other tensors in its place
        and full.requires_grad
        and list(leaf.leaf.shape) == small_shape(full.shape, rows, cols)
    )


def _take_sections(full: Tensor, t: Take, dtype: torch.dtype | None, parts: int) -> Tensor:
    """Fused projections: each section of a ``ConcatAxis`` is taken by its own slice."""
    dim, fused = (0, t.rows) if isinstance(t.rows, ConcatAxis) else (1, t.cols)
    assert isinstance(fused, ConcatAxis)
    taken, offset = [], 0
    for axis in fused.sections:
        section = full.narrow(dim, offset, axis.size)
        one = t._replace(rows=axis) if dim == 0 else t._replace(cols=axis)
        taken.append(take(section, one, dtype, parts=parts))
        offset += axis.size
    return torch.cat(taken, dim + (parts > 1))


def in_place(rows: Axis | ConcatAxis, full: Tensor) -> TypeGuard[Axis]:
    """Whether eager code lets the kept entries of a vector without gradient be changed where they are."""
    return (
        host_knows_start(full)
        and isinstance(rows, Axis)
        and rows.slice.contiguous
        and not views.transformed()
        and not prefetch.dispatch_modes()
        and not full.is_inference()
    )


def store_(fulls: Sequence[Tensor], smalls: Sequence[Tensor], rows: Axis | ConcatAxis) -> None:
    """Write each of ``smalls`` over the kept entries of its vector in ``fulls``, which get no gradient."""
    if isinstance(rows, ConcatAxis):
        sizes, widths = ([getattr(axis, what) for axis in rows.sections] for what in ("size", "width"))
        sections = zip(*(f.split(sizes) for f in fulls)), zip(*(s.split(widths) for s in smalls))  # noqa: B905
        for section, kept, axis in zip(*sections, rows.sections, strict=True):
            store_(section, kept, axis)
        return
    start, geometry = rows.slice.start, rows.geometry
    pairs = list(zip(fulls, smalls, strict=True))
    if torch.compiler.is_compiling():
        for full, small in pairs:
            full.copy_(reference.store(full, small, start, geometry))
    elif host_knows_start(fulls[0]) and rows.slice.contiguous:
        if views.transformed():  # its views do not show their base, and a tensor must not be copied onto itself
            pairs = [(full, small.clone()) for full, small in pairs]
        at = Placement(Place(rows.slice.start_on_host, geometry))
        apart = [pair for pair in pairs if pair[1]._base is not pair[0]]  # a view has written through
        if both := [views_of for pair in apart for views_of in views.rectangles(*pair, at)]:
            torch._foreach_copy_([full for full, _ in both], [small for _, small in both])  # one launch on a GPU
    else:
        for full, small in pairs:
            torch.ops.sliceout.store_(full, small, start, geometry)

"""take and put where the start is a Python int: a view if the slice is one run of memory, else a copy.

For eager code. It makes no copies on the CPU, and few launches on a GPU, where eager code waits for launches.

Along one dimension a slice is one run of entries in every block, or two if it wraps around the end. Over two
dimensions the runs make rectangles, so everything here is ``narrow`` and ``copy_``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .placement import Place, Placement, TensorSpec, compact_gradient, empty_small

transformed = torch._C._are_functorch_transforms_active
"""Whether a torch.func transform is at work, which must see every operation."""


def take_with_grad(full: Tensor, at: Placement, dtype: torch.dtype, compact: bool = False) -> Tensor:
    """:class:`Take`, without the node where no gradient can flow."""
    if full.requires_grad or transformed():
        return Take.apply(full, at, dtype, compact)
    return Take.forward(full, at, dtype, compact)


class Function(torch.autograd.Function):
    """Skips the inspection of signatures that ``apply`` spends 50 us on, where no torch.func transform needs it."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if transformed():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class Take(Function):
    """:func:`take`, normalised, in ``dtype``; backward writes the gradient into place once, however it is sliced.

    With ``compact`` the gradient is handed on as it is, with the place where it belongs.
    """

    @staticmethod
    def forward(full: Tensor, at: Placement, dtype: torch.dtype, compact: bool) -> Tensor:
        if not at.uniform:
            return at.scaled(take(full, at)).to(dtype)
        plain = at.gain == 1 and dtype == full.dtype
        return take(full, at) if plain else take_copy(full, at, dtype, at.gain)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        full, ctx.at, _, ctx.compact = inputs
        ctx.spec = TensorSpec.of(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole = torch.is_grad_enabled() or transformed()  # second derivatives need a node
        if ctx.compact and not whole and not grad.is_complex():
            return compact_gradient(grad, ctx.spec, ctx.at), None, None, None
        put = Put.apply if whole else Put.forward
        return put(grad, ctx.spec, ctx.at), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], full: Tensor, *settings: Any) -> tuple[Tensor, int]:
        small = Take.apply(full.movedim(in_dims[0], -1), *settings)  # behind the sliced dimensions, out of their way
        return small, small.dim() - 1


class Put(Function):
    """The adjoint of :class:`Take`, and the other way round, so that second derivatives work."""

    @staticmethod
    def forward(small: Tensor, spec: TensorSpec, at: Placement) -> Tensor:
        full = spec.empty(small.device).zero_()
        gain = at.gain
        if not at.uniform:
            small, gain = at.scaled(small), 1.0
        for target, source in rectangles(full, small, at):
            _scaled_into(target, source, gain)
        return full

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        small, _, ctx.at = inputs
        ctx.dtype = small.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Take.apply(grad, ctx.at, ctx.dtype, False), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], small: Tensor, spec: TensorSpec, at: Any) -> tuple[Tensor, int]:
        wide = TensorSpec((*spec.shape, info.batch_size), False, spec.dtype)
        full = Put.apply(small.movedim(in_dims[0], -1), wide, at)
        return full, full.dim() - 1


class TakeParts(Function):
    """What every part of the batch takes of ``full``, one behind the other; backward adds up what they put."""

    @staticmethod
    def forward(full: Tensor, at: Sequence[Placement], dtype: torch.dtype) -> Tensor:
        smalls = empty_small(full, *at[0].geometries, dtype, len(at))
        for small, one in zip(smalls, at, strict=True):
            if one.uniform:
                for source, target in rectangles(full, small, one):
                    _scaled_into(target, source, one.gain)
            else:
                small.copy_(one.scaled(take(full, one)))
        return smalls

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        full, ctx.at, _ = inputs
        ctx.spec = TensorSpec.of(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return put_parts(grad, ctx.spec, ctx.at), None, None
        each = zip(grad, ctx.at, strict=True)  # second derivatives need nodes
        return sum(Put.apply(small, ctx.spec, one) for small, one in each), None, None  # type: ignore[return-value]


def put_parts(smalls: Tensor, spec: TensorSpec, at: Sequence[Placement]) -> Tensor:
    """The adjoint of :class:`TakeParts`: part after part, always in this order."""
    wide = torch.promote_types(spec.dtype, torch.float32)
    full = spec._replace(dtype=wide).empty(smalls.device).zero_()
    for small, one in zip(smalls, at, strict=True):
        gain = one.gain if one.uniform else 1.0
        small = small if one.uniform else one.scaled(small)
        for target, source in rectangles(full, small, one):
            target.add_(source, alpha=gain)
    return full.to(spec.dtype)


def _scaled_into(target: Tensor, source: Tensor, gain: float) -> None:
    """``target = source * gain``, rounded once."""
    if gain == 1:
        target.copy_(source)
    elif torch.promote_types(source.dtype, target.dtype) == source.dtype:
        torch.mul(source, gain, out=target)
    else:
        target.copy_(source).mul_(gain)


# -- runs and rectangles -----------------------------------------------------------------------------------------------


def take(full: Tensor, at: Placement) -> Tensor:
    """The kept part of ``full``, sharing its memory if it is one rectangle of it, and readable there."""
    one_rectangle = all(len(runs(p)) == 1 and blocks_of(p) == 1 for p in at[:2])
    if one_rectangle and (full.dim() > 1 or readable(full, runs(at.rows)[0][0])):
        view = full
        for dim, place in enumerate(at[:2]):
            if place is not None:
                ((offset, _, length),) = runs(place)
                view = view.narrow(dim, offset, length)
        return view
    return take_copy(full, at)


def take_copy(full: Tensor, at: Placement, dtype: torch.dtype | None = None, gain: float = 1.0) -> Tensor:
    """:func:`take` into memory of its own, times ``gain``."""
    small = empty_small(full, *at.geometries, dtype)
    for source, target in rectangles(full, small, at):
        _scaled_into(target, source, gain)
    return small


def runs(place: Place | None) -> list[tuple[int, int, int]]:
    """``(offset in the full block, offset in the small block, length)`` of each contiguous run, in entries."""
    if place is None:
        return [(0, 0, 0)]
    start, (size, width, _, inner), _ = place
    first = min(width, size - start)
    head = (start * inner, 0, first * inner)
    return [head] if first == width else [head, (0, first * inner, (width - first) * inner)]


def readable(vector: Tensor, offset: int) -> bool:
    """Whether kernels can read ``vector`` from this entry on.

    cuDNN's batch norms read 16 bytes at a time wherever the vector begins (pytorch/pytorch#195186). Matrices need not
    be asked about: products look at their addresses themselves.
    """
    return not vector.is_cuda or offset * vector.element_size() % 16 == 0


def blocks_of(place: Place | None) -> int:
    return 1 if place is None else place.geometry[2]


def rectangles(full: Tensor, small: Tensor, at: Placement) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of ``full`` and of ``small`` that hold the same entries."""
    rows, cols = at[:2]
    row_dim, col_dim = 0, 1
    if blocks_of(cols) > 1:
        full, small = (t.unflatten(1, (blocks_of(cols), -1)) for t in (full, small))
        col_dim = 2
    if blocks_of(rows) > 1:
        full, small = (t.unflatten(0, (blocks_of(rows), -1)) for t in (full, small))
        row_dim, col_dim = 1, col_dim + 1
    for row_run in runs(rows):
        for col_run in runs(cols):
            a, b = full, small
            for dim, place, (offset, to, length) in ((row_dim, rows, row_run), (col_dim, cols, col_run)):
                if place is not None:
                    a, b = a.narrow(dim, offset, length), b.narrow(dim, to, length)
            yield a, b

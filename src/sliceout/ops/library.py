"""``sliceout::take`` and friends: the registered ops that compiled and captured steps call.

========================  =============================================================================
``take(full) -> small``   the kept rows and columns, scaled, in the wanted dtype
``take_for(leaf, full)``  the same, but the gradient goes to ``leaf``, which has the shape of ``small``
``put(small) -> full``    its adjoint: zeros where nothing is kept (without the zero-fill pass)
``store_(full!, small)``  writes the kept entries of a vector in place (batch-norm statistics)
========================  =============================================================================

Starts are tensors: no op ever looks at their value on the host, except the CPU kernels, where that costs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference, views

_library = torch.library.Library("sliceout", "DEF")
_SLICE = "Tensor? row_start, Tensor? col_start, int[] rows, int[] cols, Tensor? row_scale, Tensor? col_scale"
_library.define(f"take(Tensor full, {_SLICE}, ScalarType? dtype) -> Tensor")
_library.define(f"take_for(Tensor stand_in, Tensor full, {_SLICE}, ScalarType? dtype) -> Tensor")
_library.define(f"put(Tensor small, {_SLICE}, SymInt[] shape, bool channels_last, ScalarType dtype) -> Tensor")
_library.define("store_(Tensor(a!) full, Tensor small, Tensor start, int[] rows) -> ()")


def _cut(start: Tensor | None, geometry: list[int]) -> views.Cut:
    return views.WHOLE if start is None else (int(start), geometry)


def _take_cpu(full, row_start, col_start, rows, cols, row_scale, col_scale, dtype):  # type: ignore[no-untyped-def]
    if reference.is_table(row_start) or reference.is_table(col_start):
        small = reference.take(full, row_start, col_start, rows, cols, row_scale, col_scale, dtype)
        return small.contiguous(memory_format=views.memory_format(full))
    cuts = _cut(row_start, rows), _cut(col_start, cols)
    small = views.take_copy(full, *cuts)  # an op must not return its input's memory
    return _scaled(small, row_start, col_start, rows, cols, row_scale, col_scale).to(dtype or full.dtype)


def _put_cpu(small, row_start, col_start, rows, cols, row_scale, col_scale, shape, channels_last, dtype):  # type: ignore[no-untyped-def]
    if reference.is_table(row_start) or reference.is_table(col_start):
        full = reference.put(small, row_start, col_start, rows, cols, row_scale, col_scale, dtype)
        return full.contiguous(memory_format=views.format_of(len(shape), channels_last))
    full = _empty_full(small, shape, channels_last, dtype).zero_()
    small = small.to(torch.promote_types(small.dtype, dtype))
    small = _scaled(small, row_start, col_start, rows, cols, row_scale, col_scale)
    return views.put_(full, small, _cut(row_start, rows), _cut(col_start, cols))


def _store_cpu(full: Tensor, small: Tensor, start: Tensor, rows: list[int]) -> None:
    if reference.is_table(start):
        full.copy_(reference.store(full, small, start, rows))
    else:
        views.put_(full, small, _cut(start, rows))


def _scaled(small, row_start, col_start, rows, cols, row_scale, col_scale):  # type: ignore[no-untyped-def]
    for dim, start, geometry, scale in ((0, row_start, rows, row_scale), (1, col_start, cols, col_scale)):
        if scale is not None:
            small = reference.scaled(small, scale[reference.sources(start, geometry)[1]], dim)
    return small


def _empty_full(small: Tensor, shape: list[int], channels_last: bool, dtype: torch.dtype) -> Tensor:
    """Memory for a gradient, dense whatever the strides of the parameter."""
    return torch.empty(
        shape, dtype=dtype, device=small.device, memory_format=views.format_of(len(shape), channels_last)
    )


def _take_cuda(full, row_start, col_start, rows, cols, row_scale, col_scale, dtype):  # type: ignore[no-untyped-def]
    from . import kernels

    return kernels.take(full, row_start, col_start, rows, cols, row_scale, col_scale, dtype)


def _put_cuda(small, row_start, col_start, rows, cols, row_scale, col_scale, shape, channels_last, dtype):  # type: ignore[no-untyped-def]
    from . import kernels

    full = _empty_full(small, shape, channels_last, dtype)
    return kernels.put(small, full, row_start, col_start, rows, cols, row_scale, col_scale)


def _store_cuda(full: Tensor, small: Tensor, start: Tensor, rows: list[int]) -> None:
    from . import kernels

    kernels.store_(full, small, start, rows)


_library.impl("take", _take_cpu, "CPU")
_library.impl("take", _take_cuda, "CUDA")
_library.impl("take_for", lambda _, *args: _take_cpu(*args), "CPU")
_library.impl("take_for", lambda _, *args: _take_cuda(*args), "CUDA")
_library.impl("put", _put_cpu, "CPU")
_library.impl("put", _put_cuda, "CUDA")
_library.impl("store_", _store_cpu, "CPU")
_library.impl("store_", _store_cuda, "CUDA")


@torch.library.register_fake("sliceout::take", lib=_library)
def _take_fake(full, row_start, col_start, rows, cols, row_scale, col_scale, dtype):  # type: ignore[no-untyped-def]
    return views.empty_small(full, rows, cols, dtype)


@torch.library.register_fake("sliceout::take_for", lib=_library)
def _take_for_fake(stand_in, full, row_start, col_start, rows, cols, row_scale, col_scale, dtype):  # type: ignore[no-untyped-def]
    return views.empty_small(full, rows, cols, dtype)


@torch.library.register_fake("sliceout::put", lib=_library)
def _put_fake(small, row_start, col_start, rows, cols, row_scale, col_scale, shape, channels_last, dtype):  # type: ignore[no-untyped-def]
    return _empty_full(small, shape, channels_last, dtype)


@torch.library.register_fake("sliceout::store_", lib=_library)
def _store_fake(full: Tensor, small: Tensor, start: Tensor, rows: list[int]) -> None:
    return None


def _take_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    full, row_start, col_start, ctx.rows, ctx.cols, row_scale, col_scale, _ = inputs
    ctx.shape, ctx.channels_last, ctx.dtype = full.shape, views.is_channels_last(full), full.dtype
    # Saved, not kept: a draw between forward and backward then raises instead of misplacing the gradient.
    ctx.save_for_backward(row_start, col_start, row_scale, col_scale)


def _take_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    row_start, col_start, row_scale, col_scale = ctx.saved_tensors
    full = torch.ops.sliceout.put(
        grad, row_start, col_start, ctx.rows, ctx.cols, row_scale, col_scale, ctx.shape, ctx.channels_last, ctx.dtype
    )
    return full, None, None, None, None, None, None, None


def _take_for_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    stand_in, _, row_start, col_start, *_ = inputs
    ctx.dtype = stand_in.dtype
    ctx.save_for_backward(row_start, col_start)


def _take_for_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """As it is: whoever receives it knows the scales."""
    grad = grad.to(ctx.dtype)
    for start in ctx.saved_tensors:  # looked at, so that a draw between forward and backward raises
        if start is not None:
            grad = torch.where(start[0] >= 0, grad, torch.nan)
    return grad, *[None] * 8


def _put_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    small, row_start, col_start, ctx.rows, ctx.cols, row_scale, col_scale, *_ = inputs
    ctx.dtype = small.dtype
    ctx.save_for_backward(row_start, col_start, row_scale, col_scale)


def _put_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    row_start, col_start, row_scale, col_scale = ctx.saved_tensors
    small = torch.ops.sliceout.take(grad, row_start, col_start, ctx.rows, ctx.cols, row_scale, col_scale, ctx.dtype)
    return small, None, None, None, None, None, None, None, None, None


torch.library.register_autograd("sliceout::take", _take_backward, setup_context=_take_context, lib=_library)
torch.library.register_autograd("sliceout::take_for", _take_for_backward, setup_context=_take_for_context, lib=_library)
torch.library.register_autograd("sliceout::put", _put_backward, setup_context=_put_context, lib=_library)

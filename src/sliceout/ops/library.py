"""``sliceout::take`` and friends: the registered ops that compiled and captured steps call, or inline (``inlined``).

==========================  ===========================================================================
``take(full) -> small``     the kept rows and columns, scaled, in the wanted dtype
``put(small) -> full``      its adjoint: zeros where nothing is kept (without the zero-fill pass)
``store_(full!, small)``    writes the kept entries of a vector in place (batch-norm statistics)
``take_pair``, ``put_pair`` take and put of two vectors along one slice (weight and bias of a norm)
``take_for``                take whose gradient goes as it is to another tensor (``sliceout.stand_ins``)
``take_pair_for``           the same for two vectors
``update_statistics_``      all that a training batch norm writes: means, variances, the count of batches
==========================  ===========================================================================

A vector is taken in less time than its kernel takes to start, so what belongs together is done in one launch.

Starts are tensors: no op ever looks at their value on the host, except the CPU kernels, where that costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import inlined, reference, views

_library = torch.library.Library("sliceout", "DEF")
_SLICE = "Tensor? row_start, Tensor? col_start, int[] rows, int[] cols, Tensor? row_scale, Tensor? col_scale"
_library.define(f"take(Tensor full, {_SLICE}, ScalarType? dtype) -> Tensor")
_library.define(f"take_for(Tensor stand_in, Tensor full, {_SLICE}, ScalarType? dtype) -> Tensor")
_library.define(f"put(Tensor small, {_SLICE}, SymInt[] shape, bool channels_last, ScalarType dtype) -> Tensor")
_library.define("store_(Tensor(a!) full, Tensor small, Tensor start, int[] rows) -> ()")
for _name in ("take_pair", "put_pair"):
    _library.define(f"{_name}(Tensor first, Tensor second, Tensor start, int[] rows) -> (Tensor, Tensor)")
_library.define(
    "take_pair_for(Tensor first_leaf, Tensor second_leaf, Tensor first, Tensor second, Tensor start, int[] rows) "
    "-> (Tensor, Tensor)"
)
_library.define(
    "update_statistics_(Tensor(a!) mean, Tensor(b!) var, Tensor(c!)? batches, Tensor batch_mean, Tensor batch_var, "
    "Tensor start, int[] rows, float momentum) -> ()"
)


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


def _take_pair_cpu(first: Tensor, second: Tensor, start: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    one, other = (_take_cpu(full, start, None, rows, [], None, None, None) for full in (first, second))
    return one, other


def _put_pair_cpu(first: Tensor, second: Tensor, start: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    shape = full_shape(rows)
    one, other = (
        _put_cpu(small, start, None, rows, [], None, None, shape, False, small.dtype) for small in (first, second)
    )
    return one, other


def _update_statistics_cpu(mean, var, batches, batch_mean, batch_var, start, rows, momentum):  # type: ignore[no-untyped-def]
    for full, batch in ((mean, batch_mean), (var, batch_var)):
        wide = torch.promote_types(full.dtype, torch.float32)
        old = _take_cpu(full, start, None, rows, [], None, None, wide)
        _store_cpu(full, old * (1 - momentum) + batch.to(wide) * momentum, start, rows)
    if batches is not None:
        batches.add_(1)


def full_shape(rows: list[int]) -> list[int]:
    size, _, blocks, inner = rows
    return [size * blocks * inner]


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


def _take_pair_cuda(first: Tensor, second: Tensor, start: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    from . import kernels

    return kernels.copy_pair((first, second), _take_pair_fake(first, second, start, rows), start, rows, put=False)


def _put_pair_cuda(first: Tensor, second: Tensor, start: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    from . import kernels

    return kernels.copy_pair((first, second), _put_pair_fake(first, second, start, rows), start, rows, put=True)


def _update_statistics_cuda(mean, var, batches, batch_mean, batch_var, start, rows, momentum):  # type: ignore[no-untyped-def]
    from . import kernels

    kernels.update_statistics_(mean, var, batches, batch_mean, batch_var, start, rows, momentum)


_library.impl("take", _take_cpu, "CPU")
_library.impl("take", _take_cuda, "CUDA")
_library.impl("take_for", lambda _, *args: _take_cpu(*args), "CPU")
_library.impl("take_for", lambda _, *args: _take_cuda(*args), "CUDA")
_library.impl("put", _put_cpu, "CPU")
_library.impl("put", _put_cuda, "CUDA")
_library.impl("store_", _store_cpu, "CPU")
_library.impl("store_", _store_cuda, "CUDA")
_library.impl("take_pair", _take_pair_cpu, "CPU")
_library.impl("take_pair", _take_pair_cuda, "CUDA")
_library.impl("take_pair_for", lambda _, __, *args: _take_pair_cpu(*args), "CPU")
_library.impl("take_pair_for", lambda _, __, *args: _take_pair_cuda(*args), "CUDA")
_library.impl("put_pair", _put_pair_cpu, "CPU")
_library.impl("put_pair", _put_pair_cuda, "CUDA")
_library.impl("update_statistics_", _update_statistics_cpu, "CPU")
_library.impl("update_statistics_", _update_statistics_cuda, "CUDA")


def _fake(name: str) -> Callable[[Any], Any]:
    """Register what an op makes of fake tensors. Every tracer asks for that, Inductor too: it is told the rest then."""

    def register(fake: Any) -> Any:
        def traced(*args: Any, **kwargs: Any) -> Any:
            inlined.tell_inductor()
            return fake(*args, **kwargs)

        torch.library.register_fake(f"sliceout::{name}", traced, lib=_library)
        return fake

    return register


@_fake("take")
def _take_fake(full, row_start, col_start, rows, cols, row_scale, col_scale, dtype):  # type: ignore[no-untyped-def]
    return views.empty_small(full, rows, cols, dtype)


@_fake("take_for")
def _take_for_fake(stand_in, full, row_start, col_start, rows, cols, row_scale, col_scale, dtype):  # type: ignore[no-untyped-def]
    return views.empty_small(full, rows, cols, dtype)


@_fake("put")
def _put_fake(small, row_start, col_start, rows, cols, row_scale, col_scale, shape, channels_last, dtype):  # type: ignore[no-untyped-def]
    return _empty_full(small, shape, channels_last, dtype)


@_fake("store_")
def _store_fake(full: Tensor, small: Tensor, start: Tensor, rows: list[int]) -> None:
    return None


@_fake("take_pair")
def _take_pair_fake(first: Tensor, second: Tensor, start: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    return views.empty_small(first, rows, []), views.empty_small(second, rows, [])


@_fake("take_pair_for")
def _take_pair_for_fake(first_stand_in, second_stand_in, first, second, start, rows):  # type: ignore[no-untyped-def]
    return _take_pair_fake(first, second, start, rows)


@_fake("put_pair")
def _put_pair_fake(first: Tensor, second: Tensor, start: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    shape = full_shape(rows)
    return _empty_full(first, shape, False, first.dtype), _empty_full(second, shape, False, second.dtype)


@_fake("update_statistics_")
def _update_statistics_fake(mean, var, batches, batch_mean, batch_var, start, rows, momentum):  # type: ignore[no-untyped-def]
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
    return _handed_on(grad, ctx.dtype, *ctx.saved_tensors), *[None] * 8


def _handed_on(grad: Tensor, dtype: torch.dtype, *starts: Tensor | None) -> Tensor:
    """As it is: whoever receives it knows the scales. A draw between forward and backward raises, as the starts are
    looked at."""
    grad = grad.to(dtype)
    for start in starts:
        if start is not None:
            grad = torch.where(start[0] >= 0, grad, torch.nan)
    return grad


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


def _pair_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, start, ctx.rows = inputs
    ctx.save_for_backward(start)
    ctx.set_materialize_grads(False)


def _pair_backward(ctx: Any, adjoint: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    (start,) = ctx.saved_tensors
    wanted = [g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=False)]
    given = [g for g in wanted if g is not None]
    if not given:
        return None, None, None, None
    both = adjoint(given[0], given[-1], start, ctx.rows)  # where one is frozen, the other stands in for it
    return *(full if g is not None else None for g, full in zip(wanted, both, strict=True)), None, None


def _take_pair_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _pair_backward(ctx, torch.ops.sliceout.put_pair, grads)


def _put_pair_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _pair_backward(ctx, torch.ops.sliceout.take_pair, grads)


for _name, _backward in (("take_pair", _take_pair_backward), ("put_pair", _put_pair_backward)):
    torch.library.register_autograd(f"sliceout::{_name}", _backward, setup_context=_pair_context, lib=_library)


def _take_pair_for_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    first_stand_in, second_stand_in, _, _, start, _ = inputs
    ctx.dtypes = first_stand_in.dtype, second_stand_in.dtype
    ctx.save_for_backward(start)
    ctx.set_materialize_grads(False)


def _take_pair_for_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    both = zip(grads, ctx.dtypes, strict=True)
    return *(None if g is None else _handed_on(g, dtype, *ctx.saved_tensors) for g, dtype in both), *[None] * 4


torch.library.register_autograd(
    "sliceout::take_pair_for", _take_pair_for_backward, setup_context=_take_pair_for_context, lib=_library
)

"""``sliceout::take`` and friends: the registered ops that compiled and captured steps call, or inline (``inductor``).

==========================  ===========================================================================
``take(full) -> small``     the kept rows and columns, scaled, in the wanted dtype
``put(small) -> full``      its adjoint: zeros where nothing is kept
``store_(full!, small)``    writes the kept entries of a vector in place (batch-norm statistics)
``update_statistics_``      all that a training batch norm writes: means, variances, the count of batches
==========================  ===========================================================================

With ``parts``, ``small`` has one more dimension in front: ``take`` writes what every part of the batch uses, ``put``
adds up what comes back from all of them.

``take`` may be given a ``leaf``, a tensor of the shape of the slice: the gradient then goes to it, as it is, and not to
the parameter (``sliceout.compact.gradient_leaves``).

Starts are tensors: no op ever looks at their value on the host, except the CPU kernels, where that costs nothing. On a
GPU each op is the definition (``reference``): code that runs often has other ways (``prefetch``, ``inductor``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import inductor, reference, views
from .placement import Place, Placement, TensorSpec, dense, empty_small, is_channels_last

_library = torch.library.Library("sliceout", "DEF")
_SLICE = "Tensor? row_start, Tensor? col_start, int[] rows, int[] cols, Tensor? row_scale, Tensor? col_scale"
_library.define(f"take(Tensor full, {_SLICE}, ScalarType? dtype, Tensor? leaf=None, int parts=0) -> Tensor")
_library.define(
    f"put(Tensor small, {_SLICE}, SymInt[] shape, bool channels_last, ScalarType dtype, int parts=0) -> Tensor"
)
_library.define("store_(Tensor(a!) full, Tensor small, Tensor start, int[] rows) -> ()")
_library.define(
    "update_statistics_(Tensor(a!) mean, Tensor(b!) var, Tensor(c!)? batches, Tensor batch_mean, Tensor batch_var, "
    "Tensor start, int[] rows, float momentum) -> ()"
)


def put(small: Tensor, spec: TensorSpec, at: Placement) -> Tensor:
    """The full tensor of which ``small`` are the kept entries, normalised as they were taken."""
    if at.gain != 1 or not at.uniform or small.dtype != spec.dtype:
        small = at.scaled(small).to(spec.dtype)
    starts = (None if p is None else p.start_on(small.device) for p in at[:2])
    return torch.ops.sliceout.put(small, *starts, *at.geometries, None, None, *spec)  # type: ignore[no-any-return]


# -- what they compute -------------------------------------------------------------------------------------------------


def _placements(row_start, col_start, rows, cols, row_scale, col_scale, parts):  # type: ignore[no-untyped-def]
    """Of each part. On the CPU starts can be looked at; ``None`` for a subset, which has none."""
    if reference.is_table(row_start) or reference.is_table(col_start):
        return None
    found = []
    for i in range(max(parts, 1)):
        sides = ((row_start, rows), (col_start, cols))
        row, col = (None if s is None else Place(int(reference.start_of(s, i)[0]), g) for s, g in sides)
        found.append(Placement(row, col, 1.0, row_scale, col_scale))
    return found


def _take(full, row_start, col_start, rows, cols, row_scale, col_scale, dtype, leaf=None, parts=0):  # type: ignore[no-untyped-def]
    at = _placements(row_start, col_start, rows, cols, row_scale, col_scale, parts) if full.is_cpu else None
    if at is None:
        small = reference.take(full, row_start, col_start, rows, cols, row_scale, col_scale, dtype, parts)
        return small if parts else dense(small, is_channels_last(full))
    if parts:
        return views.TakeParts.forward(full, at, dtype or full.dtype)
    small = views.take_copy(full, at[0])  # an op must not return its input's memory
    return (small if at[0].uniform else at[0].scaled(small)).to(dtype or full.dtype)


def _put(small, row_start, col_start, rows, cols, row_scale, col_scale, shape, channels_last, dtype, parts=0):  # type: ignore[no-untyped-def]
    at = _placements(row_start, col_start, rows, cols, row_scale, col_scale, parts) if small.is_cpu else None
    if at is None:
        full = reference.put(small, row_start, col_start, rows, cols, row_scale, col_scale, dtype, parts)
        return dense(full, channels_last)
    spec = TensorSpec(tuple(shape), channels_last, dtype)
    return views.put_parts(small, spec, at) if parts else views.Put.forward(small, spec, at[0])


def _store(full: Tensor, small: Tensor, start: Tensor, rows: list[int]) -> None:
    full.copy_(reference.store(full, small, start, rows))


def _update_statistics(mean, var, batches, batch_mean, batch_var, start, rows, momentum):  # type: ignore[no-untyped-def]
    for full, batch in ((mean, batch_mean), (var, batch_var)):
        wide = torch.promote_types(full.dtype, torch.float32)
        old = reference.take(full, start, None, rows, [], None, None, wide)
        _store(full, old * (1 - momentum) + batch.to(wide) * momentum, start, rows)
    if batches is not None:
        batches.add_(1)


# -- what tracers are told ---------------------------------------------------------------------------------------------


def _take_fake(full, row_start, col_start, rows, cols, row_scale, col_scale, dtype, leaf=None, parts=0):  # type: ignore[no-untyped-def]
    return empty_small(full, rows, cols, dtype, parts)


def _put_fake(small, row_start, col_start, rows, cols, row_scale, col_scale, shape, channels_last, dtype, parts=0):  # type: ignore[no-untyped-def]
    return TensorSpec(shape, channels_last, dtype).empty(small.device)


def _register(name: str, kernel: Callable[..., Any], fake: Callable[..., Any] = lambda *args: None) -> None:
    """Say what an op computes, and what it makes of fake tensors. Inductor asks for that, and is told the rest then."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        inductor.register_lowerings()
        return fake(*args, **kwargs)

    for device in ("CPU", "CUDA"):
        _library.impl(name, kernel, device)
    torch.library.register_fake(f"sliceout::{name}", traced, lib=_library)


_register("take", _take, _take_fake)
_register("put", _put, _put_fake)
_register("store_", _store)
_register("update_statistics_", _update_statistics)


# -- gradients ---------------------------------------------------------------------------------------------------------


def _take_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    full, row_start, col_start, ctx.rows, ctx.cols, row_scale, col_scale, _, leaf, ctx.parts = inputs
    ctx.shape, ctx.channels_last, ctx.dtype = full.shape, is_channels_last(full), full.dtype
    ctx.leaf = None if leaf is None else leaf.dtype
    # Saved, not kept: a draw between forward and backward then raises instead of misplacing the gradient.
    ctx.save_for_backward(row_start, col_start, row_scale, col_scale)


def _take_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    row_start, col_start, row_scale, col_scale = ctx.saved_tensors
    if ctx.leaf is not None:  # as it is: whoever receives it knows the scales
        grad = grad.to(ctx.leaf)
        for start in (row_start, col_start):
            if start is not None:  # it is looked at, so that a draw in between raises here as well
                grad = torch.where(start[0] >= 0, grad, torch.nan)
        return *[None] * 8, grad, None
    starts, scales = (row_start, col_start), (row_scale, col_scale)
    form = ctx.shape, ctx.channels_last, ctx.dtype
    return torch.ops.sliceout.put(grad, *starts, ctx.rows, ctx.cols, *scales, *form, ctx.parts), *[None] * 9


def _put_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    small, row_start, col_start, ctx.rows, ctx.cols, row_scale, col_scale, *_, ctx.parts = inputs
    ctx.dtype = small.dtype
    ctx.save_for_backward(row_start, col_start, row_scale, col_scale)


def _put_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    row_start, col_start, row_scale, col_scale = ctx.saved_tensors
    starts, scales = (row_start, col_start), (row_scale, col_scale)
    small = torch.ops.sliceout.take(grad, *starts, ctx.rows, ctx.cols, *scales, ctx.dtype, None, ctx.parts)
    return small, *[None] * 10


torch.library.register_autograd("sliceout::take", _take_backward, setup_context=_take_context, lib=_library)
torch.library.register_autograd("sliceout::put", _put_backward, setup_context=_put_context, lib=_library)

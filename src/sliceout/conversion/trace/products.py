"""Ops that multiply: linear layers, convolutions, attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..reasons import Skip
from .atoms import POSITION, Dim, block, expand, identify, new_dims, size, split_front
from .tracer import Tracer, rule


def _contract(t: Tracer, x: Tensor, y: Tensor, xd: Dim, yd: Dim) -> None:
    """Two dimensions are multiplied and summed over."""
    identify(xd, yd)
    t.trace.direct.update(t.names[id(p)] for p in (x, y) if id(p) in t.names)
    if id(x) not in t.parameters and id(y) not in t.parameters:
        for atom in expand(xd):
            atom.contracted.append(t.here)


def _plus_bias(t: Tracer, bias: Tensor | None, dims: list[Dim]) -> list[Dim]:
    """The dimensions of a product, with those of what is added to it."""
    if bias is not None:
        for dim, own, n in zip(dims[::-1], t.dims(bias)[::-1], bias.shape[::-1], strict=False):
            if n > 1:
                identify(dim, own)
    return dims


@rule("mm", "addmm")
def matrix_product(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    x, y = a.get("mat1", a["self"]), a["mat2"]
    _contract(t, x, y, t.dims(x)[1], t.dims(y)[0])
    return _plus_bias(t, a["self"] if "mat1" in a else None, [t.dims(x)[0], t.dims(y)[1]])


@rule("bmm", "baddbmm")
def batched_product(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    x, y = a.get("batch1", a["self"]), a["batch2" if "batch2" in a else "mat2"]
    xd, yd = t.dims(x), t.dims(y)
    identify(xd[0], yd[0])
    _mark_batched(t, xd[:1])
    _contract(t, x, y, xd[2], yd[1])
    return _plus_bias(t, a["self"] if "batch1" in a else None, [xd[0], xd[1], yd[2]])


def _mark_batched(t: Tracer, dims: list[Dim]) -> None:
    for dim in dims:
        for atom in expand(dim):
            atom.batched.append(t.here)


@rule("convolution", "_convolution", "convolution_overrideable")
def convolution(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    x, w, bias, groups = a["input"], a["weight"], a["bias"], a["groups"]
    xd, wd = t.dims(x), t.dims(w)
    if id(w) in t.names:
        t.trace.direct.add(t.names[id(w)])
    x_group, x_rest = split_front(xd[1], groups)
    w_group, rows = split_front(wd[0], groups)
    if x_group is None or w_group is None:
        block([xd[1], *wd], t.because(Skip.CHANNEL_GROUPS, f"groups={groups} cut through a reshape"))
        return None
    read, written = (rows, wd[1]) if a["transposed"] else (wd[1], rows)
    identify(x_group, w_group)
    identify(x_rest, read)
    channels = [*w_group, *written]
    if bias is not None:
        identify(t.dims(bias)[0], channels)
    return [xd[0], channels, *new_dims(outputs[0].shape[2:], POSITION)]


@rule("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
      "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention")  # fmt: skip
def attention(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    q, k, v = (t.dims(a[n]) for n in ("query", "key", "value"))
    for other in (k, v):
        for d in range(len(q) - 2):
            n = size(other[d])  # grouped queries: each head of keys and values serves a run of query heads
            heads, _ = split_front(q[d], n) if size(q[d]) % n == 0 else (None, [])
            if heads is None:
                block([q[d], other[d]], t.because(Skip.RESHAPED, "query heads do not divide among key heads"))
            else:
                identify(heads, other[d])
    _mark_batched(t, q[:-2])
    scale = a.get("scale")
    t.trace.scalars.setdefault(t.here, set()).add(a["query"].shape[-1] ** -0.5 if scale is None else scale)
    _contract(t, a["query"], a["key"], q[-1], k[-1])
    identify(k[-2], v[-2])
    block([q[-2], k[-2]], POSITION)
    for y in outputs[1:]:
        t.make_dims(y, Skip.MIXED("attention statistics"))
    return [*q[:-1], v[-1]]

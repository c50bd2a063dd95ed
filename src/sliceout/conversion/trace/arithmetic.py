"""Ops that compute: pointwise, norms, reductions and pooling; and products: linear layers, convolutions, attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..reasons import Skip
from .atoms import POSITION, Atom, Dim, block, expand, identify, new_dim, new_dims, size, split_front
from .tracer import Tracer, rule

Meet = Callable[[Dim, Dim], None]


def broadcast(t: Tracer, inputs: Sequence[Tensor], y: Tensor, meet: Meet = identify) -> list[Dim]:
    """The dimensions of a pointwise result; ``meet`` is called with dimensions of two inputs that coincide in it."""
    dims: list[Dim] = [[] for _ in y.shape]
    for x in inputs:
        for i, dim in enumerate(t.dims(x)):
            j = y.dim() - x.dim() + i
            if x.shape[i] == 1:
                continue
            if dims[j]:
                meet(dims[j], dim)
            else:
                dims[j] = dim
    return dims


@rule("pointwise", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu", "gelu", "mish", "celu", "softplus",
      "threshold", "log_sigmoid_forward", "softshrink", "hardshrink", "where", "masked_fill", "bernoulli", "copysign",
      "_prelu_kernel", "copy", "rrelu_with_noise", "fill", "zero", "normal", "uniform", "random",
      "exponential")  # fmt: skip
def pointwise(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    return broadcast(t, inputs, outputs[0])


@rule("add", "sub")
def add(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    """Between two branches an add may be a residual connection: noted now, judged when all producers are known."""
    x, y = a["self"], a["other"]
    if len(inputs) < 2 or x is y or any(id(p) in t.parameters for p in inputs):  # a bias is no branch
        return pointwise(t, a, inputs, outputs)
    one, other = t.weights_behind.get(id(x), 0), t.weights_behind.get(id(y), 0)
    nested = one & other in (one, other)  # all that made one branch went into the other too
    larger_first = (x, y) if x.dim() >= y.dim() else (y, x)
    return broadcast(t, larger_first, outputs[0], lambda one, other: t.trace.adds.append((one, other, nested)))


@rule("clone", "detach", "alias", "_to_copy", "lift_fresh", "lift_fresh_copy", "native_dropout", "zeros_like",
      "ones_like", "empty_like", "rand_like", "randn_like", "full_like", "new_zeros")  # fmt: skip
def same(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    return t.dims(inputs[0]) if outputs[0].shape == inputs[0].shape else None


@rule("_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "native_batch_norm", "cudnn_batch_norm",
      "_batch_norm_with_update", "_batch_norm_no_update", "miopen_batch_norm")  # fmt: skip
def batch_norm(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    x = inputs[0]
    channel = t.dims(x)[1]
    t.mix(x, [d for d in range(x.dim()) if d != 1])
    for p in inputs[1:]:
        if p.dim() == 1 and p.shape[0] == x.shape[1]:
            identify(channel, t.dims(p)[0])
    for y in outputs[1:]:
        if y.shape == (x.shape[1],):
            t.set_dims(y, [channel])
    return t.dims(x)


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    x = inputs[0]
    for p in inputs[1:]:
        for i in range(p.dim()):
            identify(t.dims(x)[x.dim() - p.dim() + i], t.dims(p)[i])
    if len(inputs) == 1 or len(a["normalized_shape"]) > 1:
        why = t.because(Skip.NO_SLICED_FORM, "a layer norm without weights or over several dimensions")
        block(t.dims(x)[-len(a["normalized_shape"]) :], why)
    return t.dims(x)


@rule("native_group_norm")
def group_norm(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    x, groups = a["input"], a["group"]
    channel = t.dims(x)[1]
    for p in (a["weight"], a["bias"]):
        if p is not None:
            identify(channel, t.dims(p)[0])
    head, _ = split_front(channel, groups) if groups > 1 else ([], [])
    if head is None or a["weight"] is None:
        block([channel], t.because(Skip.NO_SLICED_FORM, "a group norm that does not fit the units, or has no weights"))
    return t.dims(x)


def _named(dim: Any, n: int) -> list[int]:
    """Which of ``n`` dimensions an argument names; all of them if it names none."""
    return [d % max(n, 1) for d in ([dim] if isinstance(dim, int) else dim or range(n))]


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax", "cumsum", "logcumsumexp", "sort", "flip",
      "cumprod", "glu", "roll", "rot90")  # fmt: skip
def along(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    """Ops that mix a dimension with itself and leave the others alone."""
    over = _named(a.get("dims", a.get("dim", -1)), inputs[0].dim())
    mixed = t.because(Skip.MIXED, "a softmax, roll or running sum over the units")
    return t.without(inputs[0], over, outputs[0], mixed, new=Skip.MIXED("mixed"))


@rule("mean", "sum", "amax", "amin", "max", "min", "any", "all", "prod", "var", "std", "var_mean", "argmax", "argmin",
      "linalg_vector_norm", "norm", "std_mean", "logsumexp", "topk", "count_nonzero", "median", "aminmax")  # fmt: skip
def reduce(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    x, y = inputs[0], outputs[0]
    if len(inputs) > 1:  # max(x, y) and the like
        return pointwise(t, a, inputs, outputs)
    dims, over = t.dims(x), _named(a.get("dim"), x.dim())
    block([dims[d] for d in over if dims], t.because(Skip.MIXED, "a reduction over the units"))
    t.mix(x, over if dims else [])
    if y.dim() < x.dim():
        return [d for i, d in enumerate(dims) if i not in over]
    return [dims[i] if n == x.shape[i] else new_dim(n, Skip.MIXED("reduced")) for i, n in enumerate(y.shape)]


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "avg_pool1d", "avg_pool2d",
      "avg_pool3d", "adaptive_avg_pool1d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_nearest1d",
      "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d",
      "upsample_trilinear3d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
      "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")  # fmt: skip
def spatial(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    return [*t.dims(inputs[0])[:2], *new_dims(outputs[0].shape[2:], POSITION)]


@rule("take")
def take(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    """``sliceout::take`` in the copy that is being tried: its parts are new units, noted by the parameter's name."""
    full, small = a["full"], outputs[0]
    dims = new_dims(small.shape)
    for d, geometry in enumerate((a["rows"], a["cols"])):
        if geometry:
            _, width, blocks, inner = geometry
            at = d + (a["parts"] > 0)  # the parts of the batch lie in front
            dims[at] = [Atom(n) for n in (blocks, width, inner) if n > 1]
            if id(full) in t.names:
                key = t.names[id(full)], d, t.offsets.get(id(full), 0)
                identify(t.trace.takes.setdefault(key, dims[at]), dims[at])  # a layer may be called more than once
    t.parameters.add(id(small))
    t.same_parameter(full, small)
    return dims


@rule("store")
def store(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    """Writes statistics; nothing comes out."""
    return None


# -- products ----------------------------------------------------------------------------------------------------------


def _contract(t: Tracer, x: Tensor, y: Tensor, over: tuple[int, int], batched: int = 0) -> None:
    """Two dimensions, one of each, are multiplied and summed over; the first ``batched`` ones stay apart."""
    xd, yd = t.dims(x)[over[0]], t.dims(y)[over[1]]
    identify(xd, yd)
    t.trace.direct.update(t.names[id(p)] for p in (x, y) if id(p) in t.names)
    if id(x) in t.parameters or id(y) in t.parameters:
        t.mix(x, over[:1])
        t.mix(y, over[1:])
        return
    for z in (x, y):
        t.mix(z, range(batched, z.dim()))
        if batched:
            t.trace.attends += t.dims(z)[batched:]
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
    _contract(t, x, y, (1, 0))
    return _plus_bias(t, a["self"] if "mat1" in a else None, [t.dims(x)[0], t.dims(y)[1]])


@rule("bmm", "baddbmm")
def batched_product(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    x, y = a.get("batch1", a["self"]), a["batch2" if "batch2" in a else "mat2"]
    xd, yd = t.dims(x), t.dims(y)
    identify(xd[0], yd[0])
    _mark_batched(t, xd[:1])
    _contract(t, x, y, (2, 1), batched=1)
    return _plus_bias(t, a["self"] if "batch1" in a else None, [xd[0], xd[1], yd[2]])


def _mark_batched(t: Tracer, dims: list[Dim]) -> None:
    for dim in dims:
        for atom in expand(dim):
            atom.batched.append(t.here)


@rule("convolution", "_convolution", "convolution_overrideable")
def convolution(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    x, w, bias, groups = a["input"], a["weight"], a["bias"], a["groups"]
    xd, wd = t.dims(x), t.dims(w)
    t.mix(x, range(1, x.dim()))
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
    _contract(t, a["query"], a["key"], (-1, -1), batched=len(q) - 2)
    t.mix(a["value"], [len(v) - 2])
    identify(k[-2], v[-2])
    block([q[-2], k[-2]], POSITION)
    for y in outputs[1:]:
        t.make_dims(y, Skip.MIXED("attention statistics"))
    return [*q[:-1], v[-1]]

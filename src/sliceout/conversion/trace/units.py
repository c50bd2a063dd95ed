"""Ops that treat every unit by itself, or mix all of them: pointwise, norms, reductions, pooling."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .atoms import Atom, Dim, block, expand, head_of, identify, size
from .tracer import Tracer, rule


def broadcast(t: Tracer, inputs: list[Tensor], y: Tensor) -> list[Dim]:
    """The dimensions of a pointwise result, its inputs identified."""
    dims: list[Dim] = [[] for _ in y.shape]
    for x in inputs:
        for i, dim in enumerate(t.of(x)):
            j = y.dim() - x.dim() + i
            if x.shape[i] == 1:
                continue
            if dims[j]:
                identify(dims[j], dim)
            else:
                dims[j] = dim
    return dims


@rule("pointwise", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu", "gelu", "silu", "mish", "relu6", "celu",
      "selu", "softplus", "threshold", "log_sigmoid_forward", "softshrink", "hardshrink", "where", "masked_fill",
      "lerp", "addcmul", "addcdiv", "clamp_min", "clamp_max", "bernoulli", "copysign", "prelu", "_prelu_kernel", "copy",
      "rrelu_with_noise", "fill", "zero", "normal", "uniform", "random", "exponential")  # fmt: skip
def pointwise(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    for y in outputs:
        dims = broadcast(t, inputs, y)
        if id(y) not in t.dims:
            t.set(y, dims)


@rule("add", "sub")
def add(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Between two branches an add may be a residual connection: noted now, judged when all producers are known."""
    x, y = a["self"], a["other"]
    if len(inputs) < 2 or x is y or any(id(p) in t.parameters for p in inputs):  # a bias is no branch
        return pointwise(t, a, inputs, outputs)
    out = outputs[0]
    one, other = t.behind.get(id(x), 0), t.behind.get(id(y), 0)
    nested = one & other in (one, other)  # all that made one branch went into the other too
    dims: list[Dim] = [[] for _ in out.shape]
    for operand in (x, y) if x.dim() >= y.dim() else (y, x):
        for i, dim in enumerate(t.of(operand)):
            j = out.dim() - operand.dim() + i
            if operand.shape[i] == 1:
                continue
            if dims[j]:
                t.trace.adds.append((dims[j], dim, nested))
            else:
                dims[j] = dim
    if id(out) not in t.dims:
        t.set(out, dims)


@rule("clone", "detach", "alias", "_to_copy", "contiguous", "lift_fresh", "lift_fresh_copy", "native_dropout", "to",
      "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like", "new_zeros",
      "bernoulli_p")  # fmt: skip
def same(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    for y in outputs:
        if y.shape == inputs[0].shape and id(y) not in t.dims:
            t.set(y, list(t.of(inputs[0])))


@rule("_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "native_batch_norm", "cudnn_batch_norm",
      "_batch_norm_with_update", "_batch_norm_no_update", "miopen_batch_norm", "_batch_norm_impl_index")  # fmt: skip
def batch_norm(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x = inputs[0]
    channel = t.of(x)[1]
    for p in inputs[1:]:
        if p.dim() == 1 and p.shape[0] == x.shape[1]:
            identify(channel, t.of(p)[0])
    t.set(outputs[0], list(t.of(x)))
    for y in outputs[1:]:
        t.set(y, [channel]) if y.shape == (x.shape[1],) else t.new(y)


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x = inputs[0]
    for p in inputs[1:]:
        for i in range(p.dim()):
            identify(t.of(x)[x.dim() - p.dim() + i], t.of(p)[i])
    if len(inputs) == 1 or len(a["normalized_shape"]) > 1:
        block(t.of(x)[-len(a["normalized_shape"]) :], t.at("a layer norm without weights or over several dimensions"))
    t.set(outputs[0], list(t.of(x)))
    for y in outputs[1:]:
        t.new(y)


@rule("native_group_norm")
def group_norm(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, groups = a["input"], a["group"]
    channel = t.of(x)[1]
    for p in (a["weight"], a["bias"]):
        if p is not None:
            identify(channel, t.of(p)[0])
    head, _ = head_of(channel, groups) if groups > 1 else ([], [])
    if head is None or a["weight"] is None:
        block([channel], t.at("a group norm that does not fit the units, or has no weights"))
    t.set(outputs[0], list(t.of(x)))
    for y in outputs[1:]:
        t.new(y)


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax", "cumsum", "logcumsumexp", "sort", "flip",
      "cumprod", "glu", "roll", "rot90")  # fmt: skip
def along(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Ops that mix a dimension with itself and leave the others alone."""
    x = inputs[0]
    named = a.get("dims", a.get("dim", -1))
    over = [d % x.dim() for d in ([named] if isinstance(named, int) else named or range(x.dim()))]
    dims = t.of(x)
    block([dims[d] for d in over], t.at("a softmax, roll or running sum over the units"))
    for y in outputs:
        same_shape = y.dim() == x.dim()
        t.set(y, [d if i not in over else [Atom(n, "mixed")] if n > 1 else [] for i, (d, n) in enumerate(zip(dims, y.shape, strict=True))]) if same_shape else t.new(y, "mixed")  # fmt: skip # noqa: E501


@rule("mean", "sum", "amax", "amin", "max", "min", "any", "all", "prod", "var", "std", "var_mean", "argmax", "argmin",
      "linalg_vector_norm", "norm", "std_mean", "logsumexp", "topk", "count_nonzero", "median", "aminmax")  # fmt: skip
def reduce(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x = inputs[0]
    if len(inputs) > 1:  # max(x, y) and the like
        return pointwise(t, a, inputs, outputs)
    named = a.get("dim")
    over = [d % max(x.dim(), 1) for d in ([named] if isinstance(named, int) else named or range(x.dim()))]
    dims = t.of(x)
    block([dims[d] for d in over if dims], t.at("a reduction over the units"))
    for y in outputs:
        if y.dim() == x.dim():
            kept = [[] if i in over and y.shape[i] == 1 else d for i, d in enumerate(dims)]
            t.set(y, [k if size(expand(k)) == n else [Atom(n, "reduced")] for k, n in zip(kept, y.shape, strict=True)])
        else:
            t.set(y, [d for i, d in enumerate(dims) if i not in over])


@rule(
    "max_pool1d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "adaptive_max_pool2d",
    "adaptive_avg_pool1d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_linear1d",
    "upsample_trilinear3d",
    "reflection_pad1d",
    "reflection_pad2d",
    "replication_pad1d",
    "replication_pad2d",
    "max_pool2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "_upsample_nearest_exact2d",
)
def spatial(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:  # fmt: skip
    x = inputs[0]
    for y in outputs:
        fresh: list[Dim] = [[Atom(n, "a position, not a unit")] if n > 1 else [] for n in y.shape[2:]]
        t.set(y, [*t.of(x)[:2], *fresh])


@rule("take")
def take(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """``sliceout::take`` in the copy that is being tried: its parts are new units, noted by the parameter's name."""
    full, small = a["full"], outputs[0]
    dims: list[Dim] = [[Atom(n)] if n > 1 else [] for n in small.shape]
    for d, geometry in enumerate((a["rows"], a["cols"])):
        if geometry:
            _, width, blocks, inner = geometry
            dims[d] = [Atom(n) for n in (blocks, width, inner) if n > 1]
            if id(full) in t.names:
                key = t.names[id(full)], d, t.offsets.get(id(full), 0)
                identify(t.trace.takes.setdefault(key, dims[d]), dims[d])  # a layer may be called more than once
    t.parameters.add(id(small))
    t.still(full, small)
    t.set(small, dims)


@rule("store_", "store")
def store(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Writes statistics; nothing comes out."""

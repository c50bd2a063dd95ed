"""Ops that rearrange units: views, concatenation, splitting, indexing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..reasons import Skip
from .atoms import Atom, Dim, block, expand, identify, new_dim, size, split_front
from .tracer import Tracer, rule, unknown


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy")
def view(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    y = outputs[0]
    if t.is_known(y):
        return
    rest = [atom for dim in t.dims(inputs[0]) for atom in dim]
    dims: list[Dim] = []
    for n in y.shape:
        dim, rest = split_front(rest, n)
        if dim is None:
            mixed = t.because(Skip.RESHAPED, "a reshape mixes these units with another dimension")
            block(t.dims(inputs[0]), mixed)
            t.make_dims(y, Skip.RESHAPED("comes out of a reshape that mixes units"))
            return
        dims.append(dim)
    t.set_dims(y, dims)


@rule("permute", "transpose", "t", "numpy_T")
def permute(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    dims = list(t.dims(inputs[0]))
    if "dim0" in a:
        i, j = a["dim0"], a["dim1"]
        dims[i], dims[j] = dims[j], dims[i]
    else:
        dims = [dims[d] for d in a["dims"]] if "dims" in a else dims[::-1]
    t.set_dims(outputs[0], dims)
    t.same_parameter(inputs[0], outputs[0])


@rule("unsqueeze")
def unsqueeze(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    dims = list(t.dims(inputs[0]))
    at = a["dim"] % (len(dims) + 1)
    t.set_dims(outputs[0], [*dims[:at], [], *dims[at:]])


@rule("squeeze")
def squeeze(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x = inputs[0]
    named = a.get("dim")
    drop = range(x.dim()) if named is None else [d % x.dim() for d in ([named] if isinstance(named, int) else named)]
    t.set_dims(outputs[0], [dim for i, dim in enumerate(t.dims(x)) if not (i in drop and x.shape[i] == 1)])


@rule("expand", "repeat", "tile")
def expand_rule(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, y = inputs[0], outputs[0]
    dims = [new_dim(n) for n in y.shape]
    for i, dim in enumerate(t.dims(x)):
        j = y.dim() - x.dim() + i
        if x.shape[i] == y.shape[j]:
            dims[j] = dim
        elif x.shape[i] > 1:  # repeat lays copies one after the other
            dims[j] = [Atom(y.shape[j] // x.shape[i]), *dim]
    t.set_dims(y, dims)


def _cat_parts(t: Tracer, parts: list[Tensor], y: Tensor, at: int) -> bool:
    """Parts of a fused parameter put together again: equal sections of one product, if their sizes allow."""
    unit = min((t.dims(x)[at] for x in parts), key=lambda d: size(expand(d)))
    if any(size(expand(t.dims(x)[at])) % size(expand(unit)) for x in parts):
        return False
    for x in parts:
        section = t.dims(x)[at]
        head, rest = split_front(section, size(expand(section)) // size(expand(unit)))
        if head is None:
            return False
        identify(rest, unit)
        for i in range(y.dim()):
            if i != at:
                identify(t.dims(x)[i], t.dims(parts[0])[i])
    dims = list(t.dims(parts[0]))
    dims[at] = [Atom(y.shape[at] // size(expand(unit))), *unit]
    t.set_dims(y, dims)
    return True


@rule("cat", "concat")
def cat(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    y, at = outputs[0], a["dim"] % outputs[0].dim()
    parts = [x for x in inputs if x.dim() == y.dim()]
    dims = list(t.dims(parts[0]))
    if all(id(x) in t.parameters for x in parts) and _cat_parts(t, parts, y, at):
        return
    concatenated = t.because(Skip.CONCATENATED, "concatenated with other units")
    for x in parts:
        block([t.dims(x)[at]], concatenated)
        for i in range(y.dim()):
            if i != at:
                identify(dims[i], t.dims(x)[i])
    dims[at] = new_dim(y.shape[at], concatenated)
    t.set_dims(y, dims)


@rule("stack")
def stack(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    y = outputs[0]
    dims = t.dims(inputs[0])
    for x in inputs[1:]:
        for one, other in zip(dims, t.dims(x), strict=True):
            identify(one, other)
    at = a["dim"] % y.dim()
    t.set_dims(y, [*dims[:at], new_dim(y.shape[at]), *dims[at:]])


@rule("split", "chunk", "split_with_sizes", "unsafe_split", "unsafe_chunk")
def split(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Equal parts are one factor of the dimension, as gate and up in a fused projection."""
    x, at = inputs[0], a["dim"] % inputs[0].dim()
    dims = t.dims(x)
    if len({y.shape[at] for y in outputs}) == 1 and len(outputs) > 1:
        head, rest = split_front(dims[at], len(outputs))
        if head is not None:
            block([head], t.because(Skip.SPLIT, "split into parts"))
            for y in outputs:
                t.set_dims(y, [*dims[:at], rest, *dims[at + 1 :]])
            return
    unequal = t.because(Skip.SPLIT, "split into unequal parts")
    if len(outputs) > 1:
        block([dims[at]], unequal)
    for y in outputs:
        own = new_dim(y.shape[at], unequal)
        t.set_dims(y, [*dims[:at], dims[at] if len(outputs) == 1 else own, *dims[at + 1 :]])


@rule("select", "unbind")
def select(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, at = inputs[0], a["dim"] % inputs[0].dim()
    dims = t.dims(x)
    block([dims[at]], t.because(Skip.INDEXED, "single units are picked out"))
    for y in outputs:
        t.set_dims(y, [*dims[:at], *dims[at + 1 :]])


@rule("slice", "narrow", "index_select", "gather", "scatter", "scatter_add", "slice_scatter", "unfold", "index_fill")
def partial(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Part of a dimension is used by position; the other dimensions pass."""
    x, y = inputs[0], outputs[0]
    dims = list(t.dims(x))
    at = a.get("dim", a.get("dimension", 0)) % x.dim()
    if y.dim() != x.dim():
        return unknown(t, "unfold", inputs, outputs)
    if t.is_known(y):
        return
    if id(x) in t.names and len(inputs) == 1:  # a part of a fused parameter, about to be taken
        t.offsets[id(y)] = a.get("start") or 0
        t.same_parameter(x, y)
    if y.shape[at] != x.shape[at] or len(inputs) > 1:
        indexed = t.because(Skip.INDEXED, "used by position (indexing)")
        block([dims[at]], indexed)
        dims[at] = new_dim(y.shape[at], indexed)
    for i, n in enumerate(y.shape):
        if i != at and n != x.shape[i]:
            return unknown(t, "indexing", inputs, outputs)
    t.set_dims(y, dims)


@rule("index", "_unsafe_index")
def index(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, y = a["self"], outputs[0]
    used = [i for i, ix in enumerate(a["indices"]) if ix is not None]
    dims = t.dims(x)
    block([dims[i] for i in used], t.because(Skip.INDEXED, "used by position (indexing)"))
    if used and used == list(range(used[0], used[-1] + 1)):
        after = x.dim() - used[-1] - 1
        middle = y.dim() - used[0] - after
        fresh = [new_dim(n, Skip.INDEXED("indexed")) for n in y.shape[used[0] : used[0] + middle]]
        t.set_dims(y, [*dims[: used[0]], *fresh, *dims[used[-1] + 1 :]])
    else:
        unknown(t, "index", inputs, outputs)


@rule("embedding")
def embedding(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    w, ids = a["weight"], a["indices"]
    block([t.dims(w)[0]], Skip.INDEXED("rows of an embedding"))
    t.set_dims(outputs[0], [*t.dims(ids), t.dims(w)[1]])


@rule("constant_pad_nd", "pad")
def pad(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, y = inputs[0], outputs[0]
    dims = list(t.dims(x))
    padded = t.because(Skip.PADDED, "padded")
    for i, n in enumerate(y.shape):
        if n != x.shape[i]:
            block([dims[i]], padded)
            dims[i] = new_dim(n, padded)
    t.set_dims(y, dims)

"""Ops that rearrange units: views, concatenation, splitting, indexing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..reasons import Skip
from .atoms import Atom, Dim, block, identify, new_dim, new_dims, size, split_front
from .tracer import Tracer, rule, unknown


@rule("view", "_unsafe_view", "_reshape_alias", "_reshape_copy")
def view(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    y = outputs[0]
    rest = [atom for dim in t.dims(inputs[0]) for atom in dim]
    dims: list[Dim] = []
    for n in y.shape:
        dim, rest = split_front(rest, n)
        if dim is None:
            mixed = t.because(Skip.RESHAPED, "a reshape mixes these units with another dimension")
            block(t.dims(inputs[0]), mixed)
            new = new_dims(y.shape[len(dims) :], Skip.RESHAPED("comes out of a reshape that mixes units"))
            return [*dims, *new]  # those in front are known, such as the batch
        dims.append(dim)
    return dims


@rule("permute", "transpose", "t")
def permute(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    dims = list(t.dims(inputs[0]))
    if "dim0" in a:
        i, j = a["dim0"], a["dim1"]
        dims[i], dims[j] = dims[j], dims[i]
    else:
        dims = [dims[d] for d in a["dims"]] if "dims" in a else dims[::-1]
    t.same_parameter(inputs[0], outputs[0])
    return dims


@rule("squeeze", "unsqueeze")
def squeeze(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    """Dimensions of size 1, which hold no units, come and go."""
    rest = (dim for dim in t.dims(inputs[0]) if size(dim) > 1)
    return [next(rest) if n > 1 else [] for n in outputs[0].shape]


@rule("expand", "repeat")
def expand_rule(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    x, y = inputs[0], outputs[0]
    dims = new_dims(y.shape)
    for i, dim in enumerate(t.dims(x)):
        j = y.dim() - x.dim() + i
        if x.shape[i] == y.shape[j]:
            dims[j] = dim
        elif x.shape[i] > 1:  # repeat lays copies one after the other
            dims[j] = [Atom(y.shape[j] // x.shape[i]), *dim]
    return dims


def _fused(sections: list[Dim], n: int) -> Dim | None:
    """Parts of a fused parameter put together again: equal sections of one product, if their sizes allow."""
    unit = min(sections, key=size)
    if any(size(section) % size(unit) for section in sections):
        return None
    for section in sections:
        head, rest = split_front(section, size(section) // size(unit))
        if head is None:
            return None
        identify(rest, unit)
    return [Atom(n // size(unit)), *unit]


@rule("cat")
def cat(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    y, at = outputs[0], a["dim"] % outputs[0].dim()
    parts = [x for x in inputs if x.dim() == y.dim()]
    dims, sections = list(t.dims(parts[0])), [t.dims(x)[at] for x in parts]
    for x in parts:
        for i in range(y.dim()):
            if i != at:
                identify(dims[i], t.dims(x)[i])
        t.mix(x, [at])
    together = _fused(sections, y.shape[at]) if all(id(x) in t.parameters for x in parts) else None
    if together is None:
        concatenated = t.because(Skip.CONCATENATED, "concatenated with other units")
        block(sections, concatenated)
        together = new_dim(y.shape[at], concatenated)
    dims[at] = together
    return dims


@rule("stack")
def stack(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    y = outputs[0]
    dims = t.dims(inputs[0])
    for x in inputs[1:]:
        for one, other in zip(dims, t.dims(x), strict=True):
            identify(one, other)
    at = a["dim"] % y.dim()
    return [*dims[:at], new_dim(y.shape[at]), *dims[at:]]


@rule("split", "split_with_sizes", "unsafe_split")
def split(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    """Equal parts are one factor of the dimension, as gate and up in a fused projection."""
    x, at = inputs[0], a["dim"] % inputs[0].dim()
    dims = t.dims(x)
    if len(outputs) == 1:
        return dims
    t.mix(x, [at])
    if len({y.shape[at] for y in outputs}) == 1:
        head, rest = split_front(dims[at], len(outputs))
        if head is not None:
            block([head], t.because(Skip.SPLIT, "split into parts"))
            return [*dims[:at], rest, *dims[at + 1 :]]
    unequal = t.because(Skip.SPLIT, "split into unequal parts")
    block([dims[at]], unequal)
    for y in outputs:
        t.set_dims(y, [*dims[:at], new_dim(y.shape[at], unequal), *dims[at + 1 :]])
    return None


@rule("select", "unbind")
def select(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    x, at = inputs[0], a["dim"] % inputs[0].dim()
    dims = t.dims(x)
    block([dims[at]], t.because(Skip.INDEXED, "single units are picked out"))
    t.mix(x, [at])
    return [*dims[:at], *dims[at + 1 :]]


@rule("slice", "index_select", "gather", "scatter", "scatter_add", "slice_scatter", "unfold", "index_fill")
def partial(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    """Part of a dimension is used by position; the other dimensions pass."""
    x, y = inputs[0], outputs[0]
    at = a.get("dim", a.get("dimension", 0)) % x.dim()
    if y.dim() != x.dim():
        return unknown(t, "unfold", inputs, outputs)
    if id(x) in t.names and len(inputs) == 1:  # a part of a fused parameter, about to be taken
        t.offsets[id(y)] = a.get("start") or 0
        t.same_parameter(x, y)
    indexed = [at] if y.shape[at] != x.shape[at] or len(inputs) > 1 else []
    dims = t.without(x, indexed, y, t.because(Skip.INDEXED, "used by position (indexing)"))
    if any(i != at and n != x.shape[i] for i, n in enumerate(y.shape)):
        return unknown(t, "indexing", inputs, outputs)
    return dims


@rule("index", "_unsafe_index")
def index(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    x, y = a["self"], outputs[0]
    used = [i for i, ix in enumerate(a["indices"]) if ix is not None]
    dims = t.dims(x)
    block([dims[i] for i in used], t.because(Skip.INDEXED, "used by position (indexing)"))
    t.mix(x, used)
    if not used or used != list(range(used[0], used[-1] + 1)):
        return unknown(t, "index", inputs, outputs)
    before, behind = dims[: used[0]], dims[used[-1] + 1 :]
    return [*before, *new_dims(y.shape[len(before) : y.dim() - len(behind)], Skip.INDEXED("indexed")), *behind]


@rule("embedding")
def embedding(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    w, ids = a["weight"], a["indices"]
    block([t.dims(w)[0]], Skip.INDEXED("rows of an embedding"))
    return [*t.dims(ids), t.dims(w)[1]]


@rule("constant_pad_nd")
def pad(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    x, y = inputs[0], outputs[0]
    changed = [i for i, n in enumerate(y.shape) if n != x.shape[i]]
    return t.without(x, changed, y, t.because(Skip.PADDED, "padded"))

"""Ops that rearrange units: views, concatenation, splitting, indexing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .atoms import Atom, Dim, block, expand, head_of, identify, size
from .tracer import Tracer, rule, unknown


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy")
def view(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    y = outputs[0]
    if id(y) in t.dims:
        return
    rest = expand([atom for dim in t.of(inputs[0]) for atom in dim])
    dims: list[Dim] = []
    for n in y.shape:
        dim: Dim = []
        while size(dim) < n:
            need = n // size(dim)
            atom = rest[0]
            if need % atom.size == 0:
                dim.append(atom)
                rest = rest[1:]
            elif atom.size % need == 0:
                atom.split(need)
                rest = expand(rest)
            else:
                block([*dims, dim, rest], t.at("a reshape mixes these units with another dimension"))
                t.new(y, "comes out of a reshape that mixes units")
                return
        dims.append(dim)
    t.set(y, dims)


@rule("permute")
def permute(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    dims = t.of(inputs[0])
    t.set(outputs[0], [dims[d] for d in a["dims"]])
    t.still(inputs[0], outputs[0])


@rule("t", "numpy_T")
def transpose_matrix(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    t.set(outputs[0], list(t.of(inputs[0]))[::-1])
    t.still(inputs[0], outputs[0])


@rule("transpose")
def transpose(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    dims = list(t.of(inputs[0]))
    i, j = a["dim0"], a["dim1"]
    dims[i], dims[j] = dims[j], dims[i]
    t.set(outputs[0], dims)
    t.still(inputs[0], outputs[0])


@rule("unsqueeze")
def unsqueeze(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    dims = list(t.of(inputs[0]))
    at = a["dim"] % (len(dims) + 1)
    t.set(outputs[0], [*dims[:at], [], *dims[at:]])


@rule("squeeze")
def squeeze(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x = inputs[0]
    named = a.get("dim")
    drop = range(x.dim()) if named is None else [d % x.dim() for d in ([named] if isinstance(named, int) else named)]
    t.set(outputs[0], [dim for i, dim in enumerate(t.of(x)) if not (i in drop and x.shape[i] == 1)])


@rule("expand", "repeat", "tile")
def expand_rule(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, y = inputs[0], outputs[0]
    dims: list[Dim] = [[Atom(n)] if n > 1 else [] for n in y.shape]
    for i, dim in enumerate(t.of(x)):
        j = y.dim() - x.dim() + i
        if x.shape[i] == y.shape[j]:
            dims[j] = dim
        elif x.shape[i] > 1:  # repeat lays copies one after the other
            dims[j] = [Atom(y.shape[j] // x.shape[i]), *dim]
    t.set(y, dims)


def _cat_parts(t: Tracer, parts: list[Tensor], y: Tensor, at: int) -> bool:
    """Parts of a fused parameter put together again: equal sections of one product, if their sizes allow."""
    unit = min((t.of(x)[at] for x in parts), key=lambda d: size(expand(d)))
    if any(size(expand(t.of(x)[at])) % size(expand(unit)) for x in parts):
        return False
    for x in parts:
        section = t.of(x)[at]
        head, rest = head_of(section, size(expand(section)) // size(expand(unit)))
        if head is None:
            return False
        identify(rest, unit)
        for i in range(y.dim()):
            if i != at:
                identify(t.of(x)[i], t.of(parts[0])[i])
    dims = list(t.of(parts[0]))
    dims[at] = [Atom(y.shape[at] // size(expand(unit))), *unit]
    t.set(y, dims)
    return True


@rule("cat", "concat")
def cat(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    y, at = outputs[0], a["dim"] % outputs[0].dim()
    parts = [x for x in inputs if x.dim() == y.dim()]
    dims = list(t.of(parts[0]))
    if all(id(x) in t.parameters for x in parts) and _cat_parts(t, parts, y, at):
        return
    for x in parts:
        block([t.of(x)[at]], t.at("concatenated with other units"))
        for i in range(y.dim()):
            if i != at:
                identify(dims[i], t.of(x)[i])
    dims[at] = [Atom(y.shape[at], t.at("concatenated with other units"))] if y.shape[at] > 1 else []
    t.set(y, dims)


@rule("stack")
def stack(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    y = outputs[0]
    dims = t.of(inputs[0])
    for x in inputs[1:]:
        for one, other in zip(dims, t.of(x), strict=True):
            identify(one, other)
    at = a["dim"] % y.dim()
    t.set(y, [*dims[:at], [Atom(y.shape[at])] if y.shape[at] > 1 else [], *dims[at:]])


@rule("split", "chunk", "split_with_sizes", "unsafe_split", "unsafe_chunk")
def split(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Equal parts are one factor of the dimension, as gate and up in a fused projection."""
    x, at = inputs[0], a["dim"] % inputs[0].dim()
    dims = t.of(x)
    if len({y.shape[at] for y in outputs}) == 1 and len(outputs) > 1:
        head, rest = head_of(dims[at], len(outputs))
        if head is not None:
            block([head], t.at("split into parts"))
            for y in outputs:
                t.set(y, [*dims[:at], rest, *dims[at + 1 :]])
            return
    if len(outputs) > 1:
        block([dims[at]], t.at("split into unequal parts"))
    for y in outputs:
        own = [Atom(y.shape[at], t.at("split into unequal parts"))] if y.shape[at] > 1 else []
        t.set(y, [*dims[:at], dims[at] if len(outputs) == 1 else own, *dims[at + 1 :]])


@rule("select", "unbind")
def select(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, at = inputs[0], a["dim"] % inputs[0].dim()
    dims = t.of(x)
    block([dims[at]], t.at("single units are picked out"))
    for y in outputs:
        t.set(y, [*dims[:at], *dims[at + 1 :]])


@rule("slice", "narrow", "index_select", "gather", "scatter", "scatter_add", "slice_scatter", "unfold", "index_fill")
def partial(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Part of a dimension is used by position; the other dimensions pass."""
    x, y = inputs[0], outputs[0]
    dims = list(t.of(x))
    at = a.get("dim", a.get("dimension", 0)) % x.dim()
    if y.dim() != x.dim():
        return unknown(t, "unfold", inputs, outputs)
    if id(y) in t.dims:
        return
    if id(x) in t.names and len(inputs) == 1:  # a part of a fused parameter, about to be taken
        t.offsets[id(y)] = a.get("start") or 0
        t.still(x, y)
    if y.shape[at] != x.shape[at] or len(inputs) > 1:
        block([dims[at]], t.at("used by position (indexing)"))
        dims[at] = [Atom(y.shape[at], t.at("used by position (indexing)"))] if y.shape[at] > 1 else []
    for i, n in enumerate(y.shape):
        if i != at and n != x.shape[i]:
            return unknown(t, "indexing", inputs, outputs)
    t.set(y, dims)


@rule("index", "_unsafe_index")
def index(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, y = a["self"], outputs[0]
    used = [i for i, ix in enumerate(a["indices"]) if ix is not None]
    dims = t.of(x)
    block([dims[i] for i in used], t.at("used by position (indexing)"))
    if used and used == list(range(used[0], used[-1] + 1)):
        after = x.dim() - used[-1] - 1
        middle = y.dim() - used[0] - after
        fresh: list[Dim] = [[Atom(n, "indexed")] if n > 1 else [] for n in y.shape[used[0] : used[0] + middle]]
        t.set(y, [*dims[: used[0]], *fresh, *dims[used[-1] + 1 :]])
    else:
        unknown(t, "index", inputs, outputs)


@rule("embedding")
def embedding(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    w, ids = a["weight"], a["indices"]
    block([t.of(w)[0]], "rows of an embedding")
    t.set(outputs[0], [*t.of(ids), t.of(w)[1]])


@rule("constant_pad_nd", "pad")
def pad(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, y = inputs[0], outputs[0]
    dims = list(t.of(x))
    for i, n in enumerate(y.shape):
        if n != x.shape[i]:
            block([dims[i]], t.at("padded"))
            dims[i] = [Atom(n, t.at("padded"))] if n > 1 else []
    t.set(y, dims)

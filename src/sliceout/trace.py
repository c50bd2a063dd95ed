"""Which dimensions of which parameters are the same units? Found by watching one forward pass without data.

A copy of the model runs on the meta device, so nothing is computed and no statistics or caches of the real model are
touched. Every dimension of every tensor is a product of :class:`Atom` s, indivisible runs of units. Each ATen op says
how the atoms of its inputs and outputs correspond:

- pointwise ops, norms and products identify atoms (rows of one weight with columns of the next);
- ``view`` and ``chunk`` split an atom: 3 x heads x dims in a fused qkv weight, channels x pixels behind a flatten;
- ``cat``, ``softmax``, indexing and anything unknown *block* an atom, with a reason that a person can read.

What remains unblocked is a set of units that can be sliced together. Whether the model's Python code copes with the
smaller tensors is not decided here: ``convert_`` tries it on the same meta copy.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .ops import without_views

INPUT = "an input of the model"

Dim = list["Atom"]
"""A dimension: the product of its atoms, slowest first. A dimension of size 1 has none."""


class Atom:
    """A run of units that is sliced as a whole or not at all; a union-find node that can also be split."""

    def __init__(self, size: int, blocked: str | None = None) -> None:
        self.size = size
        self.blocked = blocked
        self.contracted: list[str] = []
        """Modules in which two activations are multiplied over these units, as queries and keys are."""
        self.batched: list[str] = []
        """Modules in which two activations are multiplied separately for each of these units, as heads are."""
        self.produced = False
        """Whether some layer writes these units (as its ``out`` dimension)."""
        self._parent: Atom | None = None
        self._parts: list[Atom] = []

    def root(self) -> Atom:
        while self._parent is not None:
            self = self._parent
        return self

    def split(self, left: int) -> None:
        """Make a root the product of ``left`` and the rest."""
        self._parts = [Atom(left, self.blocked), Atom(self.size // left, self.blocked)]
        for part in self._parts:
            part.contracted, part.batched, part.produced = list(self.contracted), list(self.batched), self.produced


def expand(dim: Dim) -> Dim:
    """The atoms of a dimension as they are now: roots, with split ones replaced by their parts."""
    out: Dim = []
    for atom in dim:
        root = atom.root()
        out += expand(root._parts) if root._parts else [root]
    return out


def block(dims: Iterator[Dim] | list[Dim], reason: str) -> None:
    for dim in dims:
        for atom in expand(dim):
            atom.blocked = atom.blocked or reason


def size(dim: Dim) -> int:
    return math.prod(a.size for a in dim)


def identify(a: Dim, b: Dim) -> None:
    """Say that two dimensions hold the same units in the same order."""
    a, b = expand(a), expand(b)
    if size(a) != size(b):
        return block([a, b], "tensors of different sizes meet here")
    while a and b:
        x, y = a[-1], b[-1]
        if x is y or x.size == y.size:
            _merge(x, y)
            a, b = a[:-1], b[:-1]
            a, b = expand(a), expand(b)
        elif max(x.size, y.size) % min(x.size, y.size):
            return block([a, b], "a reshape mixes these units with another dimension")
        else:
            big = x if x.size > y.size else y
            big.split(big.size // min(x.size, y.size))
            a, b = expand(a), expand(b)


def _merge(x: Atom, y: Atom) -> None:
    if x is not y:
        y._parent = x
        x.blocked = x.blocked or y.blocked
        x.contracted += y.contracted
        x.batched += y.batched
        x.produced |= y.produced


@dataclass
class Use:
    """A parameter or buffer of the model and the dimensions it was seen with."""

    name: str
    module: str
    key: str
    dims: list[Dim]


@dataclass
class Trace:
    """What one forward pass tells: the uses of all parameters, the adds between branches, the dropouts on the way."""

    uses: list[Use] = field(default_factory=list)
    adds: list[tuple[Dim, Dim]] = field(default_factory=list)
    dropouts: dict[str, list[Dim]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    output_numel: dict[str, int] = field(default_factory=dict)
    direct: set[str] = field(default_factory=set)
    """Weights that a convolution or product was given as they are, not something computed from them."""
    inputs: dict[str, list[Dim]] = field(default_factory=dict)
    """The dimensions of the first input of every module."""
    scalars: dict[str, set[float]] = field(default_factory=dict)
    """Numbers that tensors were multiplied or divided by, by module: the softmax temperature is among them."""
    takes: dict[tuple[str, int, int], Dim] = field(default_factory=dict)
    """In a sliced model: the dimensions of the small parameters, by full name, dimension and offset."""


def meta_copy(model: nn.Module) -> nn.Module:
    """``model`` with its parameters and buffers on the meta device; no data is copied, and nothing is shared."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in tree_leaves([module._parameters, module._buffers, *vars(module).values()]):
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                empty = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


class Where:
    """The path of modules that is being executed, as a context."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {m: name for name, m in model.named_modules()}
        self.stack: list[str] = []
        self.failed: str | None = None
        self.on_call: list[Callable[[str, nn.Module, Any, Any], None]] = []

    @property
    def here(self) -> str:
        return self.stack[-1] if self.stack else ""

    def __enter__(self) -> Where:
        def enter(module: nn.Module, args: Any) -> None:
            if module in self.names:
                self.stack.append(self.names[module])
                self.failed = self.names[module]

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if module in self.names and self.stack:
                name = self.stack.pop()
                self.failed = self.here
                for call in self.on_call:
                    call(name, module, args, output)

        self._handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        return self

    def __exit__(self, *exc: Any) -> None:
        for handle in self._handles:
            handle.remove()


class Guesses(TorchDispatchMode):
    """Answers a question about data that the meta device does not have: yes, or 0.

    Code asks such questions to choose a path, mostly whether a mask is all ones. Both traces take the same path.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return args[0].dtype == torch.bool or 0
        return func(*args, **(kwargs or {}))


class Tracer(TorchDispatchMode):
    """Follows the atoms through every ATen op of a forward pass."""

    def __init__(self, model: nn.Module, where: Where) -> None:
        super().__init__()
        self.trace = Trace()
        self.where = where
        self.dims: dict[int, list[Dim]] = {}
        self.alive: list[Tensor] = []  # ids stay unique only while the tensors live
        self.names: dict[int, str] = {}
        self.offsets: dict[int, int] = {}  # of parts of parameters
        self.parameters: set[int] = set()  # ids of parameters and of what was computed from them alone
        for name, module in model.named_modules(remove_duplicate=False):
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or id(tensor) in self.dims:
                    continue
                dims = self.new(tensor)
                self.trace.uses.append(Use(f"{name}.{key}" if name else key, name, key, dims))
                self.parameters.add(id(tensor))
                self.names[id(tensor)] = self.trace.uses[-1].name

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def new(self, t: Tensor, reason: str | None = None) -> list[Dim]:
        """Fresh atoms for a tensor of unknown origin."""
        return self.set(t, [[Atom(n, reason)] if n > 1 else [] for n in t.shape])

    def set(self, t: Tensor, dims: list[Dim]) -> list[Dim]:
        for i, (dim, n) in enumerate(zip(dims, t.shape, strict=True)):
            if size(expand(dim)) != n:  # a rule that does not fit: better to refuse than to be wrong
                block([dim], f"unexpected shape in {self.where.here or 'the model'}")
                dims[i] = [Atom(n, "unexpected shape")] if n > 1 else []
        self.dims[id(t)] = dims
        self.alive.append(t)
        return dims

    def of(self, t: Tensor) -> list[Dim]:
        return self.dims[id(t)] if id(t) in self.dims else self.new(t)

    def at(self, what: str) -> str:
        return f"{what} in {self.where.here}" if self.where.here else what

    # -- dispatch ------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(*args)
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        rule = _RULES.get(name) or _RULES.get(name.rstrip("_"))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if inputs and all(id(x) in self.parameters for x in inputs):
            self.parameters.update(id(y) for y in outputs)
        if name.rstrip("_") in ("mul", "div", "baddbmm", "addmm"):
            numbers = [v for v in (*args[1:], *(kwargs or {}).values()) if isinstance(v, (int, float))]
            numbers += [t.item() for t in inputs if t.dim() == 0 and t.device.type == "cpu" and type(t) is Tensor]
            self.trace.scalars.setdefault(self.where.here, set()).update(map(float, numbers))
        if rule is not None:
            bound = _bind(func, args, kwargs or {})
            rule(self, bound, inputs, outputs)
        elif not inputs:
            pass  # a constant
        elif torch.Tag.pointwise in func.tags or torch.Tag.pointwise in _functional_tags(func):
            pointwise(self, {}, inputs, outputs)
        else:
            unknown(self, name, inputs, outputs)
        return out


def _functional_tags(func: Any) -> list[Any]:
    """In-place pointwise ops do not always carry the tag of their functional twin."""
    name = func._schema.name.split("::")[1].rstrip("_")
    twin = getattr(torch.ops.aten, name, None)
    overload = getattr(twin, func._overloadname, None) if twin is not None else None
    return overload.tags if overload is not None else []


def _bind(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    bound.update({a.name: v for a, v in zip(func._schema.arguments, args, strict=False)})
    bound.update(kwargs)
    return bound


# -- rules -----------------------------------------------------------------------------------------------------------------

Rule = Callable[[Tracer, dict[str, Any], list[Tensor], list[Tensor]], None]
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(f: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, f))
        return f

    return register


def unknown(t: Tracer, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    for x in inputs:
        block(t.of(x), t.at(f"{name} is not known to keep units apart"))
    for y in outputs:
        if id(y) not in t.dims:
            t.new(y, t.at(f"comes out of {name}"))


def _broadcast(t: Tracer, inputs: list[Tensor], y: Tensor) -> list[Dim]:
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


@rule("hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu", "gelu", "silu", "mish", "relu6", "celu", "selu",
      "softplus", "threshold", "log_sigmoid_forward", "softshrink", "hardshrink", "where", "masked_fill", "lerp", "addcmul", "addcdiv", "clamp_min", "clamp_max", "bernoulli", "copysign", "prelu",
      "_prelu_kernel", "rrelu_with_noise", "fill", "zero", "normal", "uniform", "random", "exponential")  # fmt: skip
def pointwise(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    for y in outputs:
        dims = _broadcast(t, inputs, y)
        if id(y) not in t.dims:
            t.set(y, dims)


@rule("add", "sub")
def add(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Between two branches an add may be a residual connection: noted now, judged when all producers are known."""
    x, y = a["self"], a["other"]
    if len(inputs) < 2 or x is y:
        return pointwise(t, a, inputs, outputs)
    out = outputs[0]
    dims: list[Dim] = [[] for _ in out.shape]
    for operand in (x, y) if x.dim() >= y.dim() else (y, x):
        for i, dim in enumerate(t.of(operand)):
            j = out.dim() - operand.dim() + i
            if operand.shape[i] == 1:
                continue
            if dims[j]:
                t.trace.adds.append((dims[j], dim))
            else:
                dims[j] = dim
    if id(out) not in t.dims:
        t.set(out, dims)


@rule("clone", "detach", "alias", "_to_copy", "contiguous", "lift_fresh", "lift_fresh_copy", "native_dropout", "to",
      "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like", "new_zeros", "bernoulli_p")  # fmt: skip
def same(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    for y in outputs:
        if y.shape == inputs[0].shape and id(y) not in t.dims:
            t.set(y, list(t.of(inputs[0])))


@rule("copy")
def copy_into(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    pointwise(t, a, inputs, outputs)


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
    _still(t, inputs[0], outputs[0])


@rule("t", "numpy_T")
def transpose_matrix(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    t.set(outputs[0], list(t.of(inputs[0]))[::-1])
    _still(t, inputs[0], outputs[0])


def _still(t: Tracer, x: Tensor, y: Tensor) -> None:
    """``y`` is the parameter ``x`` seen from another side."""
    if id(x) in t.names:
        t.names[id(y)] = t.names[id(x)]


@rule("transpose")
def transpose(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    dims = list(t.of(inputs[0]))
    i, j = a["dim0"], a["dim1"]
    dims[i], dims[j] = dims[j], dims[i]
    t.set(outputs[0], dims)
    _still(t, inputs[0], outputs[0])


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


@rule("convolution", "_convolution", "convolution_overrideable")
def convolution(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, w, bias = a["input"], a["weight"], a["bias"]
    y, groups = outputs[0], a["groups"]
    xd, wd = t.of(x), t.of(w)
    if a["transposed"]:
        block([xd[1], *wd], t.at("a transposed convolution has no sliced form yet"))
        t.new(y, t.at("comes out of a transposed convolution"))
        return
    if id(w) in t.names:
        t.trace.direct.add(t.names[id(w)])
    spatial: list[Dim] = [[Atom(n, "a position, not a unit")] if n > 1 else [] for n in y.shape[2:]]
    if groups == 1:
        identify(xd[1], wd[1])
        channels = wd[0]
    else:
        x_group, x_rest = _head(xd[1], groups)
        w_group, channels = _head(wd[0], groups)
        if x_group is None or w_group is None:
            block([xd[1], *wd], t.at(f"groups={groups} cut through a reshape"))
            t.new(y)
            return
        identify(x_group, w_group)
        identify(x_rest, wd[1])
        channels = [*w_group, *channels]
    if bias is not None:
        identify(t.of(bias)[0], wd[0])
    t.set(y, [xd[0], channels, *spatial])


def _head(dim: Dim, n: int) -> tuple[Dim | None, Dim]:
    """Split a dimension into its slowest ``n`` and the rest."""
    head: Dim = []
    rest = expand(dim)
    while size(head) < n:
        need, atom = n // size(head), rest[0]
        if need % atom.size == 0:
            head.append(atom)
            rest = rest[1:]
        elif atom.size % need == 0:
            atom.split(need)
            rest = expand(rest)
        else:
            return None, rest
    return head, rest


def _contract(t: Tracer, x: Tensor, y: Tensor, xd: Dim, yd: Dim) -> None:
    """Two dimensions are multiplied and summed over."""
    identify(xd, yd)
    t.trace.direct.update(t.names[id(p)] for p in (x, y) if id(p) in t.names)
    if id(x) not in t.parameters and id(y) not in t.parameters:
        for atom in expand(xd):
            atom.contracted.append(t.where.here)


@rule("mm")
def mm(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, y = a["self"], a["mat2"]
    _contract(t, x, y, t.of(x)[1], t.of(y)[0])
    t.set(outputs[0], [t.of(x)[0], t.of(y)[1]])


@rule("addmm")
def addmm(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, y, bias = a["mat1"], a["mat2"], a["self"]
    _contract(t, x, y, t.of(x)[1], t.of(y)[0])
    t.set(outputs[0], [t.of(x)[0], t.of(y)[1]])
    _broadcast(t, [outputs[0], bias], outputs[0])


@rule("linear")
def linear(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, w, bias = a["input"], a["weight"], a["bias"]
    _contract(t, x, w, t.of(x)[-1], t.of(w)[1])
    t.set(outputs[0], [*t.of(x)[:-1], t.of(w)[0]])
    if bias is not None:
        identify(t.of(bias)[0], t.of(w)[0])


@rule("bmm")
def bmm(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, y = a["self"], a["mat2"]
    _batched(t, x, y, outputs[0])


@rule("baddbmm")
def baddbmm(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    _batched(t, a["batch1"], a["batch2"], outputs[0])
    _broadcast(t, [outputs[0], a["self"]], outputs[0])


def _mark_batched(t: Tracer, dims: list[Dim]) -> None:
    for dim in dims:
        for atom in expand(dim):
            atom.batched.append(t.where.here)


def _batched(t: Tracer, x: Tensor, y: Tensor, out: Tensor) -> None:
    xd, yd = t.of(x), t.of(y)
    identify(xd[0], yd[0])
    _mark_batched(t, xd[:1])
    _contract(t, x, y, xd[2], yd[1])
    t.set(out, [xd[0], xd[1], yd[2]])


def _group_heads(t: Tracer, q: Dim, kv: Dim) -> None:
    """Grouped queries: each head of keys and values serves a run of query heads."""
    n = size(expand(kv))
    head, _ = _head(q, n) if size(expand(q)) % n == 0 else (None, [])
    if head is None:
        block([q, kv], t.at("query heads do not divide among key heads"))
    else:
        identify(head, kv)


@rule("scaled_dot_product_attention", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
      "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math",
      "_scaled_dot_product_cudnn_attention")  # fmt: skip
def attention(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    q, k, v = (t.of(a[n]) for n in ("query", "key", "value"))
    for other in (k, v):
        for d in range(len(q) - 2):
            if size(expand(q[d])) == size(expand(other[d])):
                identify(q[d], other[d])
            else:
                _group_heads(t, q[d], other[d])
    _mark_batched(t, q[:-2])
    scale = a.get("scale")
    t.trace.scalars.setdefault(t.where.here, set()).add(a["query"].shape[-1] ** -0.5 if scale is None else scale)
    _contract(t, a["query"], a["key"], q[-1], k[-1])
    identify(k[-2], v[-2])
    block([q[-2], k[-2]], "a position, not a unit")
    t.set(outputs[0], [*q[:-1], v[-1]])
    for y in outputs[1:]:
        t.new(y, "attention statistics")


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
    head, _ = _head(channel, groups) if groups > 1 else ([], [])
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


def _cat_parts(t: Tracer, parts: list[Tensor], y: Tensor, at: int) -> bool:
    """Parts of a fused parameter put together again: equal sections of one product, if their sizes allow."""
    unit = min((t.of(x)[at] for x in parts), key=lambda d: size(expand(d)))
    if any(size(expand(t.of(x)[at])) % size(expand(unit)) for x in parts):
        return False
    for x in parts:
        section = t.of(x)[at]
        head, rest = _head(section, size(expand(section)) // size(expand(unit)))
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
        head, rest = _head(dims[at], len(outputs))
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
        _still(t, x, y)
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


@rule("max_pool1d", "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d",
      "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_avg_pool1d",
      "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_bicubic2d",
      "upsample_linear1d", "upsample_trilinear3d", "reflection_pad1d", "reflection_pad2d", "replication_pad1d",
      "replication_pad2d", "max_pool2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_nearest_exact2d")
def spatial(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:  # fmt: skip
    x = inputs[0]
    for y in outputs:
        fresh: list[Dim] = [[Atom(n, "a position, not a unit")] if n > 1 else [] for n in y.shape[2:]]
        t.set(y, [*t.of(x)[:2], *fresh])


@rule("constant_pad_nd", "pad")
def pad(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, y = inputs[0], outputs[0]
    dims = list(t.of(x))
    for i, n in enumerate(y.shape):
        if n != x.shape[i]:
            block([dims[i]], t.at("padded"))
            dims[i] = [Atom(n, t.at("padded"))] if n > 1 else []
    t.set(y, dims)


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
                t.trace.takes[t.names[id(full)], d, t.offsets.get(id(full), 0)] = dims[d]
    t.parameters.add(id(small))
    _still(t, full, small)
    t.set(small, dims)


@rule("store_", "store")
def store(t: Tracer, a: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Writes statistics; nothing comes out."""


# -- one forward pass --------------------------------------------------------------------------------------------------------


def trace(shadow: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], where: Where | None = None) -> Trace:
    """Follow one training forward of a :func:`meta_copy` on meta inputs."""
    with where or Where(shadow) as where, torch.no_grad(), without_views(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tracer = Tracer(shadow, where)

        def called(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
            tracer.trace.calls[name] = tracer.trace.calls.get(name, 0) + 1
            if inputs and isinstance(inputs[0], Tensor):
                tracer.trace.inputs[name] = tracer.of(inputs[0])
            if isinstance(module, nn.modules.dropout._DropoutNd) and inputs and isinstance(inputs[0], Tensor):
                tracer.trace.dropouts[name] = tracer.trace.dropouts.get(name, []) + tracer.of(inputs[0])
            if not any(True for _ in module.children()):
                numel = sum(t.numel() for t in tree_leaves(output) if isinstance(t, Tensor))
                tracer.trace.output_numel[name] = tracer.trace.output_numel.get(name, 0) + numel

        where.on_call.append(called)
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                tracer.new(t, INPUT)
        with Guesses(), tracer:
            output = shadow(*args, **kwargs)
    for t in tree_leaves(_plain(output)):
        if isinstance(t, Tensor):
            block(tracer.of(t), "an output of the model")
    return tracer.trace


def _plain(output: Any) -> Any:
    """HF returns ordered dicts that pytree does not open."""
    return dict(output) if isinstance(output, dict) else output

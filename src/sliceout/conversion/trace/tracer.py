"""The tracer: follows the atoms through every ATen op of a forward pass."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ...ops import without_views
from .atoms import INPUT, Atom, Dim, block, expand, size
from .run import Guesses, Where


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
    adds: list[tuple[Dim, Dim, bool]] = field(default_factory=list)
    """Dimensions of two branches that are added, and whether one branch was computed from the other."""
    dropouts: dict[str, list[Dim]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    """By module, as torch's own counter has them."""
    outputs: dict[str, int] = field(default_factory=dict)
    """How many numbers the modules without children write."""
    direct: set[str] = field(default_factory=set)
    """Weights that a convolution or product was given as they are, not something computed from them."""
    inputs: dict[str, list[Dim]] = field(default_factory=dict)
    """The dimensions of the first input of every module."""
    scalars: dict[str, set[float]] = field(default_factory=dict)
    """Numbers that tensors were multiplied or divided by, by module: the softmax temperature is among them."""
    takes: dict[tuple[str, int, int], Dim] = field(default_factory=dict)
    """In a sliced model: the dimensions of the small parameters, by full name, dimension and offset."""


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
        self.behind: dict[int, int] = {}  # the weights (as bits) that a tensor was computed with
        for name, module in model.named_modules(remove_duplicate=False):
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or id(tensor) in self.dims:
                    continue
                dims = self.new(tensor)
                self.trace.uses.append(Use(f"{name}.{key}" if name else key, name, key, dims))
                self.parameters.add(id(tensor))
                self.names[id(tensor)] = self.trace.uses[-1].name
                if tensor.dim() > 1:
                    self.behind[id(tensor)] = 1 << len(self.behind)

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

    def still(self, x: Tensor, y: Tensor) -> None:
        """``y`` is the parameter ``x`` seen from another side."""
        if id(x) in self.names:
            self.names[id(y)] = self.names[id(x)]

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
        flops = _flops(func, args, kwargs or {}, out)
        if flops:
            self.trace.flops[self.where.here] = self.trace.flops.get(self.where.here, 0) + flops
        if name.rstrip("_") in ("mul", "div", "baddbmm", "addmm"):
            numbers = [v for v in (*args[1:], *(kwargs or {}).values()) if isinstance(v, (int, float))]
            numbers += [t.item() for t in inputs if t.dim() == 0 and t.device.type == "cpu" and type(t) is Tensor]
            self.trace.scalars.setdefault(self.where.here, set()).update(map(float, numbers))
        if rule is not None:
            bound = _bind(func, args, kwargs or {})
            rule(self, bound, inputs, outputs)
        elif not inputs:
            for y in outputs:  # a constant
                self.new(y, None if name in _UNIFORM else self.at("meets a constant that numbers its entries"))
        elif torch.Tag.pointwise in func.tags or torch.Tag.pointwise in _functional_tags(func):
            _RULES["pointwise"](self, {}, inputs, outputs)
        else:
            unknown(self, name, inputs, outputs)
        behind = 0
        for x in inputs:
            behind |= self.behind.get(id(x), 0)
        for y in outputs:  # after the rule: y may be x itself, changed in place
            self.behind[id(y)] = behind
            self.alive.append(y)
        return out


_UNIFORM = ("empty", "zeros", "ones", "full", "rand", "randn", "randint", "scalar_tensor", "empty_strided")
"""What makes tensors all of whose entries are alike, however many there are."""


def _flops(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=out))
    if "_scaled_dot_product" in func._schema.name:  # the fused attention of the CPU is not in torch's list
        return sdpa_flop_count(*(t.shape for t in args[:3]))
    return 0


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


# -- one forward pass --------------------------------------------------------------------------------------------------


def trace(shadow: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], where: Where | None = None) -> Trace:
    """Follow one training forward of a :func:`meta_copy` on meta inputs."""
    with where or Where(shadow) as where, torch.no_grad(), without_views(), _same_luck(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tracer = Tracer(shadow, where)

        def called(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
            tracer.trace.calls[name] = tracer.trace.calls.get(name, 0) + 1
            if inputs and isinstance(inputs[0], Tensor):
                tracer.trace.inputs[name] = tracer.of(inputs[0])
            if isinstance(module, nn.modules.dropout._DropoutNd) and inputs and isinstance(inputs[0], Tensor):
                tracer.trace.dropouts[name] = tracer.trace.dropouts.get(name, []) + tracer.of(inputs[0])
            if not any(True for _ in module.children()):
                numel = sum(t.numel() for t in _tensors_in(output))
                tracer.trace.outputs[name] = tracer.trace.outputs.get(name, 0) + numel

        where.on_call.append(called)
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                tracer.new(t, INPUT)
        with Guesses(), tracer:
            output = shadow(*args, **kwargs)
    for t in _tensors_in(output):
        block(tracer.of(t), "an output of the model")
    return tracer.trace


def _tensors_in(output: Any) -> list[Tensor]:
    """All tensors in what a module returns, be it HF's ordered dict or an object of somebody's own."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        return [t for value in output.values() for t in _tensors_in(value)]
    if isinstance(output, (list, tuple)):
        return [t for value in output for t in _tensors_in(value)]
    return [t for t in tree_leaves(list(getattr(output, "__dict__", {}).values())) if isinstance(t, Tensor)]


@contextlib.contextmanager
def _same_luck() -> Iterator[None]:
    """Code that throws dice (skipping whole layers, say) takes the same path every time, and uses up no randomness."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        torch.default_generator.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(state)

"""The tracer: follows the atoms through every ATen op of a forward pass."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...ops import without_views
from ..reasons import Reason, Skip
from .atoms import Dim, block, identify, new_dim, new_dims, size
from .flow import Flow


class RuleError(RuntimeError):
    """One of our trace rules failed: a bug of this library, not of the model that is traced."""


@dataclass
class Cost:
    """What one forward pass of one batch takes: FLOPs (by torch's own counter) and numbers written, by layer."""

    flops: Counter[str] = field(default_factory=Counter)
    activations: Counter[str] = field(default_factory=Counter)


@dataclass
class Trace:
    """What one forward pass tells: the units of all parameters, the calls of all modules, the adds between branches."""

    uses: dict[str, list[Dim]] = field(default_factory=dict)
    """The dimensions of every parameter and buffer, by name."""
    adds: list[tuple[Dim, Dim, bool]] = field(default_factory=list)
    """Dimensions of two branches that are added, and whether one branch was computed from the other."""
    cost: Cost = field(default_factory=Cost)
    direct: set[str] = field(default_factory=set)
    """Weights that a convolution or product was given as they are, not something computed from them."""
    calls: dict[str, list[tuple[list[Dim], list[Dim]]]] = field(default_factory=dict)
    """The dimensions of the first input and of the output of every call of a module; none for what is not a tensor."""
    scalars: dict[str, set[float]] = field(default_factory=dict)
    """Numbers that tensors were multiplied or divided by, by module: the softmax temperature is among them."""
    takes: dict[tuple[str, int, int], Dim] = field(default_factory=dict)
    """In a sliced model: the dimensions of the small parameters, by full name, dimension and offset."""
    batch: Dim = field(default_factory=list)
    """Dimension 0 of the inputs: the samples, unless attention runs along it."""
    mixes: list[tuple[list[Dim], list[Dim]]] = field(default_factory=list)
    """The dimensions of an activation, and those of them along which its entries were mixed or chosen by position."""
    drops: list[tuple[str, list[Dim]]] = field(default_factory=list)
    """Where dropout was computed, be it by a layer or by ``F.dropout``, and the dimensions of what it dropped from."""
    attends: list[Dim] = field(default_factory=list)
    """Dimensions along which attention runs."""
    flow: Flow | None = None
    """Which value was computed from which, if that was asked for."""

    def last_input(self, module: str) -> list[Dim]:
        """The dimensions of the first input of a module in its last call that had one."""
        return next((read for read, _ in reversed(self.calls[module]) if read), [])


class Tracer(TorchDispatchMode):
    """Follows the atoms through every ATen op of a forward pass."""

    def __init__(self, model: nn.Module, stack: list[str], flow: bool = False) -> None:
        super().__init__()
        self.trace = Trace(flow=Flow() if flow else None)
        self.stack = stack
        self.names: dict[int, str] = {}
        self.offsets: dict[int, int] = {}  # of parts of parameters
        self.parameters: set[int] = set()  # ids of parameters and of what was computed from them alone
        self.weights_behind: dict[int, int] = {}  # the weights (as bits) that a tensor was computed with
        self._dims: dict[int, list[Dim]] = {}
        self.written: dict[int, Tensor] = {}  # by memory, for the count of activations
        self._alive: list[Tensor] = []  # ids stay unique only while the tensors live
        for path, module in model.named_modules(remove_duplicate=False):
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or self.is_known(tensor):
                    continue
                self.names[id(tensor)] = name = f"{path}.{key}" if path else key
                self.trace.uses[name] = self.make_dims(tensor)
                self.parameters.add(id(tensor))
                if self.trace.flow is not None:
                    self.trace.flow.fixed.add(self.trace.flow.value(tensor, self.dims(tensor)))
                if tensor.dim() > 1:
                    self.weights_behind[id(tensor)] = 1 << len(self.weights_behind)

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    @property
    def here(self) -> str:
        """The name of the module that is being executed."""
        return self.stack[-1]

    def because(self, code: Skip, text: str) -> Reason:
        """A reason that names the place."""
        return Reason(code, f"{text} in {self.here}" if self.here else text)

    def is_known(self, t: Tensor) -> bool:
        return id(t) in self._dims

    def dims(self, t: Tensor) -> list[Dim]:
        return self._dims[id(t)] if self.is_known(t) else self.make_dims(t)

    def make_dims(self, t: Tensor, reason: Reason | None = None) -> list[Dim]:
        """Atoms of its own for a tensor of unknown origin."""
        return self.set_dims(t, new_dims(t.shape, reason))

    def set_dims(self, t: Tensor, dims: list[Dim]) -> list[Dim]:
        for i, (dim, n) in enumerate(zip(dims, t.shape, strict=True)):
            if size(dim) != n:  # a rule that does not fit: better to refuse than to be wrong
                block([dim], Skip.UNEXPECTED_SHAPE(f"unexpected shape in {self.here or 'the model'}"))
                dims[i] = new_dim(n, Skip.UNEXPECTED_SHAPE("unexpected shape"))
        self._dims[id(t)] = dims
        self._alive.append(t)
        return dims

    def without(self, x: Tensor, over: list[int], y: Tensor, reason: Reason, new: Reason | None = None) -> list[Dim]:
        """The dimensions of ``x`` for ``y``, except that those ``over`` are blocked, and new in ``y``."""
        dims = self.dims(x)
        block([dims[i] for i in over], reason)
        self.mix(x, over)
        return [new_dim(n, new or reason) if i in over else dims[i] for i, n in enumerate(y.shape)]

    def mix(self, x: Tensor, over: Iterable[int]) -> None:
        """The entries of an activation meet each other along these dimensions."""
        if id(x) not in self.parameters:
            dims = self.dims(x)
            self.trace.mixes.append((dims, [dims[i] for i in over]))

    def same_parameter(self, x: Tensor, y: Tensor) -> None:
        """``y`` is the parameter ``x``, transposed or cut."""
        if id(x) in self.names:
            self.names[id(y)] = self.names[id(x)]

    def returned(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module has finished a call."""
        read, written = (self.dims(t) if isinstance(t, Tensor) else [] for t in (inputs[0] if inputs else None, output))
        self.trace.calls.setdefault(name, []).append((read, written))
        if any(True for _ in module.children()):
            return
        for t in _tensors_in(
            output
        ):  # memory counts once: what came in, was changed in place or viewed is there already
            memory = t.untyped_storage()._cdata
            self.trace.cost.activations[name] += 0 if memory in self.written else t.numel()
            self.written[memory] = t  # alive, so that no other memory gets this number

    # -- dispatch ------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            # Code reads numbers to choose a path, mostly to ask whether a mask is all ones. A meta tensor has none: let
            # them be true or 0, so that both traces take the same path.
            # With a flow masks are not all ones, as it has to be known what they go into.
            out = (args[0].dtype == torch.bool and self.trace.flow is None) or 0
        else:
            out = func(*args, **(kwargs or {}))  # an error in here is the model's, one below is ours
        try:
            self._follow(func, args, kwargs or {}, out)
        except Exception as error:
            raise RuleError(f"tracing {func} in {self.here or 'the model'} failed: please report it") from error
        return out

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        name = func._schema.name.split("::")[1]
        functional = name.rstrip("_")
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        flow, mixed = self.trace.flow, len(self.trace.mixes)
        reads = [] if flow is None else [flow.value(t, self.dims(t)) for t in inputs]
        if inputs and all(id(x) in self.parameters for x in inputs):
            self.parameters.update(id(y) for y in outputs)
        self.trace.cost.flops[self.here] += _flops(func, args, kwargs, out)
        if functional in ("mul", "div", "baddbmm", "addmm"):
            numbers = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, (int, float))]
            numbers += [t.item() for t in inputs if t.dim() == 0 and t.device.type == "cpu" and type(t) is Tensor]
            self.trace.scalars.setdefault(self.here, set()).update(map(float, numbers))
        # in-place pointwise ops do not always carry the tag of their functional twin
        twin = getattr(getattr(torch.ops.aten, functional, None), func._overloadname, func)
        pointwise = torch.Tag.pointwise in (*func.tags, *twin.tags)
        rule = _RULES.get(name) or _RULES.get(functional) or (_RULES["pointwise"] if inputs and pointwise else None)
        bound = _bind(func, args, kwargs)
        if rule is not None:
            dims = rule(self, bound, inputs, outputs) if outputs else None
            for y in outputs:
                if dims is not None and y.shape == outputs[0].shape:
                    self.set_dims(y, list(dims))
        elif inputs:
            unknown(self, name, inputs, outputs)
        else:
            numbered = self.because(Skip.POSITION, "meets a constant that numbers its entries")
            for y in outputs:
                self.make_dims(y, None if name in _UNIFORM else numbered)
        if flow is not None:
            op = flow.ran(functional, self.here, reads, [(t, self.dims(t)) for t in outputs])
            op.mixes = [dim for _, over in self.trace.mixes[mixed:] for dim in over]
            flow.fixed.update(op.writes if inputs and all(v in flow.fixed for v in reads) else [])
        if functional in ("bernoulli", "native_dropout") or bound.get("dropout_p"):
            self.trace.drops.append((self.here, self.dims(outputs[0])))
        behind = 0
        for x in inputs:
            behind |= self.weights_behind.get(id(x), 0)
        for y in outputs:  # after the rule: y may be x itself, changed in place
            self.weights_behind[id(y)] = behind
            self._alive.append(y)


_UNIFORM = ("empty", "zeros", "ones", "full", "rand", "randn", "randint", "scalar_tensor", "empty_strided")
"""What makes tensors all of whose entries are alike, however many there are."""


def _flops(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count  # imports triton

    if func._schema.name == "aten::_grouped_mm":  # experts, each with rows of its own: not in torch's list
        return 2 * int(out.numel()) * int(args[0].shape[-1])
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=out))
    if "_scaled_dot_product" in func._schema.name:  # the fused attention of the CPU is not in torch's list
        return sdpa_flop_count(*(t.shape for t in args[:3]))
    return 0


def _bind(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    bound.update({a.name: v for a, v in zip(func._schema.arguments, args, strict=False)})
    bound.update(kwargs)
    return bound


Rule = Callable[[Tracer, dict[str, Any], list[Tensor], list[Tensor]], list[Dim] | None]
"""Of the tracer, the arguments by name, and all tensors that go in and come out. Says which dimensions the outputs have
that are shaped like the first one; ``None`` if they are known, or new."""
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(f: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, f))
        return f

    return register


def unknown(t: Tracer, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> list[Dim] | None:
    for x in inputs:
        block(t.dims(x), t.because(Skip.UNKNOWN_OP, f"{name} is not known to keep units apart"))
        t.mix(x, range(x.dim()))
    for y in outputs:
        if not t.is_known(y):
            t.make_dims(y, t.because(Skip.UNKNOWN_OP, f"comes out of {name}"))
    return None


# -- one forward pass of a copy without data ---------------------------------------------------------------------------


def meta_copy(model: nn.Module) -> nn.Module:
    """``model`` with its parameters and buffers on the meta device; no data is copied, and nothing is shared."""
    memo: dict[int, Any] = {}
    for tensor in (t for module in model.modules() for t in tree_leaves(vars(module))):
        if isinstance(tensor, Tensor) and id(tensor) not in memo:
            empty = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


def trace(
    shadow: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stack: list[str], flow: bool = False
) -> Trace:
    """Follow one training forward of a :func:`meta_copy` on meta inputs.

    ``stack`` is ``[""]`` and will hold the names of the modules at work; after an error, of those in which it arose.
    With ``flow``, what was computed from what is recorded as well.
    """
    tracer, names = Tracer(shadow, stack, flow), {m: name for name, m in shadow.named_modules()}
    recorded = tracer.trace.flow

    def enter(module: nn.Module, args: Any) -> None:
        if module in names:
            stack.append(names[module])
            if recorded is not None:
                recorded.enter()

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module in names and len(stack) > 1:
            tracer.returned(stack.pop(), module, args, output)
            if recorded is not None:
                recorded.leave(names[module], (args, kwargs), output)

    with torch.no_grad(), without_views(), _fixed_randomness(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                dims = tracer.make_dims(t, Skip.INPUT("an input of the model"))
                tracer.written[t.untyped_storage()._cdata] = t
                batch = tracer.trace.batch = tracer.trace.batch or (dims[0] if dims else [])
                if dims and size(dims[0]) == size(batch) and size(batch) not in t.shape[1:]:  # as many samples
                    identify(batch, dims[0])
        with register_module_forward_pre_hook(enter), register_module_forward_hook(leave, with_kwargs=True), tracer:
            output = shadow(*args, **kwargs)
    for t in _tensors_in(output):
        block(tracer.dims(t), Skip.OUTPUT("an output of the model"))
        if recorded is not None:
            recorded.outputs.add(recorded.value(t, tracer.dims(t)))
    return tracer.trace


def _tensors_in(output: Any) -> list[Tensor]:
    """All tensors in what a module returns, be it HF's ordered dict or an object of somebody's own."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, (dict, list, tuple)):
        return [t for value in (output.values() if isinstance(output, dict) else output) for t in _tensors_in(value)]
    return [t for t in tree_leaves(list(getattr(output, "__dict__", {}).values())) if isinstance(t, Tensor)]


@contextlib.contextmanager
def _fixed_randomness() -> Iterator[None]:
    """Code that draws random numbers (to skip layers, say) takes the same path in every trace; states are restored."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        torch.default_generator.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(state)

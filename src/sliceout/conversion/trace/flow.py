"""Which value was computed from which, and in which call of which module: the order of a forward pass.

A *value* is what a tensor held at one moment: an op that writes in place makes a new value of the same tensor. The ops
of a forward pass, numbered as they ran, and the calls of its modules as ranges of these numbers say where a value came
from, who read it, and through which argument it entered a module.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import KeyPath, tree_leaves_with_path

from .atoms import Dim


@dataclass
class Op:
    """One ATen op: what it read and wrote, in values."""

    name: str
    module: str
    reads: list[int]
    writes: list[int]
    mixes: list[Dim] = field(default_factory=list)
    """Dimensions of activations along which entries met each other."""


@dataclass
class Call:
    """One call of a module: the ops from ``start`` to before ``end``."""

    module: str
    order: int
    """Which call it is, counted as they begin."""
    last: int
    """The last call that began before this one ended."""
    start: int
    end: int
    args: list[tuple[KeyPath, int]]
    """Where values lie in ``(args, kwargs)``."""
    outputs: list[tuple[KeyPath, int]]

    def holds(self, op: int) -> bool:
        return self.start <= op < self.end

    def encloses(self, other: Call) -> bool:
        return self.order < other.order <= self.last


class Flow:
    """What is recorded of one forward pass."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.dims: list[list[Dim]] = []
        """By value."""
        self.fixed: set[int] = set()
        """Values that are parameters, buffers, or computed from them alone."""
        self.outputs: set[int] = set()
        """Values that the model returns."""
        self._of: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of a tensor: (op that wrote it, value)
        self._entered: list[tuple[int, int]] = []
        self._begun = 0

    # -- recording -----------------------------------------------------------------------------------------------------

    def value(self, t: Tensor, dims: list[Dim]) -> int:
        """What a tensor holds now. One that no op has written held it before the first op."""
        return self._of[id(t)][-1][1] if self._of[id(t)] else self._new(t, dims, -1)

    def _new(self, t: Tensor, dims: list[Dim], op: int) -> int:
        self.dims.append(list(dims))
        self._of[id(t)].append((op, len(self.dims) - 1))
        return len(self.dims) - 1

    def ran(self, name: str, module: str, reads: list[int], writes: list[tuple[Tensor, list[Dim]]]) -> Op:
        """An op has run on these values and written these tensors."""
        op = Op(name, module, reads, [self._new(t, dims, len(self.ops)) for t, dims in writes])
        self.ops.append(op)
        return op

    def enter(self) -> None:
        self._entered.append((self._begun, len(self.ops)))
        self._begun += 1

    def leave(self, module: str, inputs: Any, output: Any) -> None:
        order, start = self._entered.pop()
        args = [(path, v) for path, t in tree_leaves_with_path(inputs) if (v := self._at(t, start)) is not None]
        outputs = [(p, v) for p, t in tree_leaves_with_path(output) if (v := self._at(t, len(self.ops))) is not None]
        self.calls.append(Call(module, order, self._begun - 1, start, len(self.ops), args, outputs))

    def _at(self, t: Any, op: int) -> int | None:
        """The value that a tensor held before an op ran; a tensor that no op has met has none."""
        known = self._of.get(id(t), ()) if isinstance(t, Tensor) else ()
        return next((value for written, value in reversed(known) if written < op), None)

    # -- asking --------------------------------------------------------------------------------------------------------

    def finish(self) -> Flow:
        """Link what was recorded."""
        self.calls.sort(key=lambda call: call.order)
        self.producer: dict[int, int] = {v: i for i, op in enumerate(self.ops) for v in op.writes}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.before: list[int] = [1 << v for v in range(len(self.dims))]  # ancestors of values, as bits
        for i, op in enumerate(self.ops):
            behind = 0
            for v in op.reads:
                behind |= self.before[v]
                if not self.readers[v] or self.readers[v][-1] != i:
                    self.readers[v].append(i)
            for v in op.writes:
                self.before[v] |= behind
        self.shaped = set[int]()  # values of which only shapes come from what went in, such as masks of dropout
        for op in self.ops:
            reads = [v for v in op.reads if v not in self.fixed]
            if op.name.endswith("_like") or (reads and self.shaped.issuperset(reads)):
                self.shaped.update(op.writes)
        self.live = set(self.outputs)
        for op in reversed(self.ops):
            if self.live.intersection(op.writes):
                self.live.update(op.reads)
        self.times_called = Counter(call.module for call in self.calls)
        return self

    def descends(self, value: int, ancestor: int) -> bool:
        return value != ancestor and bool(self.before[value] >> ancestor & 1)

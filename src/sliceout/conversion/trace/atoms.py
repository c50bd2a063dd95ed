"""Atoms: indivisible runs of units. Every dimension of every tensor is a product of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..reasons import Reason, Skip

Dim = list["Atom"]
"""A dimension: the product of its atoms, slowest first. A dimension of size 1 has none."""

POSITION = Skip.POSITION("a position, not a unit")


class Atom:
    """A run of units that is sliced as a whole or not at all; a union-find node that can also be split."""

    def __init__(self, size: int, blocked: Reason | None = None) -> None:
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

    def join(self, other: Atom) -> None:
        """Make one of two roots; what is known of the other is known of this one."""
        if other is not self:
            other._parent = self
            self.blocked = self.blocked or other.blocked
            self.contracted += other.contracted
            self.batched += other.batched
            self.produced |= other.produced

    def split(self, left: int) -> None:
        """Make a root the product of ``left`` and the rest."""
        self._parts = [Atom(left, self.blocked), Atom(self.size // left, self.blocked)]
        for part in self._parts:
            part.contracted, part.batched, part.produced = list(self.contracted), list(self.batched), self.produced


def new_dim(n: int, blocked: Reason | None = None) -> Dim:
    """A dimension of ``n`` units that no other tensor has."""
    return [Atom(n, blocked)] if n > 1 else []


def new_dims(shape: Iterable[int], blocked: Reason | None = None) -> list[Dim]:
    return [new_dim(n, blocked) for n in shape]


def expand(dim: Dim) -> Dim:
    """The atoms of a dimension as they are now: roots, with split ones replaced by their parts."""
    out: Dim = []
    for atom in dim:
        root = atom.root()
        out += expand(root._parts) if root._parts else [root]
    return out


def block(dims: Iterable[Dim], reason: Reason) -> None:
    """Leave these units whole; the first reason counts."""
    for dim in dims:
        for atom in expand(dim):
            atom.blocked = atom.blocked or reason


def size(dim: Dim) -> int:
    return math.prod(a.size for a in expand(dim))


def identify(a: Dim, b: Dim) -> None:
    """Say that two dimensions hold the same units in the same order."""
    a, b = expand(a), expand(b)
    if size(a) != size(b):
        return block([a, b], Skip.UNEXPECTED_SHAPE("tensors of different sizes meet here"))
    while a and b:
        x, y = a[-1], b[-1]
        if x is y or x.size == y.size:
            x.join(y)
            a, b = a[:-1], b[:-1]
        elif max(x.size, y.size) % min(x.size, y.size):
            return block([a, b], Skip.RESHAPED("a reshape mixes these units with another dimension"))
        else:
            big = x if x.size > y.size else y
            big.split(big.size // min(x.size, y.size))
        a, b = expand(a), expand(b)


def split_front(dim: Dim, n: int) -> tuple[Dim | None, Dim]:
    """Split a dimension into its slowest ``n`` units and the rest; ``None`` if ``n`` cuts through an atom."""
    front: Dim = []
    rest = expand(dim)
    while size(front) < n:
        need, atom = n // size(front), rest[0]
        if need % atom.size == 0:
            front.append(atom)
            rest = rest[1:]
        elif atom.size % need == 0:
            atom.split(need)
            rest = expand(rest)
        else:
            return None, rest
    return front, rest

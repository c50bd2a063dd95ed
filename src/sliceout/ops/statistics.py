"""The kept entries of vectors that somebody else will write to: running statistics, where they lie."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import views
from .placement import Place, Placement


class InPlace:
    """The kept entries of vectors that somebody else will write to, such as running statistics.

    To make views costs the host as much as to use them, so those of every start are kept. Where the entries are not one
    run that kernels can read, they are copied to memory of their own, and back by :meth:`done`.
    """

    def __init__(self, fulls: tuple[Tensor, ...]) -> None:
        self.fulls = tuple(f.detach() for f in fulls)  # .data of a tensor may be replaced
        self.addresses = [f.data_ptr() for f in fulls]
        self.known: dict[Any, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
        self.copies: list[Tensor] = []

    def serves(self, *fulls: Tensor) -> bool:
        """Whether these lie where its vectors did; nothing else can, as long as those are held."""
        return [f.data_ptr() for f in fulls] == self.addresses

    def at(self, start: int, geometry: list[int]) -> list[Tensor]:
        """The kept entries of each vector."""
        self.now = self.known.get((start, geometry[1])) or self._make(Place(start, geometry))
        smalls, here, there = self.now
        if here:
            torch._foreach_copy_(here, there)
        return smalls

    def done(self) -> None:
        """They have been written to."""
        _, here, there = self.now
        if here:
            torch._foreach_copy_(there, here)

    @torch.inference_mode(False)
    def _make(self, place: Place) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        if len(self.known) >= 256:
            self.known.clear()
        at = Placement(place)
        (offset, _, length), *more = views.runs(place)
        if views.blocks_of(place) == 1 and not more and all(views.readable(full, offset) for full in self.fulls):
            made: Any = [full[offset : offset + length] for full in self.fulls], [], []
        else:
            width = math.prod(place.geometry[1:])
            if not self.copies or len(self.copies[0]) != width:
                self.copies = [full.new_empty(width) for full in self.fulls]
            # .data: a graph that saved them does not look at their values, and must not take this for a change
            pairs = [
                r for f, s in zip(self.fulls, self.copies, strict=True) for r in views.rectangles(f.data, s.data, at)
            ]
            made = self.copies, [small for _, small in pairs], [full for full, _ in pairs]
        self.known[place.start, place.geometry[1]] = made
        return made

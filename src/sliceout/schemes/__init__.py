"""What the paper compares SliceOut with, and slices of other kinds: a module and its layers each.

``SCHEMES`` is the one list of them: a new scheme is a file in this room and an entry here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ..slices import Slice
from .dropout import DROPS, Drop
from .patch import window
from .subset import Subset


class Scheme(NamedTuple):
    """How :func:`sliceout.convert_` carries a scheme out."""

    place: str
    """Where it acts: in all ``layers`` of a group, in the ``readers`` of its units, in those that are ``convolutions``
    too (of feature maps), or in residual ``blocks``."""
    make: Callable[..., Any]
    """Makes the slice of a group from ``size, rate`` and settings of :class:`~sliceout.Slice`; the sides of a window
    for a residual block."""
    no_effect: tuple[str, ...] = ()
    """The options of ``convert_`` that change nothing. They are refused."""


_UNITS = ("sampling", "grads", "parts", "ranks")
"""Settings of slices whose units lie side by side."""


def _subset(size: int, rate: float, **settings: Any) -> Slice:
    return Subset(size, rate, **{name: value for name, value in settings.items() if name not in _UNITS})


def _drop(scheme: str, size: int, rate: float, **settings: Any) -> Slice:
    return Drop(size, rate, scheme)


SCHEMES: dict[str, Scheme] = {
    "sliceout": Scheme("layers", Slice),
    "controlled": Scheme("layers", _subset, _UNITS),
    "patch": Scheme("blocks", window, (*_UNITS, "fold", "attention", "stages", "paper_exclusions", "payoff")),
    **{
        name: Scheme(
            "convolutions" if name in ("spatial", "dropblock") else "readers",
            functools.partial(_drop, name),
            # not align: it drops where SliceOut would slice, and that depends on the widths
            (*_UNITS, "norm", "fold", "seed"),
        )
        for name in DROPS
    },
}

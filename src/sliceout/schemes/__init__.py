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
from .samples import DroppedPath, Samples
from .subset import Subset


class Scheme(NamedTuple):
    """How :func:`sliceout.convert_` carries a scheme out."""

    place: str
    """Where it acts: in all ``layers`` of a group, in the ``readers`` of its units, in those that are ``convolutions``
    too (of feature maps), in residual ``blocks`` that are recognised, or in residual ``branches`` of any code."""
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


_NOT_UNITS = (*_UNITS, "fold", "attention", "stages", "paper_exclusions", "payoff")
_BRANCHES = (*_NOT_UNITS, "norm", "align")

SCHEMES: dict[str, Scheme] = {
    "sliceout": Scheme("layers", Slice, ("decay",)),
    "controlled": Scheme("layers", _subset, (*_UNITS, "decay")),
    "patch": Scheme("blocks", window, (*_NOT_UNITS, "decay")),
    "samples": Scheme("branches", Samples, _BRANCHES),
    "droppath": Scheme("branches", lambda rate, seed: DroppedPath(rate), (*_BRANCHES, "seed")),
    **{
        name: Scheme(
            "convolutions" if name in ("spatial", "dropblock") else "readers",
            functools.partial(_drop, name),
            # not align: it drops where SliceOut would slice, and that depends on the widths
            (*_UNITS, "norm", "fold", "seed", "decay"),
        )
        for name in DROPS
    },
}

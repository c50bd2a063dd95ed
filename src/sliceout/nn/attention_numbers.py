"""Attention layers whose numbers follow a slice: ``self.head_dim`` in a view, ``self.scale`` as softmax temperature.

Which numbers those are and how they depend on the width is for ``conversion.recipes.attention`` to say.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ..slices import Slice
from .foreign import Substituting, substitute_


class WidthPower(NamedTuple):
    """A number that is ``times * width**exponent``."""

    times: int = 1
    exponent: float = 1

    def at(self, width: int) -> float:
        return self.times * width**self.exponent


class AttentionNumbers(Substituting):
    """A module some of whose numbers follow a slice while it trains."""

    _kept_for_slices = (*Substituting._kept_for_slices, "_powers", "_numbers")
    _powers: dict[str, WidthPower]
    _numbers: dict[str, float]

    @property
    def _substitutes(self) -> dict[str, Any] | None:  # type: ignore[override]
        return self._numbers if self.training and self.axes["unit"].slice.sliced else None

    def widths_changed(self) -> None:
        super().widths_changed()
        width = self.axes["unit"].slice.width
        self._numbers = {name: power.at(width) for name, power in self._powers.items()}


def follow_width_(module: Any, s: Slice, powers: dict[str, WidthPower]) -> nn.Module:
    """Let these attributes of ``module`` follow the width of ``s`` while it is sliced, in place."""
    module._powers = powers
    substitute_(module, {"unit": s.axis()}, tuple(powers), AttentionNumbers)
    module.widths_changed()
    return module  # type: ignore[no-any-return]

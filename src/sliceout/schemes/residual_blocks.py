"""Residual blocks: where the shortcut leaves, what lies in the branch, what follows the sum.

A block is recognised by the names of its layers (``conv1``, ``bn1``, ``shortcut``...) and then by what it computes:
each form that fits the names is run beside the block's own code on random weights, and only one that gives the same
numbers is taken. So torchvision's and timm's ResNets, Wide ResNets and their many copies need no list of classes, and a
block that merely looks like one of them is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """How a residual block is put together."""

    convs: int
    norm: str
    """``bn`` or ``norm``: what the norms are called, before their number."""
    norm_first: bool
    """Norm and activation in front of each convolution (Wide ResNet), or behind it (ResNet)."""
    act: str | None
    """The activation: an attribute (``#`` stands for its number), ``relu()`` the function, or ``None``: in the norm."""
    shortcut: str | None
    """The attribute that projects the shortcut, if the class has one."""
    activated: bool
    """Whether the shortcut projects what the first norm and activation have made of the input."""

    def enter(self, block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the branch reads and what the shortcut is."""
        y = self._act(block, 1, self._norm(block, 1, x)) if self.norm_first else x
        project = getattr(block, self.shortcut, None) if self.shortcut else None
        return y, x if project is None else project(y if self.activated else x)

    def branch(self, block: Any, y: Tensor) -> Tensor:
        """From the input of the first convolution to the sum. Dropouts rest; stochastic depth does not."""
        for i in range(1, self.convs + 1):
            y = getattr(block, f"conv{i}")(y)
            if self.norm_first and i < self.convs:
                y = self._act(block, i + 1, self._norm(block, i + 1, y))
            if not self.norm_first:
                y = self._norm(block, i, y)
                y = self._act(block, i, y) if i < self.convs else y
        for name in ("se", "drop_path"):
            layer = getattr(block, name, None)
            y = y if layer is None else layer(y)
        return y

    def leave(self, block: Any, y: Tensor) -> Tensor:
        """What follows the sum."""
        return y if self.norm_first else self._act(block, self.convs, y)

    def __call__(self, block: Any, x: Tensor) -> Tensor:
        y, shortcut = self.enter(block, x)
        return self.leave(block, shortcut + self.branch(block, y))

    def _norm(self, block: Any, i: int, x: Tensor) -> Tensor:
        return getattr(block, f"{self.norm}{i}")(x)

    def _act(self, block: Any, i: int, x: Tensor) -> Tensor:
        if self.act is None:
            return x
        return F.relu(x) if self.act == "relu()" else getattr(block, self.act.replace("#", str(i)))(x)

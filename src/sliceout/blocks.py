"""Residual blocks: where the shortcut leaves, what lies in the branch, what follows the sum.

A block is recognised by the names of its layers (``conv1``, ``bn1``, ``shortcut``...) and then by what it computes:
each form that fits the names is run beside the block's own code on random weights, and only one that gives the same
numbers is taken. So torchvision's and timm's ResNets, Wide ResNets and their many copies need no list of classes, and a
block that merely looks like one of them is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trace import meta_copy


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


def looks_residual(block: nn.Module) -> bool:
    return next(_forms(block), None) is not None


def _forms(block: Any) -> Iterator[Form]:
    """Every form whose layers the block has."""
    convs = 3 if isinstance(getattr(block, "conv3", None), nn.Conv2d) else 2
    if not all(isinstance(getattr(block, f"conv{i}", None), nn.Conv2d) for i in range(1, convs + 1)):
        return
    norms = [n for n in ("bn", "norm") if all(hasattr(block, f"{n}{i}") for i in range(1, convs + 1))]
    named = [a for a in ("relu", "act", "act#", "activation") if hasattr(block, a.replace("#", "1"))]
    shortcuts: list[Any] = [s for s in ("shortcut", "downsample") if hasattr(block, s)] or [None]
    for norm, first, act, shortcut, activated in product(
        norms, (True, False), [*named, "relu()", None], shortcuts, (True, False)
    ):
        if first or not activated:
            yield Form(convs, norm, first, act, shortcut, activated)


def recognise(block: Any) -> Form | None:
    """The form that computes what the block computes, or ``None``. The block itself is not run."""
    twin = _random_twin(block)
    random = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, block.conv1.in_channels, 8, 8, generator=random, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        try:
            expected = twin(x.clone())
        except Exception:
            return None
        for form in _forms(block):
            try:
                got = form(twin, x.clone())
            except Exception:
                continue
            if got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-9, atol=1e-9):
                return form
    return None


def _random_twin(block: nn.Module) -> nn.Module:
    """A copy in float64 and ``eval()`` whose numbers tell apart all that could be confused."""
    twin = meta_copy(block).to_empty(device="cpu").double().eval()
    random = torch.Generator("cpu").manual_seed(1)
    for p in twin.parameters():
        p.data.normal_(0, 1 / math.sqrt(max(p[0].numel(), 1)), generator=random)
    for name, b in twin.named_buffers():
        if b.is_floating_point():
            b.uniform_(0.5, 1.5, generator=random) if "var" in name else b.normal_(0, 0.5, generator=random)
    return twin

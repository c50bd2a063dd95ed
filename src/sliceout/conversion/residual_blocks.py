"""Recognising residual blocks: by the names of their layers, and then by what they compute.

Each form that fits the names (``conv1``, ``bn1``, ``shortcut``...) is run beside the block's own code on random
weights, and only one that gives the same numbers is taken. So torchvision's and timm's ResNets, Wide ResNets and their
many copies need no list of classes, and a block that merely looks like one of them is left alone.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..schemes.patch import Form
from .trace import meta_copy

log = logging.getLogger(__name__)


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
    expected = _output(block, twin, x)
    for form in _forms(block) if expected is not None else ():
        got = _output(block, functools.partial(form, twin), x)
        if got is not None and got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-9, atol=1e-9):
            log.debug("%s is %s", type(block).__name__, form)
            return form
    return None


def _output(block: nn.Module, function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """What the layers of ``block`` make of ``x`` in this way; ``None`` if they fail: it is somebody else's code."""
    try:
        with torch.no_grad():
            return function(x.clone())
    except Exception:
        log.debug("%s cannot be run as a residual block", type(block).__name__, exc_info=True)
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

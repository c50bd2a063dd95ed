"""The networks of the paper, plain: SliceOut is added to them by ``convert_``. :func:`build` makes one by name."""

from __future__ import annotations

import difflib
import re
from typing import Any

from torch import nn

from .efficientnet import efficientnet, efficientnet_lite
from .mlp import mlp
from .transformer import TransformerLM, gpt
from .wide_resnet import WideResNet

__all__ = ["NAMES", "TransformerLM", "WideResNet", "build", "efficientnet", "efficientnet_lite", "gpt", "mlp"]

NAMES = (
    "mlp", "wrn-28-6", "wrn-34-8", "wrn-40-10", "wrn-46-12", "wrn-52-14",
    "efficientnet-b0", "efficientnet-b1", "efficientnet-b2", "efficientnet-b3", "efficientnet-lite0",
    "lm-1024", "lm-2048", "gpt-8-512",
)  # fmt: skip
"""The paper's networks, and a GPT of our own. ``wrn-<depth>-<width>``, ``efficientnet-b<n>``, ``lm-<width>`` and
``gpt-<layers>-<width>`` work for other sizes too."""


def build(name: str, **settings: Any) -> nn.Module:
    """One of the paper's networks.

    Args:
        name: see ``NAMES``.
        settings: what its class or function takes: ``dropout``, ``classes``, ``keep``...

    Example:
        >>> build("wrn-28-10", dropout=0.3).head.in_features
        640
    """
    if name == "mlp":
        return mlp(**{"widths": (784, 2048, 2048, 2048, 10), **settings})
    if name == "efficientnet-lite0":
        return efficientnet_lite(**settings)
    if found := re.fullmatch(r"wrn-(\d+)-(\d+)", name):
        return WideResNet(int(found[1]), int(found[2]), **settings)
    if found := re.fullmatch(r"efficientnet-(b\d+)", name):
        return efficientnet(found[1], **settings)
    if found := re.fullmatch(r"gpt-(\d+)-(\d+)", name):
        return gpt(int(found[1]), int(found[2]), **settings)
    if found := re.fullmatch(r"lm-(\d+)", name):
        return TransformerLM(int(found[1]), **settings)
    close = difflib.get_close_matches(name, NAMES, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(
        f"no network is called {name!r}{hint}: there are {', '.join(NAMES)}, "
        "and other depths and widths of the same families"
    )

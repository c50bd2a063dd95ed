"""Inverted bottlenecks (EfficientNet, MobileNet): expand, depthwise, squeeze-excite and project share one slice."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

from ..groups import Group
from ..reasons import Skip


def arrange(model: nn.Module, groups: list[Group], stages: int | None) -> None:
    """Slice the expanded channels only, as the paper does, and only in the first ``stages`` stages.

    A stage is a run of blocks that project to the same number of channels: what the papers of these networks call one,
    however the model numbers its blocks.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    free = [g for g in groups if g.kind in ("conv", "mbconv") and g.reason is None and not g.reads_input]
    if not any(g.kind == "mbconv" for g in free):
        return
    expanded = [g for g in free if g.kind == "mbconv" or _expands(g, modules)]
    for group in expanded:
        group.kind = "mbconv"
    for group in groups:
        if group.kind in ("conv", "mbconv") and group not in expanded:
            outside = Skip.NOT_EXPANDED("outside the expanded channels of the inverted bottlenecks")
            group.reason = group.reason or outside
    if stages is None:
        return
    # the last layer that reads a block's expanded channels is its projection
    runs = itertools.groupby(expanded, key=lambda g: modules[g.names("in")[-1]].out_channels)
    first = [g for _, run in itertools.islice(runs, stages) for g in run]
    for group in groups:
        if group not in first:
            group.reason = group.reason or Skip.STAGES(f"not in the first {stages} stages")


def _expands(group: Group, modules: dict[str, Any]) -> bool:
    """Fused blocks (EfficientNetV2) have no depthwise convolution: a wide middle between two narrow ends tells them."""
    writers, readers = ([modules[n] for n in group.names(role)] for role in ("out", "in"))
    if not all(hasattr(m, "in_channels") for m in (*writers, *readers)):
        return False
    return all(m.in_channels < m.out_channels for m in writers) and all(m.out_channels < m.in_channels for m in readers)

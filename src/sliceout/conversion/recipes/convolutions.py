"""Convolutional networks: inverted bottlenecks (EfficientNet, MobileNet), whose expansion, depthwise convolution,
squeeze-excite and projection share one slice, and residual blocks (Wide ResNet, ResNet and the like).
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

from ..groups import Group
from ..reasons import Skip


def inverted_bottlenecks(model: nn.Module, groups: list[Group], stages: int | None) -> None:
    """Slice the expanded channels only, as the paper does, and only in the first ``stages`` stages.

    A stage is a run of blocks that project to the same number of channels: what the papers of these networks call one,
    however the model numbers its blocks.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    free = [g for g in groups if g.kind in ("conv", "mbconv") and g.reason is None and not g.reads_input]
    if not any(g.kind == "mbconv" for g in free):
        if stages is not None:
            raise ValueError(
                f"stages={stages}: it counts stages of inverted bottlenecks (expansion, depthwise convolution, "
                f"projection), and no such block of {type(model).__name__} can be sliced. Leave stages out, or choose "
                "layers with filter="
            )
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


def residual_blocks(groups: list[Group], paper_exclusions: bool) -> None:
    """Label the groups inside residual blocks, leave alone the stem, apply the paper's exclusions.

    The paper turns SliceOut off in the first residual block of the network and in the last block of each stage.
    """
    streams = [g for g in groups if g.reason is not None and g.reason.code is Skip.RESIDUAL]
    written = {name for g in streams for name in g.names("out")}
    outside = [g for g in groups if g.kind == "conv"]
    inside: list[Group] = []
    while found := [g for g in outside if not g.reads_input and written & set(g.names("in"))]:
        inside += found  # their consumers write into the stream, or into a group that does
        written |= {name for g in found for name in g.names("out")}
        outside = [g for g in outside if g not in found]
    if not inside:
        return
    for group in inside:
        group.kind = "residual"
    place = {g: i for i, g in enumerate(groups)}
    first = min(place[g] for g in streams)
    stem = _chain_from_input([*inside, *outside])
    for group in (*inside, *outside):
        if group.reads_input or (place[group] < first and (group in outside or group in stem)):
            group.reason = group.reason or Skip.STEM("in front of the residual blocks: the stem stays whole")
    if paper_exclusions:
        _exclude(sorted(inside, key=place.__getitem__))


def _chain_from_input(groups: list[Group]) -> list[Group]:
    """What reads the input, and what is read by one layer after the other behind it, up to the first fork.

    The fork is where the first block begins: one whose shortcut is projected writes a stream of its own, so that it
    lies in front of the first stream as a stem does.
    """
    chain = [g for g in groups if g.reads_input]
    for link in chain:  # which grows meanwhile
        readers = set(link.names("in"))
        chain += [g for g in groups if g not in chain and len(readers) == 1 and readers <= set(g.names("out"))]
    return chain


def _exclude(inside: list[Group]) -> None:
    blocks = list(dict.fromkeys(_block(g) for g in inside))
    last = {b.rpartition(".")[0]: b for b in blocks}
    for group in inside:
        which = "first residual block" if _block(group) == blocks[0] else "last residual block of its stage"
        if _block(group) in (blocks[0], *last.values()):
            group.reason = group.reason or Skip.PAPER_EXCLUSIONS(f"{which} (paper_exclusions)")


def _block(group: Group) -> str:
    """The path of the block, up to its number: ``groups.0.3`` of ``groups.0.3.conv1``."""
    path = group.name.split(".")
    numbers = [i for i, part in enumerate(path) if part.isdigit()]
    return ".".join(path[: numbers[-1] + 1]) if numbers else ".".join(path[:-1])

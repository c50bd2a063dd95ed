"""Residual blocks (Wide ResNet, ResNet, and their kin): the channels between two points of the residual stream."""

from __future__ import annotations

from ..groups import RESIDUAL, Group


def arrange(groups: list[Group], paper_exclusions: bool) -> None:
    """Label groups whose consumers write into a residual stream; apply the paper's exclusions to them.

    The paper turns SliceOut off in the first residual block of the network and in the last block of each stage.
    """
    stream = {name for g in groups if g.reason == RESIDUAL for name in g.names("out")}
    inside = [g for g in groups if g.family == "conv" and stream & set(g.names("in"))]
    for group in inside:
        group.family = "residual"
    if not paper_exclusions:
        return
    blocks = list(dict.fromkeys(_block(g) for g in inside))
    stage_of = {b: b.rpartition(".")[0] for b in blocks}
    last = {stage: block for block, stage in stage_of.items()}
    for group in inside:
        if _block(group) == blocks[0]:
            group.reason = group.reason or "first residual block (paper_exclusions)"
        elif _block(group) in last.values():
            group.reason = group.reason or "last residual block of its stage (paper_exclusions)"


def _block(group: Group) -> str:
    """The path of the block, up to its number: ``groups.0.3`` of ``groups.0.3.conv1``."""
    path = group.name.split(".")
    numbers = [i for i, part in enumerate(path) if part.isdigit()]
    return ".".join(path[: numbers[-1] + 1]) if numbers else ".".join(path[:-1])

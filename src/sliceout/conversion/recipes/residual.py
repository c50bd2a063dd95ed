"""Residual blocks (Wide ResNet, ResNet and the like): the channels between two points of the residual stream."""

from __future__ import annotations

from ..groups import Group
from ..reasons import Skip


def arrange(groups: list[Group], paper_exclusions: bool) -> None:
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

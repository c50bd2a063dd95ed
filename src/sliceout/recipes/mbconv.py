"""Inverted bottlenecks (EfficientNet, MobileNet): expand, depthwise, squeeze-excite and project share one slice."""

from __future__ import annotations

from ..groups import Group


def arrange(groups: list[Group], stages: int | None) -> None:
    """Keep the first ``stages`` stages only; a stage is what the model's own numbering calls one."""
    if stages is None:
        return
    if stages < 1:
        raise ValueError(f"stages={stages}: expected at least 1, or None for all")
    mine = [g for g in groups if g.family == "mbconv"]
    order = list(dict.fromkeys(_stage(g) for g in mine))
    for group in groups:
        if group not in mine or _stage(group) not in order[:stages]:
            group.reason = group.reason or f"not in the first {stages} stages"


def _stage(group: Group) -> str:
    path = group.name.split(".")
    number = next((i for i, part in enumerate(path) if part.isdigit()), len(path) - 1)
    return ".".join(path[: number + 1])

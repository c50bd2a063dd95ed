"""A model's own dropout: which of it lies inside a group and rests, and what is said about the rest.

Layers (``nn.Dropout``) inside a sliced group rest while SliceOut is on, and give it their rate if none was asked for.
``F.dropout`` is code: it goes on, and nobody knows its rate.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from .groups import Group
from .reasons import Skip
from .report import Row, pattern
from .trace import Trace, expand

LAYERS = nn.modules.dropout._DropoutNd


def note(modules: dict[str, nn.Module], groups: list[Group], trace: Trace) -> None:
    """Note on each group where dropout is computed that no layer of its own can let rest."""
    for here, dims in trace.drops:
        if isinstance(modules[here], LAYERS):
            continue
        dropped = {atom for dim in dims for atom in expand(dim)}
        for group in groups:
            attends = group.kind == "attention" and here in (group.name, group.name.rpartition(".")[0])
            if (attends or dropped & set(expand(group.units))) and here not in group.drops:
                group.drops.append(here)


def warn(rows: Iterable[Row]) -> None:
    """Warn once of ``F.dropout`` inside sliced groups. That of attention drops from no units: the report names it."""
    found = dict.fromkeys(pattern(f"{r.name}: {r.dropout}") for r in rows if r.dropout and r.group.kind != "attention")
    if found:
        warnings.warn(f"sliceout: dropout goes on inside sliced groups: {'; '.join(list(found)[:4])}", stacklevel=4)


def looked_at(modules: dict[str, Any], groups: list[Group], trace: Trace) -> str:
    """Which dropout layers there are, and why none of them gives a group its rate: for ``rate=None``."""
    inside = {name: group for group in groups for name in group.dropouts}
    kinds: dict[str, str] = {}
    for name, module in modules.items():
        if isinstance(module, LAYERS):
            kinds.setdefault(pattern(name), _why_not(name, module.p, inside.get(name), trace))
    if not kinds:
        return "it has no nn.Dropout whose rate could be taken over: pass rate=, such as rate=0.1"
    found = "; ".join(f"{name}: {why}" for name, why in list(kinds.items())[:8])
    return f"looked at its nn.Dropout layers, and none gives a group its rate ({found}): pass rate=, such as rate=0.1"


def _why_not(name: str, p: float, group: Group | None, trace: Trace) -> str:
    if p == 0:
        return "its p is 0"
    if name not in trace.calls:
        return "not called in the dry run"
    reasons = [a.blocked for dim in trace.last_input(name) for a in expand(dim) if a.blocked is not None]
    reasons = [r for r in reasons if r.code not in (Skip.INPUT, Skip.POSITION)]
    reasons = reasons if group is None or group.reason is None else [group.reason]
    return f"drops from units that stay whole: {reasons[0]}" if reasons else "drops from no units that lie in a group"

"""May each part of the batch have a slice of its own? Only where the trace proves that dimension 0 is the batch.

Every layer of a group must see the samples along dimension 0, and alike: as ``[batch, time, units]`` or flattened to
``[batch * time, units]``, but not time first. Between these layers no code may mix what lies along it: a softmax over
the tokens of ``[batch * time, units]`` would let units meet that belong to different parts.
"""

from __future__ import annotations

from torch import nn

from ..nn.factory import sliced_class
from ..nn.foreign import ForeignLayer
from .groups import Group
from .reasons import Skip
from .trace import Atom, Dim, Trace, expand


def require_one_part(model: nn.Module, groups: list[Group], trace: Trace) -> None:
    """Give the groups whose units must be the same for the whole batch the reason why: ``Group.one_part``."""
    modules = dict(model.named_modules())
    mixes = [(_atoms(dims), _atoms(over)) for dims, over in trace.mixes]
    attends = _atoms(trace.attends)
    for group in groups:
        if group.reason is None:
            why = _fixed_layer(modules, group)
            if why is None:
                rows = [rows for m in group.members for rows in _rows(modules[m.module], trace.calls.get(m.module, []))]
                why = _not_samples(rows, trace, attends) or _mixed(group, rows[0], mixes)
            group.one_part = None if why is None else Skip.ONE_PART(why)


def _atoms(dims: list[Dim]) -> set[Atom]:
    return {atom for dim in dims for atom in expand(dim)}


def _fixed_layer(modules: dict[str, nn.Module], group: Group) -> str | None:
    """The layer that has one weight for the whole batch."""
    for m in group.members:
        module = modules[m.module]
        form = type(module) is not nn.MultiheadAttention and (sliced_class(type(module)) or ForeignLayer)
        if form and form.one_part:  # type: ignore[union-attr]
            return f"{type(module).__name__}: {form.one_part}"  # type: ignore[union-attr]
    return None


def _rows(module: nn.Module, calls: list[tuple[list[Dim], list[Dim]]]) -> list[Dim]:
    """What lies along the batch dimension of a layer's input, in each of its calls; nothing where that is not known."""
    dim = int(isinstance(module, nn.MultiheadAttention) and not module.batch_first)
    return [expand(read[dim]) if len(read) > 1 else [] for read, _ in calls] or [[]]


def _not_samples(rows: list[Dim], trace: Trace, attends: set[Atom]) -> str | None:
    batch = expand(trace.batch)
    if not batch:
        return "the example input has a single sample: give example_inputs with two or more"
    if attends & set(batch):
        return "attention runs along dimension 0 of the input, so that it is not the batch"
    if any(row[: len(batch)] != batch for row in rows):
        return "not all of its layers see the batch in dimension 0"
    if any(row != rows[0] for row in rows):
        return "its layers see the batch flattened in different ways"
    return None


def _mixed(group: Group, rows: Dim, mixes: list[tuple[set[Atom], set[Atom]]]) -> str | None:
    units, along = _atoms([group.units]), set(rows)
    if any(units & carried and along & over for carried, over in mixes):
        return "what lies along dimension 0 is mixed while these units are sliced"
    return None

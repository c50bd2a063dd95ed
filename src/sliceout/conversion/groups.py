"""From a trace to groups: which layers share units, in which role, and why some cannot be sliced."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..nn.factory import sliced_class
from ..nn.foreign import is_unitwise, mixing_base
from ..nn.mixing import Conv, Mixing
from .reasons import CONFLICT, Reason, Skip
from .trace import Atom, Dim, Trace, block, expand, identify

CONVS = nn.modules.conv._ConvNd
_Use = tuple[str, Dim, str | Reason]
"""The name of a parameter, one of its dimensions and what that is to the layer; see :func:`_role`."""


@dataclass(frozen=True)
class Member:
    """A layer and how the group's units lie along one of its dimensions (see ``Axis``)."""

    module: str
    role: str
    blocks: int
    inner: int
    dim: int = 1
    """Dimension of the layer's input along which the units lie (set for foreign layers only)."""
    offset: int = 0
    """Where the units begin along the layer's dimension: not 0 for a part of a fused projection."""


@dataclass(eq=False)
class Group:
    """Units that are sliced together: written by some layers, read by others, treated one by one in between."""

    name: str
    size: int
    members: list[Member]
    dropouts: list[str] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    """Modules without parameters that the units go through: activation functions, pooling."""
    contracted: list[str] = field(default_factory=list)
    batched: list[str] = field(default_factory=list)
    kind: str = "mlp"
    reads_input: bool = False
    """Whether a producer reads the input of the model: a stem."""
    reason: Reason | None = None
    """Why it was skipped; ``None`` if it can be sliced."""
    partner: Group | None = None
    """The other part of a fused projection: both are sliced or neither."""
    units: Dim = field(default_factory=list)
    """What the trace calls them."""
    drops: list[str] = field(default_factory=list)
    """Modules whose own code drops from these units (``F.dropout``), or from the attention over them: that goes on."""
    one_part: Reason | None = None
    """Why the whole batch shares one slice though parts were asked for."""

    def names(self, role: str) -> list[str]:
        return [m.module for m in self.members if m.role == role]


def find_groups(model: nn.Module, trace: Trace) -> list[Group]:
    """All groups of the model in the order of their layers, with a reason on those that cannot be sliced."""
    modules = dict(model.named_modules())
    uses = [
        (name, dim, _role(modules, name, i, trace))
        for name, dims in trace.uses.items()
        if _layer(name) in trace.calls
        for i, dim in enumerate(dims)
    ]
    _block_layers(model, uses)
    _block_residual_streams(trace)
    found = _collect(modules, uses, trace)
    for atom, group in list(found.items()):
        fused = _split_fused(modules, group, atom, trace)
        if fused is not None:
            found[atom], found[Atom(atom.size)] = fused
    written = [g for g in found.values() if g.names("out")]
    known = {name for g in written if g.names("in") or g.contracted for name in g.names("out")}
    groups = [
        g for g in written if g.names("in") or g.contracted
        # layers that could write units, were it not for what becomes of those
        or (g.reason is not None and g.reason.code is not Skip.OUTPUT and not known & {*g.names("out"), ""})
    ]  # fmt: skip
    stems = {
        _layer(name) for name, dim, role in uses
        if role == "in" and any(a.blocked and a.blocked.code is Skip.INPUT for a in expand(dim))
    }  # fmt: skip
    for group in groups:
        group.name = group.names("out")[0]
        group.kind = _kind(modules, group)
        group.reads_input = bool(stems & set(group.names("out")))
        if group.reason is None and all(".lora_A." in f".{name}" for name in group.names("out")):
            group.reason = Skip.ADAPTER("the rank of a LoRA adapter, which is small on purpose")
        if group.reason is None and len({(m.module, m.role) for m in group.members}) < len(group.members):
            group.reason = Skip.REPEATED("the same units lie twice along one dimension")
    return groups


def _layer(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _block_layers(model: nn.Module, uses: list[_Use]) -> None:
    """Block the units of parameters that cannot be sliced, and mark those that some layer writes."""
    seen: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        if first != name:
            shared[first], shared[name] = name, first
    for name, dim, role in uses:
        if name in shared:
            block([dim], Skip.SHARED(f"{name} is shared with {shared[name]}"))
        elif isinstance(role, Reason):
            block([dim], role)
        elif role == "out":
            for atom in expand(dim):
                atom.produced = True


def _block_residual_streams(trace: Trace) -> None:
    """Adding to a branch what was computed from it makes a residual stream; branches side by side just share units."""
    for a, b, nested in trace.adds:
        a, b = expand(a), expand(b)
        if nested and a != b and any(x.produced for x in a) and any(x.produced for x in b):
            for atom in (*a, *b):  # says more than what else may be in the way
                atom.blocked = Skip.RESIDUAL("shared by a residual stream")
        identify(a, b)


def _collect(modules: dict[str, nn.Module], uses: list[_Use], trace: Trace) -> dict[Atom, Group]:
    """One group for each run of units: the layers that hold it, and what it passes through between them."""
    found: dict[Atom, Group] = {}
    for name, dim, role in uses:
        if isinstance(role, Reason) or role == "kernel":
            continue
        layer, flat = _layer(name), expand(dim)
        for i, atom in enumerate(flat):
            group = found.setdefault(atom, Group(layer, atom.size, [], reason=atom.blocked, units=[atom]))
            group.contracted = list(dict.fromkeys(atom.contracted))
            group.batched = list(dict.fromkeys(atom.batched))
            before, after = math.prod(a.size for a in flat[:i]), math.prod(a.size for a in flat[i + 1 :])
            inputs = trace.last_input(layer)
            input_dim = next((d for d, units in enumerate(inputs) if atom in expand(units)), 1)  # 1: of channels
            members = _members(modules[layer], name, role, before, atom.size, after, input_dim)
            group.members += [m for m in members if m not in group.members]
            group.reason = group.reason or _channel_groups(modules[layer], members[-1], atom.size)
    for name, calls in trace.calls.items():
        if isinstance(modules[name], nn.modules.dropout._DropoutNd):
            for atom in {a for read, _ in calls for dim in read for a in expand(dim)} & found.keys():
                found[atom].dropouts.append(name)
        if next(modules[name].parameters(), None) is None and next(modules[name].children(), None) is None:
            for atom in {a for dim in trace.last_input(name) for a in expand(dim)} & found.keys():
                found[atom].passes.append(name)
    return found


def _split_fused(modules: dict[str, nn.Module], group: Group, atom: Atom, trace: Trace) -> tuple[Group, Group] | None:
    """Split a fused ``[q, k, v] x heads x dims`` projection in two: queries with keys, and values with their reader."""
    if not group.contracted or len(group.names("out")) != 1 or len(group.names("in")) != 1 or group.reason:
        return None
    wide, narrow = (next(m for m in group.members if m.role == role) for role in ("out", "in"))
    if not all(f"{m.module}.weight" in trace.uses for m in (wide, narrow)):
        return None
    rows, cols = (expand(trace.uses[f"{m.module}.weight"][_weight_dim(modules, m)]) for m in (wide, narrow))
    if rows[0].size != 3 or rows[1:] != cols:
        return None
    heads, length = narrow.blocks, wide.blocks // 3 * atom.size * wide.inner
    queries = replace(group, members=[replace(wide, blocks=2 * heads)])
    values = replace(group, members=[replace(wide, blocks=heads, offset=2 * length), narrow], contracted=[], batched=[])
    queries.partner, values.partner = values, queries
    return queries, values


def whole_layers(modules: dict[str, nn.Module], trace: Trace) -> list[Group]:
    """Layers that no group can hold, each with its share of the FLOPs: recurrent ones, and experts in one parameter."""
    found, flops = [], trace.cost.flops
    for name, module in modules.items():
        kind = "recurrent"
        if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            fused = (p.dim() == 3 and p.shape[0] > 1 for p in module.parameters(recurse=False))
            kind = "fused experts" if flops[name] and not isinstance(module, CONVS) and any(fused) else ""
        if kind and name in trace.calls:
            share = f"{100 * flops[name] / max(flops.total(), 1):.1f} % of the FLOPs"
            why = f"{type(module).__name__} ({kind}) has no sliced form: {share}"
            found.append(Group(name, 0, [], reason=Skip.NO_SLICED_FORM(why)))
    return found


def skip_partners(groups: list[Group]) -> None:
    """Skip the partners of skipped groups."""
    for group in groups:
        if group.reason is None and group.partner is not None:
            group.reason = group.partner.reason


def skip_conflicts(groups: list[Group]) -> None:
    """Where two groups want the same dimension of a layer (heads and their dims, say), keep the larger one."""
    skip_partners(groups)
    taken: dict[tuple[str, str, int], Group] = {}
    for group in sorted((g for g in groups if g.reason is None), key=lambda g: -g.size):
        dims = [(m.module, m.role, m.offset) for m in group.members]
        other = next((taken[dim] for dim in dims if dim in taken), None)
        if other is not None:
            group.reason = Skip.CONFLICT(f"{CONFLICT} ({other.size} units of {other.name})")
        else:
            taken.update(dict.fromkeys(dims, group))
    skip_partners(groups)


def _sliced_form(module: nn.Module) -> Any:
    """The sliced class whose roles a layer has; ``None`` if it has none or treats units one by one."""
    return sliced_class(type(module)) or mixing_base(type(module))


def _weight_dim(modules: dict[str, nn.Module], member: Member) -> int:
    """The dimension of the layer's weight along which the units lie."""
    return int((member.role == "in") != _sliced_form(modules[member.module]).transposed)


def _role(modules: dict[str, nn.Module], name: str, dim: int, trace: Trace) -> str | Reason:
    """What a dimension of a parameter is to its layer, or why the layer cannot be sliced."""
    layer, _, key = name.rpartition(".")
    module = modules[layer]
    kind, held = type(module).__name__, module._parameters.get(key)
    if held is not None and (type(held) is not nn.Parameter or not held.is_floating_point()):
        stored = f"{type(held).__name__} of {held.dtype}"
        return Skip.QUANTISED(f"{name} is stored as {stored}, as quantised weights are")
    made = _sliced_form(module)
    if made is None or not issubclass(made, Mixing):
        has_layers = any(p is not None for child in module.children() for p in child.parameters())
        if dim < 2 and (made is not None or (is_unitwise(module) and not has_layers)):
            return "unit"
    elif key == "bias":
        return "out"
    elif key == "weight" and (sliced_class(type(module)) is not None or name in trace.direct):
        return "kernel" if dim > 1 else ("in", "out")[dim if made.transposed else 1 - dim]
    if mixing_base(type(module)) is not None:
        return Skip.NO_SLICED_FORM(f"{kind} computes its weight from {name}")
    return Skip.NO_SLICED_FORM(f"{name} belongs to {kind}, which has no sliced form")


def _has_groups(module: Any) -> bool:
    form = _sliced_form(module)
    return form is not None and issubclass(form, Conv) and bool(module.groups > 1)


def _members(module: Any, parameter: str, role: str, before: int, size: int, after: int, dim: int) -> list[Member]:
    """The members that a parameter dimension ``[before, size, after]`` stands for."""
    layer, _, key = parameter.rpartition(".")
    if not _has_groups(module):
        return [Member(layer, role, before, after, dim if role == "unit" and _sliced_form(module) is None else 1)]
    if key == "weight" and role == ("out" if _sliced_form(module).transposed else "in"):
        before *= module.groups  # every group has these columns
    elif before * size <= module.groups:  # whole groups: the units pass through
        channels = {"in": module.in_channels, "out": module.out_channels}
        return [Member(layer, r, before, n // (before * size)) for r, n in channels.items()]
    return [Member(layer, role, before, after)]


def _channel_groups(module: Any, member: Member, size: int) -> Reason | None:
    """Why the groups of a convolution do not fit the units; ``None`` if they do: whole groups, or inside every one."""
    if not _has_groups(module) or module.groups in (member.blocks, member.blocks * size):
        return None
    how = "finer than" if member.blocks * size < module.groups else "that lie across"
    return Skip.CHANNEL_GROUPS(f"{member.module} has groups of channels {how} these units")


def _kind(modules: dict[str, nn.Module], group: Group) -> str:
    if group.contracted or group.batched:
        return "attention"
    convs: list[Any] = [modules[n] for n in group.names("in") + group.names("out") if isinstance(modules[n], CONVS)]
    if any(c.groups > 1 and c.groups == c.in_channels for c in convs):
        return "mbconv"
    return "conv" if convs else "mlp"


def misaligned(model: nn.Module, group: Group, width: int, trace: Trace) -> Reason | None:
    """Judge the trace of a sliced copy: why the kept units of a group do not meet, or ``None`` if they do.

    Every layer of the group must have taken its part, and the parts must have been identified with each other, unit by
    unit, by the code in between.
    """
    modules = dict(model.named_modules())
    seen: dict[Atom, str] = {}
    for m in group.members:
        form = _sliced_form(modules[m.module])
        if form is None or not issubclass(form, Mixing):
            continue
        dim = _weight_dim(modules, m)
        inside_groups = dim == 1 and _has_groups(modules[m.module])
        if inside_groups and any(o.module == m.module and o.role != m.role for o in group.members):
            continue  # whole groups: the rows stand for both
        taken = trace.takes.get((f"{m.module}.weight", dim, m.offset))
        if taken is None:
            return Skip.MISALIGNED(f"{m.module} is not given sliced units: the code around it fixes their number")
        blocks, at = 1 if inside_groups else m.blocks, 1
        for atom in expand(taken):
            if at == blocks and atom.size == width:
                seen[atom] = m.module
                break
            at *= atom.size
        else:
            return Skip.MISALIGNED(f"the code around {m.module} reshapes the kept units by a fixed number")
    if len(seen) > 1:
        return Skip.MISALIGNED(f"the kept units of {' and '.join(list(seen.values())[:2])} do not meet")
    return None

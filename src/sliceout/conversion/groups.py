"""From a trace to groups: which layers share units, in which role, and why some cannot be sliced."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..nn.factory import sliced_class
from ..nn.foreign import is_unitwise, mixing_base
from ..nn.mixing import _Conv, _Mixing
from .trace import INPUT, Atom, Dim, Trace, Use, block, expand, identify

RESIDUAL = "shared by a residual stream"
OUTPUT = "an output of the model"
RIVAL = "another way to slice the same layers was chosen"


@dataclass(frozen=True)
class Member:
    """A layer and how the group's units lie along one of its dimensions (see ``Axis``)."""

    module: str
    role: str
    blocks: int
    inner: int
    dim: int = 1
    """Dimension of the layer's input along which the units lie (told only for layers that borrow)."""
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
    reason: str | None = None
    """Why it was skipped; ``None`` if it can be sliced."""
    partner: Group | None = None
    """The other part of a fused projection: both are sliced or neither."""

    def names(self, role: str) -> list[str]:
        return [m.module for m in self.members if m.role == role]


def find_groups(model: nn.Module, trace: Trace) -> list[Group]:
    """All groups of the model in the order of their layers, with a reason on those that cannot be sliced."""
    modules = dict(model.named_modules())
    shared = _shared_parameters(model)
    for use in trace.uses:
        if use.module not in trace.calls and use.module:
            continue
        for dim, atoms in enumerate(use.dims):
            role = _role(modules[use.module], use, dim, trace)
            if use.name in shared:
                block([atoms], f"{use.name} is shared with {shared[use.name]}")
            elif role is None:
                block([atoms], _no_form(modules[use.module], use))
            elif role == "out":
                for atom in expand(atoms):
                    atom.produced = True
    _judge_adds(trace)

    found: dict[Atom, Group] = {}
    stems: set[str] = set()
    for use in trace.uses:
        if use.module not in trace.calls:
            continue
        for dim, atoms in enumerate(use.dims):
            role = _role(modules[use.module], use, dim, trace)
            if role is None:
                continue
            flat = expand(atoms)
            for i, atom in enumerate(flat):
                group = found.setdefault(atom, Group(use.module, atom.size, [], reason=atom.blocked))
                group.contracted = list(dict.fromkeys(atom.contracted))
                group.batched = list(dict.fromkeys(atom.batched))
                before, after = math.prod(a.size for a in flat[:i]), math.prod(a.size for a in flat[i + 1 :])
                if role == "out" and 1 < before * atom.size < getattr(modules[use.module], "groups", 1):
                    group.reason = group.reason or f"{use.module} has groups of channels finer than these units"
                where = _dim_of(atom, trace.inputs.get(use.module, []))
                for member in _members(modules[use.module], use.module, role, before, atom.size, after, where):
                    if member not in group.members:
                        group.members.append(member)
    for name, dims in trace.dropouts.items():
        for atom in expand([a for dim in dims for a in dim]):
            if atom in found and name not in found[atom].dropouts:
                found[atom].dropouts.append(name)
    for name, dims in trace.inputs.items():
        if next(modules[name].parameters(), None) is None and next(modules[name].children(), None) is None:
            for atom in {a for dim in dims for a in expand(dim)} & found.keys():
                found[atom].passes.append(name)
    for use in trace.uses:
        if use.module in trace.calls:
            for dim, atoms in enumerate(use.dims):
                reads = _role(modules[use.module], use, dim, trace) == "in"
                if reads and any(a.blocked == INPUT for a in expand(atoms)):
                    stems.add(use.module)
    for atom, group in list(found.items()):
        fused = _fused(modules, group, atom, trace)
        if fused is not None:
            found[atom], found[Atom(atom.size)] = fused
    groups = [g for g in found.values() if g.names("out") and (g.names("in") or g.contracted)]
    known = {name for g in groups for name in g.names("out")}
    for group in found.values():  # layers that could write units, were it not for what becomes of those
        if group not in groups and group.reason not in (None, OUTPUT) and not known & {*group.names("out"), ""}:
            groups += [group] if group.names("out") else []
    groups.sort(key=list(found.values()).index)
    for group in groups:
        group.name = group.names("out")[0]
        group.kind = _kind(modules, group)
        group.reads_input = bool(stems & set(group.names("out")))
        if group.reason is None and all(".lora_A." in f".{name}" for name in group.names("out")):
            group.reason = "the rank of a LoRA adapter, which is small on purpose"
        if group.reason is None and len({(m.module, m.role) for m in group.members}) < len(group.members):
            group.reason = "the same units lie twice along one dimension"
    return groups


def _fused(modules: dict[str, nn.Module], group: Group, atom: Atom, trace: Trace) -> tuple[Group, Group] | None:
    """Split a fused ``[q, k, v] x heads x dims`` projection in two: queries with keys, and values with their reader."""
    if not group.contracted or len(group.names("out")) != 1 or len(group.names("in")) != 1 or group.reason:
        return None
    wide, narrow = ([m for m in group.members if m.role == role][0] for role in ("out", "in"))  # noqa: RUF015
    rows, cols = (_weight_dim(modules, m, trace) for m in (wide, narrow))
    if rows is None or cols is None or rows[0].size != 3 or rows[1:] != cols:
        return None
    heads, length = narrow.blocks, wide.blocks // 3 * atom.size * wide.inner
    queries = replace(group, members=[replace(wide, blocks=2 * heads)])
    values = replace(group, members=[replace(wide, blocks=heads, offset=2 * length), narrow], contracted=[], batched=[])
    queries.partner, values.partner = values, queries
    return queries, values


def part_together(groups: list[Group]) -> None:
    """Skip the partners of skipped groups."""
    for group in groups:
        if group.reason is None and group.partner is not None:
            group.reason = group.partner.reason


def _weight_dim(modules: dict[str, nn.Module], member: Member, trace: Trace) -> Dim | None:
    made = _form(modules[member.module])
    dim = int((member.role == "in") != made.transposed)
    return next((expand(u.dims[dim]) for u in trace.uses if u.name == f"{member.module}.weight"), None)


def _judge_adds(trace: Trace) -> None:
    """Adding to a branch what was computed from it makes a residual stream; branches side by side just share units."""
    for a, b, nested in trace.adds:
        a, b = expand(a), expand(b)
        if nested and a != b and any(x.produced for x in a) and any(x.produced for x in b):
            for atom in (*a, *b):  # says more than what else may be in the way
                atom.blocked = RESIDUAL
        identify(a, b)


def _shared_parameters(model: nn.Module) -> dict[str, str]:
    """Names of parameters that more than one module holds -> the other holder."""
    seen: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            shared[name] = seen[id(parameter)]
            shared[seen[id(parameter)]] = name
        else:
            seen[id(parameter)] = name
    return shared


def _form(module: nn.Module) -> Any:
    """The sliced class whose roles a layer has; ``None`` if it has none or treats units one by one."""
    return sliced_class(type(module)) or mixing_base(type(module))


def _role(module: nn.Module, use: Use, dim: int, trace: Trace) -> str | None:
    """What a dimension of a parameter is to its layer; ``None`` if the layer cannot be sliced."""
    tensor = getattr(module, "_parameters", {}).get(use.key)
    if tensor is not None and (type(tensor) is not nn.Parameter or not tensor.is_floating_point()):
        return None
    made = _form(module)
    if made is None or not issubclass(made, _Mixing):
        whole = made is not None or (is_unitwise(module) and not _has_layers(module))
        return "unit" if whole and dim < 2 else None
    if sliced_class(type(module)) is None and use.key == "weight" and use.name not in trace.direct:
        return None
    if use.key == "bias":
        return "out"
    if use.key != "weight":
        return None
    if dim > 1:
        return "kernel"
    return ("in", "out")[dim if made.transposed else 1 - dim]


def _has_layers(module: nn.Module) -> bool:
    return any(p is not None for child in module.children() for p in child.parameters())


def _no_form(module: nn.Module, use: Use) -> str:
    kind = type(module).__name__
    tensor = module._parameters.get(use.key)
    if tensor is not None and (type(tensor) is not nn.Parameter or not tensor.is_floating_point()):
        return f"{use.name} is stored as {type(tensor).__name__} of {tensor.dtype}, as quantised weights are"
    if mixing_base(type(module)) is not None:
        return f"{kind} computes its weight from {use.name}"
    return f"{use.name} belongs to {kind}, which has no sliced form"


def _dim_of(atom: Atom, dims: list[Dim]) -> int:
    """Where a unit lies in an input; the channel dimension if it cannot be told."""
    return next((i for i, dim in enumerate(dims) if atom in expand(dim)), 1)


def _members(module: Any, name: str, role: str, before: int, size: int, after: int, dim: int) -> list[Member]:
    """The members that a parameter dimension ``[before, size, after]`` stands for."""
    if role == "kernel":
        return []
    made = _form(module)
    if made is not None and issubclass(made, _Conv) and module.groups > 1:
        if role == "in":
            return [Member(name, "in", module.groups * before, after)]
        if before * size <= module.groups:  # whole groups: the units pass through
            per_input = module.in_channels // (before * size)
            return [Member(name, "in", before, per_input), Member(name, "out", before, after)]
    return [Member(name, role, before, after, dim if role == "unit" and made is None else 1)]


def _kind(modules: dict[str, nn.Module], group: Group) -> str:
    if group.contracted or group.batched:
        return "attention"
    convs: list[Any] = [modules[n] for n in group.names("in") + group.names("out") if isinstance(modules[n], _CONVS)]
    if any(c.groups > 1 and c.groups == c.in_channels for c in convs):
        return "mbconv"
    if convs:
        return "conv"
    return "mlp"


_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def misaligned(model: nn.Module, group: Group, width: int, trace: Trace) -> str | None:
    """Judge the trace of a sliced copy: why the kept units of a group do not meet, or ``None`` if they do.

    Every layer of the group must have taken its part, and the parts must have been identified with each other, unit by
    unit, by the code in between.
    """
    modules = dict(model.named_modules())
    seen: dict[Atom, str] = {}
    for m in group.members:
        made = _form(modules[m.module])
        if made is None or not issubclass(made, _Mixing):
            continue
        rows = m.role == "out"
        grouped = issubclass(made, _Conv) and modules[m.module].groups > 1
        if grouped and m.role == "in" and any(o.module == m.module and o.role == "out" for o in group.members):
            continue  # whole groups: the rows stand for both
        dim = (1 if rows else 0) if made.transposed else (0 if rows else 1)
        taken = trace.takes.get((f"{m.module}.weight", dim, m.offset))
        if taken is None:
            return f"{m.module} is not given sliced units: the code around it fixes their number"
        blocks = 1 if grouped and m.role == "in" else m.blocks
        flat, at = expand(taken), 1
        for atom in flat:
            if at == blocks and atom.size == width:
                seen[atom] = m.module
                break
            at *= atom.size
        else:
            return f"the code around {m.module} reshapes the kept units by a fixed number"
    if len(seen) > 1:
        return f"the kept units of {' and '.join(list(seen.values())[:2])} do not meet"
    return None

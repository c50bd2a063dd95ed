"""From a trace to groups: which layers share units, in which role, and why some cannot be sliced."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .nn import _Conv, _Mixing, sliced_class
from .trace import Atom, Trace, block, expand, identify

RESIDUAL = "shared by a residual stream"


@dataclass(frozen=True)
class Member:
    """A layer and how the group's units lie along one of its dimensions (see ``Axis``)."""

    module: str
    role: str
    blocks: int
    inner: int


@dataclass(eq=False)
class Group:
    """Units that are sliced together: written by some layers, read by others, treated one by one in between."""

    name: str
    size: int
    members: list[Member]
    dropouts: list[str] = field(default_factory=list)
    contracted: list[str] = field(default_factory=list)
    family: str = "generic"
    reason: str | None = None
    """Why it was skipped; ``None`` if it can be sliced."""

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
            role = _role(modules[use.module], use.key, dim)
            if use.name in shared:
                block([atoms], f"{use.name} is shared with {shared[use.name]}")
            elif role is None:
                kind = type(modules[use.module]).__name__
                block([atoms], f"{use.name} belongs to {kind}, which has no sliced form")
            elif role == "out":
                for atom in expand(atoms):
                    atom.produced = True
    _judge_adds(trace)

    found: dict[Atom, Group] = {}
    for use in trace.uses:
        if use.module not in trace.calls:
            continue
        for dim, atoms in enumerate(use.dims):
            role = _role(modules[use.module], use.key, dim)
            if role is None:
                continue
            flat = expand(atoms)
            for i, atom in enumerate(flat):
                group = found.setdefault(atom, Group(use.module, atom.size, [], reason=atom.blocked))
                group.contracted = atom.contracted
                before, after = math.prod(a.size for a in flat[:i]), math.prod(a.size for a in flat[i + 1 :])
                for member in _members(modules[use.module], use.module, role, before, atom.size, after):
                    if member not in group.members:
                        group.members.append(member)
    for name, dims in trace.dropouts.items():
        for atom in expand([a for dim in dims for a in dim]):
            if atom in found and name not in found[atom].dropouts:
                found[atom].dropouts.append(name)
    groups = [g for g in found.values() if g.names("out") and (g.names("in") or g.contracted)]
    for group in groups:
        group.name = group.names("out")[0]
        group.family = _family(modules, group)
        if group.reason is None and len({(m.module, m.role) for m in group.members}) < len(group.members):
            group.reason = "the same units lie twice along one dimension"
    return groups


def _judge_adds(trace: Trace) -> None:
    """An add of two branches that are written by different layers joins them into one residual stream."""
    for a, b in trace.adds:
        a, b = expand(a), expand(b)
        if a != b and any(x.produced for x in a) and any(x.produced for x in b):
            block([a, b], RESIDUAL)
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


def _role(module: nn.Module, key: str, dim: int) -> str | None:
    """What a dimension of a parameter is to its layer; ``None`` if the layer cannot be sliced."""
    made: Any = sliced_class(type(module))
    if made is None:
        return None
    if not issubclass(made, _Mixing):
        return "unit"
    if key == "bias":
        return "out"
    if key != "weight":
        return None
    if dim > 1:
        return "kernel"
    return ("in", "out")[dim if made.transposed else 1 - dim]


def _members(module: Any, name: str, role: str, before: int, size: int, after: int) -> list[Member]:
    """The members that a parameter dimension ``[before, size, after]`` stands for."""
    if role == "kernel":
        return []
    made: Any = sliced_class(type(module))
    if issubclass(made, _Conv) and module.groups > 1:
        if role == "in":
            return [Member(name, "in", module.groups * before, after)]
        if before * size <= module.groups:  # whole groups: the units pass through
            per_input = module.in_channels // (before * size)
            return [Member(name, "in", before, per_input), Member(name, "out", before, after)]
    return [Member(name, role, before, after)]


def _family(modules: dict[str, nn.Module], group: Group) -> str:
    if group.contracted:
        return "attention"
    convs = [modules[n] for n in group.names("in") + group.names("out") if isinstance(modules[n], _CONVS)]
    if any(c.groups > 1 and c.groups == c.in_channels for c in convs):  # type: ignore[union-attr]
        return "mbconv"
    if convs:
        return "conv"
    return "mlp"


_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

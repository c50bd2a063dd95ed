"""Slices of the batch through residual branches: which branches, at which rates, tried on a copy before it is done."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..drawing import Slices
from ..nn.base import adopt, sliced_subclass
from ..schemes import SCHEMES
from ..schemes.samples import InBranch, NotesBatch, Path, Samples, plain_path
from .dry_run import Call, DryRun, Failure
from .groups import Group, Member
from .options import Filter, Rate, check_patterns, matches, rate_of
from .reasons import FILTERED, FROZEN, Reason, Skip
from .report import Report, Row, pattern
from .residual import Branch, find_branches
from .trace import Cost, Trace

log = logging.getLogger(__name__)

SAMPLES, TRIED = 13, 0.3
"""The batch of the dry run, and the rate at which it is tried: 13 and 9 are seldom other sizes of a model."""

_DROP_PATHS = ("DropPath", "StochasticDepth")
"""How the classes of timm, torchvision and transformers end that drop whole samples."""


@dataclass(frozen=True)
class _Role:
    """What one module does for a branch."""

    takes: tuple[Path, ...] = ()
    extras: tuple[Path, ...] = ()
    puts: tuple[Path, ...] | None = None
    rests: bool = False


def slice_samples_(
    run: DryRun, scheme: str, rate: Rate, decay: str | None, filter: Filter, seed: int, follows_torch: bool
) -> Report:
    """Let fewer samples through the residual branches of the model of ``run``; see :func:`sliceout.convert_`."""
    kind, modules = type(run.model).__name__, dict(run.model.named_modules())
    dropping = {name: p for name, m in modules.items() if (p := drop_path_rate(m)) is not None}
    run.call = _with_samples(_with_mask(run.model, run.call))
    found = run.run(_rest, flow=True)
    if isinstance(found, Failure):
        raise ValueError(
            f"could not run {kind} on {SAMPLES} samples to find its residual branches: {found.message} in "
            f"{found.module or 'the model'}. Pass example_inputs= whose tensors have the samples in dimension 0"
        )
    groups = _groups(found, dropping)
    check_patterns(rate, (name for g in groups for name in (g.name, *(m.module for m in g.members))))
    shares = _shares(groups, rate, decay, filter, modules, dropping)
    plan = {g: b for g, b in groups.items() if g.reason is None}

    def attempt(shadow: nn.Module) -> None:
        _apply(shadow, plan, lambda group: Samples(TRIED))

    while plan and isinstance(tried := run.run(attempt, flow=True), Failure):
        _drop_failed(plan, tried)
    if not plan:
        raise ValueError(_nothing(kind, groups))
    make = SCHEMES[scheme].make
    made = run.finish(lambda model: _apply(model, plan, lambda g: make(rate=shares[g], seed=seed)))
    run.model.register_forward_pre_hook(NotesBatch(list(made.values())), with_kwargs=True)
    before, after = found.cost, Cost(found.cost.flops.copy(), found.cost.activations.copy())
    for group, s in made.items():
        for count in (after.flops, after.activations):
            for m in group.members:
                count[m.module] = round(count[m.module] * s.computed)
    rows = [Row(g, made.get(g)) for g in groups]
    slices = Slices(made.values(), follows_torch=follows_torch)
    return Report(kind, rows, before, after, slices, scheme, run.inputs)


# -- the dry run -------------------------------------------------------------------------------------------------------


def drop_path_rate(module: Any) -> float | None:
    """The rate of a module that drops whole samples; ``None`` if it is none, or does not."""
    if not type(module).__name__.endswith(_DROP_PATHS):
        return None
    rate = getattr(module, "drop_prob", getattr(module, "p", None))
    return rate or None


def _rest(model: nn.Module) -> None:
    """Let all DropPaths hand on what they are given."""
    for m in model.modules():
        if drop_path_rate(m) is not None:
            setattr(m, "drop_prob" if hasattr(m, "drop_prob") else "p", 0.0)


def _with_mask(model: nn.Module, call: Call) -> Call:
    """With masks, where a model of transformers takes some: what they go into has to be known."""
    args, kwargs = call
    masks: dict[str, Tensor] = {}
    for name in inspect.signature(model.forward).parameters:
        ids = kwargs.get(name.replace("attention_mask", "input_ids")) if name.endswith("attention_mask") else None
        if isinstance(ids, Tensor) and kwargs.get(name) is None:
            masks[name] = torch.ones_like(ids)
    return args, {**kwargs, **masks}


def _with_samples(call: Call) -> Call:
    """The same inputs for another number of samples."""
    samples = next((t.shape[0] for t in tree_leaves(call) if isinstance(t, Tensor) and t.dim()), 0)

    def more(t: Tensor) -> Tensor:
        if not t.dim() or t.shape[0] != samples:
            return t
        return torch.cat([t] * -(-SAMPLES // samples))[:SAMPLES]

    return tree_map_only(Tensor, more, call)  # type: ignore[no-any-return]


# -- which branches, at which rates ------------------------------------------------------------------------------------


def _groups(trace: Trace, dropping: dict[str, float]) -> dict[Group, list[Branch]]:
    """A group for each branch; one for all of those that run the same modules, as where layers are shared."""
    assert trace.flow is not None
    alike: dict[Any, list[Branch]] = {}
    for b in find_branches(trace, dropping):
        alike.setdefault(str((b.takes, b.extras, b.puts)) if b.reason is None else b, []).append(b)
    groups: dict[Group, list[Branch]] = {}
    for branches in alike.values():
        first = branches[0]
        inside = dict.fromkeys(m for b in branches for m in b.inside(trace.flow))
        takes, puts = ({m for m, _ in places} for places in (first.takes, first.puts))
        members = [Member(m, "in" if m in takes else "out" if m in puts else "unit", 1, 1) for m in inside]
        groups[Group(first.name, SAMPLES, members, kind="branch", reason=first.reason)] = branches
    return groups


def _shares(
    groups: dict[Group, list[Branch]],
    rate: Rate,
    decay: str | None,
    filter: Filter,
    modules: dict[str, nn.Module],
    dropping: dict[str, float],
) -> dict[Group, float]:
    """The rate of each group that has one; the others get the reason why not."""
    shares: dict[Group, float] = {}
    wanted = [g for g in groups if g.reason is None]
    for i, group in enumerate(wanted):
        names = [m.module for m in group.members]
        own = (dropping[d] for b in groups[group] for d in b.drop_paths)
        share = rate_of(rate, group.name, (group.name, *names), own)
        if decay == "linear" and share is not None:
            share *= i / max(len(wanted) - 1, 1)
        group.reason = _objection(group, modules, filter, rate, share)
        shares[group] = share or 0.0
    return shares


def _objection(
    group: Group, modules: dict[str, nn.Module], filter: Filter, rate: Rate, share: float | None
) -> Reason | None:
    inside = {m.module: modules[m.module] for m in group.members}
    if not matches(filter, {group.name: modules[group.name]}):
        return FILTERED
    if not any(p.requires_grad for m in inside.values() for p in m.parameters()):
        return FROZEN
    if share is None:
        why = "no DropPath of a rate above 0 lies in it" if rate is None else "no rate was given for it"
        return Skip.NO_RATE(f"{why}: pass rate=" if rate is None else why)
    try:
        kept = Samples(share).computed
    except ValueError as error:
        return Skip.RATE(str(error))
    return Skip.RATE(f"at rate {share:g} all samples are kept") if kept == 1 else None


def _nothing(kind: str, groups: dict[Group, list[Branch]]) -> str:
    why = dict.fromkeys(pattern(f"{g.name}: {g.reason}") for g in groups)
    found = f"skipped {'; '.join(list(why)[:6])}" if why else "found no add of a stream and what was computed from it"
    return f"no residual branch of {kind} can do with fewer samples: {found}"


# -- doing it ----------------------------------------------------------------------------------------------------------


def _apply(model: nn.Module, plan: dict[Group, list[Branch]], make: Any) -> dict[Group, Samples]:
    """Give the modules of the branches their slices of the batch, in place."""
    modules = dict(model.named_modules())
    made = {group: make(group) for group in plan}
    for group, branches in plan.items():
        for name, role in _roles(branches[0], made[group]).items():
            if isinstance(modules[name], InBranch):  # one DropPath for several branches: it rests already
                continue
            how = {f"_{field}": value for field, value in vars(role).items()}
            adopt(modules[name], sliced_subclass(type(modules[name]), InBranch, **how), {"samples": made[group].axis()})
    return made


def _roles(branch: Branch, s: Samples) -> dict[str, _Role]:
    reads = [branch.takes, branch.extras] if s.saves else [[], []]
    takes, extras, puts = map(_by_module, (*reads, branch.puts))
    rests = set(branch.drop_paths)
    names = dict.fromkeys([*takes, *extras, *puts, *rests])
    return {m: _Role(takes.get(m, ()), extras.get(m, ()), puts.get(m), m in rests) for m in names}


def _by_module(places: Iterable[Any]) -> dict[str, tuple[Path, ...]]:
    found: dict[str, tuple[Path, ...]] = {}
    for module, path in places:
        found[module] = (*found.get(module, ()), plain_path(path))
    return found


def _drop_failed(plan: dict[Group, list[Branch]], failure: Failure) -> None:
    """Leave out the branch in which a copy with fewer samples failed, and those like it."""
    failed = failure.module

    def nearness(group: Group) -> int:
        """How long the name of the innermost module around the failed one is; 0 if the branch lies inside that."""
        around = (len(m.module) for m in group.members if f"{failed}.".startswith(f"{m.module}."))
        inside = not failed or any(m.module.startswith(f"{failed}.") for m in group.members)
        return max(around, default=0 if inside else -1)

    broken = max(plan, key=nearness)
    for group in [g for g in plan if pattern(g.name) == pattern(broken.name)]:
        group.reason = Skip.FAILED(f"{failed or 'the model'} cannot take fewer samples: {failure.message}")
        log.debug("dropped after a trial: %s: %s", group.name, group.reason)
        del plan[group]

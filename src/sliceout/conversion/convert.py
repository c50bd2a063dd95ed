"""convert_: find what can be sliced in any model, slice it in place, and say what happened and why."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..drawing import Slices
from ..nn.base import Sliced
from ..nn.factory import give_slices_, plain_
from ..schemes.dropout import DROPS
from ..schemes.subset import Subset
from ..slices import Axis, ConcatAxis, Slice, width_of
from . import recipes
from .baselines import check_scheme, drop_
from .dry_run import DryRun
from .groups import RIVAL, Group, find_groups, part_together
from .patches import patch_blocks_
from .profitability import cannot_pay, default_align
from .report import Cost, Report, Row, pattern, savings

Rate = float | Mapping[str, float] | Callable[[str], float | None] | None
Filter = str | Iterable[str] | Callable[[nn.Module, str], bool] | None


def convert_(
    model: nn.Module,
    rate: Rate = None,
    *,
    scheme: str = "sliceout",
    sampling: str = "circular",
    norm: str = "probabilistic",
    fold: str = "consumer",
    align: int | None = None,
    grads: str = "dense",
    filter: Filter = None,
    attention: str = "dims",
    stages: int | None = None,
    paper_exclusions: bool = False,
    example_inputs: Any = None,
    payoff: bool = True,
    seed: int = 0,
) -> Report:
    """Slice every layer of ``model`` that can be sliced, in place, and report what was done.

    The model keeps its Parameter objects and its state_dict keys; only the classes of its layers change. In ``eval()``
    it computes exactly what it did before.

    Args:
        model: any module; it is left exactly as it was if the conversion fails.
        rate: fraction of units to drop: a number for all groups; a dict from name patterns to numbers; a function of
            the group's name (``None`` to skip it); or ``None`` to take over the rates of the ``nn.Dropout`` layers
            that lie inside a group. Dropouts inside a sliced group rest while SliceOut is on.
        scheme: ``"sliceout"``, or one of the paper's baselines at the same places: ``"none"``, ``"standard"``,
            ``"spatial"`` or ``"dropblock"`` dropout, ``"controlled"`` dropout (a random subset of units, whatever
            ``sampling`` says), or ``"patch"`` (a window of the feature map through every residual block; ``rate`` is of
            its area, and only ``norm``, ``align`` and ``filter`` apply). See :mod:`sliceout.baselines`.
        sampling, norm, fold, align: see :class:`~sliceout.Slice`.
        grads: ``"dense"``: every parameter gets an ordinary gradient. ``"compact"``: gradients of the slice's size, and
            SGD, Adam and AdamW update the slice alone: other units keep their weights and their state. It pays where
            parameters weigh more than activations. See :mod:`sliceout.optim`.
        filter: only groups all of whose producing and consuming layers match: name patterns (``"blocks.*.mlp.*"``) or
            a function of ``(module, name)``.
        attention: ``"dims"`` slices inside every head (queries and keys alike, values and output projection alike),
            ``"heads"`` keeps a range of heads, ``"off"`` leaves attention alone.
        stages: only the first so many stages of inverted-bottleneck networks (the paper: 3).
        paper_exclusions: leave out the first residual block and the last one of each stage, as the paper does.
        example_inputs: what the model is called with: a tensor, a tuple, or a dict of keyword arguments. Guessed if
            left out. The dry run computes nothing and leaves statistics and caches alone.
        payoff: leave groups alone whose slices were measured not to save time on the kind of GPU that the model is on
            (see :mod:`sliceout.payoff`): what was never measured is sliced. A model on the CPU loses no group: most
            are converted there and trained elsewhere. Baselines leave out the same groups.
        seed: of the draws.

    Raises:
        ValueError: if nothing can be sliced, with what was looked for.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        >>> convert_(model, rate=0.5).converted
        1
        >>> model(torch.zeros(3, 8)).shape
        torch.Size([3, 2])
    """
    _check(model, rate, attention, {"sampling": sampling, "norm": norm, "fold": fold, "grads": grads})
    check_scheme(scheme)
    if grads == "compact" and scheme != "sliceout":
        raise ValueError(f"grads='compact' goes with scheme='sliceout': scheme={scheme!r} has dense gradients")
    if scheme == "patch":
        _only_for_units(attention, stages, paper_exclusions)
        return patch_blocks_(
            model, rate, norm=norm, align=align, filter=filter, example_inputs=example_inputs, seed=seed
        )
    run = DryRun(model, example_inputs)
    groups = find_groups(run.shadow(), run.trace)
    recipes.arrange(model, groups, run.trace, attention=attention, stages=stages, paper_exclusions=paper_exclusions)
    modules = dict(model.named_modules())
    rates: dict[Group, float] = {}
    where = _where(model)

    def aligned(group: Group) -> int:
        return default_align(group.size, *where) if align is None else align

    for group in groups:
        group.reason = group.reason or _filtered(group, filter, modules) or _frozen(group, modules)
        if group.reason is None:
            rates[group], group.reason = _rate_of(group, rate, modules, aligned(group))
        if group.reason is None and payoff:
            group.reason = _not_worth_it(group, rates[group], modules, aligned(group), *where)
    part_together(groups)
    recipes.choose(groups)
    part_together(groups)

    def make(group: Group) -> Slice:
        read = not {m.role for m in group.members} <= {"out", "qk"}  # the temperature, not a norm, follows q and k
        settings: dict[str, Any] = {"norm": norm if read else "none", "align": aligned(group), "seed": seed}
        settings["fold"] = "consumer" if group.contracted or group.partner else fold  # fused: q, k and v alike
        if scheme == "controlled":
            return Subset(group.size, rates[group], **settings)
        return Slice(group.size, rates[group], sampling=sampling, grads=grads, **settings)

    def apply(shadow: nn.Module, chosen: list[Group]) -> None:
        _apply(shadow, chosen, make)

    plan, tried = run.settle(groups, apply, lambda g: make(g).width)
    if isinstance(rate, (int, float)) and _drop_negligible(plan, Cost.of(run.trace), Cost.of(tried)):
        plan, tried = run.settle(groups, apply, lambda g: make(g).width)
    if not plan:
        raise ValueError(_nothing(model, groups))
    if scheme in DROPS:
        made, tried = drop_(model, plan, rates, scheme, run.trace), run.trace
    else:
        made = _apply(model, plan, make)
    if not made:
        raise ValueError(_nothing(model, groups))
    rows = [Row(g, made.get(g)) for g in groups]
    return Report(type(model).__name__, rows, Cost.of(run.trace), Cost.of(tried), Slices(made.values()), scheme)


def revert_(model: nn.Module) -> nn.Module:
    """Undo :func:`convert_`: the original classes again. Weights stay as they are now."""
    found = [m for m in model.modules() if isinstance(m, Sliced)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no sliced layer: nothing to revert")
    for module in found:
        plain_(module)
    return model


# -- applying a plan ---------------------------------------------------------------------------------------------------


def _apply(model: nn.Module, groups: list[Group], make: Callable[[Group], Slice]) -> dict[Group, Slice]:
    """Slice the layers of ``groups``; returns the slices by group."""
    modules = dict(model.named_modules())
    made = {g: make(g) for g in groups}
    parts: dict[tuple[str, str], dict[int, Axis]] = {}
    dims: dict[str, int] = {}
    for group in groups:
        for m in group.members:
            parts.setdefault((m.module, m.role), {})[m.offset] = made[group].axis(m.blocks, m.inner)
            dims[m.module] = m.dim
    roles: dict[str, dict[str, Any]] = {}
    for (name, role), sections in parts.items():
        ordered = [sections[offset] for offset in sorted(sections)]
        roles.setdefault(name, {})[role] = ordered[0] if len(ordered) == 1 else ConcatAxis(tuple(ordered))
    for group in groups:
        for name in group.dropouts:
            roles.setdefault(name, {})["unit"] = made[group].axis()
    done: list[nn.Module] = []
    try:
        for name, axes in roles.items():
            done.append(give_slices_(modules[name], axes, dims.get(name, 1)))
        done += recipes.adapt(model, groups, made)
    except BaseException:
        for module in done:
            plain_(module)
        raise
    return made


# -- checks and reasons ------------------------------------------------------------------------------------------------


def _check(model: nn.Module, rate: Any, attention: str, settings: dict[str, Any]) -> None:
    if type(model).__name__ == "OptimizedModule":  # by name: its class would import the compiler
        raise ValueError("this model is compiled: convert the original module first, then compile it")
    wrappers = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule"}
    for name, m in model.named_modules():
        if wrappers & {c.__name__ for c in type(m).__mro__}:
            kind = next(c.__name__ for c in type(m).__mro__ if c.__name__ in wrappers)
            raise ValueError(f"{name or 'the model'} is wrapped in {kind}: convert_ first, wrap it afterwards")
        if isinstance(m, Sliced):
            raise ValueError(f"{name or 'the model'} is sliced already: call sliceout.revert_(model) first")
        if isinstance(m, torch.jit.ScriptModule):
            raise ValueError(f"{name or 'the model'} is a TorchScript module, whose classes cannot be changed")
    if attention not in ("dims", "heads", "off"):
        raise ValueError(f"attention={attention!r}: expected 'dims', 'heads' or 'off'")
    Slice(8, 0.5, **settings)  # raises on unknown names
    for value in [rate] if isinstance(rate, (int, float)) else rate.values() if isinstance(rate, Mapping) else []:
        width_of(1 << 20, value, None)


def _only_for_units(attention: str, stages: int | None, paper_exclusions: bool) -> None:
    given = {"attention": attention != "dims", "stages": stages is not None, "paper_exclusions": paper_exclusions}
    for name in (n for n, is_given in given.items() if is_given):
        raise ValueError(f"{name} is about units, which scheme='patch' does not slice: choose blocks with filter=")


def _rate_of(group: Group, rate: Rate, modules: dict[str, Any], align: int | None) -> tuple[float, str | None]:
    """The group's rate, or the reason why it is left alone."""
    value: float | None
    if rate is None:
        value = max((modules[d].p for d in group.dropouts), default=None)
        if not value:
            return 0.0, "no nn.Dropout lies inside it, and no rate was given"
    elif callable(rate):
        value = rate(group.name)
    elif isinstance(rate, Mapping):
        names = {m.module for m in group.members}
        value = next((r for pattern, r in rate.items() if fnmatch.filter(names, pattern)), None)
    else:
        value = rate
    if value is None:
        return 0.0, "no rate was given for it"
    try:
        width, _ = width_of(group.size, value, align)
    except ValueError as error:
        return 0.0, str(error)
    if width == group.size:
        return value, f"at rate {value} all {group.size} units are kept"
    if width == 1:  # would broadcast against anything: the dry run could not tell a right from a wrong use
        return value, f"rate {value} keeps a single one of {group.size} units: choose a lower rate for it"
    return value, None


def _where(model: nn.Module) -> tuple[torch.device, torch.dtype | None]:
    """Where the model is, and the dtype of its products as far as it is known: autocast may be yet to come."""
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None:
        return torch.device("cpu"), None
    kind = first.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        return first.device, torch.get_autocast_dtype(kind)
    return first.device, None if first.dtype is torch.float32 else first.dtype


def _not_worth_it(
    group: Group,
    rate: float,
    modules: dict[str, nn.Module],
    align: int,
    device: torch.device,
    dtype: torch.dtype | None,
) -> str | None:
    """What was measured against slicing this group; ``None`` if anything was for it, or nothing was measured."""
    if device.type != "cuda":
        return None
    kinds = {_kind_of(modules[m.module]) for m in group.members if m.role != "unit"}
    if "depthwise" in kinds:  # it was measured between the two that it stands between
        kinds = {"depthwise"}
    times = max((m.blocks * m.inner for m in group.members if m.role == "out"), default=1)  # heads have units each
    width, _ = width_of(group.size, rate, align)
    reasons = [cannot_pay(kind, group.size * times, width * times, device, dtype) for kind in sorted(kinds)]
    return None if None in reasons else next(iter(reasons), None)


def _kind_of(layer: Any) -> str:
    """As the measurements call it."""
    if not hasattr(layer, "in_channels"):
        return "linear"
    if layer.groups > 1:
        return "depthwise" if layer.groups == layer.in_channels else "grouped"
    return "conv1" if set(layer.kernel_size) == {1} else "conv3"


def _filtered(group: Group, filter: Filter, modules: dict[str, nn.Module]) -> str | None:
    if filter is None:
        return None
    names = {m.module for m in group.members if m.role != "unit"}
    if callable(filter):
        passed = all(filter(modules[n], n) for n in names)
    else:
        patterns = [filter] if isinstance(filter, str) else list(filter)
        passed = all(any(fnmatch.fnmatch(n, p) for p in patterns) for n in names)
    return None if passed else "left out by filter"


def _frozen(group: Group, modules: dict[str, nn.Module]) -> str | None:
    trained = any(p.requires_grad for m in group.members for p in modules[m.module].parameters(recurse=False))
    return None if trained else "all its parameters are frozen"


def _drop_negligible(plan: list[Group], before: Cost, after: Cost) -> bool:
    """Leave out kinds of groups that save next to nothing and take over no dropout; true if there are any."""
    saved = savings(plan, before, after)
    kinds: dict[str, list[Group]] = {}
    for group in plan:
        kinds.setdefault(pattern(group.name), []).append(group)
    small = [
        same for same in kinds.values()
        if not any(g.dropouts for g in same)
        and all(abs(sum(saved[g][i] for g in same)) < 1e-3 for i in range(2))
    ]  # fmt: skip
    for group in (g for same in small for g in same):
        group.reason = "saves less than 0.1 % of the model's FLOPs and activations"
    return bool(small)


def _nothing(model: nn.Module, groups: list[Group]) -> str:
    looked = (
        "looked for layers (linear, convolution, HF Conv1D) whose outputs reach another such layer through "
        "activations, norms and depthwise convolutions only"
    )
    told = [g for g in groups if g.reason and not g.reason.startswith(RIVAL)]
    reasons = dict.fromkeys(pattern(f"{g.name}: {g.reason}") for g in told)
    found = "; found none" if not reasons else "; skipped " + "; ".join(list(reasons)[:6])
    quantised = [n for n, m in model.named_modules() if ".quantized." in type(m).__module__]
    if quantised:
        found += f"; {quantised[0]} is quantised: convert_ comes before quantisation"
    return f"nothing to slice in {type(model).__name__}: {looked}{found}"

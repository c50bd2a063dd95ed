"""convert_: find what can be sliced in any model, slice it in place, and say what happened and why."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import nn

from ..drawing import Slices, seed_of_torch
from ..nn.base import Sliced
from ..nn.factory import give_slices_
from ..nn.refusals import unwatch_, watch_unseen_
from ..schemes import SCHEMES
from ..schemes.samples import forget_batch_
from ..slices import Axis, Slice, width_of
from ..takes import ConcatAxis
from . import dropouts
from .dry_run import DryRun, all_plain_
from .groups import Group, find_groups, skip_conflicts, whole_layers
from .options import Filter, Rate, check_model, check_options, check_patterns, checked_rate, matches, rate_of
from .other_schemes import drop_, patch_blocks_, readers_by_group
from .parts import require_one_part
from .profitability import default_align, device_and_dtype, not_profitable
from .reasons import FILTERED, FROZEN, Reason, Skip
from .recipes import attention as heads
from .recipes import convolutions
from .report import Report, Row, pattern, savings
from .samples import slice_samples_
from .trace import Cost

log = logging.getLogger(__name__)


@torch.inference_mode(False)  # which would show the trace other operations, and make starts that cannot be drawn
def convert_(
    model: nn.Module,
    rate: Rate = None,
    *,
    scheme: str = "sliceout",
    decay: str | None = None,
    sampling: str = "circular",
    norm: str = "probabilistic",
    fold: str = "consumer",
    align: int | None = None,
    grads: str = "dense",
    parts: int = 1,
    ranks: str = "spread",
    filter: Filter = None,
    attention: str = "dims",
    stages: int | None = None,
    paper_exclusions: bool = False,
    example_inputs: Any = None,
    payoff: bool = False,
    seed: int | None = None,
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
            ``"spatial"`` or ``"dropblock"`` dropout, ``"controlled"`` dropout (a random subset of units), or
            ``"patch"`` (a window of the feature map through every residual block; ``rate`` is of its area);
            ``"samples"`` (a slice of the batch through every residual branch, the other samples pass by: stochastic
            depth that saves what it drops) or ``"droppath"``, its baseline. An option that has no effect with the
            scheme is refused. See :mod:`sliceout.schemes`.
        decay: with ``"samples"`` and ``"droppath"``: ``"linear"`` lets the rate of the branches rise from 0 to ``rate``
            in the order in which they run. Without ``rate``, those take over the rates of the model's own DropPath or
            StochasticDepth modules, which rest while slices are on.
        sampling, norm, fold, align: see :class:`~sliceout.Slice`.
        grads: ``"dense"``: every parameter gets an ordinary gradient. ``"compact"``: gradients of the slice's size, and
            SGD, Adam and AdamW update the slice alone: other units keep their weights and their state. It pays where
            parameters weigh more than activations. See :mod:`sliceout.compact`.
        parts: cut the batch into so many equal parts, each with slices of its own: a weaker noise than one slice for
            all samples, at the same arithmetic. Linear layers, their norms and attention have them, convolutions and
            batch norms do not; the report says which groups keep one slice for the batch, and why. A batch that
            ``parts`` does not divide has the largest number of parts that does. See :class:`~sliceout.Slice`.
        ranks: with ``parts``, in distributed training: ``"spread"`` over the parts of all ranks, or ``"equal"``.
        filter: only groups all of whose producing and consuming layers match: name patterns (``"blocks.*.mlp.*"``) or
            a function of ``(module, name)``.
        attention: ``"dims"`` slices inside every head (queries and keys alike, values and output projection alike),
            ``"values"`` only the values of every head, ``"heads"`` keeps a range of heads, ``"off"`` leaves attention
            alone.
        stages: only the first so many stages of inverted-bottleneck networks (the paper: 3).
        paper_exclusions: leave out the first residual block and the last one of each stage, as the paper does.
        example_inputs: what the model is called with: a tensor, a tuple, or a dict of keyword arguments. Guessed if
            left out. The dry run computes nothing and leaves statistics and caches alone.
        payoff: if true, leave groups alone whose slices were measured not to save time on the kind of GPU that the
            model is on (:mod:`sliceout.conversion.profitability`), and align as was fastest there: which network is
            trained then depends on the device. A model on the CPU loses no group. Baselines leave out the same groups.
        seed: of the draws. ``None`` follows ``torch.manual_seed``, so that two seeds of a study do not share their
            slices; the ranks of distributed training take that of rank 0, so all of them have to convert. Checkpoints
            keep it.

    Raises:
        ValueError: if nothing can be sliced, with what was looked for.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        >>> convert_(model, rate=0.5).converted
        1
        >>> model(torch.zeros(3, 8)).shape
        torch.Size([3, 2])
    """
    check_model(model)
    check_options(locals(), _DEFAULTS)
    rate = checked_rate(rate)
    run, place = DryRun(model, example_inputs), SCHEMES[scheme].place
    follows_torch, seed = seed is None, seed_of_torch() if seed is None else seed
    if place == "branches":
        return slice_samples_(run, scheme, rate, decay, filter, seed, follows_torch)
    if place == "blocks":
        settings = {"norm": norm, "align": align or 1, "seed": seed}
        return patch_blocks_(run, rate, filter, settings, follows_torch)
    groups = find_groups(run.shadow(), run.trace)
    convolutions.inverted_bottlenecks(model, groups, stages)
    convolutions.residual_blocks(groups, paper_exclusions)
    heads.arrange(model, groups, run.trace, attention)
    modules = dict(model.named_modules())
    groups += whole_layers(modules, run.trace)
    check_patterns(rate, (m.module for g in groups for m in g.members))
    dropouts.note(modules, groups, run.trace)

    device, dtype = device_and_dtype(model) if payoff else (torch.device("cpu"), None)
    aligns = {g: default_align(g.size, device, dtype) if align is None else align for g in groups}
    rates: dict[Group, float] = {}
    for group in groups:
        found = group.reason or _rate_or_reason(group, rate, filter, modules, aligns[group])
        if isinstance(found, Reason):
            group.reason = found
        else:
            rates[group], width = found
            group.reason = not_profitable(group, width, modules, device, dtype) if payoff else None
    skip_conflicts(groups)
    if parts > 1:
        require_one_part(model, groups, run.trace)

    def make(group: Group, scheme: str) -> Slice:
        read = not {m.role for m in group.members} <= {"out", "qk"}  # the temperature, not a norm, follows q and k
        alike = group.contracted or group.partner  # fused q, k and v
        return SCHEMES[scheme].make(
            group.size, rates[group], sampling=sampling, norm=norm if read else "none", align=aligns[group],
            fold="consumer" if alike else fold, grads=grads, seed=seed, ranks=ranks,
            parts=1 if group.one_part else parts,
        )  # fmt: skip

    def apply(target: nn.Module, chosen: list[Group]) -> dict[Group, Slice]:
        return _slice_groups(target, {g: make(g, scheme if place == "layers" else "sliceout") for g in chosen})

    plan, tried = run.working_groups(groups, apply)
    if isinstance(rate, float) and _skip_negligible(plan, run.trace.cost, tried.cost):
        plan, tried = run.working_groups(groups, apply)

    if place == "layers":
        made = run.finish(lambda model: apply(model, plan))
    else:
        readers, tried = readers_by_group(plan, scheme, modules, run.trace), run.trace
        made = {g: make(g, scheme) for g in readers}
        run.finish(lambda model: drop_(model, readers, made))
    if not made:
        looked = f". With rate=None {dropouts.looked_at(modules, groups, run.trace)}" if rate is None else ""
        raise ValueError(_nothing_to_slice(model, groups) + looked)
    rows = [Row(g, made.get(g)) for g in groups]
    dropouts.warn(rows)
    if place == "layers":
        watch_unseen_(model, run.trace.calls)
    slices = Slices(made.values(), follows_torch=follows_torch)
    return Report(type(model).__name__, rows, run.trace.cost, tried.cost, slices, scheme, run.inputs)


_DEFAULTS = {name: p.default for name, p in inspect.signature(convert_).parameters.items()}


def revert_(model: nn.Module) -> nn.Module:
    """Undo :func:`convert_`: the original classes again. Weights stay as they are now."""
    if not any(isinstance(m, Sliced) for m in model.modules()):
        raise ValueError(f"{type(model).__name__} has no sliced layer: nothing to revert")
    forget_batch_(model)
    unwatch_(model)
    return all_plain_(model)


# -- which groups, and how much of them --------------------------------------------------------------------------------


def _rate_or_reason(
    group: Group, rate: Rate, filter: Filter, modules: dict[str, Any], align: int
) -> tuple[float, int] | Reason:
    """The group's rate and how many units are kept at it, or the reason why it is left alone."""
    if not matches(filter, {m.module: modules[m.module] for m in group.members if m.role != "unit"}):
        return FILTERED
    if not any(p.requires_grad for m in group.members for p in modules[m.module].parameters(recurse=False)):
        return FROZEN
    value = rate_of(rate, group.name, (m.module for m in group.members), (modules[d].p for d in group.dropouts))
    if value is None:
        told = group.drops and group.kind != "attention"
        code = f"; F.dropout in {group.drops[0] or 'the model'} does not tell its rate" if told else ""
        why = f"no nn.Dropout lies inside it, and no rate was given{code}"
        return Skip.NO_RATE(why if rate is None else "no rate was given for it")
    try:
        width, _ = width_of(group.size, value, align)
    except ValueError as error:
        return Skip.RATE(str(error))
    if width == group.size:
        return Skip.RATE(f"at rate {value} all {group.size} units are kept")
    if width == 1:  # would broadcast against anything: the dry run could not tell a right from a wrong use
        return Skip.RATE(f"rate {value} keeps a single one of {group.size} units: choose a lower rate for it")
    return value, width


def _skip_negligible(plan: list[Group], before: Cost, after: Cost) -> bool:
    """Leave out kinds of groups that save next to nothing and take over no dropout; true if there are any."""
    saved = savings(plan, before, after)
    kinds: dict[str, list[Group]] = {}
    for group in plan:
        kinds.setdefault(pattern(group.name), []).append(group)
    for same in kinds.values():
        if any(g.dropouts for g in same) or any(abs(sum(saved[g][i] for g in same)) >= 1e-3 for i in range(2)):
            continue
        for group in same:
            group.reason = Skip.NEGLIGIBLE("saves less than 0.1 % of the model's FLOPs and activations")
            log.info("left out: %s: %s", group.name, group.reason)
    return any(g.reason for g in plan)


def _nothing_to_slice(model: nn.Module, groups: list[Group]) -> str:
    looked = (
        "looked for layers (linear, convolution, HF Conv1D) whose outputs reach another such layer through "
        "activations, norms and depthwise convolutions only"
    )
    told = [g for g in groups if g.reason and g.reason.code is not Skip.CONFLICT]
    reasons = dict.fromkeys(pattern(f"{g.name}: {g.reason}") for g in told)
    found = "; found none" if not reasons else "; skipped " + "; ".join(list(reasons)[:6])
    quantised = [n for n, m in model.named_modules() if ".quantized." in type(m).__module__]
    if quantised:
        found += f"; {quantised[0]} is quantised: convert_ comes before quantisation"
    return f"nothing to slice in {type(model).__name__}: {looked}{found}"


# -- slicing the layers ------------------------------------------------------------------------------------------------


def _slice_groups(model: nn.Module, made: dict[Group, Slice]) -> dict[Group, Slice]:
    """Give the layers of groups their slices."""
    modules = dict(model.named_modules())
    sections: dict[str, dict[str, dict[int, Axis]]] = {}
    dims: dict[str, int] = {}
    for group, s in made.items():
        for m in group.members:
            sections.setdefault(m.module, {}).setdefault(m.role, {})[m.offset] = s.axis(m.blocks, m.inner)
            dims[m.module] = m.dim
        for name in group.dropouts:
            sections.setdefault(name, {})["unit"] = {0: s.axis()}
    for name, roles in sections.items():
        axes: dict[str, Any] = {}
        for role, parts in roles.items():
            ordered = tuple(parts[offset] for offset in sorted(parts))
            axes[role] = ordered[0] if len(ordered) == 1 else ConcatAxis(ordered)
        give_slices_(modules[name], axes, dims.get(name, 1))._path = name  # type: ignore[assignment]
    heads.adapt(model, made)
    return made

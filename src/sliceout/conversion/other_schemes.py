"""Schemes that do not slice the layers of a group: dropout where its readers read, windows through residual blocks."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..drawing import Slices
from ..nn.base import Sliced, adopt, sliced_subclass
from ..nn.factory import slice_
from ..schemes import SCHEMES
from ..schemes.dropout import Dropping
from ..schemes.patch import Form, Side, patch_
from ..slices import Slice
from .dry_run import DryRun, Failure
from .groups import CONVS, Group, Member
from .options import Filter, Rate, check_patterns, matches, rate_of
from .reasons import FILTERED, FROZEN, Skip
from .report import Report, Row
from .trace import Trace, meta_copy, size

log = logging.getLogger(__name__)


def readers_by_group(
    groups: list[Group], scheme: str, modules: dict[str, nn.Module], trace: Trace
) -> dict[Group, list[str]]:
    """The layers that drop from each group; one that has none for this scheme gets the reason why."""
    found: dict[Group, list[str]] = {}
    taken: set[str] = set()
    for group in groups:
        names = readers(group, trace)
        flat = next((n for n in names if not isinstance(modules[n], CONVS)), None)
        if not names:
            why = f"no layer reads these units by themselves: scheme={scheme!r} has no place here"
            group.reason = Skip.NO_READER(why)
        elif SCHEMES[scheme].place == "convolutions" and flat is not None:
            group.reason = Skip.NOT_A_MAP(f"{flat} is not a convolution: scheme={scheme!r} drops from feature maps")
        elif taken & set(names):
            group.reason = Skip.NO_READER("its reader reads another group too, which drops already")
        else:
            found[group] = names
            taken.update(names)
    return found


def drop_(model: nn.Module, readers: dict[Group, list[str]], made: dict[Group, Slice]) -> None:
    """Let the readers of groups drop, in place."""
    modules = dict(model.named_modules())
    for group, names in readers.items():
        for name in names:
            adopt(modules[name], sliced_subclass(type(modules[name]), Dropping), {"in": made[group].axis()})
        for name in group.dropouts:
            if not isinstance(modules[name], Sliced):
                slice_(modules[name], slice=made[group])


def readers(group: Group, trace: Trace) -> list[str]:
    """The layers that read the units and do not hand them on, except those that read a pooled copy of them."""
    handed_on = set(group.names("out"))
    found = [n for n in dict.fromkeys(group.names("in")) if n not in handed_on]
    positions = {n: _positions(trace, n) for n in found}
    return [n for n in found if positions[n] > 1 or max(positions.values()) == 1]


def _positions(trace: Trace, name: str) -> int:
    """Pixels or tokens in what a layer reads, for one sample."""
    sizes = [size(dim) for dim in trace.last_input(name)]
    maps = len(trace.uses.get(f"{name}.weight", [])) > 2
    return math.prod(sizes[2:] if maps else sizes[1:-1])


# -- windows through residual blocks -----------------------------------------------------------------------------------


def patch_blocks_(
    run: DryRun, rate: Rate, filter: Filter, settings: dict[str, Any], follows_torch: bool = False
) -> Report:
    """Patch every residual block of the model of ``run``; see :func:`sliceout.convert_`."""
    kind = type(run.model).__name__
    found = {name: block for name, block in run.model.named_modules() if next(_forms(block), None) is not None}
    if not found:
        raise ValueError(
            f"no residual block in {kind}: looked for modules with conv1, conv2 (conv3), their norms "
            "(bn1 or norm1...) and a shortcut, such as those of Wide ResNet and ResNet"
        )

    check_patterns(rate, (n for block in found for n in (block, *_layers_of(found[block], block))))

    def window(sizes: Any, share: Any) -> tuple[Side, Side]:
        return SCHEMES["patch"].make(*sizes, rate=float(share), **settings)  # type: ignore[no-any-return]

    forms: dict[Any, Form | None] = {}
    groups: list[Group] = []
    plan: dict[Group, tuple[Any, ...]] = {}
    for name, block in found.items():
        code = _same_code(block)
        if code not in forms:
            forms[code] = recognise(block)
        conv1, layers = f"{name}.conv1".removeprefix("."), _layers_of(block, name)
        dropouts = (m.p for m in block.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
        how = forms[code], _map_sizes(run.trace, name, conv1), rate_of(rate, name, (name, *layers), dropouts)
        group = Group(name, how[1][1][0] if how[1] else 0, [Member(conv1, "in", 1, 1)], kind="patch")
        group.passes = [n for n in layers if n != conv1]
        group.reason = _no_window(block, *how, window) if matches(filter, {name: block}) else FILTERED
        groups.append(group)
        if group.reason is None:
            plan[group] = how

    def apply(target: nn.Module) -> dict[Group, tuple[Side, Side]]:
        modules = dict(target.named_modules())
        made = {group: window(*sizes_and_share) for group, (_, *sizes_and_share) in plan.items()}
        for group, sides in made.items():
            patch_(modules[group.name], plan[group][0], *sides)
        return made

    tried: Trace | Failure = run.trace
    while plan and isinstance(tried := run.run(apply), Failure):
        broken = next((g for g in plan if f"{tried.module}.".startswith(f"{g.name}.")), next(iter(plan)))
        del plan[broken]
        broken.reason = Skip.FAILED(f"{tried.module} cannot take a window: {tried.message}")
        log.debug("dropped after a trial: %s: %s", broken.name, broken.reason)
    if not plan or isinstance(tried, Failure):
        reasons = "; ".join(f"{g.name}: {g.reason}" for g in groups[:4])
        raise ValueError(f"no residual block of {kind} can be patched: {reasons}")
    made = run.finish(apply)
    rows = [Row(g, made[g][0] if g in made else None) for g in groups]
    sides = Slices([s for pair in made.values() for s in pair], follows_torch=follows_torch)
    return Report(kind, rows, run.trace.cost, tried.cost, sides, "patch", run.inputs)


def _layers_of(block: nn.Module, name: str) -> list[str]:
    return [f"{name}.{n}".removeprefix(".") for n, _ in block.named_modules() if n]


def _map_sizes(trace: Trace, block: str, conv1: str) -> tuple[Any, Any] | None:
    """Height and width of what the branch of a block reads and writes; ``None`` if it sees several sizes, or none."""
    reads = {tuple(map(size, read[-2:])) for read, _ in trace.calls.get(conv1, ())}
    writes = {tuple(map(size, written[-2:])) for _, written in trace.calls.get(block, ())}
    return (reads.pop(), writes.pop()) if len(reads) == len(writes) == 1 and () not in reads | writes else None


def _same_code(block: nn.Module) -> Any:
    """Equal for blocks that run the same code: what was found out about one holds for the others."""
    return type(block), tuple((n, type(m), m is None) for n, m in block._modules.items())


def _no_window(block: Any, form: Form | None, sizes: Any, share: float | None, window: Callable[..., Any]) -> Any:
    """The reason why a block gets no window; ``None`` if it gets one."""
    if not any(p.requires_grad for p in block.parameters()):
        return FROZEN
    if form is None:
        name = type(block).__name__
        return Skip.NOT_A_BLOCK(f"the code of {name} computes something else than shortcut plus branch")
    for i in range(1, form.convs + 1):
        conv = getattr(block, f"conv{i}")
        if conv.padding != "same" and any(
            2 * p != d * (k - 1) for p, d, k in zip(conv.padding, conv.dilation, conv.kernel_size, strict=True)
        ):
            changes = f"conv{i} changes the size of the map (kernel {conv.kernel_size}, padding {conv.padding})"
            return Skip.NOT_A_BLOCK(changes)
    if sizes is None:
        return Skip.UNEXPECTED_SHAPE("it is called with maps of several sizes, or not at all")
    if share is None:
        return Skip.NO_RATE("no rate was given for it, and no nn.Dropout inside it has one")
    height, width = sizes[1]
    if min(height, width) < 2:
        return Skip.RATE(f"a {height}x{width} map has no smaller window")
    try:
        row, col = window(sizes, share)
    except ValueError as error:
        return Skip.RATE(str(error))
    if not row.sliced and not col.sliced:
        return Skip.RATE(f"at rate {float(share)} the whole {height}x{width} map is kept")
    return None


# -- recognising residual blocks: by the names of their layers, and then by what they compute --------------------------


def _forms(block: Any) -> Iterator[Form]:
    """Every form whose layers the block has."""
    convs = 3 if isinstance(getattr(block, "conv3", None), nn.Conv2d) else 2
    if not all(isinstance(getattr(block, f"conv{i}", None), nn.Conv2d) for i in range(1, convs + 1)):
        return
    norms = [n for n in ("bn", "norm") if all(hasattr(block, f"{n}{i}") for i in range(1, convs + 1))]
    named = [a for a in ("relu", "act", "act#", "activation") if hasattr(block, a.replace("#", "1"))]
    shortcuts: list[Any] = [s for s in ("shortcut", "downsample") if hasattr(block, s)] or [None]
    for norm, first, act, shortcut, activated in product(
        norms, (True, False), [*named, "relu()", None], shortcuts, (True, False)
    ):
        if first or not activated:
            yield Form(convs, norm, first, act, shortcut, activated)


def recognise(block: Any) -> Form | None:
    """The form that computes what the block computes, or ``None``. The block itself is not run."""
    twin = _random_twin(block)
    random = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, block.conv1.in_channels, 8, 8, generator=random, dtype=torch.float64, device="cpu")
    expected = _output(block, twin, x)
    for form in _forms(block) if expected is not None else ():
        got = _output(block, functools.partial(form, twin), x)
        if got is not None and got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-9, atol=1e-9):
            log.debug("%s is %s", type(block).__name__, form)
            return form
    return None


def _output(block: nn.Module, function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """What the layers of ``block`` make of ``x`` in this way; ``None`` if they fail: it is somebody else's code."""
    try:
        with torch.no_grad():
            return function(x.clone())
    except Exception:
        log.debug("%s cannot be run as a residual block", type(block).__name__, exc_info=True)
        return None


def _random_twin(block: nn.Module) -> nn.Module:
    """A copy in float64 and ``eval()`` whose numbers tell apart all that could be confused."""
    twin = meta_copy(block).to_empty(device="cpu").double().eval()
    random = torch.Generator("cpu").manual_seed(1)
    for p in twin.parameters():
        p.data.normal_(0, 1 / math.sqrt(max(p[0].numel(), 1)), generator=random)
    for name, b in twin.named_buffers():
        if b.is_floating_point():
            b.uniform_(0.5, 1.5, generator=random) if "var" in name else b.normal_(0, 0.5, generator=random)
    return twin

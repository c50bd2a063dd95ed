"""convert_(scheme="patch"): find the residual blocks of a model, and give each a window of the map it really sees."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..drawing import Slices
from ..schemes.patch import Side, patch_, window
from ..schemes.residual_blocks import Form
from .dry_run import DryRun, Failure
from .groups import Group, Member
from .options import Filter, Rate, matches, rate_of
from .reasons import FILTERED, FROZEN, Reason, Skip
from .report import Cost, Report, Row
from .residual_blocks import looks_residual, recognise
from .trace import Trace

log = logging.getLogger(__name__)

Size = tuple[int, int]
Sizes = tuple[Size, Size]
"""Of the maps that a block reads and writes."""


def patch_blocks_(
    model: nn.Module,
    rate: Rate,
    *,
    norm: str,
    align: int | None,
    filter: Filter,
    example_inputs: Any,
    seed: int,
) -> Report:
    """Patch every residual block of ``model``; see :func:`sliceout.convert_`."""
    run = DryRun(model, example_inputs)
    found = {name: block for name, block in model.named_modules() if looks_residual(block)}
    if not found:
        raise ValueError(
            f"no residual block in {type(model).__name__}: looked for modules with conv1, conv2 (conv3), their norms "
            "(bn1 or norm1...) and a shortcut, such as those of Wide ResNet and ResNet"
        )
    sizes = _map_sizes(run.trace, found)
    forms: dict[Any, Form | None] = {}
    rows: list[Row] = []
    plan: dict[str, tuple[Form, Size, Size, float]] = {}
    for name, block in found.items():
        group = _group(name, block, sizes.get(name))
        rows.append(Row(group, None))
        code = _same_code(block)
        if code not in forms:
            forms[code] = recognise(block)
        form, value = forms[code], _rate_of_block(name, block, rate)
        group.reason = None if matches(filter, {name: block}) else FILTERED
        group.reason = group.reason or _why_not(block, form, sizes.get(name), value, align)
        if group.reason is None:
            assert form is not None
            assert value is not None
            plan[name] = form, *sizes[name], value

    def make() -> dict[str, tuple[Side, Side]]:
        settings: dict[str, Any] = {"norm": norm, "align": align or 1, "seed": seed}
        return {n: window(reads, writes, value, **settings) for n, (_, reads, writes, value) in plan.items()}

    def apply(target: nn.Module, made: dict[str, tuple[Side, Side]]) -> None:
        modules = dict(target.named_modules())
        for name, (row, col) in made.items():
            patch_(modules[name], plan[name][0], row, col)

    while True:
        if not plan:
            reasons = "; ".join(f"{r.name}: {r.reason}" for r in rows[:4])
            raise ValueError(f"no residual block of {type(model).__name__} can be patched: {reasons}")
        tried = run.try_sliced([], lambda shadow, _: apply(shadow, make()))
        if not isinstance(tried, Failure):
            break
        broken = next((n for n in plan if (tried.module + ".").startswith(n + ".")), next(iter(plan)))
        del plan[broken]
        why = Skip.FAILED(f"{tried.module} cannot take a window: {tried.message}")
        log.debug("dropped after a trial: %s: %s", broken, why)
        next(r.group for r in rows if r.name == broken).reason = why
    made = make()
    apply(model, made)
    for row in rows:
        row.slice = made[row.name][0] if row.name in made else None
    sides = Slices([s for pair in made.values() for s in pair])
    return Report(type(model).__name__, rows, Cost.of(run.trace), Cost.of(tried), sides, scheme="patch")


def _map_sizes(trace: Trace, found: Iterable[str]) -> dict[str, Sizes]:
    """Height and width of what the branch of each block reads and writes; without those that see several sizes."""
    sizes: dict[str, Sizes] = {}
    for name in found:
        reads = {read[-2:] for read, _ in trace.shapes.get(_layer(name, "conv1"), ())}
        writes = {written[-2:] for _, written in trace.shapes.get(name, ())}
        if len(reads) == len(writes) == 1 and () not in reads | writes:
            sizes[name] = reads.pop(), writes.pop()  # type: ignore[assignment]
    return sizes


def _layer(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name


def _group(name: str, block: nn.Module, sizes: Sizes | None) -> Group:
    first = _layer(name, "conv1")
    others = [_layer(name, n) for n, _ in block.named_modules() if n not in ("", "conv1")]
    return Group(name, sizes[1][0] if sizes else 0, [Member(first, "in", 1, 1)], passes=others, kind="patch")


def _same_code(block: nn.Module) -> Any:
    """Equal for blocks that run the same code: what was found out about one holds for the others."""
    return type(block), tuple((n, type(m), m is None) for n, m in block._modules.items())


def _rate_of_block(name: str, block: nn.Module, rate: Rate) -> float | None:
    layers = (name, *(f"{name}.{n}" for n, _ in block.named_modules()))
    dropouts = (m.p for m in block.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
    value = rate_of(rate, name, layers, dropouts)
    return None if value is None else float(value)


def _why_not(
    block: Any, form: Form | None, sizes: Sizes | None, rate: float | None, align: int | None
) -> Reason | None:
    """Why a block gets no window; ``None`` if it can have one."""
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
    if rate is None:
        return Skip.NO_RATE("no rate was given for it, and no nn.Dropout inside it has one")
    reads, writes = sizes
    if min(writes) < 2:
        return Skip.RATE(f"a {writes[0]}x{writes[1]} map has no smaller window")
    try:
        row, col = window(reads, writes, rate, align=align or 1)
    except ValueError as error:
        return Skip.RATE(str(error))
    if not row.sliced and not col.sliced:
        return Skip.RATE(f"at rate {rate} the whole {writes[0]}x{writes[1]} map is kept")
    return None

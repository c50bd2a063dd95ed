"""convert_(scheme="patch"): find the residual blocks of a model, and give each a window of the map it really sees."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from ..drawing import Slices
from ..schemes.patch import Form, Side, patch_, window
from .dry_run import DryRun, Failure
from .groups import Group, Member
from .options import Filter, Rate, matches, rate_of
from .reasons import FILTERED, FROZEN, Reason, Skip
from .report import Report, Row
from .residual_blocks import looks_residual, recognise
from .trace import Trace

log = logging.getLogger(__name__)

Windows = Callable[[], tuple[Side, Side]]
"""Makes the sides of a block's window."""


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
    forms: dict[Any, Form | None] = {}
    rows: list[Row] = []
    plan: dict[str, tuple[Form, Windows]] = {}
    for name, block in found.items():
        code = _same_code(block)
        if code not in forms:
            forms[code] = recognise(block)
        sizes = _map_sizes(run.trace, name)
        settings = {"rate": _rate_of_block(name, block, rate), "norm": norm, "align": align or 1, "seed": seed}
        window_or_why = _window(block, forms[code], sizes, settings) if matches(filter, {name: block}) else FILTERED
        members = [Member(_layer(name, "conv1"), "in", 1, 1)]
        others = [_layer(name, n) for n, _ in block.named_modules() if n not in ("", "conv1")]
        group = Group(name, sizes[1][0] if sizes else 0, members, passes=others, kind="patch")
        rows.append(Row(group, None))
        if isinstance(window_or_why, Reason):
            group.reason = window_or_why
        else:
            plan[name] = window_or_why

    def apply(target: nn.Module) -> dict[str, tuple[Side, Side]]:
        modules = dict(target.named_modules())
        made = {name: windows() for name, (_, windows) in plan.items()}
        for name, (row, col) in made.items():
            patch_(modules[name], plan[name][0], row, col)
        return made

    while True:
        if not plan:
            reasons = "; ".join(f"{r.name}: {r.reason}" for r in rows[:4])
            raise ValueError(f"no residual block of {type(model).__name__} can be patched: {reasons}")
        tried = run.run(apply)
        if not isinstance(tried, Failure):
            break
        broken = next((n for n in plan if (tried.module + ".").startswith(n + ".")), next(iter(plan)))
        del plan[broken]
        why = Skip.FAILED(f"{tried.module} cannot take a window: {tried.message}")
        log.debug("dropped after a trial: %s: %s", broken, why)
        next(r.group for r in rows if r.name == broken).reason = why
    made = apply(model)
    for row in rows:
        row.slice = made[row.name][0] if row.name in made else None
    sides = Slices([s for pair in made.values() for s in pair])
    return Report(type(model).__name__, rows, run.trace.cost, tried.cost, sides, scheme="patch")


def _map_sizes(trace: Trace, block: str) -> tuple[Any, Any] | None:
    """Height and width of what the branch of a block reads and writes; ``None`` if it sees several sizes, or none."""
    reads = {read[-2:] for read, _ in trace.shapes.get(_layer(block, "conv1"), ())}
    writes = {written[-2:] for _, written in trace.shapes.get(block, ())}
    return (reads.pop(), writes.pop()) if len(reads) == len(writes) == 1 and () not in reads | writes else None


def _layer(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name


def _same_code(block: nn.Module) -> Any:
    """Equal for blocks that run the same code: what was found out about one holds for the others."""
    return type(block), tuple((n, type(m), m is None) for n, m in block._modules.items())


def _rate_of_block(name: str, block: nn.Module, rate: Rate) -> float | None:
    layers = (name, *(f"{name}.{n}" for n, _ in block.named_modules()))
    dropouts = (m.p for m in block.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
    value = rate_of(rate, name, layers, dropouts)
    return None if value is None else float(value)


def _window(
    block: Any, form: Form | None, sizes: tuple[Any, Any] | None, settings: dict[str, Any]
) -> tuple[Form, Windows] | Reason:
    """How a block is cut, or why it gets no window."""
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
    if settings["rate"] is None:
        return Skip.NO_RATE("no rate was given for it, and no nn.Dropout inside it has one")
    height, width = sizes[1]
    if min(height, width) < 2:
        return Skip.RATE(f"a {height}x{width} map has no smaller window")
    windows = functools.partial(window, *sizes, **settings)
    try:
        row, col = windows()
    except ValueError as error:
        return Skip.RATE(str(error))
    if not row.sliced and not col.sliced:
        return Skip.RATE(f"at rate {settings['rate']} the whole {height}x{width} map is kept")
    return form, windows

"""The report of a conversion: every group, sliced or skipped and why, and what it should save."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from .groups import RIVAL, Group
from .slices import Slice, Slices
from .trace import Guesses, Where


@dataclass
class Cost:
    """What one forward pass of one batch takes: FLOPs and numbers written by each layer."""

    flops: dict[str, int]
    activations: dict[str, int]

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def total_activations(self) -> int:
        return sum(self.activations.values())


def measure(run: Any, apply: Callable[[nn.Module], Any] | None) -> Cost:
    """Count a forward pass of the dry run's copy, sliced by ``apply`` or full.

    torch's counter sees the products of attention too: on the meta device it is decomposed into them.
    """
    shadow = run.shadow()
    if apply is not None:
        apply(shadow)
    cost = Cost({}, {})
    with Where(shadow) as where, torch.no_grad():
        counter = FlopCounterMode(display=False)
        before = [0]

        def called(name: str, module: nn.Module, args: Any, output: Any) -> None:
            now = counter.get_total_flops()
            cost.flops[name] = cost.flops.get(name, 0) + now - before[0]
            before[0] = now
            if not any(True for _ in module.children()):
                numel = sum(t.numel() for t in tree_leaves(output) if isinstance(t, Tensor))
                cost.activations[name] = cost.activations.get(name, 0) + numel

        where.on_call.append(called)
        with Guesses(), counter:
            shadow(*run.call[0], **run.call[1])
    return cost


@dataclass
class Row:
    """One group in the report."""

    group: Group
    slice: Slice | None

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def reason(self) -> str | None:
        return self.group.reason


@dataclass
class Report:
    """What :func:`sliceout.convert_` did. ``print`` it, or read its fields.

    Attributes:
        model: the name of the model's class.
        rows: every group that was found, sliced (``slice`` is set) or skipped (``reason`` is).
        before, after: forward cost of the full and of the sliced network on the example inputs.
        slices: the slices, drawn together.
    """

    model: str
    rows: list[Row]
    before: Cost
    after: Cost
    slices: Slices = field(repr=False)

    @property
    def converted(self) -> int:
        return sum(r.slice is not None for r in self.rows)

    @property
    def skipped(self) -> list[Row]:
        return [r for r in self.rows if r.slice is None]

    @property
    def flop_saving(self) -> float:
        """Expected fraction of the FLOPs that is saved (backward takes twice the forward, so the same holds for both)."""
        return 1 - self.after.total_flops / max(self.before.total_flops, 1)

    @property
    def activation_saving(self) -> float:
        """Expected fraction of the numbers written by the layers that is saved."""
        return 1 - self.after.total_activations / max(self.before.total_activations, 1)

    def saving_of(self, row: Row) -> tuple[float, float]:
        """FLOPs and activations that the layers of one group save, as fractions of the whole model.

        A layer between two groups is counted half in each.
        """
        sharers: dict[str, int] = {}
        for r in self.rows:
            if r.slice is not None:
                for name in {m.module for m in r.group.members}:
                    sharers[name] = sharers.get(name, 0) + 1
        flops = activations = 0.0
        for name in {m.module for m in row.group.members}:
            if name in sharers:
                flops += (self.before.flops.get(name, 0) - self.after.flops.get(name, 0)) / sharers[name]
                gone = self.before.activations.get(name, 0) - self.after.activations.get(name, 0)
                activations += gone / sharers[name]
        return flops / max(self.before.total_flops, 1), activations / max(self.before.total_activations, 1)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "model": self.model,
            "flops": {"full": self.before.total_flops, "sliced": self.after.total_flops},
            "activations": {"full": self.before.total_activations, "sliced": self.after.total_activations},
            "groups": [
                {
                    "name": r.name,
                    "family": r.group.family,
                    "size": r.group.size,
                    "width": r.slice.width if r.slice else None,
                    "sampling": r.slice.sampling if r.slice else None,
                    "norm": r.slice.norm if r.slice else None,
                    "members": [vars(m) for m in r.group.members],
                    "dropouts": r.group.dropouts,
                    "reason": r.reason,
                }
                for r in self.rows
            ],
        }

    def __str__(self) -> str:
        lines = [f"SliceOut: {self.model}, {self.converted} groups sliced"]
        table = [("group", "kind", "reads", "kept", "sampling", "norm", "FLOPs", "activations")]
        for names, rows in _alike([r for r in self.rows if r.slice is not None]):
            s, g = rows[0].slice, rows[0].group
            assert s is not None
            savings = [self.saving_of(r) for r in rows]
            flops, activations = (sum(column) for column in zip(*savings, strict=True))
            reads = ", ".join(dict.fromkeys(n.rpartition(".")[2] for n in g.names("in"))) or "itself"
            table.append(
                (names, g.family, reads, f"{s.width} of {s.size}", s.sampling, s.norm, _percent(flops), _percent(activations))
            )
        lines += _columns(table)
        flops, activations = _percent(self.flop_saving), _percent(self.activation_saving)
        lines.append(f"whole model: {flops} FLOPs, {activations} activations (layer outputs) per training step")
        if self.skipped:
            lines.append("left alone:")
            by_reason: dict[str, list[Row]] = {}
            for r in self.skipped:
                if (r.reason or "").startswith(RIVAL):
                    continue
                by_reason.setdefault(_pattern(r.reason or ""), []).append(r)
            for reason, rows in by_reason.items():
                names = [n for n, _ in _alike(rows)]
                shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                lines.append(f"  {shown}: {reason}")
        return "\n".join(lines)


def _percent(fraction: float) -> str:
    return f"{-100 * fraction:+.1f} %" if abs(fraction) >= 5e-4 else "0 %"


def _pattern(text: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|\b)", "*", text)


def _alike(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that differ only in a layer number become one line."""
    found: dict[Any, list[Row]] = {}
    for r in rows:
        key = (_pattern(r.name), r.group.size, bool(r.group.names("in")), r.slice.width if r.slice else r.reason and _pattern(r.reason))
        found.setdefault(key, []).append(r)
    return [(f"{key[0]} x{len(same)}" if len(same) > 1 else same[0].name, same) for key, same in found.items()]


def _columns(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]

"""The report of a conversion: every group, sliced or skipped and why, and what it should save."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..drawing import Slices
from ..slices import Slice
from .groups import Group
from .reasons import Reason, Skip
from .trace import Cost


def savings(sliced: list[Group], before: Cost, after: Cost) -> dict[Group, tuple[float, float]]:
    """FLOPs and activations that the layers of each group save, as fractions of the whole model.

    The work of a layer between two groups counts half in each; what it writes belongs to those units alone.
    """
    work = {g: {m.module for m in g.members} for g in sliced}
    written = {g: {*(m.module for m in g.members if m.role != "in"), *g.passes} for g in sliced}
    flops, gone = _shares(work, before.flops, after.flops), _shares(written, before.activations, after.activations)
    return {g: (flops[g], gone[g]) for g in sliced}


def _shares(touched: dict[Group, set[str]], before: Counter[str], after: Counter[str]) -> dict[Group, float]:
    """What the modules of each group save of the whole, divided among the groups that touch them."""
    sharers = Counter(name for names in touched.values() for name in names)
    saved = {name: (before[name] - after[name]) / n for name, n in sharers.items()}
    return {g: sum(saved[name] for name in names) / max(before.total(), 1) for g, names in touched.items()}


_WIDE = 160  # columns of a wide terminal, and of files


@dataclass
class Row:
    """One group in the report."""

    group: Group
    slice: Slice | None

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def reason(self) -> Reason | None:
        """Why it was skipped; ``str(reason)`` is the sentence, ``reason.code`` says what kind of reason it is."""
        return self.group.reason

    @property
    def one_part(self) -> Reason | None:
        """Why the whole batch shares its slice though ``parts`` were asked for."""
        return self.group.one_part if self.slice is not None else None

    @property
    def dropout(self) -> str:
        """Which dropout goes on inside the group while it is sliced, and the way out; empty if there is none."""
        where = ", ".join(name or "the model" for name in self.group.drops)
        if self.slice is None or not where:
            return ""
        if self.group.kind == "attention":
            return f"attention's dropout in {where}: set its p to 0, or let both act"
        return f"F.dropout in {where}: set its p to 0, or make it an nn.Dropout, which rests"


@dataclass
class Report:
    """What :func:`sliceout.convert_` did. ``print`` it, or read its fields.

    Attributes:
        model: the name of the model's class.
        rows: every group that was found, sliced (``slice`` is set) or skipped (``reason`` is).
        before, after: forward cost of the full and of the sliced network on the example inputs.
        slices: the slices, drawn together.
        scheme: ``"sliceout"``, or the baseline that was asked for.
        inputs: the shapes that the dry run was given, and whether they were guessed: they may change what is sliced.
    """

    model: str
    rows: list[Row]
    before: Cost
    after: Cost
    slices: Slices = field(repr=False)
    scheme: str = "sliceout"
    inputs: str = ""

    @property
    def converted(self) -> int:
        return sum(r.slice is not None for r in self.rows)

    @property
    def skipped(self) -> list[Row]:
        return [r for r in self.rows if r.slice is None]

    @property
    def flop_saving(self) -> float:
        """Expected fraction of the FLOPs that is saved: of the forward, and so of the backward too."""
        return 1 - self.after.flops.total() / max(self.before.flops.total(), 1)

    @property
    def activation_saving(self) -> float:
        """Expected fraction of the numbers written by the layers that is saved."""
        return 1 - self.after.activations.total() / max(self.before.activations.total(), 1)

    def saving_of(self, row: Row) -> tuple[float, float]:
        """FLOPs and activations that the layers of one group save; see :func:`savings`."""
        sliced = [r.group for r in self.rows if r.slice is not None]
        return savings(sliced, self.before, self.after).get(row.group, (0.0, 0.0))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "model": self.model,
            "scheme": self.scheme,
            "inputs": self.inputs,
            "flops": {"full": self.before.flops.total(), "sliced": self.after.flops.total()},
            "activations": {"full": self.before.activations.total(), "sliced": self.after.activations.total()},
            "groups": [
                {
                    "name": r.name,
                    "kind": r.group.kind,
                    "size": r.group.size,
                    **{key: getattr(r.slice, key, None) for key in ("width", "sampling", "norm", "grads", "parts")},
                    "members": [vars(m) for m in r.group.members],
                    "dropouts": r.group.dropouts,
                    "reason": r.reason and str(r.reason),
                    "code": r.reason and r.reason.code.value,
                    "one_part": r.one_part and str(r.one_part),
                    "dropout": r.dropout,
                }
                for r in self.rows
            ],
        }

    def text(self, columns: int = _WIDE) -> str:
        """The report for a terminal of this width."""
        sliced = [r for r in self.rows if r.slice is not None]
        lines = [_title(self, sliced)]
        table: list[tuple[str, ...]] = [("group (first layer)", "kind", "read by", "kept", "FLOPs", "activations")]
        saved = savings([r.group for r in sliced], self.before, self.after)
        for name, rows in _merged(sliced):
            s, g = rows[0].slice, rows[0].group
            assert s is not None
            flops, activations = (sum(saved[r.group][i] for r in rows) for i in range(2))
            table.append((name, g.kind, _readers(g), s.share, _percent(flops), _percent(activations)))
        lines += _shortened(_columns(table, columns), 16, "groups")
        flops, activations = self.flop_saving, self.activation_saving
        whole = f"whole model: FLOPs {_percent(flops)}, activations {_percent(activations)} per training step"
        lines.append(f"{whole}; input: {self.inputs}")
        skipped = [r for r in self.skipped if r.reason is None or r.reason.code is not Skip.CONFLICT]
        lines += _by_reason("one slice for the whole batch:", [(r, r.one_part) for r in sliced if r.one_part])
        lines += _by_reason("dropout that goes on:", [(r, r.dropout) for r in sliced if r.dropout])
        lines += _by_reason("left alone:", [(r, r.reason) for r in skipped])
        return "\n".join(part for line in lines for each in line.split("\n") for part in _fitted(each, columns))

    def __str__(self) -> str:
        return self.text()


def _fitted(line: str, columns: int) -> list[str]:
    """A line that is too long: cut on a wide terminal, in several lines on a narrow one."""
    if columns >= _WIDE or len(line) <= columns:
        return [line if len(line) <= columns else line[: columns - 3] + "..."]
    return textwrap.wrap(line, max(columns, 30), subsequent_indent="    ", break_on_hyphens=False)


def _shortened(lines: list[str], most: int, what: str) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"  ... and {len(lines) - most + 1} more {what}: see .rows"]


def _by_reason(title: str, rows: Sequence[tuple[Row, Reason | str | None]]) -> list[str]:
    """The rows that have the same reason in one line, under a title."""
    found: dict[str, list[Row]] = {}
    for row, reason in rows:
        found.setdefault(pattern(str(reason or "")), []).append(row)
    lines = [f"  {_listed([name for name, _ in _merged(same)])}: {why}" for why, same in found.items()]
    return [title, *_shortened(lines, 6, "reasons")] if lines else []


def _listed(names: list[str], most: int = 3) -> str:
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _title(report: Report, sliced: list[Row]) -> str:
    groups = "1 group" if len(sliced) == 1 else f"{len(sliced)} groups"
    made = [(r.group, r.slice) for r in sliced if r.slice is not None]
    samplings = dict.fromkeys(s.sampling for _, s in made)
    # queries and keys have no norm of their own
    norms = dict.fromkeys(s.norm for g, s in made if g.names("in") or not g.contracted)
    compact = "; compact gradients" if any(s.grads == "compact" for _, s in made) else ""
    most = max((s.parts for _, s in made), default=1)
    parts = f"; {most} parts" if most > 1 else ""
    settings = f"{', '.join(samplings)}; norm {', '.join(norms) or 'none'}{parts}{compact}"
    if report.scheme == "sliceout":
        return f"SliceOut: {report.model}, {groups} of units sliced ({settings})"
    if report.scheme in ("samples", "droppath"):
        name = "Sample-SliceOut" if report.scheme == "samples" else "Baseline 'droppath'"
        branches = "1 residual branch" if len(sliced) == 1 else f"{len(sliced)} residual branches"
        return f"{name}: {report.model}, {branches}"
    if report.scheme == "patch":
        return f"Patch-SliceOut: {report.model}, {groups.replace('group', 'residual block')} ({settings})"
    return f"Baseline {report.scheme!r}: {report.model}, {groups} of units ({settings})"


def _readers(group: Group) -> str:
    names = list(dict.fromkeys(n.rpartition(".")[2] for n in group.names("in")))
    return _listed(names, most=4) or ("each other (q, k)" if group.contracted else "its own output")


def _percent(fraction: float) -> str:
    return f"{-100 * fraction:+.1f} %" if abs(fraction) >= 5e-4 else "0 %"


def pattern(text: str) -> str:
    """The text with the numbers in dotted names replaced by stars; numbers such as rates stay."""
    return re.sub(r"\b[A-Za-z_]\w*(?:\.\w+)+", lambda name: re.sub(r"(?<=\.)\d+\b", "*", name.group()), text)


def _merged(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that differ only in a layer number, as one: with a name for all of them."""
    found: dict[Any, list[Row]] = {}
    for r in rows:
        kept_or_why = r.slice.width if r.slice else pattern(str(r.reason or ""))
        key = (pattern(r.name), r.group.size, bool(r.group.names("in")), kept_or_why)
        found.setdefault(key, []).append(r)
    out = []
    for key, same in found.items():
        part = "" if same[0].group.partner is None else " (q, k)" if same[0].group.contracted else " (v)"
        out.append((f"{key[0]}{part} x{len(same)}" if len(same) > 1 else f"{same[0].name}{part}", same))
    return out


def _columns(table: list[tuple[str, ...]], columns: int) -> list[str]:
    """The rows with their cells below each other; where that is too wide, names stand above their numbers."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    rows = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in table]
    if sum(widths) + 2 * len(widths) <= columns:
        return ["  " + "  ".join(row).rstrip() for row in rows]
    return [f"  {row[0].rstrip()}\n      {'  '.join(row[1:]).rstrip()}" for row in rows]

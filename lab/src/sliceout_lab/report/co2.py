"""The CO2 page: the paper's three approaches, computed from measured time, memory and energy.

Grams are energy times the carbon intensity of the electricity, which nobody can measure here: it is an input, with its
source. Percentages do not depend on it. Where no energy was measured, time stands in for it, as it does in the paper,
and the page says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sliceout.cli.measure import held

from . import paper
from .figures import COLOURS, Drawn, legend, panel
from .groups import Group, name_of, scaling_in_words
from .page import Bullets, Figures, Heading, Page, Table, Text
from .reading import Measured
from .tables import Speeds, signed
from .timing import energy_of_step

NOT_MEASURED = "not measured here"
DEVICES = 4


@dataclass(frozen=True)
class Carbon:
    """Grams of CO2 for a kilowatt-hour of electricity, and who says so."""

    grams_per_kwh: float = 480.0
    source: str = "world average of 2023, Ember, Global Electricity Review 2024"

    def grams(self, joules: float) -> float:
        return joules / 3.6e6 * self.grams_per_kwh


def page(
    measured: Measured,
    groups: Sequence[Group],
    rows: Speeds,
    carbon: Carbon,
) -> Page:
    """The page; ``rows`` are those of the speed-ups."""
    theirs = paper.read("co2")
    out = Page("CO2: three ways to emit less")
    out.add(
        Text(
            f"Carbon intensity of the electricity: **{carbon.grams_per_kwh:g} g CO2 per kWh** ({carbon.source}). "
            "This is an input, "
            "not a measurement: `sliceout-lab report --carbon-intensity G_PER_KWH --carbon-source TEXT` sets another. "
            "It is the GPU's "
            "energy that is measured (NVML's counter), not the processor's, the cooling's or the making of the machine."
        ),
        Text(
            f"What the paper says (its appendix, lines {theirs['lines'][0]} to {theirs['lines'][1]} of the .tex): "
            f"SliceOut emits {-theirs['summary'][0]} to {-theirs['summary'][1]} % less CO2. {theirs['note']}"
        ),
    )
    devices = list(_fewer_devices(measured))
    batches = list(_larger_batch(measured, carbon))
    faster = list(_faster(rows, carbon))
    one, two, three = theirs["approaches"]
    changes: list[tuple[str, str, float]] = []
    out.add(Heading("1. Fewer devices"))
    out.add(
        Text(
            f"The paper: {one['devices'][0]} GPUs without SliceOut, {one['devices'][1]} with it, {-one['time']} % "
            f"less time per epoch: {-one['co2']} % less CO2. Ours is computed from one device: the total batch "
            f"stays that of {DEVICES} devices, each of fewer ones takes a larger share as far as the memory of "
            "standard dropout allows, at the time per sample that was measured there. Communication between "
            "devices is not counted."
        )
    )
    out.add(_table(("network", "devices", "batch on each", "time", "CO2"), [r for r, _ in devices]))
    changes += [(r[0], "1. fewer devices", c) for r, c in devices]
    out.add(Heading("2. The same device, a larger batch"))
    out.add(
        Text(
            f"The paper: {-two['co2']} % less time, and so less CO2, for a batch that fills the same memory. Ours: "
            "the largest batch within the memory of standard dropout (`sliceout-lab bench --match-memory`), per "
            "sample."
        )
    )
    out.add(
        _table(("network", "batch", "memory", "time per sample", "energy per sample", "CO2"), [r for r, _ in batches])
    )
    changes += [(r[0], "2. larger batch", c) for r, c in batches]
    out.add(Heading("3. The same set-up, only faster"))
    out.add(
        Text(
            f"The paper: {-three['co2'][0]} % (Transformers) to about {-three['co2'][1]} % (some convolutional "
            "networks) less."
        )
    )
    out.add(
        _table(
            ("network", "time of a step", "energy of a step", "g CO2 for 100,000 steps", "CO2"), [r for r, _ in faster]
        )
    )
    changes += [(r[0], "3. only faster", c) for r, c in faster]
    if changes:
        out.add(Figures(_picture(changes, theirs)))
    out.add(Heading("Energy of whole trainings"))
    out.add(_trainings(groups, carbon))
    out.add(Heading("Against the paper"), Bullets(_verdicts(changes, theirs)))
    return out


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table | Text:
    return Table(columns, rows) if rows else Text(f"*{NOT_MEASURED.capitalize()}.*")


def _matches(measured: Measured) -> Iterator[dict[str, Any]]:
    for bench in measured.benches:
        for row in bench.get("match_memory") or []:
            if row.get("error") is None and row.get("standard") and row.get("sliceout"):
                yield {**row, "device": (bench.get("machine") or {}).get("device", "unknown device")}


def _title(row: dict[str, Any]) -> str:
    how = f"{row['device']}, {row['mode']}, {row['precision']}, {row.get('grads') or 'dense'} gradients"
    against = ", against no dropout" if row.get("baseline") == "none" else ""
    return f"{row['model']}, rate {row['rate']:g}\n*{how}{against}*"


def _fewer_devices(measured: Measured) -> Iterator[tuple[list[str], float]]:
    for row in _matches(measured):
        base, ours = row["standard"], row["sliceout"]
        fewest = next((k for k in range(1, DEVICES + 1) if k * ours["batch"] >= DEVICES * base["batch"]), DEVICES)
        if fewest == DEVICES:
            few = f"{DEVICES}: fewer do not hold the batch"
            yield [_title(row), few, f"at most {ours['batch']}", "-", "**0 %**\n*no saving this way*"], 0.0
            continue
        share = math.ceil(DEVICES * base["batch"] / fewest)
        per_sample = ours["ms"] / ours["batch"]
        time = share * per_sample / base["ms"]
        change = 100 * (fewest * time / DEVICES - 1)
        yield (
            [
                _title(row),
                f"{DEVICES} → {fewest}",
                f"{base['batch']} → {share}",
                f"{100 * (time - 1):+.0f} %",
                f"**{change:+.0f} %**\n*devices x time*",
            ],
            change,
        )


def _larger_batch(measured: Measured, carbon: Carbon) -> Iterator[tuple[list[str], float]]:
    for row in _matches(measured):
        base, ours = row["standard"], row["sliceout"]
        time = 100 * ((ours["ms"] / ours["batch"]) / (base["ms"] / base["batch"]) - 1)
        before, after = held(base), held(ours)
        memory = 100 * after / before if before and after else None
        joules = [energy_of_step(x) for x in (base, ours)]
        per_sample = [j / x["batch"] for j, x in zip(joules, (base, ours), strict=True) if j]
        saved = 100 * (per_sample[1] / per_sample[0] - 1) if len(per_sample) == 2 else None
        change = time if saved is None else saved
        yield [
            _title(row), f"{base['batch']} → {'at least ' if row.get('capped') else ''}{ours['batch']}",
            "-" if memory is None else f"{memory:.0f} % of standard",
            f"{time:+.0f} %", NOT_MEASURED if saved is None else f"{saved:+.0f} %",
            f"**{change:+.0f} %**\n*{'from time' if saved is None else 'from energy'}*",
        ], change  # fmt: skip


def _faster(rows: Speeds, carbon: Carbon) -> Iterator[tuple[list[str], float]]:
    for model, pair, _, _ in rows:
        if pair is None or pair.step.scaled:
            continue
        change = (pair.time if pair.energy is None else pair.energy) - 100
        joules = (pair.base.joules, pair.step.joules)
        grams = [carbon.grams(1e5 * j) for j in joules if j]
        yield [
            f"{model}, rate {pair.step.rate:g}\n*{pair.step.where}*",
            f"{pair.base.ms:.3g} → {pair.step.ms:.3g} ms\n{pair.time - 100:+.0f} %",
            NOT_MEASURED if pair.energy is None else f"{joules[0]:.3g} → {joules[1]:.3g} J\n{pair.energy - 100:+.0f} %",
            NOT_MEASURED if len(grams) < 2 else f"{grams[0]:,.4g} → {grams[1]:,.4g}",
            f"**{change:+.0f} %**\n*{'from time' if pair.energy is None else 'from energy'}*",
        ], change  # fmt: skip


def _trainings(groups: Sequence[Group], carbon: Carbon) -> Table | Text:
    rows = []
    for group in groups:
        joules, seconds = group.number("energy_joules"), group.number("seconds")
        if joules is None:
            continue
        scaled = f"\n*scaled down: {scaling_in_words(group.scaled)}*" if group.scaled else ""
        rows.append([
            f"{group.config['data']}, {group.config['model']}{scaled}",
            name_of(group.config) + (f", rate {group.rate:g}" if group.rate else ""), f"{joules.n}",
            "-" if seconds is None else f"{seconds.mean:,.0f} s",
            f"{joules.mean / 3600:,.1f} Wh", f"{carbon.grams(joules.mean):,.1f} g",
        ])  # fmt: skip
    return _table(("training", "scheme", "n", "seconds", "GPU's energy", "CO2"), rows)


def _picture(changes: Sequence[tuple[str, str, float]], theirs: dict[str, Any]) -> list[Drawn]:
    out: list[Drawn] = []
    shades = dict(
        zip(
            sorted({a for _, a, _ in changes}),
            (COLOURS["sliceout-circular"], COLOURS["sliceout-flow"], COLOURS["controlled"]),
            strict=False,
        )
    )
    low, high = theirs["summary"]
    caption = (
        f"Change of CO2 by approach, computed from measured time and energy. Shaded: what the paper claims, {low} "
        f"to {high} %."
    )
    with panel(
        "co2",
        "Change of CO2",
        caption,
        out,
        title="Change of CO2 with SliceOut",
        figsize=(5.6, 0.32 * len(changes) + 1.6),
    ) as axes:
        axes.axvspan(high, low, color=COLOURS["sliceout-probabilistic"], alpha=0.12, linewidth=0)
        for y, (_, approach, change) in enumerate(changes):
            axes.barh(y, change, 0.6, color=shades[approach], label=approach)
            axes.text(
                change + (1 if change >= 0 else -1),
                y,
                signed(change),
                va="center",
                ha="left" if change >= 0 else "right",
                fontsize=8,
            )
        axes.set_yticks(range(len(changes)), [n.split("\n")[0] for n, _, _ in changes])
        axes.axvline(0, linewidth=0.8, color=COLOURS["none"])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(min(-50, *(c - 9 for _, _, c in changes)), max(5, *(c + 9 for _, _, c in changes)))
        axes.set_xlabel("%")
        legend(axes, 3)
    return out


def _verdicts(changes: Sequence[tuple[str, str, float]], theirs: dict[str, Any]) -> list[str]:
    out = []
    low, high = theirs["summary"]
    for number, claim in enumerate(theirs["approaches"], 1):
        got = [c for _, approach, c in changes if approach.startswith(f"{number}.")]
        claimed = claim["co2"] if isinstance(claim["co2"], int) else f"{claim['co2'][0]} to {claim['co2'][1]}"
        if not got:
            out.append(f"Approach {number}: the paper {claimed} %; {NOT_MEASURED}.")
            continue
        span = f"from {signed(min(got))} to {signed(max(got))} % over {len(got)} cases"
        ours = span if len(got) > 1 else f"{signed(got[0])} % in 1 case"
        if isinstance(claim["co2"], int):  # one number: of one network
            out.append(f"Approach {number}: the paper {claimed} % for its network; ours {ours}.")
            continue
        inside = sum(high <= c <= low for c in got)
        more = sum(c < high for c in got)
        out.append(
            f"Approach {number}: the paper {claimed} %; ours {ours}: {inside} within the paper's {low} to {high} %, "
            f"{more} save more, {len(got) - inside - more} save less or nothing."
        )
    return out

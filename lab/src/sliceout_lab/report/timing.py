"""Time, memory and energy of a training step, from benchmarks and from training runs, and what they are relative to.

Two steps are compared only if they were taken on the same device, at the same batch, precision and execution mode, and
(benchmarks) in the same file. Where several modes were measured, the one in which the *baseline* is fastest counts, by
time per sample: SliceOut is held against a strong baseline, not against a slow one. Benchmarks with torch's allocator
as it comes go before others. Runs that shared the device are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .groups import Estimate, Group, scaling_in_words
from .reading import Measured

SAME_COST = "the same launches and bytes"
"""Of window and circular slices where kernels copy them; eager code takes a window as a view."""


@dataclass(frozen=True)
class Step:
    """One measured training step."""

    model: str
    batch: int
    scheme: str
    rate: float
    sampling: str | None
    norm: str | None
    grads: str
    mode: str
    precision: str
    device: str
    size: Any
    source: str
    ms: float
    spread: tuple[float, float] | None
    reserved: float | None
    allocated: float | None
    joules: float | None
    n: int = 1
    data: str | None = None
    scaled: str = ""
    """What was scaled down, in words, if it changes the step."""
    allocator: str = ""
    """How torch's was set up, if it was."""

    @property
    def setting(self) -> tuple[Any, ...]:
        """What must be equal for two steps to be compared, networks apart."""
        return (self.source, self.device, self.batch, self.precision, self.mode, self.data, self.scaled)

    def stands_in(self, match: Mapping[str, Any]) -> str | None:
        """What to say where circular slices fill a place that asks for windows, or the other way round."""
        wanted = match.get("sampling")
        if self.scheme != "sliceout" or not wanted or not self.sampling or self.sampling == wanted:
            return None
        cost = "those that wrap around are copied in two pieces" if self.mode == "eager" else SAME_COST
        return f"measured with {self.sampling} in place of {wanted} slices: {cost}"

    @property
    def where(self) -> str:
        grads = "" if self.grads == "dense" else f", {self.grads} gradients"
        allocator = self.allocator and f", allocator {self.allocator}"
        return f"{self.device}, {self.precision}, {self.mode}, batch {self.batch}{grads}{allocator}"


@dataclass(frozen=True)
class Pair:
    """A step and what it is held against."""

    step: Step
    base: Step

    @property
    def time(self) -> float:
        return 100 * self.step.ms / self.base.ms

    @property
    def memory(self) -> float | None:
        """Of the most memory that the caching allocator held ("max cached" in the paper)."""
        known = self.step.reserved and self.base.reserved
        return 100 * self.step.reserved / self.base.reserved if known else None  # type: ignore[operator]

    @property
    def energy(self) -> float | None:
        known = self.step.joules and self.base.joules
        return 100 * self.step.joules / self.base.joules if known else None  # type: ignore[operator]


def steps(measured: Measured, groups: Iterable[Group]) -> list[Step]:
    """All of them; a benchmark that failed and a run that shared its device have none."""
    found = []
    for bench in measured.benches:
        machine = bench.get("machine") or {}
        for case in bench.get("cases", []):
            of_paper = case.get("parts", 1) == 1  # what parts cost is a matter of docs/performance.md
            if case.get("error") is None and case.get("ms") and of_paper:
                found.append(_of_case(case, machine, bench["where"]))
    for group in (g for g in groups if not g.own):
        if (ms := group.number("ms_per_step")) is not None:
            found.append(_of_group(group, ms))
    return found


ENERGY_SECONDS = 2.0
"""Over less than this the energy counter's own steps are too coarse: power came out above what the GPU can draw."""


def energy_of_step(row: Mapping[str, Any]) -> float | None:
    """Joules of a step by a benchmark's row; ``None`` if none were counted, or not for long enough."""
    seconds = (row.get("repeats") or 0) * (row.get("ms_mean") or row["ms"]) / 1000
    return row.get("energy_joules_per_step") if seconds >= ENERGY_SECONDS else None


def _of_case(case: Mapping[str, Any], machine: Mapping[str, Any], where: str) -> Step:
    low, high = case.get("ms_p10"), case.get("ms_p90")
    return Step(
        model=case["model"], batch=int(case["batch"]), scheme=case["scheme"],
        rate=0.0 if case["scheme"] == "none" else float(case.get("rate") or 0.0),
        sampling=case.get("sampling"), norm=None, grads=case.get("grads") or "dense", mode=case.get("mode") or "eager",
        precision=case.get("precision") or "fp32", device=str(machine.get("device", "unknown device")),
        size=case.get("size"), source=where, allocator=str(machine.get("allocator") or ""),
        ms=case["ms"], spread=(low, high) if low and high else None, reserved=case.get("max_reserved"),
        allocated=case.get("max_allocated"), joules=energy_of_step(case),
    )  # fmt: skip


def _of_group(group: Group, ms: Estimate) -> Step:
    config = group.config
    epochs = max(len(r.record["epochs"]) for r in group.runs)
    total, per_epoch = group.number("energy_joules"), group.number("steps_per_epoch", alone=False)
    memory = {k: group.number(k, alone=False) for k in ("max_reserved", "max_allocated")}
    return Step(
        model=config["model"], batch=int(config.get("batch") or 0), scheme=group.scheme, rate=group.rate,
        sampling=config.get("sampling"), norm=config.get("norm"), grads=config.get("grads") or "dense",
        mode=config.get("mode") or "eager", precision=config.get("precision") or "fp32", device=group.device, size=None,
        source="training", ms=ms.mean, spread=None,
        reserved=memory["max_reserved"].mean if memory["max_reserved"] else None,
        allocated=memory["max_allocated"].mean if memory["max_allocated"] else None,
        joules=total.mean / (epochs * per_epoch.mean) if total and per_epoch else None, n=ms.n,
        data=str(group.declared("data")), scaled=scaling_in_words(_of_the_step(group.scaled)),
    )  # fmt: skip


def _of_the_step(scaled: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a step another one than the paper's: its width, not the number of epochs."""
    return {k: v for k, v in scaled.items() if k not in ("epochs", "subset", "seeds", "data", "lr")}


def fits(step: Step, match: Mapping[str, Any], *, strict: bool = True) -> bool:
    """Like ``groups.fits``. Window and circular slices cost about the same: only ``strict`` tells them apart."""
    scheme, rate = match.get("scheme"), match.get("rate")
    if rate == 0 and scheme in (None, "standard"):
        scheme = "none"
    if "model" in match and step.model != match["model"]:
        return False
    if scheme is not None and step.scheme != scheme:
        return False
    if isinstance(rate, int | float) and scheme != "none" and not math.isclose(step.rate, rate, abs_tol=1e-6):
        return False
    if strict and scheme == "sliceout":
        if match.get("sampling") and step.sampling and step.sampling != match["sampling"]:
            return False
        if match.get("norm") and step.norm and step.norm != match["norm"]:
            return False
    return not (match.get("data") and step.data and step.data != match["data"])


def pair(
    steps: Sequence[Step], match: Mapping[str, Any], of: Mapping[str, Any], batch: int | None = None
) -> Pair | None:
    """The step that fits ``match`` beside the one that fits ``of``, or None where that was not measured.

    Args:
        steps: see :func:`steps`.
        match: what is measured; ``of`` adds to it or overrides it, which gives the baseline.
        of: ``{"scheme": "standard"}``.
        batch: preferred, as it is the paper's.
    """
    base_match = {k: v for k, v in match.items() if k in ("data", "model")} | dict(of)
    ours = [s for s in steps if fits(s, match, strict=False)]
    bases = [s for s in steps if fits(s, base_match)]
    pairs = [Pair(a, b) for a in ours for b in bases if a.setting == b.setting]
    fastest: dict[tuple[Any, ...], float] = {}
    for found in pairs:
        key = found.base.setting
        fastest[key] = min(fastest.get(key, math.inf), found.base.ms / max(found.base.batch, 1))
    return min(
        pairs,
        default=None,
        key=lambda p: (
            p.base.batch != batch,
            bool(p.base.scaled),
            p.base.source == "training",  # benchmarks first: one process each, warmed up, on a quiet device
            bool(p.base.allocator),
            fastest[p.base.setting],
            abs(p.base.rate - p.step.rate),
            not fits(p.step, match),
            p.step.ms,
        ),
    )

"""Runs that differ in nothing but the seed belong together: their mean, its standard error, and what they were."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..experiment import OWN_TABLE
from ..scheme import additions
from .reading import Run

SUBSETS = {"fashion-mnist-8k": "fashion-mnist"}
"""Data sets that are a part of another one: a run on them is a scaled-down run on the whole."""
WINDOW = "window"


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` runs. One run has no error."""

    mean: float
    se: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate | None:
        """Of these values; None if there are none.

        Example:
            >>> Estimate.of([1.0, 3.0])
            Estimate(mean=2.0, se=1.0, n=2)
        """
        got = [v for v in values if v is not None and math.isfinite(v)]
        if not got:
            return None
        se = statistics.stdev(got) / math.sqrt(len(got)) if len(got) > 1 else None
        return cls(statistics.fmean(got), se, len(got))

    def scaled(self, factor: float) -> Estimate:
        return Estimate(self.mean * factor, None if self.se is None else self.se * abs(factor), self.n)


@dataclass(frozen=True)
class Extra:
    """A number that some runs have beside their score."""

    heading: str
    path: tuple[str, ...]
    """Where it stands in the ``final`` of a record."""
    percent: bool

    def value(self, final: Mapping[str, Any]) -> float | None:
        found: Any = final
        for key in self.path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found


EXTRAS = (
    Extra("test word ppl, epoch by validation", ("chosen", "word_perplexity"), percent=False),
    Extra("validation word ppl there", ("chosen", "valid_word_perplexity"), percent=False),
    Extra("norms re-estimated, %", ("recalibrated",), percent=True),
)


@dataclass(frozen=True)
class Group:
    """Runs of one configuration on one kind of machine, over seeds."""

    runs: tuple[Run, ...]

    @property
    def config(self) -> dict[str, Any]:
        return self.runs[0].config

    @property
    def device(self) -> str:
        return str((self.runs[0].record.get("machine") or {}).get("device", "unknown device"))

    @cached_property
    def scaled(self) -> dict[str, Any]:
        """What was scaled down, the data set included."""
        scaled = dict(self.runs[0].scaled)
        if (data := self.config["data"]) in SUBSETS and "data" not in scaled:
            scaled["data"] = [SUBSETS[data], data]
        return scaled

    @property
    def metric(self) -> str:
        return "perplexity" if "perplexity" in self.runs[0].record["final"] else "accuracy"

    @property
    def rate(self) -> float:
        return 0.0 if self.scheme == "none" else float(self.config.get("rate") or 0.0)

    @property
    def scheme(self) -> str:
        scheme = str(self.config["scheme"])
        return "none" if not self.config.get("rate") and scheme in ("standard", "controlled") else scheme

    @property
    def own(self) -> bool:
        """Whether it is no setting of the paper's: its numbers fill no cell of the paper's tables."""
        other = additions(self.config) or self.config.get("sampling") == "prefix"
        return bool(other) or self.runs[0].record.get("table") == OWN_TABLE

    def declared(self, key: str) -> Any:
        """What the experiment asked for, before it was scaled down."""
        return self.scaled[key][0] if key in self.scaled else self.config.get(key)

    def score(self, statistic: str = "last") -> Estimate | None:
        """Accuracy in percent, or perplexity: after the ``last`` epoch, or the ``best`` of all epochs."""
        finals = [run.record["final"] for run in self.runs]
        values = [final.get("best" if statistic == "best" else self.metric) for final in finals]
        got = Estimate.of(v for v in values if isinstance(v, int | float))
        return got.scaled(100) if got and self.metric == "accuracy" else got

    def extra(self, one: Extra) -> Estimate | None:
        """One of ``EXTRAS``; accuracies in percent."""
        values = [one.value(run.record["final"]) for run in self.runs]
        got = Estimate.of(v for v in values if v is not None)
        return got.scaled(100) if got and one.percent else got

    def number(self, name: str, *, alone: bool = True) -> Estimate | None:
        """A number of the record, of those runs only that had the device for themselves if ``alone``."""
        values = [run.record.get(name) for run in self.runs if run.alone or not alone]
        return Estimate.of(v for v in values if isinstance(v, int | float))

    def curve(self) -> tuple[list[int], list[list[float]]]:
        """Epochs that all runs have, and for each the scores of the runs (percent, or perplexity)."""
        factor = 100.0 if self.metric == "accuracy" else 1.0
        by_run = [{e["epoch"]: e[self.metric] for e in r.record["epochs"] if self.metric in e} for r in self.runs]
        epochs = sorted(set(by_run[0]).intersection(*by_run[1:]))
        return epochs, [[factor * scores[e] for scores in by_run] for e in epochs]


def group(runs: Iterable[Run]) -> list[Group]:
    """Runs by configuration and device, in the order in which they first appear; seeds in order."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        config = {k: v for k, v in run.config.items() if k != "seed"}
        machine = run.record.get("machine") or {}
        key = json.dumps([config, run.scaled, machine.get("device")], sort_keys=True, default=str)
        found.setdefault(key, []).append(run)
    return [Group(tuple(sorted(same, key=lambda r: str(r.record["seed"]).zfill(9)))) for same in found.values()]


def fits(group: Group, match: Mapping[str, Any]) -> bool:
    """Whether it is what ``match`` asks for: ``{"data": "mnist", "scheme": "sliceout", "rate": 0.5}``."""
    if group.own:
        return False
    wanted = dict(match)
    if wanted.get("rate") == 0 and wanted.get("scheme") in (None, "standard"):
        wanted["scheme"] = "none"
    if wanted.get("scheme") == "none":
        wanted.pop("rate", None)
    for key, value in wanted.items():
        if key == "rate":
            if value != "best" and not math.isclose(group.rate, value, abs_tol=1e-6):
                return False
        elif key == "scheme":
            if group.scheme != value:
                return False
        elif key == "norm" and group.config.get("sampling") == "circular":
            continue  # both norms are the same there
        elif group.declared(key) != value:
            return False
    return True


def choose(groups: Sequence[Group], match: Mapping[str, Any], statistic: str = "last") -> Group | None:
    """The group that stands for ``match``: the least scaled-down one, then the one with the most seeds.

    ``rate: "best"`` is the paper's search over dropout rates: the rate whose mean score is best.
    """
    found = [g for g in groups if fits(g, match)]
    if match.get("rate") == "best":
        least = min((len(g.scaled) for g in found), default=0)
        found = [g for g in found if len(g.scaled) == least and g.score(statistic)]
        sign = -1 if found and found[0].metric == "perplexity" else 1
        return max(found, key=lambda g: sign * g.score(statistic).mean, default=None)  # type: ignore[union-attr]
    return min(found, key=lambda g: (len(g.scaled), -len(g.runs), -_epochs(g)), default=None)


def _epochs(group: Group) -> int:
    return max(len(run.record["epochs"]) for run in group.runs)


def name_of(config: Mapping[str, Any]) -> str:
    """A scheme in words: ``SliceOut, circular``. Rates are said elsewhere.

    Example:
        >>> name_of({"scheme": "sliceout", "sampling": "window", "norm": "flow", "rate": 0.5})
        'SliceOut, window, flow'
        >>> name_of({"scheme": "sliceout", "sampling": "circular", "parts": 8})
        'SliceOut, circular, 8 parts'
    """
    scheme = config["scheme"]
    names = {
        "none": "no dropout", "standard": "standard dropout", "controlled": "controlled dropout",
        "spatial": "spatial dropout", "dropblock": "DropBlock", "patch": "SliceOut, patches", "floor": "narrow network",
    }  # fmt: skip
    name = names.get(scheme, str(scheme))
    if scheme == "sliceout":
        sampling = config.get("sampling") or "circular"
        name = f"SliceOut, {sampling}" + (f", {config.get('norm') or 'probabilistic'}" if sampling == WINDOW else "")
    return ", ".join([name, *additions(config)])


def scaling_in_words(scaled: Mapping[str, Any]) -> str:
    """``epochs 200 → 30, subset 50000 → 8000``."""
    return ", ".join(
        f"{k} {v[0]} → {v[1]}" if isinstance(v, list) and len(v) == 2 else f"{k} {v}" for k, v in scaled.items()
    )

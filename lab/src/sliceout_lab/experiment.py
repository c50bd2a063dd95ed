"""Experiments are data: one TOML file each in ``experiments/``, with the paper's hyperparameters.

An :class:`Experiment` is such a file, checked. A :class:`Job` is one training run of it: a scheme, a seed, and what was
scaled down. The job's ``config`` says everything that its result depends on, and its ``id`` is a hash of that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sliceout.cli import UserError

from .experiment_file import FOLDER, MODES, PRECISIONS, ROW, check, merge, names, near, read
from .scheme import is_growth, label, whole

SCALES = ("epochs", "width", "subset", "batch")
OWN_TABLE = "sub-networks"
"""The table of experiments that are not the paper's: several slices in a step, and widths that grow."""


@dataclass(frozen=True)
class Experiment:
    """One file of ``experiments/``."""

    name: str
    title: str
    table: str
    """The table of the paper that its rows belong to."""
    data: str
    model: str
    epochs: int
    batch: int
    scheme: dict[str, Any]
    """The default scheme and its settings."""
    optimizer: dict[str, Any]
    schedule: dict[str, Any] = field(default_factory=lambda: {"name": "constant"})
    inputs: dict[str, Any] = field(default_factory=dict)
    model_settings: dict[str, Any] = field(default_factory=dict)
    stands_in: str = ""
    """What it replaces, where the paper's data is not available: its numbers are not the paper's."""
    samples: int | None = None
    """Training samples (tokens) of the data."""
    epoch_steps: int = 0
    """Steps that count as one epoch; 0 is a pass over the data."""
    tail: float = 0.0
    """Last part of training without slicing."""
    recalibrate: bool = False
    """Also test the final network with batch-norm statistics that were estimated anew."""
    precision: str = "fp32"
    mode: str = "compiled"
    """How steps run on a GPU."""
    seeds: tuple[int, ...] = (0,)
    rows: tuple[dict[str, Any], ...] = ()
    """Schemes that ``reproduce`` trains; lists of values stand for all combinations. A row may also set ``ROW``."""
    quick: dict[str, Any] = field(default_factory=dict)
    """What ``reproduce --quick`` changes."""

    def schemes(self) -> list[dict[str, Any]]:
        """The rows, one by one."""
        out = []
        for row in self.rows or ({},):
            lists = {k: v if isinstance(v, list) and not is_growth(k, v) else [v] for k, v in row.items()}
            out += [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
        return out


@dataclass(frozen=True)
class Job:
    """One run to train."""

    experiment: str
    table: str
    seed: int
    config: dict[str, Any]
    scaled: dict[str, list[Any]]

    @property
    def id(self) -> str:
        """The same for the same run: 12 hex digits."""
        text = json.dumps([self.config, self.seed], sort_keys=True)
        return hashlib.sha1(text.encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """The scheme, for people."""
        return label(self.config)


# -- reading -----------------------------------------------------------------------------------------------------------


def tables() -> dict[str, list[str]]:
    """The experiments of every table of the paper."""
    out: dict[str, list[str]] = {}
    for name in names():
        out.setdefault(load(name).table, []).append(name)
    return out


def load(name: str) -> Experiment:
    """The experiment of this name, or in this file."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        if name.endswith(".toml"):
            raise UserError(f"{name}: there is no such file")
        raise UserError(
            f"there is no experiment {name!r}{near(name, names())}; `sliceout-lab train --list` shows them all"
        )
    raw = read(path)
    check(raw, path)
    lists: dict[str, Any] = {key: tuple(raw[key]) for key in ("seeds", "rows") if key in raw}
    return Experiment(path.stem, **{**raw, **lists})


def find(name: str) -> list[Experiment]:
    """The experiments of a table, or the one experiment of this name."""
    by_table = tables()
    if name in by_table:
        return [load(n) for n in by_table[name]]
    if name in names() or name.endswith(".toml"):
        return [load(name)]
    known = sorted({*by_table, *names()})
    hint = near(name, known) or f": there are {', '.join(known)}"
    raise UserError(f"there is no table or experiment {name!r}{hint}")


# -- making jobs -------------------------------------------------------------------------------------------------------


def quickened(experiment: Experiment) -> tuple[Experiment, dict[str, Any], dict[str, list[Any]]]:
    """The small form of an experiment, what it scales, and which of its entries differ."""
    if not experiment.quick:
        raise UserError(f"{experiment.name} declares no [quick] form: scale it with --epochs, --subset and --width")
    declared = dataclasses.asdict(experiment)
    changes = {k: v for k, v in experiment.quick.items() if k not in SCALES}
    scaling = {k: v for k, v in experiment.quick.items() if k in SCALES}
    merged = merge(declared, changes)
    differ = {k: [declared[k], merged[k]] for k in ("data", "precision") if declared[k] != merged[k]}
    if declared["optimizer"]["lr"] != merged["optimizer"]["lr"]:
        differ["lr"] = [declared["optimizer"]["lr"], merged["optimizer"]["lr"]]
    if merged["samples"] != declared["samples"]:
        differ["subset"] = [declared["samples"], merged["samples"]]
    lists = {key: tuple(merged[key]) for key in ("seeds", "rows")}
    return Experiment(**{**merged, **lists, "quick": {}}), scaling, differ


def job(
    experiment: Experiment,
    scheme: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    mode: str = "auto",
    precision: str | None = None,
    device: str = "cpu",
    world: int = 1,
    epochs: int | None = None,
    width: int | None = None,
    subset: int | None = None,
    batch: int | None = None,
    scaled: Mapping[str, list[Any]] | None = None,
) -> Job:
    """A run of ``experiment``: its default scheme changed by ``scheme`` (a row), scaled where numbers are given."""
    experiment = _with_row(experiment, scheme or {})
    for name, value in (("epochs", epochs), ("width", width), ("subset", subset), ("batch", batch)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: expected at least 1")
    changes: dict[str, list[Any]] = dict(scaled or {})
    model, settings = experiment.model, dict(experiment.model_settings)
    if width is not None:
        declared, model, settings = _widened(experiment, width)
        if declared != width:
            changes["width"] = [declared, width]
            if model != experiment.model:
                changes["model"] = [experiment.model, model]
    used = {"epochs": experiment.epochs, "batch": experiment.batch}
    for name, value in (("epochs", epochs), ("batch", batch)):
        if value is not None and value != used[name]:
            changes[name], used[name] = [used[name], value], value
    if subset is not None and experiment.samples is not None and subset >= experiment.samples:
        subset = None
    if subset is not None:
        changes["subset"] = [experiment.samples, subset]
    chosen = whole(experiment.scheme, scheme or {})
    config = {
        "data": experiment.data,
        "subset": subset,
        "model": model,
        "model_settings": settings,
        **chosen,
        "optimizer": experiment.optimizer,
        "schedule": experiment.schedule,
        **used,
        "epoch_steps": experiment.epoch_steps,
        "tail": experiment.tail if chosen["scheme"] in ("sliceout", "patch") else 0.0,
        **({"recalibrate": True} if experiment.recalibrate else {}),
        **{"augment": "none", "normalise": "unit", "flatten": False, "sequence": None, "size": None},
        **experiment.inputs,
        "precision": _precision(precision or experiment.precision, device),
        "mode": _mode(mode, experiment.mode, device, world),
        "world": world,
    }
    if config["tail"] and "grow" in config:
        raise UserError(f"tail {config['tail']:g} beside grow: let grow itself end with rate 0 instead")
    return Job(experiment.name, experiment.table, seed, config, changes)


def _with_row(experiment: Experiment, row: Mapping[str, Any]) -> Experiment:
    """The experiment with what a row changes besides its scheme."""
    given = {key: row[key] for key in ROW if row.get(key) is not None}
    if "lr" in given:
        given["optimizer"] = {**experiment.optimizer, "lr": given.pop("lr")}
    if "model_settings" in given:
        given["model_settings"] = {**experiment.model_settings, **given["model_settings"]}
    return dataclasses.replace(experiment, **given)


def _mode(asked: str, declared: str, device: str, world: int) -> str:
    if asked == "auto":
        return "eager" if device == "cpu" else "compiled" if world > 1 else declared
    if asked not in MODES:
        raise UserError(f"--mode {asked}: expected auto, {', '.join(MODES)}{near(asked, MODES)}")
    if asked == "captured" and device == "cpu":
        raise UserError("--mode captured: CUDA graphs need a GPU; try --mode eager")
    if asked == "captured" and world > 1:
        raise UserError("--mode captured: a captured step cannot be part of a group of processes; try --mode compiled")
    return asked


def _precision(asked: str, device: str) -> str:
    if asked not in PRECISIONS:
        raise UserError(f"--precision {asked}: expected {', '.join(PRECISIONS)}{near(asked, PRECISIONS)}")
    return "fp32" if asked == "tf32" and device == "cpu" else asked  # no such thing there


def _widened(experiment: Experiment, width: int) -> tuple[int, str, dict[str, Any]]:
    """``(declared width, model, model_settings)`` of the same network at another width."""
    settings = dict(experiment.model_settings)
    if experiment.model == "mlp":
        hidden = settings["hidden"]
        return max(hidden), "mlp", {**settings, "hidden": [width] * len(hidden)}
    if found := re.fullmatch(r"(wrn-\d+|gpt-\d+|lm)-(\d+)", experiment.model):
        return int(found[2]), f"{found[1]}-{width}", settings
    raise UserError(f"--width {width}: {experiment.model} comes in fixed widths")

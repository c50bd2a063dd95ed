"""A case: one network, one scheme, one way of executing a training step. Suites of them are kept in ``suites.toml``."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .. import LabError

SCHEMES = ("none", "standard", "controlled", "floor", "sliceout")
MODES = ("eager", "compiled", "compiled-default", "captured", "captured-compiled")
PRECISIONS = ("bf16", "tf32", "fp32")
GRADS = ("dense", "compact")
SAMPLINGS = ("circular", "window")
SUITES = Path(__file__).with_name("suites.toml")


@dataclass(frozen=True)
class Case:
    """What one process measures.

    Attributes:
        model: a name of :func:`sliceout.lab.models.build`, ``mlp-3x512`` for other sizes of the MLP, or what
            ``sliceout inspect`` takes (``timm:resnet50``).
        scheme: see ``SCHEMES``; ``floor`` is a plain network built at the sliced widths.
        mode: ``eager``; ``compiled`` (reduce-overhead) or ``compiled-default``, both with the loss inside;
            ``captured``, the whole step as one CUDA graph, and the same of a compiled model.
    """

    model: str
    batch: int
    scheme: str
    rate: float = 0.5
    mode: str = "eager"
    precision: str = "bf16"
    sampling: str = "circular"
    grads: str = "dense"
    align: int | None = None
    stages: int | None = None
    size: int | None = None
    """Side of the images, or tokens in a sequence; ``None`` for what the model is meant for."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("scheme", SCHEMES), ("mode", MODES), ("precision", PRECISIONS), ("grads", GRADS), ("sampling", SAMPLINGS),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in allowed:
                raise LabError(f"{name} {value!r}: expected one of {', '.join(allowed)}")
        if not 0 <= self.rate < 1:
            raise LabError(f"rate {self.rate}: expected 0 <= rate < 1")
        if self.batch < 1:
            raise LabError(f"batch {self.batch}: expected at least 1")

    @property
    def compiled(self) -> bool:
        return "compiled" in self.mode

    @property
    def setting(self) -> tuple[Any, ...]:
        """What must be equal for two cases to be compared."""
        return (self.model, self.batch, self.mode, self.precision, self.stages, self.size)

    @property
    def label(self) -> str:
        """The scheme in words, with what differs from the default."""
        words = [self.scheme]
        if self.scheme != "none":
            words.append(f"p={self.rate:g}")
        if self.scheme == "sliceout" and self.sampling != "circular":
            words.append(self.sampling)
        if self.grads != "dense":
            words.append(self.grads)
        if self.align is not None:
            words.append(f"align {self.align}")
        return " ".join(words)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def case_of(row: dict[str, Any]) -> Case:
    """The case that a row of a result file was measured for."""
    return Case(**{name: row[name] for name in Case.__dataclass_fields__ if name in row})


def expand(
    models: Sequence[str],
    batches: Sequence[int],
    schemes: Sequence[str],
    rates: Sequence[float],
    modes: Sequence[str],
    *,
    grads: Sequence[str] = ("dense",),
    sampling: Sequence[str] = ("circular",),
    **rest: Any,
) -> list[Case]:
    """Every combination that makes sense, without repetitions."""
    found = []
    for model, batch, mode in itertools.product(models, batches or [0], modes):
        for rate, scheme in itertools.product(rates, schemes):
            case = Case(model, batch or default_batch(model), scheme, rate, mode, **rest)
            for g, s in itertools.product(grads, sampling):
                found.append(_plain(replace(case, grads=g, sampling=s)))
    return list(dict.fromkeys(found))


def _plain(case: Case) -> Case:
    """Without the settings that make no difference to its scheme."""
    if case.scheme == "none":
        case = replace(case, rate=0.0, align=None)
    if case.scheme != "sliceout":
        case = replace(case, grads="dense", sampling="circular")
    return case


def default_batch(model: str) -> int:
    family = family_of(model)
    return {"mlp": 256, "lm": 256}.get(family, 128)


def family_of(model: str) -> str:
    """mlp, wrn, efficientnet, lm or user."""
    if ":" in model:
        return "user"
    return model.partition("-")[0]


def suite(name: str) -> list[Case]:
    """The cases of a suite in the order in which they are to run, most important first."""
    declared = tomllib.loads(SUITES.read_text())["suite"]
    if name not in declared:
        raise LabError(f"--suite {name}: expected one of {', '.join(declared)}")
    return list(dict.fromkeys(case for entry in declared[name]["case"] for case in _cases(entry)))


def about(name: str) -> str:
    return str(tomllib.loads(SUITES.read_text())["suite"][name]["about"])


def _cases(entry: dict[str, Any]) -> Iterator[Case]:
    rest = {k: v for k, v in entry.items() if k in ("precision", "align", "stages", "size")}
    yield from expand(
        entry["models"],
        entry.get("batch", []),
        entry["schemes"],
        entry.get("rates", [0.5]),
        entry.get("modes", ["eager"]),
        grads=entry.get("grads", ["dense"]),
        sampling=entry.get("sampling", ["circular"]),
        **rest,
    )


def paper() -> list[dict[str, Any]]:
    """What the paper says: time and memory of SliceOut in percent of standard dropout, or of none where it has none."""
    return tomllib.loads(SUITES.read_text())["paper"]


def paper_of(case: Case) -> dict[str, Any] | None:
    """The paper's row for this case, if it has one."""
    if case.scheme != "sliceout":
        return None
    rows = (r for r in paper() if r["model"] == case.model and abs(r["rate"] - case.rate) < 1e-9)
    return next(rows, None)

"""A case: one network, one scheme, one way of executing a training step. Each is measured in a process of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from . import UserError
from .options import BenchOptions, split

SCHEMES = ("none", "standard", "controlled", "floor", "sliceout")
MODES = ("eager", "compiled", "compiled-default", "captured", "captured-compiled")
PRECISIONS = ("bf16", "tf32", "fp32")
GRADS = ("dense", "compact")
SAMPLINGS = ("circular", "window", "prefix")
BATCH = 128


@dataclass(frozen=True)
class Case:
    """What one process measures.

    Attributes:
        model: what ``sliceout inspect`` takes (``timm:resnet50``), or a name that the worker's own ``Work`` knows.
        scheme: see ``SCHEMES``; ``floor`` is a plain network built at the sliced widths.
        mode: ``eager``; ``compiled`` (reduce-overhead) or ``compiled-default``, both with the loss inside;
            ``captured``, the whole step as one CUDA graph, and the same of a compiled model.
        size: side of the images, or tokens in a sequence; ``None`` for the model's own.
        parts: of the batch, each with slices of its own (SliceOut).
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
    parts: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (
            ("scheme", SCHEMES), ("mode", MODES), ("precision", PRECISIONS), ("grads", GRADS), ("sampling", SAMPLINGS),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(f"{name} {value!r}: expected one of {', '.join(allowed)}")
        if not 0 <= self.rate < 1:
            raise UserError(f"rate {self.rate}: expected 0 <= rate < 1")
        if self.batch < 1:
            raise UserError(f"batch {self.batch}: expected at least 1")
        if self.parts < 1:
            raise UserError(f"parts {self.parts}: expected at least 1")
        if self.parts > 1 and self.scheme != "sliceout":
            raise UserError(f"parts {self.parts}: of scheme sliceout alone, not of {self.scheme}")
        if self.parts > 1 and self.grads == "compact":
            raise UserError(
                f"parts {self.parts}: not with compact gradients, since together the parts reach every unit"
            )

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
        if self.parts > 1:
            words.append(f"{self.parts} parts")
        if self.grads != "dense":
            words.append(self.grads)
        if self.align is not None:
            words.append(f"align {self.align}")
        return " ".join(words)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def case_of(row: dict[str, Any]) -> Case:
    """The case that a row of results was measured for."""
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
    parts: Sequence[int] = (1,),
    default_batch: Callable[[str], int] = lambda model: BATCH,
    **rest: Any,
) -> list[Case]:
    """Every combination that makes sense, without repetitions."""
    found = []
    for model, batch, mode in itertools.product(models, batches or [0], modes):
        for rate, scheme in itertools.product(rates, schemes):
            case = Case(model, batch or default_batch(model), scheme, rate, mode, **rest)
            for g, s, p in itertools.product(grads, sampling, parts):
                if scheme != "sliceout":  # for which these make no difference
                    found.append(_without_unused(case))
                elif p == 1 or g == "dense":
                    found.append(replace(case, grads=g, sampling=s, parts=p))
    return list(dict.fromkeys(found))


def _without_unused(case: Case) -> Case:
    """Reset the settings that make no difference to the scheme."""
    return replace(case, rate=0.0, align=None) if case.scheme == "none" else case


def from_options(
    models: Sequence[str],
    device: str,
    options: BenchOptions,
    default_batch: Callable[[str], int] = lambda model: BATCH,
) -> list[Case]:
    """The cases that the options of ``bench`` ask for."""
    batches, parts = split("--batch", options.batch, int), split("--parts", options.parts, int)
    sizes = {name: getattr(options, name) for name in ("align", "stages", "size")}
    for option, value in (*(("batch", b) for b in batches), *(("parts", p) for p in parts), *sizes.items()):
        if value is not None and value < 1:
            raise UserError(f"--{option} {value}: expected at least 1")
    names = {
        name: split(f"--{name}", getattr(options, name), str) for name in ("schemes", "modes", "grads", "sampling")
    }
    return expand(
        models, batches, rates=split("--rates", options.rates, float), parts=parts, default_batch=default_batch,
        precision=options.precision or ("bf16" if device == "cuda" else "fp32"), **names, **sizes,
    )  # fmt: skip


def check_device(cases: Sequence[Case], device: str) -> None:
    if device != "cuda" and any(c.mode.startswith("captured") for c in cases):
        raise UserError("--modes captured: CUDA graphs need a GPU; try --modes eager,compiled")

"""Which cases belong together, and the paper's numbers beside them: ``suites.toml``."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sliceout.cli import UserError
from sliceout.cli.cases import Case, expand

FILE = Path(__file__).with_name("suites.toml")


@functools.cache
def declared() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


def family_of(model: str) -> str:
    """mlp, wrn, efficientnet, lm or user."""
    family = "user" if ":" in model else model.partition("-")[0]
    return "lm" if family == "gpt" else family


def default_batch(model: str) -> int:
    """The paper's."""
    return {"mlp": 256, "lm": 256}.get(family_of(model), 128)


def suite(name: str) -> list[Case]:
    """The cases of a suite in the order in which they are to run, most important first."""
    suites = declared()["suite"]
    if name not in suites:
        raise UserError(f"--suite {name}: expected one of {', '.join(suites)}")
    return list(dict.fromkeys(case for entry in suites[name]["case"] for case in _cases(entry)))


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
        parts=entry.get("parts", [1]),
        default_batch=default_batch,
        **rest,
    )


def paper() -> list[dict[str, Any]]:
    """What the paper says: time and memory of SliceOut in percent of standard dropout, or of none where it has none."""
    return declared()["paper"]


def paper_of(case: Case) -> dict[str, Any] | None:
    """The paper's row for this case, if it has one."""
    if case.scheme != "sliceout" or case.parts > 1:
        return None
    rows = (r for r in paper() if r["model"] == case.model and abs(r["rate"] - case.rate) < 1e-9)
    return next(rows, None)

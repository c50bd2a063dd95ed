"""The paper's tables and curves as data: ``lab/paper/*.json``, each with label, caption and lines in the .tex.

The numbers were copied by a script; ``tests/test_results_report.py`` compares them with the .tex where that is at hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

TABLES = (
    "fashion-mnist-accuracy", "fashion-mnist-time", "fashion-mnist-memory",
    "mnist-accuracy", "mnist-time", "mnist-memory",
    "wide-resnet-sizes", "wide-resnet-channel", "wide-resnet-patch",
    "efficientnet-imagenet", "efficientnet-cifar", "transformer", "transformer-detailed",
)  # fmt: skip
"""The paper's tables of results, in the order of the report."""
CURVES = (
    "fashion-mnist-memory-curve", "fashion-mnist-time-curve", "fashion-mnist-accuracy-curve",
    "transformer-1024-curve", "transformer-2048-curve",
)  # fmt: skip


@dataclass(frozen=True)
class Number:
    """A number as the paper prints it, with its ± where it has one."""

    value: float
    plus_minus: float | None = None

    @classmethod
    def of(cls, cell: Any) -> Number | None:
        return None if cell is None else cls(*cell) if isinstance(cell, list) else cls(cell)


@cache
def read(name: str) -> dict[str, Any]:
    """One file: a table, a figure's curves, ``co2`` or ``in-words``."""
    return json.loads((resources.files("sliceout_lab") / "paper" / f"{name}.json").read_text(encoding="utf-8"))


def tables() -> list[dict[str, Any]]:
    return [read(name) for name in TABLES]


def lookup(table: str, row: dict[str, Any], column: int) -> Number | None:
    """The paper's number in the row that matches ``row``, such as ``{"rate": 0.5}``."""
    for candidate in read(table)["rows"]:
        if all(candidate["match"].get(k) == v for k, v in row.items()):
            return Number.of(candidate["cells"][column])
    return None

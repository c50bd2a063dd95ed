"""Where results are kept: one JSON file per run with its machine and versions, a CSV beside it, and ratios from it.

A file grows case by case, so a run that was stopped goes on where it was. Ratios are taken inside one file only.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from sliceout.cli import UserError
from sliceout.cli import table as comparing
from sliceout.cli.bench import write_text
from sliceout.cli.cases import Case, case_of

from .. import machine
from .suites import paper_of

COLUMNS = (
    "model", "batch", "mode", "precision", "scheme", "rate", "sampling", "parts", "grads", "align", "stages", "size",
    "ms", "ms_p10", "ms_p90", "ms_mean", "repeats", "max_allocated", "max_reserved", "max_reserved_process", "flops",
    "parameters", "kept_weights", "energy_joules_per_step", "error",
)  # fmt: skip


class ResultFile:
    """The rows of one run, on disk after every case."""

    def __init__(self, path: Path, header: dict[str, Any] | None = None) -> None:
        self.path = path
        self.data: dict[str, Any] = {"kind": "bench", "schema": 1, **(header or {}), "cases": [], "match_memory": []}
        if path.is_file():
            self.data = read(path)
            if header is not None:
                self._go_on(header)

    def _go_on(self, header: dict[str, Any]) -> None:
        """All that is compared is of one revision and one machine; a second command is written behind the first."""
        for kind, now, then in (
            ("revision", header["revision"], self.data["revision"]),
            *((kind, header["machine"][kind], self.data["machine"][kind]) for kind in ("device", "torch")),
        ):
            if now != then:
                raise UserError(
                    f"{self.path} is of {kind} {then}, and this is {now}: choose another --name, or move it away"
                )
        if header["command"] not in self.data["command"].split(" && "):
            self.data["command"] += f" && {header['command']}"

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.data["cases"]

    def has(self, case: Case) -> bool:
        return any(case_of(row) == case for row in self.rows)

    def forget_failed(self) -> None:
        for name in ("cases", "match_memory"):
            self.data[name] = [row for row in self.data[name] if row["error"] is None]

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        write_text(self.path, json.dumps(self.data, indent=1) + "\n")
        write_text(self.path.with_suffix(".csv"), as_csv(self.rows))


def read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path} is not a result file of bench (not JSON: {error}); move it away") from error
    if not isinstance(data, dict) or data.get("kind") != "bench" or data.get("schema") != 1:
        raise UserError(f"{path} is not a result file of bench (schema 1); move it away or choose another --out")
    return data


def path_for(out: Path, cases: Iterable[Case], device: torch.device, name: str | None) -> Path:
    """``h200-bf16-torch2.11-name.json``: GPU, precision and version tell results apart."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    gpu = re.sub(r"[^a-z0-9]+", "-", kind.lower().removeprefix("nvidia ")).strip("-")
    precision = "-".join(sorted({c.precision for c in cases}))
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    return out / ("-".join(filter(None, (gpu, precision, f"torch{version}", name))) + ".json")


def header(device: torch.device, command: str, revision: str | None) -> dict[str, Any]:
    """What the cases of a file have in common; a revision with a plus sign has changes."""
    head, changed = machine.revision()
    here = head and head[:12] + ("+" if changed else "")
    return {"machine": machine.environment(device), "revision": revision or here, "command": command}


def as_csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as ``sliceout bench`` compares them, with ``paper_time`` and ``paper_memory`` beside."""
    out = []
    for row in comparing.compared(rows):
        said = paper_of(case_of(row))
        memory = said and said.get("memory") and said["memory"] / 100
        out.append({**row, "paper_time": said and said["time"] / 100, "paper_memory": memory})
    return out

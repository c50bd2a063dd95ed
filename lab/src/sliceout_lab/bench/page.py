"""``docs/performance.md``: when slicing pays, with every number taken from a committed result file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sliceout.cli import UserError
from sliceout.cli.cases import case_of
from sliceout.cli.measure import held
from sliceout.payoff import MANY

from . import profile_page, scripts_page, show
from .files import compared, read
from .suites import declared

TEXT = """\
# Performance: when SliceOut pays, and when it does not

Written by `sliceout-lab bench --docs` from the files in `results`: change those, not this page.

## The argument

A training step can be no faster than the slowest of three things: its arithmetic, its memory traffic, its launches.

- **Arithmetic.** A slice that keeps a share *k* of the units between two layers leaves *k* of their FLOPs, forward and
  backward. A network with one slice between each pair of layers (Wide ResNet, the feed-forward part of a Transformer)
  approaches *k* overall; a plain MLP, sliced on both sides of its inner weights, approaches *k*² there.
- **Memory traffic.** Activations between the layers shrink to *k*; the residual stream, embeddings and logits do not.
  `take` reads the kept part of each weight once and writes it compactly; `put` writes the gradient of the full weight.
  That is traffic of the size of the *parameters*, independent of the batch, while the saving grows with the batch: the
  more rows (tokens, pixels) a weight is used for, the less slicing costs. Layers with many weights and few rows (an MLP
  at batch 256) are bound by gradients and the optimizer, and need `grads="compact"` to gain.
- **Launches.** Each sliced layer adds small kernels. Compiled (`mode="reduce-overhead"`) or captured
  (`sliceout.capture`), they are replayed without Python. A step whose kernels are shorter than the time it takes to
  launch them is bound by the host; smaller kernels save nothing there, not even at the floor. That is so in eager mode,
  where all slices of a step are fetched in one launch, and under `torch.compile` in its default mode, without CUDA
  graphs, where Inductor makes `take` and `put` part of the code around them (`ops/lowerings.py`). On a batch that fills
  the GPU both are near the floor. On one that does not, compact gradients cost most: Python hands over each of them
  (`benchmarks/turns.py` and `compiled-default`, below).

**The floor** is a plain network built at the sliced widths, run in the same mode: what no slicing method can beat. How
far SliceOut is from it says what `take` and `put` cost; how far the floor is from standard dropout says what there was
to gain. The baseline is a strong one: channels_last, bf16 autocast, `torch.compile` with the loss inside or a captured
step, a fused optimizer, and dropout layers at the places that SliceOut slices.

**Memory.** Activations and gradients shrink, parameters and optimizer state do not: where those are most of it, little
is saved. What torch's allocator holds beyond what is live differs by mode. Compiled models held less in a captured step
(`sliceout.capture(torch.compile(model), ...)`, `captured-compiled` below), where forward, backward and optimizer share
one pool, than with `mode="reduce-overhead"`: much less for the Wide ResNet, hardly less for the language model.

**So it should pay** where the sliced layers hold most of the time, are wide, see many rows, and run compiled or
captured, or eagerly on a batch that fills the GPU. **It should not** for narrow layers, at low rates where rounding to
whole tiles eats the saving, where embeddings or logits take most of the time, or in eager steps that wait for launches.
The tables below say how far this holds, losses included. `convert_` reports what it expects of each group; measure your
own model with `sliceout bench package.module:factory --schemes standard,floor,sliceout --modes compiled`.

How it is measured: one process per case; warm-up, compilation and capture outside the clock; then marks on the device
around every step; the median, and the 10th and 90th percentile. "Reserved" is the most that torch's allocator held
during steady steps, after what the warm-up had cached was released; where the process held more before that, while it
tried algorithms, compiled or captured, this stands behind it as "at first". FLOPs are those of forward and backward,
counted by torch. "% of standard" and "% of floor" compare rows of one file only; the column "paper" is the paper's
number for the same architecture on its own hardware, so it is a neighbour and not a rival.
"""

_MONOTONE = (
    "Time and memory should fall with the rate and rise with the width. A curve that goes the wrong way by up to "
    f"{show.TOLERANCE:.0%} from one point to the next\ncounts as monotone: that much is noise. From rate 0, where "
    "nothing is sliced, to the first rate memory may rise: there are\nslices of the weights now, and in the backward "
    "pass a layer holds its slice and its gradient at the same time.\n"
)
NOT_YET = "Not measured yet: no file in `results/bench` holds these cases.\n"


def root() -> Path:
    here = Path(__file__).parents[4]
    if not (here / "pyproject.toml").is_file():
        raise UserError("--docs writes a page of the repository: run it from a checkout, not from an installed package")
    return here


def write() -> Path:
    """Write the page; returns where."""
    path = root() / "docs" / "performance.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(page(root()))
    return path.relative_to(root())


def page(folder: Path) -> str:
    """The text of the page for the result files under ``folder``."""
    found = [(p.name, read(p)) for p in sorted((folder / "results" / "bench").glob("*.json"))]
    parts = [TEXT, "\n## What was asked for, and what came out\n", *_targets(found)]
    if turns := scripts_page.turns(folder):
        parts += ["\n## Steps that wait for the host\n", *turns]
    parts += ["\n## Circular and window\n", *_samplings(found), *scripts_page.windows(folder)]
    for name, data in found:
        parts.append(f"\n## {_title(name, data)}\n")
        parts.append(_origin(name, data))
        if scaling := show.scaling_notes(data["cases"]):
            picture = folder / "results" / "bench" / name.replace(".json", ".png")
            if picture.is_file():
                parts.append(f"![Step time and memory against rate and width](../results/bench/{picture.name})\n")
            parts.append(_MONOTONE)
            parts.append("\n".join(f"- {note}" for note in scaling) + "\n")
        parts.append(show.markdown(data["cases"]) + "\n")
        if any(r["reference"] == "none" and r["scheme"] != "none" for r in compared(data["cases"])):
            parts.append("\\* of no dropout: there is no row of standard dropout to compare with.\n")
        if data["match_memory"]:
            parts += ["\nA larger batch in the memory of standard dropout (the paper's approach 2):\n", _match(data)]
    parts += ["\n## Where the time and the memory go\n", *profile_page.parts(folder)]
    parts += ["\n## Layer by layer: which slices pay\n", *_payoff(folder)]
    return "\n".join(parts)


def _title(name: str, data: dict[str, Any]) -> str:
    return f"{data['machine']['device']}: {name.removesuffix('.json')}"


def _origin(name: str, data: dict[str, Any]) -> str:
    about = data["machine"]
    triton = f", Triton {about['triton']}" if about.get("triton") else ""
    allocator = f", allocator {about['allocator']}" if about.get("allocator") else ""
    return (
        f"`{data['command']}`, revision {data['revision']}, {about['date'][:10]}, torch {about['torch']}{triton}, "
        f"{about['threads']} threads{allocator}. Data: [results/bench/{name}](../results/bench/{name}).\n"
    )


def _match(data: dict[str, Any]) -> str:
    rows = [show.MATCH_HEADINGS, *(show.match_cells(e) for e in data["match_memory"])]
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([lines[0], "|---|---|" + "---:|" * (len(show.MATCH_HEADINGS) - 2), *lines[1:]]) + "\n"


# -- targets -----------------------------------------------------------------------------------------------------------


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets for which ``rows`` hold a SliceOut case and one to compare it with, each with what was measured.

    A captured step of a compiled model counts as compiled. Where a target does not say which gradients, the kind counts
    that misses fewest of its figures, then the faster one; ``others`` names those it was chosen from.
    """
    found = []
    ours = [
        r for r in compared(rows)
        if r["scheme"] == "sliceout" and r["sampling"] == "circular" and (r["error"] or any(_figures(r).values()))
    ]  # fmt: skip
    for target in declared()["target"]:
        alike: dict[Any, list[dict[str, Any]]] = {}
        modes = target["mode"], f"captured-{target['mode']}"
        for row in ours:
            if row["mode"] in modes and all(row[k] == target.get(k, row[k]) for k in _SAME):
                alike.setdefault(case_of(row).setting, []).append({**row, "wanted": target, "measured": _figures(row)})
        for same in alike.values():
            best = min(same, key=_misses)
            found.append({**best, "others": [r["grads"] for r in same if r is not best]})
    return found


_SAME = ("model", "batch", "rate", "grads")


def _figures(row: dict[str, Any]) -> dict[str, float | None]:
    return {"time": row["of_standard"], "floor": row["of_floor"], "memory": row["memory_of_standard"]}


def _misses(row: dict[str, Any]) -> tuple[bool, int, float]:
    """For sorting: failed cases last, then by how many figures are missed, then by time."""
    pairs = [(row["measured"][k], row["wanted"][k]) for k in row["measured"] if k in row["wanted"]]
    missed = sum(value is None or value > most for value, most in pairs)
    return row["error"] is not None, missed, row.get("ms") or 0.0


def _targets(found: list[tuple[str, dict[str, Any]]]) -> list[str]:
    lines = []
    for name, data in found:
        if "cuda" not in data["machine"]:  # the targets are about an H200
            continue
        for row in judged(data["cases"]):
            than = f" (better than {', '.join(row['others'])})" if row["others"] else ""
            cells = [f"{row['model']} b{row['batch']}, {row['mode']}, {row['grads']}{than}"]
            for key in ("time", "floor", "memory"):
                cells.append(_verdict(row["measured"][key], row["wanted"].get(key)))
            cells.append(_floor_itself(row))
            lines.append(f"| {' | '.join(cells)} | {row['error'] or name} |")
    if not lines:
        return [NOT_YET]
    head = [
        "| case | of standard | of floor | memory of standard | the floor itself, of standard: time, memory | file |",
        "|---|---|---|---|---|---|",
    ]
    return ["\n".join([*head, *lines]) + "\n"]


def _samplings(found: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """What slices that may wrap around the end cost beside slices that lie inside, in the same file."""
    head = [
        "Both should cost the same: `take` copies one run of memory or two.\n",
        "| case | circular, ms (p10 to p90) | window, ms (p10 to p90) | time, of window | memory, of window | file |",
        "|---|---|---|---|---|---|",
    ]
    lines = []
    for name, data in found:
        good = {case_of(r): r for r in data["cases"] if r["error"] is None}
        for case, window in good.items():
            circular = good.get(replace(case, sampling="circular"))
            if case.sampling != "window" or circular is None:
                continue
            times = [f"{r['ms']:.4g} ({r['ms_p10']:.4g} to {r['ms_p90']:.4g})" for r in (circular, window)]
            shares = [f"{circular['ms'] / window['ms'] - 1:+.1%}", f"{held(circular) / held(window) - 1:+.1%}"]  # type: ignore[operator]
            where = f"{case.model} b{case.batch}, {case.mode}, {case.grads}"
            lines.append("| " + " | ".join([where, *times, *shares, name]) + " |")
    return ["\n".join([*head, *lines]) + "\n"] if lines else [NOT_YET]


def _floor_itself(row: dict[str, Any]) -> str:
    """What a plain narrow network takes: a target below it is out of reach of any slicing."""
    pairs = (("of_standard", "of_floor"), ("memory_of_standard", "memory_of_floor"))
    shares = [f"{row[a] / row[b]:.1%}" if row[a] and row[b] else "not measured" for a, b in pairs]
    return ", ".join(shares)


def _verdict(value: float | None, wanted: float | None) -> str:
    if value is None:
        return "not measured" if wanted is not None else ""
    if wanted is None:
        return f"{value:.1%}"
    return f"{value:.1%}, {'met' if value <= wanted else '**missed**'} (at most {wanted:.1%})"


# -- single layers -----------------------------------------------------------------------------------------------------


def _payoff(folder: Path) -> list[str]:
    parts = [
        "Two layers with sliced units between them, forward and backward, in percent of the time of the full pair;\n"
        "the floor is the same pair at the sliced width. Above 100 % the slice costs more than it saves.\n"
        "`python benchmarks/payoff.py` measures, `--write-table` hands it to the library (`sliceout.payoff`):\n"
        "`convert_` then leaves groups alone whose slices were slower at every batch tried on the GPU that the model\n"
        f"is on, one of {MANY:,} rows or more among them, says so in its report, and takes the alignment that was\n"
        "fastest there; `payoff=False` slices all.\n"
    ]
    for path in sorted((folder / "results" / "payoff").glob("*.json")):
        data = json.loads(path.read_text())
        about = data["machine"]
        parts.append(
            f"{about['device']}, {data['dtype']}, torch {about['torch']}, threads: {about['threads']}, load before: "
            f"{data['load_before']:.1f} ([results/payoff/{path.name}](../results/payoff/{path.name})):\n"
        )
        rates = sorted({r["rate"] for r in data["pays"]})
        lines = ["| layers | units | rows | " + " | ".join(f"rate {r:g} (floor)" for r in rates) + " |"]
        lines.append("|---|---:|---:|" + "---:|" * len(rates))
        layers: dict[Any, dict[float, dict[str, Any]]] = {}
        for r in data["pays"]:
            layers.setdefault((r["kind"], r["outer"], r["size"], _rows(r["rows"])), {})[r["rate"]] = r
        for (kind, outer, size, rows), found in layers.items():
            cells = [_share(found.get(rate)) for rate in rates]
            lines.append(f"| {kind} | {outer}-{size}-{outer} | {rows} | {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
        parts.append(_aligns(data["align"]))
    return parts


def _share(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['sliced_ms'] / row['full_ms']:.0%} ({row['narrow_ms'] / row['full_ms']:.0%})"


def _rows(rows: Any) -> str:
    return str(rows) if isinstance(rows, int) else f"{rows[0]} x {rows[1]} x {rows[1]}"


def _aligns(rows: list[dict[str, Any]]) -> str:
    """Time per unit by alignment of the width, in percent of the time per unit of the full layer."""
    aligns = sorted({r["align"] for r in rows})
    layers: dict[Any, dict[int, float]] = {}
    for r in rows:
        key = f"{r['kind']} {r['outer']}-{r['size']}, {_rows(r['rows'])} rows"
        layers.setdefault(key, {})[r["align"]] = r["per_unit_of_full"]
    lines = ["| time per unit, width a multiple of | " + " | ".join(map(str, aligns)) + " |"]
    lines.append("|---|" + "---:|" * len(aligns))
    for name, found in layers.items():
        cells = (f"{found[a]:.0%}" if a in found else "" for a in aligns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"

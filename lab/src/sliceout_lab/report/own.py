"""The page of recipes: runs beyond the paper (several slices in one step, widths that grow) and their rivals.

Epochs, learning rates and settings of the network may differ from row to row there: the table says all that differs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from ..scheme import differences
from .groups import EXTRAS, Group, name_of, scaling_in_words
from .page import Block, Bullets, Code, Heading, Page, Table, Text
from .tables import NOTHING, with_error

OPENING = (
    "What to try first, by kind of model and training, and every run that says so. ± is the standard error of the mean "
    "over n seeds; one run has no error. `lab/src/sliceout_lab/recipes.toml` holds the settings as data."
)
ABOUT = {
    "parts": "**Parts**: the batch is split into so many equal parts, and each has a slice of its own in every layer; "
    "without it, all of the batch goes through one slice.",
    "grow": "**Growing**: the rate falls while the network trains, so that units join; *from 50 %* is from half of the "
    "training on. *Prefix* slices always keep the first units: the network is a narrow one that gets wider.",
    "keep": "**Narrow**: a plain network built with this part of the units, which costs what the slices do.",
    "values": "**Attention values**: values and output projection are sliced, queries and keys are left whole.",
    "chosen": "**Epoch by validation**: the test perplexity by word at the epoch that is best on the validation split.",
    "recalibrated": "**Norms re-estimated**: with batch-norm statistics of the full network (`recalibrate_`).",
}


def page(groups: Sequence[Group]) -> Page:
    """What to try first, by kind of model and training, with the runs that it rests on; then all other such runs."""
    found: dict[str, list[Group]] = {}
    for g in groups:
        if g.own:
            found.setdefault(str(g.runs[0].record.get("experiment")), []).append(g)
    told = [words for key, words in ABOUT.items() if any(_concerns(key, g) for same in found.values() for g in same)]
    out = Page("Recipes", [Text(OPENING), *([Bullets(told)] if told else [])])
    for recipe in tomllib.loads((Path(__file__).parents[1] / "recipes.toml").read_text(encoding="utf-8"))["recipe"]:
        settings = [Code(recipe["settings"])] if recipe["settings"] else []
        out.add(Heading(recipe["name"]), *settings, Text(recipe["why"]))
        for name in recipe["experiments"]:
            out.add(*_tables(name, found.pop(name, [])))
    if found:
        out.add(Heading("Other runs"))
        for name, same in found.items():
            out.add(*_tables(name, same))
    return out


def _tables(name: str, groups: Sequence[Group]) -> list[Block]:
    """The runs of an experiment, a table for each machine and size."""
    if not groups:
        return [Text(f"`sliceout-lab reproduce {name}`: not run here yet.")]
    alike: dict[tuple[str, str], list[Group]] = {}
    for g in groups:
        alike.setdefault((g.device, _scaling(g)), []).append(g)
    tables = [_table(same, *where) for where, same in alike.items()]
    return [Heading(f"`sliceout-lab reproduce {name}`", 3), *tables]


def _scaling(g: Group) -> str:
    """What was scaled down, but for epochs, which may differ from row to row."""
    return scaling_in_words({k: v for k, v in g.scaled.items() if k not in ("epochs", "data")})


def _concerns(key: str, g: Group) -> bool:
    network = g.config.get("model_settings") or {}
    final = g.runs[0].record["final"]
    return bool(
        {
            "parts": g.config.get("parts", 1) > 1,
            "keep": network.get("keep", 1) < 1,
            "values": g.config.get("attention") == "values",
        }.get(key, g.config.get(key) or final.get(key))
    )


def _table(groups: Sequence[Group], device: str, scaled: str) -> Table:
    extras = [e for e in EXTRAS if any(g.extra(e) for g in groups)]
    percent = groups[0].metric == "accuracy"
    rows = []
    for g, told in zip(groups, differences([g.config for g in groups]), strict=True):
        words = [name_of(g.config), *([f"rate {g.rate:g}"] if g.rate and not g.config.get("grow") else [])]
        scores = [g.score("last"), *(g.extra(e) for e in extras)]
        seconds, ms = g.number("seconds"), g.number("ms_per_step")
        rows.append([
            ", ".join([*words, *told]),
            *(NOTHING if s is None else with_error(s) for s in scores),
            f"{seconds.mean:.1f} s" if seconds else NOTHING, f"{ms.mean:.3g} ms" if ms else NOTHING,
        ])  # fmt: skip
    score = "test accuracy, %" if percent else "test perplexity by token, last epoch"
    notes = [f"Measured on {device}.", *([f"Scaled down: {scaled}."] if scaled else [])]
    headings = ("scheme", score, *(e.heading for e in extras), "training", "step")
    if all(row[-2:] == [NOTHING, NOTHING] for row in rows):  # they shared their device
        headings, rows = headings[:-2], [row[:-2] for row in rows]
    return Table(headings, rows, notes=notes)

"""Runs beyond the paper, by experiment: several slices in one step, and widths that grow, and their rivals.

Epochs, learning rates and settings of the network may differ from row to row there: the table says all that differs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..scheme import differences
from .groups import EXTRAS, Group, name_of, scaling_in_words
from .page import Block, Bullets, Heading, Table, Text
from .tables import NOTHING, with_error

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


def section(groups: Sequence[Group]) -> list[Block]:
    """The section of the page; nothing where nothing of the kind was run."""
    found: dict[tuple[str, str, str], list[Group]] = {}
    for g in groups:
        if g.own:
            key = (str(g.runs[0].record.get("experiment")), g.device, _scaling(g))
            found.setdefault(key, []).append(g)
    if not found:
        return []
    told = [words for key, words in ABOUT.items() if any(_concerns(key, g) for same in found.values() for g in same)]
    out: list[Block] = [
        Heading("Beyond the paper: parts and growth"),
        Text("Each row is a configuration of its own; none of them is in the paper's tables above."),
        *([Bullets(told)] if told else []),
    ]
    for (name, device, scaled), same in found.items():
        out += [Heading(name, 3), _table(same, device, scaled)]
    return out


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
    return Table(headings, rows, notes=notes)

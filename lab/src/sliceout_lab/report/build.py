"""The results page: findings first, then the paper's tables with our numbers in them, pictures, and every run."""

from __future__ import annotations

from collections.abc import Sequence

from . import frontier, own, paper, plots, speed, tables
from .co2 import Carbon
from .co2 import page as co2_page
from .compare import Compared, compare
from .figures import Drawn
from .findings import DATA, findings
from .groups import Group, group, name_of, scaling_in_words
from .page import Block, Bullets, Figures, Heading, Page, Text
from .reading import Measured
from .timing import steps

PAPERS_CURVES = {
    ("fashion-mnist", "mlp"): "fashion-mnist-accuracy-curve",
    ("lm1b", "lm-1024"): "transformer-1024-curve",
    ("lm1b", "lm-2048"): "transformer-2048-curve",
}
READING = (
    "± is the standard error of the mean over seeds; n is their number, and one run has no error. The paper does "
    "not say "
    "what its own ± is; its memory tables speak of a confidence interval.",
    "p is Welch's two-sided t-test between two schemes; with two seeds each it takes a large difference to pass "
    "0.05. The "
    "values are not corrected for the number of comparisons on this page.",
    "Which accuracy the paper means is said above each table: the best epoch for MNIST and FashionMNIST (its "
    "captions say "
    '"Highest test accuracy", so the epoch is chosen on the test set), the last one elsewhere. Both of ours are in the '
    "table of all runs.",
    "A number that was run scaled down is marked and has no difference: it is not the paper's setting.",
    "Times come from benchmarks where there are some, else from training runs that had the device for themselves, "
    "and are "
    "compared only on one device at one batch, precision and mode. Window and circular slices cost the same launches "
    "and bytes (but for eager code, where a slice that wraps around is copied in two pieces), so either may stand for "
    "the other there, and a footnote says so. Memory is the most that the caching allocator held (max reserved), which "
    "is what the paper measures.",
    "The paper measured on an RTX 2080, Titan RTX and TPUv3; ours says its device, precision and mode each time.",
)


NAMES = ("results", "co2", "recipes")
"""Of the pages, and of their files."""


def pages(measured: Measured, carbon: Carbon) -> list[Page]:
    """Results, CO2 and recipes: see ``NAMES``."""
    every = group(measured.runs)
    groups = [g for g in every if not g.own]
    taken = steps(measured, groups)
    compared = [compare(table, groups, taken) for table in paper.tables()]
    drawn, speeds = speed.speedups(taken)
    out = Page("Results beside the paper", _opening(measured, every))
    out.add(Heading("Findings"))
    said = findings(compared, groups, speeds, taken)
    out.add(Bullets(said) if said else Text("*Nothing was run here yet: what follows are the paper's own numbers.*"))
    for section in dict.fromkeys(table["section"] for table in paper.tables()):
        pictures = [*_by_rate(section, compared), *_curves(section, groups)]
        out.add(Heading(section), *([Figures(pictures)] if pictures else []))
        for one in (c for c in compared if c.table["section"] == section):
            out.add(Heading(one.table["caption"].split(". ")[0].rstrip("."), 3), *tables.of_paper(one))
    out.add(Heading("Time and memory"), Figures([*drawn, *speed.steps_by_rate(taken)]), *tables.of_speeds(speeds))
    out.add(
        Heading("Compute-efficacy frontier"),
        Text(
            "Accuracy against training time for a family of sizes: the further left and up a line lies (down for "
            "perplexity), the better."
        ),
        Figures([*frontier.ours(groups), *frontier.papers()]),
    )
    out.add(Heading("All runs"), *tables.of_all(every))
    out.add(Heading("The paper in words"), *tables.in_words())
    out.add(Heading("How to read this"), Bullets(READING))
    if notes := _notes(measured):
        out.add(Heading("Notes on runs"), Bullets(notes))
    return [out, co2_page(measured, every, speeds, carbon), own.page(every)]


def _opening(measured: Measured, groups: Sequence[Group]) -> list[Block]:
    benched = {str((b.get("machine") or {}).get("device")) for b in measured.benches}
    machines = sorted({g.device for g in groups} | benched)
    revisions = sorted({str(r.record.get("revision"))[:8] for r in measured.runs if r.record.get("revision")})
    cases = sum(len(b.get("cases") or []) for b in measured.benches)
    summary = f"{len(measured.runs)} training runs in {len(groups)} configurations and {cases} benchmarked steps"
    summary += f", on {', '.join(machines)}" if machines else ""
    summary += f"; revision{'s' if len(revisions) > 1 else ''} {', '.join(revisions)}" if revisions else ""
    blocks: list[Block] = [
        Text(
            "*Improving compute efficacy frontiers with SliceOut* (Notin, Gomez, Yoo and Gal) and what comes out here: "
            f"{summary}. Made by `sliceout-lab report` from result files; no number on this page is written by hand."
        )
    ]
    if shared := sum(not run.alone for run in measured.runs):
        blocks.append(
            Text(
                f"**{shared} of the runs shared their device with others.** Their times and energies say nothing "
                "about the "
                "method and are left out everywhere; their accuracies count."
            )
        )
    if dirty := sum(bool(run.record.get("dirty")) for run in measured.runs):
        blocks.append(Text(f"{dirty} of the runs come from a work tree with changes that were not committed."))
    if measured.warnings:
        blocks += [Text("Left out or replaced while reading:"), Bullets([f"`{w}`" for w in measured.warnings])]
    return blocks


def _notes(measured: Measured) -> list[str]:
    """What people wrote into the records."""
    out = []
    for run in measured.runs:
        if note := run.record.get("note"):
            rate = f" {run.config['rate']:g}" if run.config.get("rate") else ""
            title = (
                f"{run.config['data']}, {run.config['model']}, {name_of(run.config)}{rate}, seed {run.record['seed']}"
            )
            out.append(f"{title} (`{run.record.get('id') or run.where}`): {note}")
    return out


def _by_rate(section: str, compared: Sequence[Compared]) -> list[Drawn]:
    """The tables of the small networks as pictures."""
    titles = {"accuracy": "accuracy by rate", "time": "time of an epoch by rate", "memory": "memory by rate"}
    out: list[Drawn] = []
    if section in ("FashionMNIST", "MNIST"):
        for one in (c for c in compared if c.table["section"] == section):
            out += plots.by_rate(one, f"{section}: {titles[one.columns[0]['metric']]}")
    return out


def _curves(section: str, groups: Sequence[Group]) -> list[Drawn]:
    """Scores over time: the paper's own curves, and ours where something was run."""
    out: list[Drawn] = []
    found: dict[tuple[str, str, str, str], list[Group]] = {}
    for g in groups:
        if section_of(str(g.declared("data")), g.config["model"]) == section:
            key = (str(g.declared("data")), g.config["model"], scaling_in_words(g.scaled), g.device)
            found.setdefault(key, []).append(g)
    for (data, model), name in PAPERS_CURVES.items():
        scalings = {scaled for d, m, scaled, _ in found if (d, m) == (data, model)}
        if section_of(data, model) == section and "" not in scalings:  # else they are drawn beside ours
            absent = "Ours, scaled down, have pictures of their own." if scalings else "Ours: not run here."
            title = f"{DATA.get(data, data)}, {model}: the paper"
            out += plots.curves([], name, name, title, absent=absent)
    for i, ((data, model, scaled, _), same) in enumerate(found.items()):
        rates = sorted({g.rate for g in same if g.rate})
        schemes = {(name_of(g.config), g.rate) for g in same}
        title = f"{DATA.get(data, data)}, {model}" + (" (scaled down)" if scaled else "")
        theirs = None if scaled else PAPERS_CURVES.get((data, model))
        name = f"curves-{data}-{model}-{i}"
        if len(schemes) > len({name for name, _ in schemes}):  # a scheme at several rates: all in one would be a knot
            for rate in rates:
                out += plots.curves(same, theirs, f"{name}-{rate:g}", f"{title}, rate {rate:g}", only=rate)
        else:
            out += plots.curves(same, theirs, name, title)
    return out


def section_of(data: str, model: str) -> str:
    """The section of the page to which a run belongs."""
    if model.startswith("mlp"):
        return "MNIST" if data == "mnist" else "FashionMNIST"
    return "Wide ResNets" if model.startswith("wrn") else "Transformers" if model.startswith("lm-") else "EfficientNets"

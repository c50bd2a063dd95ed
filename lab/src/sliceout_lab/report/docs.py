"""The committed pages: docs/results.md, co2.md, recipes.md and index.md, their pictures, and the block in the README.

All of it follows from ``results/train`` and ``results/bench``; ``sliceout-lab report --docs`` makes it anew and a test
compares it with what is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sliceout.cli import UserError

from .build import NAMES, pages
from .co2 import Carbon
from .groups import Group, choose, group, scaling_in_words
from .page import Table
from .reading import Measured, load
from .render import markdown, render
from .speed import speedups
from .stats import difference
from .tables import Speeds, with_error
from .timing import Pair, Step, steps

BEGIN = "<!-- begin: made by `sliceout-lab report --docs` -->"
END = "<!-- end: made by `sliceout-lab report --docs` -->"
HEADER = (
    "<!-- Made by `sliceout-lab report --docs` from results/train and results/bench: change those, not this. -->\n\n"
)


def update(
    root: Path,
    *,
    results: Sequence[Path] | None = None,
    bench: Sequence[Path] | None = None,
    carbon: Carbon | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> list[Path]:
    """Bring the pages of the repository at ``root`` up to date; returns the files whose content changed."""
    if not (root / "pyproject.toml").is_file() or not (root / "README.md").is_file():
        raise UserError(f"--docs: {root} is not the repository (no pyproject.toml and README.md); run it there")
    measured = load_committed(root, results, bench)
    for warning in measured.warnings:
        say(warning)
    changed = []
    made = files(root, measured, carbon or Carbon())
    for path, text in made.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    texts = [page.read_text(encoding="utf-8") for page in sorted((root / "docs").glob("*.md"))]
    for old in sorted(set((root / "docs" / "figures").glob("*.svg")) - set(made)):
        if 'data-of="' in old.read_text(encoding="utf-8") and not any(old.name in text for text in texts):
            old.unlink()  # drawn by us, and on no page any more
            changed.append(old)
    return changed


def load_committed(root: Path, results: Sequence[Path] | None = None, bench: Sequence[Path] | None = None) -> Measured:
    """The committed results, with paths relative to the repository, so that pages are the same on every machine."""
    train, benches = root / "results" / "train", root / "results" / "bench"
    found = list(results) if results is not None else [train] if train.is_dir() else []
    more = list(bench) if bench is not None else [benches] if benches.is_dir() else []
    measured = load(found, more)
    measured.warnings = [w.replace(f"{root}/", "") for w in measured.warnings]
    return measured


def files(root: Path, measured: Measured, carbon: Carbon) -> dict[Path, str]:
    """Every generated file and its text."""
    docs = root / "docs"
    made = pages(measured, carbon)
    out = {docs / f"{name}.md": HEADER + markdown(page) for name, page in zip(NAMES, made, strict=True)}
    for drawn in (drawn for page in made for drawn in page.figures):
        out[docs / "figures" / f"{drawn.name}.svg"] = drawn.svg()
    out[docs / "index.md"] = HEADER + render("index.md")
    readme = root / "README.md"
    out[readme] = with_block(readme.read_text(encoding="utf-8"), readme_block(measured))
    return out


def with_block(readme: str, block: str) -> str:
    """The README with what stands between the two marks replaced."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise UserError(f"README.md: expected the lines {BEGIN} and {END} once each, in this order")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"


def readme_block(measured: Measured) -> str:
    """The headline numbers: accuracy of the main schemes, and time by network."""
    groups = group(measured.runs)
    taken = steps(measured, groups)
    return render(
        "readme.md.jinja",
        runs=len(measured.runs),
        configurations=len(groups),
        devices=sorted({g.device for g in groups}),
        accuracies=_accuracies(groups),
        sentences=_sentences(groups),
        times=_times(speedups(taken)[1], taken),
    ).rstrip("\n")


SHOWN = (
    ("FashionMNIST, MLP, rate 0.5", {"data": "fashion-mnist", "model": "mlp", "rate": 0.5}, "best"),
    ("CIFAR-10, Wide ResNet 28x6, rate 0.5", {"data": "cifar-10", "model": "wrn-28-6", "rate": 0.5}, "last"),
)
SCHEMES = (
    ("none", {"scheme": "none"}), ("standard", {"scheme": "standard"}),
    ("SliceOut, window, flow", {"scheme": "sliceout", "sampling": "window", "norm": "flow"}),
    ("SliceOut, window, probabilistic", {"scheme": "sliceout", "sampling": "window", "norm": "probabilistic"}),
    ("SliceOut, circular", {"scheme": "sliceout", "sampling": "circular"}),
)  # fmt: skip


def _accuracies(groups: Sequence[Group]) -> Table | None:
    rows, notes = [], []
    for title, match, statistic in SHOWN:
        cells = []
        for _, scheme in SCHEMES:
            found = _found(groups, match, scheme, statistic)
            score = found.score(statistic) if found else None
            rate = f" at rate {found.rate:g}" if found and found.rate and found.rate != match["rate"] else ""
            cells.append("not run here" if score is None else with_error(score) + rate)
            if found and found.scaled:
                notes.append(f"{title}: scaled down, {scaling_in_words(found.scaled)}.")
        if any(cell != "not run here" for cell in cells):
            rows.append([f"{title} ({'best epoch' if statistic == 'best' else 'last epoch'})", *cells])
    if not rows:
        return None
    return Table(["test accuracy, %", *(name for name, _ in SCHEMES)], rows, notes=list(dict.fromkeys(notes)))


def _found(groups: Sequence[Group], match: Any, scheme: Any, statistic: str) -> Group | None:
    """The group that stands in the table; standard dropout at its best rate where this one was not run."""
    found = choose(groups, {**match, **scheme}, statistic)
    if found is None and scheme["scheme"] == "standard":
        found = choose(groups, {**match, **scheme, "rate": "best"}, statistic)
    return found


def _sentences(groups: Sequence[Group]) -> list[str]:
    """Each row of the table as a sentence: SliceOut against standard dropout, and whether that may be chance."""
    said = []
    for title, match, statistic in SHOWN:
        standard = _found(groups, match, {"scheme": "standard"}, statistic)
        base, parts = standard.score(statistic) if standard else None, []
        for name, scheme in SCHEMES:
            found = _found(groups, match, scheme, statistic) if scheme["scheme"] == "sliceout" else None
            if base and found and (score := found.score(statistic)):
                parts.append(f"{name.removeprefix('SliceOut, ')}: {difference(score, base).words('points')}")
        if parts:
            said.append(f"{title}, SliceOut against standard dropout: {'; '.join(parts)}.")
    return said


def _times(speeds: Speeds, taken: Sequence[Step]) -> Table | None:
    rows = []
    for model, pair, _, theirs in speeds:
        if pair is None or pair.step.scaled:
            continue
        for one in (pair, *_dense(pair, taken)):
            memory = "-" if one.memory is None else f"{one.memory:.0f} %"
            paper = "-" if theirs is None else f"{theirs:.0f} %"
            rows.append([f"{model}, rate {one.step.rate:g}", f"{one.time:.0f} %", paper, memory, one.step.where])
    if not rows:
        return None
    columns = ["a step with SliceOut, of one without", "time", "time in the paper", "memory held", "measured on"]
    return Table(columns, rows)


def _dense(pair: Pair, taken: Sequence[Step]) -> list[Pair]:
    """The same with the default, dense gradients, where the other ones are faster."""
    if pair.step.grads == "dense":
        return []
    key = (pair.step.setting, pair.step.model, "sliceout", pair.step.rate, "dense")
    return [Pair(s, pair.base) for s in taken if (s.setting, s.model, s.scheme, s.rate, s.grads) == key][:1]

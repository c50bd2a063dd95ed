"""Pages lead somewhere: every relative link resolves, every page is in the index, and commands in them exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from sliceout.cli import app as library
from sliceout_lab import cli
from sliceout_lab.report import docs, groups, timing
from sliceout_lab.report.speed import speedups
from sliceout_lab.report.stats import difference

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "results").glob("*.md")])


def links(page: Path) -> list[str]:
    """Targets of all links and pictures that are not on the web; code is no link."""
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    return [t for t in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:|#", t)]


def commands(page: Path) -> list[str]:
    """What stands in code and begins with ``sliceout``: in backticks, in blocks, in indented lines.

    What a result file recorded stands before its revision: these are commands of that revision.
    """
    text = re.sub(r"`[^`\n]+`, revision ", "", page.read_text())
    code = [*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^(?:    |\$ )(.*)$", text, flags=re.MULTILINE)]
    for block in re.findall(r"```[^\n]*\n(.*?)```", text, flags=re.DOTALL):
        code += block.split("\n")
    lines = (re.sub(r"\s+#.*", "", c).strip() for c in code)
    return [c for c in lines if re.match(r"(\S*/bin/)?sliceout(-lab)? [a-z]", c)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    dead = [t for t in links(page) if not (page.parent / t.partition("#")[0]).exists()]
    assert dead == []


def test_the_index_leads_to_every_page() -> None:
    found = {(ROOT / "docs" / t).resolve() for t in links(ROOT / "docs" / "index.md")}
    assert {p.resolve() for p in (ROOT / "docs").glob("*.md")} - found == {ROOT / "docs" / "index.md"}


def test_the_readme_leads_to_the_pages() -> None:
    found = {t.partition("#")[0] for t in links(ROOT / "README.md")}
    assert {f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")} <= found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_options_exist(page: Path) -> None:
    programs = {"sliceout": typer.main.get_command(library.app), "sliceout-lab": typer.main.get_command(cli.app)}
    for line in commands(page):
        program, *words = line.split()
        group = command = programs[program.rpartition("/")[2]]
        while words and (inner := getattr(command, "commands", {}).get(words[0])) is not None:
            command = inner
            words.pop(0)
        assert command is not group, f"{line}: no such command"
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
        assert {w.partition("=")[0] for w in words if w.startswith("--")} <= known, line


def test_commands_are_found() -> None:
    assert {c.split()[1] for c in commands(ROOT / "README.md")} >= {"data", "train", "reproduce", "bench", "report"}


def test_the_summary_in_the_readme_is_that_of_the_results() -> None:
    """It is written by hand: how long steps take, and no gain in accuracy over standard dropout."""
    told = " ".join((ROOT / "README.md").read_text().split())
    assert "Accuracy is at best level with dropout" in told
    measured = docs.load_committed(ROOT)
    found = groups.group(measured.runs)
    sliced = [g for g in found if g.scheme == "sliceout" and not g.own]
    assert sliced
    for g in sliced:
        match = {"data": g.declared("data"), "model": g.config["model"], "scheme": "standard"}
        base = groups.choose(found, {**match, "rate": g.rate}, "best") or groups.choose(
            found, {**match, "rate": "best"}
        )
        assert base is not None
        got = difference(g.score("best"), base.score("best"))
        assert not (got.clear and got.value > 0), (g.config, got)
    speeds = speedups(timing.steps(measured, found))[1]
    shares = [pair.time for _, pair, _, _ in speeds if pair and "H200" in pair.step.device]
    assert (
        f"on the H200 a step takes {min(shares):.0f} to {max(shares):.0f} % of the time, except where it waits for "
        "launches: in eager code and under `torch.compile` without CUDA graphs, at small batches" in told
    )
    steps = timing.steps(measured, found)
    slower = [p.step for p in _all_pairs(steps) if "H200" in p.step.device and p.time > 100]
    assert {s.mode for s in slower} == {"eager", "compiled-default"}, "the exceptions that the readme makes"
    assert all(s.batch <= 128 for s in slower)


def _all_pairs(steps: list[timing.Step]) -> list[timing.Pair]:
    """Every benchmarked SliceOut step beside standard dropout of the same setting, network and rate."""
    return [
        timing.Pair(a, b)
        for a in steps
        for b in steps
        if (a.scheme, b.scheme) == ("sliceout", "standard")
        and (a.setting, a.model, a.rate) == (b.setting, b.model, b.rate)
    ]

"""``sliceout-lab bench``: training steps of the paper's networks, by suites, against the floor and the paper."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sliceout.cli import UserError
from sliceout.cli.options import BenchOptions, find_device, make_folder, with_bench_options

if TYPE_CHECKING:
    from sliceout.cli.cases import Case


@with_bench_options
def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="wrn-28-10, mlp, mlp-3x512, lm-1024, efficientnet-b0, ..., timm:NAME, package.module:factory."
        ),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="A named set of cases instead: h200-must, parts, scaling, cpu, tiny.")
    ] = None,
    *,
    options: BenchOptions,
    match_memory: Annotated[
        bool, typer.Option("--match-memory", help="Also find SliceOut's largest batch in standard dropout's memory.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Instead of timing: where time and memory go, kind by kind (results/profile)."),
    ] = False,
    tune_first: Annotated[
        bool, typer.Option("--tune-first", help="Let cuDNN choose its algorithms in an eager pass, before compiling.")
    ] = False,
    prepare: Annotated[int, typer.Option(help="Workers that start up side by side; one at a time is timed.")] = 0,
    prefill: Annotated[int, typer.Option(help="First compile all cases, so many at a time, into the disk cache.")] = 0,
    limit: Annotated[float, typer.Option(help="Seconds after which nothing more is started.")] = 24 * 3600,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results: results/bench. Cases that are there are skipped.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="End of the file's name; the suite's name by default.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Measure cases again that failed.")] = False,
    revision: Annotated[str | None, typer.Option(help="Git revision to record where there is no repository.")] = None,
    table: Annotated[Path | None, typer.Option(help="Only print the table of this result file.")] = None,
    docs: Annotated[
        bool, typer.Option("--docs", help="Only write docs/performance.md from the committed results.")
    ] = False,
) -> None:
    """Measure training steps without dropout, with dropout, at the narrow floor and with SliceOut, a process each."""
    import torch
    from rich.console import Console

    from sliceout.cli import cases
    from sliceout.cli.run import task

    from ..bench import files, suites

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 170)
    if docs:
        from ..report import performance

        console.print(f"wrote {performance.write()}")
        return
    if table is not None:
        _print(console, files.read(table), table)
        return
    kind = find_device(options.device)
    if suite is not None:
        if models:
            raise UserError("--suite names its own models: give either models or a suite")
        chosen = suites.suite(suite)
    else:
        if not models:
            raise UserError("name a model (sliceout-lab bench wrn-28-10) or a suite (--suite tiny)")
        chosen = cases.from_options(models, kind, options, suites.default_batch)
        _check(models)
    cases.check_device(chosen, kind)
    if match_memory and not {"sliceout"} < {c.scheme for c in chosen if c.scheme in ("none", "standard", "sliceout")}:
        raise UserError("--match-memory compares SliceOut with standard dropout: --schemes standard,sliceout")
    if profile and match_memory:
        raise UserError("--profile times nothing: it does not go with --match-memory")
    out = out or Path("results") / ("profile" if profile else "bench")
    make_folder(out)
    where = torch.device(kind)
    plan = _Plan(
        console, chosen, files.path_for(out, chosen, where, name or suite),
        files.header(where, shlex.join(["sliceout-lab", *sys.argv[1:]]), revision),
        task(kind, options.seconds, tune_first=tune_first), prepare, prefill, limit,
    )  # fmt: skip
    if profile:
        _profile(plan)
    else:
        _measure(plan, match_memory, retry)


@dataclass(frozen=True)
class _Plan:
    """What is to be measured, and where the numbers go."""

    console: Any
    cases: list[Case]
    path: Path
    header: dict[str, Any]
    task: dict[str, Any]
    prepare: int
    prefill: int
    limit: float


def _measure(plan: _Plan, match_memory: bool, retry: bool) -> None:
    from sliceout.cli.bench import raise_for_failures
    from sliceout.cli.cases import case_of

    from ..bench import files, match, run
    from ..bench.prefill import prefill

    deadline, cache = time.monotonic() + plan.limit, run.default_cache()
    result = files.ResultFile(plan.path, plan.header)
    if retry:
        result.forget_failed()
    missing = [c for c in plan.cases if not result.has(c)]

    def say(text: str) -> None:
        plan.console.print(f"[{plan.limit - deadline + time.monotonic():5.0f} s] {text}", soft_wrap=True)

    say(f"{len(missing)} of {len(plan.cases)} cases to measure, into {plan.path}")
    if plan.prefill and any(c.compiled for c in missing):
        for failure in prefill(missing, plan.task, cache=cache, workers=plan.prefill, deadline=deadline):
            say(f"compiling ahead failed: {failure}")
        say("compiled ahead")
    for _, row in run.run_cases(missing, plan.task, cache=cache, prepare=plan.prepare, deadline=deadline, say=say):
        result.add(row)
    if match_memory:
        there = result.data["match_memory"]
        for entry in match.match(
            result.rows, plan.cases, list(there), plan.task, cache=cache, deadline=deadline, say=say
        ):
            there.append(entry)
            result.save()
    _print(plan.console, result.data, plan.path)
    left = sum(not result.has(c) for c in plan.cases)
    if left:
        say(f"{left} cases were not measured within --limit {plan.limit:g}: the same command goes on with them")
    ours = [r for r in result.rows if case_of(r) in plan.cases]
    raise_for_failures(ours, len(plan.cases), " (--retry tries them again)")


def _profile(plan: _Plan) -> None:
    from sliceout.cli.bench import raise_for_failures, write_text

    from ..bench import run
    from ..bench.prefill import prefill
    from ..report import profiles

    deadline, cache = time.monotonic() + plan.limit, run.default_cache()
    data: dict[str, Any] = {"kind": "profile", "schema": 1, "tuned_first": plan.task["tune_first"], "cases": []}
    data |= plan.header
    task = {**plan.task, "profile": True}
    if plan.prefill:
        prefill(plan.cases, task, cache=cache, workers=plan.prefill, deadline=deadline)
    for _, row in run.run_cases(plan.cases, task, cache=cache, prepare=plan.prepare, deadline=deadline):
        data["cases"].append(row)
        write_text(plan.path, json.dumps(data, indent=1) + "\n")
        outcome = row["error"] or "profiled"
        plan.console.print(f"{row['model']} {row['mode']} {row['scheme']}: {outcome}", soft_wrap=True)
    for line in profiles.tables(data["cases"]):
        plan.console.print(f"{line}\n", soft_wrap=True, markup=False)
    plan.console.print(f"Numbers: {plan.path}", soft_wrap=True)
    raise_for_failures(data["cases"], len(plan.cases))


def _check(models: list[str]) -> None:
    """Find names of networks that cannot be built before anything is measured."""
    import torch

    from sliceout.cli.models import find_model

    from ..bench.networks import network

    for model in models:
        with torch.device("meta"):  # of a network, its shapes are enough
            _ = find_model(model) if ":" in model else network(model)


def _print(console: Any, data: dict[str, Any], path: Path) -> None:
    from ..bench import show

    about = data["machine"]
    title = f"{about['device']}, torch {about['torch']}, revision {data['revision']}: one training step"
    console.print(show.table(data["cases"], title))
    if data["match_memory"]:
        console.print(show.match_table(data["match_memory"]))
    if notes := show.scaling_notes(data["cases"]):
        for note in notes:
            console.print(note, soft_wrap=True)
        for picture in show.plot(data["cases"], title, path.with_suffix(".png")):
            console.print(f"Plot: {picture}", soft_wrap=True)
    console.print(f"Numbers: {path}", soft_wrap=True)

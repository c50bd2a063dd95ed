"""``sliceout bench``: time and memory of a training step, under every scheme, against the floor and the paper."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from .. import LabError
from .shared import find_device, make_folder

T = TypeVar("T")


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="wrn-28-10, mlp, mlp-3x512, lm-1024, efficientnet-b0, ..., timm:NAME, package.module:factory."
        ),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="A named set of cases instead: h200-must, scaling, cpu, tiny.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas; the paper's by default.")] = "",
    rates: Annotated[str, typer.Option(help="Fractions of the units that are dropped.")] = "0.5",
    schemes: Annotated[
        str, typer.Option(help="Of none, standard, controlled, floor, sliceout.")
    ] = "none,standard,floor,sliceout",
    modes: Annotated[
        str, typer.Option(help="Of eager, compiled, compiled-default, captured, captured-compiled.")
    ] = "eager",
    precision: Annotated[str, typer.Option(help="bf16, tf32 or fp32; by default bf16 on a GPU, fp32 else.")] = "",
    sampling: Annotated[str, typer.Option(help="Of circular, window.")] = "circular",
    grads: Annotated[str, typer.Option(help="Of dense, compact.")] = "dense",
    align: Annotated[int | None, typer.Option(help="Starts and widths are multiples of it.")] = None,
    stages: Annotated[int | None, typer.Option(help="Only so many stages of inverted bottlenecks.")] = None,
    size: Annotated[int | None, typer.Option(help="Side of the images, or tokens in a sequence.")] = None,
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
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seconds: Annotated[float, typer.Option(help="Seconds of timed steps in each case; 2 and more for energy.")] = 1.2,
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
    from rich.console import Console

    from ..bench import cases as known
    from ..bench import files, show

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 170)
    if docs:
        from ..bench import page

        console.print(f"wrote {page.write()}")
        return
    if table is not None:
        _print(console, show, files.read(table), table)
        return
    kind = find_device(device)
    if suite is not None:
        if models:
            raise LabError("--suite names its own models: give either models or a suite")
        chosen = known.suite(suite)
    else:
        if not models:
            raise LabError("name a model (sliceout bench wrn-28-10) or a suite (--suite tiny)")
        _check(models, batch, align=align, stages=stages, size=size)
        chosen = known.expand(
            models,
            _list("--batch", batch, int),
            _list("--schemes", schemes, str),
            _list("--rates", rates, float),
            _list("--modes", modes, str),
            grads=_list("--grads", grads, str),
            sampling=_list("--sampling", sampling, str),
            precision=precision or ("bf16" if kind == "cuda" else "fp32"),
            align=align,
            stages=stages,
            size=size,
        )
    if kind != "cuda" and any(c.mode.startswith("captured") for c in chosen):
        raise LabError("--modes captured: CUDA graphs need a GPU; try --modes eager,compiled")
    if match_memory and not {"sliceout"} < {c.scheme for c in chosen if c.scheme in ("none", "standard", "sliceout")}:
        raise LabError("--match-memory compares SliceOut with standard dropout: --schemes standard,sliceout")
    if profile and match_memory:
        raise LabError("--profile times nothing: it does not go with --match-memory")
    out = out or Path("results") / ("profile" if profile else "bench")
    make_folder(out)
    how = (seconds, prepare, prefill, tune_first, limit, out, name or suite, revision)
    if profile:
        _profile(console, chosen, kind, *how)
    else:
        _measure(console, chosen, kind, match_memory, retry, *how)


def _measure(
    console: Any, chosen: list[Any], kind: str, match_memory: bool, retry: bool, seconds: float, prepare: int,
    prefill: int, tune_first: bool, limit: float, out: Path, name: str | None, revision: str | None,
) -> None:  # fmt: skip
    import torch

    from ..bench import cases as known
    from ..bench import files, match, run, show

    deadline = time.monotonic() + limit
    device = torch.device(kind)
    path = files.path_for(out, chosen, device, name)
    said = shlex.join(["sliceout", *sys.argv[1:]])
    result = files.ResultFile(path, files.header(device, said, revision))
    if retry:
        result.forget_failed()
    missing = [c for c in chosen if not result.has(c)]
    task = _task(kind, seconds, tune_first)
    cache = _cache()
    say = lambda text: console.print(f"[{limit - deadline + time.monotonic():5.0f} s] {text}", soft_wrap=True)  # noqa: E731
    say(f"{len(missing)} of {len(chosen)} cases to measure, into {path}")
    if prefill and any(c.compiled for c in missing):
        for failure in run.prefill(missing, task, cache=cache, workers=prefill, deadline=deadline):
            say(f"compiling ahead failed: {failure}")
        say("compiled ahead")
    workers = prepare or (8 if kind == "cuda" else 1)
    for _, row in run.run_cases(missing, task, cache=cache, prepare=workers, deadline=deadline, say=say):
        result.add(row)
    if match_memory:
        there = result.data["match_memory"]
        for entry in match.match(result.rows, chosen, list(there), task, cache=cache, deadline=deadline, say=say):
            there.append(entry)
            result.save()
    _print(console, show, result.data, path)
    left = sum(not result.has(c) for c in chosen)
    if left:
        say(f"{left} cases were not measured within --limit {limit:g}: the same command goes on with them")
    failed = [r for r in result.rows if r["error"] and known.case_of(r) in chosen]
    if failed:
        first = failed[0]["error"].strip().splitlines()[0]
        raise LabError(
            f"{len(failed)} of {len(chosen)} cases failed, the first with: {first} (--retry tries them again)"
        )


def _profile(
    console: Any, chosen: list[Any], kind: str, seconds: float, prepare: int, prefill: int, tune_first: bool,
    limit: float, out: Path, name: str | None, revision: str | None,
) -> None:  # fmt: skip
    import json

    import torch

    from ..bench import files, profile_page, run

    deadline = time.monotonic() + limit
    device = torch.device(kind)
    path = files.path_for(out, chosen, device, name)
    data: dict[str, Any] = {"kind": "profile", "schema": 1, "tuned_first": tune_first, "cases": []}
    data |= files.header(device, shlex.join(["sliceout", *sys.argv[1:]]), revision)
    task = {**_task(kind, seconds, tune_first), "profile": True}
    if prefill:
        run.prefill(chosen, task, cache=_cache(), workers=prefill, deadline=deadline)
    workers = prepare or (8 if kind == "cuda" else 1)
    for _, row in run.run_cases(chosen, task, cache=_cache(), prepare=workers, deadline=deadline):
        data["cases"].append(row)
        files.put(path, json.dumps(data, indent=1) + "\n")
        console.print(f"{row['model']} {row['mode']} {row['scheme']}: {row['error'] or 'profiled'}", soft_wrap=True)
    for line in profile_page.tables(data["cases"]):
        console.print(line, soft_wrap=True, markup=False)
    console.print(f"Numbers: {path}", soft_wrap=True)
    if failed := [r["error"] for r in data["cases"] if r["error"]]:
        raise LabError(f"{len(failed)} of {len(chosen)} cases failed, the first with: {failed[0]}")


def _task(kind: str, seconds: float, tune_first: bool) -> dict[str, Any]:
    import torch

    threads = 2 if kind == "cuda" else torch.get_num_threads()
    return {"device": kind, "seconds": seconds, "threads": threads, "tune_first": tune_first}


def _cache() -> Path:
    cache = Path(tempfile.gettempdir()) / f"sliceout-bench-{os.getuid()}"
    cache.mkdir(exist_ok=True)
    return cache


def _check(models: list[str], batch: str, **sizes: int | None) -> None:
    """Before anything is measured: networks that cannot be built and sizes that cannot be meant."""
    import torch

    from ..bench import work
    from ..bench.cases import Case
    from ..find_model import find_model

    for option, value in (*(("batch", b) for b in _list("--batch", batch, int)), *sizes.items()):
        if value is not None and value < 1:
            raise LabError(f"--{option} {value}: expected at least 1")
    for model in models:
        with torch.device("meta"):  # of a network, its shapes are enough
            _ = find_model(model) if ":" in model else work.network(Case(model, 2, "none"))


def _print(console: Any, show: Any, data: dict[str, Any], path: Path) -> None:
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


def _list(option: str, text: str, of: Callable[[str], T]) -> list[T]:
    try:
        found = [of(part.strip()) for part in text.split(",") if part.strip()]
        if not found and option != "--batch":
            raise ValueError
        return found
    except ValueError as error:
        kinds = {"str": "names", "int": "whole numbers", "float": "numbers"}
        raise LabError(f"{option} {text!r}: expected {kinds[of.__name__]}, separated by commas") from error

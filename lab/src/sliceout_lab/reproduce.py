"""Reproducing a table: all its rows for all seeds, one after another or several at once, skipping what is there.

Every run leaves a file in the results when it is done and a checkpoint while it is not, so this can be killed at any
moment and called again. On a GPU every run has a process of its own: what one leaves in memory is not the next one's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sliceout.cli import UserError

from . import experiment as experiments
from . import report as report_pages
from . import results
from .experiment import Experiment, Job
from .experiment_file import near
from .report.groups import EXTRAS, Estimate
from .scheme import labels
from .storage import explained
from .train import Settings, Stopped, run
from .train.__main__ import write
from .train.loop import Diverged
from .train.stop import PARENT


@dataclass(frozen=True)
class Plan:
    """What there is to train."""

    name: str
    jobs: tuple[Job, ...]

    @classmethod
    def of(
        cls,
        name: str,
        *,
        quick: bool = False,
        only: Sequence[str] = (),
        seeds: str | None = None,
        device: str = "cpu",
        mode: str = "auto",
        precision: str | None = None,
        **scale: int | None,
    ) -> Plan:
        """All rows and seeds of a table, or of one experiment."""
        found = experiments.find(name)
        if quick and len(found) > 1:
            found = [e for e in found if e.quick] or found
        jobs = [
            job
            for e in found
            for job in _jobs(e, quick, only, seeds, {"device": device, "mode": mode, "precision": precision}, scale)
        ]
        if not jobs:
            known = sorted({s["scheme"] for e in found for s in e.schemes()})
            raise UserError(f"--only {' '.join(only)}: {name} has {', '.join(known)}{near(only[0], known)}")
        return cls(Path(name).stem, tuple({job.id: job for job in jobs}.values()))


def _jobs(
    e: Experiment,
    quick: bool,
    only: Sequence[str],
    seeds: str | None,
    how: dict[str, Any],
    scale: dict[str, int | None],
) -> list[Job]:
    scaled: dict[str, list[Any]] = {}
    if quick:
        e, small, scaled = experiments.quickened(e)
        scale = {**small, **{k: v for k, v in scale.items() if v is not None}}
    numbers = e.seeds if seeds is None else _numbers(seeds)
    return [
        experiments.job(e, scheme, seed=seed, scaled=scaled, **how, **scale)  # type: ignore[arg-type]
        for scheme in e.schemes()
        if not only or scheme.get("scheme", e.scheme["scheme"]) in only
        for seed in numbers
    ]


def _numbers(seeds: str) -> list[int]:
    try:
        if found := [int(s) for s in seeds.replace(",", " ").split()]:
            return found
        raise ValueError
    except ValueError:
        raise UserError(f"--seeds {seeds}: expected numbers such as 0,1,2") from None


def reproduce(
    plan: Plan,
    out: Path,
    *,
    device: str = "cpu",
    data: Path | None = None,
    jobs: int = 1,
    prepare: bool = False,
    report: bool = True,
    console: Console | None = None,
) -> int:
    """Train what is missing of ``plan``, show it all, write the report; returns the exit code."""
    if jobs < 1:
        raise UserError(f"--jobs {jobs}: expected at least 1")
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a file has room for the table
    kept = out / results.NAME
    there = results.by_id(results.read(kept))
    todo = [job for job in plan.jobs if job.id not in there]
    console.print(
        f"{plan.name}: {len(plan.jobs)} runs, {len(plan.jobs) - len(todo)} of them in {kept} already", soft_wrap=True
    )
    settings = Settings(out, device, data, save_model=False, concurrent=max(1, min(jobs, len(todo))))
    failed: list[str] = []
    code = 0
    try:
        if prepare and todo:
            console.print(f"compiling the steps of {len(todo)} runs, all at once")
            first_seeds = list({job.label: job for job in reversed(todo)}.values())
            compiling = replace(settings, prepare_only=True, quiet=True)
            failed += _in_processes(first_seeds, compiling, len(first_seeds), console)
        if jobs == 1 and device == "cpu":
            failed += _here(todo, settings, console)
        else:
            failed += _in_processes(todo, settings, jobs, console)
    except Stopped as stopped:
        console.print(f"{stopped}", soft_wrap=True)
        code = stopped.code
    done = results.by_id(results.read(kept, say=lambda message: None))
    rows = [done[job.id] for job in plan.jobs if job.id in done]
    if rows:
        console.print(summary(plan, rows))
    for message in failed:
        console.print(f"not done: {message}", soft_wrap=True, style="red")
    if code:
        return code
    if rows and report:
        console.print(f"Report: {report_pages.write([kept], out / 'report')}", soft_wrap=True)
    return 1 if failed else 0


def _here(todo: Sequence[Job], settings: Settings, console: Console) -> list[str]:
    """One after another in this process."""
    failed = []
    for number, job in enumerate(todo, 1):
        try:
            result = run(job, replace(settings, quiet=not console.is_terminal), console)
        except UserError as error:
            if len(todo) > 1 and number == 1 and not isinstance(error, Diverged):  # it will stop all the others too
                raise
            failed.append(str(error))
            console.print(f"({number}/{len(todo)}) not done: {error}", soft_wrap=True)
            continue
        console.print(_line(number, len(todo), job, result), soft_wrap=True)
    return failed


def _in_processes(todo: Sequence[Job], settings: Settings, jobs: int, console: Console) -> list[str]:
    """Several at once, each in a process of its own; a signal to this one reaches all of them."""
    waiting, failed = list(todo), []
    running: dict[subprocess.Popen[bytes], Job] = {}
    number, asked = 0, 0
    alone = jobs == 1 and console.is_terminal

    def ask(signum: int, frame: Any) -> None:
        nonlocal asked
        asked = signum
        for process in running:
            process.terminate()

    with _handled(ask):
        while (waiting and not asked) or running:
            while waiting and len(running) < jobs and not asked:
                job = waiting.pop(0)
                started = _start(job, settings, jobs, show=alone)
                running[started] = job
                if asked:  # while it was started: the signal has not reached it
                    started.terminate()
            for process in [p for p in running if p.poll() is not None]:
                job, number = running.pop(process), number + 1
                record = results.by_id(results.read(settings.out / results.NAME, say=lambda m: None)).get(job.id)
                if process.returncode and not asked:
                    failed.append(f"{job.experiment} {job.label} seed {job.seed}: {_reason(job, settings, process)}")
                    console.print(f"({number}/{len(todo)}) not done: {failed[-1]}", soft_wrap=True)
                elif record is not None and not alone:
                    console.print(_line(number, len(todo), job, record), soft_wrap=True)
            time.sleep(0.05)
    if asked:
        left = len(todo) - number
        raise Stopped(f"stopped with {left} of {len(todo)} runs to go; the same command goes on from there", asked)
    return failed


def _start(job: Job, settings: Settings, jobs: int, show: bool) -> subprocess.Popen[bytes]:
    folder = settings.out / job.id
    with explained(folder, "what is done is in the results; the same command goes on"):
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "job.json", job, settings)
        (settings.out / "logs").mkdir(exist_ok=True)
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    env = {"OMP_NUM_THREADS": threads, **os.environ, PARENT: str(os.getpid())}
    command = [sys.executable, "-m", "sliceout_lab.train", str(folder / "job.json")]
    with explained(_log(job, settings)), _log(job, settings).open("wb") as log:
        return subprocess.Popen(
            command, env=env, stdout=None if show else log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )


def _log(job: Job, settings: Settings) -> Path:
    return settings.out / "logs" / f"{job.id}.txt"


def _reason(job: Job, settings: Settings, process: subprocess.Popen[bytes]) -> str:
    lines = _log(job, settings).read_text(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'it said nothing'} (exit code {process.returncode}; {_log(job, settings)})"


@contextlib.contextmanager
def _handled(handler: Any) -> Iterator[None]:
    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


# -- what came out -----------------------------------------------------------------------------------------------------


def _line(number: int, total: int, job: Job, record: dict[str, Any]) -> str:
    score = _score(record)
    run = f"({number}/{total}) {job.experiment} {job.label} seed {job.seed}"
    return f"{run}: {score} after {len(record['epochs'])} epochs, {record['ms_per_step']:.3g} ms/step"


def _score(record: dict[str, Any]) -> str:
    final = record["final"]
    if "accuracy" in final:
        return f"{final['accuracy']:.2%}"
    if chosen := final.get("chosen"):
        return f"test word perplexity {chosen['word_perplexity']:.2f} at epoch {chosen['epoch']}, chosen on validation"
    return f"perplexity {final['perplexity']:.2f}"


def summary(plan: Plan, rows: Sequence[dict[str, Any]]) -> Table:
    """Every row of the plan that is there, over its seeds."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name in dict.fromkeys(r["experiment"] for r in rows):
        same = [r for r in rows if r["experiment"] == name]
        for record, told in zip(same, labels([r["config"] for r in same]), strict=True):
            grouped.setdefault((name, told), []).append(record)
    shared = max(r["concurrent"] for r in rows)
    note = f"{shared} runs shared the device: their times are not comparable" if shared > 1 else None
    table = Table(
        title=f"{plan.name}: mean ± standard error over seeds", title_justify="left", caption=note, box=SIMPLE_HEAD
    )
    several = len({name for name, _ in grouped}) > 1
    unit = ", %" if "accuracy" in rows[0]["final"] else ""
    for heading in (*(("experiment",) if several else ()), "scheme"):
        table.add_column(heading)
    more = [extra for extra in EXTRAS if any(extra.value(r["final"]) is not None for r in rows)]
    headings = ("runs", f"last{unit}", f"best{unit}", *(e.heading for e in more), "s", "ms/step", "MiB")
    long = {e.heading for e in more}  # which leave room for the schemes
    for heading in headings:
        table.add_column(
            heading, justify="right", no_wrap=heading not in long, max_width=16 if heading in long else None
        )
    for (name, scheme), records in grouped.items():
        finals = [r["final"] for r in records]
        percent = "accuracy" in finals[0]
        last = [f["accuracy" if percent else "perplexity"] for f in finals]
        memory = [r["max_reserved"] for r in records if r["max_reserved"]]
        table.add_row(
            *((name,) if several else ()),
            scheme,
            str(len(records)),
            _shown(last, percent),
            _shown([f["best"] for f in finals], percent),
            *(_shown([e.value(f) for f in finals], e.percent) for e in more),
            f"{statistics.median(r['seconds'] for r in records):.3g}",
            f"{statistics.median(r['ms_per_step'] for r in records):.3g}",
            f"{max(memory) / 2**20:,.0f}" if memory else "-",
        )
    return table


def _shown(values: Sequence[float | None], percent: bool) -> str:
    estimate = Estimate.of(100 * v if percent else v for v in values if v is not None)
    if estimate is None:
        return "-"
    return f"{estimate.mean:.2f}" + (f" ± {estimate.se:.2f}" if estimate.se is not None else "")

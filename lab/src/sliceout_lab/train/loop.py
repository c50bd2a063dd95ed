"""The training loop: one for all families, eager, compiled or captured, on one device or several.

The host only issues work: losses are summed on the device and read once an epoch, learning rates and slices are set
without waiting. After every epoch the full network is tested and the state is saved, so that a run that was killed
goes on as if it had not been.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from sliceout import drawing
from sliceout.cli import UserError

from .. import energy, machine, results
from ..experiment import Job
from ..scheme import SLICED
from ..storage import whole_file
from .checkpoint import Checkpoints
from .clock import Clock, spread
from .distributed import Ranks
from .evaluate import beside, evaluate, recalibrated
from .modes import forget_unused, make_step
from .progress import Show
from .setup import Training
from .stop import PARENT, Stop, Stopped

CLAIM_SECONDS = 20.0
"""A run whose parent was killed stops at its next step: its successor waits for it."""


@dataclass(frozen=True)
class Settings:
    """Where and how a run is trained; none of it changes what comes out."""

    out: Path
    device: str = "cpu"
    data: Path | None = None
    fresh: bool = False
    """Start anew, whatever is there."""
    checkpoint_seconds: float = 10.0
    """At the end of an epoch the state is saved unless the last checkpoint is younger than this."""
    save_model: bool = True
    tensorboard: bool = False
    concurrent: int = 1
    """How many runs share the device."""
    prepare_only: bool = False
    """Compile the step and leave it at that: the compiler's cache will know it."""
    quiet: bool = False


@dataclass
class Record:
    """How far a run has come, and what was measured; part of every checkpoint."""

    step: int = 0
    epochs: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Milliseconds per step, sampled."""
    losses: float = 0.0
    """Of the epoch that is under way, as are the seconds."""
    seconds: float = 0.0
    joules: float | None = None
    max_allocated: int | None = None
    max_reserved: int | None = None
    resumed: int = 0
    concurrent: int = 1
    """How many runs shared the device in the worst of all sittings: times of any of them are in here."""


class Diverged(UserError):
    """The loss is no number any more: a matter of this one run, whatever becomes of others."""


def run(job: Job, settings: Settings, console: Console | None = None) -> dict[str, Any]:
    """Train ``job`` from wherever it stands to its end; returns its result, which is kept in the results.

    Raises:
        UserError: for what the user can put right.
        Stopped: after Ctrl-C or SIGTERM, with a checkpoint.
    """
    ranks = Ranks(settings.device)
    kept, folder = settings.out / results.NAME, settings.out / job.id
    done = results.by_id(results.read(kept)).get(job.id)
    if done is not None and not settings.fresh:
        return done
    console = console or Console(highlight=False)
    training = Training(job, ranks, settings.data)
    show = Show(f"{job.experiment} {job.label} seed {job.seed}", training.total, job.config["epochs"], console,
                quiet=settings.quiet or not ranks.first)  # fmt: skip
    store = Checkpoints(folder, show.say)
    if settings.prepare_only:
        training.learner.train()
        make(training, Record())
        return {}
    if ranks.first:
        store.claim(wait=CLAIM_SECONDS if PARENT in os.environ else 0.0)
        if settings.fresh:
            store.remove()
    ranks.gather(None)  # nobody reads before the first process has tidied up
    try:
        with Stop() as stop, show:
            record = _fit(training, store, settings, stop, show)
        result = _result(training, record)
        if ranks.first:
            if settings.save_model:
                with whole_file(folder / "model.pt") as file:
                    torch.save(training.model.state_dict(), file)
            results.write(kept, result)
            store.remove_folder()
        return result
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{show.title}: {training.device} has not enough memory ({str(error).partition('. ')[0]}); no result was "
            "written. A smaller --batch needs less"
        ) from error
    finally:
        store.release()
        ranks.close()


def _fit(t: Training, store: Checkpoints, settings: Settings, stop: Stop, show: Show) -> Record:
    """Train to the end."""
    record = _resume(t, store)
    record.concurrent = max(record.concurrent, settings.concurrent)
    if record.step:
        show.say(f"going on at step {record.step:,} of {t.total:,}")
    with _tensorboard(t, record, store, settings) as log:  # closed also when stopped: what it holds is written then
        return _epochs(t, record, store, settings, stop, show, log)


def _epochs(
    t: Training, record: Record, store: Checkpoints, settings: Settings, stop: Stop, show: Show, log: Any
) -> Record:
    joules = _meter(t, record)
    losses = torch.zeros((), device=t.device)
    saved = time.monotonic()
    show.start(record.step)
    while record.step < t.total:
        number = record.step // t.steps
        end = (number + 1) * t.steps
        losses.fill_(record.losses)
        t.learner.train()
        if t.step is None:
            make(t, record)
            show.start(record.step)
        if t.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(t.device)
        used = joules() if joules else None
        clock = Clock(t.device, t.steps)
        signum = steps(t, record, end, losses, clock, show, stop)
        clock.pause()
        if joules and used is not None:  # of all GPUs that train this run
            record.joules = (record.joules or 0.0) + sum(t.ranks.gather(joules() - used))
        _note_peak(t, record)
        record.times += clock.milliseconds
        record.seconds += clock.seconds
        if record.step < end:  # in the middle of an epoch
            record.losses = float(t.ranks.mean(losses))  # every process goes on from the first one's record
            _save(t, record, store)
            raise _stopped(t, record, signum)
        loss = float(t.ranks.mean(losses)) / t.steps
        _check(show.title, "loss", loss, number + 1)
        tested = evaluate(t)
        if record.step == t.total and t.config.get("recalibrate"):
            tested["recalibrated"] = recalibrated(t)["accuracy"]
        _check(show.title, "test loss", tested["test_loss"], number + 1)
        entry = {"epoch": number + 1, "loss": loss, **tested, "lr": t.lr, "seconds": record.seconds}
        entry["ms_per_step"] = statistics.median(clock.milliseconds)
        record.epochs.append(entry)
        record.losses = record.seconds = 0.0
        show.epoch(entry, record.step)
        for key in (entry.keys() - {"epoch"}) if log is not None else ():
            log.add_scalar(key, entry[key], number + 1)
        signum = t.ranks.highest(stop.signum)
        late = t.ranks.highest(time.monotonic() - saved >= settings.checkpoint_seconds)
        if record.step < t.total and (late or signum):
            _save(t, record, store)
            saved = time.monotonic()
            if signum:
                raise _stopped(t, record, signum)
    return record


def _check(title: str, name: str, loss: float, epoch: int) -> None:
    if not math.isfinite(loss):
        raise Diverged(
            f"{title}: the {name} is {loss} in epoch {epoch}: training diverged, no result was written. "
            "A lower learning rate or rate of dropping may help"
        )


def steps(t: Training, record: Record, end: int, losses: Tensor, clock: Clock, show: Show, stop: Stop) -> int:
    """Train up to step ``end``, adding up ``losses``, unless a signal comes, which is returned."""
    for x, y in t.batches(record.step, end - record.step):
        if _rates_change(t, record):
            clock.pause()
            make(t, record)
            clock.go()
        t.set_rate(record.step / t.total)
        losses += t.step(x, y)  # type: ignore[misc]
        record.step += 1
        clock.tick()
        show.step(record.step, record.step - end + t.steps, losses)
        if signum := t.ranks.highest(stop.signum, record.step):
            return signum
    return 0


def _stopped(t: Training, record: Record, signum: int) -> Stopped:
    return Stopped(f"stopped at step {record.step:,} of {t.total:,}; the same command goes on from there", signum)


def make(t: Training, record: Record) -> None:
    """Make the step for where the run stands."""
    t.step = None  # and with it the memory of its graph
    _rates_change(t, record)
    t.set_rate(record.step / t.total)
    t.step = make_step(t.config["mode"], t.learner, t.optimizer, example(t), t.config["precision"])
    forget_unused(t.device)


def example(t: Training) -> tuple[Tensor, Tensor]:
    return next(iter(t.feed.epoch(t.job.seed, 0)))  # real images: zeros would upset batch norm's statistics


def _rates_change(t: Training, record: Record) -> bool:
    """Whether other rates of slices, or none, hold from this step on: the step has to be made anew."""
    if t.slicing is None:
        return False
    before, t.sliced_at = t.sliced_at, t.slicing.step(record.step, t.total)
    return t.sliced_at != before


# -- state -------------------------------------------------------------------------------------------------------------


def _save(t: Training, record: Record, store: Checkpoints) -> None:
    random = {"host": torch.get_rng_state()}
    if t.device.type == "cuda":
        random["device"] = torch.cuda.get_rng_state(t.device)
    everybody = t.ranks.gather(random)
    if t.ranks.first:
        drawn = drawing.slices(t.model).state_dict() if t.config["scheme"] in SLICED else None
        store.save(
            {
                "id": t.job.id,
                "model": t.model.state_dict(),
                "optimizer": t.optimizer.state_dict(),
                "slices": drawn,
                "random": everybody,
                "record": vars(record),
            }
        )
    t.ranks.gather(None)


def _resume(t: Training, store: Checkpoints) -> Record:
    state = store.load() if t.ranks.first else None
    t.ranks.gather(None)  # the first process sets a damaged file aside before the others look
    if not t.ranks.first:
        state = store.load()
    if state is None:
        return Record()
    if state["id"] != t.job.id:
        raise UserError(f"{store.newest}: of run {state['id']}, not of {t.job.id}. To train this run anew, add --fresh")
    record = Record(**state["record"])
    record.resumed += 1
    t.model.load_state_dict(state["model"])
    t.optimizer.load_state_dict(state["optimizer"])
    if state["slices"] is not None:
        drawing.slices(t.model).load_state_dict(state["slices"])
    random = state["random"][t.ranks.rank]
    torch.set_rng_state(random["host"])
    if "device" in random and t.device.type == "cuda":
        torch.cuda.set_rng_state(random["device"], t.device)
    return record


# -- measurements ------------------------------------------------------------------------------------------------------


def _note_peak(t: Training, record: Record) -> None:
    """CUDA graphs keep their activations in a pool that counts as reserved only: no peak of live tensors is known."""
    if t.device.type == "cuda":
        record.max_reserved = max(record.max_reserved or 0, torch.cuda.max_memory_reserved(t.device))
        if t.config["mode"] == "eager":
            record.max_allocated = max(record.max_allocated or 0, torch.cuda.max_memory_allocated(t.device))


def _meter(t: Training, record: Record) -> Callable[[], float] | None:
    """What counts the energy of the run, if all of it can be counted: the counter is of the whole GPU."""
    so_far = record.step == 0 or record.joules is not None
    meter = energy.meter(t.device) if so_far and record.concurrent == 1 else None
    if all(t.ranks.gather(meter is not None)):
        return meter
    record.joules = None  # a part of it would pass for the whole
    return None


def _tensorboard(t: Training, record: Record, store: Checkpoints, settings: Settings) -> Any:
    if not settings.tensorboard or not t.ranks.first:
        return contextlib.nullcontext()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("--tensorboard: tensorboard is not installed: pip install tensorboard") from error
    at = len(record.epochs) + 1  # epochs after the checkpoint are trained again: what was logged of them goes
    folder = str(store.folder.parent / "tensorboard" / t.job.id)
    return contextlib.closing(SummaryWriter(folder, purge_step=at if record.step else None))


def _result(t: Training, record: Record) -> dict[str, Any]:
    """The record for the results."""
    name, better = ("perplexity", min) if t.text else ("accuracy", max)
    best = better(record.epochs, key=lambda e: e[name])
    revision, dirty = machine.revision()
    seconds = [e["seconds"] for e in record.epochs]
    return {
        "kind": "train",
        "schema": 1,
        "id": t.job.id,
        "experiment": t.job.experiment,
        "table": t.job.table,
        "seed": t.job.seed,
        "config": t.config,
        "scaled": t.job.scaled,
        "revision": revision,
        "dirty": dirty,
        "machine": machine.environment(t.device),
        "steps_per_epoch": t.steps,
        "parameters": t.parameters,
        "epochs": record.epochs,
        "final": {
            name: record.epochs[-1][name],
            "best": best[name],
            "at_epoch": best["epoch"],
            **beside(record.epochs),
        },
        "seconds": sum(seconds),
        "seconds_per_epoch": statistics.median(seconds),
        "ms_per_step": statistics.median(record.times),
        "ms_spread": spread(record.times),
        "max_allocated": record.max_allocated,
        "max_reserved": record.max_reserved,
        "energy_joules": record.joules,
        "concurrent": record.concurrent,
        "resumed": record.resumed,
    }

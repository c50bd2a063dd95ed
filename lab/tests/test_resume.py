"""Killed, stopped, damaged: a run goes on as if nothing had happened, and no good state is lost."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sliceout.cli import UserError
from sliceout_lab import data, experiment, results
from sliceout_lab.experiment import Job
from sliceout_lab.train import Stopped, checkpoint, loop
from sliceout_lab.train.__main__ import main, write
from sliceout_lab.train.checkpoint import Checkpoints
from sliceout_lab.train.stop import PARENT
from trainruns import mlp_job, settings, train


def long_job(**scheme: Any) -> Job:
    """Some seconds of training: 240 steps, each epoch of 4 saved."""
    return mlp_job(epochs=60, tail=0.2, schedule={"name": "steps", "at": [0.5], "factor": 0.1}, **scheme)


def weights(job: Job, out: Path) -> dict[str, Any]:
    return torch.load(out / job.id / "model.pt", weights_only=True)


def assert_same(job: Job, a: Path, b: Path) -> None:
    left, right = weights(job, a), weights(job, b)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", [{"scheme": "standard"}, {"scheme": "sliceout", "sampling": "window"}, {"scheme": "controlled"}]
)
def test_kill_minus_nine_at_a_random_moment(scheme: dict[str, str], tmp_path: Path) -> None:
    job, out = long_job(**scheme), tmp_path / "killed"
    whole = train(job, tmp_path / "whole")
    write(tmp_path / "job.json", job, settings(out))
    process = _start(tmp_path / "job.json")
    _wait_for(out / job.id / "checkpoint.pt", process)
    time.sleep(delay := 0.5 * random.random())
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL, f"it was done before the kill, {delay} s after its first checkpoint"
    assert main(tmp_path / "job.json") == 0
    (result,) = results.read(out / results.NAME)
    assert result["resumed"] == 1
    assert_same(job, tmp_path / "whole", out)
    kept = ("epoch", "loss", "test_loss", "accuracy", "lr")
    assert [[e[k] for k in kept] for e in result["epochs"]] == [[e[k] for k in kept] for e in whole["epochs"]]


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_stop_it_stops_with_a_checkpoint(signum: int, code: int, tmp_path: Path) -> None:
    job = long_job()
    write(tmp_path / "job.json", job, settings(tmp_path / "out"))
    process = _start(tmp_path / "job.json", stderr=subprocess.PIPE)
    _wait_for(tmp_path / "out" / job.id / "checkpoint.pt", process)
    process.send_signal(signum)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code
    assert "the same command goes on from there" in told.decode()
    assert "Traceback" not in told.decode()
    saved = checkpoint.read(tmp_path / "out" / job.id / "checkpoint.pt")
    assert 0 < saved["record"]["step"] < 240


@pytest.mark.parametrize(
    "job",
    [
        *(mlp_job(s, epochs=4, tail=0.5, rate=0.3) for s in ("none", "standard", "sliceout", "controlled")),
        mlp_job("sliceout", epochs=4, sampling="window", norm="flow"),
    ],
    ids=lambda job: job.label,
)
@pytest.mark.parametrize("stop_at", [3, 4, 9, 13])
def test_stopped_in_the_middle_of_an_epoch(
    job: Job, stop_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 steps an epoch: in the first, at its end, just after the tail has begun, and in the last."""
    _stopped_and_whole(job, stop_at, tmp_path, monkeypatch)


def test_windows_of_the_feature_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kind of draws, batch-norm statistics, momentum and augmented batches."""
    rng = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (64, 3, 32, 32), generator=rng, dtype=torch.uint8)
    images = data.Images("noise", noise, torch.arange(64) % 10, noise[:16], torch.arange(16) % 10)
    monkeypatch.setattr(data, "load", lambda *a, **k: images)
    declared = dataclasses.replace(experiment.load("cifar10-wrn-28-6"), model="wrn-10-1", batch=16)
    job = experiment.job(declared, {"scheme": "patch"}, epochs=3, precision="fp32")
    _stopped_and_whole(job, 6, tmp_path, monkeypatch)


def _stopped_and_whole(job: Job, stop_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(job, tmp_path / "whole")
    with monkeypatch.context() as m:
        _stop_at_step(m, stop_at)
        with pytest.raises(Stopped, match=f"stopped at step {stop_at} of"):
            train(job, tmp_path / "parts")
    parts = train(job, tmp_path / "parts")
    assert_same(job, tmp_path / "whole", tmp_path / "parts")
    assert [e["loss"] for e in parts["epochs"]] == [e["loss"] for e in whole["epochs"]]
    assert parts["resumed"] == 1


@pytest.mark.parametrize("sittings", [(4, 1), (1, 4), (2, 3, 1)])
def test_one_shared_sitting_makes_the_run_a_shared_one(
    sittings: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times are mixed into the medians, and its energy is everybody's."""
    counter = iter(range(1000))
    monkeypatch.setattr(loop.energy, "meter", lambda device: lambda: float(next(counter)))
    job = mlp_job(epochs=4)
    for number, concurrent in enumerate(sittings[:-1], 1):
        with monkeypatch.context() as m:
            _stop_at_step(m, 5 * number)
            with pytest.raises(Stopped):
                train(job, tmp_path, concurrent=concurrent)
    result = train(job, tmp_path, concurrent=sittings[-1])
    assert (result["concurrent"], result["resumed"]) == (max(sittings), len(sittings) - 1)
    assert result["energy_joules"] is None


@pytest.mark.parametrize(("meters", "known"), [((True, True), True), ((True, False), False), ((False, True), False)])
def test_energy_of_a_part_of_the_run_is_not_given_as_that_of_the_run(
    meters: tuple[bool, bool], known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, counter = mlp_job(epochs=4), iter(range(1000))
    monkeypatch.setattr(loop.energy, "meter", lambda device: (lambda: float(next(counter))) if there else None)
    there = meters[0]
    with monkeypatch.context() as m:
        _stop_at_step(m, 6)
        with pytest.raises(Stopped):
            train(job, tmp_path)
    there = meters[1]
    result = train(job, tmp_path)
    assert result["concurrent"] == 1
    assert result["energy_joules"] == (5.0 if known else None)  # one count for each of 5 parts of epochs


def test_a_finished_run_leaves_no_checkpoint(tmp_path: Path) -> None:
    job = mlp_job(epochs=3)
    train(job, tmp_path)
    assert {p.name for p in (tmp_path / job.id).iterdir()} == {"lock", "model.pt"}
    other = mlp_job(epochs=3, seed=1)
    train(other, tmp_path, save_model=False)
    assert not (tmp_path / other.id).exists()


def test_checkpoints_are_not_written_more_often_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[int] = []
    monkeypatch.setattr(Checkpoints, "save", lambda self, state: saves.append(state["record"]["step"]))
    loop.run(mlp_job(epochs=4), loop.Settings(tmp_path / "a", quiet=True, checkpoint_seconds=3600))
    assert saves == []
    loop.run(mlp_job(epochs=4), loop.Settings(tmp_path / "b", quiet=True, checkpoint_seconds=0))
    assert saves == [4, 8, 12]


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Job, Path]:
    """A run with two checkpoints, of steps 8 and 9."""
    job = mlp_job(epochs=4)
    with monkeypatch.context() as m:
        _stop_at_step(m, 9)
        with pytest.raises(Stopped):
            train(job, tmp_path / "run")
    return job, tmp_path / "run"


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [_cut, _flip, lambda data: b""], ids=["cut", "flipped bit", "empty"])
def test_a_damaged_checkpoint_costs_no_good_one(
    damage: Callable[[bytes], bytes], stopped: tuple[Job, Path], tmp_path: Path
) -> None:
    job, out = stopped
    newest = out / job.id / "checkpoint.pt"
    broken = damage(newest.read_bytes())
    newest.write_bytes(broken)
    said: list[str] = []
    state = Checkpoints(out / job.id, said.append).load()
    assert state is not None
    assert state["record"]["step"] == 8
    assert "damaged" in said[0]
    assert "going on from the checkpoint before it" in said[0]
    assert (out / job.id / "checkpoint.damaged.pt").read_bytes() == broken
    train(job, out)
    train(job, tmp_path / "whole")
    assert_same(job, tmp_path / "whole", out)


def test_only_damaged_checkpoints_are_an_error_that_touches_nothing(stopped: tuple[Job, Path]) -> None:
    job, out = stopped
    folder = out / job.id
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (folder / name).write_bytes(_cut((folder / name).read_bytes()))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(UserError, match=r"checkpoint.pt: damaged: cut off after \d+ bytes.*add --fresh"):
        train(job, out)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert train(job, out, fresh=True)["resumed"] == 0


def test_a_checkpoint_of_an_earlier_version_is_read(stopped: tuple[Job, Path]) -> None:
    """It had its length and checksum behind the zip file."""
    job, out = stopped
    newest = out / job.id / "checkpoint.pt"
    state = checkpoint.read(newest)
    body = newest.read_bytes()
    newest.write_bytes(body + struct.pack("<8sQI", b"sliceout", len(body), zlib.crc32(body)))
    again = checkpoint.read(newest)
    assert again["record"] == state["record"]
    assert all(torch.equal(again["model"][k], v) for k, v in state["model"].items())


def test_killed_between_two_renames(stopped: tuple[Job, Path], tmp_path: Path) -> None:
    job, out = stopped
    (out / job.id / "checkpoint.pt").replace(out / job.id / "checkpoint.writing")  # as if the second had not come
    assert train(job, out)["resumed"] == 1
    train(job, tmp_path / "whole")
    assert_same(job, tmp_path / "whole", out)


def test_a_full_disk_leaves_the_last_checkpoint(
    stopped: tuple[Job, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, out = stopped
    before = (out / job.id / "checkpoint.pt").read_bytes()
    with monkeypatch.context() as m:

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        m.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"the disk is full .*; the last checkpoint is as it was\. Make room"):
            train(job, out)
    assert (out / job.id / "checkpoint.pt").read_bytes() == before
    assert not (out / job.id / "checkpoint.writing").exists()
    train(job, out)
    train(job, tmp_path / "whole")
    assert_same(job, tmp_path / "whole", out)


def test_two_processes_do_not_train_the_same_run(tmp_path: Path) -> None:
    job = mlp_job()
    store = Checkpoints(tmp_path / job.id)
    store.claim()
    with pytest.raises(UserError, match="another process is training this run"):
        train(job, tmp_path)
    store.release()
    train(job, tmp_path)


def test_a_successor_waits_for_a_run_that_is_about_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a kill -9 of ``reproduce``, whose processes notice within a second."""
    job = mlp_job(epochs=1)
    store = Checkpoints(tmp_path / job.id)
    store.claim()
    threading.Timer(0.3, store.release).start()
    monkeypatch.setenv(PARENT, str(os.getppid()))
    assert train(job, tmp_path)["epochs"]


def test_a_checkpoint_of_another_run_is_not_taken(stopped: tuple[Job, Path]) -> None:
    job, out = stopped
    other = mlp_job(epochs=4, seed=1)
    (out / other.id).mkdir()
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (out / other.id / name).write_bytes((out / job.id / name).read_bytes())
    with pytest.raises(UserError, match=rf"of run {job.id}, not of {other.id}\. .*add --fresh"):
        train(other, out)
    assert (out / other.id / "checkpoint.pt").exists()


# -- helpers -----------------------------------------------------------------------------------------------------------


def _stop_at_step(m: pytest.MonkeyPatch, number: int) -> None:
    original = loop.Show.step

    def step(self: Any, at: int, *rest: Any) -> None:
        original(self, at, *rest)
        if at == number:
            os.kill(os.getpid(), signal.SIGTERM)

    m.setattr(loop.Show, "step", step)


def _start(job: Path, **changes: Any) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "sliceout_lab.train", str(job)], env=env, **changes)


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, "it ended before its first checkpoint"
        assert time.monotonic() < deadline
        time.sleep(0.005)

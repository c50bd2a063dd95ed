"""Reproducing a table: every row once, whatever is killed in between, and a report at the end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sliceout.cli import UserError
from sliceout_lab import cli, experiment, reproduce, results
from sliceout_lab.report.groups import Estimate
from sliceout_lab.reproduce import Plan
from sliceout_lab.train import Stopped
from sliceout_lab.train.loop import Diverged

TOML = """
extends = "fashion-mnist"
data = "fashion-mnist-8k"
samples = 512
batch = 128
epochs = 2
seeds = [0, 1]
[model_settings]
hidden = [64, 64, 64]
[[rows]]
scheme = "none"
[[rows]]
scheme = ["standard", "sliceout"]
rate = 0.5
"""


@pytest.fixture
def table(tmp_path: Path) -> str:
    (tmp_path / "small.toml").write_text(TOML)
    return str(tmp_path / "small.toml")


def command(table: str, out: Path, *more: str) -> list[str]:
    return ["reproduce", table, "--out", str(out), "--device", "cpu", "--subset", "512", "--no-report", *more]


def test_all_rows_and_seeds_and_none_twice(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert cli.main(command(table, out, "--only", "sliceout")) == 0
    told = capsys.readouterr().out
    assert "small: 2 runs, 0 of them" in told
    first = results.read(out / results.NAME)
    assert cli.main(command(table, out)) == 0
    told = capsys.readouterr().out
    assert "small: 6 runs, 2 of them" in told
    records = results.read(out / results.NAME)
    assert [r for r in records if r["id"] in {r["id"] for r in first}] == first
    assert sorted((r["config"]["scheme"], r["seed"]) for r in records) == [
        (scheme, seed) for scheme in ("none", "sliceout", "standard") for seed in (0, 1)
    ]
    finals = [r["final"]["accuracy"] for r in first]
    got = Estimate.of(finals)
    assert got.se is not None
    assert f"{100 * got.mean:.2f} ± {100 * got.se:.2f}" in told
    monkeypatch.setattr(reproduce, "run", None)  # would fail
    assert cli.main(command(table, out)) == 0


def test_one_seed_has_no_standard_error() -> None:
    assert Estimate.of([0.5]) == Estimate(0.5, None, 1)


@pytest.mark.slow
def test_several_at_once_and_one_that_fails(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(table).write_text(TOML.replace("rate = 0.5", "rate = [0.5, 0.999]").replace("[0, 1]", "[0]"))
    out = tmp_path / "out"
    assert cli.main(command(table, out, "--jobs", "2", "--only", "sliceout")) == 1
    told = capsys.readouterr().out.replace("\n", " ")
    assert "not done: small sliceout 0.999 circular seed 0" in told
    assert "choose a lower rate" in told
    assert "Traceback" not in told
    records = results.read(out / results.NAME)
    assert [(r["config"]["rate"], r["concurrent"]) for r in records] == [(0.5, 2)]
    assert "2 runs shared the device" in told


@pytest.mark.slow
def test_killed_it_goes_on_and_its_children_do_not_outlive_it(table: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = command(table, out, "--jobs", "2", "--epochs", "100", "--only", "none", "--seeds", "0")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "sliceout_lab", *arguments], env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not list(out.glob("*/lock")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    while _locked(out):  # the children notice, save and stop
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert cli.main([a if a != "2" else "1" for a in arguments]) == 0
    (record,) = results.read(out / results.NAME)
    assert len(record["epochs"]) == 100


def _locked(out: Path) -> bool:
    import fcntl

    for path in out.glob("*/lock"):
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
    return False


def fail_at(number: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of this number raises instead of training."""
    original, calls = reproduce.run, []

    def run(job: Any, *rest: Any) -> Any:
        calls.append(job)
        if len(calls) == number:
            raise error
        return original(job, *rest)

    monkeypatch.setattr(reproduce, "run", run)


def test_stopped_it_keeps_what_is_done(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(3, Stopped("stopped at step 3", signal.SIGTERM), monkeypatch)
    assert cli.main(command(table, tmp_path / "out")) == 143
    assert len(results.read(tmp_path / "out" / results.NAME)) == 2
    assert "stopped at step 3" in capsys.readouterr().out


def test_a_first_run_that_diverges_does_not_keep_the_others_from_training(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(1, Diverged("the loss is nan in epoch 1"), monkeypatch)
    assert cli.main(command(table, tmp_path / "out", "--only", "sliceout", "--only", "none")) == 1
    assert len(results.read(tmp_path / "out" / results.NAME)) == 3
    assert "not done: the loss is nan in epoch 1" in capsys.readouterr().out


def test_a_full_disk_before_a_process_is_started(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(reproduce, "write", full)
    assert cli.main(command(table, tmp_path / "out", "--jobs", "2")) == 1
    told = capsys.readouterr()
    assert "the disk is full (No space left on device); what is done is in the results" in told.err
    assert "Traceback" not in told.err


def test_the_report_is_written_at_the_end(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    page = tmp_path / "report.html"
    monkeypatch.setattr("sliceout_lab.report.write", lambda results, out, **more: given.append((results, out)) or page)
    arguments = [a for a in command(table, tmp_path / "out", "--only", "none", "--seeds", "3") if a != "--no-report"]
    assert cli.main(arguments) == 0
    assert given == [([tmp_path / "out" / results.NAME], tmp_path / "out" / "report")]


def test_the_quick_form_is_small_and_says_what_it_scaled() -> None:
    plan = Plan.of("fashion-mnist", quick=True)
    assert len(plan.jobs) == 22
    assert {job.config["data"] for job in plan.jobs} == {"fashion-mnist-8k"}
    scaled = plan.jobs[0].scaled
    assert set(scaled) == {"data", "subset", "width", "epochs", "lr"}
    assert scaled["subset"] == [60000, 6000]
    with pytest.raises(UserError, match="declares no \\[quick\\] form"):
        Plan.of("lm1b-lm-1024", quick=True)


def test_the_full_proof_is_42_runs() -> None:
    assert len(Plan.of("fashion-mnist", device="cuda").jobs) == 42
    assert len(Plan.of("cifar10-wrn-28-6", device="cuda", epochs=30).jobs) == 4


def test_a_table_is_all_its_experiments() -> None:
    plan = Plan.of("wide-resnet-sizes")
    assert {job.experiment for job in plan.jobs} == set(experiment.tables()["wide-resnet-sizes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "fashon-mnist"], "there is no table or experiment 'fashon-mnist': did you mean fashion-mnist"),
        (["reproduce", "fashion-mnist", "--only", "slicout"], "did you mean sliceout?"),
        (["reproduce", "fashion-mnist", "--seeds", "a"], "--seeds a: expected numbers such as 0,1,2"),
        (["reproduce", "fashion-mnist", "--jobs", "0"], "--jobs 0: expected at least 1"),
        (["reproduce", "cifar10-wrn-28-6", "--data", "NOWHERE"], "CIFAR-10 is not in"),
    ],
)
def test_what_a_user_can_put_right(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path) if a == "NOWHERE" else a for a in arguments]
    assert cli.main([*given, "--device", "cpu", "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr()
    assert message in told.err.replace("\n", " ")
    assert "Traceback" not in told.err

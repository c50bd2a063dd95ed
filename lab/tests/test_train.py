"""The training loop: it learns, it is the same however a step runs, and what goes wrong is said plainly."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from sliceout import convert_
from sliceout.cli import UserError
from sliceout_lab import cli, energy, experiment, results
from sliceout_lab.data.fashion import SUBSET
from sliceout_lab.models.mlp import mlp
from sliceout_lab.train import Stopped, loop
from sliceout_lab.train.clock import Clock, spread
from sliceout_lab.train.distributed import Ranks
from sliceout_lab.train.modes import make_step
from sliceout_lab.train.setup import Training
from trainruns import mlp_job, train

SMALL = ["--width", "64", "--subset", "512", "--epochs", "1"]


@pytest.fixture
def own(tmp_path: Path) -> str:
    """An experiment on the images that come with the package."""
    path = tmp_path / "own.toml"
    path.write_text('extends = "fashion-mnist"\ndata = "fashion-mnist-8k"\nsamples = 6000\n')
    return str(path)


@pytest.mark.parametrize("scheme", ["none", "standard", "controlled", "sliceout"])
def test_every_scheme_learns(scheme: str, tmp_path: Path) -> None:
    result = train(mlp_job(scheme, epochs=8, rate=0.3, lr=2e-3), tmp_path)
    assert result["final"]["accuracy"] > 0.5
    assert result["epochs"][-1]["loss"] < 0.75 * result["epochs"][0]["loss"]


def test_the_record_has_what_the_report_reads(tmp_path: Path) -> None:
    job = mlp_job()
    result = train(job, tmp_path)
    assert results.read(tmp_path / results.NAME) == [json.loads(json.dumps(result))]
    assert (result["kind"], result["schema"], result["id"], result["seed"]) == ("train", 1, job.id, 0)
    assert (result["steps_per_epoch"], result["parameters"]) == (4, 784 * 64 + 2 * 64 * 64 + 640 + 3 * 64 + 10)
    assert result["scaled"] == {"width": [2048, 64], "epochs": [100, 2], "subset": [6000, 1024]}
    assert [e["epoch"] for e in result["epochs"]] == [1, 2]
    assert set(result["epochs"][0]) == {"epoch", "loss", "test_loss", "accuracy", "lr", "seconds", "ms_per_step"}
    best = max(result["epochs"], key=lambda e: e["accuracy"])
    last = result["epochs"][-1]["accuracy"]
    assert result["final"] == {"accuracy": last, "best": best["accuracy"], "at_epoch": best["epoch"]}
    assert result["seconds"] == pytest.approx(sum(e["seconds"] for e in result["epochs"]))
    assert result["ms_spread"][0] <= result["ms_per_step"] <= result["ms_spread"][1]
    assert result["config"]["mode"] == "eager"
    assert (result["max_reserved"], result["energy_joules"]) == (None, None)
    assert (result["concurrent"], result["resumed"]) == (1, 0)
    assert result["machine"]["torch"] == torch.__version__


def test_a_run_that_is_there_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(mlp_job(epochs=1), tmp_path)
    monkeypatch.setattr(loop, "Training", None)  # would fail
    assert train(mlp_job(epochs=1), tmp_path) == json.loads(json.dumps(first))


def test_the_loss_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """The same batches, weights and steps by hand: the reported losses and the accuracy are the same numbers."""
    job = mlp_job("none", epochs=2)
    result = train(job, tmp_path)
    t = Training(job, Ranks("cpu"), None)
    for number in range(2):
        losses = []
        for x, y in t.feed.epoch(0, number):
            t.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(t.model(x), y)
            loss.backward()
            t.optimizer.step()
            losses.append(loss.item())
        assert result["epochs"][number]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    x, y = t.feed.data.test.flatten(1).float() / 255, t.feed.data.test_labels
    right = (t.model.eval()(x).argmax(1) == y).float().mean().item()
    assert result["final"]["accuracy"] == pytest.approx(right, abs=2e-3)


def test_an_epoch_may_be_any_number_of_steps(tmp_path: Path) -> None:
    """Seven steps that cross the end of a pass over the data (4 batches) see what two passes show."""
    t = Training(mlp_job(), Ranks("cpu"), None)
    passes = [x for epoch in range(2) for x, _ in t.feed.epoch(0, epoch)]
    assert all(torch.equal(a, b) for a, (b, _) in zip(passes[1:8], t.batches(1, 7), strict=True))
    job = mlp_job()
    job = dataclasses.replace(job, config={**job.config, "epoch_steps": 7})
    assert train(job, tmp_path)["steps_per_epoch"] == 7


def test_the_tail_trains_the_full_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    original = loop.make_step

    def watched(mode: str, model: Any, *rest: Any) -> Any:
        made.append([s.on for s in loop.drawing.slices(model)])
        return original(mode, model, *rest)

    monkeypatch.setattr(loop, "make_step", watched)
    schedule = {"name": "constant", "tail_lr": 1e-5}
    result = train(mlp_job(epochs=4, tail=0.25, schedule=schedule), tmp_path)
    assert made == [[True] * 3, [False] * 3]  # made anew once, where the tail begins
    assert [e["lr"] for e in result["epochs"]] == [1e-3] * 3 + [1e-5]


def test_schemes_without_slices_have_no_tail() -> None:
    assert mlp_job("standard", tail=0.1).config["tail"] == 0
    assert mlp_job("sliceout", tail=0.1).config["tail"] == 0.1


def test_diverged_training_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss is (nan|inf) in epoch \d: training diverged"):
        train(mlp_job("none", epochs=3, lr=1e30), tmp_path)
    assert not (tmp_path / results.NAME).exists()


@pytest.mark.slow
def test_a_compiled_step_trains_alike_and_making_it_changes_nothing(tmp_path: Path) -> None:
    job = mlp_job("sliceout", epochs=2)
    eager = train(job, tmp_path / "eager")
    compiled = train(dataclasses.replace(job, config={**job.config, "mode": "compiled"}), tmp_path / "compiled")
    for a, b in zip(eager["epochs"], compiled["epochs"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["captured", "compiled"])
def test_modes_agree_on_a_gpu(mode: str, tmp_path: Path) -> None:
    job = mlp_job("sliceout", epochs=4, tail=0.25, schedule={"name": "steps", "at": [0.5], "factor": 0.1})
    runs = [
        train(dataclasses.replace(job, config={**job.config, "mode": m}), tmp_path / m, device="cuda")
        for m in ("eager", mode)
    ]
    for a, b in zip(*(r["epochs"] for r in runs), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-2)
        assert a["lr"] == b["lr"]


def test_the_captured_mode_is_the_librarys_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp([4, 64, 2])
    convert_(model, 0.5)
    optimizer = torch.optim.Adam(model.parameters())
    batch = (torch.zeros(2, 4), torch.zeros(2).long())
    given: list[Any] = []
    monkeypatch.setattr("sliceout_lab.train.modes.capture", lambda *a, **k: given.append((a, k)) or "captured")
    assert make_step("captured", model, optimizer, batch, "bf16") == "captured"
    (arguments, options), *_ = given
    assert (arguments[0], arguments[2], arguments[3]) == (model, optimizer, batch)
    assert options == {"autocast": torch.bfloat16}


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_trains_and_tells(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["train", own, *SMALL, "--out", str(out), "--device", "cpu"]
    assert cli.main(command) == 0
    told = capsys.readouterr().out
    assert "own sliceout 0.5 circular: test accuracy" in told
    assert (out / results.read(out / results.NAME)[0]["id"] / "model.pt").exists()
    assert cli.main(command) == 0
    assert "--fresh trains it anew" in capsys.readouterr().out
    assert cli.main([*command, "--fresh"]) == 0
    assert len(results.read(out / results.NAME)) == 2


def test_the_list_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--list"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in experiment.names())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fashion-mnits"], "there is no experiment 'fashion-mnits': did you mean fashion-mnist"),
        ([], "which experiment?"),
        (["OWN", "--scheme", "slice"], "expected one of"),
        (["OWN", "--rate", "2"], "--rate 2.0: expected 0 < rate < 1"),
        (["OWN", "--scheme", "none", "--rate", "0.5"], "nothing is dropped there"),
        (["OWN", "--rate", "0.999", "--width", "64"], "choose a lower rate"),
        (["OWN", "--mode", "quick"], "--mode quick: expected auto"),
        (["OWN", "--seed", "-1"], "--seed -1: expected 0 <= seed"),
        (["OWN", "--subset", "100", "--batch", "256"], "100 training images"),
        (["cifar10-wrn-28-6", "--data", "NOWHERE"], "CIFAR-10 is not in"),
        (["OWN", "--device", "tpu"], "--device tpu: expected auto, cpu or cuda"),
    ],
)
def test_what_a_user_can_put_right_is_said_plainly(
    own: str, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [own if a == "OWN" else str(tmp_path) if a == "NOWHERE" else a for a in arguments]
    device = [] if "--device" in given else ["--device", "cpu"]
    assert cli.main(["train", *given, *device, "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr()
    assert message in told.err.replace("\n", " ")
    assert "Traceback" not in told.err


def test_no_gpu(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["train", own, "--device", "cuda", "--out", str(tmp_path / "out")]) == 1
    assert "this machine has no CUDA device" in capsys.readouterr().err


def test_a_damaged_data_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for file in SUBSET.iterdir():
        (folder / file.name).write_bytes(file.read_bytes()[: 1000 if "train-images" in file.name else None])
    command = ["train", "fashion-mnist", "--data", str(tmp_path), "--device", "cpu", "--out", str(tmp_path / "out")]
    assert cli.main(command) == 1
    assert "train-images" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_one(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["train", own, *SMALL, "--device", "cpu", "--out", str(tmp_path / "file")]) == 1
    assert "cannot write there" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_stops_without_a_traceback(own: str, tmp_path: Path) -> None:
    """A limit on the size of files: the system refuses the checkpoint half way, as a full disk does."""
    command = f"ulimit -f 100; exec {sys.executable} -m sliceout_lab train {own} --width 64 --subset 512 --epochs 3 "
    command += f"--checkpoint-seconds 0 --device cpu --out {tmp_path / 'out'}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, env=_env())
    assert done.returncode == 1, done.stderr
    assert "the disk is full" in done.stderr
    assert "Traceback" not in done.stderr
    assert {p.name for p in (tmp_path / "out").rglob("*") if p.is_file()} <= {"lock"}


def test_tensorboard_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        train(mlp_job(), tmp_path, tensorboard=True)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to"),
            r"cpu has not enough memory \(CUDA out of memory\).*--batch",
        ),
        (None, r"the test loss is nan in epoch 1: training diverged"),
    ],
)
def test_what_goes_wrong_in_an_epoch_is_told(
    error: Exception | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(t: object) -> dict[str, float]:
        if error is not None:
            raise error
        return {"test_loss": float("nan"), "accuracy": 0.1}

    monkeypatch.setattr(loop, "evaluate", evaluate)
    with pytest.raises(UserError, match=message):
        train(mlp_job(), tmp_path)
    assert not (tmp_path / results.NAME).exists()


def test_tensorboard_is_written_when_a_run_is_stopped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            self.purge_step, self.logged, self.closed = purge_step, [], False
            made.append(self)

        def add_scalar(self, key: str, value: float, epoch: int) -> None:
            self.logged.append(epoch)

        def close(self) -> None:
            self.closed = True

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    step, job = loop.Show.step, mlp_job(epochs=3)

    def stopping(self: Any, at: int, *rest: Any) -> None:
        step(self, at, *rest)
        if at == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as m:
        m.setattr(loop.Show, "step", stopping)
        with pytest.raises(Stopped):
            train(job, tmp_path, tensorboard=True)
    train(job, tmp_path, tensorboard=True)
    assert [(w.purge_step, sorted(set(w.logged)), w.closed) for w in made] == [(None, [1, 2], True), (3, [3], True)]


def test_tensorboard_logs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    job = mlp_job()
    train(job, tmp_path, tensorboard=True)
    assert list((tmp_path / "tensorboard" / job.id).iterdir())


# -- several processes -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_train_one_model(own: str, tmp_path: Path) -> None:
    """torchrun with gloo: the halves of each batch together are the batch of one process."""
    arguments = ["train", own, *SMALL, "--scheme", "sliceout", "--device", "cpu"]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "sliceout_lab",
    ]
    command = [*launcher, *arguments, "--out", str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=_env())
    assert done.returncode == 0, done.stderr
    assert cli.main([*arguments, "--out", str(tmp_path / "one")]) == 0
    (two,), (one,) = (results.read(tmp_path / n / results.NAME) for n in ("two", "one"))
    assert (two["config"]["world"], one["config"]["world"]) == (2, 1)
    assert two["epochs"][0]["loss"] == pytest.approx(one["epochs"][0]["loss"], rel=1e-4)
    states = [torch.load(tmp_path / n / r["id"] / "model.pt") for n, r in (("two", two), ("one", one))]
    for a, b in zip(*(s.values() for s in states), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def _env() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_the_clock_leaves_out_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("sliceout_lab.train.clock.time.perf_counter", lambda: now[0])
    clock = Clock(torch.device("cpu"), 4)
    for number in range(4):
        if number == 2:
            clock.pause()
            now[0] += 100
            clock.go()
        now[0] += 0.01 * (number + 1)
        clock.tick()
    clock.pause()
    assert clock.seconds == pytest.approx(0.1)
    assert clock.milliseconds == pytest.approx([10, 20, 30, 40])
    assert spread(list(range(11))) == [1, 9]


def test_energy_is_none_without_a_gpu() -> None:
    assert energy.meter(torch.device("cpu")) is None

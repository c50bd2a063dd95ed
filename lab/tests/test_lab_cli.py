"""The command line: what it prints, what it saves and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sliceout_lab import cli, train
from sliceout_lab.data import fashion, write_idx


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 training and 20 test images of 4x4, in the official files."""
    root = tmp_path / "data"
    root.mkdir()
    for name, n in (("train", 40), ("t10k", 20)):
        write_idx(root / f"{name}-images-idx3-ubyte.gz", torch.randint(256, (n, 4, 4)).byte())
        write_idx(root / f"{name}-labels-idx1-ubyte.gz", torch.arange(n).remainder(10).byte())
    return root


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)


def test_demo_from_end_to_end(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    command = [sys.executable, "-m", "sliceout_lab", "demo", "--data", str(folder), "--epochs", "2", "--out", str(out)]
    done = subprocess.run([*command, "--device", "cpu", "--rate", "0.25"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads((out / "demo.json").read_text())
    assert result["settings"]["rate"] == 0.25
    assert result["settings"]["hidden"] == [2048, 2048, 2048]
    assert set(result["schemes"]) == {"no dropout", "dropout", "SliceOut"}
    for name, row in result["schemes"].items():
        assert row["steps"] == 2
        assert len(row["curve"]) == 2
        assert row["peak_bytes_of_step"] > 4 * 4 * (16 * 2048 + 2 * 2048**2 + 2048 * 10)
        line = next(x for x in done.stdout.splitlines() if x.startswith(f"│ {name} "))
        assert f"{row['ms_per_step']:.1f} ms" in line
        assert f"{row['test_accuracy']:.1%}" in line
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert str(out / "demo.png") in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rate", "1.5"], "--rate 1.5: expected 0 < rate < 1"),
        (["--rate", "half"], "Invalid value for '--rate'"),
        (["--rate", "0.9999"], "keeps 0.205 units"),
        (["--epochs", "0"], "--epochs 0: expected at least 1"),
        (["--epochs", "1.5"], "Invalid value for '--epochs'"),
        (["--seed", "-1"], "--seed -1: expected"),
        (["--device", "tpu"], "--device tpu: expected auto, cpu or cuda"),
        (["--data", "/nonexistent"], "not in /nonexistent"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: cannot write there"),
        (["--speed", "9"], "No such option: --speed"),
        (["now"], "unexpected extra argument"),
    ],
)
def test_bad_values_are_refused_without_a_traceback(arguments: list[str], complaint: str, tmp_path, capsys) -> None:
    code = cli.main(["demo", "--out", str(tmp_path), *arguments])
    said = capsys.readouterr()
    assert code != 0
    assert said.out == ""
    assert said.err.startswith("sliceout-lab: ")
    assert complaint in said.err
    assert "Traceback" not in said.err
    assert said.err.count("\n") == 1 or "--data" in arguments  # that one lists four files


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_cuda_without_a_gpu(capsys) -> None:
    assert cli.main(["demo", "--device", "cuda"]) == 1
    assert "--device cuda: this machine has no CUDA device" in capsys.readouterr().err


def test_full_without_the_data_says_which_files_go_where(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)  # away from a checkout's own ./data
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(fashion, "DEBIAN", tmp_path / "debian")
    assert cli.main(["demo", "--full", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    for name in fashion.FILES:
        assert f"  {name}.gz\n" in said
    assert f"into {tmp_path}/.cache/sliceout/fashion-mnist" in said
    assert not (tmp_path / "out").exists()


def test_a_damaged_file_is_named(folder: Path, capsys) -> None:
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    assert cli.main(["demo", "--data", str(folder)]) == 1
    assert capsys.readouterr().err.startswith(f"sliceout-lab: {path}: damaged gzip file")


def test_help_lists_commands_and_options(capsys) -> None:
    assert cli.main(["--help"]) == 0
    assert "demo" in capsys.readouterr().out
    assert cli.main(["demo", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--full", "--data", "--epochs", "--rate", "--seed", "--out", "--device"):
        assert option in text


def test_without_arguments_the_help_is_shown_and_nothing_is_complained_about(capsys) -> None:
    assert cli.main([]) == 2
    said = capsys.readouterr()
    assert "demo" in said.out
    assert "sliceout-lab: " not in said.err


def test_unknown_command(capsys) -> None:
    assert cli.main(["dmeo"]) == 2
    assert capsys.readouterr().err.startswith("sliceout-lab: No such command 'dmeo'")


def test_interrupted(monkeypatch, capsys, tmp_path: Path) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sliceout_lab.demo_view.follow", interrupt)
    assert cli.main(["demo", "--device", "cpu", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "sliceout-lab: stopped\n"


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("sliceout_lab.demo_view.follow", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["demo", "--device", "cpu", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["theory", "--plot", "OUT/a.xyz"], "expected a name that ends in .png, .svg, .pdf"),
        (["theory", "--rate", "1"], "rate=1.0: expected 0 <= rate < 1"),
        (["train", "no/such.toml"], "no/such.toml: there is no such file"),
        (
            ["train", "fashionmnist"],
            "there is no experiment 'fashionmnist': did you mean fashion-mnist or fashion-mnist-parts?; `sliceout-",
        ),
        (
            ["train", "fashion-mnist", "--scheme", "standard", "--sampling", "window"],
            "--sampling window is a setting of",
        ),
        (["train", "fashion-mnist", "--scheme", "none", "--grads", "compact"], "leave it out with --scheme none"),
        (["train", "fashion-mnist", "--parts", "0"], "--parts 0: expected at least 1"),
        (["train", "fashion-mnist", "--scheme", "standard", "--parts", "8"], "leave it out with --scheme standard"),
        (["train", "fashion-mnist", "--attention", "values2"], "did you mean values?"),
        (
            ["reproduce", "fashon-mnist"],
            "there is no table or experiment 'fashon-mnist': did you mean fashion-mnist or fashion-mnist-parts?",
        ),
        (["reproduce", "zzz"], "there is no table or experiment 'zzz': there are cifar10-"),
        (["reproduce", "fashion-mnist", "--seeds", ""], "expected numbers such as 0,1,2"),
    ],
)
def test_what_a_user_may_mistype(arguments: list[str], complaint: str, tmp_path: Path, capsys) -> None:
    assert cli.main([a.replace("OUT", str(tmp_path)) for a in arguments]) == 1
    told = capsys.readouterr().err
    assert complaint in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(("signum", "code"), [(2, 130), (15, 143)])
def test_a_stopped_run_is_told_once(signum: int, code: int, monkeypatch, tmp_path: Path, capsys) -> None:
    def run(*_: object) -> None:
        raise train.Stopped("stopped at step 3", signum)

    monkeypatch.setattr(train, "run", run)
    assert cli.main(["train", "fashion-mnist", "--device", "cpu", "--out", str(tmp_path)]) == code
    assert capsys.readouterr().err == "sliceout-lab: stopped at step 3\n"


@pytest.mark.parametrize("missing", ["typer", "sliceout"])
def test_the_lab_is_no_part_of_the_library(missing: str) -> None:
    """It names what it needs by importing it at the top."""
    done = python(f"import sys; sys.modules[{missing!r}] = None; import sliceout_lab.cli")
    assert "ModuleNotFoundError" in done.stderr


def test_the_first_training_command_of_the_readme_needs_no_data(tmp_path, monkeypatch, capsys) -> None:
    words = ["train", "fashion-mnist", "--quick", "--rate", "0.5"]
    assert f"`sliceout-lab {' '.join(words)}`" in (Path(__file__).parents[2] / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main([*words, "--epochs", "1", "--width", "64", "--subset", "500", "--device", "cpu"]) == 0
    assert "test accuracy" in capsys.readouterr().out

"""``sliceout bench``: a model of one's own, measured in processes of their own, printed and written."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from sliceout.cli import app as cli
from sliceout.cli import run
from sliceout.cli.cases import Case
from sliceout.cli.table import compared, table
from sliceout.cli.work import Work, step_of

NET = "def net(): return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))"


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch) -> str:
    (tmp_path / "my_net.py").write_text(f"from torch import nn\n{NET}\n")
    monkeypatch.chdir(tmp_path)
    return "my_net:net"


@pytest.mark.slow
def test_a_model_of_ones_own_is_measured_printed_and_written(own_model: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "new" / "bench.json"
    words = ["bench", own_model, "--device", "cpu", "--batch", "32", "--seconds", "0.05", "--out", str(out)]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    data = json.loads(out.read_text())
    assert (data["kind"], data["machine"]["torch"]) == ("bench", torch.__version__)
    rows = {r["scheme"]: r for r in data["cases"]}
    assert list(rows) == ["none", "standard", "floor", "sliceout"]
    assert all(r["error"] is None and r["ms"] > 0 and r["batch"] == 32 for r in rows.values())
    assert rows["floor"]["parameters"] < rows["none"]["parameters"] == rows["sliceout"]["parameters"]
    for scheme in ("none", "standard p=0.5", "floor p=0.5", "sliceout p=0.5"):
        assert f"\n {scheme} " in printed
    assert not list(out.parent.glob("*.part"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet18"], "expected timm:efficientnet_b0"),
        (["no_such_package:net"], "there is no module 'no_such_package'"),
        (["my_net:net", "--batch", "0"], "--batch 0: expected at least 1"),
        (["my_net:net", "--rates", "a"], "--rates 'a': expected numbers"),
        (["my_net:net", "--rates", "1"], "rate 1.0: expected 0 <= rate < 1"),
        (["my_net:net", "--schemes", "x"], "scheme 'x': expected one of none"),
        (["my_net:net", "--modes", "captured", "--device", "cpu"], "CUDA graphs need a GPU"),
        (["my_net:net", "--out", "/dev/null/x/y.json"], "--out /dev/null/x: cannot write there"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(
    own_model: str, words: list[str], message: str, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(run, "command", lambda *args: pytest.fail("a worker was started"))
    assert cli.main(["bench", *words]) == 1
    said = capsys.readouterr().err
    assert said.startswith("sliceout: ")
    assert message in said


def test_a_worker_that_dies_is_a_failed_case_and_an_exit_code(own_model: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(run.sys, "executable", "/bin/false")
    assert cli.main(["bench", own_model, "--schemes", "none", "--device", "cpu"]) == 1
    assert "1 of 1 cases failed, the first with: the worker ended with code 1" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["none", "standard", "sliceout"])
def test_a_language_model_is_fed_with_tokens(scheme: str) -> None:
    pytest.importorskip("transformers")
    work = Work(Case("hf:gpt2", 1, scheme, precision="fp32", size=8), torch.device("cpu"))
    x, y = work.batch(2)
    assert x.shape == y.shape == (2, 8)
    assert x.unique().numel() > 8
    step_of(work, 1)()


def rows(*found: tuple[str, float, float]) -> list[dict]:
    """Rows of one setting: scheme, rate and milliseconds."""
    return [
        {
            **Case("timm:vit_base_patch16_224", 128, scheme, rate).as_dict(), "error": None, "ms": ms, "ms_p10": ms,
            "ms_p90": ms, "max_reserved": 1000 * ms * 2**20, "max_allocated": 1,
        }
        for scheme, rate, ms in found
    ]  # fmt: skip


def test_no_dropout_is_compared_with_the_standard_row_beside_it() -> None:
    found = compared(rows(("none", 0.0, 9.0), ("standard", 0.5, 10.0), ("sliceout", 0.5, 5.0)))
    assert [(r["of_standard"], r["memory_of_standard"]) for r in found] == [(0.9, 0.9), (1.0, 1.0), (0.5, 0.5)]
    alone = compared(rows(("none", 0.0, 9.0), ("sliceout", 0.5, 4.5)))
    assert [(r["of_standard"], r["reference"]) for r in alone] == [(1.0, "none"), (0.5, "none")]


def test_the_table_can_be_read_in_80_columns() -> None:
    data = rows(("none", 0.0, 49.2), ("standard", 0.5, 50.1), ("floor", 0.5, 31.1), ("sliceout", 0.5, 32.5))
    out = Console(width=80, file=io.StringIO())
    out.print(table(data, "H200"))
    lines = [line.rstrip() for line in out.file.getvalue().splitlines()]
    assert "timm:vit_base_patch16_224 b128, eager bf16" in lines
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= 80
    for start in ("none", "standard p=0.5", "floor p=0.5", "sliceout p=0.5"):
        row = next(line for line in lines if line.startswith(f" {start} "))
        assert row.endswith("%")  # all its cells in one line
    assert [line.split()[-1] for line in lines if "MiB" in line] == ["%"] * 4

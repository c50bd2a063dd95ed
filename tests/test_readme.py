"""What the README says is so: its code runs, and its numbers are those of the committed results."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import torch
from torch import nn

import sliceout

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_converting_as_shown(capsys) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    parameters = list(model.parameters())
    exec(
        BLOCKS[0].replace("# ... train as before ...", "shape = model[0](torch.zeros(1, 8)).shape"),
        scope := locals() | globals(),
    )
    assert scope["shape"] == (1, 32)
    assert "32 of 64" in capsys.readouterr().out
    assert type(model[0]) is nn.Linear
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_growing_as_shown() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    widths = []
    loader, total_steps = [torch.zeros(4, 8)] * 8, 8
    step = "widths.append(model[0](batch).shape[1])"
    exec(BLOCKS[1].replace("...  # one training step", step + "  #"), locals() | globals() | {"sliceout": sliceout})
    assert widths == [32] * 4 + [48] * 2 + [64] * 2


def test_slices_by_hand_as_shown() -> None:
    exec(BLOCKS[2], scope := {})
    net = scope["Net"]()
    assert net.fc1(torch.zeros(1, 784)).shape == (1, 1024)
    assert net(torch.zeros(1, 784)).shape == (1, 10)
    assert net.eval().fc1(torch.zeros(1, 784)).shape == (1, 2048)


def test_the_measured_table_is_that_of_the_committed_result() -> None:
    spec = importlib.util.spec_from_file_location("mlp_cpu", ROOT / "benchmarks" / "mlp_cpu.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    assert benchmark.table(json.loads(benchmark.RESULT.read_text())) in README


def test_the_mlp_step_meets_its_requirement() -> None:
    steps = json.loads((ROOT / "results" / "mlp-cpu.json").read_text())["steps"]
    assert steps["circular"]["ms"] <= 0.6 * steps["dropout"]["ms"]


def test_the_demos_numbers_are_those_of_the_committed_run() -> None:
    schemes = json.loads((ROOT / "results" / "demo-cpu.json").read_text())["schemes"]
    sliced, dropout, none = (schemes[name] for name in ("SliceOut", "dropout", "no dropout"))
    a, b, c = (f"{100 * s['test_accuracy']:.1f} %" for s in (sliced, dropout, none))
    seconds, longer = (s["curve"][-1][0] for s in (sliced, dropout))
    text = " ".join(README.split())
    assert f"SliceOut trained for {seconds:.1f} s and dropout for {longer:.1f} s." in text
    assert f"It ends at {a}, dropout at {b} and no dropout at {c}:" in text

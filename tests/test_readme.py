"""What the README says is so: its code runs."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

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


def test_slices_by_hand_as_shown() -> None:
    exec(BLOCKS[1], scope := {})
    net = scope["Net"]()
    assert net.fc1(torch.zeros(1, 784)).shape == (1, 1024)
    assert net(torch.zeros(1, 784)).shape == (1, 10)
    assert net.eval().fc1(torch.zeros(1, 784)).shape == (1, 2048)

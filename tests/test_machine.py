"""What a measurement was taken on."""

from __future__ import annotations

import json

import pytest
import torch

import sliceout
from sliceout.cli import machine


def test_description_names_device_and_versions() -> None:
    found = json.loads(json.dumps(machine.describe(torch.device("cpu"))))
    assert found["torch"] == torch.__version__
    assert found["sliceout"] == sliceout.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["device"]
    assert "allocator" not in found


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_description_names_what_the_allocator_was_told(monkeypatch, name: str) -> None:
    monkeypatch.setenv(name, "expandable_segments:True")
    assert machine.describe(torch.device("cpu"))["allocator"] == "expandable_segments:True"

"""What a measurement was taken on, and whether others disturbed it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import sliceout
from sliceout.lab import energy, machine


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


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="the system does not tell")
def test_work_of_others_is_noticed() -> None:
    before = machine.cpu_seconds_of_others()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert machine.cpu_seconds_of_others() - before > 0.45


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="the system does not tell")
def test_work_of_our_own_does_not_count(monkeypatch) -> None:
    before, process_time = machine.cpu_seconds_of_others(), time.process_time
    monkeypatch.setattr(time, "process_time", lambda: process_time() + 1000)
    assert machine.cpu_seconds_of_others() - before == pytest.approx(-1000, abs=10)


def test_energy_counts_only_where_it_was_counted_long_enough() -> None:
    row = {"ms": 10.0, "ms_mean": 12.0, "repeats": 200, "energy_joules_per_step": 6.0}
    assert energy.of_a_step(row) == 6.0
    assert energy.of_a_step({**row, "repeats": 150}) is None
    assert energy.of_a_step({**row, "ms_mean": None}) == 6.0
    assert energy.of_a_step({"ms": 10.0, "energy_joules_per_step": 6.0}) is None
    assert energy.of_a_step({**row, "energy_joules_per_step": None}) is None

"""Whether others disturbed a measurement, and whether its energy was counted for long enough."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from sliceout_lab import machine
from sliceout_lab.report.timing import energy_of_step


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
    assert energy_of_step(row) == 6.0
    assert energy_of_step({**row, "repeats": 150}) is None
    assert energy_of_step({**row, "ms_mean": None}) == 6.0
    assert energy_of_step({"ms": 10.0, "energy_joules_per_step": 6.0}) is None
    assert energy_of_step({**row, "energy_joules_per_step": None}) is None

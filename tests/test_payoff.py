"""Whether slices pay is read from measurements, and nothing is claimed where there are none."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sliceout import payoff

ROOT = Path(__file__).parents[1]
MEASURED = {
    "cuda": {
        "bf16": {
            "file": "results/payoff/x-bf16.json", "machine": "X", "align": 16,
            "pays": [
                ["conv", 16, 131072, 0.5, 1.3], ["conv", 16, 8192, 0.5, 1.1], ["conv", 16, 8192, 0.1, 0.9],
                ["linear", 2048, 256, 0.5, 0.7], ["linear", 64, 256, 0.5, 1.2], ["linear", 64, 16384, 0.5, 0.8],
            ],
        },
        "tf32": {"file": "y", "machine": "X", "align": 8, "pays": [["conv", 16, 131072, 0.5, 1.05]]},
    }
}  # fmt: skip


@pytest.fixture(autouse=True)
def measured(monkeypatch) -> None:
    monkeypatch.setattr(payoff, "_table", lambda: MEASURED)


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("payoff_benchmark", ROOT / "benchmarks" / "payoff.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_pays_at_no_batch_is_told_with_its_measurement() -> None:
    told = payoff.cannot_pay("conv", 16, 8, "cuda", torch.bfloat16)
    assert told == (
        "16 units: a slice of 8 cannot pay on X (measured: 110% of the full layers' time; results/payoff/x-bf16.json)"
    )
    assert "105%" in payoff.cannot_pay("conv", 16, 8, "cuda")  # the better one of all precisions


def test_what_pays_at_some_batch_is_left_to_the_user() -> None:
    assert payoff.cannot_pay("linear", 64, 32, "cuda", torch.bfloat16) is None
    assert "120%" in payoff.cannot_pay("linear", 64, 32, "cuda", torch.bfloat16, rows=300)


def test_the_nearest_rate_counts() -> None:
    assert payoff.cannot_pay("conv", 16, 14, "cuda", torch.bfloat16, rows=8192) is None


@pytest.mark.parametrize(
    ("kind", "size", "device"),
    [("linear", 500, "cuda"), ("conv", 640, "cuda"), ("conv", 16, "cpu"), ("conv", 16, "meta")],
)
def test_nothing_is_claimed_where_nothing_was_measured(kind: str, size: int, device: str) -> None:
    assert payoff.cannot_pay(kind, size, size // 2, device) is None


@pytest.mark.parametrize(
    ("size", "device", "dtype", "align"),
    [(2048, "cuda", torch.bfloat16, 16), (2048, "cuda", torch.float32, 8), (2048, "cuda", None, 16),
     (160, "cuda", None, 8), (1000, "cuda", None, 8), (48, "cuda", None, 1),
     (2048, "cpu", None, 8), (100, "cpu", None, 4)],
)  # fmt: skip
def test_alignment_follows_the_measurement_and_the_size(size: int, device: str, dtype: Any, align: int) -> None:
    assert payoff.default_align(size, device, dtype) == align


@pytest.mark.parametrize(("per_unit", "best"), [({1: 2.0, 8: 1.0, 64: 0.98}, 8), ({1: 1.0, 8: 1.0, 64: 0.5}, 64)])
def test_the_smallest_alignment_that_is_as_fast_as_any_is_chosen(per_unit: dict[int, float], best: int) -> None:
    module = benchmark()
    filled = {a: per_unit[max(k for k in per_unit if k <= a)] for a in module.ALIGNS}
    rows = [{"kind": "linear", "size": 8, "rows": 1, "align": a, "per_unit_of_full": v} for a, v in filled.items()]
    assert module.best_align(rows) == best


def test_the_library_reads_what_was_measured() -> None:
    module = benchmark()
    assert payoff.TABLE.read_text() == module.table_text(), "run python benchmarks/payoff.py --write-table"
    for device in json.loads(payoff.TABLE.read_text()).values():
        for entry in device.values():
            assert (ROOT / entry["file"]).is_file()


def test_a_pair_of_layers_is_timed(monkeypatch) -> None:
    module = benchmark()
    monkeypatch.setattr(module, "CPU", [("linear", 8, 64, 4)])
    monkeypatch.setattr(module, "CPU_ALIGNS", [("conv3", 8, 64, (1, 4))])
    found = module.measure(torch.device("cpu"), "fp32", 0.0, float("inf"))
    assert [r["width"] for r in found["pays"]] == [56, 48, 32, 16]
    assert [r["width"] for r in found["align"]] == [31, 30, 28, 24, 16, 32]
    assert all(r["full_ms"] > 0 and r["sliced_ms"] > 0 for r in found["pays"])

"""Whether slices pay is read from measurements, and nothing is claimed where there are none."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sliceout
from sliceout.conversion import convert
from sliceout.conversion import profitability as payoff
from sliceout.conversion.reasons import Skip

ROOT = Path(__file__).parents[1]
MEASURED = {
    "cuda": [
        {
            "dtype": "bf16", "file": "results/payoff/x-bf16.json", "machine": "X", "align": 16,
            "pays": [
                ["conv3", 16, 131072, 0.5, 1.3], ["conv3", 16, 8192, 0.5, 1.1], ["conv3", 16, 8192, 0.1, 0.9],
                ["conv1", 16, 8192, 0.5, 0.8], ["depthwise", 16, 8192, 0.5, 1.4],
                ["linear", 16, 256, 0.5, 0.9],
                ["linear", 512, 256, 0.5, 1.4],
                ["linear", 2048, 256, 0.5, 0.7], ["linear", 64, 256, 0.5, 1.2], ["linear", 64, 16384, 0.5, 0.8],
            ],
        },
        {"dtype": "tf32", "file": "y", "machine": "X", "align": 8, "pays": [["conv3", 16, 131072, 0.5, 1.05]]},
        {"dtype": "bf16", "file": "z", "machine": "Y", "align": 64, "pays": [["conv3", 640, 8192, 0.5, 1.5]]},
    ]
}  # fmt: skip


@pytest.fixture(autouse=True)
def measured(monkeypatch) -> None:
    monkeypatch.setattr(payoff, "_table", lambda: MEASURED)
    monkeypatch.setattr(payoff, "_gpu", lambda device: "X")


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("payoff_benchmark", ROOT / "benchmarks" / "payoff.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_pays_at_no_batch_is_told_with_its_measurement() -> None:
    told = payoff.cannot_pay("conv3", 16, 8, "cuda", torch.bfloat16)
    assert told == (
        "16 units: a slice of 8 cannot pay on X (measured: 110% of the full layers' time; results/payoff/x-bf16.json)"
    )
    assert "105%" in payoff.cannot_pay("conv3", 16, 8, "cuda")  # the better one of all precisions


def test_what_pays_at_some_batch_is_left_to_the_user() -> None:
    assert payoff.cannot_pay("linear", 64, 32, "cuda", torch.bfloat16) is None


def test_few_rows_say_nothing_of_many() -> None:
    assert payoff.cannot_pay("linear", 512, 256, "cuda", torch.bfloat16) is None


@pytest.mark.parametrize(
    ("rate", "told"),
    [(0.05, "104%"), (0.1, "104%"), (0.15, None), (0.25, None), (0.3, None), (0.45, None), (0.5, "101%"), (0.6, "101%"),
     (0.7, "102%"), (0.8, None)],
)  # fmt: skip
def test_between_two_rates_the_better_one_counts(monkeypatch, rate: float, told: str | None) -> None:
    """At 0.2 a Wide ResNet pays on an H200, although at 0.1 it does not."""
    pays = [["conv3", 320, 32768, r, ratio] for r, ratio in ((0.7, 1.02), (0.1, 1.04), (0.5, 1.01), (0.3, 0.8))]
    entry = {"dtype": "bf16", "file": "f", "machine": "X", "align": 8, "pays": pays}
    monkeypatch.setattr(payoff, "_table", lambda: {"cuda": [entry]})
    found = payoff.cannot_pay("conv3", 400, round(400 * (1 - rate)), "cuda", torch.bfloat16)
    assert (found is None) if told is None else (told in found)


@pytest.mark.parametrize(
    ("kind", "size", "device"),
    [
        ("linear", 500, "cuda"),
        ("conv3", 640, "cuda"),
        ("grouped", 16, "cuda"),
        ("conv3", 16, "cpu"),
        ("conv3", 16, "meta"),
    ],
)
def test_nothing_is_claimed_where_nothing_was_measured(kind: str, size: int, device: str) -> None:
    assert payoff.cannot_pay(kind, size, size // 2, device) is None


@pytest.mark.parametrize(
    ("size", "device", "dtype", "align"),
    [(2048, "cuda", torch.bfloat16, 16), (2048, "cuda", torch.float32, 8), (2048, "cuda", None, 16),
     (2048, "cuda", torch.float64, 8), (160, "cuda", None, 8), (1000, "cuda", None, 8), (48, "cuda", None, 1),
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
    for entries in json.loads(payoff.TABLE.read_text()).values():
        for entry in entries:
            assert (ROOT / entry["file"]).is_file()


def test_pairs_of_layers_are_timed_and_one_that_fails_costs_no_other(monkeypatch, tmp_path: Path) -> None:
    module = benchmark()
    cases = [("linear", 8, 64, 4), ("no such kind", 8, 64, 4), ("depthwise", 8, 64, (1, 4)), ("conv1", 8, 64, (1, 4))]
    monkeypatch.setattr(module, "CPU", cases)
    monkeypatch.setattr(module, "CPU_ALIGNS", [("conv3", 8, 64, (1, 4))])
    path = tmp_path / "a.json"
    found = module.measure(torch.device("cpu"), "fp32", 0.0, float("inf"), path)
    assert json.loads(path.read_text())["pays"] == json.loads(json.dumps(found["pays"]))
    assert [r["width"] for r in found["pays"]] == 3 * [56, 48, 32, 16]
    assert [r["kind"] for r in found["pays"][::4]] == ["linear", "depthwise", "conv1"]
    assert [f["case"][0] for f in found["failed"]] == ["no such kind"]
    assert [r["width"] for r in found["align"]] == [31, 30, 28, 24, 16, 32]
    assert all(r["full_ms"] > 0 and r["sliced_ms"] > 0 for r in found["pays"])
    late = module.measure(torch.device("cpu"), "fp32", 0.0, 0.0, path)
    assert (late["align"], late["pays"]) == ([], [])


@pytest.mark.parametrize("kind", ["linear", "conv1", "conv3", "depthwise"])
def test_the_sliced_pair_is_the_full_one_in_eval_mode_and_computes_the_narrow_one_in_training(kind: str) -> None:
    module = benchmark()
    x = torch.randn(*((3, 8) if kind == "linear" else (3, 8, 5, 5)))
    hidden = sliceout.Slice(16, 0.5)
    full, sliced = module.pair(kind, 8, 16), module.pair(kind, 8, 16, hidden)
    sliced.load_state_dict(full.state_dict())
    assert torch.equal(sliced.eval()(x), full(x))
    assert sliced.train()[0](x).shape == module.pair(kind, 8, 8)[0](x).shape
    assert sliced(x).shape == x.shape


def test_every_pair_for_the_gpu_can_be_built() -> None:
    """On the meta device: a typo there would cost minutes of the GPU."""
    module = benchmark()
    for kind, outer, size, rows in (*module.GPU, *module.GPU_ALIGNS):
        shape = (rows, outer) if isinstance(rows, int) else (rows[0], outer, rows[1], rows[1])
        with torch.device("meta"):
            net = module.pair(kind, outer, size)
        assert net(torch.empty(shape, device="meta")).shape == shape
        assert len({sliceout.Slice(size, r).width for r in module.RATES} - {size}) == len(module.RATES)


# -- what convert_ makes of it -----------------------------------------------------------------------------------------


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 640, 3), nn.ReLU(), nn.Conv2d(640, 4, 3))


@pytest.fixture
def on_a_gpu(monkeypatch) -> None:
    """Without a GPU: the question is answered as if the model were on one."""
    monkeypatch.setattr(convert, "device_and_dtype", lambda model: (torch.device("cuda"), None))


X = torch.zeros(2, 3, 16, 16)


@pytest.mark.parametrize("scheme", ["sliceout", "controlled", "standard"])
def test_convert_leaves_out_what_cannot_pay_and_says_so(on_a_gpu: None, scheme: str, caplog) -> None:
    caplog.set_level("INFO", "sliceout")
    report = sliceout.convert_(network(), 0.5, scheme=scheme, example_inputs=X, payoff=True)
    assert [r.group.size for r in report.rows if r.slice] == [640]
    assert "16 units: a slice of 8 cannot pay on X (measured: 105% of the full layers' time; y)" in str(report)
    assert Skip.NOT_PROFITABLE in {r.reason.code for r in report.skipped}
    assert "left out as not profitable: 0: 16 units" in caplog.text
    unasked = sliceout.convert_(network(), 0.5, scheme=scheme, example_inputs=X)
    assert [r.group.size for r in unasked.rows if r.slice] == [16, 640]
    assert {s.align for s in unasked.slices} <= {1, 8}  # as on any other device


def test_on_the_cpu_and_on_a_gpu_that_was_not_measured_every_group_is_sliced(monkeypatch) -> None:
    def sizes() -> list[int]:
        report = sliceout.convert_(network(), 0.5, payoff=True, example_inputs=X)
        return [r.group.size for r in report.rows if r.slice]

    monkeypatch.setitem(MEASURED, "cpu", [{**MEASURED["cuda"][1], "machine": "Z"}])
    assert sizes() == [16, 640]
    monkeypatch.setattr(convert, "device_and_dtype", lambda model: (torch.device("cuda"), None))
    monkeypatch.setattr(payoff, "_gpu", lambda device: "Z")
    assert sizes() == [16, 640]


def test_with_measurements_of_the_cpu_alone_nothing_is_left_out_on_a_gpu(on_a_gpu: None, monkeypatch) -> None:
    monkeypatch.setattr(payoff, "_table", lambda: {"cpu": json.loads(payoff.TABLE.read_text())["cpu"]})
    report = sliceout.convert_(network(), 0.5, example_inputs=X, payoff=True)
    assert [r.group.size for r in report.rows if r.slice] == [16, 640]


def test_a_group_that_pays_by_one_of_its_layers_is_sliced(monkeypatch) -> None:
    monkeypatch.setattr(convert, "device_and_dtype", lambda model: (torch.device("cuda"), torch.bfloat16))
    for last in (nn.Conv2d(16, 4, 1), nn.Sequential(nn.Flatten(), nn.Linear(16 * 14 * 14, 4))):
        mixed = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), last)
        assert sliceout.convert_(mixed, 0.5, example_inputs=X, payoff=True).converted == 1
    between = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 4, 1))
    with pytest.raises(ValueError, match="140%"):
        sliceout.convert_(between, 0.5, example_inputs=X, payoff=True)


@pytest.mark.parametrize(("dtype", "align"), [(torch.bfloat16, 16), (torch.float32, 16), (torch.float64, 8)])
def test_convert_aligns_as_measured_for_the_dtype(monkeypatch, dtype: torch.dtype, align: int) -> None:
    placed = convert.device_and_dtype
    monkeypatch.setattr(convert, "device_and_dtype", lambda model: (torch.device("cuda"), placed(model)[1]))
    mlp = lambda: nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 2)).to(dtype)  # noqa: E731
    inputs = torch.zeros(2, 8, dtype=dtype)
    assert sliceout.convert_(mlp(), 0.5, example_inputs=inputs, payoff=True).slices.members[0].align == align
    assert sliceout.convert_(mlp(), 0.5, align=2, example_inputs=inputs, payoff=True).slices.members[0].align == 2


def test_the_dtype_is_that_of_autocast_or_of_half_precision_weights() -> None:
    net = nn.Linear(2, 2)
    assert convert.device_and_dtype(net) == (torch.device("cpu"), None)
    with torch.autocast("cpu", torch.bfloat16):
        assert convert.device_and_dtype(net)[1] is torch.bfloat16
    assert convert.device_and_dtype(net.half())[1] is torch.float16

"""Parts in benchmarks: cases, options, suites, and what the page says they cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fake_results as fake
from sliceout.cli import UserError, cases
from sliceout.cli.app import main as library
from sliceout.cli.cases import Case
from sliceout.cli.table import in_order
from sliceout.cli.work import Work
from sliceout_lab import cli
from sliceout_lab.bench import match, suites
from sliceout_lab.report import parts as section
from sliceout_lab.report import performance as page
from sliceout_lab.report.timing import steps


def test_parts_are_of_sliceout_alone() -> None:
    found = cases.expand(
        ["mlp"], [8], ["none", "standard", "floor", "sliceout"], [0.5], ["eager"],
        grads=["dense", "compact"], parts=[1, 4, 8],
    )  # fmt: skip
    assert [(c.label, c.parts) for c in found] == [
        ("none", 1), ("standard p=0.5", 1), ("floor p=0.5", 1), ("sliceout p=0.5", 1), ("sliceout p=0.5 4 parts", 4),
        ("sliceout p=0.5 8 parts", 8), ("sliceout p=0.5 compact", 1),
    ]  # fmt: skip
    assert len({c.setting for c in found}) == 1
    assert cases.case_of({"model": "mlp", "batch": 1, "scheme": "sliceout"}).parts == 1  # of files without them
    shown = in_order([c.as_dict() for c in reversed(found)])
    assert [r["parts"] for r in shown if r["grads"] == "dense"] == [1, 1, 1, 1, 4, 8]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": 0}, "parts 0: expected at least 1"),
        ({"parts": 8, "scheme": "floor"}, "of scheme sliceout alone"),
        ({"parts": 8, "grads": "compact"}, "not with compact gradients"),
    ],
)
def test_impossible_parts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Case(**{"model": "mlp", "batch": 8, "scheme": "sliceout", **settings})


@pytest.mark.parametrize("command", [["bench", "mlp"], ["bench", "torchvision:resnet18"]])
@pytest.mark.parametrize(
    ("given", "message"),
    [("0", "--parts 0: expected at least 1"), ("x", "--parts 'x': expected whole numbers"), ("", "--parts ''")],
)
def test_a_bad_option_is_answered_in_a_sentence(command: list[str], given: str, message: str, capsys: Any) -> None:
    run = cli.main if command[1] == "mlp" else library
    assert run([*command, "--device", "cpu", "--parts", given]) == 1
    told = capsys.readouterr().err
    assert message in told.replace("\n", " ")
    assert "Traceback" not in told


def test_inspect_refuses_no_parts(capsys: Any) -> None:
    assert library(["inspect", "torchvision:resnet18", "--parts", "0"]) == 1
    assert "--parts 0: expected at least 1" in capsys.readouterr().err


def test_parts_reach_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    from sliceout.cli import work
    from sliceout_lab.bench.networks import PaperWork

    seen: list[Any] = []
    original = work.convert_

    def convert(*args: Any, **settings: Any) -> Any:
        seen.append(settings.pop("parts", None))
        return original(*args, **settings)

    monkeypatch.setattr(work, "convert_", convert)
    import torch

    for count in (1, 4):
        made: Work = PaperWork(Case("gpt-2-64", 4, "sliceout", parts=count, size=16), torch.device("cpu"))
        # of both layers, half of q, k, v, o (64 x 64 each) and of up and down (64 x 256)
        assert work.kept_weights(made.net) == 2 * (4 * 64 * 32 + 2 * 64 * 128)
    assert seen == [1, 4]


@pytest.mark.parametrize(("name", "most"), [("parts", 80), ("parts-small", 30)])
def test_every_case_with_parts_has_what_it_is_compared_with(name: str, most: int) -> None:
    found = suites.suite(name)
    assert len(found) <= most
    for case in (c for c in found if c.parts > 1):
        beside = [c for c in found if c.setting == case.setting and c.rate in (case.rate, 0)]
        assert {"floor", "standard"} <= {c.scheme for c in beside}, case
        assert any(c.parts == 1 and c.scheme == "sliceout" for c in beside), case
    if name == "parts":
        assert {c.model for c in found} >= {"lm-1024", "lm-2048", "hf:gpt2", "timm:vit_base_patch16_224"}
        assert {c.parts for c in found if c.model == "lm-2048"} == {1, 4, 8, 16}


def test_a_batch_of_equal_memory_is_looked_for_with_each_number_of_parts() -> None:
    old = {"standard": {"batch": 8}, "model": "mlp"}
    assert match.key_of(old) == match.key_of({**old, "parts": 1}) != match.key_of({**old, "parts": 8})


# -- the page ----------------------------------------------------------------------------------------------------------

WEIGHTS = 37_748_736


def measured() -> list[dict[str, Any]]:
    shared = {"batch": 256, "size": None, "stages": None}
    ours = {"scheme": "sliceout", "rate": 0.5, "kept_weights": WEIGHTS, **shared}
    return [
        fake.case("lm-1024", "floor", 0.5, 20.0, **shared), fake.case("lm-1024", "standard", 0.5, 30.0, **shared),
        fake.case("lm-1024", ms=20.0, **ours), fake.case("lm-1024", ms=21.0, parts=8, **ours),
        fake.case("lm-1024", ms=22.0, parts=16, **ours),
    ]  # fmt: skip


def performance(folder: Path, rows: list[dict[str, Any]], device: str = "NVIDIA H200") -> str:
    (folder / "results" / "bench").mkdir(parents=True, exist_ok=True)
    about = {"device": device, "torch": "2.11", "date": "2026-01-01", "threads": 2, "cuda": "13.0"}
    data = {"kind": "bench", "schema": 1, "machine": about, "revision": "0", "command": "fake", "cases": rows}
    (folder / "results" / "bench" / "fake.json").write_text(json.dumps({**data, "match_memory": []}))
    return page.page(folder)


def test_the_page_says_what_parts_cost(tmp_path: Path) -> None:
    text = performance(tmp_path, measured()).partition("## Parts: what they cost")[2].partition("\n## ")[0]
    traffic = 7 * WEIGHTS * 14  # bytes
    more = traffic / 4.8e12 / 20e-3
    assert f"| 8 | 21.00 | 105.0% | {1 + more:.1%} (3.7 GB) | 105.0% | 70.0% | {256 * more / 0.06:,.0f} |" in text
    assert "| 16 | 22.00 | **110.0%** |" in text
    assert "14 bytes for each kept weight" in text
    assert "| lm-1024 b256, compiled, p=0.5 | 1 | 20.00 |  |  | 100.0% | 66.7% |  |" in text


def test_rows_at_which_parts_cost_six_percent() -> None:
    peaks = section.Peaks({"bf16": 1000.0}, 10.0)
    rows = section.break_even_rows(8, peaks)
    weights = 5  # of one layer: any number
    assert 7 * 14 * weights / 10.0 == pytest.approx(0.06 * 6 * rows * weights / 1000.0)


def test_without_parts_the_page_has_no_such_section(tmp_path: Path) -> None:
    text = performance(tmp_path, measured()[:3])
    assert "Parts: what they cost" not in text
    unknown = performance(tmp_path, measured(), "some GPU").partition("## Parts: what they cost")[2]
    assert "| 8 | 21.00 | 105.0% |  | 105.0% | 70.0% |  |" in unknown


def test_a_step_with_parts_is_no_number_of_the_papers() -> None:
    from sliceout_lab.report import Measured

    bench = {"machine": {}, "where": "fake.json", "cases": measured()}
    assert [s.ms for s in steps(Measured([], [bench]), [])] == [20.0, 30.0, 20.0]
    assert {r.get("parts", 1) for r in page.judged(measured())} <= {1}

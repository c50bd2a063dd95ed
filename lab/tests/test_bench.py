"""Bench compares what can be compared, keeps what it measured, and turns failures into rows."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sliceout
from sliceout.cli import UserError, cases
from sliceout.cli.cases import Case, case_of
from sliceout.cli.floor import narrow_
from sliceout.cli.work import step_of
from sliceout_lab import cli, models
from sliceout_lab.bench import files, match, run, show, suites, worker
from sliceout_lab.bench.flops import count_flops
from sliceout_lab.bench.networks import PaperWork as build
from sliceout_lab.report import performance as page

CPU = torch.device("cpu")
TASK = {"device": "cpu", "seconds": 0.01, "threads": 1}


def row(case: Case, ms: float, **more: Any) -> dict[str, Any]:
    measured = {"ms": ms, "ms_p10": ms, "ms_p90": ms, "max_allocated": 1 << 20, "max_reserved": None, "flops": 10}
    return {**case.as_dict(), **measured, "error": None, **more}


BASE = Case("mlp-3x64", 4, "standard", precision="fp32")


def widths(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters: what two floors are compared by."""
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


# -- the floor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "x"),
    [
        ("wrn-16-2", {}, torch.zeros(2, 3, 32, 32)),
        ("lm-256", {"layers": 2, "vocabulary": 100}, torch.zeros(2, 8, dtype=torch.long)),
    ],
)
@pytest.mark.parametrize("rate", [0.3, 0.5])
def test_the_floor_is_the_network_that_keep_builds(name: str, settings: dict[str, Any], x: Any, rate: float) -> None:
    net = models.build(name, **settings)
    sliceout.convert_(net, rate, example_inputs=x)
    assert widths(narrow_(net)) == widths(models.build(name, keep=1 - rate, **settings))
    assert not any(isinstance(m, sliceout.nn.Sliced) for m in net.modules())


@pytest.mark.parametrize("name", ["timm:test_efficientnet", "timm:test_resnet", "mlp-3x64"])
def test_the_floor_computes_what_sliceout_computes(name: str) -> None:
    case = Case(name, 2, "sliceout", precision="fp32", size=None if name.startswith("mlp") else 64)
    flops = [count_flops(build(replace(case, scheme=s), CPU)) for s in ("sliceout", "floor", "none")]
    assert flops[0] == flops[1] < flops[2]
    step_of(build(replace(case, scheme="floor"), CPU), 2)()


def test_attention_on_the_cpu_is_counted() -> None:
    case = Case("lm-64", 2, "none", precision="fp32", size=8)
    few, many = (count_flops(build(replace(case, size=n), CPU)) for n in (8, 16))
    assert many > 2 * few  # linear layers double, attention does more


# -- cases -------------------------------------------------------------------------------------------------------------


def test_settings_that_do_not_matter_make_no_second_case() -> None:
    found = cases.expand(
        ["mlp"], [], ["none", "standard", "sliceout"], [0.3, 0.5], ["eager"],
        grads=["dense", "compact"], sampling=["circular", "window"], precision="fp32",
        default_batch=suites.default_batch,
    )  # fmt: skip
    assert [c.scheme for c in found].count("none") == 1
    assert [c.scheme for c in found].count("standard") == 2
    assert [c.scheme for c in found].count("sliceout") == 8
    assert {c.batch for c in found} == {256}


@pytest.mark.parametrize("name", ["h200-must", "h200-more", "scaling", "cpu", "tiny"])
def test_every_suite_is_made_of_networks_that_exist(name: str) -> None:
    for case in suites.suite(name):
        assert suites.family_of(case.model) in ("mlp", "wrn", "efficientnet", "lm")
        assert case.scheme in cases.SCHEMES


def test_every_row_that_must_be_shown_has_its_references() -> None:
    found = suites.suite("h200-must")
    for case in (c for c in found if c.scheme == "sliceout" and c.sampling == "circular"):
        beside = {c.scheme for c in found if c.setting == case.setting}
        assert beside >= {"floor"}, case
        assert beside & {"standard", "none"}, case
    wanted = {c["model"] for c in suites.paper()} - {"wrn-28-6"}
    assert wanted <= {c.model for c in found if c.scheme == "sliceout"}


def test_what_must_be_shown_fits_into_one_call_of_the_device() -> None:
    """By what cases took there: 8 s each to compile ahead (8 at a time), then 10 s compiled and 4 s otherwise."""
    compiled = [c.compiled for c in suites.suite("h200-must")]
    assert sum(8 + 10 if c else 4 for c in compiled) < 570 * 0.85


def test_every_target_will_be_judged_by_the_suite_and_with_both_gradients_where_it_leaves_them_open() -> None:
    rows = [row(c, 1.0, max_reserved=100) for c in suites.suite("h200-must")]
    found = page.judged(rows)
    assert len(found) == 11
    for r in found:
        assert None not in r["measured"].values(), r
        assert r["others"] == ([] if r["model"].startswith(("mlp", "efficientnet")) else ["compact"]), r["model"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"scheme": "dropout"}, "scheme 'dropout'"), ({"rate": 1.0}, "rate 1.0"), ({"mode": "fast"}, "mode 'fast'")],
)
def test_what_is_no_case_is_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(BASE, **settings)


# -- comparing and keeping ---------------------------------------------------------------------------------------------


def test_rows_are_compared_within_one_setting_only() -> None:
    sliced, floor = replace(BASE, scheme="sliceout"), replace(BASE, scheme="floor")
    elsewhere = replace(sliced, mode="compiled")
    rows = [row(BASE, 10), row(floor, 4), row(sliced, 5), row(elsewhere, 1), row(replace(sliced, rate=0.3), 8)]
    found = {(r["mode"], r["scheme"], r["rate"]): r for r in files.compared(rows)}
    assert found["eager", "sliceout", 0.5]["of_standard"] == 0.5
    assert found["eager", "sliceout", 0.5]["of_floor"] == 1.25
    assert found["compiled", "sliceout", 0.5]["of_standard"] is None
    assert found["eager", "sliceout", 0.3]["of_floor"] is None
    assert found["eager", "sliceout", 0.3]["of_standard"] is None  # another rate is another dropout


def test_a_network_without_dropout_is_compared_to_itself_plain() -> None:
    none = replace(BASE, scheme="none", rate=0.0)
    (_, found) = files.compared([row(none, 10), row(replace(BASE, scheme="sliceout"), 8)])
    assert found["of_standard"] == 0.8
    assert found["reference"] == "none"
    assert "80 %*" in show.cells(found)


def test_the_papers_number_stands_beside_ours() -> None:
    found = files.compared([row(Case("lm-1024", 256, "sliceout", 0.3), 1.0)])[0]
    assert (found["paper_time"], found["paper_memory"]) == (0.92, 0.91)


def test_results_survive_and_are_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.ResultFile(path, {"revision": "x"}).add(row(BASE, 1.0))
    again = files.ResultFile(path)
    again.add(row(replace(BASE, scheme="floor"), 1.0, error="out of memory"))
    assert again.has(BASE)
    assert files.ResultFile(path).data["revision"] == "x"
    again.forget_failed()
    assert not again.has(replace(BASE, scheme="floor"))
    assert path.with_suffix(".csv").read_text().count("\n") == 3


@pytest.mark.parametrize("other", [{"revision": "y"}, {"machine": {"device": "X", "torch": "3"}}])
def test_a_file_is_of_one_revision_and_one_machine(tmp_path: Path, other: dict[str, Any]) -> None:
    """Else a ratio would compare two of them; another command may go on."""
    about = {"revision": "x", "machine": {"device": "X", "torch": "2"}, "command": "bench a"}
    path = tmp_path / "a.json"
    files.ResultFile(path, about).add(row(BASE, 1.0))
    with pytest.raises(UserError, match=r"a\.json is of (revision x, and this is y|torch 2, and this is 3)"):
        files.ResultFile(path, {**about, **other})
    for command in ("bench b", "bench a"):
        files.ResultFile(path, {**about, "command": command}).save()
    assert files.read(path)["command"] == "bench a && bench b"


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "train"}'])
def test_a_file_that_is_no_result_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"a\.json is not a result file of bench"):
        files.ResultFile(path)
    assert path.read_text() == text


def test_a_failed_case_is_shown_with_its_error() -> None:
    rows = [row(BASE, 1.0), {**replace(BASE, scheme="sliceout").as_dict(), "error": "out of memory"}]
    assert "| failed | out of memory |" in page.steps_table(rows)


def scaling(**wrong: float) -> list[dict[str, Any]]:
    """Rows as the scaling suite measures them; ``wrong`` multiplies time or memory of the third MLP."""
    rows = []
    for case in suites.suite("scaling"):
        kept = 1 - case.rate if case.scheme == "sliceout" else 1.0
        width = 2048 if case.model == "mlp" else int(case.model.replace("x", "-").split("-")[-1])
        rows.append(row(case, width * (1 + kept), max_reserved=int(width * (3 + kept) * 2**20)))
    rows[2]["ms"] *= wrong.get("ms", 1)
    rows[2]["max_reserved"] *= wrong.get("memory", 1)
    return rows


def test_scaling_is_judged_from_the_data() -> None:
    notes = show.scaling_notes(scaling())
    assert len(notes) == 12  # time and memory of two networks against the rate, of two with two schemes against width
    assert all("is monotone, from" in n for n in notes)
    assert "mlp sliceout compact: step time against rate is monotone, from 4096 ms at 0 to 2253 ms at 0.9." in notes
    noisy = show.scaling_notes(scaling(ms=1.06, memory=1.3))
    assert any("mlp sliceout compact: step time against rate is monotone up to 2% (largest" in n for n in noisy)
    assert any("memory against rate is NOT monotone (largest step the wrong way: 26.7%, to 0.2)" in n for n in noisy)


def test_curves_are_made_of_rows_that_differ_in_one_thing_only() -> None:
    must = [row(c, 1.0) for c in suites.suite("h200-must")]
    assert show.series(must, "rate") == show.series(must, "width") == {}
    both = [row(replace(case_of(r), mode="eager"), r["ms"]) for r in scaling()]
    assert len(show.series([*scaling(), *both], "rate")) == 4
    assert all(len(points) == 10 for points in show.series([*scaling(), *both], "rate").values())


def test_scaling_is_drawn_and_shown_on_the_page(tmp_path: Path, capsys) -> None:
    path = write(tmp_path, scaling())
    assert "![" not in page.page(tmp_path)
    assert cli.main(["bench", "--table", str(path)]) == 0
    assert "step time against width is monotone" in capsys.readouterr().out
    picture = path.with_suffix(".png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    assert path.with_suffix(".svg").is_file()
    text = page.page(tmp_path)
    assert "](../results/bench/x.png)" in text
    assert "- wrn-28 sliceout p=0.5: memory against width is monotone, from 7 MiB at 2 to 42 MiB at 12." in text
    assert "up to 2% from one point to the next" in text


@pytest.mark.slow
def test_scaling_is_measured_and_drawn_where_there_is_no_gpu(tmp_path: Path, capsys) -> None:
    words = ["mlp-2x64", "mlp-2x512", "mlp-2x2048", "--schemes", "sliceout", "--device", "cpu"]
    assert (
        cli.main(["bench", *words, "--batch", "64", "--seconds", "0.05", "--prepare", "3", "--out", str(tmp_path)]) == 0
    )
    assert "mlp-2 sliceout p=0.5: memory against width is monotone" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.png"))) == 1


# -- a larger batch at equal memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "largest", "capped"), [(1000, 98, False), (400, 38, False), (100000, 512, True)])
def test_the_largest_batch_that_fits_is_found(monkeypatch, limit: int, largest: int, capped: bool) -> None:
    monkeypatch.setattr(worker, "_memory_at", lambda work, batch: 20 + 10 * batch)
    work = build(replace(BASE, batch=32), CPU)
    found = worker.largest_batch(work, limit)
    assert (found["batch"], found["capped"]) == (largest, capped)
    assert "more memory than the baseline" in worker.largest_batch(work, 339)["error"]


def test_a_batch_that_the_device_cannot_hold_does_not_fit_and_leaves_nothing(monkeypatch) -> None:
    """As on a GPU: an allocation fails in the step, or a library or a capture fails for want of one."""
    work, released = build(replace(BASE, batch=32), CPU), []

    def memory(step: Any, work: Any, batch: int) -> dict[str, Any]:
        step()
        if batch > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return {"max_reserved": batch, "max_allocated": None}

    monkeypatch.setattr(worker, "steady_memory", memory)
    monkeypatch.setattr(worker, "release", lambda work: released.append(work))
    found = worker.largest_batch(work, 10**6)
    assert 94 <= found["batch"] <= 100
    assert found["tried"][128] is None
    assert len(released) == len(found["tried"])


def test_want_of_memory_is_known_by_what_lies_behind_an_error() -> None:
    def failed_capture() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    with pytest.raises(RuntimeError) as caught:
        failed_capture()
    assert worker.ran_out(caught.value)
    assert worker.ran_out(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))
    assert not worker.ran_out(ValueError("expected 4 dimensions"))


@pytest.mark.slow
def test_equal_memory_is_measured_with_real_steps() -> None:
    standard = replace(BASE, model="mlp-2x256", batch=512)
    limit = worker._memory_at(build(standard, CPU), standard.batch)
    work = build(replace(standard, scheme="sliceout"), CPU)
    found = worker.largest_batch(work, limit)
    assert found["batch"] > standard.batch
    assert found["tried"][found["batch"]] <= limit
    above = min(b for b in found["tried"] if b > found["batch"])
    assert found["tried"][above] > limit
    assert above - found["batch"] <= found["grain"]
    sizes = sorted(found["tried"])
    assert [found["tried"][b] for b in sizes] == sorted(found["tried"].values())
    per_sample = (found["tried"][sizes[-1]] - found["tried"][sizes[0]]) / (sizes[-1] - sizes[0])
    assert per_sample >= 784 * 4 + 8  # the batch itself counts
    assert all(p.grad is None for p in work.net.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["eager", "captured", "compiled"])
def test_a_trial_on_the_gpu_leaves_nothing_for_the_next(mode: str) -> None:
    """Graphs hold the memory of all activations: one that stays would count in every later trial."""
    work = build(Case("mlp-3x512", 256, "sliceout", mode=mode), torch.device("cuda"))
    left, used = [], []
    for batch in (256, 16384, 256):
        used.append(worker._memory_at(work, batch))
        worker.release(work)
        left.append(torch.cuda.memory_reserved())
    assert used[1] > used[0] + 50 * 2**20
    assert used[2] <= used[0] + 8 * 2**20
    assert left[1] <= left[0] + 8 * 2**20


@pytest.mark.slow
def test_a_larger_batch_at_equal_memory_from_the_command_to_the_page(tmp_path: Path, capsys) -> None:
    words = [
        "bench",
        "mlp-2x256",
        "--device",
        "cpu",
        "--batch",
        "512",
        "--schemes",
        "standard,sliceout",
        "--seconds",
        "0.05",
    ]
    assert cli.main([*words, "--match-memory", "--out", str(tmp_path)]) == 0
    assert "A larger batch at equal memory" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    (entry,) = json.loads(path.read_text())["match_memory"]
    a, b = entry["standard"], entry["sliceout"]
    assert (entry["error"], entry["baseline"], a["batch"]) == (None, "standard", 512)
    assert 512 < b["batch"] <= 16 * 512
    assert 0.8 * a["max_allocated"] < b["max_allocated"] <= a["max_allocated"]
    assert b["samples_per_second"] == pytest.approx(1000 * b["batch"] / b["ms"])
    before = path.read_text()
    assert cli.main([*words, "--match-memory", "--out", str(tmp_path)]) == 0
    assert path.read_text() == before  # what is there is not measured again
    assert cli.main(["report", "--bench", str(path), "--out", str(tmp_path / "report")]) == 0
    second = (tmp_path / "report" / "co2.md").read_text().split("## 2. ")[1].split("## 3. ")[0]
    assert f"| 512 → {b['batch']} | {100 * b['max_allocated'] / a['max_allocated']:.0f} % of standard |" in second
    assert "Not measured here" not in second


def test_only_what_is_missing_is_matched_and_a_baseline_is_found(monkeypatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def run_cases(wanted: list[Case], task: dict[str, Any], **how: Any) -> Any:
        (case,) = wanted
        asked.append((case.batch, task.get("within")))
        if "within" in task:
            yield case, {**case.as_dict(), "batch": 40, "grain": 2, "capped": False, "tried": {}, "error": None}
        else:  # the process of its own needs a bit more than the search did
            yield case, row(case, 2.0, max_reserved=100 + 10 * (case.batch - 38))

    monkeypatch.setattr(match, "run_cases", run_cases)
    wide = replace(BASE, batch=32, align=8)
    sliced = [replace(wide, scheme="sliceout", sampling=s) for s in ("circular", "window")]
    rows = [row(wide, 1.0, max_reserved=100)]
    how: Any = {"cache": Path("/tmp"), "deadline": 0.0, "say": lambda text: None}
    first, second = match.match(rows, sliced, [], TASK, **how)
    assert asked[:3] == [(32, 100), (40, None), (38, None)]
    assert (first["sliceout"]["batch"], first["sampling"], second["sampling"]) == (38, "circular", "window")
    assert list(match.match(rows, sliced, [first, second], TASK, **how)) == []
    none = [row(replace(wide, scheme="none", rate=0.0, align=None), 1.0, max_reserved=100)]
    assert next(match.match(none, sliced, [], TASK, **how))["baseline"] == "none"
    assert list(match.match([], sliced, [], TASK, **how)) == []


# -- workers -----------------------------------------------------------------------------------------------------------


def run_all(*wanted: Case, seconds: float = 100, **more: Any) -> list[dict[str, Any]]:
    settings = {"cache": Path("/tmp"), "prepare": len(wanted), "deadline": time.monotonic() + seconds, **more}
    return [answer for _, answer in run.run_cases(wanted, TASK, **settings)]


@pytest.mark.slow
def test_workers_measure_and_a_failure_becomes_a_row() -> None:
    good, bad, alone = run_all(BASE, replace(BASE, mode="captured"), replace(BASE, model="no-such-network"))
    assert good["error"] is None
    assert good["ms_p10"] <= good["ms"] <= good["ms_p90"]
    assert good["flops"] == 6 * 4 * (784 * 64 + 2 * 64 * 64 + 64 * 10) - 2 * 4 * 784 * 64  # no gradient of the input
    assert "needs the model and the batch on a GPU" in bad["error"]
    assert "no network is called 'no-such-network'" in alone["error"]


def test_a_worker_that_dies_becomes_a_row(monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "the worker ended with code 1" in run_all(BASE)[0]["error"]


def test_nothing_is_started_after_the_deadline(monkeypatch) -> None:
    monkeypatch.setattr(run, "Worker", lambda *args: pytest.fail("a worker was started"))
    assert run_all(BASE, seconds=-1) == []


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a model"),
        (["--suite", "no"], "--suite no: expected one of h200-must"),
        (["mlp", "--suite", "tiny"], "either models or a suite"),
        (["mlp", "--rates", "a"], "--rates 'a': expected numbers"),
        (["mlp", "--rates", ""], "--rates '': expected numbers"),
        (["mpl"], "no network is called 'mpl' (did you mean 'mlp'?)"),
        (["timm:no-such"], "timm has no model 'no-such'"),
        (["mlp", "--batch", "0"], "--batch 0: expected at least 1"),
        (["mlp", "--align", "0"], "--align 0: expected at least 1"),
        (["mlp", "--modes", "captured", "--device", "cpu"], "CUDA graphs need a GPU"),
        (["mlp", "--schemes", "x"], "scheme 'x'"),
        (["mlp", "--match-memory", "--schemes", "sliceout"], "--schemes standard,sliceout"),
        (["mlp", "--match-memory", "--schemes", "none,standard"], "--schemes standard,sliceout"),
        (["--table", "/no/such.json"], "cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_told(words: list[str], message: str, capsys, tmp_path: Path) -> None:
    assert cli.main(["bench", *words, *([] if "--table" in words else ["--out", str(tmp_path)])]) == 1
    assert message in capsys.readouterr().err


def test_failed_cases_are_told_and_end_with_an_exit_code(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert cli.main(["bench", "mlp", "--schemes", "none", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "1 of 1 cases failed, the first with: the worker ended with code 1" in capsys.readouterr().err


def test_the_table_of_a_file_is_printed_again(tmp_path: Path, capsys) -> None:
    about = {"device": "abacus", "torch": "2"}
    result = files.ResultFile(tmp_path / "a.json", {"machine": about, "revision": "r"})
    result.add(row(BASE, 10))
    result.add(row(replace(BASE, scheme="sliceout"), 5))
    assert cli.main(["bench", "--table", str(tmp_path / "a.json")]) == 0
    printed = capsys.readouterr().out
    assert "abacus" in printed
    assert "50 %" in printed
    assert json.loads((tmp_path / "a.json").read_text())["cases"][0]["ms"] == 10


# -- the page ----------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_command_makes_now() -> None:
    assert (ROOT / "docs" / "performance.md").read_text() == page.page(ROOT), "run sliceout-lab bench --docs"


def test_the_page_says_what_was_met_and_what_was_missed(tmp_path: Path) -> None:
    write(tmp_path, [])
    assert "Not measured yet" in page.page(tmp_path)
    wide = Case("wrn-28-10", 128, "standard", mode="compiled")
    found = [("standard", 10.0, 1000), ("floor", 6.0, 600), ("sliceout", 6.12, 700)]
    write(tmp_path, [row(replace(wide, scheme=scheme), ms, max_reserved=memory) for scheme, ms, memory in found])
    text = page.page(tmp_path)
    assert "| 61.2%, met (at most 69.0%) | 102.0%, met (at most 102.5%) | 70.0%, **missed** (at most 66.0%) |" in text


def test_a_target_is_judged_by_the_better_gradients_which_are_named(tmp_path: Path) -> None:
    wide = Case("wrn-28-10", 128, "standard", mode="compiled")
    sliced, compact = (replace(wide, scheme="sliceout", grads=g) for g in ("dense", "compact"))
    rows = [row(wide, 10.0, max_reserved=1000), row(replace(wide, scheme="floor"), 6.0, max_reserved=600)]

    def label(dense: tuple[float, int], small: tuple[float, int], **more: Any) -> tuple[str, list[str]]:
        a = row(sliced, dense[0], max_reserved=dense[1])
        b = row(compact, small[0], max_reserved=small[1])
        (found,) = page.judged([*rows, a, {**b, **more}])
        return found["grads"], found["others"]

    assert label((6.12, 700), (6.11, 700)) == ("compact", ["dense"])  # equal misses: the faster one
    assert label((6.12, 650), (6.11, 700)) == ("dense", ["compact"])  # meets the memory too
    assert label((7.0, 700), (6.0, 600), error="out of memory") == ("dense", ["compact"])
    write(tmp_path, [*rows, row(sliced, 7.0, max_reserved=650), row(compact, 6.0, max_reserved=650)])
    assert "| wrn-28-10 b128, compiled, compact (better than dense) | 60.0%, met" in page.page(tmp_path)


def write(folder: Path, rows: list[dict[str, Any]], name: str = "x.json") -> Path:
    """A result file of a GPU under ``folder`` with these rows."""
    (folder / "results" / "bench").mkdir(parents=True, exist_ok=True)
    about = {"device": "X", "torch": "2", "date": "2026-01-01", "threads": 1, "cuda": "13"}
    path = folder / "results" / "bench" / name
    result = files.ResultFile(path, {"machine": about, "revision": "r", "command": "c"})
    for r in rows:
        result.add(r)
    return path


def test_a_target_is_about_its_own_rate_and_needs_something_to_compare() -> None:
    ours = Case("wrn-28-10", 128, "sliceout", 0.5, "compiled")
    standard = row(replace(ours, scheme="standard"), 10.0)
    others = [row(replace(ours, scheme=scheme, rate=0.1), 9.0) for scheme in ("standard", "sliceout")]
    (found,) = page.judged([standard, row(ours, 6.0), *others])
    assert (found["rate"], found["measured"]["time"]) == (0.5, 0.6)
    assert not page.judged(others)
    assert not page.judged([row(ours, 6.0)])
    captured = [{**r, "mode": "captured-compiled"} for r in (standard, row(ours, 5.0))]
    assert [r["measured"]["time"] for r in page.judged([standard, row(ours, 6.0), *captured])] == [0.6, 0.5]
    assert not page.judged([{**r, "mode": "captured"} for r in (standard, row(ours, 5.0))])


def test_the_page_tells_what_scripts_measured(tmp_path: Path) -> None:
    write(tmp_path, [])
    text = page.page(tmp_path)
    assert "wait for the host" not in text
    assert "denormal" not in text
    origin = {"machine": {"device": "X", "torch": "2", "date": "2026-01-01"}, "revision": "a" * 40}
    spread = {"median": 1.125, "p10": 1.0, "p90": 1.25}
    turn = {"mode": "eager", "batch": 128, "scheme": "sliceout", "ms": spread, "of_standard": spread}
    turns = {**origin, "model": "wrn-28-10", "rounds": 25, "at_once": 10, "rows": [turn]}
    kernels = {"take": 11.0, "put": 24.0, "Adam": 101.5}
    row = {"kernels_at_first": kernels, "us_by_block": [291.5, 302.9], "kernels_at_last": kernels}
    window = {**origin, "block": 250, "samplings": {"window": {**row, "denormal": 0.0056, "us_without": 294.8}}}
    for name, data in (("turns", turns), ("window-cost", window)):
        (tmp_path / "results" / f"x-{name}.json").write_text(json.dumps(data))
    text = page.page(tmp_path)
    assert "| wrn-28-10 b128, eager, sliceout | 1.12 (1.00 to 1.25) | 112.5% (100.0% to 125.0%) |" in text
    assert "| window | 291.5 | 302.9 | 0.56% | 11.0, 24.0, 101.5 | 11.0, 24.0, 101.5 | 294.8 |" in text
    assert "the last ones after 500;" in text


def test_the_page_says_what_the_allocator_was_told(tmp_path: Path) -> None:
    path = write(tmp_path, [row(BASE, 1.0)])
    assert ", 1 threads. Data:" in page.page(tmp_path)
    data = json.loads(path.read_text())
    data["machine"]["allocator"] = "expandable_segments:True"
    path.write_text(json.dumps(data))
    assert ", 1 threads, allocator expandable_segments:True. Data:" in page.page(tmp_path)


def test_what_circular_costs_beside_window_is_said(tmp_path: Path) -> None:
    circular = Case("mlp", 256, "sliceout", mode="captured", grads="compact")
    window = replace(circular, sampling="window")
    rows = [row(circular, 0.2121, max_reserved=101), row(window, 0.21, max_reserved=100)]
    write(tmp_path, [*rows, row(replace(window, grads="dense"), 1.0)])  # which has nothing beside it
    text = page.page(tmp_path).split("## Circular and window")[1].split("##")[0]
    assert "| mlp b256, captured, compact | 0.2121 (0.2121 to 0.2121) | 0.21 (0.21 to 0.21) | +1.0% | +1.0% |" in text
    assert text.count("| mlp") == 1


def test_what_the_process_held_at_first_stands_beside_the_steady_memory() -> None:
    steady = row(BASE, 1.0, max_reserved=100 << 20, max_reserved_process=100 << 20)
    assert "| 100 MiB |" in page.steps_table([steady])
    assert "| 100 MiB (164 at first) |" in page.steps_table([{**steady, "max_reserved_process": 164 << 20}])

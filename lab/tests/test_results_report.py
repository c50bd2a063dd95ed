"""``sliceout-lab report``: the paper's numbers are the paper's, ours are counted right, words follow the numbers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_ind

import fake_results as fake
from sliceout.cli import UserError
from sliceout_lab import cli, report
from sliceout_lab.report import compare, docs, findings, groups, paper, reading, render, speed, stats, timing
from sliceout_lab.report.build import pages
from sliceout_lab.report.frontier import wrn_flops
from sliceout_lab.report.render import markdown

ROOT = Path(__file__).parents[2]
TEX = ROOT.parent / "shared" / "paper" / "sliceout.tex"
WINDOW = {"scheme": "sliceout", "sampling": "window", "norm": "flow"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of made-up results of every kind."""
    folder = tmp_path_factory.mktemp("report")
    results = fake.write(folder / "results")
    page = report.write([results / "train"], folder / "out", bench=[results / "bench"])
    assert page == folder / "out" / "report.html"
    return folder / "out"


def measured(records: list[dict], benches: list[dict] | None = None) -> report.Measured:
    runs = [reading.Run(r, f"fake:{i}") for i, r in enumerate(records)]
    return report.Measured(runs, [{**b, "where": "fake.json"} for b in benches or []])


def compared(name: str, records: list[dict], benches: list[dict] | None = None) -> compare.Compared:
    found = measured(records, benches)
    grouped = groups.group(found.runs)
    return compare.compare(paper.read(name), grouped, timing.steps(found, grouped))


def said(records: list[dict], *tables: str) -> str:
    found = groups.group(measured(records).runs)
    return "\n".join(findings.findings([compared(t, records) for t in tables], found, [], []))


# -- the paper's numbers -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not TEX.is_file(), reason="the paper's source is not here")
@pytest.mark.parametrize("name", paper.TABLES)
def test_the_papers_tables_are_those_of_the_tex(name: str) -> None:
    table = paper.read(name)
    lines = TEX.read_text().split("\n")
    first, last = table["lines"]
    assert any(f"\\label{{{table['label']}}}" in line for line in lines)
    rows = [line for line in lines[first - 1 : last] if line.strip().endswith("\\\\")]
    assert len(rows) == len(table["rows"])
    for line, row in zip(rows, table["rows"], strict=True):
        cells = line.strip().removesuffix("\\\\").split("&")[-len(row["cells"]) :]
        numbers = [[float(n) for n in re.findall(r"-?\d+\.?\d*", cell)] for cell in cells]
        assert numbers == [[] if c is None else c if isinstance(c, list) else [c] for c in row["cells"]], line
        rate = row["match"].get("rate")
        assert rate is None or f"{rate}" in line.rsplit("&", len(row["cells"]))[0]


@pytest.mark.skipif(not TEX.is_file(), reason="the paper's source is not here")
@pytest.mark.parametrize("name", paper.CURVES)
def test_the_papers_curves_are_those_of_the_tex(name: str) -> None:
    lines = TEX.read_text().split("\n")
    for curve in paper.read(name)["curves"]:
        text = " ".join(lines[curve["lines"][0] - 1 : curve["lines"][1]])
        points = [[float(x), float(y)] for x, y in re.findall(r"\(([\d.]+),([\d.]+)\)", text)]
        assert text.count("\\addplot") == 1
        assert points == curve["points"]


def test_which_perplexity_the_paper_prints() -> None:
    """As the report says of the Transformers: the last point of a curve, but once the lowest."""
    for model, curves in (("lm-1024", "transformer-1024-curve"), ("lm-2048", "transformer-2048-curve")):
        for curve in paper.read(curves)["curves"]:
            match = curve["match"]
            column = {"none": 0, "standard": 0, "controlled": 1, "sliceout": 2}[match["scheme"]]
            number = paper.lookup("transformer-detailed", {"model": model, "rate": match.get("rate", 0.0)}, column)
            values = [y for _, y in curve["points"]]
            use = min(values) if (model, match["scheme"]) == ("lm-2048", "none") else values[-1]
            assert number is not None
            assert abs(number.value - use) <= 0.051, curve["title"]


def test_a_row_of_the_paper_by_hand() -> None:
    assert paper.lookup("fashion-mnist-accuracy", {"rate": 0.5}, 1) == paper.Number(89.6, 0.05)
    assert paper.lookup("wide-resnet-sizes", {"data": "cifar-100", "model": "wrn-52-14"}, 2) == paper.Number(-34.0)
    assert wrn_flops(46, 12) > wrn_flops(40, 10) > wrn_flops(28, 6)


# -- ours --------------------------------------------------------------------------------------------------------------


def test_mean_standard_error_and_difference() -> None:
    records = [fake.run("fashion-mnist", "mlp", rate=0.5, seed=s, **WINDOW) for s in range(3)]
    for record, best in zip(records, (0.905, 0.906, 0.910), strict=True):
        record["final"] |= {"best": best, "accuracy": 0.8}
    cell = compared("fashion-mnist-accuracy", records).rows[5][1][1]
    assert (cell.ours.n, round(cell.ours.mean, 4), round(cell.ours.se, 4)) == (3, 90.7, 0.1528)
    assert round(cell.difference, 4) == 1.1  # the best epoch, as the paper's caption says, and not the last


def test_the_last_epoch_counts_for_wide_resnets() -> None:
    record = fake.run("cifar-10", "wrn-28-6", "standard", 0.3)
    record["final"] |= {"best": 0.97, "accuracy": 0.96}
    cell = compared("wide-resnet-sizes", [record]).rows[0][1][0]
    assert cell.ours == groups.Estimate(96.0, None, 1)
    assert "best rate of those run here: 0.3" in cell.notes


def test_a_scaled_down_run_is_not_passed_off_as_the_papers() -> None:
    record = fake.run("cifar-10", "wrn-28-6", "standard", 0.3, scaled={"epochs": [200, 30]})
    one = compared("wide-resnet-sizes", [record])
    cell = one.rows[0][1][0]
    assert cell.difference is None
    assert "scaled down: epochs 200 → 30" in cell.notes
    assert "Against the paper" not in said([record], "wide-resnet-sizes")


def test_the_bundled_images_count_as_scaled_down() -> None:
    cell = compared("fashion-mnist-accuracy", [fake.run("fashion-mnist-8k", "mlp", "none")]).rows[0][1][0]
    assert cell.notes == ("scaled down: data fashion-mnist → fashion-mnist-8k",)


def test_an_unscaled_run_is_preferred() -> None:
    small = [
        fake.run("mnist", "mlp", "standard", 0.5, seed=s, score=0.5, scaled={"epochs": [100, 3]}) for s in range(4)
    ]
    whole = fake.run("mnist", "mlp", "standard", 0.5, score=0.9)
    assert compared("mnist-accuracy", [*small, whole]).rows[4][1][0].comparable


def test_times_of_runs_that_shared_the_device_are_left_out() -> None:
    def rows(concurrent: int) -> list[dict]:
        shared = {"concurrent": concurrent, "batch": 256}
        standard = fake.run("fashion-mnist", "mlp", "standard", 0.5, ms=2.0, **shared)
        return [standard, fake.run("fashion-mnist", "mlp", rate=0.5, ms=1.0, **WINDOW, **shared)]

    alone, together = (compared("fashion-mnist-time", rows(n)).rows[4][1][0] for n in (1, 24))
    assert alone.ours.mean == 50
    assert together.ours is None


def test_the_time_of_a_narrower_network_is_not_the_papers() -> None:
    shared = {"batch": 256, "scaled": {"width": [2048, 64], "epochs": [100, 1]}}
    standard = fake.run("fashion-mnist", "mlp", "standard", 0.5, ms=2.0, **shared)
    records = [standard, fake.run("fashion-mnist", "mlp", rate=0.5, ms=1.0, **WINDOW, **shared)]
    cell = compared("fashion-mnist-time", records).rows[4][1][0]
    assert (cell.ours.mean, cell.difference) == (50, None)
    assert "scaled down: width 2048 → 64" in cell.notes
    for record in records:
        record["scaled"] = {"epochs": [100, 1]}  # as many epochs as you like: a step is a step
    assert compared("fashion-mnist-time", records).rows[4][1][0].difference == pytest.approx(50 - 87.3)


def test_a_step_is_compared_in_the_mode_where_its_baseline_is_fastest() -> None:
    one = compared("wide-resnet-channel", [], [fake.bench()])
    time, memory = one.rows[5][1][2:4]
    assert (round(time.ours.mean), round(memory.ours.mean)) == (-30, -30)
    slow = timing.pair(
        timing.steps(measured([], [fake.bench()]), []),
        {"model": "wrn-28-10", **fake.slices()[2][1], "rate": 0.5},
        {"scheme": "standard"},
    )
    assert slow.step.mode == "compiled"


def step(scheme: str, batch: int, mode: str, ms: float, **other: Any) -> timing.Step:
    shared = {"sampling": "circular", "norm": None, "grads": "dense", "precision": "bf16", "device": "a", "size": 1}
    rest = {"source": "f", "spread": None, "reserved": None, "allocated": None, "joules": None, "rate": 0.5}
    return timing.Step("wrn", batch, scheme, mode=mode, ms=ms, **(shared | rest | other))


def test_a_curve_over_the_rate_is_of_one_setting() -> None:
    captured = [step("sliceout", 128, "captured", 10.0 - rate, rate=rate) for rate in (0.1, 0.5, 0.9)]
    captured.append(step("standard", 128, "captured", 10.0))
    faster = [step(s, 128, "compiled", 1.0, source="g") for s in ("standard", "sliceout")]
    other = [step("sliceout", 128, "captured", 1.0, **kind) for kind in ({"grads": "compact"}, {"sampling": "window"})]
    assert speed._longest_curve([*faster, *other, *captured]) == ([0.1, 0.5, 0.9], captured)
    assert speed._longest_curve([]) == ([], [])
    drawn = speed.steps_by_rate([*faster, *other, *captured])
    assert [d.name for d in drawn] == ["time-by-rate-wrn"]
    assert "captured" in drawn[0].caption


def test_the_batch_that_bench_takes_by_itself_goes_before_faster_ones() -> None:
    steps = [step(s, batch, "captured", batch**0.9) for batch in (128, 512) for s in ("standard", "sliceout")]
    found = speed._pair(steps, "wrn", 0.5)
    assert found is not None
    assert found.step.batch == 128
    larger = speed._pair(steps[2:], "wrn", 0.5)
    assert larger is not None
    assert larger.step.batch == 512


def test_the_fastest_baseline_is_the_one_of_the_most_samples_a_second_and_of_a_plain_allocator() -> None:
    both = ("standard", "sliceout")
    steps = [step(s, 32, "eager", 11.0) for s in both] + [step(s, 128, "compiled", 12.0) for s in both]
    tuned = {"allocator": "expandable_segments:True", "source": "g"}
    steps += [step(s, 128, "compiled", 10.0, **tuned) for s in both]
    match = {"model": "wrn", "scheme": "sliceout", "rate": 0.5}
    found = timing.pair(steps, match, {"scheme": "standard"})
    assert found.step.where == "a, bf16, compiled, batch 128"
    tuned_only = timing.pair(steps[-2:], match, {"scheme": "standard"})
    assert tuned_only.step.where == "a, bf16, compiled, batch 128, allocator expandable_segments:True"


def test_the_baseline_has_the_same_rate() -> None:
    records = [fake.run("mnist", "mlp", "standard", rate, ms=ms, batch=256) for rate, ms in ((0.3, 4.0), (0.5, 2.0))]
    records.append(fake.run("mnist", "mlp", rate=0.3, ms=3.0, batch=256, **WINDOW))
    assert compared("mnist-time", records).rows[2][1][0].ours.mean == 75


@pytest.mark.parametrize(
    ("sampling", "mode", "told"),
    [
        ("window", "compiled", None),
        ("circular", "compiled", "measured with circular in place of window slices: the same launches and bytes"),
        (
            "circular",
            "eager",
            "measured with circular in place of window slices: those that wrap around are copied in two pieces",
        ),
    ],
)
def test_circular_steps_in_a_column_of_windows_are_told(sampling: str, mode: str, told: str | None) -> None:
    records = [
        fake.run("mnist", "mlp", "standard", 0.5, ms=2.0, batch=256, mode=mode),
        fake.run("mnist", "mlp", "sliceout", 0.5, ms=1.0, batch=256, mode=mode, sampling=sampling),
    ]
    cell = compared("mnist-time", records).rows[4][1][0]
    assert cell.ours.mean == 50
    assert [note for note in cell.notes if "slices" in note] == ([told] if told else [])
    page, *_ = pages(measured(records), report.Carbon())
    assert (f"ours here were {told}" in markdown(page)) == (told is not None)


def test_devices_are_not_mixed() -> None:
    a, b = fake.bench(), fake.bench()
    a["cases"] = [c for c in a["cases"] if c["scheme"] == "standard"]
    b["cases"] = [c for c in b["cases"] if c["scheme"] == "sliceout"]
    b["machine"] = {"device": "another"}
    found = measured([], [a, b])
    assert (
        timing.pair(
            timing.steps(found, []), {"model": "mlp", "scheme": "sliceout", "rate": 0.5}, {"scheme": "standard"}
        )
        is None
    )


# -- words -------------------------------------------------------------------------------------------------------------


def flow_against_standard(flow: tuple[float, ...], standard: tuple[float, ...]) -> list[dict]:
    records = []
    for scheme, scores in ((WINDOW, flow), ({"scheme": "standard"}, standard)):
        for seed, score in enumerate(scores):
            record = fake.run("fashion-mnist", "mlp", rate=0.5, seed=seed, **scheme)
            record["final"]["best"] = score
            records.append(record)
    return records


@pytest.mark.parametrize(
    ("flow", "standard", "expected"),
    [
        ((0.91, 0.911, 0.912), (0.90, 0.901, 0.902), "1.00 points above (s.e. 0.08, p<0.001)"),
        ((0.90, 0.901, 0.902), (0.91, 0.911, 0.912), "1.00 points below (s.e. 0.08, p<0.001)"),
        ((0.90, 0.92), (0.90, 0.91), "0.50 points above, which may be chance"),
        ((0.91,), (0.90,), "1.00 points above (n=1 and 1: one run each tells no error)"),
    ],
)
def test_words_follow_the_sign_and_the_error(
    flow: tuple[float, ...], standard: tuple[float, ...], expected: str
) -> None:
    assert expected in said(flow_against_standard(flow, standard), "fashion-mnist-accuracy")


def test_disagreement_with_the_paper_is_said_and_agreement_too() -> None:
    above, below, scattered = (0.91, 0.911, 0.912), (0.90, 0.901, 0.902), (0.85, 0.95, 0.90)
    table = "fashion-mnist-accuracy"
    assert "**Agrees with the paper" in said(flow_against_standard(above, below), table)
    assert "**Disagrees with the paper" in said(flow_against_standard(below, above), table)
    undecided = said(flow_against_standard(scattered, below), table)
    assert "**Undecided" in undecided
    assert "grees with" not in undecided


def test_welch() -> None:
    three = groups.Estimate(0.0, 1.0, 3)  # equal spreads: four degrees of freedom, whose t at 0.05 is 2.776
    at_limit = stats.difference(groups.Estimate(2.776 * math.sqrt(2), 1.0, 3), three)
    assert at_limit.p == pytest.approx(0.05, abs=1e-4)
    assert stats.difference(three, three).p == pytest.approx(1.0, abs=1e-6)
    a, b = [90.1, 90.9, 91.3], [89.0, 90.2]
    welch = stats.difference(groups.Estimate.of(a), groups.Estimate.of(b))
    assert welch.p == pytest.approx(ttest_ind(a, b, equal_var=False).pvalue)
    assert stats.difference(groups.Estimate(1, 0.0, 2), groups.Estimate(2, 0.0, 2)).p is None


def test_a_loss_of_time_is_published() -> None:
    found = measured([], [fake.bench()])
    lines = findings.findings([], [], [], timing.steps(found, []))
    where = f"wrn-28-10, {fake.GPU}, bf16, eager, batch 128"
    assert lines == [f"**Slower than without SliceOut:** {where}: rate 0.5: 170 % of the time."]


# -- pages -------------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else(made: Path) -> None:
    page = (made / "report.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", page)
    assert set(re.findall(r"https?://[^\"' <]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert page.count("<svg") >= 25
    assert "prefers-color-scheme: dark" in page
    assert "#1f2328" not in page.split("</style>")[1]  # ink takes the colour of the text
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_every_table_and_every_run_is_there(made: Path) -> None:
    text = (made / "results.md").read_text()
    for table in paper.tables():
        assert f"`{table['label']}`" in text
    assert "not run here" in text
    assert "42 of the runs shared their device" in text
    assert f"{len(groups.group(reading.load([made.parent / 'results' / 'train']).runs))} configurations" in text
    for figure in re.findall(r"\(figures/([^)]+)\.svg\)", text):
        assert (made / "figures" / f"{figure}.svg").stat().st_size > 1000
        assert (made / "figures" / f"{figure}.png").stat().st_size > 1000


def test_co2_is_computed_from_what_was_measured(made: Path) -> None:
    text = (made / "co2.md").read_text()
    assert "480 g CO2 per kWh" in text
    assert "| 4 → 3 | 128 → 171 | -12 % | **-34 %**" in text  # 171 samples at 0.66 of standard's time each, on 3 of 4
    assert "not measured here" in text  # the MLP's energy
    assert report.Carbon(500, "x").grams(7.2e6) == 1000


def test_the_same_results_make_the_same_page(made: Path) -> None:
    found = reading.load([made.parent / "results" / "train"], [made.parent / "results" / "bench"])
    assert render.html(pages(found, report.Carbon()), report.TITLE) == (made / "report.html").read_text()


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_files_are_named_and_cost_nothing_else(tmp_path: Path) -> None:
    good = fake.run("mnist", "mlp", "none")
    lines = [
        json.dumps(good)[:50],
        json.dumps(good),
        "[]",
        json.dumps({**good, "schema": 9}),
        json.dumps({**good, "final": None, "config": {}}),
        '{"kind": "demo"}',
        "",
    ]
    for number, line in enumerate(lines, 1):
        (tmp_path / f"a{number}.json").write_text(line)
    (tmp_path / "b.json").write_text('{"kind": "bench", "schema": 1, "cases": [')
    (tmp_path / "c.json").write_text('{"kind": "bench", "schema": 2}')
    (tmp_path / "other.json").write_text("[1]")
    found = reading.load([tmp_path])
    assert [r.record for r in found.runs] == [good]
    named = [w.split(": ")[0].removeprefix(f"{tmp_path}/") for w in found.warnings]
    assert named == ["a1.json:1", "a4.json", "a5.json", "a7.json:1", "b.json:1", "c.json"]


def test_a_note_in_a_record_is_shown_and_fields_nobody_knows_do_no_harm(tmp_path: Path) -> None:
    noted = fake.run("mnist", "mlp", "standard", 0.5) | {"note": "corrected: a reason", "later_versions": [1]}
    (tmp_path / "a.json").write_text(json.dumps(noted))
    (tmp_path / "b.json").write_text(json.dumps(fake.run("mnist", "mlp", "none")))
    found = reading.load([tmp_path])
    assert (len(found.runs), found.warnings) == (2, [])
    page, *_ = pages(found, report.Carbon())
    notes = markdown(page).split("## Notes on runs")[1].strip().splitlines()
    assert notes == [f"- mnist, mlp, standard dropout 0.5, seed 0 (`{noted['id']}`): corrected: a reason"]
    assert "Notes on runs" not in markdown(pages(measured([fake.run("mnist", "mlp", "none")]), report.Carbon())[0])


def test_a_run_written_twice_counts_once(tmp_path: Path) -> None:
    first = fake.run("mnist", "mlp", "none")
    (tmp_path / "a.json").write_text(json.dumps(first))
    (tmp_path / "b.json").write_text(json.dumps({**first, "dirty": True}))
    found = reading.load([tmp_path])
    assert [r.record["dirty"] for r in found.runs] == [True]
    assert len(found.warnings) == 1


def test_incomplete_records_do_not_break_the_page() -> None:
    """What a record may lack, or hold as null: machine, times, memory, energy, epochs."""
    bare = {
        "kind": "train",
        "schema": 1,
        "config": {"data": "cifar-10", "model": "wrn-28-6", "scheme": "sliceout", "rate": 0.5},
        "seed": 0,
        "epochs": [],
        "final": {"accuracy": None},
    }
    other = fake.run("cifar-10", "wrn-28-6", "standard", 0.3)
    other |= {
        "machine": None,
        "ms_per_step": None,
        "max_reserved": None,
        "energy_joules": None,
        "steps_per_epoch": None,
    }
    assert (
        len(
            pages(
                measured([bare, other], [{"kind": "bench", "schema": 1, "cases": [{"model": "mlp", "error": "x"}]}]),
                report.Carbon(),
            )
        )
        == 3
    )


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "x.json").write_text("{}")
    for arguments, expected in (
        ([], "no results in results/train, results/bench or runs"),
        (["nowhere"], "nowhere: there is no such file or folder"),
        (["empty"], "no results to report in empty"),
        (["empty", "--out", "file/x"], "--out file/x: cannot write there"),
        (["--bench", "x.json"], "not a result of sliceout bench"),
        (["empty", "--carbon-intensity", "-1"], "--carbon-intensity -1: expected grams"),
        (["empty", "--carbon-source", "me"], "give both"),
        (["--docs"], "is not the repository"),
    ):
        assert cli.main(["report", *arguments]) == 1
        err = capsys.readouterr().err
        assert expected in err
        assert "Traceback" not in err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mnist"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps(fake.run("mnist", "mlp", "none")))
    (folder / "b.json").write_text("{torn")
    assert cli.main(["report", "--carbon-intensity", "30", "--carbon-source", "my own dam"]) == 0
    out, err = capsys.readouterr()
    assert "Report: runs/report/report.html" in out
    assert "b.json:1" in err
    assert "30 g CO2 per kWh** (my own dam)" in (tmp_path / "runs" / "report" / "co2.md").read_text()


# -- the committed pages -----------------------------------------------------------------------------------------------


def test_the_committed_pages_are_those_of_the_committed_results() -> None:
    """If this fails: ``sliceout-lab report --docs``, and commit what it changed."""
    for path, text in docs.files(ROOT, docs.load_committed(ROOT), report.Carbon()).items():
        name = path.relative_to(ROOT)
        assert path.is_file(), f"{name} is missing"
        committed = path.read_text(encoding="utf-8")
        if path.suffix == ".svg":  # other versions of matplotlib may draw the same numbers a little differently
            mark = r'data-of="(\w+)"'
            assert re.findall(mark, committed) == re.findall(mark, text), f"{name} is out of date"
        else:
            assert committed == text, f"{name} is out of date"


@pytest.mark.slow
def test_docs_follow_the_results(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "README.md").write_text(f"before\n{docs.BEGIN}\nold\n{docs.END}\nafter\n")
    assert docs.update(tmp_path)
    assert "No training results are committed yet." in (tmp_path / "README.md").read_text()
    assert docs.update(tmp_path) == []
    records = [fake.run("fashion-mnist", "mlp", rate=0.5, score=0.91, seed=s, **WINDOW) for s in range(2)]
    fake.write(tmp_path / "results", records, {"kind": "bench", "schema": 1, "cases": []})
    gone = tmp_path / "docs" / "figures" / "gone.svg"
    gone.write_text('<svg data-of="0"/>')
    assert gone in docs.update(tmp_path)
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("before\n")
    assert readme.endswith("\nafter\n")
    assert re.search(
        r"FashionMNIST, MLP, rate 0.5 \(best epoch\) \| not run here \| not run here \| 9\d\.\d\d ± ", readme
    )
    (tmp_path / "README.md").write_text("no marks")
    with pytest.raises(UserError, match="expected the lines"):
        docs.update(tmp_path)

"""Experiments beyond the paper: parts, growth, a GPT, and what they must not change: the ids of runs that are there."""

from __future__ import annotations

import json
import lzma
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fake_results as fake
import sliceout
from sliceout.cli import UserError
from sliceout_lab import data, experiment, reproduce, scheme
from sliceout_lab.data.files import DataError
from sliceout_lab.experiment_file import LATER, SCHEME, names
from sliceout_lab.models import build
from sliceout_lab.report import Measured, groups, own, reading
from sliceout_lab.report.build import pages
from sliceout_lab.report.co2 import Carbon
from sliceout_lab.report.render import markdown
from sliceout_lab.reproduce import Plan
from sliceout_lab.train import setup
from sliceout_lab.train.evaluate import chosen
from sliceout_lab.train.rates import learning_rate
from trainruns import mlp_job, train

TRAINED = sorted((Path(__file__).parents[2] / "results" / "train").rglob("*.json"))


# -- ids ---------------------------------------------------------------------------------------------------------------


def test_the_committed_runs_still_have_their_ids() -> None:
    """``reproduce`` skips a row whose id is there: a new key in every config would train all of them again."""
    records = [r for r in (json.loads(p.read_text()) for p in TRAINED) if r.get("kind") == "train"]
    assert len(records) > 100
    for record in records:
        config, scaled = record["config"], record["scaled"]
        one = experiment.load(record["experiment"])
        if {"data", "lr"} & scaled.keys():
            one, _, _ = experiment.quickened(one)
        how = {key: config[key] for key in ("mode", "precision")}
        if record["table"] == experiment.OWN_TABLE:  # whose rows may set more than a scheme
            rows = [experiment.job(one, row, seed=record["seed"], device="cuda", subset=config["subset"], **how)
                    for row in one.schemes()]  # fmt: skip
            assert record["id"] in {row.id for row in rows}, record["experiment"]
            continue
        given = {key: config[key] for key in (*SCHEME, *LATER) if key in config}
        sizes = {key: config[key] for key in ("epochs", "batch", "subset")} | {
            "width": scaled.get("width", [0, None])[1]
        }
        made = experiment.job(one, given, seed=record["seed"], device="cuda", **how, **sizes)
        assert made.id == record["id"], record["experiment"]


def test_defaults_are_not_in_the_config() -> None:
    fashion = experiment.load("fashion-mnist")
    plain = experiment.job(fashion)
    assert not LATER.keys() & plain.config.keys()
    assert "recalibrate" not in plain.config
    assert experiment.job(fashion, {"parts": 1}).id == plain.id
    assert experiment.job(fashion, {"attention": "dims"}).id == plain.id
    assert experiment.job(fashion, {"parts": 8}).id != plain.id
    assert experiment.job(fashion, {"parts": 8}).config == {**plain.config, "parts": 8}
    dropout = {"scheme": "standard", "rate": 0.5}
    assert (
        experiment.job(fashion, {**dropout, "parts": 8, "attention": "values"}).id
        == experiment.job(fashion, dropout).id
    )


# -- rows and labels ---------------------------------------------------------------------------------------------------

GROWTH = [[0, 0.5], [0.5, 0.25], [0.75, 0]]


def test_a_row_sets_epochs_learning_rate_and_network(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        f"extends = '{experiment.FOLDER / 'fashion-mnist'}'\n"
        "[[rows]]\nscheme = 'none'\nepochs = [8, 16]\nlr = 1e-2\nmodel_settings = { keep = 0.5 }\n"
        f"[[rows]]\ngrow = {GROWTH}\nsampling = 'prefix'\n[[rows]]\ngrow = [{GROWTH}, [[0, 0.5], [0.5, 0]]]"
    )
    jobs = Plan.of(str(tmp_path / "mine.toml"), seeds="0").jobs
    assert [j.config["epochs"] for j in jobs] == [8, 16, 100, 100, 100]
    assert [j.config["optimizer"]["lr"] for j in jobs] == [1e-2, 1e-2, 1e-4, 1e-4, 1e-4]
    assert jobs[0].config["model_settings"] == {"hidden": [2048] * 3, "keep": 0.5}
    assert jobs[2].config["model_settings"] == {"hidden": [2048] * 3}
    assert [j.config.get("grow") for j in jobs[2:]] == [GROWTH, GROWTH, [[0.0, 0.5], [0.5, 0.0]]]
    assert scheme.labels([j.config for j in jobs])[:3] == [
        "none narrow 0.5, 8 epochs, lr 0.01",
        "none narrow 0.5, 16 epochs, lr 0.01",
        "sliceout 0.5 prefix growing (rate 0.5, 0.25 from 50 %, 0 from 75 %), 100 epochs, lr 0.0001",
    ]


def test_what_there_is_to_train() -> None:
    for name, rows in (("wikitext-2-gpt-8-512", 19), ("cifar10-wrn-16-8", 10), ("fashion-mnist-parts", 20)):
        jobs = Plan.of(name, device="cuda").jobs
        assert len(jobs) == 3 * rows
        assert len(set(scheme.labels([j.config for j in jobs]))) == rows  # no two rows look the same
    both = [Plan.of(n, device="cuda").jobs for n in ("cifar10-wrn-16-8", "cifar10-wrn-28-6-grow")]
    assert [j.label for j in both[0]] == [j.label for j in both[1]]
    assert not {j.id for j in both[0]} & {j.id for j in both[1]}
    assert all(j.config["recalibrate"] for j in both[1])
    assert {j.table for jobs in both for j in jobs} == {experiment.OWN_TABLE}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parts": 0}, "--parts 0: expected at least 1"),
        ({"parts": 8, "grads": "compact"}, "--parts 8 --grads compact"),
        ({"attention": "vales"}, "--attention vales: expected dims or values or heads or off: did you mean values"),
        ({"grow": [[0.5, 0.5], [0, 0]]}, "progress that begins with 0 and rises"),
        ({"grow": [[0.1, 0.5], [0.5, 0]]}, "progress that begins with 0"),
        ({"grow": [[0, 0.5], [0.75, 0.25], [0.5, 0]]}, "progress that begins with 0 and rises"),
        ({"grow": [[0, 0.5], [1, 0]]}, "each below 1"),
        ({"grow": [[0, 0.25], [0.5, 0.5]]}, "rates that fall"),
        ({"grow": [[0, 0.5, 1]]}, "expected pairs of progress and rate"),
        ({"grow": [[0, "half"], [0.5, 0]]}, "expected pairs of progress and rate"),
        ({"grow": GROWTH, "rate": 0.3}, "rate 0.3 beside grow"),
    ],
)
def test_impossible_settings(given: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        experiment.job(experiment.load("fashion-mnist"), given)


def test_growth_takes_the_place_of_a_tail() -> None:
    with pytest.raises(UserError, match=r"tail 0\.01 beside grow"):
        experiment.job(experiment.load("lm1b-lm-1024"), {"grow": GROWTH})


# -- learning rates ----------------------------------------------------------------------------------------------------


def test_one_cycle_is_torchs() -> None:
    total = 20_000
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total, pct_start=0.2, cycle_momentum=False)
    ours = learning_rate(0.1, {"name": "one-cycle", "warmup": 0.2})
    for step in range(total):
        if step % 500 == 0:
            assert ours(step / total) == pytest.approx(theirs.get_last_lr()[0], abs=5e-5)
        optimizer.step(), theirs.step()
    assert (ours(0), ours(0.2), ours(1)) == pytest.approx((0.1 / 25, 0.1, 0.1 / 25e4))


def test_linear_falls_to_nothing() -> None:
    plain, warm = learning_rate(0.1, {"name": "linear"}), learning_rate(0.1, {"name": "linear", "warmup": 0.2})
    assert [plain(p) for p in (0, 0.5, 1)] == pytest.approx([0.1, 0.05, 0])
    assert [warm(p) for p in (0, 0.1, 0.2, 0.6, 1)] == pytest.approx([0, 0.05, 0.1, 0.05, 0])
    with pytest.raises(UserError, match=r"schedule\.warmup = 1\.5"):
        learning_rate(0.1, {"name": "linear", "warmup": 1.5})
    with pytest.raises(UserError, match="did you mean one-cycle"):
        learning_rate(0.1, {"name": "onecycle"})


# -- networks and data -------------------------------------------------------------------------------------------------


def test_the_gpt_and_its_narrow_form() -> None:
    torch.manual_seed(0)
    model = build("gpt-2-128", vocabulary=50, context=16, residual_dropout=0.3)
    assert model.layers[0].attention.heads == 2
    assert sum(isinstance(m, torch.nn.Dropout) and m.p == 0.3 for m in model.modules()) == 5
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.layers[0].feed_forward.down.weight.std().item() == pytest.approx(0.01, rel=0.05)
    used: list[Any] = []
    for m in (m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p):
        m.register_forward_hook(lambda module, *rest: used.append(module))
    narrow = build("gpt-2-128", vocabulary=50, context=16, keep=0.5)
    assert narrow.layers[0].attention.v.out_features == 64
    assert narrow.layers[0].feed_forward.up.out_features == 256
    x = torch.randint(50, (2, 16))
    assert narrow(x).shape == model(x).shape == (2, 16, 50)
    assert len(set(used)) == len(used) == 5
    report = sliceout.convert_(model, 0.5, example_inputs=x)
    assert report.converted == 6  # queries with keys, values, hidden units, of two layers
    residual = [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p]
    assert [type(m) for m in residual] == [torch.nn.Dropout] * 5  # it lies outside of the slices


def test_standard_dropout_lies_on_values_and_hidden_units_alone() -> None:
    model = build("gpt-2-128", vocabulary=50, context=16)
    x = torch.randint(50, (2, 16))
    report = sliceout.convert_(model, 0.5, scheme="standard", example_inputs=x)
    assert {r.group.name.rpartition(".")[2] for r in report.rows if r.slice} == {"v", "up"}


def test_another_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2").mkdir()
    lines = "".join(f" word{i % 7} and thing{i % 11} of all kinds , {i} \n" for i in range(200))
    for split in ("train", "valid", "test"):
        (tmp_path / "wikitext-2" / f"wiki.{split}.tokens.xz").write_bytes(lzma.compress(lines.encode()))
    whole, small = data.load("wikitext-2", tmp_path), data.load("wikitext-2@300", tmp_path)
    assert (small.vocabulary, small.name, small.words) == (300, "wikitext-2@300", whole.words)
    assert whole.vocabulary > 300
    assert len(small.train) > len(whole.train)
    with pytest.raises(DataError, match="wikitext-2@8k: expected a vocabulary of 300"):
        data.load("wikitext-2@8k", tmp_path)


# -- training ----------------------------------------------------------------------------------------------------------


def test_parts_and_attention_reach_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    original = setup.convert_

    def convert(model: Any, rate: float, **settings: Any) -> Any:
        seen.append(dict(settings))
        settings.pop("parts", None)
        return original(model, rate, **settings | {"attention": "dims"})

    monkeypatch.setattr(setup, "convert_", convert)
    for given in ({}, {"parts": 4, "attention": "values", "sampling": "prefix"}):
        train(mlp_job(epochs=1, **given), tmp_path)
    assert [s.get("parts") for s in seen] == [None, 4]
    assert [s.get("attention") for s in seen] == [None, "values"]
    assert [s["sampling"] for s in seen] == ["circular", "prefix"]


def test_growth_is_followed_and_goes_on_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sliceout_lab.train import Stopped, loop
    from sliceout_lab.train.stop import Stop

    made: list[int] = []
    original = loop.make
    monkeypatch.setattr(loop, "make", lambda t, record: (made.append(record.step), original(t, record))[1])
    job = mlp_job(epochs=4, sampling="prefix", grow=GROWTH)
    whole = train(job, tmp_path / "whole")
    steps = whole["steps_per_epoch"]
    assert made == [0, 2 * steps, 3 * steps]

    class Stops(Stop):
        def __enter__(self) -> Stop:
            self.signum = 15
            return self

    with monkeypatch.context() as patched:
        patched.setattr(loop, "Stop", Stops)
        for _ in range(3):
            with pytest.raises(Stopped):
                train(job, tmp_path / "parts")
    again = train(job, tmp_path / "parts")
    assert [e["loss"] for e in again["epochs"]] == [e["loss"] for e in whole["epochs"]]


def test_parts_train(tmp_path: Path) -> None:
    one, several = (train(mlp_job(epochs=1, parts=parts), tmp_path) for parts in (1, 8))
    assert one["id"] != several["id"]
    assert one["epochs"][0]["loss"] != several["epochs"][0]["loss"]
    assert (several["config"]["parts"], "parts" in one["config"]) == (8, False)


def test_adamw_trains_and_a_typo_is_answered(tmp_path: Path) -> None:
    job = mlp_job("none", epochs=1)
    job.config["optimizer"] = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}
    assert math.isfinite(train(job, tmp_path)["epochs"][0]["loss"])
    job = mlp_job("none", epochs=1, seed=1)
    job.config["optimizer"] = {"name": "adamv", "lr": 1e-3}
    with pytest.raises(UserError, match="did you mean adam or adamw"):
        train(job, tmp_path)


def test_the_epoch_is_chosen_on_validation() -> None:
    epochs = [
        {"epoch": n, "word_perplexity": test, "valid_word_perplexity": valid}
        for n, test, valid in ((1, 120.0, 130.0), (2, 104.0, 110.0), (3, 100.0, 112.0))
    ]
    assert chosen(epochs)["chosen"] == {"epoch": 2, "word_perplexity": 104.0, "valid_word_perplexity": 110.0}
    assert chosen([{"epoch": 1, "accuracy": 0.5}]) == {}


TEXT = """
extends = "wikitext-2-gpt-8-512"
data = "text:{folder}"
model = "gpt-1-64"
epochs = 2
batch = 4
precision = "fp32"
mode = "eager"
[inputs]
sequence = 16
[[rows]]
scheme = "standard"
"""


def test_perplexity_by_word_on_both_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, count in (("train", 200), ("valid", 20), ("test", 30)):
        (tmp_path / f"{split}.txt").write_text("".join(f" word{i % 7} and word{i % 11} , {i} \n" for i in range(count)))
    (tmp_path / "mine.toml").write_text(TEXT.format(folder=tmp_path))
    plan = Plan.of(str(tmp_path / "mine.toml"), seeds="0")
    assert reproduce.reproduce(plan, tmp_path / "out", report=False) == 0
    record = json.loads(next((tmp_path / "out" / "results").glob("*.json")).read_text())
    last = record["epochs"][-1]
    assert {"word_perplexity", "valid_word_perplexity", "perplexity", "valid_perplexity"} <= last.keys()
    assert last["word_perplexity"] > last["perplexity"]  # a word takes several tokens
    assert record["final"]["chosen"]["word_perplexity"] == last["word_perplexity"]
    told = capsys.readouterr().out
    assert "chosen on validation" in told.replace("\n", " ")
    assert "  standard 0.5  " in told  # the table has room for it


def test_recalibration_is_reported_beside_and_leaves_the_network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from sliceout_lab.train import evaluate

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    x, y = 5 + torch.randn(64, 8), torch.randint(3, (64,))
    feed = SimpleNamespace(epoch=lambda seed, epoch: iter([(x, y)] * 3), test=lambda split: iter([(x, y)]))
    t: Any = SimpleNamespace(
        model=model, feed=feed, splits=("test",), text=False, device=torch.device("cpu"),
        config={"precision": "fp32", "epochs": 1}, job=SimpleNamespace(seed=0),
    )  # fmt: skip
    before = [b.clone() for b in model.buffers()]
    stale, fresh = evaluate.evaluate(t), evaluate.recalibrated(t)
    assert stale["test_loss"] != fresh["test_loss"]
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))
    assert evaluate.evaluate(t) == stale


def test_an_experiment_that_asks_for_it_has_the_number_in_its_result(tmp_path: Path) -> None:
    job = mlp_job("none", epochs=2)
    job.config["recalibrate"] = True
    record = train(job, tmp_path)
    assert record["final"]["recalibrated"] == record["final"]["accuracy"]  # it has no batch norm
    assert ["recalibrated" in e for e in record["epochs"]] == [False, True]
    assert "recalibrated" not in train(mlp_job("none", epochs=1), tmp_path)["final"]


# -- pages -------------------------------------------------------------------------------------------------------------


def pages_of(records: list[dict[str, Any]]) -> tuple[str, str]:
    """Results beside the paper, and recipes."""
    runs = [reading.Run(r, f"fake:{i}") for i, r in enumerate(records)]
    results, _, recipes = pages(Measured(runs, []), Carbon())
    return markdown(results), markdown(recipes)


def test_a_recipe_names_what_was_not_run_and_shows_what_was() -> None:
    _, empty = pages_of([])
    assert "`sliceout-lab reproduce fashion-mnist-parts`: not run here yet." in empty
    assert empty.count("```python") == 3
    run = fake.run("fashion-mnist-8k", "mlp", "sliceout", rate=0.5, sampling="circular", parts=8, score=0.85)
    _, text = pages_of([{**run, "experiment": "fashion-mnist-parts"}])
    mlp = text.partition("## MLP")[2].partition("## Transformer")[0]
    assert "convert_(model, rate=0.5, parts=8)" in mlp
    assert "not run here yet" not in mlp
    assert re.search(r"8 parts, rate 0.5 \| 8\d.\d\d \(n=1\)", mlp)
    assert "## Other runs" not in text


def test_recipes_name_experiments_that_exist_and_settings_that_work() -> None:
    for recipe in tomllib.loads((Path(own.__file__).parents[1] / "recipes.toml").read_text())["recipe"]:
        assert set(recipe["experiments"]) <= set(names())
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        known = {"convert_": sliceout.convert_, "Grow": sliceout.Grow, "model": model, "step": 0, "total": 10}
        exec(recipe["settings"], known)
        assert any(isinstance(m, sliceout.nn.Sliced) for m in model) == bool(recipe["settings"])


def test_parts_and_growth_are_rows_of_their_own_on_the_page() -> None:
    circular = {"scheme": "sliceout", "rate": 0.5, "sampling": "circular", "norm": "probabilistic"}
    records = [
        fake.run("cifar-10", "wrn-28-6", seed=seed, score=score, **{**circular, **more})
        for seed in (0, 1)
        for score, more in ((0.901, {}), (0.922, {"parts": 8}), (0.943, {"grow": GROWTH, "sampling": "prefix"}))
    ]
    records.append(fake.run("cifar-10", "wrn-28-6", "none", score=0.9, model_settings={"keep": 0.5}))
    records[1]["final"]["recalibrated"] = 0.931
    (plain, _), (text, after) = pages_of([records[0], records[3]]), pages_of(records)
    found = groups.group(reading.Run(r, "") for r in records)
    asked = {"data": "cifar-10", "model": "wrn-28-6", "scheme": "sliceout", "rate": 0.5}
    assert [groups.fits(g, asked) for g in found] == [True, False, False, False]  # the README asks so, too
    assert "| SliceOut, circular, 8 parts, rate 0.5 |" in after
    assert "| SliceOut, prefix, growing (rate 0.5, 0.25 from 50 %, 0 from 75 %) |" in after
    assert "| no dropout, narrow 0.5 |" in after
    assert "93.10 (n=1)" in after
    assert "each has a slice of its own" in after
    assert "so that units join" in after
    assert "| SliceOut, circular, rate 0.5 |" not in after
    # the paper's tables hold what they held without these runs
    cells = [part.partition("## Wide ResNets")[2].partition("## Time")[0] for part in (plain, text)]
    assert "ours" in cells[0]
    assert cells[0] == cells[1]

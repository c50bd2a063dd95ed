"""Experiments are data with the paper's numbers; a mistake in a file is named, and scaling is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from sliceout.cli import UserError
from sliceout_lab import experiment, scheme
from sliceout_lab.models import build
from sliceout_lab.train.rates import learning_rate

ALL = experiment.names()


@pytest.mark.parametrize("name", ALL)
def test_every_file_makes_jobs(name: str) -> None:
    one = experiment.load(name)
    jobs = [experiment.job(one, scheme, device=d) for scheme in one.schemes() for d in ("cpu", "cuda")]
    assert len({job.id for job in jobs}) == len(jobs)
    assert all(job.scaled == {} for job in jobs)
    learning_rate(one.optimizer["lr"], one.schedule, one.tail)(0.5)
    if one.quick:
        small, scale, differ = experiment.quickened(one)
        assert all(experiment.job(small, s, scaled=differ, **scale).scaled for s in small.schemes())


@pytest.mark.parametrize(
    ("name", "epochs", "batch", "lr", "optimizer"),
    [
        ("mnist", 100, 256, 1e-4, "adam"),
        ("fashion-mnist", 100, 256, 1e-4, "adam"),
        ("cifar100-wrn-52-14", 200, 128, 0.1, "sgd"),
        ("imagenet-efficientnet-b3", 350, 512, 0.032, "rmsprop"),
        ("cifar10-efficientnet-b0", 200, 128, 0.02, "sgd"),
        ("lm1b-lm-1024", 32, 256, 4.941e-4, "adam"),
    ],
)
def test_the_papers_hyperparameters(name: str, epochs: int, batch: int, lr: float, optimizer: str) -> None:
    one = experiment.load(name)
    assert (one.epochs, one.batch, one.optimizer["lr"], one.optimizer["name"]) == (epochs, batch, lr, optimizer)


def test_the_papers_schedules() -> None:
    def rates(name: str, *progress: float) -> list[float]:
        one = experiment.load(name)
        rate = learning_rate(one.optimizer["lr"], one.schedule, one.tail)
        return [rate(p) for p in progress]

    assert rates("cifar10-wrn-28-6", 0, 59 / 200, 60 / 200, 120 / 200, 160 / 200) == pytest.approx(
        [0.1, 0.1, 0.02, 0.004, 0.0008]
    )
    assert rates("cifar10-efficientnet-b0", 0, 1 / 200, 10 / 200) == pytest.approx([0.02, 0.0197, 0.02 * 0.985**10])
    assert rates("imagenet-efficientnet-b0", 0, 2.3 / 350, 2.4 / 350, 0.95) == pytest.approx(
        [0.032, 0.032, 0.03104, 1e-4]
    )
    at = [1000 / 240_000, 4000 / 240_000, 16_000 / 240_000]
    noam = [1024**-0.5 * min(s**-0.5, s * 4000**-1.5) for s in (1000, 4000, 16_000)]
    assert rates("lm1b-lm-1024", *at) == pytest.approx(noam, rel=1e-3)
    for name, steps in (("lm1b-lm-1024", 240_000), ("lm1b-lm-2048", 300_000)):
        one = experiment.load(name)
        assert (one.epochs * one.epoch_steps, one.tail) == (steps, 0.01)


def test_the_rows_of_the_proof() -> None:
    fashion = [scheme.label(scheme.whole(e.scheme, s)) for e in [experiment.load("fashion-mnist")] for s in e.schemes()]
    kinds = (
        "standard {}",
        "controlled {}",
        "sliceout {} window flow",
        "sliceout {} window probabilistic",
        "sliceout {} circular",
    )
    assert fashion == ["none"] + [k.format(r) for k in kinds[:2] for r in (0.1, 0.3, 0.5, 0.7)] + [
        k.format(r) for k in kinds[2:] for r in (0.1, 0.3, 0.5, 0.7)
    ]
    wrn = experiment.load("cifar10-wrn-28-6")
    assert [scheme.label(scheme.whole(wrn.scheme, s)) for s in wrn.schemes()] == [
        "none", "standard 0.3", "sliceout 0.5 window probabilistic", "sliceout 0.5 circular",
    ]  # fmt: skip
    assert experiment.load("fashion-mnist").seeds == (0, 1)


def test_the_networks_are_the_papers() -> None:
    sizes = {experiment.load(n).model for n in ALL if n.startswith("cifar100-wrn")}
    assert sizes == {"wrn-28-6", "wrn-34-8", "wrn-40-10", "wrn-46-12", "wrn-52-14"}
    assert build("wrn-28-6").head.in_features == 384


def test_stand_ins_say_so() -> None:
    for name in ALL:
        one = experiment.load(name)
        assert bool(one.stands_in) == (one.table == "stand-ins"), name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("epoch = 3", "unknown key epoch: did you mean epochs"),
        ("[optimizer]\nmomentun = 0.9", "unknown key optimizer.momentun: did you mean momentum"),
        ("[[rows]]\nschem = 'none'", "unknown key rows\\[0\\].schem: did you mean scheme"),
        ("[quick]\nepoch = 3", "unknown key quick.epoch"),
        ("epochs = 'many'", "epochs = 'many': expected int"),
        ("tail = true", "tail = True: expected int or float"),
        ("optimizer = 3", "optimizer = 3: expected a table"),
        ("seeds = [0, 'one']", "seeds\\[1\\] = 'one': expected int"),
        ("[[rows]]\nrate = ['high']", "rows\\[0\\].rate\\[0\\] = 'high': expected int or float"),
        ("[quick.optimizer]\nlr = 'low'", "quick.optimizer.lr = 'low': expected int or float"),
        ("mode = 'fast'", "mode = 'fast': expected one of eager, compiled, captured"),
        ("extends = 'nothing'", "extends 'nothing', which is no experiment"),
        ("epochs = ", "not valid TOML"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, line: str, message: str) -> None:
    lines = [] if line.startswith("extends") else [f"extends = '{experiment.FOLDER / 'mnist'}'"]
    (tmp_path / "mine.toml").write_text("\n".join([*lines, line]))
    with pytest.raises(UserError, match=message):
        experiment.load(str(tmp_path / "mine.toml"))


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        f"extends = '{experiment.FOLDER / 'mnist'}'\nepochs = 3\n[optimizer]\nlr = 1e-2"
    )
    mine = experiment.load(str(tmp_path / "mine.toml"))
    assert (mine.name, mine.epochs, mine.optimizer["lr"], mine.optimizer["name"]) == ("mine", 3, 0.01, "adam")


def test_unknown_names_are_answered_with_near_ones() -> None:
    with pytest.raises(UserError, match="did you mean fashion-mnist"):
        experiment.load("fashon-mnist")
    with pytest.raises(UserError, match="did you mean wide-resnet-sizes"):
        experiment.find("wide-resnet-size")
    assert len(experiment.find("wide-resnet-sizes")) == 10


def test_scaling_is_recorded_and_changes_the_id() -> None:
    fashion, wrn, lm = (experiment.load(n) for n in ("fashion-mnist", "cifar10-wrn-28-6", "lm1b-lm-1024"))
    small = experiment.job(fashion, epochs=3, width=256, subset=8000, batch=64)
    assert small.scaled == {"width": [2048, 256], "epochs": [100, 3], "batch": [256, 64], "subset": [60000, 8000]}
    assert small.config["model_settings"] == {"hidden": [256, 256, 256]}
    assert small.id != experiment.job(fashion).id
    assert experiment.job(fashion, epochs=100, width=2048, subset=60000).scaled == {}
    assert experiment.job(wrn, width=2).config["model"] == "wrn-28-2"
    assert experiment.job(lm, width=64).scaled == {"width": [1024, 64], "model": ["lm-1024", "lm-64"]}
    with pytest.raises(UserError, match="fixed widths"):
        experiment.job(experiment.load("cifar10-efficientnet-b0"), width=3)
    with pytest.raises(UserError, match="--epochs 0: expected at least 1"):
        experiment.job(fashion, epochs=0)


def test_equal_runs_have_equal_ids() -> None:
    fashion = experiment.load("fashion-mnist")

    def run(**scheme: object) -> str:
        return experiment.job(fashion, scheme).id

    assert run(scheme="none", rate=0.3) == run(scheme="none")
    assert run(scheme="standard", rate=0.3, sampling="window") == run(scheme="standard", rate=0.3)
    assert run(sampling="circular", norm="flow") == run(sampling="circular")
    assert run(sampling="window", norm="flow") != run(sampling="window", norm="probabilistic")
    assert experiment.job(fashion, seed=1).id != experiment.job(fashion, seed=0).id


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scheme": "slceout"}, "did you mean sliceout"),
        ({"rate": 1.0}, "--rate 1.0: expected 0 < rate < 1"),
        ({"sampling": "round"}, "--sampling round: expected circular or window"),
        ({"norm": "l2"}, "--norm l2"),
    ],
)
def test_impossible_schemes(given: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        experiment.job(experiment.load("fashion-mnist"), given)


def test_modes_and_precisions_fit_the_device() -> None:
    fashion, wrn = experiment.load("fashion-mnist"), experiment.load("cifar10-wrn-28-6")
    assert experiment.job(fashion, device="cpu").config["mode"] == "eager"
    assert experiment.job(fashion, device="cpu").config["precision"] == "fp32"
    assert experiment.job(fashion, device="cuda").config["mode"] == "captured"
    assert experiment.job(fashion, device="cuda", world=2).config["mode"] == "compiled"
    assert experiment.job(wrn, device="cuda").config["mode"] == "compiled"
    assert experiment.job(wrn, device="cuda").config["precision"] == "bf16"
    with pytest.raises(UserError, match="CUDA graphs need a GPU"):
        experiment.job(fashion, mode="captured", device="cpu")
    with pytest.raises(UserError, match="--precision fp16"):
        experiment.job(fashion, precision="fp16")

"""Made-up results in the form of real ones, to try every table and picture of the report. None of it was measured."""

from __future__ import annotations

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

GPU = "FAKE GPU (made up by tests/fake_results.py)"
MLP = {"none": 90.4, "standard": 90.9, "controlled": 90.7, "flow": 90.6, "probabilistic": 90.5, "circular": 91.0}


def run(
    data: str,
    model: str,
    scheme: str,
    rate: float = 0.0,
    *,
    sampling: str | None = None,
    norm: str | None = None,
    seed: int = 0,
    score: float = 0.9,
    epochs: int = 10,
    concurrent: int = 1,
    ms: float = 1.0,
    scaled: dict[str, list[Any]] | None = None,
    perplexity: bool = False,
    **config: Any,
) -> dict[str, Any]:
    """One record of a training run."""
    made = {
        "data": data, "model": model, "scheme": scheme, "rate": rate, "sampling": sampling, "norm": norm, "batch": 128,
        "epochs": epochs, "precision": "bf16", "mode": "compiled", "grads": "dense", **config,
    }  # fmt: skip
    digest = hashlib.sha1(json.dumps([made, seed], sort_keys=True).encode()).hexdigest()[:12]
    noise = random.Random(digest)
    metric = "perplexity" if perplexity else "accuracy"
    log = []
    for epoch in range(1, epochs + 1):
        rest = math.exp(-5 * epoch / epochs)
        value = score * (1 + 1.2 * rest) if perplexity else score * (1 - 0.15 * rest) + noise.gauss(0, 0.001)
        log.append(
            {
                "epoch": epoch,
                "loss": 2 * rest + 0.1,
                "test_loss": 2 * rest + 0.2,
                metric: value,
                "lr": 1e-4,
                "seconds": ms / 10,
                "ms_per_step": ms,
            }
        )
    scores = [e[metric] for e in log]
    best = min(scores) if perplexity else max(scores)
    return {
        "kind": "train", "schema": 1, "id": digest, "experiment": f"{data}-{model}", "table": data, "seed": seed,
        "config": made, "scaled": scaled or {}, "revision": "0" * 40, "dirty": False,
        "machine": {"device": GPU, "torch": "2.11"}, "steps_per_epoch": 390, "parameters": 1000000, "epochs": log,
        "final": {metric: scores[-1], "best": best, "at_epoch": scores.index(best) + 1},
        "seconds": ms * 0.39 * epochs, "seconds_per_epoch": ms * 0.39, "ms_per_step": ms,
        "ms_spread": [0.98 * ms, 1.03 * ms],
        "max_allocated": 4_000_000_000, "max_reserved": 5_000_000_000,
        "energy_joules": None if concurrent > 1 else 390 * epochs * ms * 0.5,
        "concurrent": concurrent, "resumed": 0,
    }  # fmt: skip


def slices() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("flow", {"scheme": "sliceout", "sampling": "window", "norm": "flow"}),
        ("probabilistic", {"scheme": "sliceout", "sampling": "window", "norm": "probabilistic"}),
        ("circular", {"scheme": "sliceout", "sampling": "circular", "norm": "probabilistic"}),
    ]


def fashion(seeds: int = 2, concurrent: int = 24, epochs: int = 100) -> list[dict[str, Any]]:
    """FashionMNIST as the issue asks for it: four rates, five schemes and none."""
    out = []
    for seed in range(seeds):
        shared: dict[str, Any] = {
            "seed": seed,
            "concurrent": concurrent,
            "epochs": epochs,
            "batch": 256,
            "precision": "tf32",
            "mode": "captured",
        }
        out.append(run("fashion-mnist", "mlp", "none", score=MLP["none"] / 100, **shared))
        for rate in (0.1, 0.3, 0.5, 0.7):
            fall = 0.4 * max(rate - 0.3, 0) / 100
            for name, scheme in [
                ("standard", {"scheme": "standard"}),
                ("controlled", {"scheme": "controlled"}),
                *slices(),
            ]:
                score = MLP[name] / 100 - fall + random.Random(f"{name}{rate}{seed}").gauss(0, 0.0004)
                out.append(run("fashion-mnist", "mlp", rate=rate, score=score, **scheme, **shared))
    return out


def cifar() -> list[dict[str, Any]]:
    """Wide ResNets on CIFAR-10, scaled down to 30 epochs, three sizes; one seed but for the smallest."""
    out = []
    for model, ms, bonus in (("wrn-28-6", 5.0, 0.0), ("wrn-34-8", 10.0, 0.002), ("wrn-40-10", 19.0, 0.003)):
        for seed in range(2 if model == "wrn-28-6" else 1):
            shared: dict[str, Any] = {"seed": seed, "epochs": 30, "scaled": {"epochs": [200, 30]}}
            rows = [
                ("none", 0.0, {"scheme": "none"}, 0.945, 0.99),
                ("standard", 0.3, {"scheme": "standard"}, 0.948, 1.0),
            ]
            rows += [(n, 0.5, s, 0.946, 0.72) for n, s in slices()[1:]]
            for name, rate, scheme, score, time in rows:
                noise = random.Random(f"{name}{model}{seed}").gauss(0, 0.001)
                out.append(
                    run("cifar-10", model, rate=rate, score=score + bonus + noise, ms=ms * time, **scheme, **shared)
                )
    return out


def language() -> list[dict[str, Any]]:
    """A language model at the paper's size on the paper's data, and one on other data."""
    out = []
    for data, top, epochs in (("lm1b", 31.0, 30), ("english-books", 60.0, 12)):
        for scheme, rate, factor, extra in (
            ("none", 0.0, 1.0, {}),
            ("standard", 0.3, 1.3, {}),
            ("sliceout", 0.3, 1.05, slices()[1][1]),
            ("sliceout", 0.3, 1.04, slices()[2][1]),
        ):
            rest = {k: v for k, v in extra.items() if k != "scheme"}
            made = run(
                data,
                "lm-1024",
                scheme,
                rate,
                score=top * factor,
                epochs=epochs,
                perplexity=True,
                ms=26.0 if extra else 31.0,
                **rest,
            )
            made["steps_per_epoch"] = 8000 if data == "lm1b" else 500
            out.append(made)
    return out


def case(
    model: str,
    scheme: str,
    rate: float,
    ms: float,
    *,
    batch: int = 128,
    mode: str = "compiled",
    precision: str = "bf16",
    reserved: float = 1e10,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model": model, "batch": batch, "scheme": scheme, "rate": rate, "sampling": "circular",
        "grads": "dense", "mode": mode, "precision": precision, "align": None, "ms": ms,
        "ms_p10": 0.99 * ms, "ms_p90": 1.02 * ms, "repeats": int(4000 / max(ms, 0.1)),
        "max_allocated": int(0.9 * reserved), "max_reserved": int(reserved), "flops": 10**12,
        "energy_joules_per_step": 0.6 * ms, "error": None, **more,
    }  # fmt: skip


def bench() -> dict[str, Any]:
    """A benchmark of every family, with a failed case, a slow eager mode and matched memory."""
    cases = []
    for rate in (0.1, 0.3, 0.5, 0.7, 0.9):
        rest = {"batch": 256, "mode": "captured", "precision": "tf32"}
        cases.append(
            case(
                "mlp",
                "sliceout",
                rate,
                0.31 * (1 - 0.75 * rate),
                reserved=3e8 * (1 - 0.5 * rate),
                grads="compact",
                **rest,
            )
        )
        cases.append(case("mlp", "floor", rate, 0.30 * (1 - 0.78 * rate), reserved=3e8 * (1 - 0.6 * rate), **rest))
        cases.append(case("mlp", "standard", rate, 0.31, reserved=3e8, **rest))
        cases.append(case("mlp", "controlled", rate, 0.40 * (1 - 0.5 * rate), reserved=3.1e8, **rest))
    for model, ms in (
        ("wrn-28-6", 5),
        ("wrn-28-10", 11.5),
        ("wrn-34-8", 10),
        ("wrn-40-10", 19.7),
        ("wrn-46-12", 28),
        ("wrn-52-14", 41),
    ):
        for rate in (0.1, 0.2, 0.3, 0.4, 0.5) if model == "wrn-40-10" else (0.5,):
            cases.append(case(model, "sliceout", rate, ms * (1 - 0.6 * rate), reserved=1e10 * (1 - 0.6 * rate)))
            cases.append(case(model, "floor", rate, ms * (1 - 0.63 * rate), reserved=1e10 * (1 - 0.7 * rate)))
        cases.append(case(model, "standard", 0.5, ms))
    cases.append(case("wrn-28-10", "sliceout", 0.5, 23.4, mode="eager"))
    cases.append(case("wrn-28-10", "standard", 0.5, 13.8, mode="eager"))
    cases.append({**case("wrn-28-10", "controlled", 0.5, 0.0), "ms": None, "error": "out of memory"})
    for i in range(4):
        ms = 26.7 * (1 + 0.4 * i)
        cases += [
            case(f"efficientnet-b{i}", "none", 0.0, ms, mode="captured"),
            case(f"efficientnet-b{i}", "sliceout", 0.5, 0.84 * ms, mode="captured", stages=3),
        ]
    for model, ms in (("lm-1024", 30.8), ("lm-2048", 90.8)):
        cases += [
            case(model, "standard", 0.3, ms, batch=256),
            case(model, "sliceout", 0.3, 0.85 * ms, batch=256, energy_joules_per_step=None),
        ]
    matched = []
    for model, batch, more, gain in (
        ("wrn-28-10", 128, 192, 0.66),
        ("lm-2048", 256, 320, 0.8),
        ("mlp", 256, 272, 1.05),
    ):
        base = {
            "batch": batch,
            "ms": 10.0,
            "ms_p10": 9.9,
            "ms_p90": 10.2,
            "repeats": 300,
            "max_reserved": 10**10,
            "max_allocated": 9 * 10**9,
            "energy_joules_per_step": 6.0,
        }
        ours = {
            **base,
            "batch": more,
            "ms": 10.0 * more / batch * gain,
            "max_reserved": int(0.98e10),
            "energy_joules_per_step": None if model == "mlp" else 6.0 * more / batch * gain * 1.04,
        }
        matched.append(
            {
                "model": model,
                "mode": "compiled",
                "precision": "bf16",
                "rate": 0.5,
                "sampling": "circular",
                "grads": "dense",
                "standard": base,
                "sliceout": ours,
                "tried": {},
                "error": None,
            }
        )
    return {
        "kind": "bench",
        "schema": 1,
        "machine": {"device": GPU, "torch": "2.11"},
        "revision": "0" * 40,
        "command": "fake",
        "cases": cases,
        "match_memory": matched,
    }


def write(folder: Path, records: list[dict[str, Any]] | None = None, benches: dict[str, Any] | None = None) -> Path:
    """Lay them out like the repository's ``results``."""
    (folder / "train").mkdir(parents=True, exist_ok=True)
    (folder / "bench").mkdir(parents=True, exist_ok=True)
    lines = [*fashion(), *cifar(), *language()] if records is None else records
    for number, record in enumerate(lines):
        (folder / "train" / f"{number:04d}.json").write_text(json.dumps(record))
    (folder / "bench" / "fake.json").write_text(json.dumps(bench() if benches is None else benches))
    return folder

"""Small training runs for tests: seconds on one core, the real loop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sliceout_lab import experiment
from sliceout_lab.experiment import Job
from sliceout_lab.train import Settings, run


def mlp_job(scheme: str = "sliceout", *, epochs: int = 2, seed: int = 0, tail: float = 0.0, **changes: Any) -> Job:
    """The paper's FashionMNIST network at width 64 on 1,024 of the images that come with the package."""
    declared = experiment.load("fashion-mnist")
    optimizer = {**declared.optimizer, "lr": changes.pop("lr", 1e-3)}
    schedule = changes.pop("schedule", declared.schedule)
    declared = dataclasses.replace(
        declared, data="fashion-mnist-8k", samples=6000, optimizer=optimizer, schedule=schedule, tail=tail
    )
    return experiment.job(declared, {"scheme": scheme, **changes}, seed=seed, epochs=epochs, width=64, subset=1024)


def settings(out: Path, **changes: Any) -> Settings:
    return Settings(out, quiet=True, checkpoint_seconds=0.0, **changes)


def train(job: Job, out: Path, **changes: Any) -> dict[str, Any]:
    return run(job, settings(out, **changes))

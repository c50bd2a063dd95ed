"""The demo: one network of the paper trained side by side without dropout, with dropout and with SliceOut.

The schemes take turns step by step, and a different one goes first each time: whatever else the machine is doing
disturbs all of them alike, so their times can be compared. All start from the same weights and see the same batches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sliceout import Slice, convert_
from sliceout.cli import UserError, machine, memory

from .data import Images
from .models.mlp import mlp

NONE, DROPOUT, SLICEOUT = "no dropout", "dropout", "SliceOut"


@dataclass(frozen=True)
class Settings:
    """What is trained, and how."""

    rate: float = 0.5
    epochs: int = 12
    seed: int = 0
    hidden: tuple[int, ...] = (2048, 2048, 2048)
    batch: int = 256
    lr: float = 3e-4  # the paper's 1e-4 is for 100 epochs of the whole data, 80 times the steps of this demo
    device: str = "cpu"

    def check(self) -> None:
        """Raises:
        UserError: naming the value, the rule and the way out.
        """
        if not 0 < self.rate < 1:
            raise UserError(f"--rate {self.rate}: expected 0 < rate < 1")
        for width in self.hidden:
            try:
                kept = Slice(width, self.rate).width
            except ValueError as error:  # none is kept
                raise UserError(f"--rate {self.rate}: {error}") from error
            if kept == width:
                raise UserError(f"--rate {self.rate}: keeps all {width} units: choose a higher rate")
        if self.epochs < 1:
            raise UserError(f"--epochs {self.epochs}: expected at least 1")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed {self.seed}: expected 0 <= seed < 2**32")


@dataclass
class Scheme:
    """One of the networks in training, and what has been measured of it."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: list[float] = field(default_factory=list)
    """Seconds of every training step."""
    epoch: int = 0
    loss: float = float("nan")
    accuracy: float = float("nan")
    curve: list[tuple[float, float]] = field(default_factory=list)
    """(seconds of training, test accuracy) after each epoch."""
    peak: int = 0
    """Bytes that a step needs at its peak."""

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    @property
    def milliseconds(self) -> float:
        """The median training step."""
        return 1000 * statistics.median(self.steps) if self.steps else float("nan")

    def accuracy_after(self, seconds: float) -> float:
        """Test accuracy after this much training, read off the line between two epochs; NaN before the first."""
        for (t0, a0), (t1, a1) in pairwise(self.curve):
            if t0 <= seconds <= t1:
                return a0 + (a1 - a0) * (seconds - t0) / (t1 - t0)
        return self.accuracy if seconds >= self.curve[-1][0] else float("nan")


def schemes(settings: Settings, widths: Sequence[int]) -> list[Scheme]:
    """The three contenders, networks of these widths from input to output with equal weights."""
    made = []
    for name in (NONE, DROPOUT, SLICEOUT):
        torch.manual_seed(settings.seed)
        model = mlp(widths, dropout=0.0 if name == NONE else settings.rate)
        if name == SLICEOUT:
            convert_(model, settings.rate, seed=settings.seed)  # the very network with dropout, by one call
        model.to(settings.device)
        made.append(Scheme(name, model, torch.optim.Adam(model.parameters(), lr=settings.lr)))
    return made


def train(contenders: Sequence[Scheme], data: Images, settings: Settings) -> Iterator[Scheme]:
    """Train all, taking turns; yields the scheme that has just done a step or finished an epoch."""
    device = torch.device(settings.device)
    x, test = (images.to(device).flatten(1).float() / 255 for images in (data.train, data.test))
    y, test_labels = (labels.to(device).long() for labels in (data.train_labels, data.test_labels))
    for scheme in contenders:
        _warm_up(scheme, x[: settings.batch], y[: settings.batch])
    turns = 0
    for epoch in range(settings.epochs):
        for scheme in contenders:
            scheme.epoch = epoch + 1
            scheme.model.train()
        for rows in batches(len(x), settings.batch, settings.seed, epoch):
            inputs, targets = x[rows.to(device)], y[rows.to(device)]
            first, turns = turns % len(contenders), turns + 1
            for scheme in [*contenders[first:], *contenders[:first]]:
                seconds, loss = _timed(scheme, inputs, targets)
                scheme.steps.append(seconds)
                scheme.loss = float(loss)
                yield scheme
        for scheme in contenders:
            scheme.accuracy = accuracy(scheme.model, test, test_labels)
            scheme.curve.append((sum(scheme.steps), scheme.accuracy))
            yield scheme
    for scheme in contenders:  # one step more, which no longer counts: watched allocations make it slow
        scheme.model.train()
        one = (x[: settings.batch], y[: settings.batch])
        scheme.peak = memory.peak_of_step(scheme.model, scheme.optimizer, lambda s=scheme, b=one: s.step(*b))  # type: ignore[misc]


def steps_per_epoch(images: int, batch: int) -> int:
    """Full batches only, so that every step has the same size; with fewer images than that, all of them."""
    return max(1, images // batch)


def batches(images: int, batch: int, seed: int, epoch: int) -> Iterator[Tensor]:
    """Shuffled batches of indices, the same for every scheme."""
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
    for i in range(steps_per_epoch(images, batch)):
        yield order[i * batch : (i + 1) * batch]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Fraction of right answers of the full network."""
    model.eval()
    right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(1000), y.split(1000), strict=True))
    return right / len(x)


def summary(contenders: Sequence[Scheme], data: Images, settings: Settings) -> dict[str, Any]:
    """Everything that was measured, ready for a JSON file."""
    return {
        "data": data.name,
        "images": {"train": len(data.train), "test": len(data.test)},
        "settings": asdict(settings),
        "machine": machine.describe(torch.device(settings.device)),
        "schemes": {
            s.name: {
                "ms_per_step": s.milliseconds,
                "steps": len(s.steps),
                "peak_bytes_of_step": s.peak,
                "test_accuracy": s.accuracy,
                "curve": s.curve,
            }
            for s in contenders
        },
    }


def _timed(scheme: Scheme, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    _wait_for(x.device)
    start = time.perf_counter()
    loss = scheme.step(x, y)
    _wait_for(x.device)
    return time.perf_counter() - start, loss


def _warm_up(scheme: Scheme, x: Tensor, y: Tensor) -> None:
    """First calls pay for set-up (kernels compiled, memory obtained). No optimizer step: the weights stay equal."""
    for _ in range(2):
        F.cross_entropy(scheme.model(x), y).backward()  # type: ignore[no-untyped-call]
    scheme.optimizer.zero_grad(set_to_none=True)
    _wait_for(x.device)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""What a user sees while a run trains: a live line in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor

REFRESH = 1.0  # seconds between two looks at the loss in a terminal
LINES = 5.0  # seconds between two lines elsewhere


class Show:
    """Progress of one run; it never makes the training wait for the device."""

    def __init__(self, title: str, total: int, epochs: int, console: Console, quiet: bool = False) -> None:
        self.title, self.total, self.epochs, self.console, self.quiet = title, total, epochs, console, quiet
        self.live = console.is_terminal and not quiet
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[status]}"),
            TextColumn("{task.fields[left]}", style="dim"), console=console, refresh_per_second=4,
            disable=not self.live,
        )  # fmt: skip
        self.task = self.bar.add_task(title, total=total, status="", left="")
        self.score, self.began, self.first = "", time.perf_counter(), 0
        self._looked = self._printed = 0.0
        self._copy: Any = None

    def __enter__(self) -> Show:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def say(self, message: str) -> None:
        if not self.quiet:
            self.console.print(message, soft_wrap=True, highlight=False, markup=False)

    def start(self, step: int) -> None:
        """Count from here: what lay before was trained earlier, or is set-up."""
        self.began, self.first = time.perf_counter(), step
        self.bar.update(self.task, completed=step)

    def step(self, step: int, in_epoch: int, losses: Tensor) -> None:
        """A step has been issued; ``losses`` is the sum of the losses of this epoch on the device."""
        if not self.live:
            return
        now = time.perf_counter()
        if now - self._looked < REFRESH:
            return
        self._looked = now
        loss = self._loss(losses, in_epoch)
        shown = f"epoch {step * self.epochs // self.total + 1}/{self.epochs} loss {loss} {self.score}"
        pace = 1000 * (now - self.began) / max(1, step - self.first)
        self.bar.update(
            self.task, completed=step, status=f"{shown}{pace:6.2f} ms/step{_memory(losses)}", left=self._left(step)
        )

    def epoch(self, record: dict[str, Any], step: int) -> None:
        """An epoch is done."""
        score = f"acc {record['accuracy']:.2%}" if "accuracy" in record else f"perplexity {record['perplexity']:.2f}"
        self.score = f"{score} "
        now, last = time.perf_counter(), record["epoch"] == self.epochs
        text = f"epoch {record['epoch']}/{self.epochs} loss {record['loss']:.4f} {score}"
        text += f" {record['ms_per_step']:.3g} ms/step"
        self.bar.update(self.task, completed=step, status=text, left=self._left(step))
        if not self.live and (last or now - self._printed >= LINES):
            self._printed = now
            self.say(f"{self.title}  {text}  {self._left(step)}")

    def _loss(self, losses: Tensor, count: int) -> str:
        """The mean loss as of a moment ago: asking for it now would wait for the device."""
        if losses.device.type != "cuda":
            return f"{float(losses) / max(1, count):.4f}"
        text = "-"
        if self._copy is not None and self._copy[2].query():
            text = f"{float(self._copy[0]) / max(1, self._copy[1]):.4f}"
        host = torch.empty((), pin_memory=True)
        host.copy_(losses, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copy = host, count, event
        return text

    def _left(self, step: int) -> str:
        if step <= self.first:
            return ""
        pace = (time.perf_counter() - self.began) / (step - self.first)
        return f"{timedelta(seconds=round(pace * (self.total - step)))} left"


def _memory(losses: Tensor) -> str:
    if losses.device.type != "cuda":
        return ""
    return f"  {torch.cuda.max_memory_reserved(losses.device) / 2**30:.2f} GiB"  # graphs count as reserved only

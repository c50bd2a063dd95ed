"""Times of training steps without ever waiting for the device: events on a GPU, the clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

SAMPLES = 20  # intervals of an epoch that are timed on a GPU


class Clock:
    """Seconds of an epoch's training, and milliseconds per step in parts of it. What lies in a pause does not count."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self.cuda = device.type == "cuda"
        self.every = max(1, steps // SAMPLES) if self.cuda else 1
        self.seconds = 0.0
        self._marks: list[tuple[int, Any]] = []
        self._times: list[float] = []
        self._steps = 0
        self.go()

    def go(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self._began = time.perf_counter()
        self._marks = [(self._steps, self._now())]

    def pause(self) -> None:
        """Stop, once the device has finished."""
        if self.cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self._began
        for (a, start), (b, end) in zip(self._marks, self._marks[1:], strict=False):
            took = start.elapsed_time(end) if self.cuda else 1000 * (end - start)
            self._times.append(took / (b - a))
        self._marks = []

    def tick(self) -> None:
        """A step has been issued."""
        self._steps += 1
        if self._steps % self.every == 0:
            self._marks.append((self._steps, self._now()))

    @property
    def milliseconds(self) -> list[float]:
        """Of a step, in each part; read it after a pause."""
        return self._times or ([1000 * self.seconds / self._steps] if self._steps else [])

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def spread(times: Sequence[float]) -> list[float]:
    """The 10th and the 90th percentile."""
    if len(times) < 2:
        return [times[0], times[0]] if times else []
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return [cuts[0], cuts[-1]]

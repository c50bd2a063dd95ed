"""A :class:`~sliceout.Schedule` for the Hugging Face Trainer: ``Trainer(..., callbacks=[ScheduleCallback()])``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ..schedule import Schedule, Tail


class ScheduleCallback(TrainerCallback):  # type: ignore[misc]
    """Moves a schedule on before every step.

    Args:
        make: builds the schedule from the model when training begins; by default the paper's tail of 10 %.
    """

    def __init__(self, make: Callable[[nn.Module], Schedule] = Tail) -> None:
        self.make = make
        self.schedule: Schedule | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.schedule = self.make(kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.schedule is not None
        self.schedule.step(state.global_step, state.max_steps)

"""A :class:`~sliceout.Schedule` for the Hugging Face Trainer: ``Trainer(..., callbacks=[ScheduleCallback()])``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from . import Scheduled


class ScheduleCallback(Scheduled, TrainerCallback):  # type: ignore[misc]
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.schedule = self.make(kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.schedule.step(state.global_step, state.max_steps)

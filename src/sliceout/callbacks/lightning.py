"""A :class:`~sliceout.Schedule` for Lightning: ``Trainer(callbacks=[ScheduleCallback(lambda m: Tail(m, 0.1))])``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from . import Scheduled


class ScheduleCallback(Scheduled, Callback):  # type: ignore[misc]
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.estimated_stepping_batches in (float("inf"), -1):
            raise ValueError("the schedule follows the progress of training: give the Trainer max_epochs or max_steps")
        self.schedule = self.make(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.schedule.step(trainer.global_step, trainer.estimated_stepping_batches)

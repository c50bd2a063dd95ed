"""A :class:`~sliceout.Schedule` for Lightning: ``Trainer(callbacks=[ScheduleCallback(lambda m: Tail(m, 0.1))])``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from torch import nn

from ..schedule import Schedule, Tail


class ScheduleCallback(Callback):  # type: ignore[misc]
    """Moves a schedule on before every batch.

    Args:
        make: builds the schedule from the LightningModule when training begins; by default the paper's tail of 10 %.
    """

    def __init__(self, make: Callable[[nn.Module], Schedule] = Tail) -> None:
        self.make = make
        self.schedule: Schedule | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.estimated_stepping_batches in (float("inf"), -1):
            raise ValueError("the schedule follows the progress of training: give the Trainer max_epochs or max_steps")
        self.schedule = self.make(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert self.schedule is not None
        self.schedule.step(trainer.global_step, trainer.estimated_stepping_batches)

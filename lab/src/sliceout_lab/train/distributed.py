"""Several processes as ``torchrun`` starts them; one process is a group of one."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sliceout.cli import UserError


class Ranks:
    """This process among ``world``. What is agreed on beside the training goes over gloo, so that no GPU waits."""

    CHECK_EVERY = 10  # steps between two agreements on whether to stop

    def __init__(self, device: str) -> None:
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device(device, local) if device == "cuda" else torch.device(device)
        self.control: Any = None
        if self.world > 1:
            if device == "cuda":
                if local >= torch.cuda.device_count():
                    raise UserError(f"process {local} of this machine has no GPU: it has {torch.cuda.device_count()}")
                torch.cuda.set_device(self.device)
            if not dist.is_initialized():
                dist.init_process_group("nccl" if device == "cuda" else "gloo")
            self.control = dist.new_group(backend="gloo")

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.world == 1:
            return model
        from torch.nn.parallel import DistributedDataParallel

        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)

    def mean(self, value: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(value)
            value /= self.world
        return value

    def highest(self, number: int, step: int = 0) -> int:
        """The highest of all processes' numbers, asked for every few steps; 0 in between."""
        if self.world == 1:
            return number
        if step % self.CHECK_EVERY:
            return 0
        value = torch.tensor(int(number))
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.control)
        return int(value)

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, in order."""
        if self.world == 1:
            return [value]
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value, group=self.control)
        return out

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

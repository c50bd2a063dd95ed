"""How a training step runs: eager, compiled (``torch.compile``) or captured (one CUDA graph, ``sliceout.capture``).

All three are the same function of a batch that returns the loss as a tensor on the device. Making a step may take a
minute of compiling; it leaves model, optimizer, draws and random numbers as they were: no run depends on it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from sliceout import stepping
from sliceout.capture import Snapshot, capture

Step = Callable[[Tensor, Tensor], Tensor]
WARM_UP = 4  # compiled steps run a few times before their graphs are recorded


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, of one class a sample or one token a position."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def autocast(precision: str, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def make_step(mode: str, model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor], precision: str) -> Step:
    """A training step for batches like ``batch``."""
    device = batch[0].device
    if mode == "captured":
        with _random_state_kept(device):
            dtype = torch.bfloat16 if precision == "bf16" else None
            return capture(model, loss_of, optimizer, batch, autocast=dtype)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model(x), y)

    compiled: Any = forward
    if mode == "compiled":
        compiled = torch.compile(forward, mode="reduce-overhead" if device.type == "cuda" else None)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with autocast(precision, device):
            loss = compiled(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if mode != "compiled":
        return step

    def replayed(x: Tensor, y: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return step(x, y)

    kept = Snapshot(model, optimizer)
    with _random_state_kept(device), stepping.paused():
        for _ in range(WARM_UP):
            replayed(*batch)
        optimizer.zero_grad(set_to_none=True)
        kept.restore()
    return replayed


@contextlib.contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    on_host = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)


def forget_unused(device: torch.device) -> None:
    """What testing, compiling and warming up took is not training's."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()

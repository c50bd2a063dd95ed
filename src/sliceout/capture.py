"""A whole training step as one CUDA graph: forward, backward and optimizer are replayed without Python.

For batches of one shape. The next draw follows every replay from the host: one small copy instead of twenty kernels
of integer arithmetic in the graph, and eager code sees the same slices. Learning rates live in device memory, so
schedulers and assignments to ``group["lr"]`` take effect at the next step, and so does a loaded optimizer state.

Widths are part of the graph. After a change of rate (a schedule, ``off_``, ``on_``) the next call captures again: the
memory of the graph before is freed first, and weights, statistics, optimizer state, draws, learning rates and the
random state are what they would be without it. A capture costs a few steps, so rates should change in few steps: the
logger ``sliceout.capture`` says which it is, and of how many if a schedule knows. All other settings of the optimizer
(such as weight decay) are part of the graph as well, and are not observed: capture again by hand.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from . import stepping
from .ops import prefetch, tables, without_views

logger = logging.getLogger(__name__)


def capture(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizer: Optimizer,
    example_batch: tuple[Tensor, ...],
    *,
    autocast: torch.dtype | None = None,
    warmup: int = 3,
) -> CapturedStep:
    """Capture ``loss_fn(model(*inputs), target)``, its backward and ``optimizer.step()`` for batches like the example.

    The model, its statistics, the optimizer and the random state are as before when this returns: what the warm-up did
    is undone. A change of rate later on is followed by another capture, at the first call that needs it.

    Args:
        model: a model on a GPU in training mode, eager or compiled in the default mode.
        loss_fn: of the output and the last tensor of the batch.
        optimizer: any ``torch.optim`` optimizer that takes no closure.
        example_batch: ``(*inputs, target)`` on the GPU; every later batch must have these shapes and dtypes.
        autocast: dtype of mixed precision, such as ``torch.bfloat16``.
        warmup: steps to run before capturing, so that libraries and allocators have reached their steady state.

    Returns:
        A function of a batch that returns the loss of that step, a tensor that the next call overwrites.

    Raises:
        ValueError: if the step cannot be captured, with what stands in the way.
    """
    _check(model, optimizer, example_batch)
    return CapturedStep(model, loss_fn, optimizer, example_batch, autocast, warmup)


class CapturedStep:
    """What :func:`capture` returns."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: Optimizer,
        batch: tuple[Tensor, ...],
        autocast: torch.dtype | None,
        warmup: int,
    ) -> None:
        self.batch = tuple(t.detach().clone() for t in batch)
        self.device = self.batch[0].device
        self.model, self.optimizer = model, optimizer  # the graph uses their memory
        self.loss_fn, self.autocast, self.warmup = loss_fn, autocast, warmup
        self.rates = [_to_device(group, self.device) for group in optimizer.param_groups]
        self.graph: Graph | None = None
        self.captures = 0
        self._capture()

    def _step(self) -> Tensor:
        """What a graph holds."""
        kind, dtype = self.device.type, self.autocast or torch.bfloat16
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(kind, dtype, enabled=self.autocast is not None, cache_enabled=False):
            loss = self.loss_fn(self.model(*self.batch[:-1]), self.batch[-1])
        free_workspaces()  # each thread has its own: the backward's may take the memory of the forward's
        self._release_slices()  # the backward holds those that it needs, and gradients may take their place
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _release_slices(self) -> None:
        for owner in self.owners:  # those that wait for somebody to take them once more
            prefetch.release(owner)

    def _clear(self) -> None:
        """Let go of gradients and of slices that wait: the next graph is to take their place."""
        self.optimizer.zero_grad(set_to_none=True)
        self._release_slices()
        free_workspaces()

    def _capture(self) -> None:
        """Make the graph for the widths of now, and leave everything that training changes as it is."""
        self.owners = stepping.owners_in(self.optimizer)  # loose slices are joined here, not when a backward needs them
        if self.captures:
            self.graph = None
            self._clear()
        kept = Snapshot(self.model, self.optimizer)

        def undo() -> None:
            kept.restore()
            self._clear()

        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self.graph = Graph(self._step, undo, self.device, self.warmup)
        free_workspaces()
        self.captures += 1
        self.state = _State(self.optimizer)
        self.live = [s for owner in stepping.owners_in(self.optimizer) for s in owner]
        self.seen, self.widths = self._settings(), self._widths()
        known = max((owner.caches.get("sets of widths", 0) for owner in self.owners), default=0)
        of = f" of {known}" if known >= self.captures else ""
        logger.info("captured graph %d%s: %s", self.captures, of, ", ".join(s.share for s in self.live) or "no slices")

    def _settings(self) -> list[Any]:
        """What widths depend on."""
        return [(s.on, s.rate, s.entered) for s in self.live]

    def _widths(self) -> list[Any]:
        """What the graph was made for: widths, and since when units are in, as optimizers count by that."""
        return [(s.kept_at(s.rate if s.on else 0.0), s.entered) for s in self.live]

    def __call__(self, *batch: Tensor) -> Tensor:
        """One training step on ``batch``."""
        if len(batch) != len(self.batch):
            raise ValueError(f"{len(batch)} tensors in the batch: the captured step takes {len(self.batch)}")
        for here, there in zip(self.batch, batch, strict=True):
            if here.shape != there.shape or here.dtype != there.dtype:
                raise ValueError(
                    f"a tensor of shape {tuple(there.shape)} and {there.dtype}: the step was captured for "
                    f"{tuple(here.shape)} and {here.dtype}. Drop the last smaller batch, or capture another step for it"
                )
            here.copy_(there, non_blocking=True)
        self.state.follow(self.optimizer)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if group["lr"] is not rate:  # somebody assigned a number
                rate.fill_(float(group["lr"]))
                group["lr"] = rate
        if (settings := self._settings()) != self.seen:
            self.seen = settings
            if self._widths() != self.widths:
                self._capture()
        assert self.graph is not None
        loss = self.graph.replay()
        for owner in dict.fromkeys(s.owner for s in self.live):  # they may have been joined since
            owner.draw_()
        return loss


class Graph:
    """A step as one CUDA graph.

    Args:
        step: what to capture.
        undo: takes back what the warm-up did, and makes room.
        device: where.
        warmup: how many steps to run first.
    """

    def __init__(self, step: Callable[[], Tensor], undo: Callable[[], None], device: torch.device, warmup: int) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        # The kernels that the graph will hold.
        with stepping.paused(), without_views(), torch.cuda.stream(side):
            for _ in range(max(warmup, 1)):
                with tables.into(tables.Arena(None, device)) as needed:
                    step()
        torch.cuda.current_stream().wait_stream(side)
        undo()
        self.graph = torch.cuda.CUDAGraph()  # entering it gives back what is free now
        self.tables = tables.Arena(2 * needed.used + 1024, device)
        with stepping.paused(), torch.cuda.graph(self.graph), tables.into(self.tables):
            self.loss = step()
        self.tables.fill()

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.loss


def _check(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, ...]) -> None:
    if not isinstance(batch, tuple) or len(batch) < 2:
        raise ValueError("example_batch: expected a tuple (*inputs, target)")
    if not torch.cuda.is_available() or any(t.device.type != "cuda" for t in (*batch, *model.parameters())):
        raise ValueError("a CUDA graph needs the model and the batch on a GPU")
    if not model.training:
        raise ValueError("the model is in eval mode: call model.train() first")
    if isinstance(optimizer, LBFGS):
        raise ValueError("LBFGS asks for the loss several times a step, which a graph cannot")
    if hasattr(model, "reducer"):
        raise ValueError("a DistributedDataParallel step cannot be captured here: its hooks run on the host")


def free_workspaces() -> bool:
    """Let go of what cuBLAS keeps for every thread and stream that ever multiplied: 32 MiB each on Hopper. If it can.

    Those of the warm-up would stay for good. Those made while capturing lie in the graph's own memory, which nobody
    else gets as long as the graph lives, so replays may go on using them; kept on, a later capture on the same stream
    would write into this graph's. torch's graphs of compiled code do it too (``cudagraph_trees.clear_cublas_manager``).
    """
    if not hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        return False
    torch._C._cuda_clearCublasWorkspaces()
    return True


def _to_device(group: dict[str, Any], device: torch.device) -> Tensor:
    """Let the kernels of a parameter group read the learning rate from device memory."""
    if "capturable" in group:
        group["capturable"] = True
    elif not group.get("fused", False):
        if "fused" not in group:
            raise ValueError("this optimizer has neither capturable nor fused kernels: a graph would freeze its rate")
        group["fused"], group["foreach"] = True, False
    rate = group["lr"]
    if not isinstance(rate, Tensor) or rate.device != device:
        rate = torch.tensor(float(rate), device=device)
    group["lr"] = rate
    return rate


class Snapshot:
    """The numbers that a training step changes, to be put back."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.tensors = [*model.parameters(), *model.buffers()]
        self.values = [t.detach().clone() for t in self.tensors]
        self.state = {p: {k: v.clone() for k, v in s.items()} for p, s in _state_tensors(optimizer).items()}
        device = self.tensors[0].device
        for s in optimizer.state.values():  # a count kept on the host cannot be part of a graph
            if isinstance(s.get("step"), Tensor):
                s["step"] = s["step"].to(device)

    @torch.no_grad()
    def restore(self) -> None:
        for t, value in zip(self.tensors, self.values, strict=True):
            t.copy_(value)
        now = _state_tensors(self.optimizer)
        for p, before in self.state.items():
            for key, value in now[p].items():
                value.zero_() if key not in before else value.copy_(before[key])
        new = [p for p in self.optimizer.state if p not in self.state]
        self.tensors, self.values, self.state = [], [], {}  # make room
        self._begin_again(new)

    def _begin_again(self, params: list[Tensor]) -> None:
        """Give these the state that the optimizer begins with, in memory that nothing of the warm-up shares."""
        state = self.optimizer.state
        forms = [
            (p, key, torch.empty_like(value, device="meta"), value.device)
            for p in params
            for key, value in state.pop(p).items()
            if isinstance(value, Tensor)
        ]
        torch.cuda.empty_cache()
        _initialise(self.optimizer)
        for p, key, form, device in forms:  # momentum that is a gradient at first: zeros are as good as none
            if key not in state[p]:
                state[p][key] = torch.zeros_like(form, device=device)


def _state_tensors(optimizer: Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    return {p: {k: v for k, v in s.items() if isinstance(v, Tensor)} for p, s in optimizer.state.items()}


def _initialise(optimizer: Optimizer) -> None:
    """Let an optimizer of torch make the state of parameters that have a gradient and no state yet."""
    init = getattr(optimizer, "_init_group", None)
    if init is not None:
        lists = len(inspect.signature(init).parameters) - 1
        for group in optimizer.param_groups:
            init(group, *([] for _ in range(lists)))


class _State:
    """The state that the graph updates. What ``load_state_dict`` puts in its place is copied into it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.seen = optimizer.state
        self.tensors = _state_tensors(optimizer)

    @torch.no_grad()
    def follow(self, optimizer: Optimizer) -> None:
        if optimizer.state is self.seen:
            return
        self.seen = optimizer.state
        _initialise(optimizer)  # where a run was loaded that had not begun
        for p, kept in self.tensors.items():
            now = optimizer.state[p]
            for name, tensor in kept.items():
                loaded = now.get(name)
                tensor.zero_() if loaded is None else tensor.copy_(loaded)
                now[name] = tensor

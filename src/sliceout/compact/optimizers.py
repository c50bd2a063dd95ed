"""Slice-only updates: a stock optimizer steps over the slice of a parameter and of its state, and over nothing else.

With ``grads="compact"`` a sliced parameter's gradient is a :class:`~sliceout.compact.gradient.SlicedGrad`. Before any
``optimizer.step()`` of torch's ``SGD``, ``Adam`` or ``AdamW``, those gradients are taken out of the optimizer's hands:
its own formula, with the settings of the parameter group, is applied to the slice. The state is the optimizer's own:
full size, under its own names, so its ``state_dict`` can be loaded without this library. Everything else in the
optimizer (dense gradients, other groups) is stepped by torch as ever, and any other optimizer gets dense gradients.

What it means, for each unit: a unit outside the slice keeps its weights *and* its state. No moment decays, no weight
decay and no momentum is applied while it is dropped ("lazy" updates, as ``torch.optim.SparseAdam`` does them).
Adam's bias correction counts the steps of the parameter, as its state does.

Dense gradients of parameters with units that are not in yet, or have come in since, are stepped over in the same way,
region by region (``growth``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import drawing
from ..ops import tables
from ..ops.placement import memory_format
from ..ops.prefetch import has_triton
from . import growth
from .gradient import Region, SlicedGrad, Work

_looked_at: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_set_aside: weakref.WeakKeyDictionary[Optimizer, list[tuple[Tensor, Tensor]]] = weakref.WeakKeyDictionary()


@functools.cache  # once
def observe() -> None:
    """Step over slices only, in all optimizers from now on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Step over slices at the place of the closure: after all other hooks, and once the gradients are made."""
    if torch.compiler.is_compiling():
        torch.compiler.disable(growth.warn)(optimizer)
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None and not any(_update_of(optimizer, group) for group in optimizer.param_groups):
        _step_over_slices(optimizer)  # makes gradients dense; a step of somebody's own may take no closure
        return None

    def then_step_over_slices() -> Any:
        loss = None if closure is None else closure()
        _step_over_slices(optimizer)
        return loss

    if len(args) > 1:
        return (args[0], then_step_over_slices, *args[2:]), kwargs
    return args, {**kwargs, "closure": then_step_over_slices}


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for p, grad in _set_aside.pop(optimizer, []):
        if p.grad is None:
            p.grad = grad


@torch.no_grad()
def _step_over_slices(optimizer: Optimizer) -> None:
    stepped: list[tuple[Tensor, Tensor]] = []
    _refuse_sharded(optimizer)
    growing = growth.look(optimizer)
    for group in optimizer.param_groups:
        update = _update_of(optimizer, group)
        work: dict[bool, Work] = {False: [], True: []}  # by whether gradients are whole
        for p in group["params"]:
            grown = None if p.grad is None else growing.get(id(p))
            if isinstance(p.grad, SlicedGrad) and not (
                update and p.grad.is_sliced() and (grown is None or grown.lies_at(p.grad))
            ):
                p.grad = p.grad.dense()
            parts: list[SlicedGrad | Region] = [p.grad] if isinstance(p.grad, SlicedGrad) else []
            if grown is not None and update and grown.fits(p):
                memory = max(map(float, group["betas"])) if "betas" in group else 0.0
                parts = grown.parts(p.grad, optimizer.state.get(p, {}), memory) or parts
            elif grown is not None:
                growth.warn(optimizer)
            if parts:
                work[parts[0].whole] += [(p, part) for part in parts]
                stepped.append((p, p.grad))
        for same in filter(None, work.values()):
            assert update is not None
            update(optimizer, group, same)
    for p, _ in stepped:
        p.grad = None  # torch's own step passes over it
    if stepped:
        _set_aside[optimizer] = stepped


def _refuse_sharded(optimizer: Optimizer) -> None:
    """Compact slices of parameters that FSDP2 has sharded: it adds up dense gradients, which would update all units."""
    if optimizer in _looked_at:
        return
    _looked_at.add(optimizer)
    sharded = {id(p) for group in optimizer.param_groups for p in group["params"] if hasattr(p, "full_tensor")}
    for layer in drawing.layers if sharded else ():
        if any(id(p) in sharded and taken.compact for p, taken in layer.taken()):  # type: ignore[operator]
            raise RuntimeError(
                f"grads='compact': a parameter of {type(layer).__name__} is sharded by FSDP2, whose gradients are "
                "dense, so that units outside the slice would be updated too. Convert with grads='dense', or use "
                "DistributedDataParallel"
            )


def _update_of(optimizer: Optimizer, group: dict[str, Any]) -> Callable[[Optimizer, dict[str, Any], Work], None] | None:
    """The slice-only update with these settings; ``None`` where only the dense one means what torch means."""
    if group.get("differentiable", False):
        return None
    if type(optimizer) is SGD:
        return _sgd if group["dampening"] == 0 else None  # its first step is undampened: whose first step?
    return _adam if type(optimizer) in (Adam, AdamW) else None


def _adam(optimizer: Optimizer, group: dict[str, Any], work: Work) -> None:
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    for p, _ in work:
        state = optimizer.state[p]
        if not state:  # as torch begins
            on_device = group["capturable"] or group["fused"]
            exact = not group["fused"] and torch.get_default_dtype() == torch.float64
            dtype = torch.float64 if exact else torch.float32
            state["step"] = torch.zeros((), dtype=dtype, device=p.device if on_device else "cpu")
            state.update({name: torch.zeros_like(p, memory_format=torch.preserve_format) for name in names})
    settings = {k: group[k] for k in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    betas, decoupled = group["betas"], type(optimizer) is AdamW or group["decoupled_weight_decay"]
    if _fused(optimizer, work, names, "adam", **settings, betas=betas, decoupled=decoupled) or _overflown(optimizer):
        return
    settings |= {"lr": float(group["lr"]), "beta1": float(betas[0]), "beta2": float(betas[1])}
    torch._foreach_add_(_each_once(optimizer.state[p]["step"] for p, _ in work), 1)
    update: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    for p, g in work:
        state = optimizer.state[p]
        step = [state["step"].to(p.device, torch.float32) - g.offset]
        for grad, param, average, square, *highest in _blocks(g, p, *(state[name] for name in names)):
            update([param], [_unscaled(optimizer, grad)], [average], [square], highest, step, **settings)


def _sgd(optimizer: Optimizer, group: dict[str, Any], work: Work) -> None:
    names = ["momentum_buffer"] if group["momentum"] else []
    for p, _ in work:
        for name in names:
            if optimizer.state[p].get(name) is None:
                optimizer.state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
    settings = {k: group[k] for k in ("lr", "weight_decay", "momentum", "nesterov", "maximize")}
    if _fused(optimizer, work, names, "sgd", **settings) or _overflown(optimizer):
        return
    settings |= {"lr": float(group["lr"]), "dampening": 0.0}
    for p, g in work:
        for grad, param, *buffer in _blocks(g, p, *(optimizer.state[p][name] for name in names)):
            torch._fused_sgd_([param], [_unscaled(optimizer, grad)], buffer, is_first_step=False, **settings)


def _each_once(steps: Iterable[Tensor]) -> list[Tensor]:
    """The step counts of some slices: those of one parameter share theirs."""
    return list({id(step): step for step in steps}.values())


_BLOCK = 1 << 17
"""Entries that are updated at a time on the CPU: few calls, and still in the cache when they are written back."""


def _blocks(g: SlicedGrad | Region, *fulls: Tensor) -> Iterator[list[Tensor]]:
    """The slice in pieces ``[grad, *fulls]`` as torch's fused kernels want them: contiguous, alike, to be changed.

    What does not lie side by side is copied, and written back when the next piece is asked for.
    """
    layout = memory_format(fulls[0])
    if not g.values().is_contiguous(memory_format=layout):
        g.replace_(g.values().contiguous(memory_format=layout))  # at once: transposing piece by piece is slow
    for same in g.rectangles(*fulls):
        entries = _BLOCK if same[0].is_cpu else same[0].numel()
        rows = max(1, entries // max(1, same[0].numel() // max(1, same[0].shape[0])))
        for pieces in zip(*(t.split(rows) for t in same), strict=True):
            like = layout if pieces[0].dim() == fulls[0].dim() else torch.contiguous_format
            block = [t.contiguous(memory_format=like) for t in pieces]
            yield block
            for piece, copy in zip(pieces[1:], block[1:], strict=True):
                if copy.data_ptr() != piece.data_ptr():
                    piece.copy_(copy)


def _overflown(optimizer: Optimizer) -> bool:
    """Whether ``GradScaler``, which leaves that to fused optimizers, wants the step to be skipped."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def _unscaled(optimizer: Optimizer, grad: Tensor) -> Tensor:
    scale = getattr(optimizer, "grad_scale", None)
    return grad if scale is None else grad / scale.to(grad.device)


def _fused(optimizer: Optimizer, work: Work, names: list[str], kernel: str, *, lr: Any, **settings: Any) -> bool:
    """Update all slices in one launch, reading starts from device memory; false where there is no kernel for that."""
    if not _on_gpu(p for p, _ in work) or not has_triton():
        return False
    from . import kernels

    slices = kernels.Slices(optimizer, work, names)
    device, updates = slices.device, slices.updates()
    if updates is None or any(isinstance(b, Tensor) for b in settings.get("betas", ())) or not tables.possible(device):
        if tables.capturing(device):
            raise RuntimeError(
                "this optimizer step cannot be captured with compact gradients or units that enter. "
                "Use sliceout.capture with 32 or 16 bit parameters, or grads='dense'"
            )
        return False
    lr = lr.to(device, torch.float32) if isinstance(lr, Tensor) and lr.is_cuda else float(lr)
    given = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
    found_inf, grad_scale = (None if t is None else t.to(device) for t in given)  # of a scaler on another GPU
    if steps := slices.steps:
        counts = _each_once(steps)
        torch._foreach_add_(counts, 1)
        if found_inf is not None:
            torch._foreach_sub_(counts, [found_inf.to(steps[0].device)] * len(counts))
        if any(offsets := [g.offset for _, g in work]):
            steps = list(torch._foreach_sub(steps, offsets))
    smalls = slices.smalls()  # held until the launch, as the counts are: some are copies
    updates.refresh(smalls, steps)
    getattr(kernels, kernel)(updates, lr=lr, found_inf=found_inf, grad_scale=grad_scale, **settings)
    return True


def _on_gpu(tensors: Iterable[Tensor]) -> bool:
    return all(t.is_cuda for t in tensors)

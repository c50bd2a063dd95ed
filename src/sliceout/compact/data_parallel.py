"""Compact gradients under ``DistributedDataParallel``: what travels between the ranks has the size of the slices.

DDP's buckets know dense gradients only. So when DDP wraps a model, the parameters whose gradients come slice-sized are
taken out of its list (its own ``parameters_to_ignore``, for whatever root it is given), and are averaged here: at the
end of each backward pass, all of them in one flat all-reduce. Everything else stays with DDP. ``no_sync``, unused
parameters and gradients that happen to be dense (after ``off_``) mean what they mean to DDP.

Whatever the gradients, slices whose seed was taken from torch follow that of rank 0 from then on.

Where it cannot be done, all parameters are left to DDP, which averages dense gradients: right as well, only larger.
That is so if the ranks draw different slices, or in a torch whose DDP is built in another way than we know.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from . import gradient_leaves
from .gradient import SlicedGrad


@functools.cache  # once
def observe() -> None:
    """Look after all models that DDP wraps from now on."""
    if dist.is_available():
        register_module_module_registration_hook(_on_registration)


def _on_registration(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """DDP sets ``self.module`` after it has listed the parameters, and before it does anything with them."""
    if torch.compiler.is_compiling():
        return
    if isinstance(parent, DistributedDataParallel) and name == "module" and module is not None:
        _agree_on_seeds(module, parent.process_group)
        gradient_leaves.exclude(module, _take_over(parent, module))


def _take_over(ddp: Any, module: nn.Module) -> set[Tensor]:
    """The parameters that will be averaged here."""
    known = vars(ddp)
    if not {"parameters_to_ignore", "_module_parameters", "process_group"} <= known.keys():
        return set()
    if known.get("_delay_all_reduce_params") or known.get("_use_python_reducer"):
        return set()
    layers: list[Any] = [m for m in module.modules() if hasattr(m, "_gradient_leaves")]
    compact = {m._parameters.get(name) for m in layers for name, taken in m.takes().items() if taken.compact}
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if p in compact and p.requires_grad and name not in ddp.parameters_to_ignore:
            names.setdefault(p, []).append(name)
    left = [p for p in ddp._module_parameters if p.requires_grad and p not in names]
    if names and not left:  # DDP insists on one
        del names[min(names, key=lambda p: p.numel())]
    if not names or not _drawn_alike(module, ddp.process_group):
        return set()
    for p in names:
        dist.broadcast(p.detach(), group=ddp.process_group, group_src=0)
        ddp.parameters_to_ignore.update(names[p])
    ddp._module_parameters = [p for p in ddp._module_parameters if p not in names]
    ddp._slice_reduction = Reduction(ddp, list(names), ddp._module_parameters)
    return set(names)


def _agree_on_seeds(module: nn.Module, group: Any) -> None:
    """Seeds that were taken from torch become those of rank 0, as the parameters do."""
    found = dict.fromkeys(s for m in module.modules() for s in getattr(m, "slices", ()) if s.follows_torch)
    if not found:
        return
    seeds = [s.seed for s in found]
    dist.broadcast_object_list(seeds, group=group, group_src=0, device=next(module.parameters()).device)
    for s, seed in zip(found, seeds, strict=True):
        s.seed = seed
    for owner in dict.fromkeys(s.owner for s in found):
        owner.seek_(owner.step)


def _drawn_alike(module: nn.Module, group: Any) -> bool:
    """Whether all ranks draw the same slices, so that their small tensors hold the same entries."""
    slices = dict.fromkeys(s for m in module.modules() for s in getattr(m, "slices", ()))
    mine = [(s.seed, s.stream, s.owner.step, s.size, s.width, s.sampling) for s in slices]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return all(other == mine for other in everyone)


class Reduction:
    """Averages the gradients of some parameters over the ranks, once per backward pass. Belongs to one DDP.

    Args:
        ddp: the wrapper that says when, and in which process group.
        parameters: whose gradients to average.
        others: the rest. If parameters may be unused, a rank has to take part even if it used none of the first.
    """

    def __init__(self, ddp: Any, parameters: list[nn.Parameter], others: list[nn.Parameter]) -> None:
        self.ddp, self.parameters, self.others = ddp, parameters, others
        self._observe()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._observe()  # a copied parameter has no hooks

    def _observe(self) -> None:
        self.due, self.pending = False, set[int]()
        self.ids = {id(p) for p in self.parameters}
        for p in (*self.parameters, *(q for q in self.others if q.requires_grad)):
            p.register_post_accumulate_grad_hook(functools.partial(_after_accumulation, weakref.ref(self)))

    def note(self, p: Tensor) -> None:
        """The gradient of ``p`` is there: average it at the end of this backward pass."""
        ours = id(p) in self.ids
        if not ours and not self.ddp.find_unused_parameters:
            return
        if not (self.ddp.require_backward_grad_sync or self.ddp.require_forward_param_sync):
            return  # no_sync: the second says what the last forward was told
        if getattr(getattr(self.ddp, "_join_config", None), "enable", False):
            raise RuntimeError(
                "DistributedDataParallel.join cannot follow the all-reduce of compact gradients: "
                "convert with grads='dense', or give all ranks the same number of batches"
            )
        self.due = True
        if ours:
            self.pending.add(id(p))
        Variable._execution_engine.queue_callback(self.reduce)

    @torch.no_grad()
    def reduce(self) -> None:
        """Average all that is pending."""
        if not self.due:
            return
        pending = [p for p in self.parameters if id(p) in self.pending]
        self.due = False
        self.pending.clear()
        for p in pending:
            if isinstance(p.grad, SlicedGrad) and p.grad.full is not None:
                p.grad = p.grad.dense()
        if self.ddp.find_unused_parameters:
            pending = self._agreed(pending)
        kinds: dict[Any, list[nn.Parameter]] = {}
        for p in pending:
            if p.grad is not None:
                kinds.setdefault((p.grad.dtype, p.grad.device), []).append(p)
        for same in kinds.values():
            self._average(same)

    def _average(self, parameters: list[nn.Parameter]) -> None:
        group = self.ddp.process_group
        grads: list[Any] = [p.grad for p in parameters]
        values = [g.values() if isinstance(g, SlicedGrad) else g for g in grads]  # what has to travel
        flat = torch.cat([v.reshape(-1) for v in values]).div_(dist.get_world_size(group))
        dist.all_reduce(flat, group=group)
        for g, v, part in zip(grads, values, flat.split([v.numel() for v in values]), strict=True):
            if isinstance(g, SlicedGrad):
                g.replace_(part.view(v.shape))
            else:
                v.copy_(part.view(v.shape))

    def _agreed(self, pending: list[nn.Parameter]) -> list[nn.Parameter]:
        """What any rank has a gradient of; where the ranks differ in kind, it travels dense."""
        kinds = {id(p): 1 if isinstance(p.grad, SlicedGrad) else 2 for p in pending}
        mine = torch.tensor([kinds.get(id(p), 0) for p in self.parameters])
        extremes = torch.cat([mine, -mine]).to(self.parameters[0].device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.ddp.process_group)
        most, least = extremes.view(2, -1).tolist()
        for p, high, low in zip(self.parameters, most, least, strict=True):
            if high != -low:
                g = p.grad
                p.grad = torch.zeros_like(p) if g is None else g.dense() if isinstance(g, SlicedGrad) else g
        return [p for p, high in zip(self.parameters, most, strict=True) if high]


def _after_accumulation(reduction: weakref.ref[Reduction], p: Tensor) -> None:
    live = reduction()
    if live is not None:
        live.note(p)

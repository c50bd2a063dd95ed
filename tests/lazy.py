"""What slice-only updates must do, written from the textbook: each entry of a parameter by itself, with its own state.

An entry is live if its row and its column are kept. Live entries are updated by the formula; the others keep weight and
state. Gradients come from the dense mode, which has its own oracle.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import sliceout
from oracle import mask
from sliceout import Axis
from sliceout import nn as snn
from sliceout.takes import ConcatAxis

State = dict[str, Tensor]


# -- the formulas (torch's documentation), on one parameter ------------------------------------------------------------


def sgd(
    p: Tensor, g: Tensor, state: State, *, lr: float, momentum=0.0, nesterov=False, weight_decay=0.0, maximize=False
):
    g = (-g if maximize else g) + weight_decay * p
    if momentum:
        state["momentum_buffer"] = momentum * state.get("momentum_buffer", torch.zeros_like(p)) + g
        g = g + momentum * state["momentum_buffer"] if nesterov else state["momentum_buffer"]
    return p - lr * g


def adam(
    p: Tensor, g: Tensor, state: State, *, step: int, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    amsgrad=False, maximize=False, decoupled=False,
):  # fmt: skip
    g = -g if maximize else g
    if decoupled:
        p = p * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    zero = torch.zeros_like(p)
    state["exp_avg"] = betas[0] * state.get("exp_avg", zero) + (1 - betas[0]) * g
    state["exp_avg_sq"] = betas[1] * state.get("exp_avg_sq", zero) + (1 - betas[1]) * g * g
    square = state["exp_avg_sq"]
    if amsgrad:
        square = state["max_exp_avg_sq"] = torch.maximum(state.get("max_exp_avg_sq", zero), square)
    m, v = state["exp_avg"] / (1 - betas[0] ** step), square / (1 - betas[1] ** step)
    return p - lr * m / (v.sqrt() + eps)


# -- which entries are live --------------------------------------------------------------------------------------------


def is_dense(axis: Any) -> bool:
    """Gradients of fused projections are; units that are not in yet are left alone there as well."""
    fused = isinstance(axis, ConcatAxis) and axis.slice.sampling != "prefix"
    return fused or (axis is not None and not axis.slice.on)


def live_entries(model: nn.Module) -> dict[str, Tensor]:
    """For every parameter: true where the slices of now keep the row and the column. Plain and fused layers: all."""
    live = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    for prefix, layer in model.named_modules():
        if not isinstance(layer, snn.Sliced) or isinstance(layer, nn.MultiheadAttention):
            continue
        into, out, unit = (layer.axes.get(role) for role in ("in", "out", "unit"))
        if getattr(layer, "groups", 1) > 1:
            whole = into is not None and out is not None and into.slice is out.slice and into.blocks == 1
            into = None if whole or into is None else Axis(into.slice, into.blocks // layer.groups, into.inner)
        for name, p in layer.named_parameters(recurse=False):
            rows, cols = (unit or out, into) if p.dim() > 1 or unit or out else (None, None)
            if p.dim() > 1 and getattr(layer, "transposed", False):
                rows, cols = cols, rows
            if any(is_dense(a) for a in (rows, cols)):
                continue
            kept = mask(rows, p.shape[0], p.device) > 0
            if p.dim() > 1:
                kept = kept[:, None] & (mask(cols, p.shape[1], p.device) > 0)
                kept = kept.view(*kept.shape, *[1] * (p.dim() - 2))
            live[f"{prefix}.{name}" if prefix else name] &= kept
    return live


def closely(got: Tensor, expected: Tensor, what: str) -> None:
    """Equal up to the rounding of float64, which Adam's square roots of small numbers make larger."""
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10, msg=lambda m: f"{what}: {m}")


class Reference:
    """Trains a copy of ``model`` in dense mode with per-entry updates, and compares."""

    def __init__(self, model: nn.Module, formula: Any, **settings: Any) -> None:
        self.model, self.formula, self.settings = copy.deepcopy(model), formula, settings
        for s in sliceout.slices(self.model):
            s.grads = "dense"
        self.state: dict[str, State] = {name: {} for name, _ in model.named_parameters()}
        self.steps = 0

    def gradients(self, model: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
        """The dense gradients of the summed losses, in the slices that ``model`` has now."""
        ours, theirs = sliceout.slices(self.model), sliceout.slices(model)
        ours.seek_(theirs.step)
        ours.drawn = 1  # by hand: no reason to warn
        for a, b in zip(ours, theirs, strict=True):
            a.on = b.on
        self.model.zero_grad()
        for x in batches:
            self.model(x).square().mean().backward()
        return {name: p.grad for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def update(self, grads: dict[str, Tensor], live: dict[str, Tensor] | None = None) -> None:
        live = live_entries(self.model) if live is None else live
        self.steps += 1
        extra = {"step": self.steps} if self.formula is adam else {}
        for name, p in self.model.named_parameters():
            new = dict(self.state[name])
            updated = self.formula(p, grads[name], new, **self.settings, **extra)
            p.copy_(torch.where(live[name], updated, p))
            for key, value in new.items():
                old = self.state[name].get(key, torch.zeros_like(p))
                self.state[name][key] = torch.where(live[name], value, old)

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for (name, p), q in zip(model.named_parameters(), self.model.parameters(), strict=True):
            closely(p.detach(), q.detach(), name)
            for key, value in self.state[name].items():
                got = optimizer.state[p][key]
                assert (got.shape, got.stride()) == (p.shape, p.stride()), (name, key)
                closely(got, value, f"{key} of {name}")
            if "step" in optimizer.state[p]:
                assert int(optimizer.state[p]["step"]) == self.steps, name


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Weights and full-size state, copied."""
    return {
        name: {
            "weight": p.detach().clone(),
            **{k: v.clone() for k, v in optimizer.state[p].items() if v is not None and v.shape == p.shape},
        }
        for name, p in model.named_parameters()
    }


def assert_untouched(before: dict[str, Any], after: dict[str, Any], live: dict[str, Tensor]) -> None:
    """Entries that are not live are the same bit for bit; all live weights have moved."""
    for name, tensors in before.items():
        for key, value in tensors.items():
            assert torch.equal(value[~live[name]], after[name][key][~live[name]]), (name, key)
        moved = tensors["weight"] != after[name]["weight"]
        assert not moved[~live[name]].any(), name

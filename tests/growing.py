"""What an optimizer must do while units enter: every entry has a state and a step count of its own.

An entry is in when its row and its column are. Written from the textbook (``lazy`` has the formulas), one entry at a
time, with masks that are made here from the widths; gradients are the model's own, which other oracles check.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import lazy
from sliceout import nn as snn
from sliceout.takes import ConcatAxis


def axis_in(axis: Any, size: int) -> Tensor:
    """Which entries along a dimension belong to units that are in."""
    if axis is None:
        return torch.ones(size, dtype=torch.bool)
    found = []
    for a in axis.sections if isinstance(axis, ConcatAxis) else [axis]:
        s = a.slice
        width = s.width if s.sampling == "prefix" and s.on else s.size
        unit = torch.arange(s.size).repeat_interleave(a.inner).repeat(a.blocks)
        found.append(unit < width)
    return torch.cat(found)


def entries_in(model: nn.Module) -> dict[str, Tensor]:
    """For every parameter: which entries are in now."""
    found = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}

    def put(name: str, rows: Any, cols: Any = None) -> None:
        shape = found[name].shape
        r = axis_in(rows, shape[0]).view(-1, *[1] * (len(shape) - 1))
        found[name] &= r if len(shape) == 1 else r & axis_in(cols, shape[1]).view(1, -1, *[1] * (len(shape) - 2))

    for prefix, layer in model.named_modules():
        prefix = f"{prefix}." if prefix else ""
        if not isinstance(layer, snn.Sliced):
            continue
        if isinstance(layer, nn.MultiheadAttention):
            qk, v = (layer.axes.get(role) or layer.axes.get("heads") for role in ("qk", "v"))
            size = layer.embed_dim
            sections = torch.cat([axis_in(a, size) for a in (qk, qk, v)])
            found[f"{prefix}in_proj_weight"] &= sections[:, None]
            found[f"{prefix}in_proj_bias"] &= sections
            put(f"{prefix}out_proj.weight", None, v)
            continue
        into, out, unit = (layer.axes.get(role) for role in ("in", "out", "unit"))
        if getattr(layer, "groups", 1) > 1 and into is not None:
            depthwise = out is not None and into.slice is out.slice and into.blocks == 1
            into = None if depthwise else into.slice.axis(inner=into.inner)
        for name, p in layer.named_parameters(recurse=False):
            rows, cols = (unit, None) if unit is not None else (out, into)
            if p.dim() > 1 and getattr(layer, "transposed", False):
                rows, cols = cols, rows
            put(f"{prefix}{name}", rows, cols)
    return found


class Reference:
    """Steps over copies of the parameters of ``model`` with its gradients, entry by entry."""

    def __init__(self, model: nn.Module, formula: Any, **settings: Any) -> None:
        self.model, self.formula, self.settings = model, formula, settings
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.counts = {name: torch.zeros_like(p) for name, p in self.values.items()}
        self.state: dict[str, dict[str, Tensor]] = {name: {} for name in self.values}
        self.steps = 0

    def step(self, scale: float = 1.0, live: dict[str, Tensor] | None = None) -> None:
        """Before the optimizer's own step: gradients are those of now. Only entries that are ``live`` change."""
        inside = entries_in(self.model)
        self.steps += 1
        for name, p in self.model.named_parameters():
            if p.grad is None:
                continue
            new, grad = dict(self.state[name]), torch.zeros_like(p) + p.grad.detach() / scale
            assert not grad[~inside[name]].any(), f"{name}: what is not in gets no gradient"
            self.counts[name] += inside[name]
            changes = inside[name] if live is None else inside[name] & live[name]
            extra = {"step": self.counts[name]} if self.formula is lazy.adam else {}
            updated = self.formula(self.values[name], grad, new, **self.settings, **extra)
            self.values[name] = torch.where(changes, updated, self.values[name])
            for key, value in new.items():
                old = self.state[name].get(key, torch.zeros_like(p))
                self.state[name][key] = torch.where(changes, value, old)

    def check(self, optimizer: torch.optim.Optimizer, within: float = 1e-12) -> None:
        for name, p in self.model.named_parameters():
            torch.testing.assert_close(
                p.detach(), self.values[name], rtol=within, atol=within, msg=lambda m, n=name: f"{n}: {m}"
            )
            for key, value in self.state[name].items():
                got = optimizer.state[p][key]
                assert got.shape == p.shape, (name, key)
                torch.testing.assert_close(
                    got, value, rtol=within, atol=within, msg=lambda m, n=name, k=key: f"{k} of {n}: {m}"
                )
            if "step" in optimizer.state[p]:
                assert int(optimizer.state[p]["step"]) == self.steps, name

"""The paper's networks as work for ``sliceout bench``: their batches, their own dropout and their optimizers."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from sliceout.cli import UserError
from sliceout.cli.work import TOKENS, Work

from ..models import build
from .suites import family_of

SIDES = {"b0": 224, "b1": 240, "b2": 260, "b3": 300, "b4": 380, "b5": 456, "b6": 528, "b7": 600}


class PaperWork(Work):
    """One of the paper's networks, another size of its MLP (``mlp-3x512``), or what ``sliceout bench`` takes."""

    @property
    def own_dropout(self) -> bool:  # type: ignore[override]
        return family_of(self.case.model) in ("mlp", "wrn", "lm")

    def network(self) -> nn.Module:
        case, family = self.case, family_of(self.case.model)
        if family == "user":
            return super().network()
        dropout = {"dropout": case.rate} if case.scheme == "standard" and family != "efficientnet" else {}
        return network(case.model, case.size, **dropout)

    def optimize(self, parameters: list[nn.Parameter], fused: bool) -> torch.optim.Optimizer:
        """The paper's, except that EfficientNet gets SGD: RMSprop has no fused kernel."""
        if family_of(self.case.model) in ("mlp", "lm"):
            return torch.optim.Adam(parameters, lr=1e-8, fused=fused)
        return super().optimize(parameters, fused)

    def inputs(self, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        case, family = self.case, family_of(self.case.model)
        if family == "mlp":
            x, classes = torch.rand(size, 784, generator=draw), 10
        elif family == "wrn":
            x, classes = torch.randn(size, 3, case.size or 32, case.size or 32, generator=draw), 10
        elif family == "efficientnet":
            side = case.size or SIDES.get(case.model.partition("-")[2], 224)
            x, classes = torch.randn(size, 3, side, side, generator=draw), 1000
        elif family == "lm":
            classes = self.net.get_submodule("embedding").num_embeddings  # type: ignore[assignment]
            x = torch.randint(classes, (size, case.size or TOKENS), generator=draw)
        else:
            return super().inputs(size, draw)
        return x, torch.randint(classes, (*x.shape[: 2 if family == "lm" else 1],), generator=draw)


def network(name: str, size: int | None = None, **dropout: float) -> nn.Module:
    """One of the paper's networks, or another size of its MLP, for sequences of ``size`` tokens."""
    try:
        if found := re.fullmatch(r"mlp-(\d+)x(\d+)", name):
            return build("mlp", widths=(784, *[int(found[2])] * int(found[1]), 10), **dropout)
        if family_of(name) == "lm":
            return build(name, context=max(size or TOKENS, 2), **dropout)
        return build(name, **dropout)
    except ValueError as error:
        raise UserError(str(error)) from error

"""What a case trains: its network, a batch of random data, its loss and its optimizer, and one training step of them.

The baseline is a strong one: channels_last, autocast, a fused optimizer, gradients set to none, and the loss inside the
compiled region. SliceOut gets exactly the same treatment.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import convert_
from .. import LabError
from .cases import Case, family_of
from .floor import narrow_

SIDES = {"b0": 224, "b1": 240, "b2": 260, "b3": 300, "b4": 380, "b5": 456, "b6": 528, "b7": 600}
TOKENS = 64
WARMUP = 10
"""Steps on a GPU before anything is measured."""


@dataclass
class Work:
    """A network on its device with everything that a step needs."""

    case: Case
    net: nn.Module
    loss: Callable[[Any, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    device: torch.device

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        return _batch(self.case, self.net, size, self.device)

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.case.precision == "bf16" else None

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast is not None)


def build(case: Case, device: torch.device) -> Work:
    """The network of a case, ready to train on ``device``."""
    torch.manual_seed(0)
    net = network(case)
    if case.rate > 0:
        net = _apply_scheme(net, case)
    images = family_of(case.model) in ("wrn", "efficientnet") or any(isinstance(m, nn.Conv2d) for m in net.modules())
    net = net.to(device)
    if images:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net.train()
    return Work(case, net, _loss, _optimizer(case, net, device), device)


def network(case: Case) -> nn.Module:
    """Plain; standard dropout is what the network itself brings, where it has a place for it."""
    from ..models import build as build_model

    family = family_of(case.model)
    dropout = {"dropout": case.rate} if case.scheme == "standard" else {}
    try:
        if family == "user":
            from ..find_model import find_model

            return find_model(case.model, device="cpu")
        if found := re.fullmatch(r"mlp-(\d+)x(\d+)", case.model):
            return build_model("mlp", widths=(784, *[int(found[2])] * int(found[1]), 10), **dropout)
        if family == "lm":
            return build_model(case.model, context=max(case.size or TOKENS, 2), **dropout)
        if family == "efficientnet":
            return build_model(case.model)
        return build_model(case.model, **dropout)
    except ValueError as error:
        raise LabError(str(error)) from error


def _apply_scheme(net: nn.Module, case: Case) -> nn.Module:
    own_dropout = family_of(case.model) in ("mlp", "wrn", "lm")
    if case.scheme == "none" or (case.scheme == "standard" and own_dropout):
        return net
    settings: dict[str, Any] = {"align": case.align, "stages": case.stages, "sampling": case.sampling}
    settings["payoff"] = False  # whether it pays is what is to be measured
    if case.grads != "dense":
        settings["grads"] = case.grads
    scheme = "sliceout" if case.scheme == "floor" else case.scheme
    x, _ = _batch(case, net, 2, torch.device("cpu"))
    convert_(net, case.rate, scheme=scheme, example_inputs=x, **settings)
    return narrow_(net) if case.scheme == "floor" else net


def _batch(case: Case, net: nn.Module, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random inputs and targets: never zeros, which run faster than data."""
    family = family_of(case.model)
    draw = torch.Generator().manual_seed(1)
    if family == "mlp":
        x, classes = torch.rand(size, 784, generator=draw), 10
    elif family == "wrn":
        x, classes = torch.randn(size, 3, case.size or 32, case.size or 32, generator=draw), 10
    elif family == "efficientnet":
        side = case.size or SIDES.get(case.model.partition("-")[2], 224)
        x, classes = torch.randn(size, 3, side, side, generator=draw), 1000
    elif family == "lm":
        classes = net.get_submodule("embedding").num_embeddings  # type: ignore[assignment]
        x = torch.randint(classes, (size, case.size or TOKENS), generator=draw)
    else:
        return _user_batch(net, case, size, draw, device)
    y = torch.randint(classes, (*x.shape[: 2 if family == "lm" else 1],), generator=draw)
    return _placed(x, device), y.to(device)


def _user_batch(net: nn.Module, case: Case, size: int, draw: torch.Generator, device: torch.device) -> Any:
    """From the shapes that ``convert_`` would guess for the model; targets are drawn for whatever comes out of it."""
    from ...conversion.inputs import guesses

    shape = next((args[0].shape[1:] for args, kwargs in guesses(net) if args and args[0].is_floating_point()), None)
    if shape is None:
        raise LabError(f"{case.model}: bench feeds images and vectors; what this model takes is not known")
    if case.size is not None and len(shape) == 3:
        shape = torch.Size((shape[0], case.size, case.size))
    x = _placed(torch.randn(size, *shape, generator=draw), device)
    was_training = net.training
    with torch.no_grad():
        out = _logits(net.eval()(x[:2].to(next(net.parameters()).device)))
    net.train(was_training)
    return x, torch.randint(out.shape[-1], (size, *out.shape[1:-1]), generator=draw).to(device)


def _placed(x: Tensor, device: torch.device) -> Tensor:
    x = x.to(device)
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x


def _logits(out: Any) -> Tensor:
    return getattr(out, "logits", out)


def _loss(out: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(_logits(out).flatten(0, -2), target.flatten())


def _optimizer(case: Case, net: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """The paper's optimizers in their fastest form; RMSprop has no fused kernel, so EfficientNet gets SGD.

    Their rate is next to nothing, so that all steps have the weights of the first: a thousand steps of learning one
    batch would leave dead units.
    """
    fused = device.type == "cuda"
    parameters = [p for p in net.parameters() if p.requires_grad]
    if family_of(case.model) in ("mlp", "lm"):
        return torch.optim.Adam(parameters, lr=1e-8, fused=fused)
    return torch.optim.SGD(parameters, lr=1e-8, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=fused)


# -- one training step -------------------------------------------------------------------------------------------------


class _WithLoss(nn.Module):
    """Network and loss as one module, so that both are compiled."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.net, self.loss = work.net, work.loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x), y)


def step_of(work: Work, batch: int) -> Callable[[], Any]:
    """A function that runs one training step on a batch that lies on the device."""
    x, y = work.batch(batch)
    mode, optimizer = work.case.mode, work.optimizer
    if mode.startswith("captured"):
        return _captured(work, x, y)
    forward: Any = _WithLoss(work)
    if mode != "eager":
        forward = torch.compile(
            forward, fullgraph=True, dynamic=False, mode="reduce-overhead" if mode == "compiled" else None
        )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with work.casting():
            loss = forward(x, y)
        loss.backward()
        optimizer.step()

    return step


def tune(work: Work, batch: int) -> None:
    """One eager pass, in which libraries choose their algorithms, before a graph is made.

    cuDNN tries algorithms out with workspaces of any size. Tried inside the memory of a CUDA graph, as in the first
    call of a model compiled with reduce-overhead, these would stay there.
    """
    x, y = work.batch(batch)
    with work.casting():
        loss = work.loss(work.net(x), y)
    loss.backward()
    work.optimizer.zero_grad(set_to_none=True)


def _captured(work: Work, x: Tensor, y: Tensor) -> Callable[[], Any]:
    from ...capture import capture

    model: Any = work.net
    loss: Any = work.loss
    if work.case.compiled:
        model, loss = torch.compile(model, fullgraph=True, dynamic=False), torch.compile(loss, dynamic=False)
    step = capture(model, loss, work.optimizer, (x, y), autocast=work.autocast)
    return lambda: step(x, y)


def set_precision(name: str) -> None:
    """bf16 runs its remaining float32 products in tf32, as training would."""
    exact = name == "fp32"
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.backends.cudnn.allow_tf32 = not exact

"""What a case trains: its network, a batch of random data, its loss and its optimizer, and one training step of them.

The baseline is a strong one: channels_last, autocast, a fused optimizer, gradients set to none, and the loss inside the
compiled region. SliceOut gets exactly the same treatment.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import convert_
from ..capture import capture
from ..conversion.dry_run import guesses
from ..nn.base import Sliced
from . import UserError
from .cases import Case
from .floor import narrow_
from .models import find_model

TOKENS = 64


class Work:
    """The network of a case on its device, with everything that a training step needs.

    A subclass brings networks, batches or optimizers of its own by overriding ``network``, ``inputs`` and ``optimize``.
    """

    own_dropout = False
    """Whether ``network`` puts in standard dropout by itself; ``convert_`` does it otherwise."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        torch.manual_seed(0)
        self.net = self.network()
        if case.rate > 0:
            self._apply_scheme()
        self.net = self.net.to(device)
        if any(isinstance(m, nn.Conv2d) for m in self.net.modules()):
            self.net = self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.net.train()
        self.optimizer = self.optimize([p for p in self.net.parameters() if p.requires_grad], device.type == "cuda")

    def network(self) -> nn.Module:
        """The plain network, on the CPU."""
        net = find_model(self.case.model, device="cpu")
        if hasattr(getattr(net, "config", None), "use_cache"):
            net.config.use_cache = False  # type: ignore[union-attr]  # of generated text, not of training
        return net

    def optimize(self, parameters: list[nn.Parameter], fused: bool) -> torch.optim.Optimizer:
        """An optimizer in its fastest form.

        Its learning rate is next to nothing, so that all steps have the weights of the first: a thousand steps of
        learning one batch would leave dead units.
        """
        return torch.optim.SGD(parameters, lr=1e-8, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=fused)

    def inputs(self, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random inputs of the shape that ``convert_`` would guess, and targets for whatever the model returns."""
        calls = [[*args, *(v for v in kwargs.values() if isinstance(v, Tensor))] for args, kwargs in guesses(self.net)]
        shape, dtype = next(((c[0].shape[1:], c[0].dtype) for c in calls if len(c) == 1), (None, None))
        if shape is None or dtype is None:
            raise UserError(f"{self.case.model}: bench feeds images, vectors and tokens; what it takes is not known")
        if dtype.is_floating_point:
            if self.case.size is not None and len(shape) == 3:
                shape = torch.Size((shape[0], self.case.size, self.case.size))
            x = torch.randn(size, *shape, generator=draw)
        else:
            words = next(m.num_embeddings for m in self.net.modules() if isinstance(m, nn.Embedding))
            x = torch.randint(words, (size, self.case.size or TOKENS), generator=draw)
        was_training = self.net.training
        with torch.no_grad():
            out = logits(self.net.eval()(x[:2].to(next(self.net.parameters()).device)))
        self.net.train(was_training)
        if not isinstance(out, Tensor):
            raise UserError(f"{self.case.model}: returns a {type(out).__name__}; bench needs a tensor or .logits")
        return x, torch.randint(out.shape[-1], (size, *out.shape[1:-1]), generator=draw)

    def batch(self, size: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Random inputs and targets on the device: never zeros, which run faster than data."""
        x, y = self.inputs(size, torch.Generator().manual_seed(1))
        x = x.to(device or self.device)
        return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x, y.to(device or self.device)

    @staticmethod
    def loss(out: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(logits(out).flatten(0, -2), target.flatten())

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.case.precision == "bf16" else None

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast is not None)

    def _apply_scheme(self) -> None:
        case = self.case
        if case.scheme == "none" or (case.scheme == "standard" and self.own_dropout):
            return
        settings: dict[str, Any] = {"align": case.align, "stages": case.stages, "sampling": case.sampling}
        settings |= {"grads": case.grads}
        settings |= {"parts": case.parts} if case.scheme == "sliceout" else {}
        scheme = "sliceout" if case.scheme == "floor" else case.scheme
        x, _ = self.batch(2, torch.device("cpu"))
        convert_(self.net, case.rate, scheme=scheme, example_inputs=x, **settings)
        if case.scheme == "floor":
            narrow_(self.net)


def kept_weights(net: nn.Module) -> int:
    """How many entries the slices of all weight matrices have together: what each part of a batch has of its own."""
    total = 0.0
    for layer in net.modules():
        if not isinstance(layer, Sliced):
            continue
        shares = {role: axis.width / axis.size for role, axis in layer.axes.items()}
        if isinstance(layer, nn.MultiheadAttention):
            heads = shares.get("heads", 1.0)  # two projections for queries and keys, two for values
            share = 2 * shares.get("qk", heads) + 2 * shares.get("v", heads)
            total += share * layer.out_proj.weight.numel()
        else:
            held = (p for p in layer.parameters(recurse=False) if p.dim() > 1)
            total += sum(p.numel() for p in held) * math.prod(shares.values())
    return round(total)


def logits(out: Any) -> Any:
    return getattr(out, "logits", out)


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


def _captured(work: Work, x: Tensor, y: Tensor) -> Callable[[], Any]:
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

"""Small networks written by hand with ``sliceout.nn``, and how the execution-mode tests look at them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sliceout
from oracle import along, unit_scale
from sliceout import Axis, Slice
from sliceout import nn as snn
from sliceout.drawing import draw_table as table
from sliceout.drawing import owner_of, starts_at
from sliceout.schemes import SCHEMES


def mlp(rate: float = 0.5, **settings: Any) -> nn.Sequential:
    """Two sliced hidden layers; takes ``[n, 6]``."""
    a, b = Slice(16, rate, **settings), Slice(12, rate, **settings)
    return nn.Sequential(
        snn.Linear(6, 16, out_slice=a),
        nn.ReLU(),
        snn.Linear(16, 12, in_slice=a, out_slice=b),
        nn.Tanh(),
        snn.Linear(12, 3, in_slice=b),
    )


def convnet(**settings: Any) -> nn.Sequential:
    """Convolution, batch norm, depthwise convolution, flatten; takes ``[n, 3, 8, 8]``."""
    a, b = Slice(16, 0.5, **settings), Slice(24, 0.25, **settings)
    return nn.Sequential(
        snn.Conv2d(3, 16, 3, padding=1, bias=False, out_slice=a),
        snn.BatchNorm2d(16, slice=a),
        nn.ReLU(),
        snn.Conv2d(16, 16, 3, padding=1, groups=16, in_slice=a, out_slice=a),
        nn.SiLU(),
        snn.Conv2d(16, 24, 3, stride=2, bias=False, in_slice=a, out_slice=b),
        snn.BatchNorm2d(24, slice=b),
        nn.ReLU(),
        nn.AvgPool2d(3),
        nn.Flatten(),
        snn.Linear(24, 5, in_slice=b),
    )


class Norms(nn.Module):
    """Layer norm, RMS norm, group norm and PReLU in one stack; takes ``[n, 6]``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        a, groups = Slice(16, 0.5, **settings), Slice(4, 0.5, **settings)
        self.up = snn.Linear(6, 16, out_slice=a)
        self.layer_norm = snn.LayerNorm(16, slice=a)
        self.prelu = snn.PReLU(16, slice=a)
        self.across = snn.Linear(16, 12, in_slice=a, out_slice=groups.axis(inner=3))
        self.group_norm = snn.GroupNorm(4, 12, slice=groups.axis(inner=3))
        self.rms_norm = snn.RMSNorm(12, slice=groups.axis(inner=3))
        self.down = snn.Linear(12, 3, in_slice=groups.axis(inner=3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.prelu(self.layer_norm(self.up(x)))
        return self.down(self.rms_norm(self.group_norm(self.across(x)).tanh()))


class Attention(nn.Module):
    """A transformer block with a fused projection; takes ``[n, tokens, 16]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, tokens, 3, 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, -1)
        x = x + self.proj(y)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Heads(nn.Module):
    """torch's own attention with slices inside every head, or of heads; takes ``[n, tokens, 16]``."""

    def __init__(self, roles: tuple[str, ...] = ("qk", "v"), **settings: Any) -> None:
        super().__init__()
        axes = {role: Slice(4, **settings).axis(blocks=4) for role in ("qk", "v")}
        axes["heads"] = Slice(4, **settings).axis(inner=4)
        self.attention = snn.MultiheadAttention(16, 4, batch_first=True, **{f"{r}_slice": axes[r] for r in roles})

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A residual block as in ResNet; takes ``[n, 4, 8, 8]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def converted(make: Callable[[], nn.Module], scheme: str, sample: tuple[int, ...]) -> Callable[..., nn.Module]:
    def build(**settings: Any) -> nn.Module:
        model = make()
        if scheme == "patch":
            settings = {}
        settings = {name: value for name, value in settings.items() if name not in SCHEMES[scheme].no_effect}
        sliceout.convert_(model, 0.5, scheme=scheme, example_inputs=torch.zeros(2, *sample), **settings)
        return model

    return build


NETWORKS = {"mlp": (mlp, (6,)), "convnet": (convnet, (3, 8, 8)), "norms": (Norms, (6,))}
"""By name: how to build one, and the shape of one sample. Written by hand."""

CONVERTED = {
    "attention": (converted(Attention, "sliceout", (5, 16)), (5, 16)),
    "controlled": (converted(Attention, "controlled", (5, 16)), (5, 16)),
    "patch": (converted(lambda: nn.Sequential(Residual(), Residual()), "patch", (4, 8, 8)), (4, 8, 8)),
}
"""The same for ``convert_``: fused projections, random subsets, windows of feature maps."""

ALL = NETWORKS | CONVERTED


def build(name: str, seed: int = 0, **settings: Any) -> nn.Module:
    """The same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ALL[name][0](**settings)


def data(name: str, n: int = 8, seed: int = 1) -> Tensor:
    shape = ALL[name][1]
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        torch.get_default_dtype()
    )


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train_step(model: nn.Module, x: Tensor, *optimizers: torch.optim.Optimizer) -> None:
    loss_of(model, x).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


# -- looking at slices without touching them (sliceout.slices would join them) -----------------------------------------


def slices_in(model: nn.Module) -> list[Slice]:
    return list(dict.fromkeys(s for m in model.modules() for s in getattr(m, "slices", ())))


def starts(model: nn.Module) -> list[int]:
    """The starts now, on the host; the ones on the device must be the same."""
    found = slices_in(model)
    for s in found:
        assert s.start.tolist() == s.start_as_tensor().tolist()
    return [s.start_on_host for s in found]


def step_of(model: nn.Module) -> int:
    """How many draws the model has seen; all its slices must agree."""
    (step,) = {owner_of(s).step for s in slices_in(model)}
    return step


def starts_due(model: nn.Module, step: int) -> list[int]:
    """What (seed, stream, step) say the starts are."""
    return starts_at(step, table(slices_in(model))).tolist()


def gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, p in model.named_parameters():
        assert p.grad is not None, f"{name} received no gradient"
        yield name, p.grad


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    """Bit for bit."""
    ours, theirs = a.state_dict(), b.state_dict()
    assert list(ours) == list(theirs)
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=0, msg=lambda m, key=key: f"{key}: {m}")


# -- the plain network at the sliced widths ----------------------------------------------------------------------------


def narrow(model: nn.Module) -> tuple[nn.Module, dict[str, tuple[Tensor, ...]]]:
    """A plain network that computes what ``model`` computes in its current slices, and where its parameters come from.

    The second result holds, for each parameter, the kept indices per dimension and the factor it was multiplied by.
    """
    small, origin = copy.deepcopy(model), {}
    for name, layer in list(small.named_modules()):
        if not isinstance(layer, snn.Sliced):
            continue
        into, out, unit = (layer.axes.get(role) for role in ("in", "out", "unit"))
        depthwise = isinstance(layer, nn.Conv2d) and layer.groups > 1
        snn.plain_(layer)
        for key, p in layer.named_parameters():
            axes = (unit or out, None if depthwise or p.dim() < 2 else into)
            kept = tuple(torch.arange(p.shape[d]) if a is None else a.kept for d, a in enumerate(axes[: p.dim()]))
            factor = torch.ones([], dtype=p.dtype)
            if out is not None and out.slice.fold == "producer" and not depthwise:
                factor = factor * along(_factors(out)[kept[0]], 0, p)
            if axes[1] is not None and into.slice.fold == "consumer":
                factor = factor * along(_factors(into)[kept[1]], 1, p)
            values = p.detach()[kept[0]] if p.dim() == 1 else p.detach()[kept[0]][:, kept[1]]
            setattr(layer, key, nn.Parameter((values * factor).to(p.dtype)))
            origin[f"{name}.{key}"] = (*kept, factor)
        width = (unit or out or into).width
        if isinstance(layer, nn.BatchNorm2d):
            layer.num_features, layer.running_mean, layer.running_var = width, torch.zeros(width), torch.ones(width)
        elif isinstance(layer, nn.GroupNorm):
            layer.num_groups, layer.num_channels = unit.slice.width, width
        elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            layer.normalized_shape = (width,)
        elif depthwise:
            layer.groups = width
    return small, origin


def _factors(axis: Axis) -> Tensor:
    return torch.tensor([unit_scale(axis.slice, unit) for unit in range(axis.slice.size)]).repeat_interleave(axis.inner)


def grown(grad: Tensor, like: Tensor, origin: tuple[Tensor, ...]) -> Tensor:
    """The gradient of a narrow network's parameter as the full parameter must receive it."""
    *kept, factor = origin
    full = torch.zeros_like(like)
    full[kept[0] if len(kept) == 1 else (kept[0][:, None], kept[1][None])] = (grad * factor).to(like.dtype)
    return full

"""One entry per way of slicing a layer: how it is built, plain and sliced, and what goes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import sliceout
from sliceout import Slice

Maker = Callable[[int], Slice]


@dataclass
class LayerCase:
    name: str
    kind: str  # a class of sliceout.nn, and of torch.nn unless plain says otherwise
    args: tuple[Any, ...]
    shape: tuple[int, ...]  # of a full input
    slices: Callable[[Maker], dict[str, Any]]  # slice maker -> in_slice=, out_slice=, slice=
    kwargs: dict[str, Any] = field(default_factory=dict)
    unbatched: bool = False
    frozen: bool = False  # in eval() inside a network that trains

    def plain(self) -> nn.Module:
        return getattr(nn, self.kind)(*self.args, **self.kwargs)

    def sliced(self, make: Maker) -> nn.Module:
        layer = getattr(sliceout.nn, self.kind)(*self.args, **self.kwargs, **self.slices(make))
        return randomise(layer).train(not self.frozen)

    def input(self, device: str = "cpu", channels_last: bool = False) -> Tensor:
        x = torch.randn(self.shape, device=device)
        return x.to(memory_format=FORMATS[x.dim()]) if channels_last else x

    @property
    def has_channels_last(self) -> bool:
        return len(self.shape) in (4, 5) and not self.unbatched


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def randomise(module: nn.Module) -> nn.Module:
    """Random values in all parameters and statistics: ones and zeros would hide what is multiplied and added."""
    for p in module.parameters():
        nn.init.normal_(p)
    for name, b in module.named_buffers():
        if name.endswith("running_mean"):
            b.normal_()
        elif name.endswith("running_var"):
            b.uniform_(0.5, 2.0)
    return module


def both(n_in: int, n_out: int) -> Callable[[Maker], dict[str, Any]]:
    return lambda make: {"in_slice": make(n_in), "out_slice": make(n_out)}


def out(n: int, **tiling: int) -> Callable[[Maker], dict[str, Any]]:
    return lambda make: {"out_slice": make(n).axis(**tiling)}


def into(n: int, **tiling: int) -> Callable[[Maker], dict[str, Any]]:
    return lambda make: {"in_slice": make(n).axis(**tiling)}


def unit(n: int, **tiling: int) -> Callable[[Maker], dict[str, Any]]:
    return lambda make: {"slice": make(n).axis(**tiling)}


def whole_groups(groups: int, inner_in: int = 1, inner_out: int = 1) -> Callable[[Maker], dict[str, Any]]:
    def slices(make: Maker) -> dict[str, Any]:
        s = make(groups)
        return {"in_slice": s.axis(inner=inner_in), "out_slice": s.axis(inner=inner_out)}

    return slices


def inside_groups(groups: int, n_in: int, n_out: int) -> Callable[[Maker], dict[str, Any]]:
    return lambda make: {"in_slice": make(n_in).axis(blocks=groups), "out_slice": make(n_out).axis(blocks=groups)}


L = LayerCase
CASES = [
    L("linear-out", "Linear", (5, 10), (4, 5), out(10)),
    L("linear-in", "Linear", (10, 5), (4, 10), into(10)),
    L("linear-both", "Linear", (10, 8), (4, 10), both(10, 8)),
    L("linear-both-no-bias", "Linear", (10, 8), (4, 10), both(10, 8), {"bias": False}),
    L("linear-sequence", "Linear", (10, 8), (2, 3, 10), both(10, 8)),
    L("linear-vector", "Linear", (10, 8), (10,), both(10, 8)),
    L("linear-heads", "Linear", (5, 30), (4, 5), out(10, blocks=3)),
    L("linear-from-heads", "Linear", (30, 5), (4, 30), into(10, blocks=3)),
    L("linear-from-maps", "Linear", (40, 5), (3, 40), into(10, inner=4)),
    L("linear-interleaved", "Linear", (48, 36), (3, 48), lambda make: {
        "in_slice": make(8).axis(blocks=2, inner=3), "out_slice": make(6).axis(blocks=3, inner=2)}),
    L("Conv1D-out", "Conv1D", (10, 5), (2, 3, 5), out(10)),
    L("Conv1D-in", "Conv1D", (5, 10), (2, 3, 10), into(10)),
    L("Conv1D-both", "Conv1D", (8, 10), (2, 3, 10), both(10, 8)),
    L("conv1d-both", "Conv1d", (10, 8, 3), (2, 10, 7), both(10, 8), {"padding": 1, "stride": 2}),
    L("conv1d-unbatched", "Conv1d", (10, 8, 3), (10, 7), both(10, 8), unbatched=True),
    L("conv2d-out", "Conv2d", (3, 10, 3), (2, 3, 5, 6), out(10), {"padding": 1}),
    L("conv2d-in", "Conv2d", (10, 3, 3), (2, 10, 5, 6), into(10), {"padding": 1}),
    L("conv2d-both", "Conv2d", (10, 8, 3), (2, 10, 5, 6), both(10, 8), {"padding": 1}),
    L("conv2d-1x1-no-bias", "Conv2d", (10, 8, 1), (2, 10, 3, 3), both(10, 8), {"bias": False}),
    L("conv2d-strided-dilated", "Conv2d", (10, 8, 3), (2, 10, 9, 8), both(10, 8), {"stride": (2, 1), "dilation": 2}),
    L("conv2d-same", "Conv2d", (10, 8, 4), (2, 10, 5, 6), both(10, 8), {"padding": "same"}),
    L("conv2d-reflect", "Conv2d", (10, 8, 3), (2, 10, 5, 6), both(10, 8),
      {"padding": (1, 2), "padding_mode": "reflect"}),
    L("conv2d-replicate", "Conv2d", (10, 8, 3), (2, 10, 5, 6), both(10, 8),
      {"padding": 1, "padding_mode": "replicate"}),
    L("conv2d-circular", "Conv2d", (10, 8, 3), (2, 10, 5, 6), both(10, 8),
      {"padding": "same", "padding_mode": "circular"}),
    L("conv2d-unbatched", "Conv2d", (10, 8, 3), (10, 5, 6), both(10, 8), unbatched=True),
    L("conv2d-inside-groups", "Conv2d", (20, 12, 3), (2, 20, 4, 4), inside_groups(2, 10, 6), {"groups": 2}),
    L("conv2d-inside-groups-out", "Conv2d", (4, 12, 3), (2, 4, 4, 4), out(6, blocks=2), {"groups": 2}),
    L("conv2d-inside-groups-in", "Conv2d", (20, 4, 3), (2, 20, 4, 4), into(10, blocks=2), {"groups": 2, "bias": False}),
    L("conv2d-inside-groups-inner", "Conv2d", (20, 12, 3), (2, 20, 4, 4), lambda make: {
        "in_slice": make(5).axis(blocks=2, inner=2), "out_slice": make(3).axis(blocks=2, inner=2)}, {"groups": 2}),
    L("conv2d-whole-groups", "Conv2d", (20, 30, 3), (2, 20, 4, 4), whole_groups(10, 2, 3), {"groups": 10}),
    L("conv2d-whole-groups-blocks", "Conv2d", (12, 12, 3), (2, 12, 4, 4), lambda make: dict.fromkeys(
        ("in_slice", "out_slice"), make(6).axis(blocks=2)), {"groups": 12}),
    L("conv2d-depthwise", "Conv2d", (10, 10, 3), (2, 10, 5, 6), whole_groups(10), {"groups": 10, "padding": 1}),
    L("conv2d-depthwise-no-bias", "Conv2d", (10, 10, 3), (2, 10, 5, 6), whole_groups(10),
      {"groups": 10, "bias": False}),
    L("conv2d-depthwise-reflect", "Conv2d", (10, 10, 3), (2, 10, 5, 6), whole_groups(10),
      {"groups": 10, "padding": 1, "padding_mode": "reflect"}),
    L("conv2d-depthwise-multiplier", "Conv2d", (10, 20, 3), (2, 10, 5, 6), whole_groups(10, 1, 2), {"groups": 10}),
    L("conv1d-depthwise", "Conv1d", (10, 10, 3), (2, 10, 7), whole_groups(10), {"groups": 10}),
    L("conv3d-both", "Conv3d", (10, 8, 2), (2, 10, 3, 3, 4), both(10, 8)),
    L("conv3d-depthwise", "Conv3d", (10, 10, 2), (2, 10, 3, 3, 4), whole_groups(10), {"groups": 10}),
    L("conv3d-unbatched", "Conv3d", (10, 8, 2), (10, 3, 3, 4), both(10, 8), unbatched=True),
    L("batchnorm1d", "BatchNorm1d", (10,), (7, 10), unit(10)),
    L("batchnorm1d-sequence", "BatchNorm1d", (10,), (3, 10, 4), unit(10), {"momentum": 0.3}),
    L("batchnorm2d", "BatchNorm2d", (10,), (3, 10, 4, 5), unit(10)),
    L("batchnorm2d-no-affine", "BatchNorm2d", (10,), (3, 10, 4, 5), unit(10), {"affine": False}),
    L("batchnorm2d-no-statistics", "BatchNorm2d", (10,), (3, 10, 4, 5), unit(10), {"track_running_stats": False}),
    L("batchnorm2d-bare", "BatchNorm2d", (10,), (3, 10, 4, 5), unit(10),
      {"affine": False, "track_running_stats": False}),
    L("batchnorm2d-frozen", "BatchNorm2d", (10,), (3, 10, 4, 5), unit(10), frozen=True),
    L("batchnorm2d-frozen-cumulative", "BatchNorm2d", (10,), (3, 10, 4, 5), unit(10), {"momentum": None}, frozen=True),
    L("batchnorm2d-frozen-no-statistics", "BatchNorm2d", (10,), (3, 10, 4, 5), unit(10), {"track_running_stats": False},
      frozen=True),
    L("batchnorm2d-blocks", "BatchNorm2d", (24,), (3, 24, 2, 2), unit(6, blocks=2, inner=2)),
    L("batchnorm3d", "BatchNorm3d", (10,), (3, 10, 2, 3, 4), unit(10)),
    L("groupnorm-whole-groups", "GroupNorm", (10, 20), (3, 20, 4), unit(10, inner=2)),
    L("groupnorm-inside-groups", "GroupNorm", (2, 20), (3, 20, 2, 2), unit(10, blocks=2)),
    L("groupnorm-one-group", "GroupNorm", (1, 10), (3, 10, 2, 2), unit(10), {"eps": 0.1}),
    L("groupnorm-no-affine", "GroupNorm", (10, 20), (3, 20), unit(10, inner=2), {"affine": False}),
    L("groupnorm-instance", "GroupNorm", (10, 10), (3, 10, 4), unit(10)),
    L("layernorm", "LayerNorm", (10,), (2, 3, 10), unit(10)),
    L("layernorm-no-bias", "LayerNorm", (10,), (2, 3, 10), unit(10), {"bias": False, "eps": 0.1}),
    L("layernorm-no-affine", "LayerNorm", (10,), (2, 3, 10), unit(10), {"elementwise_affine": False}),
    L("layernorm-heads", "LayerNorm", (30,), (2, 30), unit(10, blocks=3)),
    L("rmsnorm", "RMSNorm", (10,), (2, 3, 10), unit(10)),
    L("rmsnorm-eps", "RMSNorm", (10,), (2, 3, 10), unit(10), {"eps": 0.1}),
    L("rmsnorm-no-affine", "RMSNorm", (10,), (2, 3, 10), unit(10), {"elementwise_affine": False}),
    L("prelu", "PReLU", (10,), (3, 10), unit(10)),
    L("prelu-maps", "PReLU", (10,), (3, 10, 2, 2), unit(10)),
    L("layerscale", "LayerScale", (10,), (2, 3, 10), unit(10)),
    L("layerscale-inplace", "LayerScale", (10,), (2, 3, 10), unit(10), {"inplace": True}),
    L("dropout", "Dropout", (0.5,), (3, 10), unit(10)),
    L("dropout1d", "Dropout1d", (0.5,), (3, 10, 4), unit(10)),
    L("dropout2d", "Dropout2d", (0.5,), (3, 10, 4, 4), unit(10)),
    L("dropout3d", "Dropout3d", (0.5,), (3, 10, 2, 2, 2), unit(10)),
]  # fmt: skip


def find(name: str) -> LayerCase:
    return next(c for c in CASES if c.name == name)

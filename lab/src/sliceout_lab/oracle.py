"""The masked-dense oracle for whole models: the full network whose weights are masked instead of cut.

A converted model in training must compute what its unconverted self computes when

- every consumer reads the dropped units with weight 0 and the kept ones with their normalisation;
- queries and keys are 0 in the dropped dims, and the softmax temperature is that of the kept ones;
- norms over the units take their statistics over the kept ones.

Nothing here goes through ``take``: masks and scales are counted out from the definition of a slice.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sliceout.conversion.groups import Group, Member
from sliceout.conversion.report import Report
from sliceout.schemes.subset import Subset
from sliceout.slices import Slice

_LAST = (nn.LayerNorm, nn.RMSNorm)
_NUMBERS = ("normalized_shape", "num_channels", "num_features", "num_groups")


def kept_mask(s: Slice) -> Tensor:
    """1 for the units kept now, 0 for the others."""
    if isinstance(s, Subset):
        return torch.zeros(s.size, dtype=torch.float64).index_fill(0, s.kept, 1.0)
    return ((torch.arange(s.size) - s.start_on_host) % s.size < s.width).double()


def normalisation(s: Slice) -> Tensor:
    """What each unit is multiplied by, counting the starts that keep it."""
    if s.norm == "none":
        return torch.ones(s.size, dtype=torch.float64)
    if s.norm == "flow" or isinstance(s, Subset):
        return torch.full((s.size,), s.size / s.width, dtype=torch.float64)
    starts, units = torch.tensor(s.starts), torch.arange(s.size)
    keeping = ((units[:, None] - starts) % s.size < s.width).sum(1)
    return len(starts) / keeping.double()


def masked_dense_(full: nn.Module, report: Report) -> nn.Module:
    """Change the unconverted copy ``full`` of a converted model, in place, into what the model must compute now."""
    modules = dict(full.named_modules())
    for row in report.rows:
        if row.slice is not None:
            _mask_group(modules, row.group, row.slice)
    return full


def _mask_group(modules: dict[str, nn.Module], group: Group, s: Slice) -> None:
    kept, scale = kept_mask(s), normalisation(s)
    skip = _UNITWISE if not group.contracted else _UNITWISE[1:]  # a batch norm may turn a masked 0 into something else
    norms = [m for m in group.members if m.role == "unit" and not isinstance(modules[m.module], skip)]
    # q.k / sqrt(size) becomes q.k / sqrt(width): both get half of the factor, behind their norms if they have any
    factor = (s.size / s.width) ** 0.25 if group.contracted else 1.0
    on_rows = factor if not norms else 1.0
    for m in norms:
        _mask_norm(modules[m.module], m, kept, factor)
    for m in group.members:
        layer: Any = modules[m.module]
        if m.role == "out" and not _passes(group, m, layer):
            rows = kept * on_rows if group.contracted else scale if s.fold == "producer" else torch.ones_like(kept)
            _multiply(layer, "out", m, rows)
        elif m.role == "qk":  # of nn.MultiheadAttention, whose queries and keys are the first two thirds
            half = kept.repeat(m.blocks) * (s.size / s.width) ** 0.25
            for i in range(2):
                _multiply_rows(layer, i, half)
        elif m.role in ("v", "heads"):
            _multiply(layer.out_proj, "in", m, kept * scale)
        elif m.role == "in" and not _passes(group, m, layer):
            _multiply(layer, "in", m, kept * (scale if s.fold == "consumer" else 1.0) / on_rows)


_UNITWISE = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.PReLU)


def _passes(group: Group, m: Member, layer: Any) -> bool:
    """A depthwise convolution and the like: units go through whole, and are weighed where they are read."""
    whole = {"in", "out"} <= {o.role for o in group.members if o.module == m.module}
    return whole and getattr(layer, "groups", 1) > 1


def _multiply(layer: Any, role: str, m: Member, units: Tensor) -> None:
    transposed = type(layer).__name__ == "Conv1D"
    dim = int((role == "in") != transposed)
    blocks = m.blocks // layer.groups if role == "in" and getattr(layer, "groups", 1) > 1 else m.blocks
    entries = units.repeat_interleave(m.inner).repeat(blocks)
    _multiply_part(layer.weight, dim, m.offset, entries)
    if role == "out" and getattr(layer, "bias", None) is not None:
        _multiply_part(layer.bias, 0, m.offset, entries)


def _multiply_rows(attention: nn.MultiheadAttention, i: int, entries: Tensor) -> None:
    """The ``i``-th projection of torch's attention layer."""
    if attention.in_proj_weight is not None:
        _multiply_part(attention.in_proj_weight, 0, i * len(entries), entries)
    else:
        _multiply_part((attention.q_proj_weight, attention.k_proj_weight)[i], 0, 0, entries)
    if attention.in_proj_bias is not None:
        _multiply_part(attention.in_proj_bias, 0, i * len(entries), entries)


def _multiply_part(t: Tensor, dim: int, offset: int, entries: Tensor) -> None:
    """Multiply the part of ``t`` that begins at ``offset``."""
    shape = [1] * t.dim()
    shape[dim] = -1
    with torch.no_grad():
        t.narrow(dim, offset, len(entries)).mul_(entries.to(t).view(shape))


def _mask_norm(norm: Any, m: Member, kept: Tensor, factor: float) -> None:
    """Let a norm see the kept units alone and write 0 for the others."""
    dim = -1 if isinstance(norm, _LAST) or type(norm).__name__ == "LayerScale" else m.dim
    mask = kept.repeat_interleave(m.inner).repeat(m.blocks)
    index = mask.nonzero().flatten()
    small = copy.deepcopy(norm)
    for held in (small._parameters, small._buffers):
        for name, t in held.items():
            if t is not None and len(mask) in t.shape:
                cut = t.detach().index_select(list(t.shape).index(len(mask)), index)
                held[name] = nn.Parameter(cut) if held is small._parameters else cut
    for name in _NUMBERS:
        value = getattr(small, name, None)
        if value == len(mask) or (isinstance(value, (tuple, list)) and list(value) == [len(mask)]):
            setattr(small, name, len(index) if isinstance(value, int) else (len(index),))
        elif name == "num_groups" and isinstance(value, int) and value != m.blocks:
            setattr(small, name, value * len(index) // len(mask))

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = small(x.index_select(dim, index), *args, **kwargs) * factor
        return torch.zeros_like(x).index_copy(dim, index, y.to(x.dtype))

    norm.forward = forward


# -- a fair comparison -------------------------------------------------------------------------------------------------


def randomise_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights under which every layer matters: no zero-initialised gamma or tiny layer scale can hide an error."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                fan_in = max(p[0].numel(), 1) if p.dim() > 1 else 1
                p.copy_(noise / fan_in**0.5 if p.dim() > 1 else p.clamp(-1, 1) * 0.5 + 0.5 + 0.2 * noise)
    return model


def quiet_(model: nn.Module) -> nn.Module:
    """Turn off all dropout: layers, drop-path, and the numbers that functional dropout is called with."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name or _is_dropout(module, name)):
                setattr(module, name, 0.0)
    return model


def _is_dropout(module: nn.Module, name: str) -> bool:
    kind = type(module).__name__.lower()
    return name == "p" and ("drop" in kind or "stochasticdepth" in kind)

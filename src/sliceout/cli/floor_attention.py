"""``nn.MultiheadAttention`` at the width of its slices: torch's own insists on square projections."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.factory import plain_
from ..slices import Axis

_PROJECTIONS = {"q_proj_weight": "qk", "k_proj_weight": "qk", "v_proj_weight": "v"}


class NarrowAttention(nn.MultiheadAttention):
    """Attention whose heads have fewer dims, or of which there are fewer, than the width of its inputs asks for."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if key_padding_mask is not None or query.dim() != 3:
            raise NotImplementedError("the floor of attention takes batches without padding")
        inputs = [t if self.batch_first else t.transpose(0, 1) for t in (query, key, value)]
        weights: list[Any] = [getattr(self, name) for name in _PROJECTIONS]
        biases: Any = (None,) * 3
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.split([len(w) for w in weights])
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x, w, b in zip(inputs, weights, biases, strict=True)
        )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask  # here true is what is seen
        seen: Tensor | None = None
        if need_weights:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            if attn_mask is not None:
                hidden = attn_mask.dtype == torch.bool
                scores = scores.masked_fill(~attn_mask, float("-inf")) if hidden else scores + attn_mask
            seen = F.dropout(torch.softmax(scores, -1), self.dropout, self.training)
            out, seen = seen @ v, seen.mean(1) if average_attn_weights else seen
        else:
            causal = is_causal and attn_mask is not None
            rate = self.dropout if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, None if causal else attn_mask, rate, is_causal=causal)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return (out if self.batch_first else out.transpose(0, 1)), seen


def narrow_attention_(module: Any, axes: dict[str, Axis]) -> None:
    """Cut sliced attention down to what it keeps, for good, in place."""
    by_role = {role: axes.get(role) or axes.get("heads") for role in ("qk", "v")}
    whole = [getattr(module, name) for name in _PROJECTIONS]
    if module._qkv_same_embed_dim:
        whole = list(module.in_proj_weight.chunk(3))
    biases = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    heads = axes["heads"].slice.width if "heads" in axes else module.num_heads
    plain_(module)
    kept = [_kept(by_role[role], len(w)) for role, w in zip(_PROJECTIONS.values(), whole, strict=True)]
    for name, weight, index in zip(_PROJECTIONS, whole, kept, strict=True):
        setattr(module, name, nn.Parameter(weight.detach()[index].clone()))
    module.in_proj_weight = None
    if biases is not None:
        small = [b.detach()[index] for b, index in zip(biases, kept, strict=True)]
        module.in_proj_bias = nn.Parameter(torch.cat(small))
    out = module.out_proj
    out.weight = nn.Parameter(out.weight.detach()[:, kept[2]].clone())
    out.in_features, module.num_heads = len(kept[2]), heads
    module._qkv_same_embed_dim = False
    module.__class__ = NarrowAttention


def _kept(axis: Axis | None, size: int) -> Tensor:
    return torch.arange(size) if axis is None else axis.kept.cpu()

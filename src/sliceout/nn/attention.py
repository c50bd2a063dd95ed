"""``nn.MultiheadAttention`` with slices: torch's own computes with numbers that cannot follow one, so this rewrites it.

Queries and keys share one slice of every head's dims, values and the output projection another (the paper); or a range
of heads is kept. Only the sliced training forward is ours: in ``eval()``, and so on torch's fused inference path, the
plain class runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import take
from ..slices import Axis, Slice
from ..takes import ConcatAxis, Take
from .base import Sliced, _autocast_dtype
from .mixing import linear


class MultiheadAttention(Sliced, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` whose heads are sliced inside (``qk_slice``, ``v_slice``) or as a whole.

    Example:
        >>> from sliceout import Slice
        >>> inside = {"qk_slice": Slice(8, 0.5).axis(blocks=4), "v_slice": Slice(8, 0.5).axis(blocks=4)}
        >>> attention = MultiheadAttention(32, num_heads=4, batch_first=True, **inside)
        >>> x = torch.zeros(2, 5, 32)
        >>> attention(x, x, x)[0].shape
        torch.Size([2, 5, 32])
    """

    roles = ("qk", "v", "heads")

    sizes = ("embed_dim",) * 3

    @classmethod
    def bind(cls, layer: Any, axes: dict[str, Axis]) -> None:
        super().bind(layer, axes)
        for role, axis in axes.items():
            heads = axis.slice.size if role == "heads" else axis.blocks
            if heads != layer.num_heads:
                raise ValueError(f"{role}_slice={axis} has {heads} heads, but this attention has {layer.num_heads}")
        if "heads" in axes and len(axes) > 1:
            raise ValueError("slice heads as a whole or inside, not both")
        if layer.bias_k is not None or layer.add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn have no sliced form")

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
        if not self.training or not any(s.sliced for s in self.slices):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal=True without attn_mask: as in torch, it only says that attn_mask is causal")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        dtype = None if self.out_proj.weight.dtype == torch.float64 else _autocast_dtype(query)
        parts = self._parts(query, self._live("qk"), self._live("v"))
        q, k, v = self._projected((query, key, value), dtype, parts)
        causal = is_causal and key_padding_mask is None and not need_weights  # then no mask need be read
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q, parts)
        weights: Tensor | None = None
        if need_weights:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            weights = F.dropout(weights, self.dropout)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=causal)
        small = take(self.out_proj.weight, Take(None, self._live("v"), scale_cols=True), dtype, parts=parts)
        out = linear(out.transpose(1, 2).flatten(2), small, self.out_proj.bias)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def taken(self) -> list[tuple[nn.Parameter, Take]]:
        whole = Slice(self.embed_dim, 0.0).axis()
        *_, v = axes = [self.axes.get(role) or self.axes.get("heads") or whole for role in ("qk", "qk", "v")]
        apart = zip((self.q_proj_weight, self.k_proj_weight, self.v_proj_weight), map(Take, axes), strict=True)
        fused = Take(ConcatAxis(tuple(axes)))
        found: Any = [*apart, (self.in_proj_weight, fused), (self.in_proj_bias, fused)]
        return [(p, t) for p, t in (*found, (self.out_proj.weight, Take(None, v))) if p is not None]

    def _live(self, role: str) -> Axis | None:
        axis = self.axes.get(role) or self.axes.get("heads")
        return axis if axis is not None and axis.slice.sliced else None

    def _projected(self, inputs: tuple[Tensor, ...], dtype: torch.dtype | None, parts: int) -> list[Tensor]:
        """Queries, keys and values by heads, from the kept part of the three projections."""
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        heads = self.axes["heads"].slice.width if "heads" in self.axes else self.num_heads
        out = []
        for x, weight, bias, role in zip(inputs, weights, biases, ("qk", "qk", "v"), strict=True):
            taken = Take(self._live(role))
            small = None if bias is None else take(bias, taken, dtype, parts=parts)
            projected = linear(x, take(weight, taken, dtype, parts=parts), small)
            out.append(projected.unflatten(-1, (heads, -1)).transpose(1, 2))
        return out

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, parts: int) -> Tensor | None:
        """Both masks as one additive mask that broadcasts over ``[batch, heads, queries, keys]``."""
        masks = []
        if attn_mask is not None:
            attn_mask = _additive(attn_mask, q)
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
                if "heads" in self.axes:
                    of_heads = Take(None, self.axes["heads"].slice.axis())
                    each = (take(m, of_heads, parts=parts) for m in attn_mask.chunk(parts))  # its own for every part
                    attn_mask = torch.cat([m[i] if parts > 1 else m for i, m in enumerate(each)])
            masks.append(attn_mask)
        if padding is not None:
            masks.append(_additive(padding, q)[:, None, None, :])
        return sum(masks[1:], masks[0]) if masks else None


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))

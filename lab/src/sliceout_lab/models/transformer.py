"""The paper's language model: a decoder-only Transformer whose code asks for no number that slicing changes.

Queries, keys and values are projections of their own, heads are told apart by ``unflatten(-1, (heads, -1))``, and
``scaled_dot_product_attention`` takes its temperature from the width it is given. So ``convert_`` slices all of it
without knowing this class: queries with keys, values with the output projection, and the feed-forward layers.

The paper follows Vaswani et al. (2017), and so do the defaults: post-norm, sinusoidal positions, ReLU, and one matrix
for embedding and softmax. It names 6 layers, 4 heads, widths 1024 and 2048, and a vocabulary of 32k. Dropout lies where
SliceOut slices: on what the output projection of the attention reads, and on the units inside the feed-forward layers.
:func:`gpt` makes the network that is usual now: pre-norm, learned positions, GELU, GPT-2's initial weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sliceout.slices import width_of

ACTIVATIONS = ("relu", "gelu", "swiglu")
NORMS = ("post", "pre")
POSITIONS = ("sinusoidal", "learned")
INITS = ("xavier", "gpt2")
HEAD = 64
"""Dims of a head of :func:`gpt`."""


class Attention(nn.Module):
    """Causal self-attention with ``heads`` heads of ``dims`` each."""

    def __init__(self, width: int, heads: int, dims: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, heads * dims, bias=False) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.o = nn.Linear(heads * dims, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(self.dropout(y.transpose(-3, -2).flatten(-2)))


class FeedForward(nn.Module):
    """Two linear layers around ReLU or GELU, or a gated pair of them (SwiGLU)."""

    def __init__(self, width: int, hidden: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(width, hidden)
        self.gate = nn.Linear(width, hidden) if activation == "swiglu" else None
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            y = F.silu(self.gate(x)) * self.up(x)
        else:
            y = F.gelu(self.up(x)) if self.activation == "gelu" else F.relu(self.up(x))
        return self.down(self.dropout(y))


class Layer(nn.Module):
    """Attention and feed-forward, each with a residual connection and a layer norm before or after it."""

    def __init__(
        self, attention: Attention, feed_forward: FeedForward, width: int, norm: str, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.pre = norm == "pre"
        self.drop1, self.drop2 = _dropout(dropout), _dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            x = x + self.drop1(self.attention(self.norm1(x)))
            return x + self.drop2(self.feed_forward(self.norm2(x)))
        x = self.norm1(x + self.drop1(self.attention(x)))
        return self.norm2(x + self.drop2(self.feed_forward(x)))


class TransformerLM(nn.Module):
    """Tokens in, logits over the next token out.

    Args:
        width: of the residual stream; the paper uses 1024 and 2048.
        layers, heads, vocabulary: as in the paper.
        context: the longest sequence.
        hidden: of the feed-forward layers, 4 times the width by default.
        dropout: rate at the places that SliceOut slices.
        residual_dropout: rate on what attention and feed-forward layers add to the residual stream, and on its start.
        tied: use the embedding matrix for the logits too.
        norm: ``"post"`` (the original) or ``"pre"``.
        positions: ``"sinusoidal"`` (the original) or ``"learned"``.
        activation: ``"relu"`` (the original), ``"gelu"`` or ``"swiglu"``.
        init: ``"xavier"``, with embeddings that are scaled up where they are read (the original), or ``"gpt2"``:
            deviations of 0.02, less for what adds to the residual stream.
        keep: fraction of each head and of the feed-forward units: below 1, this is the plain network that SliceOut
            computes at each step, the floor for its time and memory.

    Example:
        >>> model = TransformerLM(32, layers=2, heads=4, vocabulary=100)
        >>> model(torch.zeros(2, 7, dtype=torch.long)).shape
        torch.Size([2, 7, 100])
    """

    def __init__(
        self,
        width: int = 1024,
        *,
        layers: int = 6,
        heads: int = 4,
        vocabulary: int = 32_000,
        context: int = 256,
        hidden: int | None = None,
        dropout: float = 0.0,
        residual_dropout: float = 0.0,
        tied: bool = True,
        norm: str = "post",
        positions: str = "sinusoidal",
        activation: str = "relu",
        init: str = "xavier",
        keep: float = 1.0,
    ) -> None:
        super().__init__()
        for name, value, allowed in (
            ("norm", norm, NORMS), ("positions", positions, POSITIONS), ("activation", activation, ACTIVATIONS),
            ("init", init, INITS),
        ):  # fmt: skip
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
        if width % heads:
            raise ValueError(f"width={width} does not divide into heads={heads}")
        if not 0 < keep <= 1:
            raise ValueError(f"keep={keep}: expected 0 < keep <= 1")
        dims, hidden = width // heads, 4 * width if hidden is None else hidden
        dims, hidden = (width_of(n, 1 - keep, None)[0] for n in (dims, hidden))  # as convert_ rounds
        self.width, self.context = width, context
        self.scale = math.sqrt(width) if init == "xavier" else 1.0
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width) if positions == "learned" else None
        if self.position is None:
            self.register_buffer("waves", _waves(context, width), persistent=False)
        self.dropout = _dropout(residual_dropout)

        def layer() -> Layer:
            inner = Attention(width, heads, dims, dropout), FeedForward(width, hidden, activation, dropout)
            return Layer(*inner, width, norm, residual_dropout)

        self.layers = nn.Sequential(*(layer() for _ in range(layers)))
        self.norm = nn.LayerNorm(width) if norm == "pre" else None
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.reset_parameters()
        if init == "gpt2":
            self._as_gpt2()
        if tied:
            self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        for m in self.modules():
            if isinstance(m, nn.Embedding):
                nn.init.normal_(m.weight, std=self.width**-0.5)
            elif isinstance(m, nn.Linear):
                nn.init.xavier_uniform_(m.weight)
                if m.bias is not None:
                    nn.init.zeros_(m.bias)

    def _as_gpt2(self) -> None:
        for name, p in self.named_parameters():
            if p.dim() > 1:
                adds = name.endswith(("attention.o.weight", "feed_forward.down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * len(self.layers)) if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[-1]
        if length > self.context:
            raise ValueError(f"a sequence of {length} tokens is longer than context={self.context}")
        positions: Any = self.waves if self.position is None else self.position.weight * self.scale
        x = self.layers(self.dropout(self.embedding(tokens) * self.scale + positions[:length]))
        return self.head(x if self.norm is None else self.norm(x))


def gpt(layers: int, width: int, **settings: Any) -> TransformerLM:
    """The usual GPT of so many layers and this width, with heads of 64 dims.

    Example:
        >>> round(sum(p.numel() for p in gpt(8, 512, vocabulary=8192).parameters()) / 1e6, 1)
        29.5
    """
    usual = {"norm": "pre", "positions": "learned", "activation": "gelu", "init": "gpt2"}
    return TransformerLM(width, **{"layers": layers, "heads": max(width // HEAD, 1), **usual, **settings})


def _dropout(rate: float) -> nn.Module:
    return nn.Dropout(rate) if rate else nn.Identity()


def _waves(context: int, width: int) -> Tensor:
    """The sines and cosines of Vaswani et al., one row per position."""
    position = torch.arange(context, dtype=torch.float32)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    waves = torch.zeros(context, width)
    waves[:, 0::2] = torch.sin(position * frequency)
    waves[:, 1::2] = torch.cos(position * frequency)[:, : width // 2]
    return waves

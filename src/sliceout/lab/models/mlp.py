"""The fully connected ReLU network of the paper's MNIST experiments: plain, and with slices written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from ... import nn as snn
from ...slices import Slice


def mlp(widths: Sequence[int], dropout: float = 0.0) -> nn.Sequential:
    """A ReLU network with these widths from input to output, and dropout after each hidden layer if it is not 0.

    Example:
        >>> len(mlp([784, 2048, 2048, 2048, 10], dropout=0.5))
        10
    """
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers[: -2 if dropout else -1])  # no ReLU and no dropout after the last layer


def sliced_mlp(widths: Sequence[int], rate: float, **options: Any) -> nn.Sequential:
    """:func:`mlp` with SliceOut on each hidden layer; ``options`` go to :class:`sliceout.Slice`.

    Example:
        >>> sliced_mlp([4, 16, 2], rate=0.5)
        Sequential(
          (0): Linear(in_features=4, out_features=16, bias=True, out_slice=Slice(8 of 16, circular))
          (1): ReLU()
          (2): Linear(in_features=16, out_features=2, bias=True, in_slice=Slice(8 of 16, circular))
        )
    """
    hidden = [Slice(width, rate, **options) for width in widths[1:-1]]
    layers: list[nn.Module] = []
    for (before, after), (into, out) in zip(pairwise(widths), pairwise([None, *hidden, None]), strict=True):
        layers += [snn.Linear(before, after, in_slice=into, out_slice=out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])

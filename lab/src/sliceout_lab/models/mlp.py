"""The fully connected ReLU network of the paper's MNIST experiments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from sliceout.slices import width_of


def mlp(widths: Sequence[int], dropout: float = 0.0, keep: float = 1.0) -> nn.Sequential:
    """A ReLU network with these widths from input to output, and dropout after each hidden layer if it is not 0.

    With ``keep`` below 1, hidden layers have this fraction of their units: the plain network that SliceOut computes.

    Example:
        >>> len(mlp([784, 2048, 2048, 2048, 10], dropout=0.5))
        10
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep}: expected 0 < keep <= 1")
    widths = [widths[0], *(width_of(n, 1 - keep, None)[0] for n in widths[1:-1]), widths[-1]]  # as convert_ rounds
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers[: -2 if dropout else -1])  # no ReLU and no dropout after the last layer

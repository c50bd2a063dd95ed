"""Sliced layers: torch's own layers that use the kept part of their parameters while they train.

Each class is the plain layer plus one or two slices. Written by hand::

    hidden = sliceout.Slice(2048, rate=0.5)
    self.fc1 = sliceout.nn.Linear(784, 2048, out_slice=hidden)
    self.norm = sliceout.nn.BatchNorm1d(2048, slice=hidden)
    self.fc2 = sliceout.nn.Linear(2048, 10, in_slice=hidden)

or made from an existing layer in place, which keeps its parameters, its keys and its identity: :func:`slice_`.

A *producer* (``out_slice``) starts a slice while it is in training mode. Whatever follows goes by the width of what
arrives: full input, full layer. So ``eval()`` runs the plain code of the plain class, and a frozen batch norm (in
``eval()`` inside a network that trains) still lines up.
"""

from .attention import MultiheadAttention
from .base import Sliced
from .factory import plain_, slice_
from .mixing import Conv1D, Conv1d, Conv2d, Conv3d, Linear
from .unitwise import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    GroupNorm,
    LayerNorm,
    LayerScale,
    PReLU,
    RMSNorm,
)

__all__ = [
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Conv1D", "Conv1d", "Conv2d", "Conv3d", "Dropout", "Dropout1d",
    "Dropout2d", "Dropout3d", "GroupNorm", "LayerNorm", "LayerScale", "Linear", "MultiheadAttention", "PReLU",
    "RMSNorm", "Sliced", "plain_", "slice_",
]  # fmt: skip

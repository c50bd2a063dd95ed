"""Compact gradients: gradients of the size of the slice, and optimizer updates of the slice alone.

``gradient``         the tensor that ``parameter.grad`` is, and what torch's operations do to it
``gradient_leaves``  how such a gradient comes out of a compiled graph
``optimizers``       slice-only updates for SGD, Adam and AdamW
``growth``           the same for units that are not in yet, with dense gradients too
``data_parallel``    slice-sized all-reduce under ``DistributedDataParallel``
"""

from __future__ import annotations

import functools

from . import data_parallel, growth, optimizers

__all__ = ["data_parallel", "growth", "observe", "optimizers"]


@functools.cache  # once
def observe() -> None:
    """Look after all optimizers and data-parallel wrappers from now on. Called when a compact slice gets a layer."""
    optimizers.observe()
    data_parallel.observe()

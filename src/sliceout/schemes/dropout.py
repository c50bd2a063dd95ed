"""What the paper compares SliceOut with, at the same places and through the same verb.

==============  ======================================================================================================
``none``        nothing is dropped; the model's own dropouts inside the groups rest
``standard``    single activations, where the layers that read a group read it (torch's ``dropout``)
``spatial``     whole channels, for each sample (SpatialDropout: torch's ``dropout1d`` to ``dropout3d``)
``dropblock``   squares of the feature map (``sliceout.dropblock``)
``controlled``  a random subset of units, gathered into small tensors: slices of another kind (``sliceout.subset``)
``patch``       a window of the feature map through the residual branch (``sliceout.patch``)
==============  ======================================================================================================

The first four are made here. The layers that read a group are given a subclass that drops from its input and then does
what it always did. Several readers of one activation draw a mask each; one that reads a pooled copy to gate the others
(squeeze-and-excite) is left alone. Masks come from torch's global random state, as everywhere in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.base import Sliced, sliced_subclass
from ..slices import Slice
from .dropblock import drop_block

DROPS = ("none", "standard", "spatial", "dropblock")


class Drop(Slice):
    """The dropout of one group: a slice that cuts nothing, but says what is dropped, how much, and whether at all."""

    def __init__(self, size: int, rate: float, scheme: str) -> None:
        super().__init__(size, 0.0, norm="none" if scheme == "none" else "flow")
        self.rate = 0.0 if scheme == "none" else rate
        self.sampling = scheme

    @property
    def sliced(self) -> bool:
        return self.on

    @property
    def share(self) -> str:
        return f"all {self.size}" if self.sampling == "none" else f"{1 - self.rate:.3g} of {self.size}"

    def rerate_(self, rate: float) -> None:
        if not 0 <= rate < 1:
            raise ValueError(f"rate={rate}: expected 0 <= rate < 1")
        self.rate = 0.0 if self.sampling == "none" else float(rate)


class Dropping(Sliced):
    """A layer that drops from its input before it reads it."""

    roles = ("in",)
    _name_prefix = "Dropping"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        s = self.axes["in"].slice
        if self.training and s.on and s.rate:
            x = _DROP[s.sampling](x, s.rate, self)
        return super().forward(x, *args, **kwargs)  # type: ignore[misc]


def _spatial(x: Tensor, rate: float, layer: Any) -> Tensor:
    dims = len(layer.kernel_size)
    drop: Any = (F.dropout1d, F.dropout2d, F.dropout3d)[dims - 1]
    return drop(x, rate) if x.dim() == dims + 2 else drop(x.unsqueeze(0), rate).squeeze(0)


def _blocks(x: Tensor, rate: float, layer: Any) -> Tensor:
    batched = x.dim() == len(layer.kernel_size) + 2
    return drop_block(x, rate) if batched else drop_block(x.unsqueeze(0), rate).squeeze(0)


_DROP: dict[str, Callable[[Tensor, float, Any], Tensor]] = {
    "standard": lambda x, rate, layer: F.dropout(x, rate),
    "spatial": _spatial,
    "dropblock": _blocks,
}


def dropping_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a layer class that drops from its input."""
    return sliced_subclass(plain, Dropping)

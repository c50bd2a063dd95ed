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

import functools
import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .dropblock import drop_block
from .groups import Group
from .nn.base import Sliced, adopt
from .nn.swap import plain_, slice_
from .slices import Axis, Slice
from .trace import Trace, expand

DROPS = ("none", "standard", "spatial", "dropblock")
SCHEMES = ("sliceout", "controlled", "patch", *DROPS)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


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

    def bind(self, axes: dict[str, Axis]) -> None:
        """Nothing is cut: any size will do."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        s = self.axes["in"].slice
        if self.training and s.on and s.rate:
            x = _DROP[s.sampling](x, s.rate, self)
        return super().forward(x, *args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self)._plain,), self.__getstate__()  # type: ignore[attr-defined]


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


@functools.cache
def _dropping(plain: Any) -> type[nn.Module]:
    return type(f"Dropping{plain.__name__}", (Dropping, plain), {"_plain": plain, "__doc__": plain.__doc__})


def _rebuild(plain: Any) -> nn.Module:
    made = _dropping(plain)
    return made.__new__(made)


def check_scheme(scheme: str) -> None:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r}: expected one of {', '.join(map(repr, SCHEMES))}")


def drop_(
    model: nn.Module, groups: list[Group], rates: dict[Group, float], scheme: str, trace: Trace
) -> dict[Group, Slice]:
    """Let the readers of ``groups`` drop, in place; a group that has none for this scheme gets the reason why."""
    modules: dict[str, Any] = dict(model.named_modules())
    plan: dict[Group, list[str]] = {}
    taken: set[str] = set()
    for group in groups:
        names = readers(group, trace)
        flat = next((n for n in names if not isinstance(modules[n], _CONVS)), None)
        if not names:
            group.reason = f"no layer reads these units by themselves: scheme={scheme!r} has no place here"
        elif scheme in ("spatial", "dropblock") and flat is not None:
            group.reason = f"{flat} is not a convolution: scheme={scheme!r} drops from feature maps"
        elif taken & set(names):
            group.reason = "its reader reads another group too, which drops already"
        else:
            plan[group] = names
            taken.update(names)
    made: dict[Group, Slice] = {g: Drop(g.size, rates[g], scheme) for g in plan}
    done: list[nn.Module] = []
    try:
        for group, names in plan.items():
            for name in names:
                plain: Any = type(modules[name])
                adopt(modules[name], _dropping(plain), {"in": made[group].axis()})
                done.append(modules[name])
            for name in group.dropouts:
                if not isinstance(modules[name], Sliced):
                    done.append(slice_(modules[name], slice=made[group]))
    except BaseException:
        for module in done:
            plain_(module)
        raise
    return made


def readers(group: Group, trace: Trace) -> list[str]:
    """The layers that read the units and do not hand them on, except those that read a pooled copy of them."""
    handed_on = set(group.names("out"))
    found = [n for n in dict.fromkeys(group.names("in")) if n not in handed_on]
    positions = {n: _positions(trace, n) for n in found}
    return [n for n in found if positions[n] > 1 or max(positions.values()) == 1]


def _positions(trace: Trace, name: str) -> int:
    """Pixels or tokens in what a layer reads, for one sample."""
    sizes = [math.prod(a.size for a in expand(dim)) for dim in trace.inputs.get(name, [])]
    use = next((u for u in trace.uses if u.module == name and u.key == "weight"), None)
    maps = use is not None and len(use.dims) > 2
    return math.prod(sizes[2:] if maps else sizes[1:-1])

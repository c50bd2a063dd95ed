"""Which slices are drawn when: the random generator, all slices of one model, and the layers that hold them.

Starts come from a counter-based generator: ``(seed, stream, step)`` says it all, on CPU and GPU alike, so that a run
can be repeated and resumed. The slices of one model share one step count (:class:`Slices`). ``stepping`` moves it on
after every optimizer step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .slices import Slice

# -- the generator -----------------------------------------------------------------------------------------------------

MASK_32 = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """A bijective 32-bit hash (Wellons' lowbias32) on int64 tensors.

    The second multiplier is written as a negative number, equal modulo 2**32, so that no product leaves int64.
    """
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK_32
    x = ((x ^ (x >> 15)) * (0x846CA68B - (1 << 32))) & MASK_32
    return x ^ (x >> 16)


def draw_table(slices: list[Slice]) -> Tensor:
    """What the draw needs to know of each slice: int64 ``[n, 5]``, rows of ``(seed, stream, *Slice.rule)``."""
    return torch.tensor([(s.seed & MASK_32, s.stream, *s.rule) for s in slices], dtype=torch.int64, device="cpu")


def starts_at(step: int | Tensor, table: Tensor) -> Tensor:
    """The starts of all slices at ``step``: plain integer arithmetic, so CPU and GPU agree.

    ``step`` is a number, or an int64 tensor on the table's device where the draw itself is part of a captured graph.
    """
    seed, stream, count, stride, last = table.unbind(1)
    bits = mix((mix((mix(seed) + step) & MASK_32) + stream * 0x9E3779B9) & MASK_32)
    return torch.minimum(((bits * count) >> 32) * stride, last)


AHEAD = 64
"""Steps whose starts are computed together: one at a time would cost eager training half a millisecond a step."""


class _Ahead:
    """The starts of ``slices`` at ``count`` steps from ``first`` on, on the host and on the devices."""

    def __init__(self, slices: list[Slice], first: int, count: int) -> None:
        self.slices, self.first = slices, first
        starts = starts_at(torch.arange(first, first + count, device="cpu")[:, None], draw_table(slices))
        self.on_host: list[list[int]] = starts.tolist()
        self.tensors = [s.start for s in slices]
        on_device: dict[torch.device, list[int]] = {}
        for i, s in enumerate(slices):
            if s.contiguous:
                on_device.setdefault(s.start.device, []).append(i)
        self.on_device = [
            ([self.tensors[i] for i in members], starts[:, members, None].to(device, non_blocking=True))  # no waiting
            for device, members in on_device.items()
        ]
        self.subsets: list[Any] = [s for s in slices if not s.contiguous]

    def knows(self, step: int) -> bool:
        """Whether ``step`` is among them, and the starts are still kept in the same places."""
        return 0 <= step - self.first < len(self.on_host) and all(
            s.start is t for s, t in zip(self.slices, self.tensors, strict=True)
        )

    def draw(self, step: int) -> None:
        """Set all starts to those of ``step``: one copy on each device."""
        row = step - self.first
        for s, start in zip(self.slices, self.on_host[row], strict=True):
            s.start_on_host = start
        for tensors, values in self.on_device:
            torch._foreach_copy_(tensors, values[row].unbind())
        if self.subsets:
            self.subsets[0].after_draw(self.subsets)


# -- slices that are drawn together ------------------------------------------------------------------------------------


class Slices:
    """The slices of one model: drawn together, with one step count, so that a run can be repeated and resumed."""

    def __init__(self, slices: Iterable[Slice], step: int = 0) -> None:
        self.members = list(slices)
        self.drawn = 0  # how often draw_ was called on this object
        self.stamp = 0  # changes whenever starts may have
        self._begin()
        self._tell_apart()
        for s in self.members:
            s.owner = self
        self.seek_(step)

    def _begin(self) -> None:
        """What is neither copied nor saved."""
        self._ahead: _Ahead | None = None
        self.caches: dict[str, Any] = {}  # what others keep for as long as these slices live
        # Records of ``stepping``: who has stepped, and whether training goes on without draws.
        self.stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.expected: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.observed: int | None = None
        self.version = self.changes = 0

    def _tell_apart(self) -> None:
        """No two slices may draw alike."""
        if len({(s.seed, s.stream) for s in self.members}) < len(self.members):
            for stream, s in enumerate(self.members):
                s.stream = stream

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def draw_(self) -> None:
        """Move on to the next step's starts."""
        self.drawn += 1
        self.stamp += 1
        self.step += 1
        if self._ahead is None or not self._ahead.knows(self.step):
            if self._ahead is None:
                self._tell_apart()  # what was loaded may have come from before they were joined
            self._ahead = _Ahead(self.members, self.step, AHEAD)
        self._ahead.draw(self.step)

    def seek_(self, step: int) -> None:
        """Go to the starts of ``step``, as after loading a checkpoint."""
        self.step = step
        self.stamp += 1
        self._ahead = None  # made anew at the next draw
        _Ahead(self.members, step, 1).draw(step)

    def state_dict(self) -> dict[str, Any]:
        """What to save where checkpoints do not keep the metadata of ``model.state_dict()`` (safetensors, DCP)."""
        entered = [s.entered for s in self.members]
        slices = [[s.seed, s.stream, s.size, s.width] for s in self.members]
        return {"step": self.step, "slices": slices, "entered": entered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        here, there = [[s.size, s.width] for s in self.members], [list(x[2:]) for x in state["slices"]]
        entered = state.get("entered") or [()] * len(there)
        if any(entered) and len(here) == len(there):  # widths that grow: whoever changes them will
            there = [[size, width] for (size, _), (_, width) in zip(there, here, strict=True)]
        if here != there:
            raise ValueError(f"saved slices [size, width] {there}, but this model's are {here}: convert it alike first")
        for s, (seed, stream, *_), changes in zip(self.members, state["slices"], entered, strict=True):
            s.seed, s.stream, s.entered = seed, stream, tuple((width, step) for width, step in changes)
        self.seek_(state["step"])

    def __getstate__(self) -> dict[str, Any]:
        return {"members": self.members, "drawn": self.drawn, "stamp": self.stamp, "step": self.step}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __repr__(self) -> str:
        return f"Slices(step={self.step}, {self.members})"


def owner_of(s: Slice) -> Slices:
    """What draws ``s``: it alone, until a model brings it together with others."""
    return Slices([s]) if s.owner is None else s.owner


# -- the slices of a model ---------------------------------------------------------------------------------------------

layers: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
"""All sliced layers there are, in the order in which they were made."""
generation = 0
"""Changes whenever layers come or go or slices are joined: what was found out about them before may be wrong."""


def register(layer: Any) -> None:
    """Redraw this layer's slices whenever its model's are."""
    layers[layer] = None
    for s in layer.slices:
        owner_of(s)
    _changed()


def unregister(layer: nn.Module) -> None:
    """Undo :func:`register`."""
    layers.pop(layer, None)
    _changed()


def _changed() -> None:
    global generation
    generation += 1


def slices_of(found: Iterable[Any]) -> list[Slice]:
    """The slices of these layers, each once."""
    return list(dict.fromkeys(s for layer in found for s in layer.slices))


def slices(model: nn.Module) -> Slices:
    """The slices of ``model``, in the order of its layers; they are drawn together.

    Slices made by hand are joined the first time their model is seen, here or at its first optimizer step.

    Raises:
        ValueError: if no layer is sliced, or if the model holds a ``Slice`` that no layer uses.

    Example:
        >>> import sliceout
        >>> hidden = sliceout.Slice(16, rate=0.5)
        >>> net = nn.Sequential(sliceout.nn.Linear(4, 16, out_slice=hidden), sliceout.nn.Linear(16, 2, in_slice=hidden))
        >>> slices(net)
        Slices(step=0, [Slice(8 of 16, circular)])
    """
    found = slices_of(m for m in model.modules() if m in layers)
    if not found:
        raise ValueError(f"{type(model).__name__} has no sliced layer: call sliceout.convert_ or use sliceout.nn")
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Slice) and value not in found:
                where = f"{name}.{attribute}" if name else attribute
                raise ValueError(f"{where} = {value} is used by no layer: pass it as in_slice, out_slice or slice")
    owner = join(found)
    if owner.members[: len(found)] != found:  # joined by an optimizer, in the order of its parameters
        owner.members = list(dict.fromkeys([*found, *owner.members]))
        owner.seek_(owner.step)
    return owner


def join(found: list[Slice]) -> Slices:
    """The one owner of these slices, made of all owners they have."""
    owners = list(dict.fromkeys(owner_of(s) for s in found))
    if len(owners) == 1:
        return owners[0]
    joined = Slices([s for owner in owners for s in owner], step=max(owner.step for owner in owners))
    joined.drawn = max(owner.drawn for owner in owners)
    for owner in owners:
        joined.stepped |= owner.stepped
    _changed()
    return joined


def draw_(model: nn.Module) -> None:
    """Move the slices of ``model`` on by one draw: for training loops that use no ``torch.optim`` optimizer."""
    slices(model).draw_()


def off_(model: nn.Module) -> nn.Module:
    """Train the full network from now on (the paper's last 1-10 % of training)."""
    for s in slices(model):
        s.on = False
    return model


def on_(model: nn.Module) -> nn.Module:
    """Slice again after :func:`off_`."""
    for s in slices(model):
        s.on = True
    return model

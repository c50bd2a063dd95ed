"""Which slices are drawn when: the random generator, all slices of one model, and the layers that hold them.

Starts come from a counter-based generator: ``(seed, stream, step)`` says it all, on CPU and GPU alike, so that a run
can be repeated and resumed. The slices of one model share one step count (:class:`Slices`). ``stepping`` moves it on
after every optimizer step.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .slices import Slice

# -- the generator -----------------------------------------------------------------------------------------------------

MASK_32 = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
"""2**32 over the golden ratio: multiples of it lie far apart."""


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
    _, _, count, stride, last = table.unbind(1)
    return torch.minimum(((_bits(step, table) * count) >> 32) * stride, last)


def _bits(step: int | Tensor, table: Tensor) -> Tensor:
    """32 random bits for each slice at ``step``."""
    seed, stream, *_ = table.unbind(1)
    return mix((mix((mix(seed) + step) & MASK_32) + stream * GOLDEN) & MASK_32)


def part_starts_at(
    step: int | Tensor, table: Tensor, spread: Tensor, parts: int, rank: int = 0, ranks: int = 1
) -> Tensor:
    """:func:`starts_at` of slices with several ``parts``, and these behind it: those of ``rank`` out of ``ranks``.

    Where ``spread``, the starts of all parts of all ranks lie evenly around the ring from a random offset on, and which
    part has which is a random order, other for each slice and step. Elsewhere each part has a number of its own.
    """
    _, _, count, stride, last = (column[:, None] for column in table.unbind(1))
    bits, number = _bits(step, table)[..., None], torch.arange(parts * ranks, device=table.device)
    own = mix((bits + (number + 1) * GOLDEN) & MASK_32)
    even = (((bits * count) >> 32) + own.argsort(dim=-1, stable=True) * count // (parts * ranks)) % count
    drawn = torch.where(spread[:, None], even, (own * count) >> 32)[..., rank * parts : (rank + 1) * parts]
    return torch.minimum(drawn * stride, last)


def rank_and_ranks() -> tuple[int, int]:
    """This process among those that train together."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


_asked = itertools.count()


def seed_of_torch() -> int:
    """The seed of torch's default generator, which stays as it is; that of rank 0 where several processes train.

    Ranks often seed torch differently, and must slice alike. They agree by the store of the process group, so that this
    needs no device.
    """
    rank, ranks = rank_and_ranks()
    if ranks == 1:
        return torch.initial_seed()
    store, key = torch.distributed.distributed_c10d._get_default_store(), f"sliceout/seed/{next(_asked)}"
    if rank == 0:
        store.set(key, str(torch.initial_seed()))
    return int(store.get(key))  # waits for rank 0, as long as the group's timeout


AHEAD = 64
"""Steps whose starts are computed together: one at a time would cost eager training half a millisecond a step."""


class _Ahead:
    """The starts of ``slices`` at ``count`` steps from ``first`` on, on the host and on the devices."""

    def __init__(self, slices: list[Slice], first: int, count: int) -> None:
        self.slices, self.first, self.ranks = slices, first, rank_and_ranks()
        steps = torch.arange(first, first + count, device="cpu")[:, None]
        alike: dict[tuple[torch.device, int, str], list[int]] = {}
        for i, s in enumerate(slices):
            alike.setdefault((s.start.device, s.parts, s.ranks), []).append(i)
        self.tensors = [s.start for s in slices]
        self.groups: list[tuple[list[Slice], list[list[list[int]]], list[Tensor], Tensor]] = []
        for (device, parts, ranks), members in alike.items():
            same = [slices[i] for i in members]
            if parts == 1:
                starts = starts_at(steps, draw_table(same))[..., None]
            else:
                spread = torch.tensor([s.sampling == "circular" for s in same], device="cpu")
                place = self.ranks if ranks == "spread" else (0, 1)
                starts = part_starts_at(steps, draw_table(same), spread, parts, *place)
            drawn = [i for i, s in enumerate(same) if s.contiguous]
            on_device = starts[:, drawn].to(device, non_blocking=True)  # no waiting
            self.groups.append((same, starts.tolist(), [same[i].start for i in drawn], on_device))
        self.count = count
        self.subsets: list[Any] = [s for s in slices if not s.contiguous]

    def knows(self, step: int) -> bool:
        """Whether ``step`` is among them, the starts are still kept in the same places, and as many ranks train."""
        return (
            0 <= step - self.first < self.count
            and all(s.start is t for s, t in zip(self.slices, self.tensors, strict=True))
            and self.ranks == rank_and_ranks()
        )

    def draw(self, step: int) -> None:
        """Set all starts to those of ``step``: one copy for each device and number of parts."""
        row = step - self.first
        for same, on_host, tensors, on_device in self.groups:
            for s, starts in zip(same, on_host[row], strict=True):
                s.starts_on_host = starts
            if tensors:
                torch._foreach_copy_(tensors, on_device[row].unbind())
        if self.subsets:
            self.subsets[0].after_draw(self.subsets)


# -- slices that are drawn together ------------------------------------------------------------------------------------


class Slices:
    """The slices of one model: drawn together, with one step count, so that a run can be repeated and resumed."""

    def __init__(self, slices: Iterable[Slice], step: int = 0, follows_torch: bool = False) -> None:
        self.members = list(slices)
        self.drawn = 0  # how often draw_ was called on this object
        self.stamp = 0  # changes whenever starts may have
        self._begin()
        self._tell_apart()
        for s in self.members:
            s.owner, s.follows_torch = self, s.follows_torch or follows_torch
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
        slices = [[s.seed, s.stream, *_widths(s)] for s in self.members]
        return {"step": self.step, "slices": slices, "entered": entered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        here, there = [_widths(s) for s in self.members], [list(x[2:]) for x in state["slices"]]
        entered = state.get("entered") or [()] * len(there)
        if any(entered) and len(here) == len(there):  # widths that grow: whoever changes them will
            there = [[size, now[1], *parts] for (size, _, *parts), now in zip(there, here, strict=True)]
        if here != there:
            raise ValueError(
                f"saved slices [size, width, parts] {there}, but this model's are {here}: convert it alike first"
            )
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


def _widths(s: Slice) -> list[int]:
    """Size and width, and the parts if there are several."""
    return [s.size, s.width, *([s.parts] if s.parts > 1 else [])]


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

"""When slices are redrawn: once after every optimizer step, without anybody calling anything.

torch lets us watch every ``optimizer.step()``. After one, the slices of the layers whose parameters it holds move on
to the next draw. A model whose parameters are split over several optimizers moves on when all of them have stepped.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .slices import Slice, Slices

# -- the slices of a model -----------------------------------------------------------------------------------------------


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
    found = _slices_of(m for m in model.modules() if hasattr(m, "axes"))
    if not found:
        raise ValueError(f"{type(model).__name__} has no sliced layer: call sliceout.convert_ or use sliceout.nn")
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Slice) and value not in found:
                where = f"{name}.{attribute}" if name else attribute
                raise ValueError(f"{where} = {value} is used by no layer: pass it as in_slice, out_slice or slice")
    families = _join(found)
    return families[0] if len(families) == 1 else Slices(found, step=max(f.step for f in families))


def draw_(model: nn.Module) -> None:
    """Move the slices of ``model`` on by one draw: for training loops that use no ``torch.optim`` optimizer."""
    slices(model).draw_()


def _slices_of(layers: Iterable[Any]) -> list[Slice]:
    return list(dict.fromkeys(s for layer in layers for s in layer.slices))


def _join(found: list[Slice]) -> list[Slices]:
    """The families of these slices, after those that were made one by one have become one family."""
    loose = [s for s in found if len(s.family) == 1]
    if len(loose) > 1:
        Slices(loose, step=max(s.family.step for s in loose))
    return list(dict.fromkeys(s.family for s in found))


# -- watching optimizers -------------------------------------------------------------------------------------------------

_layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_held: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[Slices]]] = weakref.WeakKeyDictionary()
_rounds: weakref.WeakKeyDictionary[Slices, _Round] = weakref.WeakKeyDictionary()
_hook: Any = None


class _Round:
    """Which optimizers have stepped since the last draw, and which are expected to."""

    def __init__(self) -> None:
        self.stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.expected: weakref.WeakSet[Optimizer] | None = None

    def complete_with(self, optimizer: Optimizer, family: Slices) -> bool:
        """Note a step; true if it ends the round."""
        if optimizer in self.stepped:  # it came round again without the others: they do not step every time
            self.expected = weakref.WeakSet(self.stepped)
        else:
            self.stepped.add(optimizer)
            if self.expected is None and _covers(self.stepped, family):
                self.expected = weakref.WeakSet(self.stepped)
        done = self.expected is not None and set(self.expected) <= set(self.stepped)
        if done:
            self.stepped.clear()
        return done


def watch(layer: nn.Module) -> None:
    """Redraw this layer's slices whenever an optimizer that holds its parameters has stepped."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_step)
    _layers.add(layer)
    _held.clear()


def unwatch(layer: nn.Module) -> None:
    """Undo :func:`watch`."""
    _layers.discard(layer)
    _held.clear()


@torch.compiler.disable
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for family in _families_in(optimizer):
        if _rounds.setdefault(family, _Round()).complete_with(optimizer, family):
            family.draw_()


def _families_in(optimizer: Optimizer) -> list[Slices]:
    """The families with a parameter in ``optimizer``; remembered until its parameters or the layers change."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if optimizer not in _held or _held[optimizer][0] != count:
        place = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        mine = []
        for layer in _layers:
            if places := [place[id(p)] for p in _trained(layer) if id(p) in place]:
                mine.append((min(places), layer))
        mine.sort(key=lambda pair: pair[0])
        _held[optimizer] = count, _join(_slices_of(layer for _, layer in mine))
    return _held[optimizer][1]


def _covers(optimizers: Iterable[Optimizer], family: Slices) -> bool:
    """Whether these optimizers hold every trained parameter of the family's layers."""
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    members = set(family)
    return all(id(p) in held for layer in _layers if members & set(layer.slices) for p in _trained(layer))  # type: ignore[arg-type]


def _trained(layer: nn.Module) -> list[Tensor]:
    return [p for p in layer.parameters() if p.requires_grad]


# -- noticing that nothing draws -----------------------------------------------------------------------------------------


def notice(family: Slices, weight: Tensor) -> None:
    """Called before a training forward as long as ``family`` was never redrawn; warns if ``weight`` is being trained.

    A parameter counts its in-place changes. A few may be initialisation or loading; more of them, each before another
    forward pass, are optimizer steps that we did not see.
    """
    if family.witness is None:
        family.witness = id(weight)
    if family.witness != id(weight) or family.version == weight._version:
        return
    family.version = weight._version
    family.changes += 1
    if family.changes == 4:
        warnings.warn(
            "sliceout: this model is training, but its slices have never been redrawn: no torch.optim optimizer that "
            "holds its parameters has stepped. Call sliceout.draw_(model) after every step.",
            stacklevel=4,
        )


# -- position in the sequence of draws, saved with the model -------------------------------------------------------------


def position(s: Slice) -> dict[str, int]:
    """What must be saved so that the draws of ``s`` go on where they are."""
    return {"seed": s.seed, "stream": s.stream, "step": s.family.step}


def seek(s: Slice, position: dict[str, int]) -> None:
    """Return to a saved :func:`position`."""
    s.seed, s.stream = position["seed"], position["stream"]
    s.family.seek_(position["step"])

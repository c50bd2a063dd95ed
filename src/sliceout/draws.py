"""When slices are redrawn: once after every optimizer step, without anybody calling anything.

torch lets us watch every ``optimizer.step()``. After one, the slices of the layers whose parameters it holds move on
to the next draw. A model whose parameters are split over several optimizers moves on when all of them have stepped.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import distributed, optim
from .slices import Slice, Slices

# -- the slices of a model ---------------------------------------------------------------------------------------------


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
    found = _slices_of(m for m in model.modules() if m in _layers)
    if not found:
        raise ValueError(f"{type(model).__name__} has no sliced layer: call sliceout.convert_ or use sliceout.nn")
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Slice) and value not in found:
                where = f"{name}.{attribute}" if name else attribute
                raise ValueError(f"{where} = {value} is used by no layer: pass it as in_slice, out_slice or slice")
    family = _join(found)
    if family.members[: len(found)] != found:  # joined by an optimizer, in the order of its parameters
        family.members = list(dict.fromkeys([*found, *family.members]))
        family.seek_(family.step)
    return family


def draw_(model: nn.Module) -> None:
    """Move the slices of ``model`` on by one draw: for training loops that use no ``torch.optim`` optimizer."""
    slices(model).draw_()


def _slices_of(layers: Iterable[Any]) -> list[Slice]:
    return list(dict.fromkeys(s for layer in layers for s in layer.slices))


def _join(found: list[Slice]) -> Slices:
    """The one family of these slices, made of all families they are in."""
    families = list(dict.fromkeys(s.family for s in found))
    if len(families) == 1:
        return families[0]
    joined = Slices([s for f in families for s in f], step=max(f.step for f in families))
    joined.drawn = max(f.drawn for f in families)
    _rounds[joined] = _Round()
    for f in families:
        if f in _rounds:
            _rounds[joined].stepped |= _rounds[f].stepped
    _held.clear()
    return joined


# -- watching optimizers -----------------------------------------------------------------------------------------------

_layers: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()  # a set that keeps its order
_held: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[Slices]]] = weakref.WeakKeyDictionary()
_rounds: weakref.WeakKeyDictionary[Slices, _Round] = weakref.WeakKeyDictionary()
_hook: Any = None


class _Round:
    """Which optimizers have stepped since the last draw, and which are expected to."""

    def __init__(self) -> None:
        self.stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.expected: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def complete_with(self, optimizer: Optimizer, family: Slices) -> bool:
        """Note a step; true if it ends the round."""
        if optimizer in self.stepped:  # it came round again without the others: they do not step every time
            self.expected, self.stepped = self.stepped, weakref.WeakSet()
        self.stepped.add(optimizer)
        if not self.expected and _covers(self.stepped, family):
            self.expected = weakref.WeakSet(self.stepped)
        done = bool(self.expected) and set(self.expected) <= set(self.stepped)
        if done:
            self.stepped.clear()
        return done


def watch(layer: nn.Module) -> None:
    """Redraw this layer's slices whenever an optimizer that holds its parameters has stepped."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_hook_for_any_mode)
    if any(s.grads == "compact" for s in _slices_of([layer])):
        optim.watch()
        distributed.watch()
    _layers[layer] = None
    _held.clear()


def unwatch(layer: nn.Module) -> None:
    """Undo :func:`watch`."""
    _layers.pop(layer, None)
    _held.clear()


_paused = False


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Optimizer steps in here draw nothing: whoever pauses draws by hand."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def _hook_for_any_mode(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Draw after a step; one that is being compiled leaves its graph for it."""
    if torch.compiler.is_compiling():
        torch.compiler.disable(_after_step)(optimizer, args, kwargs)  # not a decorator: that imports the compiler
    else:
        _after_step(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    families = [] if _paused else families_in(optimizer)
    if not families or _steps_running(optimizer) > 1:  # a subclass's step that calls its parent's runs hooks twice
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        warnings.warn(
            "sliceout: this optimizer step is being captured in a CUDA graph, whose replays cannot draw. "
            "Use sliceout.capture, or call sliceout.draw_(model) after every replay.",
            stacklevel=3,
        )
        return
    for family in families:
        if _rounds.setdefault(family, _Round()).complete_with(optimizer, family):
            family.draw_()


def families_in(optimizer: Optimizer) -> list[Slices]:
    """The families with a parameter in ``optimizer``; remembered until its parameters or the layers change."""
    params = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if optimizer not in _held or _held[optimizer][0] != params:
        place = {p: i for i, p in enumerate(params)}
        mine = []
        for layer in _layers:
            if places := [place[id(p)] for p in layer.parameters() if id(p) in place]:
                mine.append((min(places), layer))
        mine.sort(key=lambda pair: pair[0])
        found = _slices_of(layer for _, layer in mine)
        if loose := [s for s in found if len(s.family) == 1]:
            _join(loose)
        _held[optimizer] = params, list(dict.fromkeys(s.family for s in found))
    return _held[optimizer][1]


def _covers(optimizers: Iterable[Optimizer], family: Slices) -> bool:
    """Whether these optimizers hold every trained parameter of the family's layers."""
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    members = set(family)
    layers: list[Any] = [layer for layer in _layers if members & set(_slices_of([layer]))]
    return all(id(p) in held for layer in layers for p in layer.parameters() if p.requires_grad)


def _nothing(*args: Any) -> None:
    """Stands for a step."""


# What runs the hooks around every optimizer's step; a torch that has it no longer draws once too often at worst.
_STEP = getattr(Optimizer, "profile_hook_step", lambda step: step)(_nothing).__code__


def _steps_running(optimizer: Optimizer | None = None) -> int:
    """How many calls of ``step`` (of this optimizer) we are inside of."""
    steps = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        steps += frame.f_code is _STEP and (optimizer is None or frame.f_locals.get("self") is optimizer)
        frame = frame.f_back
    return steps


# -- noticing that nothing draws ---------------------------------------------------------------------------------------


def notice(family: Slices, weight: Tensor, forward: bool = True) -> None:
    """Called as long as ``family`` was never redrawn, before a training forward or at its end; warns if it trains.

    A parameter counts its in-place changes. One or two may be surgery; more of them, each between two passes that want
    gradients, are optimizer steps that we did not see. Compiled passes run no Python: they are noticed at ``eval()``.
    """
    if _paused:
        return
    if not (weight.is_leaf and weight.requires_grad) or weight.is_inference():
        return
    if not (torch.is_grad_enabled() if forward else weight.grad is not None):
        return
    if family.witness is None:
        family.witness, family.version, family.changes = id(weight), weight._version, 0
    if family.witness != id(weight) or family.version == weight._version:
        return
    family.version = weight._version
    family.changes += 1
    if family.changes == 3 and not _steps_running():  # LBFGS changes the weights many times in one step
        warnings.warn(
            "sliceout: this model is training, but its slices have never been redrawn: no torch.optim optimizer that "
            "holds its parameters has stepped. Call sliceout.draw_(model) after every step.",
            stacklevel=4,
        )


# -- position in the sequence of draws, saved with the model -----------------------------------------------------------


def position(s: Slice) -> dict[str, int]:
    """What must be saved so that the draws of ``s`` go on where they are."""
    return {"seed": s.seed, "stream": s.stream, "step": s.family.step}


def seek(s: Slice, position: dict[str, int]) -> None:
    """Return to a saved :func:`position`."""
    s.seed, s.stream = position["seed"], position["stream"]
    s.family.seek_(position["step"])

"""When slices move: once after every optimizer step, without anybody calling anything.

torch lets us observe every ``optimizer.step()``. After one, the slices of the layers whose parameters it holds move on
to the next draw. A model whose parameters are split over several optimizers moves on when all of them have stepped.
Where a model trains and nothing draws, a warning says so (:func:`check_drawn`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import drawing
from .drawing import Slices

_held: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[int], list[Slices]]] = weakref.WeakKeyDictionary()
_paused: ContextVar[bool] = ContextVar("sliceout_paused", default=False)


@functools.cache
def observe_optimizers() -> None:
    """Draw after every optimizer step from now on. Called when the first sliced layer is made."""
    register_optimizer_step_post_hook(_hook_for_any_mode)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Optimizer steps in here draw nothing: whoever pauses draws by hand."""
    before = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(before)


def _hook_for_any_mode(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Draw after a step; one that is being compiled leaves its graph for it."""
    if torch.compiler.is_compiling():
        torch.compiler.disable(_after_step)(optimizer, args, kwargs)  # not a decorator: that imports the compiler
    else:
        _after_step(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    owners = [] if _paused.get() else owners_in(optimizer)
    if not owners or _steps_running(optimizer) > 1:  # a subclass's step that calls its parent's runs hooks twice
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        warnings.warn(
            "sliceout: this optimizer step is being captured in a CUDA graph, whose replays cannot draw. "
            "Use sliceout.capture, or call sliceout.draw_(model) after every replay.",
            stacklevel=3,
        )
        return
    for owner in owners:
        if _completes_round(optimizer, owner):
            owner.draw_()


def _completes_round(optimizer: Optimizer, owner: Slices) -> bool:
    """Record that ``optimizer`` has stepped; true if all optimizers that hold the owner's layers now have."""
    if optimizer in owner.stepped:  # it came round again without the others: they do not step every time
        owner.expected, owner.stepped = owner.stepped, weakref.WeakSet()
    owner.stepped.add(optimizer)
    if not owner.expected and _covers(owner.stepped, owner):
        owner.expected = weakref.WeakSet(owner.stepped)
    done = bool(owner.expected) and set(owner.expected) <= set(owner.stepped)
    if done:
        owner.stepped.clear()
    return done


def owners_in(optimizer: Optimizer) -> list[Slices]:
    """What draws the slices of the layers with a parameter in ``optimizer``; kept until either changes."""
    params = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if optimizer not in _held or _held[optimizer][:2] != (drawing.generation, params):
        place = {p: i for i, p in enumerate(params)}
        places = {layer: [place[id(p)] for p in layer.parameters() if id(p) in place] for layer in drawing.layers}
        mine = sorted((layer for layer, held in places.items() if held), key=lambda layer: min(places[layer]))
        found = drawing.slices_of(mine)
        if loose := [s for s in found if len(drawing.owner_of(s)) == 1]:
            drawing.join(loose)
        _held[optimizer] = drawing.generation, params, list(dict.fromkeys(s.owner for s in found))
    return _held[optimizer][2]


def _covers(optimizers: Iterable[Optimizer], owner: Slices) -> bool:
    """Whether these optimizers hold every trained parameter of the owner's layers."""
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    members = set(owner)
    layers: list[Any] = [layer for layer in drawing.layers if not members.isdisjoint(layer.slices)]  # type: ignore[arg-type]
    return all(id(p) in held for layer in layers for p in layer.parameters() if p.requires_grad)


# What runs the hooks around every optimizer's step; a torch that has it no longer draws once too often at worst.
_STEP = getattr(Optimizer, "profile_hook_step", lambda step: step)(lambda *args: None).__code__


def _steps_running(optimizer: Optimizer | None = None) -> int:
    """How many calls of ``step`` (of this optimizer) we are inside of."""
    steps = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        steps += frame.f_code is _STEP and (optimizer is None or frame.f_locals.get("self") is optimizer)
        frame = frame.f_back
    return steps


# -- training without draws --------------------------------------------------------------------------------------------


def check_drawn(owner: Slices, weight: Tensor, forward: bool = True) -> None:
    """Called as long as ``owner`` was never redrawn, before a training forward or at its end; warns if it trains.

    A parameter counts its in-place changes. One or two may be surgery; more of them, each between two passes that want
    gradients, are optimizer steps that we did not see. Compiled passes run no Python: they are checked at ``eval()``.
    """
    if _paused.get() or not (weight.is_leaf and weight.requires_grad) or weight.is_inference():
        return
    if not (torch.is_grad_enabled() if forward else weight.grad is not None):
        return
    if owner.observed is None:
        owner.observed, owner.version, owner.changes = id(weight), weight._version, 0
    if owner.observed != id(weight) or owner.version == weight._version:
        return
    owner.version = weight._version
    owner.changes += 1
    if owner.changes == 3 and not _steps_running():  # LBFGS changes the weights many times in one step
        warnings.warn(
            "sliceout: this model is training, but its slices have never been redrawn: no torch.optim optimizer that "
            "holds its parameters has stepped. Call sliceout.draw_(model) after every step.",
            stacklevel=4,
        )

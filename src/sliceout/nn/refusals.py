"""What cannot go well with sliced layers, refused with the way out before it fails somewhere in torch, or nowhere.

A sliced layer hands fewer units to the next one. Whoever replaces a layer, wraps it with full-sized weights of his own,
or reaches one that ``convert_`` never saw, breaks what the layers have agreed on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

WAY_OUT = "call sliceout.revert_(model) first, and convert_ again afterwards if it is to be sliced"


@functools.cache  # once
def observe() -> None:
    """Refuse from now on that sliced layers are replaced by layers that know nothing of their slices."""
    register_module_module_registration_hook(_on_registration)


def _on_registration(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if torch.compiler.is_compiling() or module is None:
        return
    old: Any = parent._modules.get(name)
    if old is None or module is old or not hasattr(old, "_gradient_leaves") or next(old.children(), None) is not None:
        return  # a module with layers of its own is replaced together with them
    if hasattr(module, "_gradient_leaves"):
        return
    inside = set(module.modules())
    kind = type(module).__name__
    if old not in inside:
        raise RuntimeError(
            f"{called(old)}, {name!r} of {type(parent).__name__}, is sliced and would be replaced by a {kind} that is "
            f"not: {WAY_OUT}"
        )
    if any(m not in (module, old) and next(m.parameters(False), None) is not None for m in inside):
        raise RuntimeError(
            f"{called(old)}, {name!r} of {type(parent).__name__}, is sliced and would be wrapped in a {kind} with "
            f"full-sized weights of its own: {WAY_OUT} (of LoRA's layers, it slices both)"
        )


def refused_by(layer: Any, tool: str) -> RuntimeError:
    """The error of a tool of torch that cannot know what a sliced layer does."""
    return RuntimeError(f"{called(layer)} is sliced, and {tool} cannot take it: {WAY_OUT}")


def wrong_width(layer: Any, width: int, size: int, kept: int) -> RuntimeError:
    """The error of a layer whose input is neither full nor sliced."""
    return RuntimeError(
        f"{called(layer)} was given {width} units: it takes all {size}, or the {kept} that are kept. A layer before it "
        f"was replaced after convert_, or this branch was not taken by its dry run: {WAY_OUT}, with example_inputs= "
        "that take this branch"
    )


def called(layer: Any) -> str:
    """A sliced layer by its name in the model that was converted, and its kind."""
    return f"{layer._path or 'a layer'} ({layer._plain.__name__})"


def _refuse_sliced(path: str, size: int, dim: int, layer: nn.Module, args: Any) -> None:
    """A hook in front of a layer that the dry run never called: it may be given sliced units, and has no slice."""
    x = args[0] if args else None
    if isinstance(x, Tensor) and x.dim() >= -dim and x.shape[dim] != size:
        raise RuntimeError(
            f"{path} ({layer}) was given {x.shape[dim]} units and takes {size}. The dry run of convert_ never called "
            f"it, so it has no slice: {WAY_OUT}, with example_inputs= that reach it"
        )


def watch_unseen_(model: nn.Module, seen: Any) -> None:
    """Put a hook in front of every linear layer and convolution of ``model`` that is not ``seen``, by name."""
    layers: Any = model.named_modules()
    for name, layer in layers:
        if name in seen:
            continue
        if type(layer) is nn.Linear:
            layer.register_forward_pre_hook(functools.partial(_refuse_sliced, name, layer.in_features, -1))
        elif type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
            dim = -1 - len(layer.kernel_size)
            layer.register_forward_pre_hook(functools.partial(_refuse_sliced, name, layer.in_channels, dim))


def unwatch_(model: nn.Module) -> None:
    """Undo :func:`watch_unseen_`."""
    for layer in model.modules():
        for key, hook in list(layer._forward_pre_hooks.items()):
            if getattr(hook, "func", None) is _refuse_sliced:
                del layer._forward_pre_hooks[key]

"""Compact gradients out of compiled graphs.

A compiled graph returns a gradient of the shape of each input: a dense one for a parameter. So it is given one more
input for every sliced parameter: a *leaf* of the shape of the slice, but without memory: it is there to be
differentiated for. The gradient that arrives at it is handed on to the parameter as a ``SlicedGrad``, as if it had come
through eager code: hooks run, and gradients add up.

The parameter itself remains an input of the graph, one without a gradient; autograd tells its hooks so, with a ``None``
that few expect. A parameter that has hooks of its own is therefore not stood for: its gradient is dense.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..ops import views
from ..slices import Take
from .gradient import Place, SlicedGrad


def refresh(layer: Any) -> None:
    """Make what is missing of the stand-ins of a layer: its parameters, their device or the widths may have changed."""
    before, made = layer._stand_ins, {}
    for name, taken in layer.takes().items():
        p = layer._parameters.get(name)
        if p is not None and taken.compact and _may_be_stood_for(p):
            kept = before.get(name)
            fits = kept is not None and kept[0]() is p and kept[2] == taken and _fits(kept[1], p, taken)
            made[name] = kept if fits else (weakref.ref(p), _make(layer, name, p, taken), taken)
    own = "_stand_ins" in layer.__dict__  # even if empty: a class's would be guarded, slowly, once for every layer
    if not own or made.keys() != before.keys() or any(made[name] is not before[name] for name in made):
        layer._stand_ins = made


def refresh_all(model: nn.Module) -> None:
    """:func:`refresh` for all layers of a model, after a change of rates."""
    for layer in model.modules():
        if hasattr(layer, "_stand_ins"):
            refresh(layer)


def _may_be_stood_for(p: Tensor) -> bool:
    plain = type(p) is nn.Parameter and p.is_floating_point() and not p.is_meta
    return plain and not _watched(p) and p not in _excluded


def _watched(p: Tensor) -> bool:
    return bool(p._backward_hooks) or not all(is_ours(h) for h in (p._post_accumulate_grad_hooks or {}).values())


def is_ours(hook: Any) -> bool:
    """Whether a hook is this library's own, which may be called once too often (``distributed``)."""
    return str(getattr(hook, "func", hook).__module__).startswith(f"{__package__}.")


_excluded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def exclude(model: nn.Module, allowed: set[Tensor]) -> None:
    """No stand-ins for any other parameter: somebody waits for its gradient where autograd would put it."""
    for layer in model.modules():
        for name in getattr(layer, "_stand_ins", {}):
            p = layer._parameters.get(name)  # which may be parametrized by now
            if p is not None and p not in allowed:
                _excluded[p] = True
    refresh_all(model)


def _form(p: Tensor, taken: Take) -> tuple[list[int], tuple[int, ...]]:
    """Shape and strides of the gradient that will arrive; autograd would copy one that lies otherwise."""
    shape = views.small_shape(p.shape, *([] if a is None else a.geometry for a in (taken.rows, taken.cols)))
    return shape, views.strides(tuple(shape), views.is_channels_last(p))


def _fits(leaf: Tensor, p: Tensor, taken: Take) -> bool:
    alike = leaf.dtype == p.dtype and leaf.device == p.device
    return alike and (list(leaf.shape), leaf.stride()) == _form(p, taken)


@torch.inference_mode(False)  # ``model.train()`` may be called in there, and what is made in there is never trained
def _make(layer: Any, name: str, p: Tensor, taken: Take) -> Tensor:
    shape, strides = _form(p, taken)
    leaf = torch.empty_strided(shape, strides, dtype=p.dtype, device=p.device)
    leaf.untyped_storage().resize_(0)  # nobody reads or writes it
    leaf.requires_grad_()
    leaf.register_post_accumulate_grad_hook(
        functools.partial(_arrive, weakref.ref(layer), name, taken, views.like_of(p))
    )
    if leaf.is_cuda:
        torch._dynamo.mark_static_address(leaf, guard=False)  # CUDA graphs need not copy it in
    return leaf


def _arrive(layer: weakref.ref[Any], name: str, taken: Take, like: views.Like, leaf: Tensor) -> None:
    """Hand the gradient of a stand-in on to the parameter it stands for."""
    grad, leaf.grad = leaf.grad, None
    live = layer()
    if live is None or grad is None:
        return
    rows, cols = Place.now(taken.rows), Place.now(taken.cols)
    _accumulate(live._parameters[name], SlicedGrad(grad, like, rows, cols, *taken.factors, True))


def _accumulate(p: Tensor, grad: Tensor) -> None:
    """What autograd does with the gradient of a leaf."""
    if _watched(p):  # autograd calls its hooks too: without the gradient, or once more
        raise RuntimeError(
            "sliceout: a parameter with compact gradients has got a hook. Call model.train() after you register hooks, "
            "so that the compiled graph learns of it: the gradient of this parameter will be dense"
        )
    if p.grad is None:
        p.grad = grad
    else:
        with torch.no_grad():
            p.grad.add_(grad)
    for hook in (p._post_accumulate_grad_hooks or {}).values():
        hook(p)

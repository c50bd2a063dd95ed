"""Compact gradients out of compiled graphs.

A compiled graph returns a gradient of the shape of each input: a dense one for a parameter. So it is given one more
input for every sliced parameter: a *leaf* of the shape of the slice, but without memory: it is there to be
differentiated for. The gradient that arrives at it is handed on to the parameter as a ``SlicedGrad``, as if it had come
through eager code: hooks run, and gradients add up.

The parameter itself remains an input of the graph, one without a gradient; autograd tells its hooks so, with a ``None``
that few expect. A parameter that has hooks of its own therefore gets no leaf: its gradient is dense.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..ops import GradientLeaf
from ..ops.placement import Placement, TensorSpec, is_channels_last, small_shape, strides_of
from ..takes import Take
from .gradient import SlicedGrad


def refresh(layer: Any) -> None:
    """Make the leaves of a layer that are missing: its parameters, their device or the widths may have changed."""
    before, made = layer._gradient_leaves, {}
    for name, taken in layer.takes().items():
        p = layer._parameters.get(name)
        if p is not None and taken.compact and _may_have_a_leaf(p):
            kept = before.get(name)
            fits = kept is not None and kept.parameter() is p and kept.take == taken and _fits(kept.leaf, p, taken)
            made[name] = kept if fits else GradientLeaf(weakref.ref(p), _make(layer, name, p, taken), taken)
    own = "_gradient_leaves" in layer.__dict__  # even if empty: a class's would be guarded, slowly, for every layer
    if not own or made.keys() != before.keys() or any(made[name] is not before[name] for name in made):
        layer._gradient_leaves = made


def _may_have_a_leaf(p: Tensor) -> bool:
    plain = type(p) is nn.Parameter and p.is_floating_point() and not p.is_meta
    return plain and not _has_foreign_hooks(p) and p not in _excluded


def _has_foreign_hooks(p: Tensor) -> bool:
    """Hooks that are not this library's own: those may be called once too often (``data_parallel``)."""
    modules = [getattr(hook, "func", hook).__module__ for hook in (p._post_accumulate_grad_hooks or {}).values()]
    return bool(p._backward_hooks) or not all(str(m).startswith(f"{__package__}.") for m in modules)


_excluded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def exclude(model: nn.Module, allowed: set[Tensor]) -> None:
    """No leaves for any other parameter: somebody waits for its gradient where autograd would put it."""
    layers = [layer for layer in model.modules() if hasattr(layer, "_gradient_leaves")]
    for layer in layers:
        for name in layer._gradient_leaves:  # type: ignore[union-attr]
            p = layer._parameters.get(name)  # which may be parametrized by now
            if p is not None and p not in allowed:
                _excluded[p] = True
    for layer in layers:
        refresh(layer)


def _form(p: Tensor, taken: Take) -> tuple[list[int], tuple[int, ...]]:
    """Shape and strides of the gradient that will arrive; autograd would copy one that lies otherwise."""
    rows, cols = ([] if a is None else a.geometry for a in taken.simple_axes)
    shape = small_shape(p.shape, rows, cols)
    return shape, strides_of(tuple(shape), is_channels_last(p))


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
        functools.partial(_arrive, weakref.ref(layer), name, taken, TensorSpec.of(p))
    )
    if leaf.is_cuda:
        torch._dynamo.mark_static_address(leaf, guard=False)  # CUDA graphs need not copy it in
    return leaf


def _arrive(layer: weakref.ref[Any], name: str, taken: Take, spec: TensorSpec, leaf: Tensor) -> None:
    """Hand the gradient of a leaf on to its parameter."""
    grad, leaf.grad = leaf.grad, None
    live = layer()
    if live is None or grad is None:
        return
    p, grad = live._parameters[name], SlicedGrad(grad, spec, Placement.now(taken), owned=True)
    if _has_foreign_hooks(p):  # autograd calls its hooks too: without the gradient, or once more
        raise RuntimeError(
            "sliceout: a parameter with compact gradients has got a hook. Call model.train() after you register hooks, "
            "so that the compiled graph learns of it: the gradient of this parameter will be dense"
        )
    if p.grad is None:  # from here on as autograd does it
        p.grad = grad
    else:
        with torch.no_grad():
            p.grad.add_(grad)
    for hook in (p._post_accumulate_grad_hooks or {}).values():
        hook(p)

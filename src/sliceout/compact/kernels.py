"""Slice-only updates of SGD and Adam as Triton kernels: all slices of an optimizer in one launch.

The kernels walk the small gradients and update the entries of parameters and state where these lie (``ops.kernels`` has
the index arithmetic). Starts are read from device memory, so that one captured graph serves every draw.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim import Optimizer

from ..ops.kernels import entries, find_tile, mapped_entries, pointer_to, run_of, scaled, source, walk
from ..ops.multi_tensor import LaunchPlan, Piece, supports
from ..ops.placement import Place, address_key, is_channels_last, layout_key, memory_format
from .gradient import Work


@triton.jit
def _gradient(
    d, first, found_inf, grad_scale, SMALL: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr, FOUND_INF: tl.constexpr, GRAD_SCALE: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """Where this tile lies in the full tensors, what of it is to be updated, and its gradient.

    That is small, or ``WHOLE``: it lies as the full tensors do.
    """
    i, r, c, inside = walk(d, first, VECTOR, BLOCK)
    if FOUND_INF:  # GradScaler met an overflow: nothing is touched
        inside = inside & (tl.load(found_inf + 0 * r) == 0)
    rr, row_place = source(r, *run_of(d + 10, 1))
    cc, col_place = source(c, *run_of(d + 14, VECTOR))
    at = mapped_entries(d, rr, cc, VECTOR)
    grads = pointer_to(tl.load(d + 1), SMALL, VECTOR) + (at if WHOLE else entries(i, VECTOR))
    g = tl.load(grads, mask=inside[:, None], other=0).to(tl.float32)
    g = scaled(g, d, row_place, col_place, inside, VECTOR)
    if GRAD_SCALE:
        g = g / tl.load(grad_scale)
    if MAXIMIZE:
        g = -g
    return at, inside[:, None], g


@triton.jit
def _adam_kernel(
    table, owner, lr, found_inf, grad_scale, less_beta1, less_beta2, log2_beta1, log2_beta2, weight_decay, eps,
    FULL: tl.constexpr, SMALL: tl.constexpr, STATE: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
    LR_LIVES_ON_DEVICE: tl.constexpr, STEP_LIVES_ON_DEVICE: tl.constexpr, WHOLE: tl.constexpr, FOUND_INF: tl.constexpr,
    GRAD_SCALE: tl.constexpr, DECOUPLED: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    d, first, together = find_tile(table, owner, FIELDS, VECTOR, BLOCK)
    if LR_LIVES_ON_DEVICE:
        lr = tl.load(lr)
    step = tl.load(d + 5)
    if STEP_LIVES_ON_DEVICE:
        step = tl.load(step.to(tl.pointer_type(tl.float32)))
    count = step.to(tl.float64)  # in float32, 1 - 0.999 ** 1 would be four digits
    correction1 = (1 - tl.exp2(count * log2_beta1)).to(tl.float32)
    correction2 = (1 - tl.exp2(count * log2_beta2)).to(tl.float32)
    if together:
        _adam_tile(
            d, first, lr, found_inf, grad_scale, less_beta1, less_beta2, correction1, correction2, weight_decay, eps,
            FULL, SMALL, STATE, VECTOR, BLOCK, WHOLE, FOUND_INF, GRAD_SCALE, DECOUPLED, AMSGRAD, MAXIMIZE,
        )  # fmt: skip
    else:
        _adam_tile(
            d, first, lr, found_inf, grad_scale, less_beta1, less_beta2, correction1, correction2, weight_decay, eps,
            FULL, SMALL, STATE, 1, BLOCK, WHOLE, FOUND_INF, GRAD_SCALE, DECOUPLED, AMSGRAD, MAXIMIZE,
        )  # fmt: skip


@triton.jit
def _adam_tile(
    d, first, lr, found_inf, grad_scale, less_beta1, less_beta2, correction1, correction2, weight_decay, eps,
    FULL: tl.constexpr, SMALL: tl.constexpr, STATE: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr, FOUND_INF: tl.constexpr, GRAD_SCALE: tl.constexpr, DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    at, inside, g = _gradient(
        d, first, found_inf, grad_scale, SMALL, VECTOR, BLOCK, WHOLE, FOUND_INF, GRAD_SCALE, MAXIMIZE
    )
    params = pointer_to(tl.load(d), FULL, VECTOR) + at
    averages = pointer_to(tl.load(d + 2), STATE, VECTOR) + at
    squares = pointer_to(tl.load(d + 3), STATE, VECTOR) + at
    p = tl.load(params, mask=inside, other=0).to(tl.float32)
    m = tl.load(averages, mask=inside, other=0).to(tl.float32)
    v = tl.load(squares, mask=inside, other=0).to(tl.float32)
    if DECOUPLED:
        p = p * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m = m + less_beta1 * (g - m)
    v = v + less_beta2 * (g * g - v)
    tl.store(averages, m.to(STATE), mask=inside)
    tl.store(squares, v.to(STATE), mask=inside)
    if AMSGRAD:
        most = pointer_to(tl.load(d + 4), STATE, VECTOR) + at
        v = tl.maximum(v, tl.load(most, mask=inside, other=0).to(tl.float32))
        tl.store(most, v.to(STATE), mask=inside)
    p = p - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(params, p.to(FULL), mask=inside)


@triton.jit
def _sgd_kernel(
    table, owner, lr, found_inf, grad_scale, momentum, weight_decay,
    FULL: tl.constexpr, SMALL: tl.constexpr, STATE: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
    LR_LIVES_ON_DEVICE: tl.constexpr, WHOLE: tl.constexpr, FOUND_INF: tl.constexpr, GRAD_SCALE: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    d, first, together = find_tile(table, owner, FIELDS, VECTOR, BLOCK)
    if LR_LIVES_ON_DEVICE:
        lr = tl.load(lr)
    if together:
        _sgd_tile(
            d, first, lr, found_inf, grad_scale, momentum, weight_decay,
            FULL, SMALL, STATE, VECTOR, BLOCK, WHOLE, FOUND_INF, GRAD_SCALE, MOMENTUM, NESTEROV, MAXIMIZE,
        )  # fmt: skip
    else:
        _sgd_tile(
            d, first, lr, found_inf, grad_scale, momentum, weight_decay,
            FULL, SMALL, STATE, 1, BLOCK, WHOLE, FOUND_INF, GRAD_SCALE, MOMENTUM, NESTEROV, MAXIMIZE,
        )  # fmt: skip


@triton.jit
def _sgd_tile(
    d, first, lr, found_inf, grad_scale, momentum, weight_decay,
    FULL: tl.constexpr, SMALL: tl.constexpr, STATE: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr, FOUND_INF: tl.constexpr, GRAD_SCALE: tl.constexpr, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    at, inside, g = _gradient(
        d, first, found_inf, grad_scale, SMALL, VECTOR, BLOCK, WHOLE, FOUND_INF, GRAD_SCALE, MAXIMIZE
    )
    params = pointer_to(tl.load(d), FULL, VECTOR) + at
    p = tl.load(params, mask=inside, other=0).to(tl.float32)
    g = g + weight_decay * p
    if MOMENTUM:
        buffers = pointer_to(tl.load(d + 2), STATE, VECTOR) + at
        b = momentum * tl.load(buffers, mask=inside, other=0).to(tl.float32) + g
        tl.store(buffers, b.to(STATE), mask=inside)
        if NESTEROV:  # noqa: SIM108
            g = g + momentum * b
        else:
            g = b
    tl.store(params, (p - lr * g).to(FULL), mask=inside)


# -- from the host -----------------------------------------------------------------------------------------------------


class UpdatePlan(LaunchPlan):
    """Pieces whose slices an optimizer updates, step by step: gradients and counts are new."""

    def __init__(self, pieces: list[Piece], whole: bool = False) -> None:
        super().__init__(pieces, walk_full=False, dtypes=3)
        self.whole = whole
        self.counted = pieces[0].step is not None and not pieces[0].step.is_cuda  # on the host

    def refresh(self, smalls: Sequence[Tensor], steps: Sequence[Tensor]) -> None:
        """Take these gradients and counts, in the order of the pieces."""
        self.replace(1, map(Tensor.data_ptr, smalls))
        if steps:
            self.replace(5, map(int if self.counted else Tensor.data_ptr, steps))

    def update(
        self, kernel: Any, *numbers: float, lr: float | Tensor, found_inf: Tensor | None, grad_scale: Tensor | None,
        maximize: bool, **flags: bool,
    ) -> None:  # fmt: skip
        """Update all pieces by a kernel; ``numbers`` and ``flags`` are those of its formula."""
        flags |= {
            "LR_LIVES_ON_DEVICE": isinstance(lr, Tensor), "WHOLE": self.whole, "FOUND_INF": found_inf is not None,
            "GRAD_SCALE": grad_scale is not None, "MAXIMIZE": maximize,
        }  # fmt: skip
        self.run(kernel, lr, found_inf, grad_scale, *numbers, **flags)


def adam(
    updates: UpdatePlan, *, betas: tuple[float, float], weight_decay: float, eps: float, decoupled: bool, amsgrad: bool,
    **shared: Any,
) -> None:  # fmt: skip
    """Adam over the slices of ``full`` and of ``state``; ``small`` is the gradient, ``step`` has been counted up."""
    less, log2 = [1 - b for b in betas], [math.log2(b) if b else -math.inf for b in betas]
    flags = {"STEP_LIVES_ON_DEVICE": not updates.counted, "DECOUPLED": decoupled, "AMSGRAD": amsgrad}
    updates.update(_adam_kernel, *less, *log2, weight_decay, eps, **flags, **shared)


def sgd(updates: UpdatePlan, *, momentum: float, weight_decay: float, nesterov: bool, **shared: Any) -> None:
    """SGD over the slices of ``full`` and of ``state``; ``small`` is the gradient."""
    updates.update(_sgd_kernel, momentum, weight_decay, MOMENTUM=momentum != 0, NESTEROV=nesterov, **shared)


_prepared: weakref.WeakKeyDictionary[Optimizer, dict[int, tuple[list[Any], UpdatePlan | None]]]
_prepared = weakref.WeakKeyDictionary()


class Slices:
    """The slices that are updated together. What the kernel needs to know of them is kept as long as it is true."""

    def __init__(self, optimizer: Optimizer, work: Work, names: list[str]) -> None:
        self.kept = _prepared.setdefault(optimizer, {})
        self.work, self.names = work, names
        self.params, self.grads = [p for p, _ in work], [g for _, g in work]
        self.state = [optimizer.state[p] for p in self.params]
        self.steps = [s["step"] for s in self.state if "step" in s]
        self.device = self.params[0].device
        self.places: dict[int, tuple[Tensor, Any]] = {}

    def updates(self) -> UpdatePlan | None:
        """``None`` where there is no kernel for them."""
        key = id(self.params[0])
        if key not in self.kept or self.kept[key][0] != self._key():
            for p, s in zip(self.params, self.state, strict=True):
                for name in self.names:  # the format may have changed since, or be that of a checkpoint
                    if s[name].stride() != p.stride() and is_channels_last(s[name]) != is_channels_last(p):
                        s[name] = s[name].contiguous(memory_format=memory_format(p))
            self.kept[key] = self._key(), UpdatePlan(self._pieces(), self.grads[0].whole) if self._fit() else None
        return self.kept[key][1]

    def smalls(self) -> list[Tensor]:
        """The gradients, each laid out as its parameter; whole ones where only a region of them is read."""
        return [(g.grad if g.whole else g.small).contiguous(memory_format=memory_format(p)) for p, g in self.work]

    def _fulls(self) -> list[Tensor]:
        return [*self.params, *(s[name] for s in self.state for name in self.names)]

    def _key(self) -> list[Any]:
        """All that the kernel's table says, and whether there can be one."""
        return [
            self.grads[0].whole, *address_key([*self._fulls(), *self.steps]),
            *layout_key([g.small for g in self.grads]),
            *((self._place(g.at.rows), self._place(g.at.cols), g.at.gain) for g in self.grads),
            *(t if t is None else t.data_ptr() for g in self.grads for t in g.at[3:]),
        ]  # fmt: skip

    def _place(self, place: Place | None) -> Any:
        if place is None:
            return None
        if id(place) not in self.places:  # most gradients share theirs
            start = place.start_on(self.device)
            self.places[id(place)] = start, (start.data_ptr(), place.geometry)
        return self.places[id(place)][1]

    def _fit(self) -> bool:
        fulls = self._fulls()
        return (
            all(p.dtype != torch.float64 for p in self.params)
            and all(t.device == self.device for t in fulls)
            and supports(*fulls)
            and len({s.device for s in self.steps}) < 2
            and all(s.is_cpu or (s.device == self.device and s.dtype == torch.float32) for s in self.steps)
        )

    def _pieces(self) -> list[Piece]:
        pieces = []
        for p, g, s in zip(self.params, self.grads, self.state, strict=True):
            rows, cols = (None if q is None else (self.places[id(q)][0], q.geometry) for q in g.at[:2])
            state = tuple(s[name] for name in self.names)
            pieces.append(Piece(p, g.small, rows, cols, *g.at[2:], state, s.get("step")))
        return pieces

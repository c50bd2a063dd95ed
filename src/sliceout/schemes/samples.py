"""Sample-SliceOut: a slice of the batch goes through a residual branch, the other samples pass by on the shortcut.

Batches are shuffled, so this is stochastic depth (DropPath) in distribution, but what is dropped is never computed. The
modules of a branch keep their code: the one that the stream enters takes the samples, the one that hands over what is
added puts them back among zeros, multiplied by one over the fraction that was kept.

The slice is circular: every sample of a batch is kept by the same number of starts. Neighbours are kept together, which
says nothing about samples in random order. ``DroppedPath`` is plain DropPath at the same places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import KeyPath, MappingKey, SequenceKey, tree_leaves, tree_map_with_path

from .. import stepping
from ..nn.base import Sliced
from ..ops import host_knows_start
from ..ops.placement import memory_format
from ..slices import Slice

RING = 1 << 16
"""Starts are drawn on a ring of this many places, whatever the size of the batch is."""

Path = tuple[int | str, ...]
"""Where a tensor lies in ``(args, kwargs)`` or in what a module returns."""


class Samples(Slice):
    """Some consecutive samples of a batch of any size, in the sense of a ring.

    Args:
        rate: fraction of the samples that pass by.
        seed: as of every slice.

    Example:
        >>> some = Samples(0.4)
        >>> [some.kept_of(n) for n in (128, 10, 2, 1)]
        [77, 6, 1, 1]
    """

    batch = now = 0
    """Samples of the batch of this forward pass, and how many of them go through the branch."""
    saves = True
    """Whether what passes by is not computed."""

    def __init__(self, rate: float, seed: int = 0) -> None:
        super().__init__(RING, rate, align=1, norm="none", seed=seed)

    def kept_of(self, samples: int) -> int:
        """How many of so many samples are kept: at least one."""
        if not self.sliced:
            return samples
        return max(1, (2 * samples * self.width + self.size) // (2 * self.size))

    def note(self, samples: int, training: bool) -> None:
        """A batch of so many samples comes. Nothing is written that is known."""
        now = self.kept_of(samples) if training else samples
        if (self.batch, self.now) != (samples, now):
            self.batch, self.now = samples, now

    def at(self, start: Any, samples: int) -> Any:
        """The first of them."""
        return (start * samples) // RING

    @property
    def computed(self) -> float:
        """The fraction of the samples that the branch computes."""
        return self.width / self.size if self.saves else 1.0

    @property
    def share(self) -> str:
        return f"{self.width / self.size:.3g} of the samples"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.share}{'' if self.on else ', off'})"


class DroppedPath(Samples):
    """The baseline: all samples go through the branch, and each is dropped by itself."""

    saves = False

    def kept_of(self, samples: int) -> int:
        return samples

    @property
    def share(self) -> str:
        return f"all samples, {self.width / self.size:.3g} of them added"


# -- taking samples and putting them back ------------------------------------------------------------------------------


def take_samples(x: Tensor, s: Samples) -> Tensor:
    """The kept samples of ``x``."""
    kept = s.kept_of(x.shape[0])
    if host_knows_start(x):
        first, second = _runs(s.at(s.start_on_host, x.shape[0]), kept, x.shape[0])
        head = x.narrow(0, *first)
        return torch.cat([head, x.narrow(0, *second)]) if second[1] else head
    return _Move.apply(x, s.at(s.start[0], x.shape[0]), kept, 1.0, False)  # type: ignore[no-any-return]


def put_samples(small: Tensor, s: Samples, samples: int) -> Tensor:
    """``small`` among zeros for those of so many ``samples`` that are not in it, divided by the fraction it is."""
    at = s.at(s.start_on_host if host_knows_start(small) else s.start[0], samples)
    return _Move.apply(small, at, samples, samples / small.shape[0], True)  # type: ignore[no-any-return]


def _runs(at: int, kept: int, samples: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Start and length of the samples up to the end of the batch, and of those from its beginning on."""
    head = min(kept, samples - at)
    return (at, head), (0, kept - head)


class _Move(torch.autograd.Function):
    """Samples out of a batch, or ``back`` into one of zeros, times a number: each is the gradient of the other.

    Args of ``forward``: the tensor; the first sample, a number or a tensor; the samples of the result.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: int | Tensor, samples: int, gain: float, back: bool) -> Tensor:
        ctx.samples, ctx.gain, ctx.back = x.shape[0], gain, back
        ctx.at = None if isinstance(at, Tensor) else at
        ctx.save_for_backward(*([at] if isinstance(at, Tensor) else []))
        if isinstance(at, Tensor) and torch.compiler.is_compiling():
            return _gathered(x, at, samples, gain, back)
        shape = (samples, *x.shape[1:])
        moved = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
        if isinstance(at, Tensor):
            _copy_rows(x, at, moved, gain, back)
        else:
            _copy_runs(x, at, moved, gain, back)
        return moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        at = ctx.saved_tensors[0] if ctx.at is None else ctx.at
        return _Move.apply(grad, at, ctx.samples, ctx.gain, not ctx.back), None, None, None, None


def _copy_runs(x: Tensor, at: int, moved: Tensor, gain: float, back: bool) -> None:
    """Eager code that knows the start: one kernel for each run of samples, and one for each run of zeros."""
    kept, samples = sorted((x.shape[0], moved.shape[0]))
    small = 0
    for start, length in _runs(at, kept, samples):
        here, there = (small, start) if back else (start, small)
        torch.mul(x.narrow(0, here, length), gain, out=moved.narrow(0, there, length))
        small += length
    if back:
        for start, length in _runs((at + kept) % samples, samples - kept, samples):
            moved.narrow(0, start, length).zero_()


def _copy_rows(x: Tensor, at: Tensor, moved: Tensor, gain: float, back: bool) -> None:
    """Eager code that is being captured: the start may only be read on the device."""
    kept, samples = sorted((x.shape[0], moved.shape[0]))
    rows = (at + torch.arange(kept, device=x.device)) % samples
    if back:
        moved.zero_().index_copy_(0, rows, x * gain)
    else:
        torch.index_select(x, 0, rows, out=moved)
        moved *= gain


def _gathered(x: Tensor, at: Tensor, samples: int, gain: float, back: bool) -> Tensor:
    """Compiled code: each sample of the result is read where it is needed, so that what is around can be fused."""
    rows = torch.arange(samples, device=x.device)
    if not back:
        rows = rows + at
        return x[torch.where(rows >= x.shape[0], rows - x.shape[0], rows)] * gain
    rows = rows - at
    rows = torch.where(rows < 0, rows + samples, rows)
    kept = (rows < x.shape[0]).view(-1, *[1] * (x.dim() - 1))
    return torch.where(kept, x[rows.clamp(max=x.shape[0] - 1)] * gain, 0)


def drop_path(x: Tensor, rate: float) -> Tensor:
    """Plain DropPath: each sample is dropped by itself, by torch's random state."""
    keep = torch.empty([x.shape[0], *[1] * (x.dim() - 1)], dtype=x.dtype, device=x.device).bernoulli_(1 - rate)
    return x * keep.div_(1 - rate)


# -- modules of a branch -----------------------------------------------------------------------------------------------


class InBranch(Sliced):
    """A module at the border of a residual branch, or a DropPath in it that rests."""

    roles = ("samples",)
    _name_prefix = "Sampled"
    _takes: tuple[Path, ...] = ()
    """Where the stream lies in its arguments, other tensors that have samples, and what is added in its output."""
    _extras: tuple[Path, ...] = ()
    _puts: tuple[Path, ...] | None = None
    _rests = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        s: Any = self.axes["samples"].slice
        live = self.training and s.sliced
        if self._takes:
            args, kwargs = self._enter(s, args, kwargs)
        if self._extras and s.now != s.batch:
            args, kwargs = _at_paths((args, kwargs), self._extras, lambda t: t if len(t) == 1 else take_samples(t, s))
        y = args[0] if self._rests and live else super().forward(*args, **kwargs)  # type: ignore[misc]
        if self._puts is None or not (live if not s.saves else s.now != s.batch):  # some layers may be in eval mode
            return y
        if self._puts == ((0,),) and type(y) is tuple:  # of most attention
            return (_put(y[0], s), *y[1:])
        return _at_paths(y, self._puts, lambda t: _put(t, s))

    def _enter(self, s: Samples, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments with the samples of this step."""
        if self.training and not torch.compiler.is_compiling() and not s.owner.drawn:
            for p in self.parameters():  # type: ignore[attr-defined]
                stepping.check_drawn(s.owner, p)
                break

        def fewer(t: Tensor) -> Tensor:
            s.note(t.shape[0], self.training)
            return take_samples(t, s) if s.now != s.batch else t

        if self._takes == ((0, 0),):  # of nearly all modules: the first argument
            return (fewer(args[0]), *args[1:]), kwargs
        return _at_paths((args, kwargs), self._takes, fewer)  # type: ignore[no-any-return]


class NotesBatch:
    """A hook in front of a model: says how many samples the batch has that is coming.

    The modules that the stream enters note it too, for code that calls parts of a model. But under checkpointing the
    compiler lets nothing be written: there it has to be known before.
    """

    def __init__(self, slices: list[Samples]) -> None:
        self.slices = slices

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        sizes = [t.shape[0] for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()]
        for s in self.slices if sizes else ():  # what was there is not looked at: the compiler would guard it
            s.batch, s.now = sizes[0], s.kept_of(sizes[0]) if model.training else sizes[0]


def forget_batch_(model: nn.Module) -> None:
    """Take the hooks away that note the size of batches."""
    for module in model.modules():
        for key in [k for k, hook in module._forward_pre_hooks.items() if isinstance(hook, NotesBatch)]:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def _put(t: Tensor, s: Any) -> Tensor:
    return drop_path(t, s.rate) if isinstance(s, DroppedPath) else put_samples(t, s, s.batch)


def _at_paths(tree: Any, paths: tuple[Path, ...], change: Any) -> Any:
    """``tree`` with the tensors at these paths changed."""
    if paths == ((),):
        return change(tree)
    return tree_map_with_path(lambda path, t: change(t) if plain_path(path) in paths and t is not None else t, tree)


def plain_path(path: KeyPath) -> Path:
    """A path of pytree as numbers and names."""
    return tuple(k.idx if isinstance(k, SequenceKey) else k.key if isinstance(k, MappingKey) else str(k) for k in path)

"""take and put where the start is a Python int: a view if the slice is one run of memory, else a copy.

For eager code. It makes no copies on the CPU, and few launches on a GPU, where eager code waits for launches.

Along one dimension a slice is one run of entries in every block, or two if it wraps around the end. Over two
dimensions the runs make rectangles, so everything here is ``narrow`` and ``copy_``.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Cut = tuple[int, list[int]]
"""A start and ``[size, width, blocks, inner]`` (see ``Axis``); an empty list leaves the dimension whole."""

WHOLE: Cut = (0, [])
Like = tuple[tuple[int, ...], bool, torch.dtype]


def take_with_grad(full: Tensor, row: Cut, col: Cut, gain: float, dtype: torch.dtype) -> Tensor:
    """:class:`Take`, without the node where no gradient can flow."""
    apply = Take.apply if full.requires_grad or _transformed() else Take.forward
    return apply(full, row, col, gain, dtype)


def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active()


class _Function(torch.autograd.Function):
    """Skips the inspection of signatures that ``apply`` spends 50 us on, where no torch.func transform needs it."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if _transformed():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class Take(_Function):
    """:func:`take` times ``gain`` in ``dtype``; backward writes the gradient into place once, however it is sliced."""

    @staticmethod
    def forward(full: Tensor, row: Cut, col: Cut, gain: float, dtype: torch.dtype) -> Tensor:
        if gain == 1 and dtype == full.dtype:
            return take(full, row, col)
        if is_one_rectangle(row, col):
            view = take(full, row, col)
            return _scaled_into(torch.empty_like(view, dtype=dtype), view, gain)
        small = empty_small(full, row[1], col[1], dtype)
        for source, target in rectangles(full, small, row, col):
            _scaled_into(target, source, gain)
        return small

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        full, ctx.row, ctx.col, ctx.gain, _ = inputs
        ctx.full = like_of(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        put = Put.apply if torch.is_grad_enabled() or _transformed() else Put.forward  # second derivatives need a node
        return put(grad, ctx.full, ctx.row, ctx.col, ctx.gain), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], full: Tensor, *settings: Any) -> tuple[Tensor, int]:
        small = Take.apply(full.movedim(in_dims[0], -1), *settings)  # behind the sliced dimensions, out of their way
        return small, small.dim() - 1


class Put(_Function):
    """The adjoint of :class:`Take`, and the other way round, so that second derivatives work.

    ``like`` is the shape of the result, whether it is channels_last, and its dtype.
    """

    @staticmethod
    def forward(small: Tensor, like: Like, row: Cut, col: Cut, gain: float) -> Tensor:
        shape, channels_last, dtype = like
        layout = format_of(len(shape), channels_last)
        full = torch.empty(shape, dtype=dtype, device=small.device, memory_format=layout).zero_()
        for target, source in rectangles(full, small, row, col):
            _scaled_into(target, source, gain)
        return full

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        small, _, ctx.row, ctx.col, ctx.gain = inputs
        ctx.dtype = small.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Take.apply(grad, ctx.row, ctx.col, ctx.gain, ctx.dtype), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], small: Tensor, like: Like, *settings: Any) -> tuple[Tensor, int]:
        shape, _, dtype = like
        full = Put.apply(small.movedim(in_dims[0], -1), ((*shape, info.batch_size), False, dtype), *settings)
        return full, full.dim() - 1


def _scaled_into(target: Tensor, source: Tensor, gain: float) -> Tensor:
    """``target = source * gain``, rounded once."""
    if gain == 1:
        return target.copy_(source)
    if torch.promote_types(source.dtype, target.dtype) == source.dtype:
        return torch.mul(source, gain, out=target)
    return target.copy_(source).mul_(gain)


def take(full: Tensor, row: Cut, col: Cut) -> Tensor:
    """The kept part of ``full``, sharing its memory if it is one rectangle of it, and readable there."""
    if is_one_rectangle(row, col) and (full.dim() > 1 or readable(full, runs(*row)[0][0])):
        view = full
        for dim, cut in enumerate((row, col)):
            if cut[1]:
                ((offset, _, length),) = runs(*cut)
                view = view.narrow(dim, offset, length)
        return view
    return take_copy(full, row, col)


def take_copy(full: Tensor, row: Cut, col: Cut) -> Tensor:
    """:func:`take` into memory of its own."""
    small = empty_small(full, row[1], col[1])
    for source, target in rectangles(full, small, row, col):
        target.copy_(source)
    return small


def put_(full: Tensor, small: Tensor, row: Cut, col: Cut = WHOLE) -> Tensor:
    """Write ``small`` into its place in ``full``."""
    for target, source in rectangles(full, small, row, col):
        target.copy_(source)
    return full


def runs(start: int, geometry: list[int]) -> list[tuple[int, int, int]]:
    """``(offset in the full block, offset in the small block, length)`` of each contiguous run, in entries."""
    if not geometry:
        return [(0, 0, 0)]
    size, width, _, inner = geometry
    first = min(width, size - start)
    head = (start * inner, 0, first * inner)
    return [head] if first == width else [head, (0, first * inner, (width - first) * inner)]


def readable(vector: Tensor, offset: int) -> bool:
    """Whether kernels can read ``vector`` from this entry on.

    cuDNN's batch norms read 16 bytes at a time wherever the vector begins (pytorch/pytorch#195186). Matrices need not
    be asked about: products look at their addresses themselves.
    """
    return not vector.is_cuda or offset * vector.element_size() % 16 == 0


def one_run(start: int, geometry: list[int]) -> slice | None:
    """What a vector is indexed with to get its kept entries as one view; ``None`` if they are more than one run."""
    size, width, blocks, inner = geometry
    return slice(start * inner, (start + width) * inner) if blocks == 1 and start + width <= size else None


def store_(fulls: Sequence[Tensor], smalls: Sequence[Tensor], cut: Cut) -> None:
    """Write each of ``smalls`` over the kept entries of its vector in ``fulls``: one launch on a GPU."""
    both = [r for full, small in zip(fulls, smalls, strict=True) for r in rectangles(full, small, cut)]
    torch._foreach_copy_([full for full, _ in both], [small for _, small in both])


class InPlace:
    """The kept entries of vectors that somebody else will write to, such as running statistics.

    To make views costs the host as much as to use them, so those of every start are kept. Where the entries are not one
    run that kernels can read, they are copied to memory of their own, and back by :meth:`done`.
    """

    def __init__(self, fulls: tuple[Tensor, ...]) -> None:
        self.fulls = tuple(f.detach() for f in fulls)  # .data of a tensor may be replaced
        self.addresses = [f.data_ptr() for f in fulls]
        self.known: dict[Any, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
        self.apart: list[Tensor] = []

    def serves(self, *fulls: Tensor) -> bool:
        """Whether these lie where its vectors did; nothing else can, as long as those are held."""
        return [f.data_ptr() for f in fulls] == self.addresses

    def at(self, start: int, geometry: list[int]) -> list[Tensor]:
        """The kept entries of each vector."""
        self.now = self.known.get((start, geometry[1])) or self._make(start, geometry)
        smalls, here, there = self.now
        if here:
            torch._foreach_copy_(here, there)
        return smalls

    def done(self) -> None:
        """They have been written to."""
        _, here, there = self.now
        if here:
            torch._foreach_copy_(there, here)

    @torch.inference_mode(False)
    def _make(self, start: int, geometry: list[int]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        if len(self.known) >= 256:
            self.known.clear()
        run = one_run(start, geometry)
        if run is not None and all(readable(full, run.start) for full in self.fulls):
            made: Any = [full[run] for full in self.fulls], [], []
        else:
            width = math.prod(geometry[1:])
            if not self.apart or len(self.apart[0]) != width:
                self.apart = [full.new_empty(width) for full in self.fulls]
            # .data: a graph that saved them does not look at their values, and must not take this for a change
            cut = start, geometry
            pairs = [r for f, s in zip(self.fulls, self.apart, strict=True) for r in rectangles(f.data, s.data, cut)]
            made = self.apart, [small for _, small in pairs], [full for full, _ in pairs]
        self.known[start, geometry[1]] = made
        return made


def small_shape(shape: torch.Size, rows: list[int], cols: list[int]) -> list[int]:
    """The shape of what ``take`` makes of a tensor of this ``shape``."""
    out = list(shape)
    for dim, geometry in enumerate((rows, cols)):
        if geometry:
            _, width, blocks, inner = geometry
            out[dim] = width * blocks * inner
    return out


def empty_small(full: Tensor, rows: list[int], cols: list[int], dtype: torch.dtype | None = None) -> Tensor:
    """Memory for what ``take`` makes of ``full``, in the memory format of ``full``."""
    shape = small_shape(full.shape, rows, cols)
    return torch.empty(shape, dtype=dtype or full.dtype, device=full.device, memory_format=memory_format(full))


def memory_format(t: Tensor) -> torch.memory_format:
    """The format of what is made from ``t``."""
    return format_of(t.dim(), is_channels_last(t))


def is_channels_last(t: Tensor) -> bool:
    """Whether ``t`` has these strides; ``is_contiguous`` cannot tell for 1x1 and depthwise kernels."""
    return t.dim() in (4, 5) and t.stride(1) == 1 and t.stride(-1) == t.shape[1]


def looks(tensors: Sequence[Tensor]) -> list[Any]:
    """What a kernel's table says of these tensors: the same as long as they lie there, in that way."""
    return [*map(Tensor.data_ptr, tensors), *forms(tensors)]


def forms(tensors: Sequence[Tensor]) -> list[Any]:
    """:func:`looks` of tensors that are new every time."""
    return [*map(Tensor.stride, tensors), *map(_kind_and_shape, tensors)]


_kind_and_shape = operator.attrgetter("dtype", "shape")


def like_of(t: Tensor) -> Like:
    """What a tensor of the form of ``t`` is made from."""
    return tuple(t.shape), is_channels_last(t), t.dtype


def format_of(ndim: int, channels_last: bool) -> torch.memory_format:
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last if ndim == 4 else torch.channels_last_3d


@functools.lru_cache(1024)
def strides(shape: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    """Of a tensor of this shape without gaps."""
    order = [*range(len(shape))]
    if channels_last:
        order = [0, *range(2, len(shape)), 1]
    out, step = [0] * len(shape), 1
    for dim in reversed(order):
        out[dim] = step
        step *= max(shape[dim], 1)
    return tuple(out)


def is_one_rectangle(row: Cut, col: Cut) -> bool:
    return len(runs(*row)) == len(runs(*col)) == 1 and _blocks(row) == _blocks(col) == 1


def _blocks(cut: Cut) -> int:
    return cut[1][2] if cut[1] else 1


def rectangles(full: Tensor, small: Tensor, row: Cut, col: Cut = WHOLE) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of ``full`` and of ``small`` that hold the same entries."""
    row_dim, col_dim = 0, 1
    if _blocks(col) > 1:
        full, small = (t.unflatten(1, (_blocks(col), -1)) for t in (full, small))
        col_dim = 2
    if _blocks(row) > 1:
        full, small = (t.unflatten(0, (_blocks(row), -1)) for t in (full, small))
        row_dim, col_dim = 1, col_dim + 1
    for row_run in runs(*row):
        for col_run in runs(*col):
            a, b = full, small
            for dim, cut, (at, to, length) in ((row_dim, row, row_run), (col_dim, col, col_run)):
                if cut[1]:
                    a, b = a.narrow(dim, at, length), b.narrow(dim, to, length)
            yield a, b

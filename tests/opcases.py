"""Cases for take and put: tensors of 1 to 5 dimensions, sliced along the first, the second or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from sliceout import Axis, Slice
from sliceout.drawing import owner_of
from sliceout.ops.placement import format_of
from sliceout.schemes.subset import Subset
from sliceout.takes import Take


@dataclass
class Case:
    """A tensor shape, how it lies in memory, and what is taken from it."""

    shape: tuple[int, ...]
    rows: Axis | None
    cols: Axis | None
    layout: str = "contiguous"  # or "channels_last", "transposed"
    scale_rows: bool = False
    scale_cols: bool = False
    dtype: torch.dtype = torch.float64
    target: torch.dtype | None = None

    def __repr__(self) -> str:
        starts = [None if a is None else a.slice.start_on_host for a in (self.rows, self.cols)]
        return (
            f"Case({list(self.shape)} {self.layout}, rows={self.rows}, cols={self.cols}, starts={starts}, "
            f"scales={[self.scale_rows, self.scale_cols]}, {self.dtype} -> {self.target})"
        )

    @property
    def axes(self) -> tuple[Axis | None, Axis | None]:
        return self.rows, self.cols

    @property
    def scaled(self) -> bool:
        return any(t is not None for t in self.args[4:6])

    @property
    def result_dtype(self) -> torch.dtype:
        return self.target or self.dtype

    @property
    def description(self) -> Take:
        return Take(self.rows, self.cols, self.scale_rows, self.scale_cols)

    @property
    def args(self) -> tuple:
        """What the ops take after the tensor: starts, geometries, scales."""
        rows, cols = self.axes
        return (
            None if rows is None else rows.slice.start,
            None if cols is None else cols.slice.start,
            [] if rows is None else rows.geometry,
            [] if cols is None else cols.geometry,
            rows.slice.scale if rows is not None and self.scale_rows else None,
            cols.slice.scale if cols is not None and self.scale_cols else None,
        )

    def to(self, device: str) -> Case:
        for axis in self.axes:
            if axis is not None:
                axis.slice.to(torch.empty(0, device=device).device)
        return self

    def full(self, device: str = "cpu", coarse: bool = False) -> Tensor:
        """Random data in this shape and layout; ``coarse`` data are the same in bfloat16."""
        data = torch.randn(self.shape, dtype=torch.float64).to(torch.bfloat16 if coarse else self.dtype)
        return self.lay_out(data.to(self.dtype).to(device))

    def lay_out(self, t: Tensor) -> Tensor:
        if self.layout == "channels_last":
            # t.to(memory_format=...) would leave 1x1 kernels as they are; this gives them the strides, too
            return torch.empty_like(t, memory_format=format_of(t.dim(), True)).copy_(t)
        if self.layout == "transposed":
            return t.transpose(0, 1).contiguous().transpose(0, 1)
        return t

    # -- the truth, from the definition ------------------------------------------------------------------------------

    def factor(self, dim: int, wanted: bool) -> Tensor | None:
        axis = self.axes[dim]
        if axis is None or not wanted or axis.slice.scale is None:
            return None
        return axis.slice.scale.cpu().repeat_interleave(axis.inner).repeat(axis.blocks)

    def take(self, full: Tensor) -> Tensor:
        """The kept entries times their scales, in float64."""
        out = full.detach().cpu().double()
        for dim, wanted in ((0, self.scale_rows), (1, self.scale_cols)):
            axis, factor = self.axes[dim], self.factor(dim, wanted)
            if factor is not None:
                out = out * factor.view([-1 if d == dim else 1 for d in range(out.dim())])
            if axis is not None:
                out = torch.stack([out.select(dim, i) for i in axis.kept.tolist()], dim)
        return out

    def put(self, small: Tensor) -> Tensor:
        """The adjoint: the entries times their scales, in their place, zeros elsewhere; in float64."""
        out = small.cpu().double()
        for dim, wanted in ((0, self.scale_rows), (1, self.scale_cols)):
            axis, factor = self.axes[dim], self.factor(dim, wanted)
            if axis is not None:
                spread = torch.zeros([axis.size if d == dim else n for d, n in enumerate(out.shape)], dtype=out.dtype)
                for i, at in enumerate(axis.kept.tolist()):
                    spread.select(dim, at).copy_(out.select(dim, i))
                out = spread
            if factor is not None:
                out = out * factor.view([-1 if d == dim else 1 for d in range(out.dim())])
        return out

    def check(self, got: Tensor, expected: Tensor, dtype: torch.dtype, what: str, truncates: bool = False) -> None:
        """Equal bit for bit without scales; with them, as exact as products in float32 that are rounded once."""
        assert got.dtype == dtype, f"{what} of {self}: {got.dtype} instead of {dtype}"
        tolerance = 0.0
        if not self.scaled:
            expected = expected.to(dtype)
        elif dtype == torch.bfloat16:
            tolerance = torch.finfo(dtype).eps * (1.0 if truncates else 0.502)
        else:
            tolerance = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            got.detach().cpu().double(),
            expected.double(),
            rtol=tolerance,
            atol=0,
            msg=lambda m: f"{what} of {self}: {m}",
        )

    def check_small(self, got: Tensor, full: Tensor, what: str, **options: bool) -> None:
        """``got`` is what take makes of ``full``."""
        self.check(got, self.take(full), self.result_dtype, what, **options)

    def check_full(self, got: Tensor, small: Tensor, what: str, **options: bool) -> None:
        """``got`` is what put makes of ``small``."""
        self.check(got, self.put(small), self.dtype, what, **options)


@st.composite
def axes(draw, max_size: int = 9, groups: tuple[int, ...] = (1,)):
    """``groups``: of so many units are sizes multiples, and widths and starts often."""
    group = draw(st.sampled_from(groups))
    size = draw(st.integers(2, max_size)) * group
    align = draw(st.sampled_from([a for a in (1, 2, 3, 4) if a * group <= size])) * draw(st.sampled_from([1, group]))
    rate = draw(st.sampled_from([r for r in (0.0, 0.3, 0.5, 0.7) if r == 0 or int((1 - r) * size / align + 0.5)]))
    norm = draw(st.sampled_from(["probabilistic", "flow", "none"]))
    sampling = draw(st.sampled_from(["circular", "circular", "window", "prefix", "subset"]))
    if sampling == "subset":
        s = Subset(size, rate, align=align, norm=norm)
    else:
        s = Slice(size, rate, align=align, norm=norm, sampling=sampling)
    owner_of(s).seek_(draw(st.integers(0, 30)))
    return s.axis(blocks=draw(st.sampled_from([1, 1, 2, 3])), inner=draw(st.sampled_from([1, 1, 2, 3])))


@st.composite
def cases(draw, dtypes=((torch.float64, None), (torch.float32, None), (torch.float32, torch.bfloat16))):
    ndim = draw(st.integers(1, 5))
    which = draw(st.sampled_from(["rows", "cols", "both"])) if ndim > 1 else "rows"
    rows = draw(axes(groups=(1, 1, 8))) if which != "cols" else None
    cols = draw(axes(groups=(1, 8))) if which != "rows" else None
    sizes = [a.size if a is not None else draw(st.integers(1, 5)) for a in (rows, cols)][:ndim]
    sizes += [draw(st.integers(1, 3)) for _ in range(ndim - 2)]
    layouts = ["contiguous"] + ["transposed"] * (ndim == 2) + ["channels_last"] * (ndim > 3)
    dtype, target = draw(st.sampled_from(dtypes))
    return Case(
        tuple(sizes),
        rows,
        cols,
        draw(st.sampled_from(layouts)),
        draw(st.booleans()),
        draw(st.booleans()),
        dtype,
        target,
    )


VECTOR_DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@dataclass
class Statistics:
    """What a batch norm has learned, what a batch says, and by how much the one follows the other."""

    case: Case  # its dtype is that of all vectors
    momentum: float
    counted: bool

    def check(self, update: Callable[..., None], device: str, coarse: bool = False) -> None:
        """Every kept entry follows, no other entry changes, and the batch is counted once."""
        axis = self.case.to(device).rows
        before = [self.case.full(device, coarse) for _ in range(2)]
        batch = [t[: axis.width].clone() for t in (self.case.full(device, coarse) for _ in range(2))]
        after, count = [t.clone() for t in before], torch.tensor(7, device=device) if self.counted else None
        update(*after, count, *batch, axis.slice.start, axis.geometry, self.momentum)
        for old, new, seen in zip(before, after, batch, strict=True):
            expected = old.cpu().double()
            expected[axis.kept.cpu()] *= 1 - self.momentum
            expected[axis.kept.cpu()] += self.momentum * seen.cpu().double()
            eps = torch.finfo(self.case.dtype).eps
            torch.testing.assert_close(new.cpu().double(), expected, rtol=2 * eps, atol=2 * eps)
            others = torch.ones(axis.size, dtype=torch.bool)
            others[axis.kept.cpu()] = False
            assert torch.equal(new.cpu()[others], old.cpu()[others])
        assert count is None or int(count) == 8


@st.composite
def statistics(draw):
    axis = draw(axes())
    case = Case((axis.size,), axis, None, dtype=draw(st.sampled_from(VECTOR_DTYPES)))
    return Statistics(case, draw(st.sampled_from([0.0, 0.1, 0.3, 1.0])), draw(st.booleans()))


def _at(start: int, axis: Axis) -> Axis:
    s = axis.slice
    if isinstance(s, Subset):
        owner_of(s).seek_(start)
        return axis
    assert start in s.starts
    s.start_on_host = start
    s.start.fill_(start)
    return axis


def listed() -> list[Case]:
    """Cases that must always run: each path once, wrapping and not, with the awkward shapes of real networks."""
    window = {"sampling": "window", "norm": "probabilistic"}
    f32, bf16 = torch.float32, torch.bfloat16
    return [
        Case((10,), _at(7, Slice(10).axis()), None),
        Case((10,), _at(2, Slice(10, **window).axis()), None, scale_rows=True),
        Case((24,), _at(3, Slice(4).axis(blocks=2, inner=3)), None, scale_rows=True),
        Case((3000,), _at(1800, Slice(3000, 0.5).axis()), None),  # more than one tile
        Case((6, 8), _at(4, Slice(6).axis()), None, scale_rows=True),
        Case((6, 8), None, _at(5, Slice(8).axis()), scale_cols=True),
        Case((6, 8), _at(5, Slice(6).axis()), _at(7, Slice(8).axis()), scale_rows=True, scale_cols=True),
        Case((6, 8), _at(1, Slice(6, **window).axis()), _at(3, Slice(8, **window).axis()), scale_cols=True),
        Case((6, 8), _at(5, Slice(6).axis()), _at(7, Slice(8).axis()), layout="transposed"),
        Case((6, 48), _at(5, Slice(6).axis()), _at(40, Slice(48, align=8).axis()), scale_cols=True),  # in groups of 8
        Case(
            (6, 48), _at(5, Slice(6).axis()), _at(37, Slice(48, align=1).axis()), scale_cols=True
        ),  # but for the start
        Case((6, 48), None, _at(16, Slice(24, align=8).axis(blocks=2)), scale_cols=True, dtype=f32, target=bf16),
        Case((32, 9), _at(24, Slice(32, align=8).axis()), None, scale_rows=True, dtype=f32, target=bf16),
        Case((32, 9), _at(21, Slice(32, align=1).axis()), None, scale_rows=True, dtype=f32, target=bf16),
        Case((6, 98), None, _at(1, Slice(2).axis(inner=49)), scale_cols=True),  # a flattened 7x7 map
        Case((24, 5), _at(3, Slice(4).axis(blocks=6)), None, scale_rows=True),  # attention heads
        Case((300, 700), _at(200, Slice(300).axis()), _at(400, Slice(700).axis()), dtype=f32),
        Case((300, 700), _at(200, Slice(300).axis()), _at(400, Slice(700).axis()), dtype=f32, target=bf16),
        Case((6, 8, 3), _at(5, Slice(6).axis()), _at(7, Slice(8).axis())),
        Case((6, 8, 3, 3), _at(5, Slice(6).axis()), _at(7, Slice(8).axis()), scale_cols=True),
        Case((6, 8, 3, 3), _at(5, Slice(6).axis()), _at(7, Slice(8).axis()), "channels_last", scale_cols=True),
        Case((6, 8, 1, 1), _at(5, Slice(6).axis()), _at(7, Slice(8).axis()), "channels_last", scale_rows=True),
        Case((6, 8, 1, 1), _at(5, Slice(6).axis()), _at(7, Slice(8).axis())),
        Case((6, 1, 3, 3), _at(5, Slice(6).axis()), None, "channels_last"),  # depthwise
        Case((6, 1, 3, 3), _at(5, Slice(6).axis()), None),
        Case((6, 8, 3, 2, 2), _at(5, Slice(6).axis()), _at(7, Slice(8).axis()), scale_cols=True),
        Case((6, 8, 3, 2, 2), _at(5, Slice(6).axis()), _at(7, Slice(8).axis()), "channels_last", scale_cols=True),
        Case(
            (64, 96, 3, 3),
            _at(40, Slice(64).axis()),
            _at(56, Slice(96).axis()),
            "channels_last",
            dtype=f32,
            target=bf16,
        ),
        Case((6, 8, 3, 3), _at(5, Slice(6).axis()), _at(7, Slice(8).axis()), scale_cols=True, dtype=bf16),
        Case((10,), _at(1, Subset(10).axis()), None, scale_rows=True),
        Case((6, 8), _at(1, Subset(6).axis()), _at(7, Slice(8).axis()), scale_rows=True, scale_cols=True),
        Case((6, 8, 3, 3), _at(5, Slice(6).axis()), _at(1, Subset(8).axis()), "channels_last", scale_cols=True),
        Case((6, 24, 3), _at(1, Subset(6).axis()), _at(2, Subset(4).axis(blocks=2, inner=3)), dtype=f32),
        # 10/3 is not a bfloat16: rounding it first would show
        Case((10, 96), _at(9, Slice(10, 0.7).axis()), None, scale_rows=True, dtype=bf16),
        Case((10, 96), _at(9, Slice(10, 0.7).axis()), None, scale_rows=True, dtype=f32, target=bf16),
        Case((10, 96), _at(9, Slice(10, 0.7).axis()), None, scale_rows=True, dtype=bf16, target=f32),
    ]

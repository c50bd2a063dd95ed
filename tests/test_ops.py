"""take and put: the definition, the plain-torch reference, the CPU's views and the registered ops all agree."""

from __future__ import annotations

import contextlib

import pytest
import torch
from conftest import cuda_only, devices
from hypothesis import given, settings
from torch import Tensor, nn

from opcases import Case, cases, listed, statistics
from sliceout import Slice
from sliceout.drawing import owner_of
from sliceout.ops import library, prefetch, reference, store_, take
from sliceout.ops.placement import memory_format, small_shape
from sliceout.schemes.subset import Subset
from sliceout.takes import Take

IDS = [f"{i}-{'x'.join(map(str, c.shape))}-{c.layout}" for i, c in enumerate(listed())]
every_listed = pytest.mark.parametrize("number", range(len(IDS)), ids=IDS)


@contextlib.contextmanager
def poisoned_memory():
    """Memory that nobody has written reads as NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def put_op(small: Tensor, case: Case) -> Tensor:
    last = case.layout == "channels_last"
    return torch.ops.sliceout.put(small, *case.args, case.shape, last, case.dtype)


def compare_all(case: Case, device: str) -> None:
    """Forward and backward of every implementation on ``device`` against the definition."""
    case.to(device)
    full = case.full(device).requires_grad_()
    grad = torch.randn(case.take(full).shape, dtype=torch.float64).to(case.result_dtype).to(device)

    def through(f, what):
        with poisoned_memory():
            small = f(full)
            (got,) = torch.autograd.grad(small, full, grad)
        case.check_small(small, full, what)
        case.check_full(got, grad, f"gradient of {what}")
        return small, got

    through(lambda t: reference.take(t, *case.args, case.target), "reference.take")
    _, by_take = through(lambda t: take(t, case.description, case.target), "take")
    op_small, by_op = through(lambda t: torch.ops.sliceout.take(t, *case.args, case.target), "torch.ops.sliceout.take")
    case.check_full(reference.put(grad, *case.args, case.dtype), grad, "reference.put")
    with poisoned_memory():
        by_put = put_op(grad, case)
    case.check_full(by_put, grad, "torch.ops.sliceout.put")

    assert op_small.is_contiguous(memory_format=memory_format(full)), "the op must keep the memory format"
    for got in (by_take, by_op, by_put):
        assert got.is_contiguous(memory_format=memory_format(full)) or case.layout == "transposed"


@devices
@every_listed
def test_listed_cases_agree_with_the_definition(number, device):
    compare_all(listed()[number], device)


@settings(max_examples=120)
@given(case=cases())
def test_all_implementations_agree_with_the_definition(case):
    torch.manual_seed(0)
    compare_all(case, "cpu")


@cuda_only
@given(case=cases())
def test_all_implementations_agree_with_the_definition_on_the_gpu(case, device):
    torch.manual_seed(0)
    compare_all(case, device)


@devices
@given(case=cases(dtypes=[(torch.float64, None)]))
def test_put_is_the_adjoint_of_take(case, device):
    """<take(w), g> == <w, put(g)>, for the reference and the op."""
    torch.manual_seed(0)
    case.to(device)
    w = case.full(device)
    small = torch.ops.sliceout.take(w, *case.args, None)
    g = torch.randn_like(small)
    for takes, puts in (
        (small, put_op(g, case)),
        (reference.take(w, *case.args, None), reference.put(g, *case.args, w.dtype)),
    ):
        torch.testing.assert_close((takes * g).sum(), (w * puts).sum(), rtol=1e-12, atol=1e-12)


@devices
@given(case=cases(dtypes=[(torch.float32, torch.bfloat16), (torch.bfloat16, None), (torch.bfloat16, torch.float32)]))
def test_low_precision_is_rounded_once(case, device):
    """The scale is multiplied in float32 at least: rounding it to bfloat16 first would bias every weight alike."""
    torch.manual_seed(0)
    compare_all(case, device)


@settings(max_examples=60)
@devices
@given(case=statistics())
def test_statistics_follow_the_batch_and_others_stay(case, device):
    torch.manual_seed(0)
    case.check(torch.ops.sliceout.update_statistics_, device)


# -- derivatives -------------------------------------------------------------------------------------------------------

SMALL = [i for i, c in enumerate(listed()) if c.dtype == torch.float64 and torch.Size(c.shape).numel() < 150]


@pytest.mark.parametrize("path", ["take", "op"])
@pytest.mark.parametrize("number", SMALL, ids=[IDS[i] for i in SMALL])
def test_first_and_second_derivatives(number, path):
    case = listed()[number]

    def squared(full):
        small = torch.ops.sliceout.take(full, *case.args, None) if path == "op" else take(full, case.description)
        return small**2

    full = case.full().requires_grad_()
    assert torch.autograd.gradcheck(squared, (full,))
    assert torch.autograd.gradgradcheck(squared, (full,))


VECTORS = [Slice(10).axis(), Slice(4).axis(blocks=2, inner=3), Subset(10).axis()]


@devices
@pytest.mark.parametrize("layout", ["transposed", "narrowed", "expanded"])
def test_gradient_of_a_parameter_with_odd_strides_lies_in_place(layout, device):
    """A tied, sliced or broadcast parameter: its strides say nothing about how its gradient may be written."""
    rows, cols = Slice(6), Slice(8)
    base = torch.randn(6, 8, dtype=torch.float64, device=device)
    full = {
        "transposed": lambda: base.t().contiguous().t(),
        "narrowed": lambda: torch.randn(9, 12, dtype=torch.float64, device=device)[2:8, 1:9],
        "expanded": lambda: base[:1].expand(6, 8),
    }[layout]()
    full = full.detach().requires_grad_()
    case = Case((6, 8), rows.axis(), cols.axis(), scale_rows=True).to(device)
    for f in (
        lambda: take(full, case.description),
        lambda: torch.ops.sliceout.take(full, *case.args, None),
    ):
        small = f()
        case.check_small(small, full, layout)
        g = torch.randn_like(small)
        (got,) = torch.autograd.grad(small, full, g)
        case.check_full(got, g, f"gradient of {layout}")


@devices
def test_gradient_arriving_in_another_layout_lies_in_place(device):
    """cuDNN hands back channels_last gradients, reductions hand back expanded ones."""
    case = Case((6, 8, 3, 3), Slice(6).axis(), Slice(8).axis()).to(device)
    full = case.full(device).requires_grad_()
    small = torch.ops.sliceout.take(full, *case.args, None)
    g = torch.randn_like(small).to(memory_format=torch.channels_last)
    (got,) = torch.autograd.grad(small, full, g, retain_graph=True)
    case.check_full(got, g, "gradient from channels_last")
    (got,) = torch.autograd.grad(small.sum(), full)
    case.check_full(got, torch.ones_like(small), "gradient of a sum")


# -- registration ------------------------------------------------------------------------------------------------------

OPCHECK = [0, 2, 6, 12, 15, 16, 18, 21, 24, 26]


@devices
@pytest.mark.parametrize("number", OPCHECK, ids=[IDS[i] for i in OPCHECK])
def test_opcheck_passes(number, device):
    case = listed()[number].to(device)
    full = case.full(device)
    small = torch.ops.sliceout.take(full, *case.args, case.target)
    last = case.layout == "channels_last"
    torch.library.opcheck(torch.ops.sliceout.take.default, (full.clone().requires_grad_(), *case.args, case.target))
    leaf = torch.randn_like(small, dtype=full.dtype).requires_grad_()
    torch.library.opcheck(torch.ops.sliceout.take.default, (full, *case.args, case.target, leaf))
    torch.library.opcheck(
        torch.ops.sliceout.put.default,
        (torch.randn_like(small).requires_grad_(), *case.args, case.shape, last, case.dtype),
    )
    if full.dim() == 1:
        torch.library.opcheck(
            torch.ops.sliceout.store_.default, (full, torch.randn_like(small), case.args[0], case.args[2])
        )


@devices
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("axis", VECTORS, ids=str)
def test_opcheck_passes_for_statistics(axis, counted, device):
    case = Case((axis.size,), axis, None, dtype=torch.float32).to(device)
    where = axis.slice.start, axis.geometry
    vectors = [case.full(device), case.full(device)], [torch.randn(axis.width, device=device) for _ in range(2)]
    count = torch.tensor(3, device=device) if counted else None
    args = (*vectors[0], count, *vectors[1], *where, 0.1)
    torch.library.opcheck(torch.ops.sliceout.update_statistics_.default, args)


@devices
def test_with_a_leaf_the_gradient_goes_there_as_it_is(device):
    """Not to the parameter, and without the normalisation: whoever receives it knows both."""
    case = Case((6, 8), Slice(6).axis(), Slice(8, 0.25).axis(), scale_rows=True, scale_cols=True).to(device)
    full = case.full(device).requires_grad_()
    leaf = torch.zeros(3, 6, dtype=torch.float64, device=device, requires_grad=True)
    small = torch.ops.sliceout.take(full.detach(), *case.args, None, leaf)
    case.check_small(small, full, "take with a leaf")
    grad = torch.randn_like(small)
    small.backward(grad)
    assert full.grad is None
    assert torch.equal(leaf.grad, grad)


@devices
def test_a_draw_before_the_gradient_reaches_its_leaf_raises(device):
    s = Slice(32)
    case = Case((32,), s.axis(), None).to(device)
    leaf = torch.zeros(16, dtype=torch.float64, device=device, requires_grad=True)
    small = torch.ops.sliceout.take(case.full(device), *case.args, None, leaf)
    owner_of(s).draw_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        small.sum().backward()


def test_the_op_never_returns_its_inputs_memory():
    case = Case((6,), Slice(6, 0.5, sampling="window").axis(), None)
    full = case.full()
    small = torch.ops.sliceout.take(full, *case.args, None)
    assert small.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()


# -- views and stores --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ["rows", "cols", "both"])
@pytest.mark.parametrize("shape", [(12, 10), (12, 10, 3), (12, 10, 3, 3), (12, 10, 1, 3, 3)], ids=str)
def test_on_the_cpu_a_slice_is_a_view_unless_it_wraps(shape, dims):
    rows, cols = Slice(12), Slice(10)
    axes = (rows.axis() if dims != "cols" else None, cols.axis() if dims != "rows" else None)
    full = nn.Parameter(torch.randn(shape))
    seen = set()
    for step in range(30):
        wraps = False
        for axis in axes:
            if axis is not None:
                owner_of(axis.slice).seek_(step)
                wraps |= axis.slice.start_on_host + axis.slice.width > axis.slice.size
        small = take(full, Take(*axes))
        shares = small.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        assert shares == (not wraps)
        seen.add(wraps)
    assert seen == {True, False}


def test_views_notice_that_the_parameter_changed_before_backward():
    """As in a plain layer: the gradient would be that of other weights."""
    s = Slice(8, sampling="window")
    full = nn.Parameter(torch.randn(8, 8))
    loss = (take(full, Take(s.axis())) ** 2).sum()
    with torch.no_grad():
        full.mul_(2)
    with pytest.raises(RuntimeError, match="has been modified"):
        loss.backward()


@devices
@given(case=cases(dtypes=[(torch.float32, None)]))
def test_store_replaces_the_kept_entries_and_no_others(case, device):
    torch.manual_seed(0)
    axis = case.rows or case.cols
    s = axis.slice
    case = Case((axis.size,), axis, None).to(device)
    before = torch.randn(axis.size, device=device)
    small = torch.randn(axis.width, device=device)
    expected = before.clone()
    expected[axis.kept.to(device)] = small
    assert torch.equal(reference.store(before, small, s.start, axis.geometry), expected)
    op = torch.ops.sliceout.store_
    for f in (lambda t: store_([t], [small], axis), lambda t: op(t, small, s.start, axis.geometry)):
        full = before.clone()
        f(full)
        assert torch.equal(full, expected)


def test_a_store_into_its_own_view_changes_nothing_more():
    s = Slice(8, sampling="window")
    full = torch.randn(8)
    small = take(full, Take(s.axis()))
    small.add_(1)
    before = full.clone()
    store_([full], [small], s.axis())
    assert torch.equal(full, before)
    assert torch.equal(full[s.kept], small)


# -- what must not leak ------------------------------------------------------------------------------------------------


@devices
@every_listed
def test_nan_outside_the_slice_never_leaks(number, device):
    case = listed()[number].to(device)
    kept = case.put(torch.ones(small_shape(torch.Size(case.shape), *case.args[2:4]))) != 0
    full = torch.where(kept.to(device), case.full(device), torch.nan)
    full = case.lay_out(full).requires_grad_()
    for f in (
        lambda t: take(t, case.description, case.target),
        lambda t: torch.ops.sliceout.take(t, *case.args, case.target),
        lambda t: reference.take(t, *case.args, case.target),
    ):
        small = f(full)
        assert small.isfinite().all()
        (grad,) = torch.autograd.grad((small.double() ** 2).sum(), full)
        assert grad.isfinite().all()
        assert not grad[~kept.to(device)].any()


@devices
def test_a_nan_gradient_stays_inside_the_slice(device):
    case = Case((6, 8), Slice(6).axis(), Slice(8).axis(), scale_rows=True).to(device)
    kept = case.put(torch.ones(3, 4)) != 0
    grad = torch.full((3, 4), torch.nan, dtype=torch.float64, device=device)
    for full in (put_op(grad, case), reference.put(grad, *case.args, torch.float64)):
        assert full.cpu()[kept].isnan().all()
        assert not full.cpu()[~kept].any()


# -- a draw between forward and backward -------------------------------------------------------------------------------


@devices
def test_a_draw_between_forward_and_backward_raises_on_the_op_path(device):
    s = Slice(32)
    case = Case((32,), s.axis(), None).to(device)
    full = case.full(device).requires_grad_()
    small = torch.ops.sliceout.take(full, *case.args, None)
    owner_of(s).draw_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        small.sum().backward()


def test_a_draw_between_forward_and_backward_is_right_on_the_view_path():
    s = Slice(32)
    case = Case((32,), s.axis(), None)
    full = case.full().requires_grad_()
    small = take(full, Take(s.axis()))
    grad = torch.randn_like(small)
    expected, start = case.put(grad), s.start_on_host
    while s.start_on_host == start:
        owner_of(s).draw_()
    small.backward(grad)
    case.check(full.grad, expected, full.dtype, "gradient")


def test_take_refuses_a_tensor_that_the_axis_does_not_cover():
    with pytest.raises(ValueError, match=r"dimension 1 of shape \(4, 9\) does not match Slice\(4 of 8, circular\)"):
        take(torch.zeros(4, 9), Take(None, Slice(8).axis()))


def test_take_of_nothing_is_the_parameter_itself():
    full = nn.Parameter(torch.randn(3))
    assert take(full, Take(None)) is full
    assert take(full, Take(None), torch.bfloat16).dtype == torch.bfloat16


def test_the_library_declares_what_it_computes():
    """Schemas are part of saved graphs: a change here is a change of format."""
    assert library._library is not None
    schema = str(torch.ops.sliceout.put.default._schema)
    assert schema == (
        "sliceout::put(Tensor small, Tensor? row_start, Tensor? col_start, int[] rows, int[] cols, Tensor? row_scale, "
        "Tensor? col_scale, SymInt[] shape, bool channels_last, ScalarType dtype, int parts=0) -> Tensor"
    )


def test_on_a_gpu_a_slice_that_no_layer_has_is_taken_by_itself(monkeypatch):
    """Nobody draws it, so there is no model whose slices could be fetched with it."""
    monkeypatch.setattr(prefetch, "usable", lambda full: True)
    s = Slice(8, sampling="window")
    full = torch.randn(8)
    assert torch.equal(take(full, Take(s.axis())), full[s.kept])


def test_eager_code_on_a_gpu_does_without_triton(monkeypatch):
    """Slices are then taken one by one, as views."""

    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(prefetch, "has_triton", lambda: True)
    assert prefetch.usable(OnGpu)
    monkeypatch.setattr(prefetch, "has_triton", lambda: False)
    assert not prefetch.usable(OnGpu)

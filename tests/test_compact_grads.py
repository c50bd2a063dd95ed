"""A compact gradient is a gradient: whatever is done to it gives what the dense one gives, and the rest stays small."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sliceout
from layercases import CASES
from networks import NETWORKS, build, data, loss_of
from oracle import exactly
from sliceout import Slice
from sliceout.cli.memory import peak_growth
from sliceout.compact.gradient import SlicedGrad, same_place
from sliceout.takes import Take


def both(name="mlp", draws=1, **settings):
    """The same network with dense and with compact gradients, after one backward."""
    models = []
    for grads in ("dense", "compact"):
        model = build(name, grads=grads, **settings)
        sliceout.slices(model).seek_(draws)
        loss_of(model, data(name)).backward()
        models.append(model)
    return models


def whole(g):
    return g.dense() if isinstance(g, SlicedGrad) else g


def one(draws=3, **settings):
    """A compact gradient with rows and columns, and the dense one."""
    dense, compact = both("mlp", draws, **settings)
    return compact[2].weight.grad, dense[2].weight.grad.clone()


# -- they are the dense mode's -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"fold": "producer"}, {"sampling": "window"}, {"norm": "none"}], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_the_dense_mode(name, settings, float64):
    for draws in range(4):
        dense, compact = both(name, draws, **settings)
        for (key, p), q in zip(dense.named_parameters(), compact.parameters(), strict=True):
            exactly(whole(q.grad), p.grad, key)
            assert q.grad.stride() == p.grad.stride() == q.stride()
            assert (q.grad.shape, q.grad.dtype, q.grad.device) == (p.shape, p.dtype, p.device)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gradients_of_every_way_of_slicing_a_layer(case, float64):
    """Window slices: their normalisation differs from unit to unit, so it stays a vector until it is needed."""
    grads = []
    for kind in ("dense", "compact"):
        torch.manual_seed(0)
        layer = case.sliced(lambda n, kind=kind: Slice(n, 0.4, sampling="window", fold="producer", grads=kind, align=1))
        x = case.input()
        sliceout.draw_(layer)
        arriving = layer.axes.get("in", layer.axes.get("unit"))
        dim = (
            x.dim() - 1
            if case.kind in ("Linear", "Conv1D", "LayerNorm", "RMSNorm", "LayerScale")
            else not case.unbatched
        )
        if arriving is not None and arriving.slice.sliced:
            x = x.index_select(int(dim), arriving.kept)
        layer(x.requires_grad_().clone()).pow(3).sum().backward()
        grads.append([p.grad for p in layer.parameters()])
    for dense, compact in zip(*grads, strict=True):
        exactly(whole(compact), dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_gradients_in_the_dtype_of_the_parameter(dtype):
    models = [build("mlp", grads=grads) for grads in ("dense", "compact")]
    for model in models:
        with torch.autocast("cpu", dtype):
            loss = loss_of(model, data("mlp"))
        loss.backward()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert q.grad.dtype == torch.float32
        torch.testing.assert_close(whole(q.grad), p.grad)


def test_what_autograd_hands_to_two_parameters_is_not_shared_by_their_gradients(float64):
    s = Slice(8, grads="compact")
    a, b = (nn.Parameter(torch.ones(8)) for _ in range(2))
    small = sliceout.ops.take(a, Take(s.axis())) + sliceout.ops.take(b, Take(s.axis()))
    small.backward(torch.arange(4.0))
    a.grad.mul_(10.0)
    assert (a.grad.sum(), b.grad.sum()) == (60, 6)
    a.grad = b.grad = None
    small = sliceout.ops.take(a, Take(s.axis())) + sliceout.ops.take(b, Take(s.axis()))
    small.backward(torch.arange(4.0))
    torch._foreach_mul_([a.grad], 2.0)
    assert (a.grad.sum(), b.grad.sum()) == (12, 6)
    a.grad = b.grad = None
    sliceout.ops.take(a, Take(s.axis())).sum().backward()  # an expanded number, which cannot be written to
    a.grad.mul_(3.0)
    assert a.grad.sum() == 12


def test_hooks_that_keep_the_gradient_do_not_make_it_dense(float64):
    for change in (None, lambda g: g * 2):
        model, kept = build("mlp", grads="compact"), []
        model[2].weight.register_hook(kept.append)
        if change is not None:
            model[2].weight.register_hook(change)
        loss_of(model, data("mlp")).backward()
        grad = model[2].weight.grad
        assert isinstance(grad, SlicedGrad)
        exactly(grad.dense(), kept[0].dense() * (1 if change is None else 2))
        before = kept[0].dense()
        grad.mul_(3)
        exactly(kept[0].dense(), before)


def test_autograd_grad_and_second_derivatives(float64):
    results = []
    for grads in ("dense", "compact"):
        model = build("mlp", grads=grads)
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss_of(model, data("mlp")), parameters)
        again = torch.autograd.grad(loss_of(model, data("mlp")), parameters, create_graph=True)
        penalty = sum(g.square().sum() for g in again)
        second = torch.autograd.grad(penalty, parameters, allow_unused=True)
        results.append([*map(whole, first), *again, *second])
    for dense, compact in zip(*results, strict=True):
        assert (dense is None) == (compact is None)
        if dense is not None:
            exactly(whole(compact), dense)


# -- they behave like tensors ------------------------------------------------------------------------------------------

READING = {
    "add": lambda g: g + 1,
    "twice": lambda g: g + g,
    "minus": lambda g: g - g * 3,
    "times": lambda g: g * 2.5,
    "rtimes": lambda g: torch.tensor(2.5) * g,
    "times a vector of one": lambda g: g * torch.tensor([2.0]),
    "times three dimensions": lambda g: g * torch.full((1, 1, 1), 2.0),
    "times float32": lambda g: g.float() * torch.full((1,), 2.0, dtype=torch.float64),
    "divided": lambda g: g / 3,
    "into": lambda g: 1 / (g + 1),
    "negative": lambda g: -g,
    "matmul": lambda g: g @ g.t(),
    "indexed": lambda g: g[3],
    "masked": lambda g: g[g > 0],
    "sum": lambda g: g.sum(1),
    "norm": lambda g: g.norm(),
    "norm 1": lambda g: torch.linalg.vector_norm(g, 1),
    "norm 0": lambda g: torch.linalg.vector_norm(g, 0),
    "norm -inf": lambda g: torch.linalg.vector_norm(g, -torch.inf),
    "norm of rows": lambda g: torch.linalg.vector_norm(g, 2, dim=1),
    "norm kept": lambda g: torch.linalg.vector_norm(g, 2, keepdim=True),
    "norms": lambda g: torch._foreach_norm([g, g + 1])[0],
    "norms -inf": lambda g: torch._foreach_norm([g], -torch.inf)[0],
    "norms 0": lambda g: torch._foreach_norm([g], 0)[0],
    "max": lambda g: g.max(),
    "isfinite": lambda g: g.isfinite().all(),
    "equal": lambda g: g == 0,
    "cat": lambda g: torch.cat([g.view(-1), g.flatten()]),
    "stack": lambda g: torch.stack([g, g]),
    "numpy": lambda g: torch.from_numpy(g.numpy().copy()),
    "tolist": lambda g: torch.tensor(g.tolist()),
    "item": lambda g: torch.tensor(g.sum().item()),
    "clone": lambda g: g.clone(),
    "contiguous": lambda g: g.contiguous(),
    "detach": lambda g: g.detach(),
    "data": lambda g: g.data,
    "bfloat16": lambda g: g.bfloat16(),
    "int": lambda g: (g * 1000).int(),
    "meta": lambda g: torch.empty_like(g).zero_(),
    "zeros_like": lambda g: torch.zeros_like(g),
    "where": lambda g: torch.where(g > 0, g, 7.0),
    "sqrt": lambda g: g.abs().sqrt(),
    "cosine": lambda g: nn.functional.cosine_similarity(g, g + 1),
    "deepcopy": copy.deepcopy,
    "to itself": lambda g: g.to("cpu", torch.float64),
}  # fmt: skip

SCALER = torch.zeros(1, dtype=torch.float32), torch.full((1,), 0.5, dtype=torch.float32)

WRITING = {
    "mul_": lambda g: g.mul_(3),
    "mul_ tensor": lambda g: g.mul_(torch.tensor(3.0)),
    "div_": lambda g: g.div_(3),
    "add_ itself": lambda g: g.add_(g),
    "sub_ half": lambda g: g.sub_(g * 0.5),
    "add_ number": lambda g: g.add_(1),
    "add_ dense": lambda g: g.add_(torch.ones_like(whole(g)), alpha=0.5),
    "neg_": lambda g: g.neg_(),
    "zero_": lambda g: g.zero_(),
    "zero_ and add": lambda g: g.zero_().add_(g + 1),
    "fill_": lambda g: g.fill_(2),
    "clamp_": lambda g: g.clamp_(-1e-3, 1e-3),
    "clamp_ above": lambda g: g.clamp_(max=1e-3),
    "clamp_ away from zero": lambda g: g.clamp_(min=1e-3),
    "clamp_min_": lambda g: g.clamp_min_(-1e-3),
    "clamp_max_": lambda g: g.clamp_max_(-1e-3),
    "each clamped": lambda g: torch._foreach_clamp_min_([g], -1e-3),
    "each clamped away from zero": lambda g: torch._foreach_clamp_max_([g], -1e-3),
    "each times": lambda g: torch._foreach_mul_([g], torch.tensor(2.0)),
    "each divided": lambda g: torch._foreach_div_([g], [2.0]),
    "each zero": lambda g: torch._foreach_zero_([g]),
    "each plus": lambda g: torch._foreach_add_([g], 1.0),
    "row": lambda g: g[0].fill_(5),
    "column set": lambda g: g.__setitem__((slice(None), 2), 4.0),
    "masked": lambda g: g.masked_fill_(whole(g) > 0, 9.0),
    "view": lambda g: g.view(-1).mul_(2),
    "view, then whole": lambda g: (g.view(-1)[5:9].fill_(1), g.mul_(2)),
    "views and zero": lambda g: (g.view(-1)[5:9].fill_(1), g.zero_(), g[1].add_(1)),
    "detached": lambda g: g.detach().mul_(2),
    "data": lambda g: g.data.add_(1),
    "data, then itself": lambda g: (g.data.mul_(2), g.mul_(2)),
    "transposed": lambda g: g.t().add_(torch.arange(12.0)),
    "copy_": lambda g: g.copy_(torch.ones_like(whole(g))),
    "copy_ a clone": lambda g: g.copy_(g * 4),
    "nan_to_num_": lambda g: g.nan_to_num_(),
    "out=": lambda g: torch.add(torch.ones(12, 16), 1, out=g),
    "unscaled": lambda g: torch._amp_foreach_non_finite_check_and_unscale_([g], *SCALER),
}  # fmt: skip


@pytest.mark.parametrize("do", READING)
def test_reading_gives_what_the_dense_gradient_gives_and_changes_nothing(do, float64):
    for settings in ({}, {"sampling": "window", "fold": "producer"}):
        compact, dense = one(**settings)
        got, expected = READING[do](compact), READING[do](dense)
        assert got.dtype == expected.dtype
        exactly(whole(got), expected)
        exactly(whole(compact), dense)
        assert compact.is_sliced()


@pytest.mark.parametrize("do", WRITING)
def test_writing_does_what_it_does_to_the_dense_gradient(do, float64):
    for settings in ({}, {"sampling": "window", "fold": "producer"}):
        compact, dense = one(**settings)
        other = compact.detach()
        WRITING[do](compact)
        WRITING[do](dense)
        exactly(whole(compact), dense)
        exactly(whole(other), dense)  # an alias
        inside = one(**settings)[1] != 0
        assert compact.is_sliced() == (not dense[~inside].any())
        exactly(whole(compact), dense)


@given(st.lists(st.sampled_from(sorted(WRITING)), max_size=5))
def test_any_sequence_of_changes(names):
    torch.set_default_dtype(torch.float64)
    compact, dense = one()
    for name in names:
        WRITING[name](compact)
        WRITING[name](dense)
        exactly(whole(compact), dense, name)


def test_views_are_views(float64):
    compact, _ = one()
    row = compact[2]
    compact.fill_(3.0)
    assert (row == 3).all()
    row.zero_()
    assert compact.sum() == 3.0 * 11 * 16
    compact.zero_()
    assert compact.is_sliced()
    row.fill_(2.0)
    assert compact.sum() == 2.0 * 16
    compact.zero_()
    compact.add_(1.0)
    assert (row == 1).all()


def test_gradients_of_two_draws_add_up(float64):
    first, dense = one(1)
    second, other = one(2)
    assert not same_place(first, second)
    exactly(whole(first + second), dense + other)
    exactly(whole(first.add_(second)), dense + other)
    assert not first.is_sliced()


def test_zeroed_gradient_moves_to_the_next_slice_without_sharing_its_memory(float64):
    first, _ = one(1)
    second, other = one(2)
    first.zero_()
    first.add_(second)
    assert same_place(first, second)
    first.mul_(3)
    second.mul_(5)
    exactly(whole(first), other * 3)
    exactly(whole(second), other * 5)


def test_printed_saved_and_copied(float64):
    compact, dense = one()
    assert repr(compact) == "SlicedGrad([6, 8] of [12, 16], torch.float64, cpu)"
    file = io.BytesIO()
    torch.save({"grad": compact}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["grad"]
    assert type(loaded) is torch.Tensor
    exactly(loaded, dense)
    copied = copy.deepcopy(compact)
    copied.mul_(2)
    exactly(whole(compact), dense)
    exactly(whole(copied), dense * 2)
    compact[0, 0] = 100.0
    assert "all" in repr(compact)
    model = both()[1]
    again = copy.deepcopy(model)
    loss_of(again, data("mlp")).backward()
    exactly(whole(again[2].weight.grad), whole(model[2].weight.grad))


# -- memory ------------------------------------------------------------------------------------------------------------


def wide(grads):
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))
    sliceout.convert_(model, 0.5, grads=grads)
    return model


def bytes_of(g):
    return (g.small if isinstance(g, SlicedGrad) else g).untyped_storage().nbytes()


def test_gradients_take_memory_of_the_size_of_the_slices():
    model = wide("compact")
    for _ in range(3):
        loss_of(model, torch.randn(4, 256)).backward()
        assert all(g.full is None for g in (p.grad for p in model.parameters()) if isinstance(g, SlicedGrad))
        expected = 4 * (512 * 256 + 512 + 512 * 512 + 512 + 512 * 8 + 8)
        assert sum(bytes_of(p.grad) for p in model.parameters()) == expected
        model.zero_grad()
        sliceout.draw_(model)


@pytest.mark.parametrize("make", [
    lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1), lambda ps: torch.optim.AdamW(ps, lr=0.1),
])  # fmt: skip
def test_no_full_size_temporary_is_made(make):
    """Backward, clipping and step together grow by less than one dense gradient of the largest weight."""
    model = wide("compact")
    optimizer = make(model.parameters())
    x = torch.randn(4, 256)
    loss_of(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()
    slices = 4 * (512 * 256 + 512 * 512 + 512 * 8)
    for _ in range(4):
        loss = loss_of(model, x)

        def backward_and_clip(loss=loss):
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        grown = peak_growth(backward_and_clip, torch.device("cpu"))
        assert grown < 1.8 * slices, "the gradients, and the largest once more while it is clipped"
        assert peak_growth(optimizer.step, torch.device("cpu")) < 4 * 1024 * 1024, "less than the largest weight"
        optimizer.zero_grad()


def test_dense_mode_does_make_them():
    """The check above can tell."""
    model = wide("dense")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss = loss_of(model, torch.randn(4, 256))
    assert peak_growth(loss.backward, torch.device("cpu")) > 4 * (1024 * 256 + 1024 * 1024)
    optimizer.step()

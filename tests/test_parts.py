"""Parts of the batch: how their starts are drawn, what they take, and what each sliced layer computes with them."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sliceout
from layercases import CASES, LayerCase
from networks import Attention, Norms, assert_same_state, gradients, loss_of, mlp
from opcases import Case
from oracle import MaskedDense, channel_dim, ends, exactly, path
from sliceout import Slice
from sliceout import nn as snn
from sliceout.drawing import Slices, draw_table, part_starts_at, starts_at
from sliceout.ops import take
from sliceout.takes import ConcatAxis, Take, parts_of

# -- how starts are drawn ----------------------------------------------------------------------------------------------


def drawn(s: Slice, step: int, ranks: int = 1) -> list[int]:
    """The starts of all parts of all ranks."""
    spread = torch.tensor([s.sampling == "circular"])
    return [
        start
        for rank in range(ranks)
        for start in part_starts_at(step, draw_table([s]), spread, s.parts, rank, ranks)[0].tolist()
    ]


def times_kept(s: Slice, starts: list[int]) -> list[int]:
    """By how many parts each unit is kept, counted one by one."""
    return [sum((unit - start) % s.size < s.width for start in starts) for unit in range(s.size)]


@given(
    size=st.integers(2, 96), rate=st.floats(0.05, 0.9), align=st.sampled_from([None, 1, 2, 3, 8]),
    parts=st.integers(2, 17), ranks=st.integers(1, 4), step=st.integers(0, 1000),
)  # fmt: skip
def test_spread_starts_keep_every_unit_equally_often(size, rate, align, parts, ranks, step):
    try:
        s = Slice(size, rate, align=align, parts=parts)
    except ValueError:  # keeps nothing
        return
    starts = drawn(s, step, ranks)
    assert len(starts) == parts * ranks
    assert set(starts) <= set(s.starts)
    units = times_kept(s, starts)
    assert sum(units) == parts * ranks * s.width
    divides = (parts * ranks * s.width) % size == 0 and len(s.starts) % (parts * ranks) == 0
    assert max(units) - min(units) <= (0 if divides else 1), (starts, units)


def test_eight_parts_of_a_common_size_are_even_at_every_step():
    for size, rate in itertools.product((64, 512, 2048), (0.25, 0.5, 0.75)):
        s = Slice(size, rate, parts=8)
        for step in range(20):
            assert len(set(times_kept(s, drawn(s, step)))) == 1


def test_one_part_draws_what_it_always_drew():
    """Numbers of the release before parts: a run with one part must be repeated by this version."""
    made = [Slice(64, 0.5), Slice(100, 0.3, sampling="window"), Slice(48, 0.25, align=4)]
    owner = Slices(made)
    seen = []
    for _ in range(6):
        owner.draw_()
        seen.append([s.start_on_host for s in made])
    assert seen == starts_at(torch.arange(1, 7)[:, None], draw_table(made)).tolist()
    assert seen[:3] == GOLDEN


GOLDEN = [[16, 20, 20], [8, 24, 36], [24, 12, 8]]


@pytest.mark.parametrize("sampling", ["circular", "window"])
def test_every_start_is_equally_likely_for_every_part(sampling):
    s = Slice(12, 0.5, sampling=sampling, align=1, parts=3)
    spread = torch.tensor([sampling == "circular"])
    starts = part_starts_at(torch.arange(20_000)[:, None], draw_table([s]), spread, 3)[:, 0]
    for part in range(3):
        counts = Counter(starts[:, part].tolist())
        assert set(counts) == set(s.starts)
        expected = 20_000 / len(s.starts)
        assert sum((n - expected) ** 2 / expected for n in counts.values()) < 40  # 11 degrees of freedom: p < 4e-5


def test_window_starts_of_two_parts_are_independent():
    s = Slice(8, 0.5, sampling="window", align=1, parts=2)
    starts = part_starts_at(torch.arange(20_000)[:, None], draw_table([s]), torch.tensor([False]), 2)[:, 0]
    counts = Counter(map(tuple, starts.tolist()))
    assert len(counts) == 25
    assert sum((n - 800) ** 2 / 800 for n in counts.values()) < 60


def test_the_order_of_the_parts_is_random_for_each_slice_and_step():
    a, b = Slice(64, 0.5, parts=8), Slice(64, 0.5, parts=8)
    owner, orders = Slices([a, b]), set()
    for _ in range(10):
        owner.draw_()
        for s in (a, b):
            first = s.starts_on_host.index(min(s.starts_on_host))
            turned = [*s.starts_on_host[first:], *s.starts_on_host[:first]]
            orders.add(tuple(start - turned[0] for start in turned))
        assert a.starts_on_host != b.starts_on_host
    assert len(orders) > 15


def test_starts_are_where_kernels_read_them_and_a_seek_repeats_them():
    s = Slice(64, 0.5, parts=4)
    owner, seen = Slices([s, Slice(16)]), []
    address = s.start.data_ptr()
    for _ in range(5):
        owner.draw_()
        seen.append(list(s.starts_on_host))
        assert s.start.tolist() == seen[-1]
    owner.seek_(2)
    assert s.starts_on_host == seen[1]
    saved = owner.state_dict()
    assert saved["slices"] == [[0, 0, 64, 32, 4], [0, 1, 16, 8]]  # as ever where there is one part
    owner.seek_(0)
    owner.load_state_dict(saved)
    assert (s.starts_on_host, s.start.data_ptr()) == (seen[1], address)
    with pytest.raises(ValueError, match=r"saved slices \[size, width, parts\]"):
        Slices([Slice(64, 0.5, parts=8), Slice(16)]).load_state_dict(saved)


@pytest.mark.parametrize(("samples", "expected"), [(32, 8), (16, 8), (12, 6), (7, 7), (11, 1), (9, 3), (1, 1), (0, 8)])
def test_a_batch_has_the_largest_number_of_parts_that_divides_it(samples, expected):
    one, eight = Slice(64).axis(), Slice(64, parts=8).axis()
    assert parts_of(samples, None, eight) == parts_of(samples, one, ConcatAxis((one, eight))) == expected
    assert parts_of(samples, one, None) == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: Slice(8, parts=0), ValueError, "parts=0: expected at least 1"),
    (lambda: Slice(8, parts=1.5), TypeError, "parts=1.5: expected a whole number"),
    (lambda: Slice(8, ranks="all"), ValueError, "ranks='all': expected one of 'spread', 'equal'"),
    (lambda: Slice(8, parts=2, grads="compact"), ValueError, "grads='compact' with parts=2: together the parts train"),
    (lambda: snn.Conv2d(3, 8, 3, out_slice=Slice(8, parts=2)), ValueError, "Conv2d takes slices with parts=1 only"),
    (lambda: snn.BatchNorm1d(8, slice=Slice(8, parts=2)), ValueError, "BatchNorm1d takes slices with parts=1 only"),
])  # fmt: skip
def test_what_has_no_parts_says_so(make, error, message):
    with pytest.raises(error, match=message):
        make()


# -- take and put ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def only_part(slices: list[Slice], part: int) -> Iterator[None]:
    """The slices as a single part of the batch sees them: the oracles know of one start."""
    before = [s.starts_on_host for s in slices]
    try:
        for s in slices:
            s.starts_on_host = [s.start_of(part)] * s.parts
        yield
    finally:
        for s, starts in zip(slices, before, strict=True):
            s.starts_on_host = starts


@st.composite
def stacked_cases(draw):
    """A matrix or a vector with slices of one or several parts."""
    parts = draw(st.integers(2, 5))

    def axis():
        size = draw(st.sampled_from([3, 6, 8, 16, 24]))
        norm, sampling = draw(st.sampled_from(["probabilistic", "none"])), draw(st.sampled_from(["circular", "window"]))
        align = draw(st.sampled_from([1, 1, 3 if size % 3 == 0 else 2]))
        s = Slice(size, 0.5, norm=norm, sampling=sampling, align=align, parts=draw(st.sampled_from([1, parts, parts])))
        Slices([s]).seek_(draw(st.integers(0, 30)))
        return s.axis(blocks=draw(st.sampled_from([1, 1, 2])), inner=draw(st.sampled_from([1, 1, 3])))

    which = draw(st.sampled_from(["vector", "rows", "cols", "both"]))
    rows = axis() if which != "cols" else None
    cols = axis() if which in ("cols", "both") else None
    shape = (rows.size,) if which == "vector" else (5 if rows is None else rows.size, 4 if cols is None else cols.size)
    dtype, target = draw(st.sampled_from([(torch.float64, None), (torch.float32, torch.bfloat16)]))
    return Case(shape, rows, cols, "contiguous", draw(st.booleans()), draw(st.booleans()), dtype, target), parts


@pytest.mark.parametrize("way", ["eager", "ops", "graph"])
@given(stacked=stacked_cases())
def test_take_stacks_what_the_parts_take_and_put_adds_up_what_they_put(way, stacked):
    case, parts = stacked
    full = case.full().requires_grad_()
    slices = [a.slice for a in case.axes if a is not None]
    with path(way):
        smalls = take(full, case.description, case.target, parts=parts)
    grads = torch.randn(smalls.shape, dtype=torch.float64).to(smalls.dtype)
    expected = torch.zeros(case.shape, dtype=torch.float64)
    for part in range(parts):
        with only_part(slices, part):
            case.check_small(smalls[part], full, f"part {part}")
            expected += case.put(grads[part])
    smalls.backward(grads)
    tolerance = 1e-12 if case.dtype == torch.float64 else 2e-6
    torch.testing.assert_close(full.grad.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", ["eager", "ops"])
def test_second_derivatives(way, float64):
    s = Slice(6, 0.5, parts=3)
    Slices([s]).seek_(3)
    weight = torch.randn(6, 2, requires_grad=True)
    with path(way):
        assert torch.autograd.gradgradcheck(lambda w: take(w, Take(s.axis(), None, True), parts=3).pow(3), weight)


def test_gradients_of_samples_by_vmap(float64):
    """torch.func sees plain operations."""
    model = mlp(parts=2).train()
    x = torch.randn(3, 4, 6)
    params = dict(model.named_parameters())

    def loss(p, x):
        return torch.func.functional_call(model, p, x).square().sum()

    together = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    for i, one in enumerate(x):
        for key, grad in torch.func.grad(loss)(params, one).items():
            exactly(together[key][i], grad, key)


# -- layers against masked dense layers, part by part ------------------------------------------------------------------

SLICED_BY_PARTS = [
    c for c in CASES
    if not getattr(snn, c.kind).one_part and not c.unbatched and c.name != "linear-vector" and "Dropout" not in c.kind
]  # fmt: skip


def compare_parts(net: nn.Module, x_full: Tensor, parts: int, what: str = "") -> None:
    """Output and all gradients of ``net`` equal those of a masked dense network for every part of the batch."""
    first, last = ends(net)
    slices = list(dict.fromkeys(s for m in net.modules() for s in getattr(m, "slices", ())))
    parameters = dict(net.named_parameters())
    arriving = first.axes.get("in", first.axes.get("unit"))
    dim_in = channel_dim(first, x_full)
    inputs, outputs, leaves = [], [], []
    for part, chunk in enumerate(x_full.chunk(parts)):
        with only_part(slices, part):
            dense = MaskedDense([] if arriving is None else arriving.slices)
            leaf = chunk.clone().requires_grad_()
            y = dense(net, leaf)
            leaving = last.axes.get("out", last.axes.get("unit"))
            if leaving is not None and leaving.slice in dense.live:
                y = y.index_select(channel_dim(last, y), leaving.kept)
            kept = torch.arange(chunk.shape[dim_in]) if arriving is None else arriving.kept
            inputs.append((chunk.index_select(dim_in, kept), kept))
            outputs.append(y)
            leaves.append(leaf)
    expected = torch.cat(outputs)
    grad = torch.randn_like(expected)
    of_inputs = torch.autograd.grad(expected, [*leaves, *parameters.values()], grad)
    x = torch.cat([x for x, _ in inputs]).requires_grad_()
    y = net(x.clone())
    dx, *grads = torch.autograd.grad(y, [x, *parameters.values()], grad)
    exactly(y, expected, f"{what} output")
    pairs = zip(of_inputs[:parts], inputs, strict=True)
    exactly(dx, torch.cat([g.index_select(dim_in, kept) for g, (_, kept) in pairs]), f"{what} gradient of the input")
    for name, got, want in zip(parameters, grads, of_inputs[parts:], strict=True):
        exactly(got, want, f"{what} gradient of {name}")


@pytest.mark.parametrize("way", ["eager", "ops", "graph"])
@pytest.mark.parametrize("settings", [
    {}, {"sampling": "window"}, {"sampling": "window", "fold": "producer"}, {"norm": "flow", "sampling": "window"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("case", SLICED_BY_PARTS, ids=lambda c: c.name)
def test_layers_are_masked_dense_layers_part_by_part(case: LayerCase, settings, way, float64):
    layer = case.sliced(lambda n: Slice(n, 0.5, parts=3, **settings))
    sliceout.draw_(layer)
    with path(way):
        compare_parts(layer, torch.randn(6, *case.shape[1:]), 3, case.name)


def test_every_layer_either_has_parts_or_says_why_not():
    without = {name for name in snn.__all__ if getattr(getattr(snn, name), "one_part", "")}
    assert without == {*(f"Conv{n}d" for n in (1, 2, 3)), *(f"BatchNorm{n}d" for n in (1, 2, 3))}
    assert len(SLICED_BY_PARTS) > 25


@given(
    rows=st.integers(1, 3), parts=st.integers(1, 6), asked=st.integers(1, 8), rate=st.sampled_from([0.3, 0.5, 0.7]),
    align=st.sampled_from([1, 2, 4]), time=st.integers(1, 3),
)  # fmt: skip
def test_networks_of_any_shape(rows, parts, asked, rate, align, time):
    """Two hidden layers with a norm between; the batch may be too small, or not divide."""
    torch.manual_seed(0)
    a, b = Slice(16, rate, align=align, parts=asked), Slice(12, 0.5, sampling="window", align=1)
    net = nn.Sequential(
        snn.Linear(4, 16, out_slice=a), snn.LayerNorm(16, slice=a), nn.GELU(),
        snn.Linear(16, 12, in_slice=a, out_slice=b), nn.Tanh(), snn.Linear(12, 3, in_slice=b),
    ).double()  # fmt: skip
    sliceout.draw_(net)
    compare_parts(net, torch.randn(rows * parts, time, 4, dtype=torch.float64), parts_of(rows * parts, a.axis()))


@pytest.mark.parametrize("live", ["out", "in", "both"])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_gradients_of_stacked_weights_lie_as_the_weights_do(kind, live, monkeypatch):
    """``put`` adds up the parts row by row; across the rows it read at a tenth of the speed of memory."""
    sides = {role: Slice(8, 0.5, parts=2) for role in ("in", "out") if live in (role, "both")}
    layer = getattr(snn, kind)(8, 8, **{f"{role}_slice": s for role, s in sides.items()})
    sliceout.draw_(layer)
    seen = []

    def keep(full: Tensor, *args, **settings) -> Tensor:
        small = take(full, *args, **settings)
        if full.dim() == 2:
            small.register_hook(lambda grad: seen.append((small, grad)))
        return small

    monkeypatch.setattr("sliceout.nn.mixing.take", keep)
    layer(torch.randn(4, 3, 4 if "in" in sides else 8, requires_grad=True)).square().sum().backward()
    ((small, grad),) = seen
    assert small.is_contiguous()
    assert grad.stride() == small.stride()


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_a_bias_that_is_not_sliced_is_not_stacked(kind):
    """Its gradient would be added up twice: over the rows of each part, and over the parts."""
    s = Slice(8, 0.5, parts=2)
    layer = getattr(snn, kind)(*((8, 6) if kind == "Linear" else (6, 8)), in_slice=s)
    assert layer._small(None, s.axis(), torch.zeros(4, 4), parts=2)["bias"] is layer.bias


def test_a_prefix_is_the_same_in_all_parts(float64):
    net = mlp(parts=4, sampling="prefix").train()
    one = mlp(sampling="prefix").train()
    one.load_state_dict(net.state_dict())
    sliceout.draw_(net)
    x = torch.randn(8, 6)
    exactly(net(x), one(x))


@pytest.mark.parametrize(
    "mode", [{"qk_slice": True, "v_slice": True}, {"v_slice": True}, {"heads_slice": True}], ids=str
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_attention_part_by_part(mode, batch_first, float64):
    """The same attention with one part, on each part of the batch, with that part's starts."""

    def build(parts: int) -> nn.Module:
        torch.manual_seed(0)
        made = {
            name: Slice(4, 0.5, parts=parts).axis(inner=8) if name == "heads_slice"
            else Slice(8, 0.5, parts=parts, norm="none" if name == "qk_slice" else "probabilistic").axis(blocks=4)
            for name in mode
        }  # fmt: skip
        return snn.MultiheadAttention(32, 4, batch_first=batch_first, **made).train()

    many, one = build(3), build(1)
    sliceout.draw_(many)
    x, mask = torch.randn(6, 5, 32, requires_grad=True), torch.randn(6 * 4, 5, 5)
    lay_out = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    y, weights = many(*[lay_out(x)] * 3, attn_mask=mask)
    expected, of_weights = [], []
    for part in range(3):
        for s, of_one in zip(many.slices, one.slices, strict=True):
            of_one.start_on_host = s.start_of(part)
            of_one.start.fill_(s.start_of(part))
        z, w = one(*[lay_out(x[2 * part : 2 * part + 2])] * 3, attn_mask=mask[8 * part : 8 * part + 8])
        expected.append(lay_out(z))
        of_weights.append(w)
    exactly(lay_out(y), torch.cat(expected))
    exactly(weights, torch.cat(of_weights))
    grad = torch.randn_like(lay_out(y))
    lay_out(y).backward(grad)
    torch.cat(expected).backward(grad)
    for (name, a), (_, b) in zip(gradients(many), gradients(one), strict=True):
        exactly(a, b, name)


# -- modes -------------------------------------------------------------------------------------------------------------


def transformer(parts: int, **settings) -> nn.Module:
    torch.manual_seed(0)
    model = Attention()
    sliceout.convert_(model, 0.5, parts=parts, example_inputs=torch.zeros(2, 5, 16), **settings)
    return model.train()


@pytest.mark.parametrize("make", [transformer, lambda parts: Norms(parts=parts)], ids=["transformer", "norms"])
def test_eval_is_bit_identical(make):
    model = make(4)
    plain = copy.deepcopy(model).eval()
    x = torch.randn(8, 5, 16) if isinstance(model, Attention) else torch.randn(8, 6)
    before = plain(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    loss_of(model, x).backward()
    optimizer.step()
    assert torch.equal(model.eval()(x), before)
    if isinstance(model, Attention):
        assert torch.equal(sliceout.revert_(model)(x), before)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_one_compiled_graph_serves_all_draws(float64):
    model, x = transformer(4), torch.randn(8, 5, 16)
    twin = copy.deepcopy(model)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    fast = torch.compile(model, backend=backend, fullgraph=True)
    one, other = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, twin))
    seen = set()
    for _ in range(5):
        for step, optimizer in ((fast, one), (twin, other)):
            loss_of(step, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.add(tuple(tuple(s.starts_on_host) for s in sliceout.slices(model)))
    assert len(graphs) == 1
    assert len(seen) == 5
    for (key, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        exactly(a, b, key)


@pytest.mark.usefixtures("fresh_compiler")
def test_batches_of_any_size_share_a_graph_as_long_as_they_have_as_many_parts(float64):
    model, graphs = mlp(parts=4), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    fast = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    counts = []
    for samples in (24, 32, 40, 44, 9, 15):  # in four parts, and then in three
        sliceout.draw_(model)
        x = torch.randn(samples, 6)
        exactly(fast(x), model(x))
        counts.append(len(graphs))
    assert counts == [1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_activations_use_the_same_starts(use_reentrant, float64):
    model, x = transformer(4), torch.randn(8, 5, 16, requires_grad=True)
    sliceout.draw_(model)
    model(x).square().sum().backward()
    expected = {name: g.clone() for name, g in gradients(model)}
    model.zero_grad()
    checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
    for name, g in gradients(model):
        exactly(g, expected[name], name)


def test_a_backward_after_the_next_draw_goes_where_its_forward_read(float64):
    model, x = transformer(4), torch.randn(8, 5, 16)
    loss = model(x).square().sum()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    sliceout.draw_(model)
    for got, want in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        exactly(got, want)


def test_autocast_multiplies_in_bfloat16():
    model, x = transformer(4), torch.randn(8, 5, 16)
    plain = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    torch.testing.assert_close(y.float(), plain, rtol=0.1, atol=0.1)
    y.sum().backward()
    assert all(g.dtype == torch.float32 for _, g in gradients(model))


def test_accumulated_gradients_share_one_draw(float64):
    model, x = transformer(2), torch.randn(8, 5, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [list(s.starts_on_host) for s in sliceout.slices(model)]
    for half in x.chunk(2):
        loss_of(model, half).backward()
        assert [list(s.starts_on_host) for s in sliceout.slices(model)] == before
    optimizer.step()
    assert [list(s.starts_on_host) for s in sliceout.slices(model)] != before


def test_a_resumed_run_repeats_the_draws(float64):
    model, x = transformer(4), torch.randn(8, 5, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(model, optimizer, steps):
        for _ in range(steps):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(model, optimizer, 3)
    saved = copy.deepcopy(model.state_dict())
    train(model, optimizer, 3)
    again = transformer(4)
    again.load_state_dict(saved)
    train(again, torch.optim.SGD(again.parameters(), 0.1), 3)
    assert_same_state(model, again)
    assert [s.starts_on_host for s in sliceout.slices(model)] == [s.starts_on_host for s in sliceout.slices(again)]

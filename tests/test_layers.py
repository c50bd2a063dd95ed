"""Sliced layers: exactly the masked dense layer while they train, bit for bit the plain layer in eval()."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
from conftest import devices
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sliceout
from layercases import CASES, FORMATS, LayerCase, find, randomise
from opcases import axes
from oracle import channel_dim, compare, exactly, path, set_start
from sliceout import Slice
from sliceout.drawing import owner_of
from sliceout.nn import plain_, slice_
from sliceout.ops import views
from sliceout.schemes.subset import Subset
from sliceout.takes import ConcatAxis

every_case = pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
torch_cases = [c for c in CASES if hasattr(nn, c.kind)]
every_torch_case = pytest.mark.parametrize("case", torch_cases, ids=[c.name for c in torch_cases])
PATHS = ["eager", "ops", "graph"]
paths = pytest.mark.parametrize("how", PATHS)
SCHEMES = list(itertools.product(["probabilistic", "flow", "none"], ["consumer", "producer"]))

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]


def maker(**options):
    """Slices with these options, each with a seed of its own."""
    seeds = itertools.count()
    kind = Slice
    if options.get("sampling") == "subset":
        kind = Subset
        del options["sampling"]
    return lambda size: kind(size, **{"rate": 0.4, "seed": next(seeds), **options})


def test_every_layer_of_the_library_is_tested_here():
    """Attention takes three inputs and has a file of its own: test_multihead.py."""
    layers = {name for name in sliceout.nn.__all__ if name[0].isupper()} - {"Sliced", "MultiheadAttention"}
    assert layers == {c.kind for c in CASES}


# -- exactness ---------------------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("sampling", ["circular", "window", "prefix", "subset"])
@every_case
def test_output_and_gradients_equal_the_masked_dense_layer(case: LayerCase, sampling, device):
    for norm, fold in SCHEMES:
        layer = case.sliced(maker(sampling=sampling, norm=norm, fold=fold)).to(device)
        for how in PATHS:
            for step in range(3 if device == "cpu" else 1):
                for s in layer.slices:
                    owner_of(s).seek_(step)
                with path(how):
                    compare(layer, case.input(device), f"{how}, norm={norm}, fold={fold}, step={step}:", case.unbatched)


@devices
@pytest.mark.parametrize("case", [c for c in CASES if c.has_channels_last], ids=lambda c: c.name)
def test_channels_last_layers_equal_the_masked_dense_layer(case: LayerCase, device):
    for norm, fold in SCHEMES:
        layer = case.sliced(maker(norm=norm, fold=fold)).to(device)
        layer = layer.to(memory_format=FORMATS[len(case.shape)])
        for how in PATHS:
            with path(how):
                compare(layer, case.input(device, channels_last=True), f"{how}, norm={norm}, fold={fold}:")


@devices
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("groups", [1, 10])
def test_gradients_of_channels_last_weights_are_channels_last(groups, kernel, device):
    s = Slice(10, 0.4)
    layer = sliceout.nn.Conv2d(10, 10, kernel, groups=groups, in_slice=s, out_slice=s).to(device)
    strides = torch.empty(10, 10 // groups, kernel, kernel).to(memory_format=torch.channels_last).stride()
    layer.weight = nn.Parameter(torch.randn(10, 10 // groups, kernel, kernel, device=device)
                                .as_strided((10, 10 // groups, kernel, kernel), strides))  # fmt: skip
    for how in PATHS:
        layer.weight.grad = None
        with path(how):
            layer(torch.randn(2, 6, 5, 5, device=device).to(memory_format=torch.channels_last)).sum().backward()
        assert layer.weight.grad.stride() == layer.weight.stride()


@given(axes(), axes(), st.sampled_from(["consumer", "producer"]), st.booleans(), st.sampled_from(PATHS))
def test_linear_of_any_shape_rate_and_align_equals_the_masked_dense_layer(into, out, fold, bias, how):
    torch.manual_seed(0)
    into.slice.fold = out.slice.fold = fold
    layer = sliceout.nn.Linear(into.size, out.size, bias=bias, in_slice=into, out_slice=out)
    with path(how):
        compare(layer, torch.randn(3, into.size))


@given(
    axes(max_size=6), axes(max_size=6), st.sampled_from(["consumer", "producer"]), st.integers(1, 3), st.booleans(),
    st.sampled_from(PATHS),
)  # fmt: skip
def test_conv_of_any_shape_rate_and_align_equals_the_masked_dense_layer(into, out, fold, kernel, channels_last, how):
    torch.manual_seed(0)
    into.slice.fold = out.slice.fold = fold
    layer = sliceout.nn.Conv2d(into.size, out.size, kernel, in_slice=into, out_slice=out)
    x = torch.randn(2, into.size, 3, 4)
    if channels_last:
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    with path(how):
        compare(layer, x)


@paths
@pytest.mark.parametrize("sampling", ["circular", "window", "subset"])
@pytest.mark.parametrize("fold", ["consumer", "producer"])
def test_parts_of_a_fused_axis_are_sliced_and_scaled_each_by_itself(fold, sampling, how):
    """Queries and keys, and values: two slices along one dimension, with rates of their own."""
    for norm in ("probabilistic", "flow"):
        narrow = maker(sampling=sampling, norm=norm, fold=fold, rate=0.5)(8)
        wide = maker(sampling=sampling, norm=norm, fold=fold, rate=0.25, seed=7)(12)
        for parts in ((narrow.axis(blocks=2), wide.axis()), (wide.axis(inner=2), narrow.axis())):
            joint = ConcatAxis(parts)
            for layer, shape in (
                (sliceout.nn.Linear(5, joint.size, out_slice=joint), (3, 5)),
                (sliceout.nn.Linear(joint.size, 5, in_slice=joint), (3, joint.size)),
                (sliceout.nn.Conv1D(joint.size, 5, out_slice=joint), (3, 5)),
                (sliceout.nn.Conv1d(joint.size, 5, 3, in_slice=joint), (3, joint.size, 4)),
                (sliceout.nn.BatchNorm1d(joint.size, slice=joint), (4, joint.size)),
                (sliceout.nn.LayerNorm(joint.size, slice=joint), (4, joint.size)),
            ):
                with path(how):
                    compare(randomise(layer), torch.randn(shape), f"norm={norm} {layer}:")


@given(axes(), st.sampled_from([0.0, 0.1, 1.0]), st.integers(1, 3), st.sampled_from(PATHS))
def test_batch_norm_of_any_shape_rate_and_align_equals_the_masked_dense_layer(axis, momentum, length, how):
    torch.manual_seed(0)
    layer = randomise(sliceout.nn.BatchNorm1d(axis.size, momentum=momentum, slice=axis))
    with path(how):
        for step in range(3):
            owner_of(axis.slice).seek_(step)
            compare(layer, torch.randn(4, axis.size, length))


# -- stacks ------------------------------------------------------------------------------------------------------------


def mlp(make):
    h = make(10)
    return nn.Sequential(
        sliceout.nn.Linear(5, 10, out_slice=h),
        sliceout.nn.BatchNorm1d(10, slice=h),
        nn.Sigmoid(),  # of 0 it is not 0: what is dropped must be dropped by the consumer, too
        sliceout.nn.Linear(10, 3, in_slice=h),
    ), (6, 5)  # fmt: skip


def deep_mlp(make):
    a, b, c = make(10), make(8), make(12)
    return nn.Sequential(
        sliceout.nn.Linear(5, 10, out_slice=a),
        nn.Tanh(),
        sliceout.nn.Linear(10, 8, in_slice=a, out_slice=b),
        sliceout.nn.LayerNorm(8, slice=b),
        nn.GELU(),
        sliceout.nn.Linear(8, 12, bias=False, in_slice=b, out_slice=c),
        sliceout.nn.PReLU(12, slice=c),
        sliceout.nn.Linear(12, 3, in_slice=c),
    ), (6, 5)  # fmt: skip


def cnn(make):
    a, b = make(10), make(8)
    return nn.Sequential(
        sliceout.nn.Conv2d(3, 10, 3, padding=1, out_slice=a),
        sliceout.nn.BatchNorm2d(10, slice=a),
        nn.ReLU(),
        sliceout.nn.Conv2d(10, 8, 3, padding=1, bias=False, in_slice=a, out_slice=b),
        sliceout.nn.BatchNorm2d(8, slice=b),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        sliceout.nn.Linear(32, 3, in_slice=b.axis(inner=4)),
    ), (4, 3, 4, 4)  # fmt: skip


def inverted_residual(make):
    s = make(10)
    return nn.Sequential(
        sliceout.nn.Conv2d(3, 10, 1, bias=False, out_slice=s),
        sliceout.nn.BatchNorm2d(10, slice=s),
        nn.SiLU(),
        sliceout.nn.Conv2d(10, 10, 3, padding=1, groups=10, bias=False, in_slice=s, out_slice=s),
        sliceout.nn.GroupNorm(10, 10, slice=s),
        nn.SiLU(),
        sliceout.nn.Conv2d(10, 3, 1, in_slice=s),
        nn.BatchNorm2d(3),
    ), (4, 3, 4, 4)  # fmt: skip


def transformer_mlp(make):
    h = make(16)
    return nn.Sequential(
        nn.LayerNorm(6),
        sliceout.nn.Conv1D(16, 6, out_slice=h),
        nn.GELU(),
        sliceout.nn.LayerScale(16, 0.5, slice=h),
        sliceout.nn.RMSNorm(16, slice=h),
        sliceout.nn.Conv1D(6, 16, in_slice=h),
    ), (2, 5, 6)  # fmt: skip


STACKS = {f.__name__: f for f in (mlp, deep_mlp, cnn, inverted_residual, transformer_mlp)}


@devices
@pytest.mark.parametrize("sampling", ["circular", "window", "prefix", "subset"])
@pytest.mark.parametrize("stack", STACKS)
def test_stacks_equal_the_masked_dense_network(stack, sampling, device):
    for norm, fold in SCHEMES:
        net, shape = STACKS[stack](maker(sampling=sampling, norm=norm, fold=fold))
        randomise(net).to(device)
        family = sliceout.slices(net)
        for how in PATHS:
            for _ in range(2):
                family.draw_()
                with path(how):
                    compare(net, torch.randn(shape, device=device), f"{how}, norm={norm}, fold={fold}:")


@paths
def test_a_frozen_batch_norm_in_a_training_network_lines_up(how):
    net, shape = cnn(maker())
    randomise(net).train()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()
    before = copy.deepcopy(net.state_dict())
    with path(how):
        compare(net, torch.randn(shape))
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} must not change"


@paths
def test_an_eval_producer_in_a_training_network_runs_the_whole_layer(how):
    net, shape = mlp(maker())
    net.train()[0].eval()
    x = torch.randn(shape)
    with path(how):
        assert net[0](x).shape == (6, 10)
        compare(net, x)


@paths
def test_only_kept_channels_update_their_statistics(how):
    s = Slice(10, 0.4)
    layer = randomise(sliceout.nn.BatchNorm1d(10, slice=s))
    mean, var = layer.running_mean.clone(), layer.running_var.clone()
    with path(how):
        layer(torch.randn(5, 6))
    kept = torch.zeros(10, dtype=torch.bool)
    kept[s.kept] = True
    for now, before in ((layer.running_mean, mean), (layer.running_var, var)):
        assert torch.equal(now[~kept], before[~kept])
        assert (now[kept] != before[kept]).all()
    assert int(layer.num_batches_tracked) == 1


def compare_batch_norm(layer, s, x):
    """With a plain one over the kept channels; the running statistics of both have been updated."""
    plain = nn.BatchNorm2d(s.width, device=x.device).requires_grad_(False)
    vectors = ("weight", "bias", "running_mean", "running_var")
    for name in vectors:
        getattr(plain, name).copy_(getattr(layer, name)[s.kept])
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain(x))
    for name in vectors:
        torch.testing.assert_close(getattr(layer, name)[s.kept], getattr(plain, name))


def test_batch_norms_are_given_no_vector_that_they_cannot_read(monkeypatch):
    """On a GPU cuDNN reads 16 bytes at a time: see views.readable. What is copied instead must find its way back."""
    s = Slice(10, 0.4, sampling="window")
    layer = randomise(sliceout.nn.BatchNorm2d(10, slice=s))
    given, batch_norm = [], torch.nn.functional.batch_norm
    monkeypatch.setattr(
        torch.nn.functional, "batch_norm", lambda x, *rest, **named: given.append(rest) or batch_norm(x, *rest, **named)
    )
    monkeypatch.setattr(views, "readable", lambda vector, offset: offset * vector.element_size() % 16 == 0)
    for start in range(5):
        set_start(s, start)
        compare_batch_norm(layer, s, torch.randn(5, 6, 2, 2))
        ours, _ = given
        shared = [v.untyped_storage().nbytes() == 80 for v in ours[:4]]
        assert shared == [start % 2 == 0] * 4
        given.clear()


def test_a_batch_norm_may_run_at_several_draws_before_the_first_is_run_backwards():
    """Its graph holds the statistics it was given; writing to them again must not look like a change to it."""
    s = Slice(10, 0.4)
    layer = randomise(sliceout.nn.BatchNorm2d(10, slice=s))
    losses = []
    for start in (6, 1, 7, 6):
        set_start(s, start)
        losses.append(layer(torch.randn(5, 6, 2, 2, requires_grad=True)).square().sum())
    for loss in losses:
        loss.backward()
    assert layer.bias.grad is not None


def test_statistics_that_were_replaced_or_moved_are_updated():
    s = Slice(10, 0.4)
    layer = randomise(sliceout.nn.BatchNorm2d(10, slice=s))
    changes = [
        lambda: None,
        lambda: setattr(layer, "running_mean", torch.zeros(10)),
        lambda: setattr(layer.running_var, "data", torch.full((10,), 2.0)),
        lambda: layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True),
        lambda: s.rerate_(0.6),
        lambda: s.rerate_(0.4),
    ]
    for change, start in itertools.product(changes, (1, 7)):  # in one run, and around the end
        if start == 1:
            change()
        set_start(s, start)
        compare_batch_norm(layer, s, torch.randn(5, s.width, 2, 2))


def test_views_of_many_starts_come_and_go():
    s = Slice(600, 0.5, align=1)
    layer = randomise(sliceout.nn.BatchNorm2d(600, slice=s))
    for start in (*range(0, 600, 2), 0, 598):
        set_start(s, start)
        compare_batch_norm(layer, s, torch.randn(2, 300, 1, 1))
        assert 0 < len(layer._statistics.known) <= 256


def test_a_batch_norm_keeps_its_views_to_itself():
    s = Slice(10, 0.4)
    layer = slice_(nn.BatchNorm2d(10), slice=s)
    set_start(s, 7)
    x = torch.randn(5, 6, 2, 2)
    layer(x)
    mean = layer.running_mean.clone()
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for other in copies:
        other(x)
        assert not torch.equal(other.running_mean, mean)
    assert torch.equal(layer.running_mean, mean)
    assert vars(plain_(layer)).keys() == vars(nn.BatchNorm2d(10)).keys()


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_batch_norms_read_slices_that_start_anywhere(dtype, device):
    torch.set_default_dtype(torch.float32)
    s = Slice(64, 0.5, align=1, sampling="window")
    layer = randomise(sliceout.nn.BatchNorm2d(64, slice=s)).to(device)
    for start in range(0, 33, 3):
        set_start(s, start)
        x = torch.randn(3, 32, 15, 15, device=device, dtype=dtype)
        compare_batch_norm(layer, s, x.to(memory_format=torch.channels_last))


# -- the mean over all starts ------------------------------------------------------------------------------------------

UNBIASED = [("window", "probabilistic"), ("circular", "probabilistic"), ("circular", "flow")]


@paths
@pytest.mark.parametrize("fold", ["consumer", "producer"])
@pytest.mark.parametrize(("sampling", "norm"), UNBIASED)
@pytest.mark.parametrize("align", [1, 2, 4])
@pytest.mark.parametrize("kind", ["linear", "Conv1D", "conv", "flattened", "heads"])
def test_the_mean_over_all_starts_is_the_full_layer(kind, align, sampling, norm, fold, how):
    """Producer and consumer are linear: averaged over every eligible start they are the full network."""
    s = Slice(14, 0.4, align=align, sampling=sampling, norm=norm, fold=fold)
    assert s.sliced
    nets = {
        "linear": lambda: (sliceout.nn.Linear(5, 14, out_slice=s), sliceout.nn.Linear(14, 3, in_slice=s)),
        "Conv1D": lambda: (sliceout.nn.Conv1D(14, 5, out_slice=s), sliceout.nn.Conv1D(3, 14, in_slice=s)),
        "heads": lambda: (
            sliceout.nn.Linear(5, 28, out_slice=s.axis(blocks=2)),
            sliceout.nn.Linear(28, 3, in_slice=s.axis(blocks=2)),
        ),
        "conv": lambda: (
            sliceout.nn.Conv2d(2, 14, 3, padding=1, out_slice=s),
            # the producer cannot scale a bias behind it: with one, the first moment holds for the consumer's fold alone
            sliceout.nn.Conv2d(14, 14, 3, groups=14, bias=fold == "consumer", in_slice=s, out_slice=s),
            sliceout.nn.Conv2d(14, 3, 1, in_slice=s),
        ),
        "flattened": lambda: (
            sliceout.nn.Conv2d(2, 14, 3, out_slice=s),
            nn.Flatten(),
            sliceout.nn.Linear(56, 3, in_slice=s.axis(inner=4)),
        ),
    }
    net = randomise(nn.Sequential(*nets[kind]()))
    x = torch.randn(3, 2, 4, 4) if kind in ("conv", "flattened") else torch.randn(3, 5)
    total = 0
    with path(how):
        for start in s.starts:
            set_start(s, start)
            total = total + net(x)
    exactly(total / len(s.starts), net.eval()(x), f"{len(s.starts)} starts")


# -- eval() and back ---------------------------------------------------------------------------------------------------


@devices
@every_torch_case
def test_eval_output_is_bit_identical(case: LayerCase, device):
    plain = randomise(case.plain()).to(device).eval()
    x = case.input(device)
    expected = plain(x)
    made = case.sliced(maker()).to(device)
    made.load_state_dict(plain.state_dict())
    assert torch.equal(made.eval()(x), expected)
    slice_(plain, **case.slices(maker()))
    assert torch.equal(plain(x), expected)
    assert torch.equal(plain.train().eval()(x), expected)


@every_torch_case
def test_a_slice_switched_off_or_of_rate_zero_trains_the_plain_layer_bit_for_bit(case: LayerCase):
    if case.frozen:
        pytest.skip("eval mode is covered above")
    x = case.input().requires_grad_()
    for off in (True, False):
        plain = randomise(case.plain())
        layer = slice_(copy.deepcopy(plain), **case.slices(maker(rate=0.4 if off else 0.0)))
        for s in layer.slices:
            s.on = not off
        results = []
        for m in (plain, layer):
            torch.manual_seed(1)  # dropout must drop the same
            y = m(x)
            results.append([y, *torch.autograd.grad(y, [x, *m.parameters()], torch.ones_like(y))])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(layer.buffers(), plain.buffers(), strict=True):
            assert torch.equal(ours, theirs)


@every_torch_case
def test_slicing_and_undoing_restores_class_and_attributes(case: LayerCase):
    layer = case.plain()
    before, kind, parameters = dict(layer.__dict__), type(layer), list(layer.parameters())
    keys = list(layer.state_dict())
    assert slice_(layer, **case.slices(maker())) is layer
    assert isinstance(layer, kind)
    assert isinstance(layer, getattr(sliceout.nn, case.kind))
    assert list(layer.state_dict()) == keys
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
    assert plain_(layer) is layer
    assert type(layer) is kind
    assert layer.__dict__.keys() == before.keys()
    assert all(layer.__dict__[k] is before[k] for k in before)


@every_torch_case
def test_a_layer_made_by_hand_computes_what_a_converted_one_does(case: LayerCase):
    made = case.sliced(maker())
    converted = case.plain()
    converted.load_state_dict(made.state_dict())
    slice_(converted, **case.slices(maker())).train(made.training)
    for s, t in zip(made.slices, converted.slices, strict=True):
        set_start(t, s.start_on_host)
    dim = made.axes.get("in", made.axes.get("unit"))
    x = case.input()
    if dim is not None:
        x = x.index_select(channel_dim(made, x, case.unbatched), dim.kept)
    assert type(converted) is type(made)
    assert torch.equal(converted(x), made(x))


# -- subclasses, parametrizations, copies ------------------------------------------------------------------------------


class NamedLinear(nn.Linear):
    """A subclass that changes nothing of the arithmetic."""

    def __init__(self, *args, name="nobody", **kwargs):
        super().__init__(*args, **kwargs)
        self.name = name

    def hello(self):
        return self.name


class HandMade(sliceout.nn.Linear):
    """A user's subclass of a sliced layer."""


class Net(nn.Module):
    """A subclass layer, a plain one, and one slice between."""

    def __init__(self):
        super().__init__()
        self.hidden = Slice(10, 0.4)
        self.first = slice_(NamedLinear(5, 10, name="first"), out_slice=self.hidden)
        self.norm = sliceout.nn.BatchNorm1d(10, slice=self.hidden)
        self.last = HandMade(10, 3, in_slice=self.hidden)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def test_a_subclass_keeps_its_type_its_attributes_and_its_methods():
    layer = NamedLinear(5, 10, name="me")
    slice_(layer, out_slice=Slice(10, 0.4))
    assert isinstance(layer, NamedLinear)
    assert layer.hello() == "me"
    compare(layer, torch.randn(4, 5))
    plain_(layer)
    assert type(layer) is NamedLinear
    assert layer.hello() == "me"


def by_torch_save(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


clones = pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), by_torch_save],
    ids=["deepcopy", "pickle", "save"],
)


@clones
def test_copies_stay_aligned_with_themselves_and_apart_from_the_original(clone):
    net = Net()
    other = clone(net)
    assert [type(m) for m in other.modules()] == [type(m) for m in net.modules()]
    assert other.hidden is not net.hidden
    for axis in (other.first.axes["out"], other.norm.axes["unit"], other.last.axes["in"]):
        assert axis.slice is other.hidden
    x = torch.randn(4, 5)
    net.zero_grad()
    assert torch.equal(clone(net)(x), net(x))
    mine, start = sliceout.slices(net), net.hidden.start_on_host
    step = mine.step
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for expected in range(step + 1, step + 4):  # the copy is watched, too
        optimizer.step()
        assert sliceout.slices(other).step == expected
    assert (net.hidden.start_on_host, mine.step) == (start, step)


@clones
def test_a_plain_layer_can_be_had_back_from_a_copy(clone):
    other = clone(Net())
    assert type(plain_(other.first)) is NamedLinear
    assert type(plain_(other.norm)) is nn.BatchNorm1d


@devices
@paths
@pytest.mark.parametrize("order", ["parametrized then sliced", "sliced then parametrized"])
def test_a_parametrized_layer_trains_its_original_parameters(order, how, device):
    layer = nn.Linear(10, 8, bias=False)
    make = maker()
    slices = {"in_slice": make(10), "out_slice": make(8)}
    if order == "parametrized then sliced":
        slice_(torch.nn.utils.parametrizations.weight_norm(layer), **slices)
    else:
        torch.nn.utils.parametrizations.weight_norm(slice_(layer, **slices))
    layer.to(device)
    names = [n for n, _ in layer.named_parameters()]
    assert names == ["parametrizations.weight.original0", "parametrizations.weight.original1"]
    with path(how):
        compare(layer, torch.randn(4, 10, device=device))
    other = copy.deepcopy(layer)
    before = owner_of(other.axes["out"].slice).step
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert owner_of(other.axes["out"].slice).step == before + 1


def test_a_parametrization_on_top_keeps_its_class():
    layer = torch.nn.utils.parametrizations.weight_norm(sliceout.nn.Linear(10, 8, in_slice=Slice(10)))
    kind = type(layer)
    with pytest.raises(TypeError, match="ParametrizedLinear was made sliced and has no plain form"):
        plain_(layer)
    assert type(layer) is kind


def test_transformers_conv1d_is_sliced_and_restored():
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    layer = randomise(Conv1D(8, 10))
    x = torch.randn(2, 3, 10)
    expected = layer(x)
    make = maker()
    slice_(layer, in_slice=make(10), out_slice=make(8))
    compare(layer, x)
    assert torch.equal(layer.eval()(x), expected)
    other = pickle.loads(pickle.dumps(layer))
    assert type(other) is type(layer)
    assert type(plain_(layer)) is Conv1D


def test_timm_layer_scale_is_sliced_and_restored():
    LayerScale = pytest.importorskip("timm.layers").LayerScale
    layer = randomise(LayerScale(10))
    x = torch.randn(2, 3, 10)
    expected = layer(x)
    slice_(layer, slice=Slice(10, 0.4))
    compare(layer, x)
    assert torch.equal(layer.eval()(x), expected)
    assert type(plain_(layer)) is LayerScale


# -- autocast, dtypes, draws -------------------------------------------------------------------------------------------


@devices
@paths
@pytest.mark.parametrize("case", [find("linear-both"), find("Conv1D-both"), find("conv2d-both")], ids=lambda c: c.name)
def test_autocast_returns_what_the_plain_layer_returns(case, how, device):
    """bfloat16 from float32 layers, float64 from float64 ones; gradients in the dtype of the parameters."""
    for dtype, expected in ((torch.float32, torch.bfloat16), (torch.float64, torch.float64)):
        layer = case.sliced(maker()).to(device, dtype)
        x = case.input(device).to(dtype)
        small = x.index_select(channel_dim(layer, x), layer.axes["in"].kept.to(device))
        with torch.autocast(device, torch.bfloat16), path(how):
            y = layer(small)
            assert y.dtype == expected == layer.eval()(x).dtype
        y.sum().backward()
        assert {p.grad.dtype for p in layer.parameters()} == {dtype}


@devices
@paths
def test_a_draw_between_forward_and_backward_never_misplaces_a_gradient(how, device):
    """Views hold their start; the ops refuse to go on."""
    s = Slice(64)
    layer = sliceout.nn.Linear(5, 64, out_slice=s).to(device)
    with path(how):
        y = layer(torch.randn(3, 5, device=device))
    kept = s.kept
    while torch.equal(s.kept, kept):
        owner_of(s).draw_()
    if how != "eager":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        y.sum().backward()
        assert layer.bias.grad.nonzero().flatten().tolist() == sorted(kept.tolist())


def test_linear_on_the_cpu_copies_no_weight_where_the_normalisation_is_one_number():
    s = Slice(64, sampling="window", norm="flow")
    layer = sliceout.nn.Linear(64, 64, in_slice=s, out_slice=s)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(3, s.width, requires_grad=True))
    weight = layer.weight.untyped_storage().data_ptr()
    matrices = [t for t in saved if t.shape[-1] == t.shape[-2] == s.width]
    assert [t.untyped_storage().data_ptr() == weight for t in matrices] == [True]


@pytest.mark.parametrize("kind", ["Dropout", "Dropout1d", "Dropout2d", "Dropout3d"])
def test_dropout_rests_while_its_slice_drops(kind):
    s = Slice(10, 0.4)
    layer = getattr(sliceout.nn, kind)(0.5, slice=s)
    x = (
        torch.ones(8, 10, 2, 2, 2)
        if kind == "Dropout3d"
        else torch.ones(8, 10, 2, 2)[..., 0 if "1d" in kind else slice(2)]
    )
    assert torch.equal(layer(x), x)
    s.on = False
    assert 0 < (layer(x) == 0).double().mean() < 1
    assert torch.equal(layer.eval()(x), x)


def test_printing_a_layer_shows_its_slices():
    s = Slice(10, 0.4)
    assert repr(sliceout.nn.Linear(5, 10, out_slice=s)) == (
        "Linear(in_features=5, out_features=10, bias=True, out_slice=Slice(6 of 10, circular))"
    )
    assert "slice=Slice(6 of 10, circular)" in repr(sliceout.nn.BatchNorm1d(10, slice=s))
    assert repr(sliceout.nn.LayerScale(10, slice=s)) == "LayerScale(slice=Slice(6 of 10, circular))"

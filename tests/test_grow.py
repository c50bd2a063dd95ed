"""Widths that grow with the progress of training: rates, what is said beforehand, and that the loss does not jump."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from torch import nn

import sliceout
from networks import Attention, Heads, convnet, loss_of, mlp
from sliceout import Grow, Schedule, convert_
from sliceout import nn as snn

RATES = {0: 0.5, 0.5: 0.25, 0.75: 0.0}


def net(rate=0.5, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2))
    return model, convert_(model, rate, **{"sampling": "prefix", **settings}).slices


# -- rates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["prefix", "circular", "window"])
def test_rates_by_progress_whatever_the_model_was_converted_with(sampling):
    model, slices = net({"0": 0.25, "2": 0.75}, sampling=sampling)
    grow, seen = Grow(model, RATES), []
    for step in (0, 49, 50, 74, 75, 99, 60):
        grow.step(step, 100)
        seen.append([s.width if s.on else s.size for s in slices])
        assert model(torch.zeros(1, 4)).shape == (1, 2)
    assert seen == [[32, 64], [32, 64], [48, 96], [48, 96], [64, 128], [64, 128], [48, 96]]


def test_before_the_first_entry_the_first_rate_holds():
    model, slices = net()
    grow = Grow(model, {0.75: 0.0, 0.25: 0.25})
    assert (grow.step(0.0), next(iter(slices)).width) == (0.25, 48)


@pytest.mark.parametrize("scheme", ["controlled", "standard", "patch"])
def test_other_schemes_grow_too(scheme):
    from sliceout_lab.models import WideResNet

    model = WideResNet(10, 1)
    slices = convert_(model, 0.5, scheme=scheme).slices
    grow = Grow(model, {0: 0.5, 0.5: 0.25})
    assert grow.sets == 2
    grow.step(0.6)
    assert {s.rate for s in slices} == {0.25}


@pytest.mark.parametrize(("rates", "error", "message"), [
    ({}, ValueError, "rates={}: expected rates by progress"),
    ([0.5, 0.0], ValueError, r"rates=\[0.5, 0.0\]: expected rates by progress"),
    ({1.5: 0.5}, ValueError, "progress 1.5: expected 0 to 1"),
    ({"0": 0.5}, TypeError, "progress='0': expected a number"),
    ({0: 0.5, 0.5: 1.0}, ValueError, "rate=1.0: expected 0 <= rate < 1"),
    ({0: 0.5, 0.5: -0.1}, ValueError, "rate=-0.1: expected 0 <= rate < 1"),
    ({0: 0.5, 0.5: "all"}, TypeError, "rate='all': expected a number"),
    ({0: 0.5, 0.5: 0.95}, ValueError, "rate=0.95 of size=64 keeps 3.2 units, which is 0 at align=8: choose a lower"),
])  # fmt: skip
def test_bad_rates_are_told_before_anything_is_touched(rates, error, message):
    model, slices = net()
    before = [(s.width, s.rate, s.on) for s in slices]
    with pytest.raises(error, match=message):
        Grow(model, rates)
    assert [(s.width, s.rate, s.on) for s in slices] == before


# -- what is said beforehand -------------------------------------------------------------------------------------------


def test_the_number_of_sets_of_widths_is_said_beforehand(caplog):
    model, _ = net()
    with caplog.at_level(logging.INFO, "sliceout"):
        grow = Grow(model, {0: 0.5, 0.3: 0.25, 0.4: 0.251, 0.5: 0.0})  # two rates are the same widths
    assert grow.sets == 3
    assert repr(grow) == "Grow({0: 0.5, 0.3: 0.25, 0.4: 0.251, 0.5: 0.0}, 3 sets of widths)"
    assert f"{grow}: torch.compile and sliceout.capture make a graph for each" in caplog.text
    assert Schedule(model, {0.5: 0.0}).sets == 2
    assert Schedule(model, {0.0: 0.0}).sets == 1


def test_more_sets_than_the_compiler_makes_graphs_are_warned_of():
    model, _ = net(align=1)
    few, many = ({i / n: 0.5 - i / 20 for i in range(n)} for n in (8, 9))
    Grow(model, few)
    with pytest.warns(UserWarning, match=r"9 sets of widths\): torch.compile makes at most 8 graphs"):
        Grow(model, many)
    with torch._dynamo.config.patch(recompile_limit=9), warnings.catch_warnings():
        warnings.simplefilter("error")
        Grow(model, many)


def test_compiled_graphs_are_one_per_set_of_widths():
    model, _ = net()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled, x = torch.compile(model, backend=backend, fullgraph=True), torch.randn(2, 4)
    grow, optimizer = Grow(model, RATES), torch.optim.AdamW(model.parameters())
    for progress in (0.0, 0.1, 0.5, 0.6, 0.75, 0.9, 0.2, 0.6):
        grow.step(progress)
        torch.testing.assert_close(compiled(x), model(x))
        loss_of(compiled, x).backward()
        optimizer.step()
    assert len(graphs) == grow.sets == 3


# -- the loss does not jump --------------------------------------------------------------------------------------------


def convolutional(**settings):
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    convert_(model, 0.5, example_inputs=torch.zeros(2, 3, 8, 8), **settings)
    return model


def jumps(make, shape, silent, steps=40, **settings):
    """How much the training loss on one batch changes, as a share, at each change of rate."""
    torch.manual_seed(0)
    model = make(**settings)
    x, y = torch.randn(64, *shape), torch.randint(10, (64,))
    optimizer, grow = torch.optim.AdamW(model.parameters(), 3e-3), Grow(model, RATES, silent=silent)
    found = []
    for step in range(steps):
        before = nn.functional.cross_entropy(model(x), y).item()
        rate = grow.value
        if grow.step(step, steps) != rate and rate is not None:
            found.append(abs(nn.functional.cross_entropy(model(x), y).item() / before - 1))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(found) == 2
    return found


def dense(**settings):
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    convert_(model, 0.5, **settings)
    return model


@pytest.mark.parametrize(("make", "shape"), [(dense, (12,)), (convolutional, (3, 8, 8))], ids=["mlp", "cnn"])
def test_the_loss_does_not_jump_when_units_enter(make, shape):
    assert max(jumps(make, shape, silent=True, sampling="prefix")) < 1e-5
    assert min(jumps(make, shape, silent=False, sampling="prefix")) > 1e-3, "this is what silence is for"


@pytest.mark.parametrize("name", ["mlp", "convnet", "values", "heads", "fused"])
def test_the_full_network_computes_what_the_narrow_one_does(name, float64):
    make, shape = {
        "mlp": (mlp, (6,)), "convnet": (convnet, (3, 8, 8)),
        "values": (lambda **k: Heads(("v",), **k), (5, 16)), "heads": (lambda **k: Heads(("heads",), **k), (5, 16)),
        "fused": (fused_attention, (5, 16)),
    }[name]  # fmt: skip
    torch.manual_seed(0)
    model, x = make(sampling="prefix"), torch.randn(4, *shape)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = 1.0
    before = {name: p.clone() for name, p in model.named_parameters()}
    Grow(model, RATES).step(0.0)
    y = model(x)
    sliceout.off_(model)
    torch.testing.assert_close(model(x), y, rtol=1e-12, atol=1e-12)
    for name, p in model.named_parameters():
        assert torch.equal(p[p != 0], before[name][p != 0]), name
    assert any((p == 0).any() for p in model.parameters())


def fused_attention(**settings):
    """Values and hidden units alone: the temperature follows the width of queries and keys."""
    model = Attention()
    convert_(model, 0.5, align=1, example_inputs=torch.zeros(2, 5, 16), filter=lambda m, name: "fc" in name, **settings)
    return model


def test_what_has_been_in_is_never_silenced():
    model, _ = net()
    twin = copy.deepcopy(model)
    Grow(model, {0: 0.25, 0.5: 0.5}).step(0.6)  # rates that rise: the units that are out have been trained
    Grow(model, RATES, silent=False).step(0.0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    grow = Grow(model, RATES)
    grow.step(0.0)
    silenced = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)  # what training does, and more
    grown = copy.deepcopy(model.state_dict())
    grow.step(0.6), grow.step(0.1)
    assert all(torch.equal(p, grown[name]) for name, p in model.named_parameters()), "the first step alone"
    Grow(model, RATES).step(0.6)  # a new process that goes on from a checkpoint
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, grown[name])]
    assert changed == ["2.weight", "4.weight"]
    assert torch.equal(model[2].weight[:, :48], grown["2.weight"][:, :48])
    assert not model[2].weight[:, 48:].any()
    assert not silenced["2.weight"][:, 32:].any()
    assert silenced["2.weight"][:, :32].any()


def test_other_samplings_keep_their_weights():
    model, _ = net(sampling="circular")
    twin = copy.deepcopy(model)
    Grow(model, RATES).step(0.0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_transposed_weights_are_silenced_along_their_rows():
    s = sliceout.Slice(8, sampling="prefix")
    model = nn.Sequential(snn.Conv1D(8, 4, out_slice=s), snn.Conv1D(3, 8, in_slice=s))
    Grow(model, RATES).step(0.0)
    assert not model[1].weight[4:].any()
    assert model[1].weight[:4].any()
    assert model[0].weight.all()

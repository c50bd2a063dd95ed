"""Controlled dropout: subsets against the masked dense network, and their draws."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import devices
from torch import nn

import sliceout
from oracle import exactly, path
from sliceout import Subset
from sliceout import nn as snn
from sliceout.drawing import owner_of
from sliceout_lab.models import build
from sliceout_lab.oracle import masked_dense_, quiet_, randomise_

PATHS = pytest.mark.parametrize("code", ["eager", "ops"])


def mask(s: Subset, scaled: bool = False) -> torch.Tensor:
    out = torch.zeros(s.size, dtype=torch.float64)
    out[s.kept] = s.size / s.width if scaled and s.norm != "none" else 1.0
    return out.to(s.start.device)


class Net(nn.Module):
    """Convolution, batch norm, depthwise convolution, convolution, flattened linear: every kind of take."""

    def __init__(self, **settings):
        super().__init__()
        self.a, self.b = Subset(12, 0.5, **settings), Subset(10, 0.4, seed=3, **settings)
        self.conv = snn.Conv2d(3, 12, 3, padding=1, out_slice=self.a)
        self.bn = snn.BatchNorm2d(12, slice=self.a)
        self.depthwise = snn.Conv2d(12, 12, 3, padding=1, groups=12, in_slice=self.a, out_slice=self.a)
        self.next = snn.Conv2d(12, 10, 1, in_slice=self.a, out_slice=self.b)
        self.head = snn.Linear(10 * 16, 4, in_slice=self.b.axis(inner=16))

    def forward(self, x):
        x = self.depthwise(F.relu(self.bn(self.conv(x))))
        return self.head(torch.tanh(self.next(x)).flatten(1))

    def dense(self, x):
        """The full network with masks; batch norm keeps channels apart, so its mask may come last."""
        consumer = self.a.fold == "consumer"
        a, b = (s.view(-1, 1, 1) for s in (mask(self.a, True), mask(self.b, True)))
        kept_a = mask(self.a).view(-1, 1, 1)
        y = F.conv2d(x, self.conv.weight, self.conv.bias, padding=1) * (1 if consumer else a)
        y = F.relu(F.batch_norm(y, None, None, self.bn.weight, self.bn.bias, True)) * kept_a
        y = F.conv2d(y, self.depthwise.weight, self.depthwise.bias, padding=1, groups=12)
        y = F.conv2d(y * (a if consumer else kept_a), self.next.weight, self.next.bias)
        y = torch.tanh(y * (1 if consumer else b)) * (b if consumer else mask(self.b).view(-1, 1, 1))
        return F.linear(y.flatten(1), self.head.weight, self.head.bias)


@devices
@PATHS
@pytest.mark.parametrize("settings", [{}, {"norm": "flow"}, {"norm": "none"}, {"fold": "producer"}], ids=str)
def test_a_subset_computes_what_the_masked_dense_network_does(float64, device, code, settings):
    net = Net(**settings).to(device)
    x = torch.randn(3, 3, 4, 4, device=device, requires_grad=True)
    for _ in range(3):
        expected = net.dense(x)
        grad = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, [x, *net.parameters()], grad)
        with path(code):
            got = net(x)
            grads = torch.autograd.grad(got, [x, *net.parameters()], grad)
        exactly(got, expected)
        for (name, _), g, w in zip([("x", x), *net.named_parameters()], grads, wanted, strict=True):
            exactly(g, w, name)
        sliceout.draw_(net)


@PATHS
def test_running_statistics_of_dropped_units_stay(float64, code):
    net = Net()
    before = net.bn.running_mean.clone()
    with path(code):
        net(torch.randn(3, 3, 4, 4))
    changed = (net.bn.running_mean != before).double()
    exactly(changed, mask(net.a))


def test_a_compiled_step_is_one_graph_for_all_subsets():
    net, graphs = Net(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled, x = torch.compile(net, backend=backend, fullgraph=True), torch.randn(3, 3, 4, 4)
    for _ in range(4):
        sliceout.draw_(net)
        torch.testing.assert_close(compiled(x), net(x))
    assert len(graphs) == 1


def test_every_unit_and_every_pair_is_kept_equally_often():
    s = Subset(12, 0.5)
    draws, together = 2000, torch.zeros(12, 12)
    for _ in range(draws):
        owner_of(s).draw_()
        kept = mask(s)
        assert kept.sum() == s.width
        assert s.kept.tolist() == sorted(s.kept.tolist())
        together += torch.outer(kept, kept)
    p = {"unit": 6 / 12, "pair": 6 * 5 / (12 * 11)}
    pairs = together[~torch.eye(12, dtype=torch.bool)]
    for seen, probability in ((together.diag(), p["unit"]), (pairs, p["pair"])):
        sigma = math.sqrt(draws * probability * (1 - probability))
        assert (seen - draws * probability).abs().max() < 4.2 * sigma  # 132 looks
        assert (seen - draws * probability).square().mean().sqrt() < 1.4 * sigma


def test_draws_depend_on_seed_stream_and_step_only():
    runs = []
    for _ in range(2):
        torch.manual_seed(len(runs))  # the global state must not matter
        a, b = Subset(32, 0.5), Subset(32, 0.5)
        family = sliceout.Slices([a, b])
        seen = []
        for _ in range(5):
            family.draw_()
            seen.append((a.kept.tolist(), b.kept.tolist()))
        runs.append(seen)
    assert runs[0] == runs[1]
    assert all(one != other for one, other in runs[0])
    assert len({tuple(one) for one, _ in runs[0]}) == 5
    family.seek_(2)
    assert (a.kept.tolist(), b.kept.tolist()) == runs[0][1]


def test_saving_and_loading_goes_on_with_the_same_subsets():
    first, second = Net(), Net()
    for _ in range(3):
        sliceout.draw_(first)
    second.load_state_dict(first.state_dict())
    assert second.a.kept.tolist() == first.a.kept.tolist()
    again = copy.deepcopy(first)
    for net in (first, second, again):
        sliceout.draw_(net)
    assert first.b.kept.tolist() == second.b.kept.tolist() == again.b.kept.tolist()


@pytest.mark.parametrize("name", ["lm-32", "wrn-10-1", "efficientnet-b0", "mlp"])
def test_converted_models_equal_their_masked_selves(float64, name):
    settings = {"lm-32": {"layers": 2, "vocabulary": 50, "context": 32, "activation": "swiglu", "norm": "pre"},
                "mlp": {"widths": (8, 32, 32, 4)}}  # fmt: skip
    model = randomise_(quiet_(build(name, **settings.get(name, {})))).train()
    x = {"lm-32": torch.randint(50, (2, 7)), "mlp": torch.randn(5, 8)}.get(name)
    x = torch.randn(2, 3, 32, 32) if x is None else x
    full = copy.deepcopy(model)
    report = sliceout.convert_(model, 0.5, scheme="controlled")
    assert report.scheme == "controlled"
    assert report.flop_saving > 0.2
    for _ in range(2):
        sliceout.draw_(model)
        expected = masked_dense_(copy.deepcopy(full), report)(x)
        exactly(copy.deepcopy(model)(x) / expected.abs().max(), expected / expected.abs().max(), name)


def test_a_subset_has_no_starts_to_go_through():
    with pytest.raises(ValueError, match="no starts to enumerate: any 6 of 10 units"):
        Subset(10, 0.4).starts  # noqa: B018

"""The drop schemes: what they drop and how often, that one verb serves all, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from conftest import devices
from torch import nn

import sliceout
from sliceout.schemes import SCHEMES
from sliceout.schemes.dropout import DROPS, drop_block, seed_rate
from sliceout_lab.models import build
from sliceout_lab.models.wide_resnet import WideResNet


def net(dropout: float = 0.0) -> nn.Sequential:
    """The second layer is the identity: what it returns is what it read."""
    model = nn.Sequential(nn.Linear(1, 256), nn.ReLU(), nn.Dropout(dropout), nn.Linear(256, 256))
    with torch.no_grad():
        model[0].weight.zero_(), model[0].bias.fill_(1.0)
        model[3].weight.copy_(torch.eye(256)), model[3].bias.zero_()
    return model


def maps(**settings) -> nn.Sequential:
    """The same with feature maps: 8 channels of ones."""
    model = nn.Sequential(nn.Conv2d(1, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1))
    with torch.no_grad():
        model[0].weight.zero_(), model[0].bias.fill_(1.0)
        model[2].weight.copy_(torch.eye(8)[:, :, None, None]), model[2].bias.zero_()
    return model


def within(seen: float, expected: float, sigma: float) -> None:
    assert abs(seen - expected) < 3 * sigma, f"{seen} is {abs(seen - expected) / sigma:.1f} sigma from {expected}"


# -- standard dropout --------------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_standard_dropout_keeps_its_rate_and_its_masks_are_independent(device, compiled):
    """Would catch masks that Inductor got wrong (pytorch 198333): rate, independence, and the mask of the backward."""
    rate, batch, calls = 0.3, 512, 6
    model = net().to(device)
    sliceout.convert_(model, rate, scheme="standard")
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True) if compiled else model
    hidden: list[torch.Tensor] = []
    keeps = []
    for _ in range(calls):
        model[0].bias.grad = None
        y = run(torch.ones(batch, 1, device=device))
        torch.testing.assert_close(y.unique(), torch.tensor([0.0, 1 / (1 - rate)], device=device))
        keep = (y > 0).double()
        y.sum().backward()  # each bias collects 1 / (1 - rate) from every kept entry: the backward used the same mask
        torch.testing.assert_close(model[0].bias.grad.double() * (1 - rate), keep.sum(0), rtol=1e-5, atol=1e-3)
        keeps.append(keep.cpu())
    hidden = torch.stack(keeps)  # calls, batch, units
    p, n = 1 - rate, hidden.numel()
    within(hidden.mean().item(), p, math.sqrt(p * rate / n))
    centred = (hidden - p) / math.sqrt(p * rate)
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(1, 2), centred.roll(8, 2), centred.roll(64, 1)):
        assert abs((centred * other).mean().item()) < 4.5 / math.sqrt(n)
    for dim in (0, 1, 2):  # no unit, sample or call is dropped more often than another
        others = [d for d in range(3) if d != dim]
        each = hidden.mean(others)
        sigma = math.sqrt(p * rate / (n / hidden.shape[dim]))
        assert (each - p).abs().max() < 4.5 * sigma


def test_standard_dropout_is_torchs_own():
    model, x = net(), torch.ones(4, 1)
    sliceout.convert_(model, 0.4, scheme="standard")
    torch.manual_seed(3)
    got = model(x)
    torch.manual_seed(3)
    assert torch.equal(got, nn.functional.dropout(torch.ones(4, 256), 0.4))
    assert torch.equal(model.eval()(x), torch.ones(4, 256))


def test_every_reader_draws_its_own_mask():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.a, self.b = nn.Linear(1, 256), nn.Linear(256, 256), nn.Linear(256, 256)
            with torch.no_grad():
                self.up.weight.zero_(), self.up.bias.fill_(1.0)
                for m in (self.a, self.b):
                    m.weight.copy_(torch.eye(256)), m.bias.zero_()

        def forward(self, x):
            y = torch.relu(self.up(x))
            return torch.stack([self.a(y), self.b(y)])

    model = Two()
    report = sliceout.convert_(model, 0.5, scheme="standard")
    assert report.converted == 1
    a, b = model(torch.ones(64, 1))
    assert not torch.equal(a, b)
    within(((a > 0) == (b > 0)).double().mean().item(), 0.5, 0.5 / math.sqrt(a.numel()))


# -- feature maps ------------------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("batched", [True, False])
def test_spatial_dropout_drops_whole_channels_at_its_rate(device, batched):
    rate, model = 0.3, maps().to(device)
    sliceout.convert_(model, rate, scheme="spatial", example_inputs=torch.zeros(2, 1, 5, 5))
    x = torch.ones(4000, 1, 3, 3, device=device)
    kept = model(x) > 0 if batched else torch.stack([model(one) for one in x[:300]]) > 0
    channels = kept.flatten(2).double().mean(-1)
    assert set(channels.unique().tolist()) == {0.0, 1.0}
    within(channels.mean().item(), 1 - rate, math.sqrt(rate * (1 - rate) / channels.numel()))


@pytest.mark.parametrize("sides", [(12, 12), (9, 20), (7, 7), (4, 4), (30,), (8, 9, 10)], ids=str)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropblock_keeps_its_rate(sides, rate):
    x = torch.ones(60, 8, *sides)
    each = []
    for _ in range(6):
        y = drop_block(x, rate)
        each.append((y > 0).double().flatten(2).mean(-1).flatten())
        torch.testing.assert_close(y.mean(), torch.tensor(1.0))  # what is kept makes up for what is not
    each = torch.cat(each)  # one number for each map: they are independent of one another
    within(each.mean().item(), 1 - rate, each.std().item() / math.sqrt(len(each)))


def test_dropblock_drops_squares_and_channels_apart():
    y = drop_block(torch.ones(32, 4, 20, 20), 0.05) == 0
    assert not torch.equal(y[:, 0], y[:, 1])
    squares = -nn.functional.max_pool2d(-y.double(), 7, 1)  # corners of wholly dropped squares
    holes = nn.functional.max_pool2d(nn.functional.pad(squares, (6,) * 4), 7, 1) > 0
    assert torch.equal(holes, y)  # dropped pixels are exactly those that lie in a dropped 7x7 square


def test_the_seed_rate_of_a_map_without_room_is_the_rate_itself():
    assert math.isclose(seed_rate(0.3, [5, 5], [5, 5]), 0.3, rel_tol=1e-9)
    assert math.isclose(seed_rate(0.3, [9], [1]), 0.3, rel_tol=1e-9)
    assert seed_rate(0.5, [20, 20], [7, 7]) > 1.3 * 0.5 / 49 * (20 / 14) ** 2  # blocks overlap


@pytest.mark.parametrize("scheme", ["dropblock", "spatial"])
def test_map_schemes_compile_to_one_graph(scheme):
    model = maps()
    sliceout.convert_(model, 0.3, scheme=scheme, example_inputs=torch.zeros(2, 1, 12, 12))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled, x = torch.compile(model, backend="aot_eager", fullgraph=True), torch.ones(200, 1, 12, 12)
        kept = torch.cat([(compiled(x) > 0).double().flatten(2).mean(-1).flatten() for _ in range(2)])
    within(kept.mean().item(), 0.7, kept.std().item() / math.sqrt(len(kept)))


def test_squeeze_and_excite_reads_what_is_not_dropped():
    model = build("efficientnet-b0")
    report = sliceout.convert_(model, 0.5, scheme="spatial", example_inputs=torch.zeros(2, 3, 64, 64))
    assert report.converted > 10
    kinds = {name: type(m).__name__ for name, m in model.named_modules()}
    assert kinds["blocks.1.0.conv_pwl"] == "DroppingConv2d"
    assert not any("Dropping" in kind for name, kind in kinds.items() if "se." in name or "conv_dw" in name)


def test_map_schemes_have_no_place_in_linear_layers():
    with pytest.raises(ValueError, match="3 is not a convolution: scheme='spatial' drops from feature maps"):
        sliceout.convert_(net(), 0.5, scheme="spatial")
    report = sliceout.convert_(WideResNet(10, 1), 0.5, scheme="dropblock")
    assert any("head is not a convolution" in str(r.reason or "") for r in report.rows)


# -- one verb for all --------------------------------------------------------------------------------------------------


def test_none_lets_everything_pass():
    model, x = net(dropout=0.5), torch.ones(3, 1)
    report = sliceout.convert_(model, None, scheme="none")
    assert report.converted == 1
    assert torch.equal(model(x), torch.ones(3, 256))
    sliceout.off_(model)
    assert not torch.equal(model(x), torch.ones(3, 256))  # the model's own dropout again
    sliceout.on_(model)
    assert torch.equal(model(x), torch.ones(3, 256))
    assert sliceout.convert_(net(), 0.5, scheme="none").converted == 1  # no dropout in it: still a baseline


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_schemes_share_one_interface(scheme):
    model = WideResNet(10, 1, dropout=0.3)
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    parameters = [id(p) for p in model.parameters()]
    x = torch.randn(2, 3, 32, 32)
    expected = copy.deepcopy(model).eval()(x)
    report = sliceout.convert_(model, 0.5, scheme=scheme)
    assert report.scheme == report.as_dict()["scheme"] == scheme
    title = str(report).splitlines()[0].lower()
    assert {"patch": "patch-sliceout", "samples": "sample-sliceout"}.get(scheme, scheme) in title
    least = {"sliceout": 0.2, "controlled": 0.2, "patch": 0.2, "samples": 0.05}  # most of its shortcuts are projected
    assert (report.flop_saving > least.get(scheme, 0)) == (scheme in least)
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == parameters
    assert torch.equal(copy.deepcopy(model).eval()(x), expected)
    twin = pickle.loads(pickle.dumps(model))
    torch.manual_seed(5)
    y = model.train()(x)
    torch.manual_seed(5)
    assert torch.equal(twin.train()(x), y)
    sliceout.draw_(model)
    with pytest.raises(ValueError, match="sliced already"):
        sliceout.convert_(model, 0.5, scheme=scheme)
    sliceout.off_(model)
    plain = WideResNet(10, 1, dropout=0.3)
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(5)
    y = model(x)
    torch.manual_seed(5)
    assert torch.equal(plain.train()(x), y)
    sliceout.revert_(model)
    assert [type(m) for m in model.modules()] == kinds


@pytest.mark.parametrize("scheme", DROPS)
def test_masks_are_dropped_where_the_model_drops(scheme):
    """The same groups as SliceOut's, their own dropouts resting."""
    model = WideResNet(10, 1, dropout=0.3)
    sliceout.convert_(model, 0.5, scheme=scheme)
    block = model.groups[0][0]
    assert type(block.conv2).__name__ == "DroppingConv2d"
    assert type(block.conv1) is nn.Conv2d
    x = torch.randn(2, 16, 8, 8)
    assert block.dropout(x) is x


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rate", [1.0, -0.5, 1.5, float("nan")])
def test_rates_out_of_range(scheme, rate):
    model = WideResNet(10, 1)
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=rf"rate={rate}: expected 0 <= rate < 1"):
        sliceout.convert_(model, rate, scheme=scheme)
    assert [type(m) for m in model.modules()] == kinds


def test_an_unknown_scheme():
    with pytest.raises(
        ValueError,
        match="scheme='dropuot': expected one of 'sliceout', 'controlled', 'patch', 'samples', 'droppath', 'none'",
    ):
        sliceout.convert_(net(), 0.5, scheme="dropuot")
    with pytest.raises(ValueError, match=r"rate=1.2: expected 0 <= rate < 1"):
        drop_block(torch.ones(1, 1, 4, 4), 1.2)

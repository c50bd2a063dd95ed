"""Patch-SliceOut against full maps with masks; which blocks are recognised; what is refused."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import devices
from torch import nn

import sliceout
from oracle import exactly, path, set_start
from sliceout.conversion.other_schemes import recognise
from sliceout.drawing import owner_of
from sliceout.schemes.patch import patch_, side_rate, window
from sliceout_lab.models.wide_resnet import WideBlock, WideResNet

PATHS = pytest.mark.parametrize("code", ["eager", "ops"])


def inside(row, col, stride: int = 1, size: tuple[int, int] | None = None) -> torch.Tensor:
    """1 in the window, 0 around it; on the input map with its stride, where an odd map lacks the last row or column."""
    height, width = shape = size or (row.size, col.size)
    mask = torch.zeros(shape, dtype=torch.float64)
    top, left = row.start_on_host * stride, col.start_on_host * stride
    bottom = top + row.width * stride - (row.size * stride - height)
    right = left + col.width * stride - (col.size * stride - width)
    mask[top:bottom, left:right] = 1
    return mask.to(row.start.device)


def factor(row, col) -> torch.Tensor:
    """The normalisation of each position of the output map, counted out."""

    def of(s):
        if s.norm == "flow" or s.width == s.size:
            return [s.size / s.width] * s.size
        return [len(s.starts) / sum(a <= i < a + s.width for a in s.starts) for i in range(s.size)]

    rows, cols = (torch.tensor(of(s), dtype=torch.float64, device=s.start.device) for s in (row, col))
    return rows[:, None] * cols


def masked_norm(x, bn, mask):
    """Batch norm whose moments are those of the window."""
    n = mask.sum() * x.shape[0]
    mean = (x * mask).sum((0, 2, 3), keepdim=True) / n
    var = ((x - mean).square() * mask).sum((0, 2, 3), keepdim=True) / n
    return (x - mean) / (var + bn.eps).sqrt() * bn.weight.view(-1, 1, 1) + bn.bias.view(-1, 1, 1)


def masked_wide_block(block, x, row, col):
    """A WideBlock at full size: the branch is masked wherever the window would be padded."""
    stride = block.conv1.stride[0]
    y = F.relu(F.batch_norm(x, None, None, block.bn1.weight, block.bn1.bias, True))
    identity = x if block.shortcut is None else F.conv2d(y, block.shortcut.weight, stride=stride)
    out = inside(row, col)
    z = F.conv2d(y * inside(row, col, stride, x.shape[-2:]), block.conv1.weight, stride=stride, padding=1)
    z = F.relu(masked_norm(z, block.bn2, out)) * out
    return identity + F.conv2d(z, block.conv2.weight, padding=1) * out * factor(row, col)


def patched(block, size, rate=0.5, **settings):
    form = recognise(block)
    assert form is not None
    with torch.no_grad():
        out = block.eval()(torch.zeros(2, block.conv1.in_channels, *size, device=next(block.parameters()).device))
    block.train()
    row, col = window(size, tuple(out.shape[-2:]), rate, **settings)
    return patch_(block, form, row, col), row, col


@devices
@PATHS
@pytest.mark.parametrize("norm", ["flow", "probabilistic"])
@pytest.mark.parametrize(
    ("stride", "size"), [(1, (8, 8)), (1, (6, 9)), (2, (8, 8)), (2, (9, 7)), (2, (12, 6))], ids=str
)  # odd maps too
def test_a_window_computes_what_the_masked_map_does(float64, device, code, norm, stride, size):
    block = WideBlock(4, 6 if stride > 1 else 4, stride, 0.3, 5).to(device)
    for bn in (block.bn1, block.bn2):
        nn.init.normal_(bn.weight), nn.init.normal_(bn.bias)
    block, row, col = patched(block, size, norm=norm)
    x = torch.randn(3, 4, *size, device=device, requires_grad=True)
    for i, (r, c) in enumerate(itertools.product(row.starts, col.starts)):
        if i % 3 and device == "cpu":
            continue
        set_start(row, r), set_start(col, c)
        expected = masked_wide_block(block, x, row, col)
        grad = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, [x, *block.parameters()], grad)
        with path(code):
            got = block(x)
            grads = torch.autograd.grad(got, [x, *block.parameters()], grad)
        exactly(got, expected, f"start {r}, {c}")
        for (name, _), g, w in zip([("x", x), *block.named_parameters()], grads, wanted, strict=True):
            exactly(g, w, f"start {r}, {c}: {name}")


class Linear2d(nn.Module):
    """A residual block that is linear and has no border: its mean over all windows can be exact."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2, self.relu = nn.Identity(), nn.Identity(), nn.Identity()
        self.conv1 = nn.Conv2d(2, 3, 1, stride)
        self.conv2 = nn.Conv2d(3, 2, 1)
        self.downsample = nn.Conv2d(2, 2, 1, stride)

    def forward(self, x):
        return self.relu(self.downsample(x) + self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))


@pytest.mark.parametrize("stride", [1, 2])
def test_mean_over_all_windows_is_the_full_block(float64, stride):
    x = torch.randn(2, 2, 8, 10)
    for norm in ("probabilistic", "flow"):
        block, row, col = patched(Linear2d(stride), (8, 10), norm=norm)
        total = 0
        for r, c in itertools.product(row.starts, col.starts):
            set_start(row, r), set_start(col, c)
            total = total + block(x)
        mean, full = total / (len(row.starts) * len(col.starts)), block.eval()(x)
        if norm == "probabilistic":
            exactly(mean, full)
        else:  # exact in the sum over the map only, as flow is the mean probability
            assert (mean - full).abs().max() > 1e-3


def test_rate_is_the_share_of_the_area():
    row, col = window((32, 32), (32, 32), 0.5)
    assert (row.width, col.width) == (23, 23)
    assert side_rate(0.75) == 0.5
    row.rerate_(0.75)
    assert (row.width, row.rate) == (16, 0.75)


def test_eval_and_off_run_the_plain_block():
    plain = WideBlock(4, 6, 2, 0.3, 5)
    block, row, col = patched(copy.deepcopy(plain), (8, 8))
    x = torch.randn(2, 4, 8, 8)
    assert torch.equal(block.eval()(x), plain.eval()(x))
    row.on = col.on = False
    torch.manual_seed(0)
    one = block.train()(x)
    torch.manual_seed(0)
    assert torch.equal(one, plain.train()(x))


def test_outside_the_window_only_the_shortcut_passes():
    block, row, col = patched(WideBlock(4, 4, 1, 0.0, 4), (8, 8))
    x = torch.randn(2, 4, 8, 8)
    changed = (block(x) != x).any(1).any(0).double()
    assert torch.equal(changed, inside(row, col))


@devices
def test_a_compiled_step_is_one_graph_for_all_windows(device):
    backend = "aot_eager" if device == "cpu" else "inductor"  # which takes a minute on a CPU
    torch._dynamo.reset()
    net = nn.Sequential(WideBlock(4, 4, 1, 0.0, 4), WideBlock(4, 6, 2, 0.0, 4))
    net, example = net.to(device), torch.randn(2, 4, 12, 12, device=device)
    assert sliceout.convert_(net, 0.5, scheme="patch", example_inputs=example).converted == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled, x = torch.compile(net, backend=backend, fullgraph=True), torch.randn_like(example)
        for _ in range(3):
            sliceout.draw_(net)
            grads = []
            for f in (compiled, net):
                net.zero_grad()
                y = f(x)
                y.square().sum().backward()
                grads.append([y.detach(), *(p.grad.clone() for p in net.parameters())])
            for a, b in zip(*grads, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_draw_between_forward_and_backward_is_an_error():
    block, row, _ = patched(WideBlock(4, 4, 1, 0.0, 4), (8, 8))
    with path("ops"):
        y = block(torch.randn(2, 4, 8, 8, requires_grad=True)).sum()
        owner_of(row).draw_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


# -- which blocks are recognised ---------------------------------------------------------------------------------------


class PreAct(nn.Module):
    """As in many repositories: the shortcut is an attribute only where it is needed."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, 1, 1, bias=False)
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1, stride, bias=False))

    def forward(self, x):
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        return self.conv2(F.relu(self.bn2(self.conv1(out)))) + shortcut


class Lookalike(PreAct):
    """The names fit, the code does not."""

    def forward(self, x):
        return super().forward(x) * 0.5


def test_forms_are_told_by_what_the_block_computes():
    for stride in (1, 2):
        form = recognise(PreAct(stride))
        assert form.norm_first
        assert form.shortcut == ("shortcut" if stride > 1 else None)
        assert recognise(Lookalike(stride)) is None


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "wide_resnet50_2"])
def test_blocks_of_torchvision(name):
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        model = getattr(torchvision.models, name)()
    report = sliceout.convert_(model, 0.5, scheme="patch", example_inputs=torch.zeros(2, 3, 64, 64))
    assert report.converted == len(report.rows) == sum(model_blocks(model))
    assert 0.2 < report.flop_saving < 0.6


def model_blocks(model) -> list[int]:
    return [len(getattr(model, f"layer{i}")) for i in range(1, 5)]


@pytest.mark.parametrize("name", ["resnet18", "resnet26", "seresnet18", "resnetv2_50", "resnet18d"])
def test_blocks_of_timm(name):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name)
    report = sliceout.convert_(model, 0.5, scheme="patch", example_inputs=torch.zeros(2, 3, 64, 64))
    assert not report.skipped, report.skipped[0].reason
    x = torch.randn(2, 3, 64, 64)
    model.train()(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    plain = sliceout.revert_(copy.deepcopy(model)).eval()
    assert torch.equal(model.eval()(x), plain(x))


def test_state_dict_copy_pickle_and_revert():
    net = WideResNet(10, 1)
    keys, kinds, attributes = (
        list(net.state_dict()),
        [type(m) for m in net.modules()],
        [set(vars(m)) for m in net.modules()],
    )
    sliceout.convert_(net, 0.5, scheme="patch")
    assert list(net.state_dict()) == keys
    x = torch.randn(2, 3, 32, 32)
    for _ in range(2):
        sliceout.draw_(net)
    other = WideResNet(10, 1)
    sliceout.convert_(other, 0.5, scheme="patch")
    other.load_state_dict(net.state_dict())
    expected = net(x)
    for twin in (other, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        torch.testing.assert_close(twin(x), expected)
    sliceout.revert_(net)
    assert [type(m) for m in net.modules()] == kinds
    assert [set(vars(m)) for m in net.modules()] == attributes


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_another_map_than_converted_for():
    net = WideResNet(10, 1)
    sliceout.convert_(net, 0.5, scheme="patch", example_inputs=torch.zeros(2, 3, 32, 32))
    with pytest.raises(
        ValueError, match="reads a map of 16x16, but its window was made for 32x32: convert_ with example"
    ):
        net(torch.randn(2, 3, 16, 16))
    net.eval()(torch.randn(2, 3, 16, 16))


@pytest.mark.parametrize(("rate", "message"), [
    (1.0, r"rate=1.0: expected 0 <= rate < 1"),
    (-0.1, r"rate=-0.1: expected 0 <= rate < 1"),
    (0.999, r"keeps 1.01 units|which is 0 at align=1|keeps 0"),
    (0.0001, "the whole 32x32 map is kept"),
])  # fmt: skip
def test_rates_without_a_window(rate, message):
    net = WideResNet(10, 1)
    before = [type(m) for m in net.modules()]
    if rate == 0.999:  # one pixel of the largest map, nothing of the smaller ones
        report = sliceout.convert_(net, rate, scheme="patch")
        assert report.converted == 2
        assert "which is 0 at align=1" in str(report.skipped[0].reason)
        return
    with pytest.raises(ValueError, match=message):
        sliceout.convert_(net, rate, scheme="patch")
    assert [type(m) for m in net.modules()] == before


def test_a_map_of_one_pixel():
    with pytest.raises(ValueError, match="a 1x1 map has no smaller window"):
        sliceout.convert_(
            nn.Sequential(WideBlock(4, 4, 1, 0.0, 4)), 0.5, scheme="patch", example_inputs=torch.zeros(2, 4, 1, 1)
        )


def test_models_without_residual_blocks_and_misplaced_arguments():
    with pytest.raises(ValueError, match="no residual block in Sequential: looked for modules with conv1"):
        sliceout.convert_(nn.Sequential(nn.Linear(3, 3)), 0.5, scheme="patch")
    with pytest.raises(ValueError, match="paper_exclusions is about units"):
        sliceout.convert_(WideResNet(10, 1), 0.5, scheme="patch", paper_exclusions=True)
    with pytest.raises(ValueError, match="computes something else than shortcut plus branch"):
        sliceout.convert_(nn.Sequential(Lookalike(1)), 0.5, scheme="patch", example_inputs=torch.zeros(2, 4, 8, 8))


def test_filter_and_rates_by_name():
    net = WideResNet(16, 1, dropout=0.3)
    report = sliceout.convert_(net, None, scheme="patch", filter="groups.1.*")
    assert [r.name for r in report.rows if r.slice is not None] == ["groups.1.0", "groups.1.1"]
    assert {r.slice.rate for r in report.rows if r.slice is not None} == {0.3}
    sliceout.revert_(net)
    report = sliceout.convert_(net, {"groups.0.*": 0.5, "groups.2.1": 0.2}, scheme="patch")
    assert [r.slice.rate for r in report.rows if r.slice is not None] == [0.5, 0.5, 0.2]
    assert "groups.*.* x2" in str(report)
    assert "23x23 of 32x32" in str(report)

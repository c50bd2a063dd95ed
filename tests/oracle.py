"""The masked-dense oracle: what a sliced network must compute, with its full parameters and masks ``r`` and ``c``.

Kept units have the mask 1 (or their normalisation, on the side where it is folded in), dropped ones 0. A weight becomes
``W * (r outer c)``; norms take their moments over the unmasked units. Nothing here uses the library's own slicing: the
masks, probabilities and scales are computed from the definition, one unit at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sliceout
from sliceout import Axis, Slice
from sliceout.schemes.subset import Subset
from sliceout.takes import ConcatAxis

CHANNELS_LAST_LAYERS = (nn.Linear, sliceout.nn.Conv1D, nn.LayerNorm, nn.RMSNorm, sliceout.nn.LayerScale)


M32 = 0xFFFFFFFF


def exactly(got: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal to 1e-12, in shape and dtype too."""
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}")


def set_start(s: Slice, start: int) -> None:
    assert start in s.starts
    s.start_on_host = start
    s.start.fill_(start)


def slow_mix(x: int) -> int:
    """lowbias32 on Python ints (https://nullprogram.com/blog/2018/07/31/)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & M32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & M32
    return x ^ (x >> 16)


def kept_units(s: Slice) -> list[int]:
    """The units that ``s`` keeps now, in the order of the small tensors."""
    if isinstance(s, Subset):  # those with the smallest hashes
        number = slow_mix(s.start_on_host)
        by_hash = sorted(range(s.size), key=lambda unit: slow_mix((number + unit * 0x9E3779B9) & M32))
        return sorted(by_hash[: s.width])
    return [(s.start_on_host + i) % s.size for i in range(s.width)]


def unit_scale(s: Slice, unit: int) -> float:
    """The normalisation of one unit, by counting the starts that keep it."""
    if s.norm == "none":
        return 1.0
    if s.norm == "flow" or isinstance(s, Subset):
        return s.size / s.width
    keeping = sum((unit - start) % s.size < s.width for start in s.starts)
    return len(s.starts) / keeping


def mask(axis: Axis | ConcatAxis | None, size: int, device: torch.device, scaled: bool = False) -> Tensor:
    """1 (or the normalisation) for the kept entries of a dimension, 0 for the others; all 1 without an axis."""
    if axis is None:
        return torch.ones(size, dtype=torch.float64, device=device)
    entries = []
    for part in axis.sections if isinstance(axis, ConcatAxis) else [axis]:
        s, kept = part.slice, set(kept_units(part.slice))
        for _ in range(part.blocks):
            for unit in range(s.size):
                entries += [(unit_scale(s, unit) if scaled else 1.0) if unit in kept else 0.0] * part.inner
    assert len(entries) == size
    return torch.tensor(entries, dtype=torch.float64, device=device)


def along(vector: Tensor, dim: int, like: Tensor) -> Tensor:
    shape = [1] * like.dim()
    shape[dim] = -1
    return vector.view(shape)


class MaskedDense:
    """Runs a sliced network at full size.

    ``live`` are the slices in which the input arrives; producers add theirs. Nothing of the network is changed: what
    its batch norms would have stored is in ``statistics``.
    """

    def __init__(self, live: Iterable[Slice] = ()) -> None:
        self.live = set(live)
        self.statistics: dict[nn.Module, tuple[Tensor, Tensor, int]] = {}

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        if isinstance(module, nn.Sequential):
            for child in module:
                x = self(child, x)
            return x
        if not isinstance(module, sliceout.nn.Sliced):
            return module(x)
        for kind, run in (
            (nn.Linear, self.linear),
            (sliceout.nn.Conv1D, self.linear),
            (nn.modules.conv._ConvNd, self.conv),
            (nn.modules.batchnorm._BatchNorm, self.batch_norm),
            (nn.GroupNorm, self.group_norm),
            (nn.LayerNorm, self.layer_norm),
            (nn.RMSNorm, self.rms_norm),
            (nn.PReLU, lambda m, x: F.prelu(x, m.weight) * self.kept(m, 1, x)),
            (sliceout.nn.LayerScale, lambda m, x: x * m.gamma * self.kept(m, -1, x)),
            (nn.modules.dropout._DropoutNd, lambda m, x: x * self.kept(m, 1, x)),  # the slice drops in its place
        ):
            if isinstance(module, kind):
                return run(module, x)
        raise AssertionError(f"no oracle for {type(module).__name__}")

    # -- which slices count --------------------------------------------------------------------------------------------

    def arrived(self, layer, role: str) -> Axis | None:
        axis = layer.axes.get(role)
        return axis if axis is not None and axis.slice in self.live else None

    def started(self, layer) -> Axis | None:
        axis = layer.axes.get("out")
        if axis is None or not layer.training or not axis.slice.on or axis.slice.width == axis.slice.size:
            return None
        self.live |= set(axis.slices)
        return axis

    def kept(self, layer, dim: int, x: Tensor) -> Tensor:
        return along(mask(self.arrived(layer, "unit"), x.shape[dim], x.device), dim, x)

    # -- weights: W * (r outer c) --------------------------------------------------------------------------------------

    def masked(self, weight: Tensor, bias: Tensor | None, out: Axis | None, into: Axis | None, scale: bool = True):
        r = mask(out, weight.shape[0], weight.device, scale and out is not None and out.slice.fold == "producer")
        c = mask(into, weight.shape[1], weight.device, scale and into is not None and into.slice.fold == "consumer")
        outer = r[:, None] * c[None, :]
        return weight * outer.view(*outer.shape, *[1] * (weight.dim() - 2)), None if bias is None else bias * r

    def linear(self, m, x: Tensor) -> Tensor:
        into, out = self.arrived(m, "in"), self.started(m)
        weight = m.weight.t() if isinstance(m, sliceout.nn.Conv1D) else m.weight
        return F.linear(x, *self.masked(weight, m.bias, out, into))

    def conv(self, m, x: Tensor) -> Tensor:
        into, out = m.axes.get("in"), m.axes.get("out")
        if m.groups > 1 and into is not None and out is not None and into.blocks * into.slice.size == m.groups:
            kept = out if self.arrived(m, "in") else None  # whole groups: nothing is mixed, nothing is scaled
            return m._conv_forward(x, *self.masked(m.weight, m.bias, kept, None, scale=False))
        into, out = self.arrived(m, "in"), self.started(m)
        if into is not None and m.groups > 1:  # the columns of each group
            into = Axis(into.slice, into.blocks // m.groups, into.inner)
        return m._conv_forward(x, *self.masked(m.weight, m.bias, out, into))

    # -- norms ---------------------------------------------------------------------------------------------------------

    def batch_norm(self, m, x: Tensor) -> Tensor:
        kept = mask(self.arrived(m, "unit"), m.num_features, x.device)
        if m.running_mean is None:
            return F.batch_norm(x, None, None, m.weight, m.bias, True, 0.0, m.eps) * along(kept, 1, x)
        mean, var = m.running_mean.clone(), m.running_var.clone()
        y = F.batch_norm(x, mean, var, m.weight, m.bias, m.training, m.momentum or 0.0, m.eps)
        self.statistics[m] = (
            torch.where(kept > 0, mean, m.running_mean),
            torch.where(kept > 0, var, m.running_var),
            int(m.num_batches_tracked) + m.training,
        )
        return y * along(kept, 1, x)

    def group_norm(self, m, x: Tensor) -> Tensor:
        kept = self.kept(m, 1, x).expand_as(x)
        y, inside = (t.reshape(x.shape[0], m.num_groups, -1) for t in (x, kept))
        y = masked_standardise(y, inside, m.eps).view_as(x)
        weight, bias = (
            1.0 if m.weight is None else along(m.weight, 1, x),
            0.0 if m.bias is None else along(m.bias, 1, x),
        )
        return (y * weight + bias) * kept

    def layer_norm(self, m, x: Tensor) -> Tensor:
        kept = self.kept(m, -1, x).expand_as(x)
        y = masked_standardise(x, kept, m.eps)
        return (y * (1.0 if m.weight is None else m.weight) + (0.0 if m.bias is None else m.bias)) * kept

    def rms_norm(self, m, x: Tensor) -> Tensor:
        kept = self.kept(m, -1, x)
        eps = torch.finfo(x.dtype).eps if m.eps is None else m.eps
        mean_square = (x**2 * kept).sum(-1, keepdim=True) / kept.sum()
        return x * (mean_square + eps).rsqrt() * (1.0 if m.weight is None else m.weight) * kept


def masked_standardise(x: Tensor, kept: Tensor, eps: float) -> Tensor:
    """Zero mean and unit variance over the kept entries of the last dimension; groups without any stay finite."""
    count = kept.sum(-1, keepdim=True).clamp_min(1)
    mean = (x * kept).sum(-1, keepdim=True) / count
    var = ((x - mean) ** 2 * kept).sum(-1, keepdim=True) / count
    return (x - mean) * (var + eps).rsqrt()


# -- comparing a sliced network with its oracle ------------------------------------------------------------------------


def channel_dim(layer: nn.Module, x: Tensor, unbatched: bool = False) -> int:
    if isinstance(layer, CHANNELS_LAST_LAYERS):
        return x.dim() - 1
    return 0 if unbatched else 1


def ends(net: nn.Module) -> tuple[nn.Module, nn.Module]:
    layers = [m for m in net.modules() if isinstance(m, sliceout.nn.Sliced)]
    return layers[0], layers[-1]


def compare(net: nn.Module, x_full: Tensor, what: str = "", unbatched: bool = False) -> None:
    """Output, all gradients and batch-norm statistics of ``net`` on the kept part of ``x_full`` equal the oracle's."""
    first, last = ends(net)
    arriving = first.axes.get("in", first.axes.get("unit"))
    if arriving is not None and not arriving.slice.sliced:
        arriving = None
    dense = MaskedDense([] if arriving is None else arriving.slices)
    parameters = dict(net.named_parameters())

    x_full = x_full.detach().requires_grad_()
    y_full = dense(net, x_full)
    leaving = last.axes.get("out", last.axes.get("unit"))
    expected = y_full
    if leaving is not None and leaving.slice in dense.live:
        dim = channel_dim(last, y_full, unbatched)
        dropped = mask(leaving, leaving.size, x_full.device) == 0
        assert not y_full.index_select(dim, dropped.nonzero().flatten()).any(), "the oracle must not leak dropped units"
        expected = y_full.index_select(dim, leaving.kept.to(x_full.device))
    grad = torch.randn_like(expected)
    dx_full, *expected_grads = torch.autograd.grad(expected, [x_full, *parameters.values()], grad)

    x = x_full.detach()
    kept = torch.arange(x.shape[channel_dim(first, x, unbatched)], device=x.device)
    if arriving is not None:
        kept = arriving.kept.to(x.device)
    x = x.index_select(channel_dim(first, x, unbatched), kept)
    if not x_full.is_contiguous():
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    x = x.requires_grad_()
    y = net(x.clone())  # a clone, because layers may work in place
    dx, *grads = torch.autograd.grad(y, [x, *parameters.values()], grad)

    exactly(y, expected, f"{what} output")
    exactly(dx, dx_full.index_select(channel_dim(first, x_full, unbatched), kept), f"{what} gradient of the input")
    for name, got, want in zip(parameters, grads, expected_grads, strict=True):
        exactly(got, want, f"{what} gradient of {name}")
    for m, (mean, var, count) in dense.statistics.items():
        exactly(m.running_mean, mean, f"{what} running_mean")
        exactly(m.running_var, var, f"{what} running_var")
        assert int(m.num_batches_tracked) == count, f"{what} num_batches_tracked"


@contextlib.contextmanager
def path(name: str) -> Iterator[None]:
    """Which code runs: ``eager`` as called, ``ops`` the registered ops, ``graph`` what a compiled graph would hold."""
    with contextlib.ExitStack() as stack:
        if name == "ops":
            stack.enter_context(sliceout.ops.without_views())
            stack.enter_context(mock.patch("sliceout.ops.prefetch.usable", return_value=False))
        elif name == "graph":
            stack.enter_context(mock.patch("torch.compiler.is_compiling", return_value=True))
        else:
            assert name == "eager"
        yield

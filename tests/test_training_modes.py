"""Mixed precision: what autocast and loss scaling make of a sliced network is what they make of a narrow one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import sliceout
from networks import NETWORKS, build, data, gradients, grown, loss_of, narrow, starts, starts_due, step_of
from sliceout import nn as snn

BF16 = 2.0**-8  # half a unit in the last place, relative
SETTINGS = {"circular": {}, "producer": {"fold": "producer"}, "window": {"sampling": "window"}}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", NETWORKS)
def test_narrow_network_computes_the_same(name, settings, float64):
    """In float64, so that the comparisons below compare what they should."""
    model, x = build(name, **SETTINGS[settings]), data(name)
    for _ in range(5):
        sliceout.draw_(model)
        model.zero_grad()
        small, origin = narrow(model)
        torch.testing.assert_close(model(x), small(x))
        loss_of(model, x).backward()
        loss_of(small, x).backward()
        plain = dict(small.named_parameters())
        for key, grad in gradients(model):
            expected = grown(plain[key].grad, grad, origin[key]) if key in origin else plain[key].grad
            torch.testing.assert_close(grad, expected, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", NETWORKS)
def test_autocast_equals_autocast_of_the_narrow_network(name, settings):
    model, x = build(name, **SETTINGS[settings]), data(name, 64)
    for _ in range(3):
        sliceout.draw_(model)
        model.zero_grad()
        small, origin = narrow(model)
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = model(x), small(x)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        assert (ours.double() - theirs.double()).norm() <= 2 * BF16 * theirs.double().norm()
        ours.float().square().mean().backward()
        theirs.float().square().mean().backward()
        plain = dict(small.named_parameters())
        for key, grad in gradients(model):
            assert grad.dtype == torch.float32
            expected = grown(plain[key].grad, grad, origin[key]) if key in origin else plain[key].grad
            assert (grad - expected).norm() <= 8 * BF16 * expected.norm(), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NETWORKS)
def test_autocast_runs_the_product_in_the_low_precision(name, dtype):
    model, x = build(name), data(name)
    last = list(model.modules())[-1]
    seen = []
    last.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype):
        model(x)
    with torch.autocast("cpu", dtype, enabled=False):
        model(x)
    assert seen == [dtype, torch.float32]


class Allocated(TorchDispatchMode):
    """Notes every float32 tensor that is made, by number of entries."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        seen = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        for t in tree_flatten(out)[0]:
            if isinstance(t, Tensor) and t.dtype == torch.float32 and t.untyped_storage().data_ptr() not in seen:
                self.sizes.append(t.numel())
        return out


@pytest.mark.parametrize(
    ("layer", "sample"),
    [
        (lambda a, b: snn.Linear(32, 64, in_slice=a, out_slice=b), (1, 16)),
        (lambda a, b: snn.Conv2d(32, 64, 1, in_slice=a, out_slice=b), (1, 16, 1, 1)),
        (lambda a, b: snn.Conv1D(64, 32, in_slice=a, out_slice=b), (1, 16)),
    ],
    ids=["Linear", "Conv2d", "Conv1D"],
)
def test_autocast_makes_no_float32_copy_of_the_weight(layer, sample):
    sliced = layer(sliceout.Slice(32, align=1), sliceout.Slice(64, align=1))
    kept, wrapped = 16 * 32, set()
    for _ in range(8):
        sliceout.draw_(sliced)
        wrapped.add(any(s.start_on_host + s.width > s.size for s in sliced.slices))
        with torch.autocast("cpu", torch.bfloat16), Allocated() as forward:
            out = sliced(torch.ones(sample))
        with Allocated() as backward:
            out.sum().backward()
        assert max(forward.sizes, default=0) < kept
        assert sorted(n for n in backward.sizes if n >= kept) == [4 * kept]  # the gradient itself
        sliced.weight.grad = None
    assert wrapped == {True, False}  # in one piece, and around the end


@pytest.mark.parametrize("name", NETWORKS)
def test_autocast_leaves_float64_alone(name, float64):
    model, x = build(name), data(name)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_scaled_loss_flow(name):
    """scale, unscale, clip, step, update; a gradient of infinity skips step and draw."""
    model, x = build(name), data(name)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    due = 0
    for bad in (False, False, True, False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x) * (float("inf") if bad else 1.0)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        due += not bad
        assert step_of(model) == due
        assert starts(model) == starts_due(model, due)
        moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
        assert all(moved) if not bad else not any(moved)


def test_accumulation_under_autocast_keeps_gradients_in_float32():
    model, x = build("mlp"), data("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    for part in x.chunk(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, part)
        loss.backward()
    assert all(grad.dtype == torch.float32 for _, grad in gradients(model))
    optimizer.step()
    assert step_of(model) == 1

"""Compact gradients: at every step the entries of the slices are updated by the textbook formula, and no others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import lazy
import sliceout
from networks import Attention, Norms, convnet, loss_of, mlp, train_step
from oracle import exactly
from sliceout import Slice
from sliceout import nn as snn
from sliceout.compact.gradient import SlicedGrad
from sliceout_lab.models.wide_resnet import WideResNet

STEPS = 6


# -- networks ----------------------------------------------------------------------------------------------------------


def transposed(**settings):
    a, b = Slice(16, 0.5, **settings), Slice(12, 0.25, **settings)
    return nn.Sequential(
        snn.Conv1D(16, 6, out_slice=a), nn.ReLU(), snn.Conv1D(12, 16, in_slice=a, out_slice=b), nn.Tanh(),
        snn.Conv1D(3, 12, in_slice=b),
    )  # fmt: skip


def grouped(**settings):
    """Slices inside every group, a flattened map, and a head-like axis."""
    a, b = Slice(6, 0.5, **settings), Slice(4, 0.5, **settings)
    return nn.Sequential(
        nn.Unflatten(1, (6, 1, 1)),
        snn.Conv2d(6, 12, 1, groups=2, out_slice=a.axis(blocks=2)), nn.Tanh(), nn.ReplicationPad2d(1),
        snn.Conv2d(12, 8, 2, groups=2, in_slice=a.axis(blocks=2), out_slice=b.axis(blocks=2)), nn.Flatten(),
        snn.Linear(32, 3, in_slice=b.axis(blocks=2, inner=4)),
    )  # fmt: skip


def channels_last(**settings):
    return convnet(**settings).to(memory_format=torch.channels_last)


def converted(make, x):
    def build(**settings):
        model = make()
        sliceout.convert_(model, 0.5, align=1, example_inputs=x, **settings)
        return model

    return build


def plain_mlp():
    return nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 3))


NETS = {
    "mlp": (mlp, (6,)),
    "convnet": (convnet, (3, 8, 8)),
    "channels last": (channels_last, (3, 8, 8)),
    "norms": (Norms, (6,)),
    "transposed": (transposed, (6,)),
    "grouped": (grouped, (6,)),
    "converted mlp": (converted(plain_mlp, torch.zeros(2, 6)), (6,)),
    "converted wide resnet": (converted(lambda: WideResNet(10, 1), torch.zeros(2, 3, 8, 8)), (3, 8, 8)),
    "converted transformer": (converted(Attention, torch.zeros(2, 5, 16)), (5, 16)),
}


def make(name="mlp", **settings):
    torch.manual_seed(0)
    return NETS[name][0](**{"grads": "compact", **settings})


def sample(name="mlp", n=6, seed=1):
    return torch.randn(n, *NETS[name][1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OPTIMIZERS = {
    "sgd": (SGD, lazy.sgd, {"lr": 0.1}),
    "momentum": (SGD, lazy.sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (SGD, lazy.sgd, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "maximize": (SGD, lazy.sgd, {"lr": 0.01, "momentum": 0.5, "maximize": True}),
    "adam": (Adam, lazy.adam, {"lr": 0.01}),
    "adam, decayed": (Adam, lazy.adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}),
    "amsgrad": (Adam, lazy.adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": (AdamW, lazy.adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw, amsgrad": (AdamW, lazy.adam, {"lr": 0.01, "amsgrad": True}),
}


def prepared(name="mlp", optimizer="adam", flags=None, **settings):
    """A model with compact gradients, its optimizer and its reference."""
    kind, formula, options = OPTIMIZERS[optimizer]
    model = make(name, **settings)
    theirs = dict(options)
    if kind is AdamW:
        theirs = {"weight_decay": 0.01, **options, "decoupled": True}
    return model, kind(model.parameters(), **options, **(flags or {})), lazy.Reference(model, formula, **theirs)


def train_and_compare(model, optimizer, reference, x, steps=STEPS):
    seen = set()
    for _ in range(steps):
        seen.add(tuple(s.start_on_host for s in sliceout.slices(model)))
        grads, live = reference.gradients(model, x), lazy.live_entries(model)
        loss_of(model, x).backward()
        before = lazy.snapshot(model, optimizer)
        optimizer.step()
        lazy.assert_untouched(before, lazy.snapshot(model, optimizer), live)
        optimizer.zero_grad()
        reference.update(grads, live)
        reference.check(model, optimizer)
    return seen


# -- updates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sampling", ["circular", "window"])
def test_only_kept_entries_are_updated_by_the_formula(optimizer, sampling, float64):
    model, stock, reference = prepared("mlp", optimizer, sampling=sampling)
    assert len(train_and_compare(model, stock, reference, sample("mlp"), 12)) > 6


@pytest.mark.parametrize("settings", [{"fold": "producer"}, {"sampling": "window"}, {"sampling": "prefix"}], ids=str)
@pytest.mark.parametrize("name", NETS)
def test_every_kind_of_layer_and_slice(name, settings, float64):
    for optimizer in ("nesterov", "adamw, amsgrad"):
        train_and_compare(*prepared(name, optimizer, **settings), sample(name), 4)


@pytest.mark.parametrize("flags", [{"foreach": True}, {"fused": True}], ids=str)
def test_flags_of_the_optimizer_change_nothing(flags, float64):
    train_and_compare(*prepared("convnet", "adam, decayed", flags=flags), sample("convnet"))


def test_lr_as_tensor_and_from_a_scheduler(float64):
    model, optimizer, reference = prepared("mlp", "momentum")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(3):
        train_and_compare(model, optimizer, reference, sample(), 2)
        for _ in range(2):
            schedule.step()
        reference.settings["lr"] = optimizer.param_groups[0]["lr"]
    model, optimizer, reference = prepared("mlp", "adam", flags=None)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    train_and_compare(model, optimizer, reference, sample(), 3)


def test_every_unit_is_kept_at_some_time_and_trained(float64):
    model, optimizer, _ = prepared("mlp", "sgd")
    before = lazy.snapshot(model, optimizer)
    for _ in range(40):
        train_step(model, sample(), optimizer)
    for name, p in model.named_parameters():
        assert (p != before[name]["weight"]).all(), name


# -- parameter groups, several optimizers, state dicts -----------------------------------------------------------------


def test_groups_have_their_own_settings(float64):
    model, _, _ = prepared()
    first, rest = list(model[0].parameters()), list(model[1:].parameters())
    optimizer = AdamW(
        [{"params": first, "lr": 0.1, "weight_decay": 0.0}, {"params": rest, "lr": 0.01, "weight_decay": 0.5}]
    )
    reference = lazy.Reference(model, None)
    for step in range(STEPS):
        grads, live = reference.gradients(model, sample()), lazy.live_entries(model)
        train_step(model, sample(), optimizer)
        for settings, part in (
            ({"lr": 0.1, "weight_decay": 0.0}, lambda n: n.startswith("0.")),
            ({"lr": 0.01, "weight_decay": 0.5}, lambda n: not n.startswith("0.")),
        ):
            reference.steps = step
            reference.formula, reference.settings = lazy.adam, {**settings, "decoupled": True}
            nothing = {n: torch.zeros_like(m) for n, m in live.items()}
            reference.update(grads, {n: m if part(n) else nothing[n] for n, m in live.items()})
        reference.check(model, optimizer)


def test_groups_mixing_sliced_and_plain_parameters_and_two_optimizers(float64):
    model = nn.Sequential(mlp(grads="compact"), nn.Linear(3, 4))
    one, other = SGD(model[0].parameters(), lr=0.1, momentum=0.9), Adam(model[1].parameters(), lr=0.01)
    same = copy.deepcopy(model)
    both = SGD(same.parameters(), lr=0.1, momentum=0.9)
    x = sample()
    for _ in range(STEPS):
        sliceout.slices(same).seek_(sliceout.slices(model).step)
        with torch.no_grad():
            same[1].load_state_dict(model[1].state_dict())
        train_step(model, x, one, other)
        train_step(same, x, both)
        for p, q in zip(model[0].parameters(), same[0].parameters(), strict=True):
            exactly(p, q)
    assert sliceout.slices(model).step == STEPS


@pytest.mark.parametrize("optimizer", ["momentum", "amsgrad", "adamw"])
def test_state_dict_goes_to_a_stock_optimizer_of_an_unconverted_model_and_back(optimizer, float64):
    model, ours, reference = prepared("converted mlp", optimizer)
    train_and_compare(model, ours, reference, sample(), 3)
    kind, _, options = OPTIMIZERS[optimizer]
    plain = plain_mlp()
    plain.load_state_dict(model.state_dict())
    stock = kind(plain.parameters(), **options)
    stock.load_state_dict(copy.deepcopy(ours.state_dict()))
    everywhere = {name: torch.ones_like(p, dtype=torch.bool) for name, p in plain.named_parameters()}
    for _ in range(3):
        loss = loss_of(plain, sample())
        loss.backward()
        grads = {name: p.grad.clone() for name, p in plain.named_parameters()}
        stock.step()
        stock.zero_grad()
        reference.update(grads, everywhere)
        reference.check(plain, stock)
    assert set(stock.state_dict()["state"][0]) == set(ours.state_dict()["state"][0])
    model.load_state_dict(plain.state_dict())
    ours.load_state_dict(stock.state_dict())
    train_and_compare(model, ours, reference, sample(), 3)


class OwnAdam(Adam):
    def step(self, closure=None):
        return super().step(closure)


DENSE = {
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "dampening": lambda ps: SGD(ps, lr=0.1, momentum=0.9, dampening=0.5),
    "subclass": lambda ps: OwnAdam(ps, lr=0.01),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("name", DENSE)
def test_other_optimizers_get_dense_gradients(name, float64):
    results = []
    for grads in ("dense", "compact"):
        model = make(grads=grads)
        optimizer = DENSE[name](list(model.parameters()))

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, sample())
            loss.backward()
            return loss

        for _ in range(4):
            if name == "LBFGS":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        results.append((dict(model.named_parameters()), sliceout.slices(model).step))
    (dense, steps), (compact, compact_steps) = results
    assert steps == compact_steps == 4
    for key, p in compact.items():
        assert torch.equal(p, dense[key]), key


def test_closure(float64):
    model, optimizer, reference = prepared("mlp", "adamw")
    for _ in range(STEPS):
        grads, live = reference.gradients(model, sample()), lazy.live_entries(model)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, sample())
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert loss > 0
        reference.update(grads, live)
        reference.check(model, optimizer)


def test_step_returns_none_and_hooks_of_the_user_come_first(float64):
    """A pre-hook that clips must act on what is stepped over."""
    model, optimizer, reference = prepared("mlp", "sgd")
    optimizer.register_step_pre_hook(lambda o, args, kwargs: [p.grad.mul_(0.5) for p in model.parameters()] and None)
    grads, live = reference.gradients(model, sample()), lazy.live_entries(model)
    loss_of(model, sample()).backward()
    assert optimizer.step() is None
    reference.update({k: g * 0.5 for k, g in grads.items()}, live)
    reference.check(model, optimizer)


def test_gradient_is_still_there_after_the_step(float64):
    model, optimizer, _ = prepared()
    loss_of(model, sample()).backward()
    grads = [p.grad for p in model.parameters()]
    expected = [g.clone() for g in grads]
    optimizer.step()
    for p, g, e in zip(model.parameters(), grads, expected, strict=True):
        assert p.grad is g
        exactly(whole(g), whole(e))


# -- gradients accumulate and are scaled, clipped, skipped -------------------------------------------------------------


def whole(g):
    return g.dense() if isinstance(g, SlicedGrad) else g


def test_accumulation_over_several_backwards(float64):
    model, optimizer, reference = prepared("convnet", "adam")
    for _ in range(3):
        parts = sample("convnet").chunk(3)
        grads, live = reference.gradients(model, *parts), lazy.live_entries(model)
        for x in parts:
            loss_of(model, x).backward()
        assert isinstance(model[0].weight.grad, SlicedGrad)
        optimizer.step()
        optimizer.zero_grad()
        reference.update(grads, live)
        reference.check(model, optimizer)


def test_accumulation_across_a_draw_is_the_dense_sum_and_a_dense_update(float64):
    model, optimizer, reference = prepared("mlp", "momentum")
    x = sample()
    first = {k: g.clone() for k, g in reference.gradients(model, x).items()}
    loss_of(model, x).backward()
    sliceout.draw_(model)
    second = reference.gradients(model, x)
    loss_of(model, x).backward()
    total = {k: first[k] + second[k] for k in first}
    for name, p in model.named_parameters():
        exactly(whole(p.grad), total[name], name)
    optimizer.step()
    reference.update(total, {k: torch.ones_like(g, dtype=torch.bool) for k, g in total.items()})
    reference.check(model, optimizer)


def test_one_weight_used_in_two_slices(float64):
    """Tied weights: each use has its own slice, and the gradient is the sum."""
    grads = []
    for kind in ("dense", "compact"):
        torch.manual_seed(0)
        a, b = Slice(8, 0.5, grads=kind), Slice(8, 0.25, grads=kind, seed=1)
        model = nn.ModuleList([snn.Linear(8, 8, out_slice=a), snn.Linear(8, 8, in_slice=a, out_slice=b)])
        model[1].weight = model[0].weight
        last = snn.Linear(8, 2, in_slice=b)
        sliceout.draw_(nn.ModuleList([model, last]))
        last(model[1](model[0](sample("mlp").repeat(1, 2)[:, :8]))).square().mean().backward()
        grads.append([whole(p.grad) for p in (*model.parameters(), *last.parameters())])
    for dense, compact in zip(*grads, strict=True):
        exactly(compact, dense)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroed_gradients_move_with_the_slices(set_to_none, float64):
    """zero_grad(set_to_none=False) leaves a gradient of zeros, which must not turn the next step into a dense one."""
    model, optimizer, reference = prepared("mlp", "adamw")
    for foreach in (None, True, True):
        grads, live = reference.gradients(model, sample()), lazy.live_entries(model)
        loss_of(model, sample()).backward()
        optimizer.step()
        optimizer.defaults["foreach"] = foreach
        optimizer.zero_grad(set_to_none)
        reference.update(grads, live)
        reference.check(model, optimizer)
        if not set_to_none:
            assert not any(whole(p.grad).any() for p in model.parameters())


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("norm", [1, 2, 3.0, torch.inf, 0])
def test_clipping_by_norm(norm, foreach, float64):
    model, optimizer, reference = prepared("mlp", "sgd")
    for _ in range(3):
        grads, live = reference.gradients(model, sample()), lazy.live_entries(model)
        loss_of(model, sample()).backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm, foreach=foreach)
        expected = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1, norm)
        exactly(total, expected)
        optimizer.step()
        optimizer.zero_grad()
        reference.update(grads, live)  # clipped in place
        reference.check(model, optimizer)


@pytest.mark.parametrize("foreach", [True, False, None])
def test_clipping_by_value(foreach, float64):
    model, optimizer, reference = prepared("mlp", "momentum")
    for _ in range(3):
        grads, live = reference.gradients(model, sample()), lazy.live_entries(model)
        loss_of(model, sample()).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3, foreach=foreach)
        nn.utils.clip_grad_value_(reference.model.parameters(), 1e-3)
        assert model[0].weight.grad.full is None
        optimizer.step()
        optimizer.zero_grad()
        reference.update(grads, live)
        reference.check(model, optimizer)


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("flags", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_scaled_losses_and_skipped_steps(optimizer, flags, unscale, float64):
    model, stock, reference = prepared("mlp", optimizer, flags=flags)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for bad in (False, True, False, False, True, False):
        grads, live = reference.gradients(model, sample()), lazy.live_entries(model)
        scaler.scale(loss_of(model, sample()) * (float("inf") if bad else 1.0)).backward()
        if unscale:
            scaler.unscale_(stock)
            if not bad:
                exactly(whole(model[2].weight.grad), grads["2.weight"])
        before = lazy.snapshot(model, stock)
        scaler.step(stock)
        scaler.update()
        stock.zero_grad()
        if bad:
            after = lazy.snapshot(model, stock)
            for name, tensors in before.items():
                assert all(torch.equal(t, after[name][key]) for key, t in tensors.items()), name
        else:
            reference.update(grads, live)
        reference.check(model, stock)

"""Units that are not in yet: the optimizer leaves them alone, and their averages begin when they enter."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import growing
import lazy
import sliceout
from networks import Heads, loss_of, mlp
from sliceout import Slice
from sliceout import nn as snn
from sliceout.compact import growth
from sliceout.compact.gradient import SlicedGrad
from test_compact import NETS, OPTIMIZERS

DENSE = [name for name in NETS if name != "converted transformer"]
STAGES = {0: 0.5, 3: 0.25, 6: 0.0}
"""Rates by step."""


def values_only(**settings):
    return Heads(("v",), **settings)


def whole_heads(**settings):
    return Heads(("heads",), **settings)


def mixed(**settings):
    """Columns that are drawn by chance and rows that grow, and the other way round."""
    a, c = (Slice(16, 0.5, **{**settings, "sampling": "circular"}) for _ in range(2))
    b = Slice(12, 0.5, **settings)
    return nn.Sequential(
        snn.Linear(6, 16, out_slice=a), nn.ReLU(), snn.Linear(16, 12, in_slice=a, out_slice=b), nn.Tanh(),
        snn.Linear(12, 16, in_slice=b, out_slice=c), nn.Tanh(), snn.Linear(16, 3, in_slice=c),
    )  # fmt: skip


MORE = {
    "attention": (Heads, (5, 16)),
    "values": (values_only, (5, 16)),
    "whole heads": (whole_heads, (5, 16)),
    "fused projection": NETS["converted transformer"],
    "mixed": (mixed, (6,)),
}


def prepared(name="mlp", optimizer="adam", flags=None, **settings):
    torch.manual_seed(0)
    build, shape = (NETS | MORE)[name]
    model = build(sampling="prefix", **settings)
    kind, formula, options = OPTIMIZERS[optimizer]
    theirs = {"weight_decay": 0.01, **options, "decoupled": True} if kind is AdamW else options
    reference = growing.Reference(model, formula, **theirs)
    return model, kind(model.parameters(), **options, **(flags or {})), reference, torch.randn(6, *shape)


def rerate(model, rate):
    for s in sliceout.slices(model):
        if s.sampling == "prefix":
            s.rerate_(rate)


def train(model, optimizer, reference, x, stages=STAGES, steps=9, check=True):
    for step in range(steps):
        if step in stages:
            stages[step](model) if callable(stages[step]) else rerate(model, stages[step])
        optimizer.zero_grad()
        loss_of(model, x).backward()
        reference.step()
        optimizer.step()
        if check:
            reference.check(optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mlp", "convnet"])
def test_entries_begin_when_they_enter(name, optimizer, float64):
    train(*prepared(name, optimizer))


@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
@pytest.mark.parametrize("name", [*DENSE[2:], *MORE])
def test_every_kind_of_layer_and_slice(name, optimizer, float64):
    train(*prepared(name, optimizer))


@pytest.mark.parametrize("optimizer", ["momentum", "adamw, amsgrad"])
@pytest.mark.parametrize("name", DENSE)
def test_compact_gradients_grow_alike(name, optimizer, float64):
    model, *rest = prepared(name, optimizer, grads="compact")
    train(model, *rest)
    assert not any(s.sliced for s in sliceout.slices(model))


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_compact_gradients_of_units_that_grow_and_of_units_drawn_by_chance(optimizer, float64):
    """The latter are stepped over as ever while they are dropped; counts are those of the units that are in."""
    model, stock, reference, x = prepared("mixed", optimizer, grads="compact")
    for step in range(9):
        if step in STAGES:
            rerate(model, STAGES[step])
        stock.zero_grad()
        loss_of(model, x).backward()
        assert isinstance(model[2].weight.grad, SlicedGrad)
        reference.step(live=lazy.live_entries(model))
        stock.step()
        reference.check(stock)


@pytest.mark.parametrize("optimizer", ["nesterov", "adam, decayed", "adamw"])
def test_units_that_leave_and_come_back(optimizer, float64):
    """Off and on, and rates that rise: what is out keeps its weight, its state and its count."""
    stages = {1: 0.25, 3: sliceout.off_, 5: sliceout.on_, 7: 0.75, 9: 0.0, 11: 0.5, 12: 0.0}
    train(*prepared("mlp", optimizer), stages, 15)


@pytest.mark.parametrize("flags", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_flags_of_the_optimizer_change_nothing(flags, float64):
    train(*prepared("mlp", "adamw", flags))


def test_a_late_unit_takes_no_larger_first_step_than_others_did(float64):
    """Adam's first step is the learning rate; torch's own would be up to six times as large here."""
    model, optimizer, _, x = prepared("mlp", "adam")
    weight, moved = model[0].weight, []
    for step in range(140):
        if step == 120:
            rerate(model, 0.0)
        before = weight.detach().clone()
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        moved.append((weight.detach() - before).abs().amax(1))
    assert not torch.stack(moved[:120])[:, 8:].any()
    assert torch.stack(moved[120:])[:, 8:].max() < 1.1 * 0.01
    assert moved[120][8:].max() > 0.9 * 0.01


def test_torch_steps_again_once_nothing_tells_the_units_apart(float64, monkeypatch):
    """At once without averages that are corrected; else when the correction is below the resolution of the dtype."""
    calls = []
    update = sliceout.compact.optimizers._update_of

    def observed(optimizer, group):
        made = update(optimizer, group)
        return lambda *args: (calls.append(type(optimizer)), made(*args))

    monkeypatch.setattr(sliceout.compact.optimizers, "_update_of", observed)
    model, optimizer, reference, x = prepared("mlp", "momentum")
    train(model, optimizer, reference, x)
    assert calls == [SGD] * 6
    calls.clear()
    model, optimizer, reference, x = prepared("mlp", "adam")
    optimizer.param_groups[0]["betas"] = reference.settings["betas"] = (0.1, 0.2)  # 0.2 ** 23 is below it
    reference.settings = {**reference.settings}
    train(model, optimizer, reference, x, steps=40)
    assert calls == [Adam] * (6 + 23)


def test_groups_scalers_accumulation_and_frozen_parameters(float64):
    model, _, _, x = prepared()
    model[0].bias.requires_grad_(False)
    optimizer = AdamW([
        {"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.3},
        {"params": model[2:].parameters(), "lr": 0.02},
    ])  # fmt: skip
    twin = copy.deepcopy(model)
    halves = [growing.Reference(twin, lazy.adam, lr=0.01, weight_decay=0.3, decoupled=True),
              growing.Reference(twin, lazy.adam, lr=0.02, weight_decay=0.01, decoupled=True)]  # fmt: skip
    for step in range(9):
        if step in STAGES:
            rerate(model, STAGES[step]), rerate(twin, STAGES[step])
        optimizer.zero_grad()
        for part in x.split(2):
            loss_of(model, part).backward()
        twin.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad
        for half in halves:
            half.step()
        optimizer.step()
        for name, p in model.named_parameters():
            expected = halves[0 if name.startswith("0.") else 1].values[name]
            torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
def test_steps_that_a_scaler_skips_do_not_count(optimizer, float64):
    """Inside a fused optimizer: it is called, slices move on, and no count does."""
    model, stock, reference, x = prepared("mlp", optimizer, {"fused": True})
    for step in range(12):
        if step in STAGES:
            rerate(model, STAGES[step])
        others = copy.deepcopy(model) if step == 9 else None  # models come and go: counts stay
        stock.grad_scale = torch.tensor(4.0, dtype=torch.float32)
        skip = step in (1, 2, 4, 8)  # not the first: torch's own SGD leaves its buffers uninitialised then
        stock.found_inf = torch.tensor(float(skip), dtype=torch.float32)
        stock.zero_grad()
        (4 * loss_of(model, x)).backward()
        if not skip:
            reference.step(scale=4.0)
        stock.step()
        reference.check(stock)
        del others


# -- what is not known -------------------------------------------------------------------------------------------------


def stepped(model, optimizer, x):
    loss_of(model, x).backward()
    optimizer.step()


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.RMSprop(p, 0.01, weight_decay=0.1),
    lambda p: SGD(p, 0.01, momentum=0.5, dampening=0.5),
], ids=["rmsprop", "dampening"])  # fmt: skip
def test_other_optimizers_step_as_ever_and_one_warning_says_so(make, float64):
    model, _, _, x = prepared()
    plain = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer, stock = make(model.parameters()), make(plain)

    def step():
        optimizer.zero_grad()
        stepped(model, optimizer, x)
        for p, q in zip(model.parameters(), plain, strict=True):
            q.grad = p.grad
        stock.step()

    with pytest.warns(UserWarning, match="steps over units that are not in yet as well"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _, _, x = prepared(rate=0.0)
        stepped(model, make(model.parameters()), x)


def test_a_compiled_step_says_so_too(float64):
    model, optimizer, _, x = prepared()
    torch._dynamo.reset()
    compiled = torch.compile(optimizer.step, backend="eager")
    loss_of(model, x).backward()
    with pytest.warns(UserWarning, match="do not compile"):
        compiled()


class Sharded(torch.Tensor):
    """A gradient of a kind that we know nothing of, as those of FSDP are."""


def test_gradients_of_another_kind_are_left_to_torch(float64):
    model, optimizer, _, x = prepared("mlp", "adamw")
    loss_of(model, x).backward()
    weight = model[0].weight
    weight.grad = weight.grad.as_subclass(Sharded)
    before = weight.detach().clone()
    with pytest.warns(UserWarning, match="not in yet"):
        optimizer.step()
    assert (weight != before).all()
    assert not optimizer.state[model[2].weight]["exp_avg"][:, 8:].any()


def test_parameters_shared_in_two_ways_are_in_as_a_whole(float64):
    a, b = Slice(8, sampling="prefix"), Slice(8, sampling="prefix")
    one, two = snn.Linear(4, 8, bias=False, out_slice=a), snn.Linear(8, 8, bias=False, in_slice=a, out_slice=b)
    three = snn.Linear(8, 8, bias=False, in_slice=b)
    three.weight = two.weight
    model = nn.Sequential(one, nn.Tanh(), two, nn.Tanh(), three)
    optimizer = AdamW(model.parameters(), 0.1)
    before = two.weight.detach().clone()
    stepped(model, optimizer, torch.randn(3, 4))
    assert (two.weight != before).all()
    assert not optimizer.state[one.weight]["exp_avg"][4:].any()


def test_models_without_a_prefix_are_not_looked_at(float64):
    model = mlp()
    optimizer = Adam(model.parameters())
    stepped(model, optimizer, torch.randn(2, 6))
    assert growth.look(optimizer) == {}
    assert all(s.entered == () for s in sliceout.slices(model))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def by_state_dict(model, fresh):
    fresh.load_state_dict(copy.deepcopy(model.state_dict()))


def by_slices(model, fresh):
    fresh.load_state_dict(dict(model.state_dict()))
    sliceout.slices(fresh).load_state_dict(sliceout.slices(model).state_dict())


@pytest.mark.parametrize("way", [by_state_dict, by_slices])
@pytest.mark.parametrize("at", [2, 4, 7])
def test_a_resumed_run_repeats_exactly(at, way, float64):
    model, optimizer, reference, x = prepared("mlp", "adamw")
    train(model, optimizer, reference, x, steps=at)
    fresh, resumed, _, _ = prepared("mlp", "adamw")
    way(model, fresh)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rates = [rate for step, rate in STAGES.items() if step <= at - 1]
    rerate(fresh, rates[-1])
    for step in range(at, 10):
        for net, stock in ((model, optimizer), (fresh, resumed)):
            if step in STAGES:
                rerate(net, STAGES[step])
            stock.zero_grad()
            stepped(net, stock, x)
    assert [s.entered for s in sliceout.slices(fresh)] == [s.entered for s in sliceout.slices(model)]
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_loaded_state_has_counts_of_its_own(float64):
    model, optimizer, reference, x = prepared("mlp", "adamw")
    twin, other, _, _ = prepared("mlp", "adamw")
    train(model, optimizer, reference, x, steps=5)
    by_state_dict(model, twin)
    rerate(twin, 0.25)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] += 95
    for net, stock in ((model, optimizer), (twin, other)):
        stock.load_state_dict(copy.deepcopy(saved))
        stock.zero_grad()
        stepped(net, stock, x)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_checkpoints_from_before_load():
    model = prepared()[0]
    state = model.state_dict()
    for entry in state._metadata.values():
        for positions in entry.get("sliceout", {}).values():
            for position in positions:
                position.pop("entered", None)
    model.load_state_dict(state)
    saved = sliceout.slices(model).state_dict()
    saved.pop("entered")
    sliceout.slices(model).load_state_dict(saved)


def test_gradients_that_came_before_a_change_of_width_are_put_where_they_belong(float64):
    """Compact, and the rate changes between backward and step."""
    model, optimizer, reference, x = prepared("mlp", "adamw", grads="compact")
    train(model, optimizer, reference, x, steps=2)
    optimizer.zero_grad()
    loss_of(model, x).backward()
    assert isinstance(model[0].weight.grad, SlicedGrad)
    rerate(model, 0.25)
    reference.step()
    optimizer.step()
    reference.check(optimizer)

"""When slices are redrawn: once per optimizer step, by nobody's hand, whatever loop runs the steps."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import sliceout
from networks import (
    ALL,
    CONVERTED,
    NETWORKS,
    build,
    data,
    gradients,
    loss_of,
    mlp,
    slices_in,
    starts,
    starts_due,
    step_of,
    train_step,
)
from sliceout import drawing, stepping
from sliceout import nn as snn
from sliceout.drawing import owner_of

# -- one optimizer -----------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda params: SGD(params, lr=0.1),
    "SGD with momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: Adam(params),
    "AdamW": lambda params: AdamW(params),
    "AdamW, fused": lambda params: AdamW(params, fused=True),
    "AdamW, foreach": lambda params: AdamW(params, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
}


@pytest.mark.parametrize(
    ("name", "kind"), [*itertools.product(NETWORKS, OPTIMIZERS), *((name, "SGD") for name in CONVERTED)]
)
def test_every_optimizer_step_draws_once(name, kind):
    model, x = build(name), data(name)
    optimizer = OPTIMIZERS[kind](model.parameters())
    assert step_of(model) == 0
    for step in range(1, 5):
        train_step(model, x, optimizer)
        assert step_of(model) == step
        assert starts(model) == starts_due(model, step)


def test_starts_change_from_step_to_step():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    seen = set()
    for _ in range(20):
        seen.add(tuple(starts(model)))
        train_step(model, data("mlp"), optimizer)
    assert len(seen) > 15


def test_slices_made_by_hand_draw_differently_from_each_other():
    model = nn.Sequential(mlp(), nn.Linear(3, 6), mlp())
    optimizer = SGD(model.parameters(), lr=0.1)
    same_size = [s for s in slices_in(model) if s.size == 16]
    for _ in range(10):
        train_step(model, data("mlp"), optimizer)
        if len({s.start_on_host for s in same_size}) > 1:
            return
    pytest.fail("two slices of one model moved in step")


def test_gradient_accumulation_sees_the_same_slices():
    model, x = build("mlp"), data("mlp", 8)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        before = starts(model)
        whole = torch.autograd.grad(loss_of(model, x), list(model.parameters()))
        for part in x.chunk(4):
            (loss_of(model, part) / 4).backward()
            assert starts(model) == before
        for (name, grad), expected in zip(gradients(model), whole, strict=True):
            torch.testing.assert_close(grad, expected, msg=lambda m, name=name: f"{name}: {m}")
        optimizer.step()
        optimizer.zero_grad()
        assert starts(model) != before


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["mlp", "norms", "attention", "controlled"])
def test_activation_checkpointing_gives_the_same_gradients(name, use_reentrant, float64):
    model, twin, x = build(name), build(name), data(name)
    optimizers = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    for step in range(1, 4):
        checkpoint(model, x.clone().requires_grad_(), use_reentrant=use_reentrant).square().mean().backward()
        loss_of(twin, x).backward()
        for (key, ours), (_, theirs) in zip(gradients(model), gradients(twin), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=lambda m, key=key: f"{key}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert step_of(model) == step


def test_checkpointed_segments_that_cut_a_slice_in_two_stay_aligned(float64):
    model, twin, x = build("convnet"), build("convnet"), data("convnet")
    for net in (model, twin):
        for m in net.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.momentum = 0.0  # a recomputed batch norm sees its batch twice, sliced or not
    optimizers = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        checkpoint_sequential(model, 5, x, use_reentrant=False).square().mean().backward()
        loss_of(twin, x).backward()
        for (key, ours), (_, theirs) in zip(gradients(model), gradients(twin), strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda m, key=key: f"{key}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_optimizer_may_be_built_before_or_after_slicing():
    def layers() -> tuple[nn.Module, nn.Module]:
        return nn.Linear(6, 16), nn.Linear(16, 3)

    def slice_both(up: nn.Module, down: nn.Module) -> None:
        hidden = sliceout.Slice(16)
        snn.slice_(up, out_slice=hidden)
        snn.slice_(down, in_slice=hidden)

    before, after = nn.Sequential(*layers()), nn.Sequential(*layers())
    early = SGD(before.parameters(), lr=0.1)
    train_step(before, data("mlp"), early)  # it has stepped already, too
    slice_both(*before)
    slice_both(*after)
    late = SGD(after.parameters(), lr=0.1)
    for step in range(1, 4):
        train_step(before, data("mlp"), early)
        train_step(after, data("mlp"), late)
        assert starts(before) == starts(after) == starts_due(after, step)


def test_a_layer_made_plain_again_is_no_longer_drawn():
    hidden = sliceout.Slice(16)
    model = nn.Sequential(snn.slice_(nn.Linear(6, 16), out_slice=hidden), snn.slice_(nn.Linear(16, 3), in_slice=hidden))
    optimizer = SGD(model.parameters(), lr=0.1)
    train_step(model, data("mlp"), optimizer)
    assert owner_of(hidden).step == 1
    for layer in model:
        snn.plain_(layer)
    train_step(model, data("mlp"), optimizer)
    assert owner_of(hidden).step == 1


def test_optimizer_replaced_in_mid_run():
    model, x = mlp(), data("mlp")
    optimizer = Adam(model.parameters())
    train_step(model, x, optimizer)
    optimizer = SGD(model.parameters(), lr=0.1)  # the first one is gone
    for step in range(2, 5):
        train_step(model, x, optimizer)
        assert step_of(model) == step


def test_optimizer_replaced_by_two_in_mid_run():
    model, x = mlp(), data("mlp")
    optimizer = Adam(model.parameters())
    train_step(model, x, optimizer)
    del optimizer
    gc.collect()
    split = SGD(model[0].parameters(), lr=0.1), SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)
    for step in range(2, 6):
        train_step(model, x, *split)
        assert step_of(model) == step


def test_replaced_optimizer_that_is_kept_alive_costs_one_draw_at_most():
    model, x = mlp(), data("mlp")
    kept_alive = Adam(model.parameters())
    train_step(model, x, kept_alive)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        train_step(model, x, optimizer)
    assert step_of(model) == 4  # it could not know at the first of the four steps that the other would not come


def test_parameters_added_later_are_watched_too():
    first, second, x = mlp(), mlp(), data("mlp")
    optimizer = SGD(first.parameters(), lr=0.1)
    train_step(first, x, optimizer)
    optimizer.add_param_group({"params": second.parameters()})
    for step in range(1, 4):
        train_step(second, x, optimizer)
        assert (step_of(first), step_of(second)) == (1 + step, step)


def test_parameters_of_an_optimizer_may_be_exchanged():
    """As accelerate does when it shards a model whose optimizer was built before."""
    plain, model, x = nn.Linear(6, 3), nn.Sequential(mlp()[0]), data("mlp")
    optimizer = SGD(plain.parameters(), lr=0.1)
    train_step(plain, x, optimizer)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train_step(model, x, optimizer)
    assert step_of(model) == 1


def test_frozen_parameters_need_no_optimizer():
    model, x = mlp(), data("mlp")
    model[0].requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(1, 4):
        train_step(model, x, optimizer)
        assert step_of(model) == step


def test_layers_unfrozen_later_are_drawn():
    model, x = nn.Sequential(mlp(), nn.Linear(3, 3)), data("mlp")
    model[0].requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train_step(model, x, optimizer)
    model[0].requires_grad_(True)
    step = step_of(model)
    for i in range(1, 4):
        train_step(model, x, optimizer)
        assert step_of(model) == step + i


def test_parameter_in_no_optimizer_delays_the_first_draw_only():
    """Another optimizer may still come for it in the first round; when the first one is back, it did not."""
    model, x = mlp(), data("mlp")
    optimizer = SGD(model[2:].parameters(), lr=0.1)
    for step in range(5):
        train_step(model, x, optimizer)
        assert step_of(model) == step


class Scheduled(SGD):
    """A subclass that adds to the step of its parent, whose hooks torch then runs twice."""

    def step(self, closure=None):
        return super().step(closure)


def test_subclass_that_calls_its_parents_step_draws_once():
    SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # from here on torch runs hooks in SGD.step, too
    model, x = mlp(), data("mlp")
    optimizer = Scheduled(model.parameters(), lr=0.1)
    assert Scheduled.step is not SGD.step
    assert SGD.step.hooked
    for step in range(1, 4):
        train_step(model, x, optimizer)
        assert step_of(model) == step


def test_step_that_raised_does_not_stop_the_draws():
    model, x = mlp(), data("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)

    def broken_closure():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(broken_closure)
    assert step_of(model) == 0
    train_step(model, x, optimizer)
    assert step_of(model) == 1


# -- several optimizers ------------------------------------------------------------------------------------------------


def split(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    """As Muon and AdamW are used: one for matrices, one for the rest."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.Muon([p for p in matrices if p.dim() == 2], lr=0.1), AdamW(
        [*rest, *(p for p in matrices if p.dim() > 2)]
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_model_split_over_two_optimizers_is_drawn_once_per_round(name):
    model, x = build(name), data(name)
    matrices, rest = split(model)
    for step in range(1, 5):
        loss_of(model, x).backward()
        matrices.step()
        assert step_of(model) == step - 1
        rest.step()
        assert step_of(model) == step
        assert starts(model) == starts_due(model, step)


def test_round_ends_with_the_last_optimizer_in_any_order():
    model, x = mlp(), data("mlp")
    pair = split(model)
    for step in range(1, 6):
        train_step(model, x, *(pair if step % 2 else pair[::-1]))
        assert step_of(model) == step


@pytest.mark.parametrize("first_in", [True, False], ids=["steps at first", "steps later"])
def test_optimizer_that_steps_every_third_time_does_not_hold_up_the_draws(first_in):
    model, x = mlp(), data("mlp")
    often, seldom = split(model)
    counts = []
    for i in range(13):
        train_step(model, x, often)
        if i % 3 == (0 if first_in else 2):
            seldom.step()
            seldom.zero_grad()
        counts.append(step_of(model))
    gained = [b - a for a, b in itertools.pairwise(counts)]
    # One step passes until it is clear that the second optimizer does not come every time.
    assert sum(gained) + counts[0] == 12
    assert gained[2:] == [1] * (len(gained) - 2)


def test_parameter_in_no_optimizer_delays_two_optimizers_by_one_round():
    model, x = mlp(), data("mlp")
    pair = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    for step in range(5):
        loss_of(model, x).backward()
        pair[0].step()
        assert step_of(model) == max(step - 1, 0)  # not between the steps of one round
        pair[1].step()
        assert step_of(model) == step


def test_optimizer_per_parameter_stepping_inside_the_backward():
    model, x = build("mlp"), data("mlp")
    each = {p: SGD([p], lr=0.1) for p in model.parameters()}

    def step_now(p):
        each[p].step()
        each[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    for step in range(1, 4):
        loss_of(model, x).backward()
        assert step_of(model) == step
        assert starts(model) == starts_due(model, step)


def test_optimizer_wrapped_around_another_draws_once():
    class Wrapper(Optimizer):
        """As Lookahead, SAM or a sharded optimizer: an optimizer over the same parameters that calls another one."""

        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            return self.inner.step(closure)

    model, x = mlp(), data("mlp")
    optimizer = Wrapper(SGD(model.parameters(), lr=0.1))
    for step in range(1, 5):
        train_step(model, x, optimizer)
        assert step_of(model) == step


# -- several models ----------------------------------------------------------------------------------------------------


def test_two_models_do_not_disturb_each_other():
    a, b, x = mlp(), mlp(seed=7), data("mlp")
    of_a, of_b = SGD(a.parameters(), lr=0.1), SGD(b.parameters(), lr=0.1)
    for step in range(1, 5):
        train_step(a, x, of_a)
        if step % 2:
            train_step(b, x, of_b)
        assert (step_of(a), step_of(b)) == (step, (step + 1) // 2)
    assert starts(a) == starts_due(a, 4)
    assert starts(b) == starts_due(b, 2)


def test_two_models_in_one_optimizer_are_drawn_once_each():
    a, b, x = mlp(), mlp(seed=7), data("mlp")
    sliceout.slices(a), sliceout.slices(b)
    optimizer = SGD([*a.parameters(), *b.parameters()], lr=0.1)
    for step in range(1, 5):
        loss_of(a, x).backward()
        train_step(b, x, optimizer)
        assert (step_of(a), step_of(b)) == (step, step)
        assert len(sliceout.slices(a)) == len(sliceout.slices(b)) == 2


def test_models_joined_under_one_roof_are_drawn_together():
    a, b, x = mlp(), mlp(), data("mlp")
    optimizer = SGD([*a.parameters(), *b.parameters()], lr=0.1)
    sliceout.slices(a), sliceout.slices(b)
    train_step(nn.Sequential(a, nn.Linear(3, 6), b), x, optimizer)
    family = sliceout.slices(nn.ModuleList([a, b]))
    assert len(family) == 4
    assert len({(s.seed, s.stream) for s in family}) == 4
    for step in range(2, 5):
        train_step(nn.Sequential(a, nn.Linear(3, 6), b), x, optimizer)
        assert family.step == step_of(a) == step_of(b) == step
        assert starts(a) == starts_due(a, step)
        assert starts(b) == starts_due(b, step)


def test_slices_come_in_the_order_of_the_layers_whatever_the_optimizers_order():
    model, x = mlp(), data("mlp")
    optimizer = SGD([*model[4].parameters(), *model[2].parameters(), *model[0].parameters()], lr=0.1)
    train_step(model, x, optimizer)
    assert list(sliceout.slices(model)) == slices_in(model)
    for step in range(2, 5):
        train_step(model, x, optimizer)
        assert sliceout.slices(model).step == step
        assert starts(model) == starts_due(model, step)


def test_module_with_axes_of_its_own_is_not_taken_for_a_sliced_layer():
    class Flip(nn.Module):
        axes = (0, 1)

    model = nn.Sequential(Flip(), *mlp())
    assert len(sliceout.slices(model)) == 2


def test_slice_that_no_layer_uses_is_an_error():
    model = mlp()
    model.spare = sliceout.Slice(16)
    with pytest.raises(ValueError, match=r"spare = .* is used by no layer"):
        sliceout.slices(model)
    with pytest.raises(ValueError, match="Sequential has no sliced layer"):
        sliceout.slices(nn.Sequential(nn.Linear(2, 2)))


# -- other loops -------------------------------------------------------------------------------------------------------


def test_draw_by_hand_for_a_loop_without_an_optimizer():
    model, x = mlp(), data("mlp")
    for step in range(1, 8):
        loss_of(model, x).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sliceout.draw_(model)
            model.eval().train()
        assert step_of(model) == step
        assert starts(model) == starts_due(model, step)


def test_grad_scaler_that_skips_a_step_skips_the_draw():
    model, x = mlp(), data("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for bad, due in ((False, 1), (True, 1), (False, 2), (False, 3)):
        loss = loss_of(model, x * float("inf") if bad else x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert step_of(model) == due


def test_fused_optimizer_draws_even_where_it_skips_by_itself():
    """It decides on the device whether to update; asking would make the host wait. A draw too many does no harm."""
    model, x = mlp(), data("mlp")
    optimizer = AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step, bad in enumerate((False, True, False), 1):
        scaler.scale(loss_of(model, x * float("inf") if bad else x)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert step_of(model) == step
    assert all(p.isfinite().all() for p in model.parameters())


def test_lbfgs_draws_after_the_step_and_not_inside_it():
    model, x = mlp(), data("mlp")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    for step in range(1, 4):
        seen = []

        def closure(seen=seen):
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            seen.append(tuple(starts(model)))
            return loss

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step(closure)
        assert len(seen) > 1
        assert len(set(seen)) == 1
        assert step_of(model) == step


def test_compiled_optimizer_step_draws_once():
    model, twin, x = build("mlp"), build("mlp"), data("mlp")
    optimizer, plain = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    torch._dynamo.reset()
    compiled = torch.compile(optimizer.step, backend="eager")
    for step in range(1, 5):
        loss_of(model, x).backward()
        compiled()
        optimizer.zero_grad()
        train_step(twin, x, plain)
        assert step_of(model) == step
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_learning_rate_schedulers_change_nothing():
    model, x = mlp(), data("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)],
        milestones=[2],
    )
    for step in range(1, 6):
        train_step(model, x, optimizer)
        scheduler.step()
        assert step_of(model) == step


def test_slices_stay_put_while_nothing_steps():
    model, x = mlp(), data("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    train_step(model, x, optimizer)
    before = starts(model)
    for _ in range(3):
        loss_of(model, x).backward()
        model.eval()
        model(x)
        model.train()
        with torch.no_grad():
            model(x)
    other = nn.Linear(6, 3)
    train_step(other, x, SGD(other.parameters(), lr=0.1))
    assert starts(model) == before


# -- reproducible ------------------------------------------------------------------------------------------------------


def run(name: str, steps: int = 6, **settings) -> list[list[int]]:
    model, x = build(name, **settings), data(name)
    optimizer = SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        seen.append(starts(model))
        train_step(model, x, optimizer)
    return seen


@pytest.mark.parametrize("name", ALL)
def test_same_model_twice_in_one_process_draws_the_same(name):
    torch.manual_seed(1)
    first = run(name)
    torch.manual_seed(2)
    assert run(name) == first


def test_seed_changes_the_draws():
    model, other = mlp(seed=0), mlp(seed=1)
    assert [starts_due(model, step) for step in range(5)] != [starts_due(other, step) for step in range(5)]


def test_building_and_drawing_leave_the_global_random_state_alone():
    numpy = pytest.importorskip("numpy")
    with torch.random.fork_rng(devices=[]):
        plain = nn.Linear(6, 16), nn.Linear(16, 3)
        optimizer = SGD([p for m in plain for p in m.parameters()], lr=0.1)
        x = data("mlp")
        before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        hidden = sliceout.Slice(16)
        model = nn.Sequential(snn.slice_(plain[0], out_slice=hidden), snn.slice_(plain[1], in_slice=hidden))
        for _ in range(3):
            train_step(model, x, optimizer)
        sliceout.draw_(model)
        assert owner_of(hidden).step == 4
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert numpy.random.get_state()[1].tolist() == before[2]


# -- copies and garbage ------------------------------------------------------------------------------------------------


def test_copy_goes_on_by_itself_and_stays_aligned():
    model, x = build("convnet"), data("convnet")
    optimizer = SGD(model.parameters(), lr=0.1)
    train_step(model, x, optimizer)
    twin = copy.deepcopy(model)
    assert not set(slices_in(model)) & set(slices_in(twin))
    assert len(slices_in(twin)) == len(slices_in(model)) == 2  # the copy's layers share slices as the model's do
    assert starts(twin) == starts(model)
    train_step(twin, x, SGD(twin.parameters(), lr=0.1))
    assert (step_of(model), step_of(twin)) == (1, 2)
    train_step(model, x, optimizer)
    train_step(model, x, optimizer)
    assert (step_of(model), step_of(twin)) == (3, 2)
    assert starts(twin) == starts_due(twin, 2)


def test_original_goes_on_where_its_optimizer_was_copied_too():
    model, x = mlp(), data("mlp")
    pair = nn.ModuleList([model]), SGD(model.parameters(), lr=0.1)
    train_step(model, x, pair[1])
    (twin,), optimizer = copy.deepcopy(pair)
    for step in range(2, 5):
        train_step(twin, x, optimizer)
        assert (step_of(model), step_of(twin)) == (1, step)


def test_trained_model_is_freed_without_waiting_for_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        model, x = build("convnet"), data("convnet")
        optimizer = SGD(model.parameters(), lr=0.1)
        train_step(model, x, optimizer)
        watched = [weakref.ref(m) for m in model.modules()] + [weakref.ref(p) for p in model.parameters()]
        del optimizer
        del model
        assert [ref() for ref in watched if ref() is not None] == []
    finally:
        gc.enable()


def test_nothing_is_remembered_of_models_that_are_gone():
    gc.collect()
    sizes = len(drawing.layers), len(stepping._held)
    for _ in range(3):
        model, x = mlp(), data("mlp")
        train_step(model, x, *split(model))
        family = weakref.ref(slices_in(model)[0].owner)
        del model
    gc.collect()
    assert family() is None
    assert len(drawing.layers) == sizes[0]
    assert len(stepping._held) <= sizes[1]


# -- warnings ----------------------------------------------------------------------------------------------------------


def sgd_without_torch(model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model, x).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.grad = None


def test_model_that_trains_and_is_never_redrawn_warns_once():
    model, x = mlp(), data("mlp")
    sliceout.slices(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            sgd_without_torch(model, x)
    (warning,) = caught
    assert "never been redrawn" in str(warning.message)
    assert "sliceout.draw_(model)" in str(warning.message)


def test_compiled_model_that_is_never_redrawn_warns_at_eval():
    model, x = mlp(), data("mlp")
    sliceout.slices(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "sliceout")
        for _ in range(8):
            loss_of(compiled, x).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            compiled.eval()
            compiled(x)
            compiled.train()
            for p in model.parameters():
                p.grad = None
    assert len([w for w in caught if "never been redrawn" in str(w.message)]) == 1


def loading_often(model, x):
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(10):
        model.load_state_dict(saved)
        model.train()
        loss_of(model, x).backward()
        model.eval()
        model(x)


def accumulating(model, x):
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(10):
            loss_of(model, x).backward()
        optimizer.step()


def only_evaluating(model, x):
    for _ in range(10):
        model.eval()
        model(x)
        model.train()


def averaging(model, x):
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        train_step(model, x, optimizer)
        average.update_parameters(model)
        average.eval()
        average(x)
        average.train()


def copying(model, x):
    for _ in range(10):
        model = copy.deepcopy(model)
        train_step(model, x, SGD(model.parameters(), lr=0.1))


def initialising(model, x):
    for _ in range(10):
        for p in model.parameters():
            nn.init.normal_(p)
    train_step(model, x, SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    "use", [loading_often, accumulating, only_evaluating, averaging, copying, initialising], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", ALL)
def test_no_warning_where_nothing_is_wrong(name, use):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(build(name), data(name))

"""A captured step does what the eager step does, and says what it cannot do."""

from __future__ import annotations

import copy
import sys
import weakref
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import sliceout
from sliceout.capture import CapturedStep, Snapshot, _State, free_workspaces

captures = sys.modules["sliceout.capture"]  # whose name in the package is the function's
needs_cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
OPTIMIZERS = {  # rates that float32 holds exactly: kernels read them in that precision
    "sgd": lambda p: torch.optim.SGD(p, 2**-4, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 2**-7),
    "adamw fused": lambda p: torch.optim.AdamW(p, 2**-7, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, 2**-7),  # begins with a product of 1
}
BEGINNINGS = OPTIMIZERS | {
    "amsgrad": lambda p: torch.optim.Adam(p, 2**-7, amsgrad=True),
    "rprop": lambda p: torch.optim.Rprop(p, 2**-7),
    "asgd": lambda p: torch.optim.ASGD(p, 2**-7),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 2**-7, centered=True, momentum=0.9),
    "adadelta": lambda p: torch.optim.Adadelta(p, 2**-3),
    "plain": lambda p: torch.optim.SGD(p, 2**-7),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    convs = nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()
    model = nn.Sequential(*convs, nn.Flatten(), nn.Linear(512, 5))
    sliceout.convert_(model, 0.5, example_inputs=torch.zeros(2, 3, 8, 8))
    return model.train()


def batches(n: int, device: str) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [
        (torch.randn(16, 3, 8, 8, device=device, dtype=torch.float64), torch.randint(0, 5, (16,), device=device))
        for _ in range(n)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("compiled", [False, True])
@needs_cuda[0]
@needs_cuda[1]
def test_captured_training_equals_eager_training(name: str, compiled: bool) -> None:
    eager = network().double().cuda()
    captured = copy.deepcopy(eager)
    data = batches(8, "cuda")
    one, other = OPTIMIZERS[name](eager.parameters()), OPTIMIZERS[name](captured.parameters())
    one.param_groups[0]["capturable"] = True  # the same arithmetic: its step count is a float32 on the device
    before = copy.deepcopy(captured.state_dict())
    model = torch.compile(captured) if compiled else captured
    step = sliceout.capture(model, nn.functional.cross_entropy, other, data[0])
    for key, value in captured.state_dict().items():
        assert torch.equal(value, before[key]), f"capturing changed {key}"
    starts = set()
    for i, (x, y) in enumerate(data):
        if i == 4:  # a new learning rate must take effect in both
            for group in (*one.param_groups, *other.param_groups):
                group["lr"] = 2**-8
        one.zero_grad()
        loss = nn.functional.cross_entropy(eager(x), y)
        loss.backward()
        one.step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-9, atol=1e-9)
        starts.add(tuple(s.start.item() for s in sliceout.slices(captured)))
        assert [s.start_on_host for s in sliceout.slices(captured)] == [s.start.item() for s in sliceout.slices(eager)]
    assert len(starts) > 3
    for (key, a), b in zip(eager.state_dict().items(), captured.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8, msg=key)


@needs_cuda[0]
@needs_cuda[1]
def test_a_batch_of_another_shape_is_refused() -> None:
    model = network().double().cuda()
    ((x, y),) = batches(1, "cuda")
    step = sliceout.capture(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), (x, y))
    with pytest.raises(ValueError, match=r"shape \(7, 3, 8, 8\).*captured for \(16, 3, 8, 8\)"):
        step(x[:7], y[:7])


@needs_cuda[0]
@needs_cuda[1]
def test_a_loaded_checkpoint_takes_effect() -> None:
    model = network().double().cuda()
    x, y = batches(1, "cuda")[0]
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = sliceout.capture(model, nn.functional.cross_entropy, optimizer, (x, y))
    for _ in range(3):
        step(x, y)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))  # without the position of the draws
    at = sliceout.slices(model).step
    outcomes = []
    for _ in range(2):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        sliceout.slices(model).seek_(at)
        outcomes.append([step(x, y).clone() for _ in range(4)])
    torch.testing.assert_close(*outcomes, rtol=1e-9, atol=1e-9)  # convolutions add in any order


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("name", BEGINNINGS)
def test_what_the_warm_up_did_to_an_optimizer_is_undone(name: str, begun: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    twin = copy.deepcopy(model)
    ours, theirs = BEGINNINGS[name](model.parameters()), BEGINNINGS[name](twin.parameters())
    data = torch.randn(6, 8, 4)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, xs: Tensor) -> None:
        for x in xs:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    if begun:
        train(model, ours, data[:2])
        train(twin, theirs, data[:2])
    before = Snapshot(model, ours)
    train(model, ours, data[2:4])
    names = [list(s) for s in ours.state.values()]
    before.restore()
    assert [sorted(s) for s in ours.state.values()] == [sorted(n) for n in names], "the graph needs somewhere to write"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    train(model, ours, data[4:])
    train(twin, theirs, data[4:])
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_loaded_state_is_copied_to_where_the_graph_updates_it() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([p])
    p.grad = torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    state = _State(optimizer)
    before = dict(optimizer.state[p])
    optimizer.step()
    state.follow(optimizer)
    assert before["step"].item() == 2, "nothing was loaded"
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["exp_avg"] is not before["exp_avg"]
    state.follow(optimizer)
    for name, tensor in before.items():
        assert optimizer.state[p][name] is tensor
        assert torch.equal(tensor, saved["state"][0][name])
    optimizer.load_state_dict({**saved, "state": {}})  # of a run that had not begun
    state.follow(optimizer)
    assert optimizer.state[p]["step"] is before["step"]
    assert before["exp_avg"].abs().sum() == before["step"] == 0


def test_a_loaded_run_that_had_not_begun_begins_as_the_optimizer_does() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.NAdam([p])
    fresh = copy.deepcopy(optimizer.state_dict())
    p.grad = torch.ones(3)
    optimizer.step()
    state, product = _State(optimizer), optimizer.state[p]["mu_product"]
    assert product != 1
    optimizer.load_state_dict(fresh)
    state.follow(optimizer)
    assert optimizer.state[p]["mu_product"] is product
    assert product == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, o, b: (m, o, b), "on a GPU"),
        (lambda m, o, b: (m, o, b[0]), "expected a tuple"),
    ],
)
def test_what_cannot_be_captured_is_told(change, message: str) -> None:
    model = network()
    batch = batches(1, "cpu")[0]
    model, optimizer, batch = change(model, torch.optim.SGD(model.parameters(), 0.1), batch)
    with pytest.raises(ValueError, match=message):
        sliceout.capture(model, nn.functional.cross_entropy, optimizer, batch)


def test_pausing_draws_leaves_the_slices() -> None:
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    family = sliceout.slices(model)
    x, y = batches(1, "cpu")[0]
    with sliceout.stepping.paused():
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert family.step == 0
    optimizer.step()
    assert family.step == 1


@needs_cuda[0]
@needs_cuda[1]
def test_a_captured_step_holds_what_it_replays_and_nothing_of_the_warm_up() -> None:
    """Momentum and gradients are 17 MiB each here: a snapshot (17) or a workspace (32) that stays would show."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 8)).cuda()
    x, y = torch.randn(16, 64, device="cuda"), torch.arange(16, device="cuda") % 8
    optimizer = torch.optim.SGD(model.parameters(), 2**-10, momentum=0.9, fused=True)
    free_workspaces()
    before = torch.cuda.memory_allocated()
    steps = [sliceout.capture(model, nn.functional.cross_entropy, optimizer, (x, y)) for _ in range(2)]
    held = torch.cuda.memory_allocated() - before
    size = sum(p.nbytes for p in model.parameters())
    assert held < 2.2 * size + 2**22
    for step in steps:  # the second capture must not have taken anything that the first one replays
        losses = torch.stack([step(x, y).clone() for _ in range(20)])
        assert losses.isfinite().all()
        assert losses[-1] < losses[0]


# -- widths that change ------------------------------------------------------------------------------------------------


class Replayed:
    """A graph without a GPU: its replays run the step, and its warm-up leaves as many traces as a real one."""

    alive: ClassVar[weakref.WeakSet[Replayed]] = weakref.WeakSet()

    def __init__(self, step, undo, device, warmup) -> None:
        before = [graph for graph in self.alive if graph.step.__self__ is step.__self__]
        assert not before, "to be freed first"
        self.alive.add(self)
        with sliceout.stepping.paused():
            for _ in range(warmup):
                step()
        undo()
        self.step = step

    def replay(self) -> Tensor:
        with sliceout.stepping.paused():
            return self.step()


def without_gpu(model, optimizer, batch, monkeypatch):
    monkeypatch.setattr(captures, "Graph", Replayed)
    return CapturedStep(model, nn.functional.cross_entropy, optimizer, batch, None, 2)


def growing_network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    convs = nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()
    model = nn.Sequential(*convs, nn.Flatten(), nn.Dropout(dropout), nn.Linear(512, 5))
    sliceout.convert_(model, 0.5, example_inputs=torch.zeros(2, 3, 8, 8), sampling="prefix")
    return model.train()


FUSED = {
    "sgd": lambda p: torch.optim.SGD(p, 2**-4, momentum=0.9, weight_decay=1e-3, nesterov=True, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 2**-7, fused=True),
}
CHANGES = {
    "grow": lambda m: sliceout.Grow(m, {0: 0.5, 0.3: 0.25, 0.6: 0.0}),
    "tail": lambda m: sliceout.Tail(m, 0.5),
    "warm-up": lambda m: sliceout.WarmUp(m, 0.5, 2, tail=0.2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FUSED)
def test_a_change_of_rate_is_followed_and_changes_nothing_else(name, change, monkeypatch, caplog) -> None:
    """Weights, statistics, optimizer state, draws, learning rates and random numbers: all as in eager training."""
    eager = growing_network(0.2).double()
    captured = copy.deepcopy(eager)
    one, other = FUSED[name](eager.parameters()), FUSED[name](captured.parameters())
    schedules = CHANGES[change](eager), CHANGES[change](captured)
    data, random = batches(10, "cpu"), torch.Generator()
    for schedule in schedules:
        schedule.step(0.0)
    with caplog.at_level("INFO", "sliceout.capture"):
        step = without_gpu(captured, other, data[0], monkeypatch)
        for i, (x, y) in enumerate(data):
            for schedule, optimizer in zip(schedules, (one, other), strict=True):
                schedule.step(i, 10)
                optimizer.param_groups[0]["lr"] = 2 ** -(5 + i // 3)  # at a change of rate as well
            seed = random.manual_seed(i).get_state()
            torch.set_rng_state(seed)
            one.zero_grad()
            loss = nn.functional.cross_entropy(eager(x), y)
            loss.backward()
            one.step()
            torch.set_rng_state(seed)
            torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-12, atol=1e-12)
            assert sliceout.slices(captured).step == sliceout.slices(eager).step == i + 1
    assert step.captures == schedules[0].sets == len(caplog.messages)
    n = step.captures
    assert [m.split(":")[0] for m in caplog.messages] == [f"captured graph {i} of {n}" for i in range(1, n + 1)]
    for (key, a), b in zip(eager.state_dict().items(), captured.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12, msg=key)
    for p, q in zip(eager.parameters(), captured.parameters(), strict=True):
        for key, a in one.state[p].items():
            torch.testing.assert_close(other.state[q][key], a, rtol=1e-12, atol=1e-12, msg=key)


def test_a_graph_is_made_again_only_for_other_widths(monkeypatch) -> None:
    model = growing_network()
    optimizer, batch = FUSED["adamw"](model.parameters()), (torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))
    step = without_gpu(model, optimizer, batch, monkeypatch)
    for make, expected in [
        (lambda s: s.rerate_(0.5), 1), (lambda s: s.rerate_(0.51), 1),  # the same width
        (lambda s: s.rerate_(0.25), 2), (lambda s: setattr(s, "on", False), 3), (lambda s: s.rerate_(0.5), 3),
        (lambda s: setattr(s, "on", True), 4),
    ]:  # fmt: skip
        for s in sliceout.slices(model):
            make(s)
        step(*batch), step(*batch)
        assert step.captures == expected
    for s in sliceout.slices(model):
        s.entered = ((16, 0), (24, 1), (16, 2))  # a checkpoint of another history: counts are part of the graph
    step(*batch)
    assert step.captures == 5


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@needs_cuda[0]
@needs_cuda[1]
def test_captured_training_that_grows_equals_eager_training(name: str, compiled: bool) -> None:
    eager = growing_network().cuda()
    captured = copy.deepcopy(eager)
    one, other = OPTIMIZERS[name](eager.parameters()), OPTIMIZERS[name](captured.parameters())
    one.param_groups[0]["capturable"] = True
    schedules = CHANGES["grow"](eager), CHANGES["grow"](captured)
    data = [(x.float(), y) for x, y in batches(10, "cuda")]
    for schedule in schedules:
        schedule.step(0.0)
    model = torch.compile(captured) if compiled else captured
    step = sliceout.capture(model, nn.functional.cross_entropy, other, data[0])
    for i, (x, y) in enumerate(data):
        for schedule in schedules:
            schedule.step(i, 10)
        one.zero_grad()
        loss = nn.functional.cross_entropy(eager(x), y)
        loss.backward()
        one.step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-3, atol=1e-4)
    assert step.captures == 3
    for (key, a), b in zip(eager.state_dict().items(), captured.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-2, atol=1e-3, msg=key)


@needs_cuda[0]
@needs_cuda[1]
def test_graphs_of_other_widths_do_not_pile_up() -> None:
    model = growing_network().cuda()
    ((x, y),) = batches(1, "cuda")
    x = x.float()
    step = sliceout.capture(model, nn.functional.cross_entropy, FUSED["adamw"](model.parameters()), (x, y))
    held = []
    for i in range(6):
        for s in sliceout.slices(model):
            s.rerate_(0.25 if i % 2 else 0.5)
        step(x, y)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] <= held[1] + 2**16
    assert step.captures == 6

"""The Triton kernels against the definition: run by test_triton_interpreter.py, natively or through the interpreter.

Triton decides when it is imported whether it interprets, so the interpreter needs a process of its own::

    TRITON_INTERPRET=1 pytest tests/kernel_checks.py
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import os
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from opcases import Case, cases, listed
from sliceout import Slice, draw_, nn, slices
from sliceout.compact import kernels as updates
from sliceout.compact import optimizers as optim
from sliceout.ops import gather, kernels, multi_tensor, prefetch, tables, without_views
from sliceout.ops.placement import empty_small, memory_format, small_shape
from test_parts import only_part, stacked_cases

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
CASES = [c for c in listed() if DEVICE == "cuda" or torch.Size(c.shape).numel() < 100_000]


def fits(case: Case) -> bool:
    """No subsets: those are taken by plain torch. No transposed weights: their owner makes them contiguous first."""
    return case.description.simple and case.layout != "transposed"


CASES = [c for c in CASES if fits(c)]


def take(case: Case, full: torch.Tensor) -> torch.Tensor:
    """By the kernel, into memory that holds NaN before."""
    small = torch.full_like(empty_small(full, *case.args[2:4], case.target), torch.nan)
    multi_tensor.take([piece(case, full, small)])
    return small


def put(case: Case, small: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    full = torch.full_like(like, torch.nan, memory_format=memory_format(like))
    multi_tensor.put([piece(case, full, small)])
    return full


def compare(case: Case) -> None:
    """take and put of one case."""
    case.to(DEVICE)
    full = case.full(DEVICE, coarse=DEVICE == "cpu")  # the interpreter truncates to bfloat16 where the GPU rounds
    small = take(case, full)
    interpreted = {"truncates": DEVICE == "cpu"}
    case.check_small(small, full, "take", **interpreted)
    assert small.is_contiguous(memory_format=memory_format(full))

    grad = torch.randn(small.shape, dtype=torch.float64).to(case.result_dtype).to(DEVICE)
    for layout in ("contiguous", case.layout):  # a gradient may arrive in either
        grad = Case(case.shape, None, None, layout).lay_out(grad)
        case.check_full(put(case, grad, full), grad, f"put from {layout}", **interpreted)


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(repr, CASES))
def test_kernels_agree_with_the_definition_on_listed_cases(number):
    compare(CASES[number])


bf16 = torch.bfloat16


@settings(max_examples=60)
@given(case=cases(dtypes=[(torch.float64, None), (torch.float32, None), (torch.float32, bf16), (bf16, None)]))
def test_kernels_agree_with_the_definition(case):
    torch.manual_seed(0)
    if fits(case):
        compare(case)


@pytest.mark.parametrize("which", ["full", "small"])
def test_memory_that_begins_anywhere(which):
    """Entries are moved side by side only where both tensors begin at multiples of 16 bytes."""
    axis = Slice(16, 0.5, align=8).axis()
    Case((16, 8), axis, None).to(DEVICE)
    memory = torch.randn(16 * 8 + 1, device=DEVICE)
    at = 1 if which == "full" else 0
    full = memory[at : at + 128].view(16, 8)
    around = torch.full((65,), torch.nan, device=DEVICE)
    small = around[1 - at :][:64].view(8, 8)
    multi_tensor.take([multi_tensor.Piece(full, small, (axis.slice.start, axis.geometry), None)])
    assert torch.equal(small, full[axis.kept.to(DEVICE)])
    assert int(around.isnan().sum()) == 1


def test_every_start_of_a_ring_lands_where_it_should():
    """The kernel reads the start from memory: one launch configuration, every draw."""
    s = Slice(12, 0.5)
    case = Case((12, 12), s.axis(), s.axis(), scale_rows=True).to(DEVICE)
    full = case.full(DEVICE)
    for start in s.starts:
        s.start.fill_(start)
        s.start_on_host = start
        small = take(case, full)
        case.check_small(small, full, f"start {start}")
        case.check_full(put(case, small, full), small, f"start {start}")


def test_nan_outside_the_slice_never_leaks():
    for case in CASES:
        case.to(DEVICE)
        kept = case.put(torch.ones(small_shape(torch.Size(case.shape), *case.args[2:4]))) != 0
        full = case.lay_out(torch.where(kept.to(DEVICE), case.full(DEVICE), torch.nan))
        assert take(case, full).isfinite().all(), case


def test_empty_tensors_are_left_alone():
    case = Case((0, 8), None, Slice(8).axis()).to(DEVICE)
    full = case.full(DEVICE)
    assert take(case, full).shape == (0, 4)
    assert put(case, torch.empty(0, 4, dtype=torch.float64, device=DEVICE), full).shape == (0, 8)


@settings(max_examples=40)
@given(stacked=stacked_cases())
def test_parts_are_taken_apart_and_added_up(stacked):
    """A take for every part, and one put that adds up all of them: as one part after the other."""
    case, parts = stacked
    case.to(DEVICE)
    full = case.full(DEVICE, coarse=DEVICE == "cpu")
    layout = gather.TakeLayout(full, case.description, case.target, parts)
    smalls = torch.full_like(empty_small(full, *case.args[2:4], case.target, parts), torch.nan)
    multi_tensor.take(layout.take_pieces(full, smalls))
    grads = torch.randn(smalls.shape, dtype=torch.float64).to(smalls.dtype).to(DEVICE)
    got = torch.full_like(full, torch.nan)
    multi_tensor.put([layout.put_piece(got, grads)])
    expected = torch.zeros(case.shape, dtype=torch.float64)
    for part in range(parts):
        with only_part([a.slice for a in case.axes if a is not None], part):
            case.check_small(smalls[part], full, f"part {part}", truncates=DEVICE == "cpu")
            expected += case.put(grads[part])
    tolerance = 1e-12 if case.dtype == torch.float64 else 2e-6
    torch.testing.assert_close(got.cpu().double(), expected, rtol=tolerance, atol=tolerance)


# -- many tensors in one launch ----------------------------------------------------------------------------------------


def piece(case: Case, full: torch.Tensor, small: torch.Tensor) -> multi_tensor.Piece:
    row_start, col_start, rows, cols, row_scale, col_scale = case.args
    return multi_tensor.Piece(
        full,
        small,
        None if row_start is None else (row_start, rows),
        None if col_start is None else (col_start, cols),
        row_scale=row_scale,
        col_scale=col_scale,
    )


def compare_many(chosen: list[Case]) -> None:
    fulls = [c.to(DEVICE).full(DEVICE, coarse=DEVICE == "cpu") for c in chosen]
    smalls = [
        torch.full_like(empty_small(f, *c.args[2:4], c.target), torch.nan) for c, f in zip(chosen, fulls, strict=True)
    ]
    multi_tensor.take([piece(c, f, s) for c, f, s in zip(chosen, fulls, smalls, strict=True)])
    interpreted = {"truncates": DEVICE == "cpu"}
    for c, f, s in zip(chosen, fulls, smalls, strict=True):
        c.check_small(s, f, "many.take", **interpreted)
    grads = [torch.randn(s.shape, dtype=torch.float64).to(s.dtype).to(DEVICE) for s in smalls]
    targets = [torch.full_like(f, torch.nan) for f in fulls]
    multi_tensor.put([piece(c, t, g) for c, t, g in zip(chosen, targets, grads, strict=True)])
    for c, t, g in zip(chosen, targets, grads, strict=True):
        c.check_full(t, g, "many.put", **interpreted)


def test_many_takes_and_puts_in_one_launch_agree_with_the_definition():
    torch.manual_seed(0)
    compare_many([c for c in CASES if fits(c)])


@settings(max_examples=30)
@given(
    chosen=st.lists(
        cases(dtypes=[(torch.float64, None), (torch.float32, None), (torch.float32, bf16)]), min_size=1, max_size=4
    )
)
def test_any_many_takes_and_puts_agree_with_the_definition(chosen):
    torch.manual_seed(0)
    compare_many([c for c in chosen if fits(c)])


ADAM = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.01, "eps": 1e-8}
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": False}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    "change", [{}, {"amsgrad": True}, {"maximize": True}, {"decoupled": True}, {"betas": (0.0, 0.9)}]
)
def test_slices_are_updated_by_adam_and_nothing_else_is(change, on_device):
    settings = {**ADAM, "decoupled": False, "amsgrad": False, "maximize": False, **change}
    flat = {k: v for k, v in settings.items() if k != "decoupled"}
    reference_class = torch.optim.AdamW if settings["decoupled"] else torch.optim.Adam
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if settings["amsgrad"] else [])]
    check_updates(settings, updates.adam, lambda p: reference_class([p], **flat), names, True, on_device)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("change", [{}, {"nesterov": True}, {"momentum": 0}, {"maximize": True}])
def test_slices_are_updated_by_sgd_and_nothing_else_is(change, on_device):
    settings = {**SGD, "maximize": False, **change}
    names = ["momentum_buffer"] if settings["momentum"] else []
    check_updates(settings, updates.sgd, lambda p: torch.optim.SGD([p], **settings), names, False, on_device)


def check_updates(settings, update, make, names, counts, on_device) -> None:
    """Three updates of several tensors against torch's optimizer on each slice by itself, with everything else NaN."""
    torch.manual_seed(0)
    plain = {"dtype": torch.float32, "target": None, "scale_rows": False, "scale_cols": False}
    chosen = [dataclasses.replace(c, **plain) for c in CASES if fits(c) and min(c.shape) > 0]
    assert len(chosen) > 3
    device = DEVICE if on_device else "cpu"
    rate = torch.tensor(settings["lr"], device=DEVICE) if on_device else settings["lr"]
    pieces, oracles = [], []
    for case in chosen:
        full = case.to(DEVICE).full(DEVICE)
        state = tuple(torch.zeros_like(full) for _ in names)
        p = torch.nn.Parameter(case.take(full).float())
        grad = empty_small(full, *case.args[2:4])
        made = piece(case, full, grad)
        made.state, made.step = state, torch.zeros((), device=device) if counts else None
        pieces.append(made)
        oracles.append((p, make(p), full.clone()))
    for _ in range(3):
        for made, (p, optimizer, _) in zip(pieces, oracles, strict=True):
            made.small.copy_(torch.randn(made.small.shape))
            p.grad = made.small.cpu() * 2.0
            made.gain = 2.0
            optimizer.step()
            if counts:
                made.step += 1
        update(updates.UpdatePlan(pieces), **{**settings, "lr": rate}, found_inf=None, grad_scale=None)
    for case, made, (p, optimizer, before) in zip(chosen, pieces, oracles, strict=True):
        torch.testing.assert_close(case.take(made.full).float(), p.detach(), rtol=2e-5, atol=2e-6)
        for name, state in zip(names, made.state, strict=True):
            torch.testing.assert_close(case.take(state).float(), optimizer.state[p][name], rtol=2e-5, atol=2e-6)
        kept = case.put(torch.ones_like(p)).bool().to(DEVICE)
        assert torch.equal(made.full[~kept], before[~kept])
        assert all((state[~kept] == 0).all() for state in made.state)


def test_an_overflow_leaves_everything_alone_and_a_scale_is_divided_out():
    s = Slice(8, 0.5)
    case = Case((8, 8), s.axis(), s.axis(), dtype=torch.float32).to(DEVICE)
    results = []
    for inf, scale in ((0.0, 1.0), (0.0, 4.0), (1.0, 1.0)):
        full = torch.ones(8, 8, device=DEVICE)
        made = piece(case, full, torch.full((4, 4), 0.5 * scale, device=DEVICE))
        made.state, made.step = (torch.zeros_like(full), torch.zeros_like(full)), torch.ones((), device="cpu")
        flags = {"decoupled": False, "amsgrad": False, "maximize": False}
        tensors = {"found_inf": torch.tensor(inf, device=DEVICE), "grad_scale": torch.tensor(scale, device=DEVICE)}
        updates.adam(updates.UpdatePlan([made]), **ADAM, **flags, **tensors)
        results.append(full)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], torch.ones_like(results[0]))
    assert torch.equal(results[2], torch.ones_like(results[2]))


# -- all slices of a step in one launch --------------------------------------------------------------------------------


def number(pieces: list[multi_tensor.Piece] | multi_tensor.LaunchPlan) -> int:
    return len(pieces) if isinstance(pieces, list) else sum(len(group.members) for group in pieces.groups)


@pytest.fixture
def gathering(monkeypatch):
    """Fetch slices together on the CPU as well, through the interpreter; counts the launches."""
    launches = []

    def counted(kind):
        launch = getattr(multi_tensor, kind)
        return lambda pieces: (launches.append((kind, number(pieces))), launch(pieces))[1]

    for kind in ("take", "put"):
        monkeypatch.setattr(multi_tensor, kind, counted(kind))
    if DEVICE == "cpu":
        monkeypatch.setattr(prefetch, "usable", lambda full: True)
    return launches


def network(grads: str, sampling: str, memory_format: torch.memory_format) -> torch.nn.Module:
    torch.manual_seed(0)
    a, b = (Slice(n, 0.5, sampling=sampling, align=2, grads=grads) for n in (12, 16))
    made = torch.nn.Sequential(
        nn.Conv2d(3, 12, 3, out_slice=a),
        nn.BatchNorm2d(12, slice=a),
        torch.nn.ReLU(),
        nn.Conv2d(12, 16, 1, in_slice=a, out_slice=b),
        nn.BatchNorm2d(16, slice=b),
        torch.nn.Flatten(),
        nn.Linear(64, 5, in_slice=b.axis(inner=4)),
    ).double()
    return made.to(DEVICE).to(memory_format=memory_format)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("sampling", ["circular", "window"])
@pytest.mark.parametrize("grads", ["dense", "compact"])
def test_fetching_all_slices_together_changes_nothing_but_the_launches(
    gathering, monkeypatch, grads, sampling, memory_format
):
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    outcomes = []
    for together in (False, True):
        if not together:
            with monkeypatch.context() as apart:
                apart.setattr(prefetch, "take", lambda *args: None)
                outcomes.append(trained(network(grads, sampling, memory_format), x))
            assert not gathering
        else:
            outcomes.append(trained(network(grads, sampling, memory_format), x))
    for (name, one), (_, other) in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    takes = [n for kind, n in gathering if kind == "take"]
    puts = [n for kind, n in gathering if kind == "put"]
    assert max(takes) >= 8, "weights, biases and factors of all layers"
    together = [n for n in takes if n > 1]
    assert len(together) <= 6 * 3 * 2, "parameters and statistics, three passes a step"
    assert len(takes) - len(together) <= 3 * 12, "one by one in the first pass, and when slices have just met"
    assert len([n for n in puts if n > 1]) == (0 if grads == "compact" else 2 * 6), "twice a step"
    assert not puts or grads == "dense"


def by_parts() -> torch.nn.Module:
    torch.manual_seed(0)
    a, b = Slice(16, 0.5, parts=4, align=2), Slice(24, 0.5, sampling="window", parts=4, align=8)
    return torch.nn.Sequential(
        nn.Linear(6, 16, out_slice=a), nn.LayerNorm(16, slice=a), torch.nn.GELU(),
        nn.Linear(16, 24, in_slice=a, out_slice=b), torch.nn.Tanh(), nn.Linear(24, 5, in_slice=b),
    ).double().to(DEVICE)  # fmt: skip


@pytest.mark.parametrize("samples", [8, 6, 5])  # in four parts, in three, in one
def test_fetching_the_slices_of_all_parts_together_changes_nothing_but_the_launches(gathering, monkeypatch, samples):
    x = torch.randn(samples, 6, dtype=torch.float64, device=DEVICE)
    with monkeypatch.context() as apart:
        apart.setattr(prefetch, "take", lambda *args: None)
        expected = trained(by_parts(), x)
    got = trained(by_parts(), x)
    for (name, one), (_, other) in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    parts = {8: 4, 6: 3, 5: 1}[samples]
    assert max(n for kind, n in gathering if kind == "take") >= 6 * parts, "weights, biases and factors of each part"
    assert max(n for kind, n in gathering if kind == "put") >= 6, "added up by one launch"


@pytest.mark.parametrize("stored", ["rows", "columns"])
def test_gradients_of_all_parts_are_put_as_they_come(gathering, monkeypatch, stored):
    """Without copies, and by the table of the step before: that needs them to lie as what was fetched does."""
    model, x, usual = by_parts(), torch.randn(8, 6, dtype=torch.float64, device=DEVICE), []
    if stored == "columns":
        a, b = model[0].axes["out"], model[3].axes["out"]
        made = nn.Conv1D(16, 6, out_slice=a), nn.Conv1D(24, 16, in_slice=a, out_slice=b), nn.Conv1D(5, 24, in_slice=b)
        for i, layer in zip((0, 3, 5), made, strict=True):
            model[i] = layer.double().to(DEVICE)
    ask = gather.BatchLayout.usual
    monkeypatch.setattr(gather.BatchLayout, "usual", lambda *args: usual.append(ask(*args)) or usual[-1])
    for _ in range(3):
        draw_(model)
        model(x).square().sum().backward()
    assert len(usual) >= 2
    assert all(usual)


def test_a_backward_after_the_next_draw_adds_up_the_parts_of_its_forward(gathering):
    model, x = by_parts(), torch.randn(8, 6, dtype=torch.float64, device=DEVICE)
    for _ in range(2):
        model(x).sum().backward()
    parameters = list(model.parameters())
    loss = model(x).square().sum()
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    draw_(model)
    for one, other in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def trained(model: torch.nn.Module, x: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Six steps with accumulated gradients, clipping and an evaluation in between; everything that can differ."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)  # rounding is not blown up to a step
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        for part in x.split(2):
            loss = model(part).square().mean()
            loss.backward()
            seen.append((f"loss {step}", loss.detach()))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen.append((f"norm {step}", norm))
        seen += [(f"{n} grad {step}", p.grad + 0) for n, p in model.named_parameters()]
        optimizer.step()
        with torch.no_grad():
            seen.append((f"no_grad {step}", model(x)))
        model.eval()
        seen.append((f"eval {step}", model(x).detach()))
        model.train()
    return [*seen, *((n, t.detach().clone()) for n, t in model.state_dict().items())]


def test_what_was_fetched_is_fetched_again_when_a_parameter_changes(gathering):
    model = network("dense", "circular", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    for _ in range(2):
        model(x)
    before = model(x)
    with torch.no_grad():
        model[6].weight.mul_(2)
        model[6].bias.mul_(2)
    torch.testing.assert_close(model(x), 2 * before)
    model[6].weight.data = model[6].weight.data / 2  # another memory, and no version counts it
    model[6].bias.data = model[6].bias.data / 2
    torch.testing.assert_close(model(x), before)
    model[6].weight.data.mul_(2)  # the same memory, and no version counts it
    model[6].bias.data.mul_(2)
    torch.testing.assert_close(model(x), 2 * before)


def test_second_derivatives_of_fetched_slices(gathering):
    model = network("dense", "circular", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    weight = model[6].weight
    for _ in range(3):
        (first,) = torch.autograd.grad(model(x).square().sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), weight)
    assert gathering
    assert second.abs().sum() > 0


def agrees_with_taking_apart(model: torch.nn.Module, x: torch.Tensor, monkeypatch) -> torch.Tensor:
    """Output and gradients of ``model``, which must be those of slices that are taken one by one."""
    results = []
    for together in (True, False):
        model.zero_grad()
        with monkeypatch.context() as apart:
            if not together:
                apart.setattr(prefetch, "take", lambda *args: None)
            y = model(x)
            y.square().sum().backward()
        results.append([y.detach(), *(None if p.grad is None else p.grad + 0 for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3 if one.dtype == torch.float32 else 1e-9, atol=1e-4)
    return results[0][0]


@pytest.mark.parametrize("grads", ["dense", "compact"])
def test_parameters_may_change_in_kind(gathering, monkeypatch, grads):
    """The same Parameter objects with another memory format or dtype, or with a slice of another width."""
    model = network(grads, "window", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    for _ in range(2):
        agrees_with_taking_apart(model, x, monkeypatch)
    for change in (
        lambda: model.to(memory_format=torch.channels_last),
        lambda: model.float(),
        lambda: [s.rerate_(0.25) for s in model[3].slices],
        lambda: setattr(model[3].weight, "data", model[3].weight.data.transpose(0, 1).contiguous().transpose(0, 1)),
        lambda: setattr(model[3].weight, "data", model[3].weight.data.repeat(1, 1, 1, 2)[..., :1]),
    ):
        before = len(gathering)
        change()
        x = x.to(model[0].weight.dtype)
        assert agrees_with_taking_apart(model, x, monkeypatch).dtype == x.dtype
        assert len(gathering) > before


def test_a_frozen_parameter_that_is_thawed_gets_its_gradient(gathering):
    """As in adversarial training: both passes see the same draw."""
    model = network("dense", "circular", torch.contiguous_format)
    slices(model)
    model[1].eval(), model[4].eval()  # statistics that change are fetched anew, and what is with them
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    for trained in (False, False, True, False, True):
        model.requires_grad_(trained)
        model(x).sum().backward()
        assert all((p.grad is not None) == trained for p in model.parameters())
        model.zero_grad()


def test_passes_in_inference_mode_leave_nothing_that_autograd_may_not_see(gathering):
    model = network("dense", "circular", torch.contiguous_format)
    model[3].weight.requires_grad_(False)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    for _ in range(2):
        with torch.inference_mode():
            model(x)
        with torch.no_grad():
            model(x)
        model(x).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("sampling", ["circular", "window"])
def test_recomputed_activations_from_the_first_step_on(gathering, sampling, use_reentrant):
    model, twin = (network("dense", sampling, torch.contiguous_format) for _ in range(2))
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    for _ in range(3):
        y = checkpoint(model[:3], x, use_reentrant=use_reentrant)
        checkpoint(model[3:], y, use_reentrant=use_reentrant).square().sum().backward()
        twin(x).square().sum().backward()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        for net in (model, twin):
            net.zero_grad()
            draw_(net)


def test_hooks_of_parameters_that_a_pass_leaves_out_do_not_run(gathering):
    model = network("dense", "circular", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    slices(model)
    model(x)
    seen = []
    model[6].weight.register_hook(lambda g: seen.append(float(g.sum())))
    for _ in range(2):
        model[:3](x).sum().backward()
    assert not seen
    model(x).sum().backward()
    assert len(seen) == 1


def test_whoever_watches_operations_sees_them(gathering):
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = network("dense", "circular", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    model(x)
    before = len(gathering)
    with Watching():
        model(x)
    assert len(gathering) == before


def test_the_default_device_does_not_matter(gathering, monkeypatch):
    model = network("dense", "circular", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    model(x)
    caches = multi_tensor._rows, multi_tensor._owners_on
    for cache in caches:
        cache.cache_clear()
    expected = model(x)
    for cache in caches:
        cache.cache_clear()
    with torch.device("meta"):
        torch.testing.assert_close(model(x), expected)


def test_a_model_that_is_gone_leaves_no_slices_behind(gathering):
    model = network("dense", "circular", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    for _ in range(3):
        model(x).sum().backward()
        draw_(model)
    plan = prefetch.plan_of(model[0].axes["out"].slice.owner)
    left = [weakref.ref(note) for note in plan.entries.values()]
    del model, plan
    gc.collect()
    assert not any(note() for note in left)


def test_notes_that_are_not_used_any_more_are_forgotten(gathering, monkeypatch):
    monkeypatch.setattr(prefetch, "FORGET", 2)
    model = network("dense", "circular", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    family = slices(model)
    model(x)
    before = len(prefetch.plan_of(family).entries)
    for _ in range(6):
        model[:3](x)
        draw_(model)
    assert len(prefetch.plan_of(family).entries) < before


# -- memory that is kept from pass to pass -----------------------------------------------------------------------------


def settled(model: torch.nn.Module, x: torch.Tensor) -> list[gather.Batch]:
    """What is kept after some steps, of parameters first."""
    slices(model)
    for _ in range(3):
        model(x).square().sum().backward()
        model.zero_grad()
        draw_(model)
    return kept(model)


def kept(model: torch.nn.Module) -> list[gather.Batch]:
    return [batch for _, batch in sorted(prefetch.plan_of(slices(model)).kept.items())]


def grads(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad + 0 for p in model.parameters()]


@pytest.mark.parametrize("grads", ["dense", "compact"])
def test_the_next_pass_uses_the_same_memory_and_the_same_table(gathering, monkeypatch, grads):
    model = network(grads, "window", torch.channels_last)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    before = settled(model, x)
    made = []
    monkeypatch.setattr(
        multi_tensor.LaunchPlan,
        "__init__",
        lambda *a, make=multi_tensor.LaunchPlan.__init__, **how: (made.append(how["walk_full"]), make(*a, **how))[1],
    )
    for _ in range(4):
        agrees_with_taking_apart(model, x, monkeypatch)
        draw_(model)
    assert len(before[0].memory) == 9
    assert kept(model)[0] is before[0]
    plan = prefetch.plan_of(slices(model))
    assert {t.data_ptr() for t in plan.held()} >= {t.data_ptr() for t in before[0].memory}
    plan.release()
    assert not plan.held()
    assert all(made), "no table for a take"


def test_a_graph_that_is_still_to_be_run_backwards_keeps_its_slices(gathering, monkeypatch):
    """Its slices are those of an earlier draw and of earlier weights."""
    model = network("dense", "circular", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    before = settled(model, x)
    twin = copy.deepcopy(model)
    slices(twin).seek_(slices(model).step)
    with monkeypatch.context() as apart:
        apart.setattr(prefetch, "take", lambda *args: None)
        twin(x).square().sum().backward()
    loss = model(x).square().sum()
    draw_(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    model(x)
    assert kept(model)[0] is not before[0]
    loss.backward()
    for one, other in zip(grads(model), grads(twin), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_graph_that_has_been_run_backwards_does_not(gathering):
    model = network("dense", "window", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    before = settled(model, x)
    for moves in (False, True):
        loss = model(x).square().sum()  # held, as in most training loops
        loss.backward()
        if moves:
            draw_(model)
        model(x).sum().backward()
        assert kept(model)[0] is before[0]
        del loss


def test_a_gradient_may_lie_otherwise_than_those_before(gathering):
    a = Slice(8, 0.5, align=1)
    first, second = nn.Conv2d(3, 8, 1, bias=False, out_slice=a), nn.Conv2d(8, 4, 1, bias=False, in_slice=a)
    model = torch.nn.Sequential(first, second).to(DEVICE)
    x = torch.randn(2, 3, 4, 4, device=DEVICE)
    settled(model, x)
    hidden = first(x)
    weight = second._small_for(hidden)["weight"]
    (hidden.sum() + weight.sum()).backward()  # the gradient of a sum is one number, seen from all places
    expected = torch.zeros(4, 8, 1, 1)
    expected[:, a.kept] = a.size / a.width
    assert torch.equal(second.weight.grad.cpu(), expected)


HOLDERS = {
    "itself": lambda small: small,
    "detached": lambda small: small.detach(),
    "a part": lambda small: small.detach()[0],
    "transposed": lambda small: small.detach().transpose(0, 1),
    "its storage": lambda small: small.untyped_storage(),
    "by numpy": lambda small: small.detach().numpy() if small.is_cpu else small.detach(),
}


@pytest.mark.parametrize("how", HOLDERS)
@pytest.mark.parametrize("tracking", [False, True])
def test_whoever_keeps_a_slice_keeps_its_values(gathering, tracking, how):
    model = network("dense", "circular", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    settled(model, x)
    with torch.set_grad_enabled(tracking):
        model(x)
        small = model[3]._small_for(model[:3](x))["weight"]
    values = small.detach().clone()
    assert small.data_ptr() in [t.data_ptr() for t in kept(model)[0].memory]
    held = HOLDERS[how](small)
    shape, strides = small.shape, small.stride()
    del small
    with torch.no_grad():
        model[3].weight.mul_(2)
    for _ in range(2):
        draw_(model)
        model(x).sum().backward()
    if how == "its storage":
        now = torch.empty(0, dtype=values.dtype, device=DEVICE).set_(held, 0, shape, strides)
        assert torch.equal(now, values)
    else:
        assert torch.equal(torch.as_tensor(held), torch.as_tensor(HOLDERS[how](values)))


CHANGES = {
    "in place": lambda p: p.detach().mul_(2),
    "another memory": lambda p: setattr(p, "data", p.data * 2),
    "frozen": lambda p: p.requires_grad_(False),
    "thawed": lambda p: p.requires_grad_(True),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_parameter_may_change_within_a_pass(gathering, what):
    model = network("dense", "window", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    weight = model[6].weight
    settled(model, x)
    weight.requires_grad_(what != "thawed")
    hidden = model[:6](x)  # by now the weight of the last layer has been fetched
    CHANGES[what](weight)
    y = model[6](hidden)
    axis = model[6].axes["in"]
    small = weight.detach()[:, axis.kept.to(DEVICE)] * axis.slice.scale[axis.slice.kept].repeat_interleave(4)
    torch.testing.assert_close(y, hidden @ small.t() + model[6].bias)
    y.sum().backward()
    assert (weight.grad is None) == (what == "frozen")


def test_a_pass_may_begin_anywhere(gathering, monkeypatch):
    """What waits is of the draw before, and it is not for the layer that began the pass before to notice."""
    model = network("dense", "window", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    settled(model, x)
    model(x).sum().backward()
    start = model[3].axes["out"].slice.start_on_host
    while model[3].axes["out"].slice.start_on_host == start:
        draw_(model)
    hidden = torch.randn(2, 6, 2, 2, dtype=torch.float64, device=DEVICE)
    agrees_with_taking_apart(model[3:], hidden, monkeypatch)


def test_memory_made_in_inference_mode_serves_training(gathering):
    model = network("dense", "window", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    slices(model)
    model(x)
    with torch.inference_mode():
        model(x)
    before = kept(model)
    for _ in range(2):
        draw_(model)
        model(x).sum().backward()
    assert kept(model)[0] is before[0]


@pytest.mark.parametrize("sampling", ["circular", "window"])
def test_whatever_happens_between_passes(gathering, monkeypatch, sampling):
    model = network("dense", sampling, torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    settled(model, x)
    weight = model[3].weight
    held = []

    def without_gradients(mode):
        with mode:
            model(x)

    def transpose():
        weight.data = weight.data[:12].transpose(0, 1).contiguous().transpose(0, 1).repeat(2, 1, 1, 1)[:16]

    events = {
        "nothing": lambda: None,
        "a draw": lambda: draw_(model),
        "a change": lambda: weight.detach().mul_(2),
        "a change that nobody counts": lambda: weight.data.mul_(0.5),
        "another memory": lambda: setattr(weight, "data", weight.data * 2),
        "another layout": transpose,
        "no_grad": lambda: without_gradients(torch.no_grad()),
        "inference": lambda: without_gradients(torch.inference_mode()),
        "a graph that is alive": lambda: held.append(model(x)),
        "two passes in one graph": lambda: held.append(model(x) + model(2 * x)),
        "another rate": lambda: [s.rerate_(0.25) for s in model[3].slices],
        "frozen": lambda: weight.requires_grad_(False),
        "thawed": lambda: weight.requires_grad_(True),
        "a hook": lambda: model[6].weight.register_hook(lambda g: g),
        "evaluation": lambda: (model.eval()(x), model.train()),
        "another parameter": lambda: setattr(model[1], "weight", torch.nn.Parameter(2 * model[1].weight.detach())),
    }
    for event in events.values():
        event()
        agrees_with_taking_apart(model, x, monkeypatch)
        draw_(model)
        agrees_with_taking_apart(model, x, monkeypatch)
    assert kept(model)


def test_the_same_memory_with_other_strides_is_another_weight(gathering, monkeypatch):
    model = network("dense", "circular", torch.contiguous_format)
    model[3] = nn.Conv2d(12, 12, 1, in_slice=model[0].axes["out"], bias=False).double().to(DEVICE)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    settled(model[:4], x)
    agrees_with_taking_apart(model[:4], x, monkeypatch)
    model[3].weight.data = model[3].weight.data.transpose(0, 1)
    draw_(model[:4])
    agrees_with_taking_apart(model[:4], x, monkeypatch)


def test_memory_of_another_stream_or_of_a_captured_graph_is_not_used(gathering, monkeypatch):
    model = network("dense", "circular", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    before = settled(model, x)
    monkeypatch.setattr(prefetch.tables, "where", lambda device: (7, False))
    model(x)
    other = kept(model)
    assert other[0] is not before[0]
    monkeypatch.setattr(prefetch.tables, "where", lambda device: (7, True))
    for _ in range(2):
        model(x)
        assert not kept(model)
        draw_(model)


def test_memory_that_a_step_does_not_need_is_given_back(gathering):
    model = network("dense", "circular", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    model[3].weight.requires_grad_(False)  # a portion of its own
    settled(model, x)
    assert any(form.spec.shape == model[3].weight.shape for batch in kept(model) for form in batch.layout.entries)
    for _ in range(3):
        model[:3](x).sum().backward()
        draw_(model)
    assert not any(form.spec.shape == model[3].weight.shape for batch in kept(model) for form in batch.layout.entries)


def test_a_parameter_that_was_replaced_is_not_kept(gathering):
    model = network("dense", "circular", torch.contiguous_format)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=DEVICE)
    settled(model, x)
    model(x).sum().backward()
    gone = weakref.ref(model[3].weight)
    model[3].weight = torch.nn.Parameter(model[3].weight.detach().clone())
    draw_(model)
    model(x).sum().backward()
    gc.collect()
    assert gone() is None


def test_a_table_that_is_kept_is_not_changed_by_others(gathering):
    axis = Slice(8).axis()
    axis.slice.to(torch.device(DEVICE))
    fulls, smalls = torch.randn(2, 8, 3, device=DEVICE), torch.zeros(2, 4, 3, device=DEVICE)
    one, other = (
        multi_tensor.Piece(f, s, (axis.slice.start, axis.geometry), None) for f, s in zip(fulls, smalls, strict=True)
    )
    assert multi_tensor.layout(one, False) is multi_tensor.layout(other, False), "so the host's table is the same"
    settled = multi_tensor.LaunchPlan([one], walk_full=False, fixed=True)
    multi_tensor.take([other])
    multi_tensor.take(settled)
    assert torch.equal(smalls, fulls[:, :4])


def test_entries_go_side_by_side_where_the_scale_begins_at_16_bytes():
    axis = Slice(16, 0.5, sampling="window").axis()
    full, small = torch.zeros(8, 16, device=DEVICE), torch.zeros(8, 8, device=DEVICE)
    scales = torch.ones(18, dtype=torch.float64, device=DEVICE)
    cut = axis.slice.start, axis.geometry
    found = [
        multi_tensor.layout(multi_tensor.Piece(full, small, None, cut, col_scale=scales[i : i + 16]), False)[3]
        for i in range(3)
    ]
    assert found == [1, 0, 1]


@pytest.mark.parametrize(("grads", "sampling"), [("dense", "circular"), ("compact", "circular"), ("dense", "prefix")])
def test_a_step_counts_the_entries_that_its_tables_need_when_it_is_captured(
    gathering, fused, monkeypatch, grads, sampling
):
    model = network(grads, sampling, torch.contiguous_format).float()
    x = torch.randn(2, 3, 4, 4, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    family = slices(model)

    def step():  # as CapturedStep does it
        with without_views():
            optimizer.zero_grad()
            loss = model(x).sum()
            prefetch.release(family)
            loss.backward()
            optimizer.step()

    counts = []
    for _ in range(4):
        with tables.into(tables.Arena(None, x.device)) as needed:
            step()
        counts.append(needed.used)
    assert 0 < counts[-1] == counts[-2]
    assert counts[0] <= 2 * counts[-1], "of a single warm-up"
    assert counts[-1] <= 2 * counts[0]
    step()
    assert needed.used == counts[-1], "over is over"
    monkeypatch.setattr(tables, "where", lambda device: (7, True))
    for module, name in ((kernels, "take_kernel"), (kernels, "put_kernel"), (updates, "_sgd_kernel")):
        # which are recorded then, and run when the tables are there
        monkeypatch.setattr(module, name, collections.defaultdict(lambda: lambda *args, **flags: None))
    arena = tables.Arena(counts[-1], x.device)
    with tables.into(arena):
        step()
    assert arena.used == counts[-1]


def test_numbers_of_a_captured_table_may_change_at_once(monkeypatch):
    monkeypatch.setattr(tables, "capturing", lambda device: True)
    numbers = torch.arange(5)
    arena = tables.Arena(8, torch.device("cpu"))
    with tables.into(arena):
        table = tables.make(numbers, torch.device("cpu"))
        numbers.zero_()
    arena.fill()
    assert table.tolist() == [0, 1, 2, 3, 4]


# -- the optimizer's side of it ----------------------------------------------------------------------------------------


@pytest.fixture
def fused(monkeypatch):
    """Slice-only updates by the kernels on the CPU as well; counts the pieces of each launch."""
    launches = []

    def counted(kind):
        launch = getattr(updates, kind)
        return lambda pieces, **settings: (launches.append(number(pieces)), launch(pieces, **settings))[1]

    for kind in ("sgd", "adam"):
        monkeypatch.setattr(updates, kind, counted(kind))
    monkeypatch.setattr(optim, "_on_gpu", lambda tensors: True)
    return launches


def two_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    a = Slice(8, 0.5, grads="compact")
    made = torch.nn.Sequential(nn.Conv2d(3, 8, 3, out_slice=a), torch.nn.ReLU(), nn.Conv2d(8, 4, 2, in_slice=a))
    return made.to(DEVICE)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01, eps=1e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3, maximize=True),
}


def fused_and_not(name, monkeypatch, prepare=lambda model, optimizer: None, steps=3, scaler=None):
    """Two models after some steps, one stepped by the kernels and one by torch."""
    x = torch.randn(4, 3, 4, 4, device=DEVICE)
    models = []
    for by_kernels in (True, False):
        model = two_layers()
        optimizer = OPTIMIZERS[name](model.parameters())
        scale = torch.amp.GradScaler(DEVICE, init_scale=4.0, growth_interval=2) if scaler else None
        with monkeypatch.context() as m:
            if not by_kernels:
                m.setattr(optim, "_on_gpu", lambda tensors: False)
            for step in range(steps):
                if step == 1:
                    prepare(model, optimizer)
                loss = model(x).square().mean()
                (loss if scale is None else scale.scale(loss)).backward()
                if scaler == "overflow" and step == 1:
                    model[0].weight.grad.mul_(float("inf"))
                optimizer.step() if scale is None else scale.step(optimizer)
                if scale is not None:
                    scale.update()
                optimizer.zero_grad()
        models.append([*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())])
    for one, other in zip(*models, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_may_lie_in_memory_in_another_way_than_its_parameter(fused, monkeypatch, name):
    def prepare(model, optimizer):  # a checkpoint from before the model was channels_last
        model.to(memory_format=torch.channels_last)

    fused_and_not(name, monkeypatch, prepare)
    assert fused == [3, 3, 3]


def nothing(*args):
    pass


def moved(model, optimizer):
    for p in model.parameters():
        p.data = p.data.clone()


def with_another_state(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def replace(grad, **changes):
    grad.at = grad.at._replace(**changes)


def rerated(model, optimizer):
    slices(model).members[0].rerate_(0.25)


def in_windows(model, optimizer):  # their factors are vectors
    a = Slice(8, 0.5, sampling="window", grads="compact")
    model[0], model[2] = nn.Conv2d(3, 8, 3, out_slice=a), nn.Conv2d(8, 4, 2, in_slice=a)
    torch.manual_seed(1)
    for old, new in zip(optimizer.param_groups[0]["params"], model.to(DEVICE).parameters(), strict=True):
        old.data = new.data
    model[0].weight, model[0].bias, model[2].weight, model[2].bias = optimizer.param_groups[0]["params"]


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("change", "times"),
    [(nothing, 1), (moved, 2), (with_another_state, 2), (rerated, 2), (in_windows, 2)],
)
def test_what_the_kernels_know_of_parameters_is_kept_as_long_as_it_is_true(fused, monkeypatch, name, change, times):
    made = []
    monkeypatch.setattr(
        updates.UpdatePlan, "__init__", lambda *a, make=updates.UpdatePlan.__init__: (made.append(1), make(*a))[1]
    )
    fused_and_not(name, monkeypatch, change, steps=4)
    assert len(made) == times
    assert fused == [3] * 4


@pytest.mark.parametrize(
    "change",
    [
        nothing,
        lambda p, g, s: replace(g, gain=3.0),
        lambda p, g, s: replace(g, row_scale=torch.ones(8, dtype=torch.float64, device=DEVICE)),
        lambda p, g, s: replace(g, rows=g.at.rows._replace(axis=None)),  # whose start lies elsewhere
        lambda p, g, s: replace(g, rows=g.at.rows._replace(geometry=[8, 4, 1, 2])),
        lambda p, g, s: setattr(g, "small", g.small.bfloat16()),
        lambda p, g, s: setattr(g, "small", g.small.to(memory_format=torch.channels_last)),
        lambda p, g, s: setattr(p, "data", p.data.transpose(2, 3)),
        lambda p, g, s: s.update(momentum_buffer=s["momentum_buffer"].view(torch.int32)),
    ],
)
def test_whatever_changes_is_noticed(change):
    model = two_layers()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        model(torch.randn(4, 3, 4, 4, device=DEVICE)).sum().backward()
    p = model[0].weight
    work = [(p, p.grad)]
    before = [updates.Slices(optimizer, work, ["momentum_buffer"]).updates() for _ in range(2)]
    assert before[0] is before[1] is not None
    change(p, p.grad, optimizer.state[p])
    after = updates.Slices(optimizer, work, ["momentum_buffer"]).updates()
    assert (after is before[0]) == (change is nothing)


@pytest.mark.parametrize("scaler", ["fine", "overflow"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_gradients(fused, monkeypatch, name, scaler):
    fused_and_not(name, monkeypatch, scaler=scaler)
    assert len(fused) == (2 if scaler == "overflow" else 3)


def test_copies_of_gradients_live_until_they_are_read(fused, monkeypatch):
    """The kernel knows their addresses only: memory that is given back before is written to by the next table."""
    model = two_layers()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model(torch.randn(4, 3, 4, 4, device=DEVICE)).sum().backward()
    grad = model[0].weight.grad
    grad.small = grad.small.to(memory_format=torch.channels_last)  # unlike its parameter
    laid_out, update, alive = updates.Slices.smalls, updates.sgd, []

    def smalls(self):
        made = laid_out(self)
        alive[:] = [weakref.ref(t) for t in made]
        return made

    def checked(plan, **settings):
        assert all(t() is not None for t in alive)
        update(plan, **settings)

    monkeypatch.setattr(updates.Slices, "smalls", smalls)
    monkeypatch.setattr(updates, "sgd", checked)
    optimizer.step()
    assert len(alive) == 3


def test_counts_that_are_not_float32_are_left_to_torch(fused, monkeypatch):
    def prepare(model, optimizer):
        for s in optimizer.state.values():
            s["step"] = s["step"].double()

    fused_and_not("adam", monkeypatch, prepare)


def test_state_on_another_device_is_an_error_of_torch_and_no_wild_pointer(fused):
    model = two_layers()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    x = torch.randn(4, 3, 4, 4, device=DEVICE)
    model(x).sum().backward()
    optimizer.step()
    for s in optimizer.state.values():
        s["exp_avg"] = s["exp_avg"].to("meta")
    model(x).sum().backward()
    with pytest.raises((RuntimeError, NotImplementedError)):
        optimizer.step()
    assert len(fused) == 1


def growing_layers(grads: str) -> torch.nn.Module:
    """Rows and columns that grow, blocks of them, and a dimension that 8 does not divide."""
    torch.manual_seed(0)
    a, b = (Slice(n, 0.5, sampling="prefix", align=2, grads=grads) for n in (32, 6))
    made = torch.nn.Sequential(
        nn.Conv2d(3, 32, 3, out_slice=a), nn.BatchNorm2d(32, slice=a), torch.nn.ReLU(),
        nn.Conv2d(32, 12, 2, in_slice=a, out_slice=b.axis(blocks=2)), torch.nn.Flatten(),
        nn.Linear(12, 16, in_slice=b.axis(blocks=2)),
    )  # fmt: skip
    return made.to(DEVICE)


@pytest.mark.parametrize("counted", [True, False], ids=["counts on the host", "counts in device memory"])
@pytest.mark.parametrize("grads", ["dense", "compact"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_units_that_enter_are_counted_by_themselves(fused, monkeypatch, name, grads, counted):
    """Region by region, in one launch; where gradients are dense, they are read where they lie."""
    if not counted and DEVICE == "cpu":  # they are read by address then
        make = updates.UpdatePlan.__init__
        monkeypatch.setattr(
            updates.UpdatePlan, "__init__", lambda s, *a: (make(s, *a), setattr(s, "counted", False))[0]
        )
    x = torch.randn(4, 3, 4, 4, device=DEVICE)
    models, launches = [], []
    for by_kernels in (True, False):
        model = growing_layers(grads)
        model.to(memory_format=torch.channels_last if name == "adamw" else torch.contiguous_format)
        optimizer = OPTIMIZERS[name](model.parameters())
        if "capturable" in optimizer.param_groups[0] and DEVICE == "cuda":
            optimizer.param_groups[0]["capturable"] = not counted
        with monkeypatch.context() as m:
            if not by_kernels:
                m.setattr(optim, "_on_gpu", lambda tensors: False)
            for step in range(7):
                for s in slices(model) if step in (2, 4) else ():
                    s.rerate_({2: 0.25, 4: 0.0}[step])
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        models.append([*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())])
        launches.append(len(fused))
    for one, other in zip(*models, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert (
        launches == [4, 4] if name == "sgd" else [7, 7]
    )  # torch's own from when all are in, where counts do not matter

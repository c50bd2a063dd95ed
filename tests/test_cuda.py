"""What only a GPU can show: no host synchronisation, CUDA graphs, the same numbers as the CPU, no copies of weights.

``SLICEOUT_TEST_DEVICE=cpu`` runs those that make sense there, to check the tests themselves.
"""

from __future__ import annotations

import copy
import io
import itertools
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

import sliceout
from networks import (
    ALL,
    CONVERTED,
    NETWORKS,
    build,
    data,
    gradients,
    grown,
    loss_of,
    narrow,
    slices_in,
    starts,
    starts_due,
    step_of,
    train_step,
)
from sliceout import nn as snn
from sliceout.ops import prefetch

DEVICE = os.environ.get("SLICEOUT_TEST_DEVICE", "cuda")
BF16 = 2.0**-8  # half a unit in the last place, relative
SETTINGS = {
    "circular": {},
    "window, producer": {"sampling": "window", "fold": "producer"},
    "window, consumer": {"sampling": "window"},
}
CASES = [*itertools.product(NETWORKS, SETTINGS), *((name, "circular") for name in CONVERTED)]
MAPS = ("convnet", "patch")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fresh_compiler"), *([needs_cuda] if DEVICE == "cuda" else [])]


def on_device(name: str, channels_last: bool = False, **settings) -> nn.Module:
    model = build(name, **settings).to(DEVICE)
    return model.to(memory_format=torch.channels_last) if channels_last else model


def inputs(name: str, n: int = 8, seed: int = 1, channels_last: bool = False) -> Tensor:
    x = data(name, n, seed).to(DEVICE)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def assert_close_state(model: nn.Module, twin: nn.Module) -> None:
    ours, theirs = model.state_dict(), twin.state_dict()
    for key, value in ours.items():
        torch.testing.assert_close(value.cpu(), theirs[key].cpu(), msg=lambda m, key=key: f"{key}: {m}")


# -- the same numbers --------------------------------------------------------------------------------------------------


def assert_trains_like_the_cpu(model: nn.Module, fast: Callable, twin: nn.Module, name: str, channels_last=False):
    x = inputs(name, channels_last=channels_last)
    optimizers = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    for step in range(1, 9):
        ours, theirs = fast(x), twin(x.cpu())
        torch.testing.assert_close(ours.cpu(), theirs)
        ours.square().mean().backward()
        theirs.square().mean().backward()
        for (key, a), (_, b) in zip(gradients(model), gradients(twin), strict=True):
            torch.testing.assert_close(a.cpu(), b, msg=lambda m, key=key: f"{key}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert starts(model) == starts(twin) == starts_due(twin, step)
    assert_close_state(model, twin)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_eager_equals_the_cpu(name, settings, channels_last, float64):
    if channels_last and name not in MAPS:
        pytest.skip("no convolution")
    model = on_device(name, channels_last, **SETTINGS[settings])
    assert_trains_like_the_cpu(model, model, build(name, **SETTINGS[settings]), name, channels_last)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_one_compiled_graph_equals_the_cpu(name, settings, float64):
    channels_last = name in MAPS
    model = on_device(name, channels_last, **SETTINGS[settings])
    fast = torch.compile(model, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_trains_like_the_cpu(model, fast, build(name, **SETTINGS[settings]), name, channels_last)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(use_reentrant, float64):
    model, twin, x = on_device("norms"), on_device("norms"), inputs("norms")
    optimizers = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    for _ in range(4):
        checkpoint(model, x.clone().requires_grad_(), use_reentrant=use_reentrant).square().mean().backward()
        loss_of(twin, x).backward()
        for (key, a), (_, b) in zip(gradients(model), gradients(twin), strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, key=key: f"{key}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("name", NETWORKS)
def test_autocast_is_as_near_to_the_truth_as_the_narrow_network(name, way):
    channels_last = name in MAPS
    model, x = on_device(name, channels_last), inputs(name, 64, channels_last=channels_last)
    fast = torch.compile(model, fullgraph=True) if way == "compiled" else model

    def assert_as_near(a: Tensor, b: Tensor, truth: Tensor, what: str) -> None:
        a, b, truth = (t.detach().cpu().double() for t in (a, b, truth))
        bound = 2 * (b - truth).norm() + BF16 * truth.norm()
        assert (a - truth).norm() <= bound < 0.5 * truth.norm(), what  # a wrong slice would be 1 or more

    for _ in range(3):
        sliceout.draw_(model)
        model.zero_grad()
        small, origin = narrow(copy.deepcopy(model).cpu())
        exact = copy.deepcopy(small).double().to(DEVICE)
        small = small.to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16):
            ours, theirs = fast(x), small(x)
        truth = exact(x.double())
        assert ours.dtype == theirs.dtype == torch.bfloat16
        assert_as_near(ours, theirs, truth, "output")
        for out in (ours, theirs, truth):
            out.double().square().mean().backward()
        plain, true = dict(small.named_parameters()), dict(exact.named_parameters())
        for key, grad in gradients(model):
            assert grad.dtype == torch.float32
            both = [plain[key].grad.cpu(), true[key].grad.cpu()]
            if key in origin:
                both = [grown(g, torch.zeros(grad.shape, dtype=g.dtype), origin[key]) for g in both]
            assert_as_near(grad, *both, key)


@pytest.mark.parametrize("name", ALL)
def test_draw_between_forward_and_backward_does_not_misplace_eager_gradients(name, float64):
    model, twin, x = on_device(name), on_device(name), inputs(name)
    loss = loss_of(model, x)
    sliceout.draw_(model)
    if name == "controlled":  # its table is read where it lies
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return
    loss.backward()
    loss_of(twin, x).backward()
    for (key, a), (_, b) in zip(gradients(model), gradients(twin), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, key=key: f"{key}: {m}")


def test_draw_between_forward_and_backward_raises_in_compiled_code():
    model, x = on_device("mlp"), inputs("mlp")
    loss = loss_of(torch.compile(model, fullgraph=True), x)
    sliceout.draw_(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- starts in device memory -------------------------------------------------------------------------------------------


@needs_cuda
def test_starts_arrive_in_order_while_the_device_is_behind():
    model = on_device("convnet")
    found = slices_in(model)
    sliceout.slices(model)
    a = torch.randn(4096, 4096, device=DEVICE)
    on_host, there = [], []
    for _ in range(300):
        torch.mm(a, a)  # the host runs ahead of this
        sliceout.draw_(model)
        on_host.append([s.start_on_host for s in found])
        there.append(torch.cat([s.start for s in found]))
    assert torch.stack(there).tolist() == on_host
    assert len({tuple(s) for s in on_host}) > 100


@pytest.mark.parametrize("name", ALL)
def test_starts_follow_the_model_between_devices(name, float64):
    model, x = build(name, sampling="window"), data(name)
    expected = build(name, sampling="window")
    optimizer = SGD(expected.parameters(), lr=0.1)
    for device in ("cpu", DEVICE, "cpu", DEVICE):
        model = model.to(device)
        assert {s.start.device.type for s in slices_in(model)} == {device}
        train_step(model, x.to(device), SGD(model.parameters(), lr=0.1))
        train_step(expected, x, optimizer)
        assert starts(model) == starts(expected)
    assert_close_state(model, expected)


@pytest.mark.parametrize("name", ALL)
def test_built_under_the_device_or_on_meta(name, float64):
    x = inputs(name)
    with torch.device(DEVICE):
        model = build(name, sampling="window")
    with torch.device("meta"):
        assigned, emptied = build(name, sampling="window"), build(name, sampling="window")
    assigned.load_state_dict(model.state_dict(), assign=True)
    emptied.to_empty(device=DEVICE).load_state_dict(model.state_dict())
    for twin in (assigned, emptied):
        assert {s.start.device.type for s in slices_in(twin)} == {DEVICE}
        torch.testing.assert_close(twin(x), model(x))
    train_step(emptied, x, SGD(emptied.parameters(), lr=0.1))
    assert step_of(emptied) == 1


def test_copies_and_pickles(float64):
    model, x = on_device("convnet", sampling="window"), inputs("convnet")
    train_step(model, x, SGD(model.parameters(), lr=0.1))
    file = io.BytesIO()
    torch.save(model, file)
    twins = [copy.deepcopy(model)]
    for place in (DEVICE, "cpu"):
        file.seek(0)
        twins.append(torch.load(file, map_location=place, weights_only=False))
    for twin in twins:
        device = next(twin.parameters()).device
        assert {s.start.device for s in slices_in(twin)} == {device}
        torch.testing.assert_close(twin(x.to(device)).cpu(), model(x).cpu())
        train_step(twin, x.to(device), SGD(twin.parameters(), lr=0.1))
        assert (step_of(twin), step_of(model)) == (2, 1)


# -- no host synchronisation -------------------------------------------------------------------------------------------


class NoSync:
    """An error wherever torch would make the host wait for the device."""

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *exception: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_the_check_for_synchronisation_finds_one():
    with pytest.raises(RuntimeError, match="synchroniz"), NoSync():
        torch.ones(1, device=DEVICE).item()


@needs_cuda
@pytest.mark.parametrize("way", ["eager", "compiled", "reduce-overhead"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "AdamW, fused"])
@pytest.mark.parametrize("name", ALL)
def test_training_step_does_not_synchronise(name, optimizer, way):
    if way != "eager" and (optimizer != "AdamW, fused" or name == "mlp"):
        pytest.skip("the optimizer is not compiled: eager shows it")
    model, x = on_device(name, sampling="window"), inputs(name)
    steps = {
        "SGD": lambda: SGD(model.parameters(), lr=0.01, momentum=0.9),
        "AdamW": lambda: AdamW(model.parameters(), foreach=True),
        "AdamW, fused": lambda: AdamW(model.parameters(), fused=True),
    }[optimizer]()
    fast = model
    if way != "eager":
        fast = torch.compile(model, fullgraph=True, mode=None if way == "compiled" else way)

    def train(n: int) -> None:
        for _ in range(n):
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = loss_of(fast, x)
            loss.backward()
            steps.step()
            steps.zero_grad()

    train(5)  # kernels are compiled, libraries loaded, graphs recorded
    with NoSync():
        train(5)
    assert step_of(model) == 10
    assert starts(model) == starts_due(model, 10)


# -- launches ----------------------------------------------------------------------------------------------------------


def launches(model: nn.Module, x: Tensor) -> tuple[int, dict[str, int]]:
    """Kernels that Inductor made for a training step, and how often it calls each of our ops."""
    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True)
    _, codes = run_and_get_code(lambda: loss_of(fast, x).backward())
    code = "\n".join(codes)
    ours = re.findall(r"= torch\.ops\.sliceout\.(\w+)|^\s+torch\.ops\.sliceout\.(\w+)", code, re.MULTILINE)
    return len(re.findall(r"^\s+triton_\w+\.run\(", code, re.MULTILINE)), Counter("".join(names) for names in ours)


@needs_cuda
def test_compiled_code_inlines_every_take_and_put():
    """What is left of them: matrices are copied into the products and into the full gradients, the weight of the norm
    is kept for the backward pass, the gradients of weight and bias of the norm and both its statistics are vectors of
    the full size. That is 2 + 2 + 1 + 2 + 2 kernels, and no call."""
    s = sliceout.Slice(64)
    sliced = nn.Sequential(
        snn.Conv2d(16, 64, 3, bias=False, out_slice=s),
        snn.BatchNorm2d(64, slice=s),
        nn.ReLU(),
        snn.Conv2d(64, 16, 3, bias=False, in_slice=s),
    )
    small = nn.Conv2d(16, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 3, bias=False)
    x = torch.randn(32, 16, 16, 16, device=DEVICE).to(memory_format=torch.channels_last)
    sliced, narrow = (m.to(DEVICE, memory_format=torch.channels_last) for m in (sliced, nn.Sequential(*small)))
    generated, ours = launches(sliced, x)
    assert not ours
    assert generated == launches(narrow, x)[0] + 9


# -- CUDA graphs -------------------------------------------------------------------------------------------------------


def recorded_graphs() -> int:
    """How many graphs ``reduce-overhead`` has recorded; asking counts as one."""
    from torch._inductor import cudagraph_trees

    return cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager.new_graph_id().id


@needs_cuda
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_reduce_overhead_equals_eager_over_many_draws(name, settings, float64):
    channels_last = name in MAPS
    model, twin = (on_device(name, channels_last, **SETTINGS[settings]) for _ in range(2))
    fast = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    optimizers = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    seen, recorded = set(), 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(16):
            if step == 6:
                recorded = recorded_graphs()
            x = inputs(name, seed=step, channels_last=channels_last)
            seen.add(tuple(starts(model)))
            ours, theirs = fast(x), twin(x)
            ours.square().mean().backward()
            theirs.square().mean().backward()
            torch.testing.assert_close(ours, theirs)
            for (key, a), (_, b) in zip(gradients(model), gradients(twin), strict=True):
                torch.testing.assert_close(a, b, msg=lambda m, key=key: f"{key}: {m}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert len(seen) > 8
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert recorded_graphs() == recorded + 1  # only our own question
    assert counters["stats"]["unique_graphs"] == 1
    assert_close_state(model, twin)


@needs_cuda
def test_reduce_overhead_under_autocast_records_and_skips_nothing():
    model, x = on_device("convnet", True), inputs("convnet", channels_last=True)
    fast = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    optimizer = AdamW(model.parameters(), fused=True)
    recorded = 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(12):
            if step == 6:
                recorded = recorded_graphs()
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = loss_of(fast, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recorded_graphs() == recorded + 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert step_of(model) == 12


@needs_cuda
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_captured_step_equals_eager_while_starts_change_between_replays(name, settings, float64):
    model, twin = (on_device(name, **SETTINGS[settings]) for _ in range(2))
    optimizers = [AdamW(m.parameters(), lr=0.01, capturable=True) for m in (model, twin)]
    x = inputs(name)

    def step(net: nn.Module, optimizer: AdamW) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(net, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, optimizers[0])
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        step(twin, optimizers[1])
    assert starts(model) == starts(twin) == starts_due(twin, 3)

    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.cuda.graph(graph):
            loss = step(model, optimizers[0])
    assert any("sliceout.draw_(model) after every replay" in str(w.message) for w in caught)
    assert step_of(model) == 3  # recording is not running

    for i in range(4, 12):
        x.copy_(inputs(name, seed=i))
        graph.replay()
        sliceout.draw_(model)
        torch.testing.assert_close(loss, step(twin, optimizers[1]))
        assert starts(model) == starts(twin) == starts_due(twin, i)
        assert_close_state(model, twin)


# -- memory ------------------------------------------------------------------------------------------------------------


@needs_cuda
def test_autocast_makes_no_float32_copy_of_the_weight():
    """Beyond what a plain bfloat16 layer of the small size needs, there is one small weight and one full gradient."""
    n, mib = 4096, 2**20
    sliced = snn.Linear(n, n, in_slice=sliceout.Slice(n), out_slice=sliceout.Slice(n), bias=False, device=DEVICE)
    plain = nn.Linear(n // 2, n // 2, bias=False, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(16, n // 2, device=DEVICE)
    small, full = (n // 2) ** 2 * 2, n * n * 4  # the kept part in bfloat16, the gradient in float32

    def peaks(layer: nn.Module) -> tuple[int, int]:
        """Bytes that forward and backward need on top of what is there before."""
        layer.weight.grad = None
        if isinstance(layer, snn.Linear):
            prefetch.release(layer.slices[0].owner)  # memory that waits would not be counted
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast(DEVICE, torch.bfloat16):
            out = layer(x)
        forward = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out.backward(torch.ones_like(out))
        return forward, torch.cuda.max_memory_allocated() - before

    for layer in (sliced, plain):
        peaks(layer)  # the first call leaves workspaces behind
    floor, wrapped = peaks(plain), set()
    for _ in range(8):
        sliceout.draw_(sliced)
        wrapped.add(any(s.start_on_host + s.width > n for s in sliced.slices))
        ours = peaks(sliced)
        assert small <= ours[0] <= floor[0] + small + mib
        assert full <= ours[1] <= floor[1] + full + mib
    assert wrapped == {True, False}  # in one piece, and around the end

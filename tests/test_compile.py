"""torch.compile: one full graph for all draws, and the same numbers as eager."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import pytest
import torch
from conftest import devices
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import sliceout
from networks import (
    ALL,
    CONVERTED,
    NETWORKS,
    assert_same_state,
    build,
    data,
    gradients,
    loss_of,
    slices_in,
    starts,
    step_of,
    train_step,
)
from sliceout import Slice
from sliceout import nn as snn
from sliceout.ops import gather, inlined

pytestmark = pytest.mark.usefixtures("fresh_compiler")
BF16 = 2.0**-8  # half a unit in the last place, relative


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled(model: nn.Module, backend: str = "aot_eager", **options) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=True, **options)


def assert_same_training(model: nn.Module, twin: nn.Module, x: Tensor, steps: int = 8, **tolerance: float) -> None:
    """Train both, ``model`` compiled; outputs, gradients, parameters and statistics agree, over draws that move."""
    fast = compiled(model) if not isinstance(model, torch._dynamo.OptimizedModule) else model
    optimizers = SGD(fast.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    seen = set()
    for step in range(steps):
        seen.add(tuple(starts(twin)))
        assert starts(fast) == starts(twin)
        ours, theirs = fast(x), twin(x)
        torch.testing.assert_close(ours, theirs, **tolerance)
        ours.square().mean().backward()
        theirs.square().mean().backward()
        for (key, a), (_, b) in zip(gradients(fast), gradients(twin), strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, msg=lambda m, key=key: f"{key}: {m}", **tolerance)
        for (key, a), (_, b) in zip(fast.named_buffers(), twin.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, key=key: f"{key}: {m}", **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert step_of(fast) == step + 1
    assert len(seen) > steps // 2


SETTINGS = {
    "circular": {},
    "window, producer": {"sampling": "window", "fold": "producer"},
    "window, consumer": {"sampling": "window"},
}


@pytest.mark.parametrize(
    ("name", "settings"), [*itertools.product(NETWORKS, SETTINGS), *((name, "circular") for name in CONVERTED)]
)
def test_one_graph_over_all_draws_equals_eager(name, settings, float64):
    model, twin = build(name, **SETTINGS[settings]), build(name, **SETTINGS[settings])
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same_training(compiled(model), twin, data(name))
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NETWORKS, "attention"])
def test_one_inductor_graph_over_all_draws_equals_eager(name, float64):
    model, twin, x = build(name), build(name), data(name)
    if name == "convnet":
        model, twin, x = (t.to(memory_format=torch.channels_last) for t in (model, twin, x))
    # torch 2.11 cannot compile the backward of its fused attention in float64 on the CPU
    with torch._dynamo.config.patch(error_on_recompile=True), sdpa_kernel(SDPBackend.MATH):
        assert_same_training(compiled(model, "inductor"), twin, x)
    assert graphs() == 1


def test_a_graph_does_not_ask_for_the_ways_of_eager_code(monkeypatch):
    """Dynamo cannot trace the look for Triton."""
    monkeypatch.setattr(gather, "usable", lambda full: pytest.fail("asked"))
    model = build("norms")
    torch.compile(model, backend="eager", fullgraph=True)(data("norms")).sum().backward()


def test_channels_last_equals_eager(float64):
    model, twin, x = (
        t.to(memory_format=torch.channels_last) for t in (build("convnet"), build("convnet"), data("convnet"))
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same_training(compiled(model), twin, x, steps=6)
    assert graphs() == 1


def test_layers_compiled_one_by_one_in_place(float64):
    model, twin, x = build("mlp"), build("mlp"), data("mlp")
    for layer in model[::2]:
        layer.compile(backend="aot_eager", fullgraph=True)
    optimizers = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    train_step(model, x, optimizers[0])
    train_step(twin, x, optimizers[1])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            train_step(model, x, optimizers[0])
            train_step(twin, x, optimizers[1])
    for (key, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", ALL)
def test_training_forward_without_gradients(name, float64):
    model, twin, x = build(name), build(name), data(name)
    fast = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), twin(x))
            sliceout.draw_(model)
            sliceout.draw_(twin)
    assert graphs() == 1


# -- how many launches -------------------------------------------------------------------------------------------------


def ops_called(model: nn.Module, x: Tensor) -> Counter[str]:
    """What the graphs of a training step call, forward and backward, by name."""
    seen = Counter[str]()

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function":
                hidden = node.target is torch.ops.higher_order.auto_functionalized_v2
                seen[str(node.args[0] if hidden else node.target).removesuffix(".default")] += 1
        return make_boxed_func(graph.forward)

    backend: Any = aot_autograd(fw_compiler=count, bw_compiler=count)
    loss_of(compiled(model, backend), x).backward()
    return seen


def test_a_norm_is_taken_put_back_and_written_in_one_launch_each():
    a, b = Slice(8), Slice(8)
    model = nn.Sequential(
        snn.Conv2d(3, 8, 1, out_slice=a, bias=False),
        snn.BatchNorm2d(8, slice=a),
        snn.GroupNorm(8, 8, slice=a),
        nn.Flatten(),
        snn.Linear(8, 8, in_slice=a, out_slice=b, bias=False),
        snn.LayerNorm(8, slice=b),
    )
    called = ops_called(model, torch.randn(4, 3, 1, 1))
    assert {name: n for name, n in called.items() if name.startswith("sliceout.")} == {
        "sliceout.take": 2,  # the weights of convolution and linear layer
        "sliceout.put": 2,
        "sliceout.take_pair": 3,
        "sliceout.put_pair": 3,
        "sliceout.update_statistics_": 1,
    }
    assert not called.keys() & {"aten.add.Tensor", "aten.copy_", "aten.index_select", "aten.where.self"}


def test_a_frozen_batch_norm_takes_its_statistics_in_one_launch():
    s = Slice(8)
    norm = snn.BatchNorm1d(8, slice=s).eval()
    called = ops_called(nn.Sequential(snn.Linear(3, 8, out_slice=s, bias=False), norm), torch.randn(4, 3))
    ours = {name: n for name, n in called.items() if name.startswith("sliceout.")}
    assert ours == {"sliceout.take": 1, "sliceout.put": 1, "sliceout.take_pair": 2, "sliceout.put_pair": 1}


@devices
@pytest.mark.slow
def test_inductor_lets_statistics_be_written_where_they_lie(device):
    """The functional form of the op would copy its vectors first; Inductor must have seen that it need not."""
    s = Slice(64)
    layers = snn.Conv2d(3, 64, 3, out_slice=s, bias=False), snn.BatchNorm2d(64, slice=s), nn.ReLU()
    model, x = nn.Sequential(*layers).to(device), torch.randn(4, 3, 8, 8, device=device)
    fast = compiled(model, "inductor")
    with inlined.for_graphs():
        _, (code, *_) = run_and_get_code(lambda: loss_of(fast, x).backward())
    (arguments,) = re.findall(r"ops\.sliceout\.update_statistics_\.default\((.*)\)", code)
    mean, var, count, *_ = arguments.split(", ")
    assert all(name.startswith("primals_") for name in (mean, var, count)), arguments
    others = [line for line in code.splitlines() if re.search(rf"\w\(.*\b({mean}|{var}|{count})\b", line)]
    assert [line for line in others if "assert_size_stride" not in line and "rand_strided" not in line] == [
        line for line in others if "update_statistics_" in line
    ]


# -- what may cost one more graph --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_last_smaller_batch_costs_one_graph_and_no_more(name, float64):
    model, twin = build(name), build(name)
    fast = compiled(model)
    optimizers = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    for epoch in range(2):
        for n in (8, 8, 8, 5 + epoch):
            train_step(fast, data(name, n), optimizers[0])
            train_step(twin, data(name, n), optimizers[1])
        assert graphs() == 2
    for (key, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", ALL)
def test_eval_after_train_runs_the_full_network(name, float64):
    model, x = build(name), data(name)
    fast, optimizer = compiled(model), SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train_step(fast, x, optimizer)
        fast.eval()
        with torch.no_grad():
            ours = fast(x)
        whole = sliceout.revert_(build(name))
        whole.load_state_dict(model.state_dict())
        torch.testing.assert_close(ours, whole.eval()(x))
        fast.train()
    assert graphs() == 2


@pytest.mark.parametrize("name", ALL)
def test_slices_switched_off_and_on_again(name, float64):
    model, twin, x = build(name), build(name), data(name)
    fast = compiled(model)

    def switch(on: bool) -> None:
        for s in (*slices_in(model), *slices_in(twin)):
            s.on = on

    for on in (True, False, True, False):
        switch(on)
        sliceout.draw_(model)
        sliceout.draw_(twin)
        torch.testing.assert_close(fast(x), twin(x))
        loss_of(fast, x).backward()
        loss_of(twin, x).backward()
        for (key, a), (_, b) in zip(gradients(model), gradients(twin), strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, key=key: f"{key}: {m}")
    assert graphs() == 2


# -- together with other features --------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("mlp", "aot_eager"), ("norms", "aot_eager"), pytest.param("mlp", "inductor", marks=pytest.mark.slow)],
)
def test_activation_checkpointing_inside_the_graph(name, backend, float64):
    model, twin = Checkpointed(build(name)), Checkpointed(build(name))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same_training(compiled(model, backend), twin, data(name), steps=5)
    assert graphs() == 1


def test_activation_checkpointing_around_the_graph(float64):
    model, twin = build("mlp"), build("mlp")
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same_training_around(model, twin, data("mlp"))
    assert graphs() == 1


def assert_same_training_around(model: nn.Module, twin: nn.Module, x: Tensor) -> None:
    fast = compiled(model)
    optimizers = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    for _ in range(4):
        checkpoint(fast, x, use_reentrant=False).square().mean().backward()
        loss_of(twin, x).backward()
        for (key, a), (_, b) in zip(gradients(model), gradients(twin), strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, key=key: f"{key}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in NETWORKS), pytest.param("convnet", "inductor", marks=pytest.mark.slow)],
)
def test_autocast_is_as_near_to_the_truth_as_eager_autocast(name, backend):
    model, twin, x = build(name), build(name), data(name)
    exact = build(name).double()
    fast = compiled(model, backend)
    optimizers = SGD(model.parameters(), lr=0.01), SGD(twin.parameters(), lr=0.01)

    def assert_as_near(a: Tensor, b: Tensor, truth: Tensor, what: str) -> None:
        assert a.dtype == b.dtype
        bound = 2 * (b - truth).norm() + BF16 * truth.norm()
        assert (a - truth).norm() <= bound < 0.5 * truth.norm(), what  # a wrong slice would be 1 or more

    for _ in range(4):
        exact.load_state_dict(twin.state_dict())  # draws included
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = fast(x), twin(x)
        truth = exact(x.double())
        assert_as_near(ours, theirs, truth, "output")
        for out in (ours, theirs, truth):
            out.double().square().mean().backward()
        for (key, a), (_, b), (_, c) in zip(gradients(model), gradients(twin), gradients(exact), strict=True):
            assert a.dtype == torch.float32
            assert_as_near(a, b, c, key)
        exact.zero_grad()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.load_state_dict(twin.state_dict())  # rounding must not add up over the steps
    assert graphs() == 1


def test_gradient_accumulation_sees_one_draw(float64):
    model, x = build("mlp"), data("mlp")
    fast, optimizer = compiled(model), SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        whole = torch.autograd.grad(loss_of(fast, x), list(model.parameters()))
        for part in x.chunk(2):
            (loss_of(fast, part) / 2).backward()
        for (key, grad), expected in zip(gradients(model), whole, strict=True):
            torch.testing.assert_close(grad, expected, msg=lambda m, key=key: f"{key}: {m}")
        optimizer.step()
        optimizer.zero_grad()


def test_draw_between_forward_and_backward_raises_instead_of_misplacing_the_gradient(float64):
    model, x = build("mlp"), data("mlp")
    loss = loss_of(compiled(model), x)
    sliceout.draw_(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copy_of_a_compiled_model_draws_by_itself(float64):
    import copy

    model, x = build("mlp"), data("mlp")
    fast = compiled(model)
    train_step(fast, x, SGD(model.parameters(), lr=0.1))
    twin = copy.deepcopy(model)
    again = compiled(twin)
    optimizer, of_twin = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        train_step(fast, x, optimizer)
    for _ in range(3):
        train_step(again, x, of_twin)
    assert (step_of(model), step_of(twin)) == (4, 4)
    assert_same_state(model, twin)

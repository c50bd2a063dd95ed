"""The fast paths of a GPU against the plain ones: slices fetched together, slice-only kernels, captured steps.

``TRITON_INTERPRET=1 pytest tests/test_fast_paths.py`` runs those that need no CUDA graph on the CPU, to check the tests
themselves; Triton decides when it is imported whether it interprets, so that takes a process of its own.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sliceout
from sliceout.compact import optimizers as optim
from sliceout.compact.gradient import SlicedGrad
from sliceout.ops import prefetch
from sliceout_lab.models import TransformerLM, WideResNet, mlp

pytest.importorskip("triton", reason="triton is not installed")
from sliceout.compact import kernels as updates
from sliceout.ops import gather, multi_tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = [pytest.mark.cuda] if INTERPRETED else [pytest.mark.cuda, needs_cuda]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Through the interpreter the CPU takes the GPU's paths. Products are exact everywhere."""
    if INTERPRETED:
        monkeypatch.setattr(prefetch, "usable", lambda full: True)
        monkeypatch.setattr(optim, "_on_gpu", lambda tensors: True)
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):  # Adam makes much of little
        yield
    torch.backends.cuda.matmul.allow_tf32 = before


class Launches:
    """Counts how many pieces each multi-tensor launch serves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, list[int]] = {}
        for module, kinds in ((multi_tensor, ("take", "put")), (updates, ("sgd", "adam"))):
            for kind in kinds:
                monkeypatch.setattr(module, kind, self.counted(kind, getattr(module, kind)))

    def counted(self, kind: str, launch: Callable[..., None]) -> Callable[..., None]:
        def run(pieces: list[Any] | multi_tensor.LaunchPlan, **settings: Any) -> None:
            number = len(pieces) if isinstance(pieces, list) else sum(len(g.members) for g in pieces.groups)
            self.seen.setdefault(kind, []).append(number)
            launch(pieces, **settings)

        return run


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


# -- networks ----------------------------------------------------------------------------------------------------------

SMALL = INTERPRETED  # the interpreter takes a millisecond for each tile


def wide_resnet() -> tuple[nn.Module, Tensor]:
    return WideResNet(10, 1 if SMALL else 4), torch.randn(*((4, 3, 8, 8) if SMALL else (32, 3, 16, 16)))


def multilayer() -> tuple[nn.Module, Tensor]:
    return mlp(widths=(20, 64, 64, 10) if SMALL else (784, 512, 512, 10)), torch.randn(8, 20 if SMALL else 784)


def language_model() -> tuple[nn.Module, Tensor]:
    width = 32 if SMALL else 256
    return TransformerLM(width, layers=2, heads=2, vocabulary=50, context=16), torch.randint(0, 50, (3, 16))


MODELS = {"wrn": wide_resnet, "mlp": multilayer, "lm": language_model}


def made(name: str, grads: str = "dense", sampling: str = "circular") -> tuple[nn.Module, Tensor, Tensor]:
    """A converted model, an input and a target; the same at every call."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    sliceout.convert_(model, 0.5, sampling=sampling, grads=grads, example_inputs=x[:2])
    model, x = model.train().to(DEVICE), x.to(DEVICE)
    if name == "wrn":
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    shape = (x.shape[0] * x.shape[1],) if name == "lm" else (x.shape[0],)
    return model, x, torch.randint(0, 10, shape, device=DEVICE)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2).float(), target)


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    optimizer: torch.optim.Optimizer,
    steps: int,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    losses = []
    for _ in range(steps):
        with torch.autocast(DEVICE, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def assert_alike(one: nn.Module, other: nn.Module, rtol: float, atol: float) -> None:
    for (key, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda m, key=key: f"{key}: {m}")


# -- slices that are fetched together ----------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("grads", ["dense", "compact"])
@pytest.mark.parametrize("sampling", ["circular", "window"])
@pytest.mark.parametrize("name", MODELS)
def test_slices_fetched_together_have_the_gradients_of_slices_taken_apart(
    name: str,
    sampling: str,
    grads: str,
    autocast: torch.dtype | None,
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At several draws, with the same weights: rounding must not be blown up by training."""
    if INTERPRETED and (sampling, grads) != ("window", "dense"):
        pytest.skip("one of each is enough to check the test")
    outcomes: list[list[tuple[str, Tensor]]] = []
    for together in (True, False):
        model, x, y = made(name, grads, sampling)
        seen = []
        with monkeypatch.context() as m:
            if not together:
                m.setattr(prefetch, "take", lambda *args: None)
            for step in range(3):
                with torch.autocast(DEVICE, autocast or torch.bfloat16, enabled=autocast is not None):
                    loss = loss_of(model(x), y)
                loss.backward()
                seen += [(f"loss {step}", loss.detach())]
                seen += [(f"{key} {step}", p.grad + 0) for key, p in model.named_parameters()]
                model.zero_grad()
                sliceout.draw_(model)
        outcomes.append([*seen, *((key, t.clone()) for key, t in model.named_buffers())])
        if together:
            assert max(launches.seen["take"]) >= 4
            fetched = len(launches.seen["take"])
    assert len(launches.seen["take"]) == fetched, "slices taken apart are not fetched"
    scale = {key: t.double().norm() for key, t in outcomes[0]}
    largest = max(v for key, v in scale.items() if "weight" in key)
    for (key, one), (_, other) in zip(*outcomes, strict=True):
        error = (one.double() - other.double()).norm() / max(scale[key], 1e-3 * largest)
        allowed = (
            1e-4 if autocast is None else 0.5 if INTERPRETED else 0.1
        )  # the interpreter cuts bfloat16 off, and four images make steep batch norms
        assert error < allowed, f"{key}: {error}"


# -- slice-only updates ------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **k: torch.optim.SGD(p, 2**-5, **k),
    "momentum": lambda p, **k: torch.optim.SGD(p, 2**-5, momentum=0.9, weight_decay=1e-3, **k),
    "nesterov": lambda p, **k: torch.optim.SGD(p, 2**-5, momentum=0.9, weight_decay=1e-3, nesterov=True, **k),
    "adam": lambda p, **k: torch.optim.Adam(p, 2**-9, eps=1e-4, **k),
    "adam, decayed": lambda p, **k: torch.optim.Adam(p, 2**-9, eps=1e-4, weight_decay=1e-2, **k),
    "amsgrad": lambda p, **k: torch.optim.Adam(p, 2**-9, eps=1e-4, amsgrad=True, **k),
    "adamw": lambda p, **k: torch.optim.AdamW(p, 2**-9, eps=1e-4, **k),
    "adamw fused": lambda p, **k: torch.optim.AdamW(p, 2**-9, eps=1e-4, fused=True, **k),
}  # eps keeps rounding from being blown up to a step; the rates are exact in float32


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_update_slices_as_the_cpu_does(name: str, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty draws, the same gradients to both: everything but the update is on the CPU."""
    model, x, y = made("mlp", "compact")
    twin = copy.deepcopy(model).cpu()
    ours, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    for _ in range(4 if INTERPRETED else 20):
        loss_of(model(x), y).backward()
        assert sum(isinstance(p.grad, SlicedGrad) for p in model.parameters()) == 5, "all but the last bias"
        with monkeypatch.context() as m:
            m.setattr(optim, "_on_gpu", lambda tensors: False)
            m.setattr(prefetch, "usable", lambda full: False)
            loss_of(twin(x.cpu()), y.cpu()).backward()
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close((p.grad + 0).cpu(), q.grad + 0, rtol=1e-3, atol=1e-4)
                if isinstance(q.grad, SlicedGrad):
                    q.grad.replace_(p.grad.values().to("cpu", copy=True))
                else:
                    q.grad.copy_(p.grad)
            theirs.step()
        ours.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-5, atol=1e-6)
            for key, value in theirs.state[q].items():
                torch.testing.assert_close(ours.state[p][key].cpu(), value, rtol=1e-5, atol=1e-6, msg=key)
        ours.zero_grad()
        theirs.zero_grad()
    kind = "sgd" if isinstance(ours, torch.optim.SGD) else "adam"
    assert len(launches.seen[kind]) == (4 if INTERPRETED else 20)


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients_and_an_overflow(fused: bool, launches: Launches) -> None:
    model, x, y = made("mlp", "compact")
    optimizer = torch.optim.AdamW(model.parameters(), 2**-9, eps=1e-4, fused=fused)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=2)
    plain, *_ = made("mlp", "compact")
    other = torch.optim.AdamW(plain.parameters(), 2**-9, eps=1e-4, fused=fused)
    family = sliceout.slices(model)
    for step in range(6):
        loss = scaler.scale(loss_of(model(x), y))
        loss.backward()
        if step == 2:  # this one is skipped: in the plain run it does not happen
            before = copy.deepcopy(model.state_dict())
            next(model.parameters()).grad.mul_(float("inf"))
        else:
            sliceout.slices(plain).seek_(family.step)
            loss_of(plain(x), y).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            other.step()
            other.zero_grad()
        if not fused or step == 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:  # a fused optimizer unscales by itself: the norm is that of scaled gradients
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 2:
            for key, value in model.state_dict().items():
                assert torch.equal(value, before[key]), key
    assert_alike(model, plain, rtol=1e-3, atol=1e-5)
    assert scaler.get_scale() != 8.0


def test_clipping_counts_the_slice_alone() -> None:
    model, x, y = made("wrn", "compact")
    for _ in range(3):
        loss_of(model(x), y).backward()
        dense = torch.stack([(p.grad + 0).norm() for p in model.parameters()]).norm()
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), float(dense) / 2)
        torch.testing.assert_close(total, dense)
        after = torch.stack([(p.grad + 0).norm() for p in model.parameters()]).norm()
        torch.testing.assert_close(after, dense / 2, rtol=1e-4, atol=1e-6)
        assert sum(isinstance(p.grad, SlicedGrad) for p in model.parameters()) >= 4
        model.zero_grad()
        sliceout.draw_(model)


@needs_cuda
def test_gradients_take_the_memory_of_slices() -> None:
    model, x, y = made("mlp", "compact")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    train(model, x, y, optimizer, 3)
    sizes = []
    for grads in ("compact", "dense"):
        model, x, y = made("mlp", grads)
        for _ in range(2):  # the first pass learns
            model.zero_grad()
            sliceout.draw_(model)
            loss_of(model(x), y).backward()
        sliceout.draw_(model)
        with torch.no_grad():
            model(x)  # lets go of what the last pass had fetched
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model.zero_grad()
        sizes.append(before - torch.cuda.memory_allocated())
    kept = sum(p.numel() * 4 for p in model.parameters())
    assert sizes[1] >= kept
    assert sizes[0] < 0.6 * sizes[1]


@needs_cuda
@pytest.mark.parametrize("grads", ["dense", "compact"])
@pytest.mark.parametrize("name", MODELS)
def test_keeping_the_memory_of_slices_costs_no_memory(name: str, grads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there from the first take of one step to the first of the next in any case, but for the first one."""
    most = []
    for counts in (None, gather._users, None):  # without a count of users nothing is kept
        gc.collect()
        before = torch.cuda.memory_allocated()
        monkeypatch.setattr(gather, "_users", counts)
        model, x, y = made(name, grads, "window")
        optimizer = torch.optim.SGD(model.parameters(), 2**-9, momentum=0.9)
        train(model, x, y, optimizer, 4)
        plan = prefetch.plan_of(sliceout.slices(model))
        parameters = next(note.portion for note in plan.entries.values() if note.full().requires_grad)
        kept = plan.kept.get(parameters)
        assert (kept is not None) == (counts is not None)
        torch.cuda.reset_peak_memory_stats()
        train(model, x, y, optimizer, 4)
        most.append(torch.cuda.max_memory_allocated() - before)
        assert plan.kept.get(parameters) is kept, "the same from step to step"
        if kept is not None:
            first = kept.memory[0].nbytes
        del model, optimizer, plan, kept
    assert most[1] <= 1.01 * most[2] + first  # the very first training leaves workspaces behind


# -- captured steps ----------------------------------------------------------------------------------------------------


def churn() -> None:
    """Many launches over other tensors: caches overflow, and freed memory is written to."""
    s = sliceout.Slice(16, 0.5)
    s.to(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu"))
    multi_tensor._owners_on.cache_clear()
    for i in range(270):
        columns = [257 if i >> bit & 1 else 1 for bit in range(9)]  # two tiles or four: another table each time
        fulls = [torch.randn(16, n, device=DEVICE) for n in columns]
        smalls = [torch.empty(s.width, n, device=DEVICE) for n in columns]
        multi_tensor.take(
            [multi_tensor.Piece(f, t, (s.start, s.axis().geometry), None) for f, t in zip(fulls, smalls, strict=True)]
        )  # fmt: skip
        assert all(torch.equal(t, f[: s.width]) for f, t in zip(fulls, smalls, strict=True))
    blocks = [torch.full((n,), -1, dtype=torch.int64, device=DEVICE) for n in range(1, 4000, 7)]
    del blocks


@pytest.mark.skipif(INTERPRETED, reason="a minute through the interpreter")
def test_the_caches_may_overflow() -> None:
    churn()
    assert 0 < multi_tensor._owners_on.cache_info().currsize < 257, "the oldest were thrown away"
    assert multi_tensor._rows.cache_info().currsize <= 65


@needs_cuda
@pytest.mark.parametrize("name", ["nesterov", "amsgrad", "adamw", "adamw fused"])
@pytest.mark.parametrize("network", ["wrn", "mlp", "lm"])
def test_captured_compact_steps_equal_eager_ones(network: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # Adam makes much of little: lr / sqrt(v)
    model, x, y = made(network, "compact")
    twin = copy.deepcopy(model)
    ours, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    for group in theirs.param_groups:  # for the same reason the same arithmetic
        if "capturable" in group:
            group["capturable"] = True
    before = copy.deepcopy(model.state_dict())
    step = sliceout.capture(model, loss_of, ours, (x, y))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"capturing changed {key}"
    for i in range(20):
        if i == 10:
            churn()
            for group in (*ours.param_groups, *theirs.param_groups):
                group["lr"] = 2**-10
        if i == 15:  # an eager pass in between must not see or leave anything old
            with torch.no_grad():
                torch.testing.assert_close(model(x), twin(x), rtol=1e-2, atol=1e-2)  # old slices: 0.1 and more
        loss = step(x, y).clone()
        (expected,) = train(twin, x, y, theirs, 1)
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-4, msg=lambda m, i=i: f"step {i}: {m}")
    assert_alike(model, twin, rtol=2e-3, atol=2e-4)


@needs_cuda
@pytest.mark.parametrize("grads", ["dense", "compact"])
def test_a_captured_step_keeps_no_slices(grads: str) -> None:
    model, x, y = made("mlp", grads)
    step = sliceout.capture(model, loss_of, torch.optim.SGD(model.parameters(), 2**-5), (x, y))
    plan = prefetch.plan_of(sliceout.slices(model))
    assert plan.entries, "they were fetched together"
    assert not plan.held()
    step(x, y)


@needs_cuda
@pytest.mark.parametrize("grads", ["dense", "compact"])
def test_a_graph_captured_by_hand_works_or_is_refused(grads: str) -> None:
    model, x, y = made("mlp", grads)
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), 2**-5) for m in (model, twin))
    train(model, x, y, ours, 2)
    train(twin, x, y, theirs, 2)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()

    def captured() -> Tensor:
        with torch.cuda.graph(graph):
            loss = loss_of(model(x), y)
            loss.backward()
            ours.step()
            ours.zero_grad()
        return loss.detach()

    if grads == "compact":
        with pytest.raises(RuntimeError, match="cannot be captured with compact gradients"):
            captured()
        return
    with pytest.warns(UserWarning, match="replays cannot draw"):
        loss = captured()
    for _ in range(6):
        graph.replay()
        sliceout.draw_(model)
        (expected,) = train(twin, x, y, theirs, 1)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert_alike(model, twin, rtol=1e-4, atol=1e-5)


@needs_cuda
def test_another_stream_fetches_for_itself() -> None:
    model, x, y = made("mlp")
    for _ in range(2):
        expected = model(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = model(x)
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(y, expected)


class Around(nn.Module):
    """A network that is run in a way of its own."""

    def __init__(self, net: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.run = net, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.net, x)


def assert_captured_as_eager(model: nn.Module, x: Tensor, y: Tensor) -> None:
    twin = copy.deepcopy(model)
    ours, theirs = (OPTIMIZERS["nesterov"](m.parameters()) for m in (model, twin))
    step = sliceout.capture(model, loss_of, ours, (x, y))
    for _ in range(5):
        loss = step(x, y).clone()
        (expected,) = train(twin, x, y, theirs, 1)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert_alike(model, twin, rtol=1e-3, atol=1e-5)


@needs_cuda
@pytest.mark.parametrize("grads", ["dense", "compact"])
def test_recomputed_activations_can_be_captured(grads: str) -> None:
    def recomputing(net: nn.Module, x: Tensor) -> Tensor:
        x = checkpoint(net[:3], x, use_reentrant=False)
        return checkpoint(net[3:], x, use_reentrant=False)

    model, x, y = made("mlp", grads)
    assert_captured_as_eager(Around(model, recomputing), x, y)


@needs_cuda
@pytest.mark.parametrize("grads", ["dense", "compact"])
def test_layers_that_are_used_many_times_can_be_captured(grads: str) -> None:
    """Each use fetches anew, and all of them need tables."""

    def repeated(net: nn.Module, x: Tensor) -> Tensor:
        for _ in range(40):
            x = x + 0.1 * net(x)
        return x

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    sliceout.convert_(layers, 0.5, grads=grads, example_inputs=torch.zeros(2, 16))
    model = Around(layers, repeated).to(DEVICE).train()
    x, y = torch.randn(8, 16, device=DEVICE), torch.arange(8, device=DEVICE)
    assert_captured_as_eager(model, x, y)

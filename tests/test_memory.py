"""The peak memory of a step, against cases that can be worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sliceout.cli.memory import peak_growth, peak_of_step, persistent

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
N = 128 * 1024  # a multiple of CUDA's 512-byte blocks


@pytest.mark.parametrize("device", DEVICES)
def test_released_memory_can_be_used_again(device: str) -> None:
    def step() -> None:
        a = torch.empty(3 * N, dtype=torch.uint8, device=device)
        b = torch.empty(N, dtype=torch.uint8, device=device)  # 4N live: the peak
        del a
        c = torch.empty(2 * N, dtype=torch.uint8, device=device)  # 3N live
        del b, c

    assert peak_growth(step, torch.device(device)) == 4 * N


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_live_before_does_not_count(device: str) -> None:
    before = torch.empty(8 * N, dtype=torch.uint8, device=device)
    assert peak_growth(lambda: before[:N].clone(), torch.device(device)) == N


def test_backward_pass_by_hand() -> None:
    x = torch.zeros(N, requires_grad=True)

    def step() -> None:
        x.exp().exp().sum().backward()

    # exp keeps its result for the backward pass. Forward: two results and the sum. Backward: the ones that start it,
    # and the gradient of the second exp while both results are still there (or, later, its own and that of the first).
    assert peak_growth(step, torch.device("cpu")) == 3 * 4 * N + 4 + 4


def test_a_step_of_plain_sgd_by_hand() -> None:
    model = nn.Linear(1000, 500, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 1000)
    step = lambda: (model(x).sum().backward(), optimizer.step())  # noqa: E731
    step()  # leaves a gradient behind, which must not be counted as there before
    weight = 4 * 1000 * 500
    peak = peak_of_step(model, optimizer, step)
    assert persistent(model, optimizer) == weight
    outputs = 4 * 2 * 500
    assert 2 * weight <= peak <= 2 * weight + 3 * outputs  # parameter and gradient; the rest is tiny


def test_gradients_left_by_an_earlier_step_are_released_first() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    assert peak_of_step(model, optimizer, lambda: pytest.fail("kept") if model.weight.grad is not None else None) == 32


def test_state_of_the_optimizer_and_shared_memory() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    model[1].weight = model[0].weight
    model.register_buffer("view", model[0].weight.detach()[:2])
    optimizer = torch.optim.Adam(model.parameters())
    parameters, buffers, counter = 4 * (64 + 8 + 8), 4 * (8 + 8), 8
    assert persistent(model, optimizer) == parameters + buffers + counter
    model(torch.rand(4, 8)).sum().backward()
    optimizer.step()
    steps = 3 * 4  # Adam's own counters, one for each of the three parameters
    assert persistent(model, optimizer) == 3 * parameters + buffers + counter + steps

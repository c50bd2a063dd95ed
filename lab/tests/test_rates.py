"""Learning rates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sliceout_lab.train.rates import constant_tail


def test_a_constant_learning_rate_at_the_end():
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.2}], lr=0.1)
    both = constant_tail(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), total=10, fraction=0.3)
    seen = []
    for _ in range(10):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step(), both.step()
    for epoch, (a, b) in enumerate(seen):
        assert (a, b) == pytest.approx((0.1 * 0.5**epoch, 0.2 * 0.5**epoch) if epoch < 7 else (1e-4, 1e-4))
    assert len(both.state_dict()["_schedulers"]) == 2


@pytest.mark.parametrize("settings", [{"fraction": 0.0}, {"fraction": 1.0}, {"total": 1}])
def test_bad_tails_of_the_learning_rate(settings):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(ValueError, match="fraction="):
        constant_tail(optimizer, decay, **{"total": 10, "fraction": 0.1, **settings})

"""What the ranks of ``test_distributed.py`` do. Each job returns plain data for the test to compare."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

import sliceout
from networks import build, data, loss_of, slices_in, starts, step_of, train_step
from ranks import WORLD
from sliceout import drawing
from sliceout import nn as snn

STEPS = 4


def share(x: Tensor, rank: int) -> Tensor:
    return x.chunk(WORLD)[rank]


def report(model: nn.Module, seen: list[list[int]], losses: list[float]) -> dict[str, Any]:
    state = {k: full(v).numpy() for k, v in model.state_dict().items()}
    return {"starts": seen, "step": step_of(model), "losses": losses, "state": state}


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def alone(name: str, steps: int = STEPS, **settings: Any) -> dict[str, Any]:
    """The same training in one process, on the joint batch."""
    model, x = build(name, **settings), data(name)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for _ in range(steps):
        seen.append(starts(model))
        train_step(model, x, optimizer)
    return report(model, seen, [])


def by_parts(rank: int, ranks: str = "spread") -> dict[str, Any]:
    """DDP with two parts on each rank."""
    net = build("mlp", parts=2, ranks=ranks)
    model = DistributedDataParallel(net)
    result = train(rank, model, net, SGD(net.parameters(), lr=0.1, momentum=0.9), "mlp")
    return result | {"parts": [list(s.starts_on_host) for s in slices_in(net)]}


def train(rank: int, model: nn.Module, net: nn.Module, optimizer: Any, name: str, steps: int = STEPS) -> dict[str, Any]:
    x, seen, losses = share(data(name), rank), [], []
    for _ in range(steps):
        seen.append(starts(net))
        loss = loss_of(model, x)
        loss.backward()
        assert all(p.grad is not None for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return report(net, seen, losses)


# -- data parallel -----------------------------------------------------------------------------------------------------


def ddp(rank: int, name: str, options: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    net = build(name, **settings)
    model = DistributedDataParallel(net, **options)
    return train(rank, model, net, SGD(model.parameters(), lr=0.1, momentum=0.9), name)


def ddp_compiled(rank: int, name: str, order: str) -> dict[str, Any]:
    torch._dynamo.reset()
    net = build(name)
    if order == "compile the wrapper":
        model = torch.compile(DistributedDataParallel(net), backend="aot_eager")
    else:
        model = DistributedDataParallel(torch.compile(net, backend="aot_eager", fullgraph=True))
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    train(rank, model, net, optimizer, name, steps=1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        return train(rank, model, net, optimizer, name, steps=STEPS - 1)


def ddp_accumulating(rank: int, name: str) -> dict[str, Any]:
    net = build(name)
    model = DistributedDataParallel(net)
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for _ in range(STEPS):
        seen.append(starts(net))
        first, second = share(data(name), rank).chunk(2)
        with model.no_sync():
            (loss_of(model, first) / 2).backward()
        (loss_of(model, second) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return report(net, seen, [])


def ddp_with_zero(rank: int, name: str) -> dict[str, Any]:
    """Each rank's inner optimizer holds other parameters; the draws must come at the same time all the same."""
    net = build(name)
    model = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1, momentum=0.9)
    return train(rank, model, net, optimizer, name)


# -- fully sharded -----------------------------------------------------------------------------------------------------


def sharded(net: nn.Module, **options: Any) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    for layer in net.modules():
        if isinstance(layer, snn.Sliced) and layer is not net:
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def fsdp(rank: int, name: str, options: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    net = sharded(build(name, **settings), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "sliceout")
        return train(rank, net, net, SGD(net.parameters(), lr=0.1, momentum=0.9), name)


def fsdp_then_slice(rank: int) -> dict[str, Any]:
    """Layers are sliced after they were sharded, and the optimizer was built in between."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    fully_shard(net, mesh=mesh)
    optimizer = SGD(net.parameters(), lr=0.1)
    hidden = sliceout.Slice(16)
    snn.slice_(net[0], out_slice=hidden)
    snn.slice_(net[2], in_slice=hidden)
    return train(rank, net, net, optimizer, "mlp")


def fsdp_accumulating(rank: int, name: str, micro: int) -> dict[str, Any]:
    net = sharded(build(name))
    optimizer = AdamW(net.parameters(), lr=1e-2)
    seen = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "sliceout")
        for _ in range(2):
            for _ in range(micro):
                seen.append(starts(net))
                (loss_of(net, share(data(name), rank)) / micro).backward()
            optimizer.step()
            optimizer.zero_grad()
    return report(net, seen, [])


def fsdp_checkpointed(rank: int, name: str) -> dict[str, Any]:
    net = sharded(build(name))
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for _ in range(STEPS):
        seen.append(starts(net))
        checkpoint(net, share(data(name), rank), use_reentrant=False).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return report(net, seen, [])


def fsdp_mixed_precision(rank: int, name: str) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = sharded(build(name).float(), mp_policy=policy)
    optimizer = SGD(net.parameters(), lr=0.1)
    dtypes = set()
    x = share(data(name), rank).float()
    for _ in range(STEPS):
        out = net(x)
        dtypes.add(str(out.dtype))
        out.float().square().mean().backward()
        dtypes |= {str(p.grad.dtype) for p in net.parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return {"dtypes": dtypes, "step": step_of(net), "starts": starts(net)}


def fsdp_resume(rank: int, name: str) -> dict[str, Any]:
    """Half of the steps, a state dict, a fresh model, the other half."""
    net = sharded(build(name))
    optimizer = SGD(net.parameters(), lr=0.1)
    train(rank, net, net, optimizer, name, steps=2)
    saved = net.state_dict()
    fresh = sharded(build(name, seed=9))
    fresh.load_state_dict(saved)
    again = train(rank, fresh, fresh, SGD(fresh.parameters(), lr=0.1), name, steps=2)
    plain = build(name)
    for layer in plain.modules():
        if isinstance(layer, snn.Sliced):
            snn.plain_(layer)
    return {"keys": list(saved), "plain": list(plain.state_dict()), **again}


def fsdp_alone(name: str) -> dict[str, Any]:
    model, x = build(name), data(name)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        train_step(model, x, optimizer)
    return report(model, [], [])


def draws_only(rank: int, name: str, steps: int) -> list[list[int]]:
    """Weights, data and random state differ between the ranks; what is drawn may not."""
    model = build(name, seed=rank)
    optimizer = SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        seen.append(starts(model))
        train_step(model, data(name, seed=rank), optimizer)
    return [*seen, [s.stream for s in slices_in(model)]]


# -- seeds -------------------------------------------------------------------------------------------------------------


def converted(rank: int, **settings: Any) -> tuple[nn.Module, list[int]]:
    """A model converted where every rank has seeded torch otherwise, and the seeds of its slices."""
    torch.manual_seed(20 + rank)
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))
    sliceout.convert_(net, 0.5, **settings)
    return net, [s.seed for s in sliceout.slices(net)]


def convert_seeds(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    net, seeds = converted(rank, **settings)
    sliceout.draw_(net)
    return {"seeds": seeds, "starts": [list(s.starts_on_host) for s in sliceout.slices(net)]}


def wrapped_seeds(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """As if converted before the process group was there, and then wrapped."""
    real, drawing.rank_and_ranks = drawing.rank_and_ranks, lambda: (0, 1)
    try:
        net, before = converted(rank, **settings)
    finally:
        drawing.rank_and_ranks = real
    DistributedDataParallel(net)
    return {"before": before, "seeds": [s.seed for s in sliceout.slices(net)], "starts": starts(net)}

"""What the ranks of ``test_compact_distributed.py`` do. Each job returns plain data for the test to compare."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import sliceout
from networks import Attention, build, data, loss_of, slices_in, starts
from rank_jobs import report, sharded, share
from sliceout import nn as snn
from sliceout.compact.gradient import SlicedGrad

STEPS = 4
COMPACT = {"grads": "compact"}


class Inside(nn.Module):
    """The sliced network is a part of what DDP wraps, as in Lightning; ``skip`` leaves it out."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.first, self.last = net, nn.Linear(6, 6), nn.Linear(3, 2)
        for p in (*self.first.parameters(), *self.last.parameters()):
            nn.init.constant_(p, 0.1)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = self.first(x)
        return self.last(x[:, :3] if skip else self.net(x))


class Counted:
    """Counts the numbers that are all-reduced: ours, and DDP's own buckets."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ours = self.theirs = 0
        self.real = dist.all_reduce
        ddp.register_comm_hook(self, Counted.bucket)

    @staticmethod
    def bucket(state, bucket):  # DDP reads annotations, and wants none as text
        state.theirs += bucket.buffer().numel()
        flat = bucket.buffer().div_(dist.get_world_size())
        return dist.distributed_c10d._get_default_group().allreduce([flat]).get_future().then(lambda f: f.value()[0])

    def __enter__(self) -> Counted:
        def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.ours += tensor.numel()
            return self.real(tensor, *args, **kwargs)

        dist.all_reduce = counting
        return self

    def __exit__(self, *args: object) -> None:
        dist.all_reduce = self.real


def make(name: str, settings: dict[str, Any]) -> nn.Module:
    if name == "no bias":  # every gradient is slice-sized
        torch.manual_seed(0)
        hidden = sliceout.Slice(16, **settings)
        layers = snn.Linear(6, 16, bias=False, out_slice=hidden), snn.Linear(16, 3, bias=False, in_slice=hidden)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1])
    if name == "inside":
        return Inside(build("mlp", **settings))
    return build(name, **settings)


def sample(name: str) -> Tensor:
    return data("mlp" if name in ("inside", "no bias") else name)


def optimizer_of(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def alone(name: str, off_at: int | None = None, dense: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
    """The same training in one process, on the joint batch."""
    net = make(name, {**COMPACT, **settings})
    optimizer, x, seen, norms = optimizer_of(net), sample(name), [], []
    for step in range(STEPS):
        if step == off_at:
            sliceout.off_(net)
        seen.append(starts(net))
        loss_of(net, x).backward()
        for key in dense:
            p = net.get_parameter(key)
            p.grad = p.grad.dense()  # type: ignore[operator, union-attr]
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return report(net, seen, norms)


def ddp(
    rank: int, name: str, options: dict[str, Any], settings: dict[str, Any], off_at: int | None = None, mode: str = ""
) -> dict[str, Any]:
    """Weights differ between the ranks until DDP has spoken."""
    net = make(name, {**COMPACT, **settings})
    with torch.no_grad():
        for p in net.parameters():
            p.add_(rank)
    model: Any = DistributedDataParallel(net, **options)
    optimizer, x, seen, norms = optimizer_of(net), share(sample(name), rank), [], []
    kinds = set()
    for step in range(STEPS):
        if step == off_at:
            sliceout.off_(net)
        seen.append(starts(net))
        if mode == "accumulating":
            first, second = x.chunk(2)
            with model.no_sync():
                (loss_of(model, first) / 2).backward()
            (loss_of(model, second) / 2).backward()
        elif mode.startswith("checkpointed"):
            out = checkpoint(model, x.requires_grad_(), use_reentrant="reentrant" in mode)
            out.square().mean().backward()
        else:
            loss_of(model, x).backward()
        kinds |= {type(p.grad).__name__ for p in net.parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {**report(net, seen, norms), "kinds": kinds, "ours": reduced_here(model, net)}


def reduced_here(model: Any, net: nn.Module) -> list[str]:
    reduction = getattr(model, "_slice_reduction", None)
    held = {id(p) for p in reduction.parameters} if reduction else set()
    return [name for name, p in net.named_parameters() if id(p) in held]


def ddp_compiled(rank: int, order: str, name: str) -> dict[str, Any]:
    torch._dynamo.reset()
    net = make(name, COMPACT)
    if order == "compile the wrapper":
        model: Any = torch.compile(DistributedDataParallel(net), backend="aot_eager")
    else:
        model = DistributedDataParallel(torch.compile(net, backend="aot_eager", fullgraph=True))
    optimizer, x, seen, norms = optimizer_of(net), share(sample(name), rank), [], []
    for _ in range(STEPS):
        seen.append(starts(net))
        loss_of(model, x).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return report(net, seen, norms)


def traffic(rank: int, name: str, settings: dict[str, Any]) -> tuple[int, int]:
    """Numbers all-reduced in one step: by us, and by DDP."""
    net = make(name, settings)
    model = DistributedDataParallel(net)
    with Counted(model) as counted:
        loss_of(model, share(sample(name), rank)).backward()
    return counted.ours, counted.theirs


def unused(rank: int, skipping: list[list[bool]]) -> dict[str, Any]:
    """Ranks leave out the sliced network at different steps."""
    net = make("inside", COMPACT)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer, x = SGD(net.parameters(), lr=0.1), share(sample("inside"), rank)
    for skip in skipping:
        model(x, skip=skip[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return report(net, [], [])


def unused_alone(skipping: list[list[bool]]) -> dict[str, Any]:
    """Where the ranks differ, the gradient is dense and so is the update; plain SGD does not tell them apart."""
    net = make("inside", {})
    optimizer = SGD(net.parameters(), lr=0.1)
    for skip in skipping:
        for rank in range(2):
            (net(share(sample("inside"), rank), skip=skip[rank]).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return report(net, [], [])


def different_slices(rank: int) -> dict[str, Any]:
    net = make("mlp", COMPACT)
    for s in slices_in(net):
        s.seed = rank
    sliceout.draw_(net)
    model = DistributedDataParallel(net)
    optimizer = SGD(net.parameters(), lr=0.1)
    x = share(sample("mlp"), rank)
    for _ in range(STEPS):
        loss_of(model, x).backward()
        grads = [p.grad.dense().numpy() if isinstance(p.grad, SlicedGrad) else p.grad.numpy() for p in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return {"grads": grads, "ours": reduced_here(model, net)}


def converted_and_reverted(rank: int) -> dict[str, Any]:
    net = Attention()
    report_ = sliceout.convert_(net, 0.5, example_inputs=torch.zeros(2, 5, 16), grads="compact")
    model = DistributedDataParallel(net)
    x = torch.full((2, 5, 16), 0.1 * (rank + 1)) * torch.arange(16.0)
    loss_of(model, x).backward()
    sliced = sorted(reduced_here(model, net))
    sliceout.revert_(net)
    net.zero_grad()
    loss_of(model, x).backward()
    grads = {k: p.grad.numpy() for k, p in net.named_parameters()}
    return {"ours": sliced, "grads": grads, "groups": report_.converted}


def copied(rank: int) -> dict[str, Any]:
    """A deep copy of the wrapper averages too."""
    model = copy.deepcopy(DistributedDataParallel(make("mlp", COMPACT)))
    net = model.module
    loss_of(model, share(sample("mlp"), rank)).backward()
    return {k: p.grad.dense().numpy() for k, p in net.named_parameters() if isinstance(p.grad, SlicedGrad)}


def joined(rank: int) -> str:
    model = DistributedDataParallel(make("mlp", COMPACT))
    try:
        with model.join():
            loss_of(model, share(sample("mlp"), rank)).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def fsdp(rank: int, name: str) -> str:
    """The error of the first step, and whether weights have changed by then."""
    net = sharded(build(name, **COMPACT))
    optimizer, before = optimizer_of(net), copy.deepcopy(net.state_dict())
    loss_of(net, share(data(name), rank)).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        after = net.state_dict()
        assert all((before[key].to_local() == after[key].to_local()).all() for key in before)
        return str(error)
    return "no error"

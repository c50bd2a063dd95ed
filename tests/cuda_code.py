"""The code that Inductor writes for a GPU, on a machine without one.

A step is traced with fake tensors of the CPU; its graphs are then moved to fake tensors of a GPU, lowered, and their
code is taken before anything compiles it. Run as a program (``test_inlined.py`` does), as it replaces parts of torch:
for a transformer layer with one slice and with 8 parts it writes, as JSON, the kernels of forward and of backward.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import types
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, config
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import sliceout
from sliceout import Slice
from sliceout import nn as snn

GPU = torch.device("cuda:0")
HOPPER = types.SimpleNamespace(
    name="H200", major=9, minor=0, multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=150 << 30,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20, gcnArchName="",
)  # fmt: skip
BATCH, TIME, WIDTH, HIDDEN = 256, 64, 128, 512


class Written(Exception):
    """The code is there; nothing need be compiled."""


@contextlib.contextmanager
def as_if_on_a_gpu():  # type: ignore[no-untyped-def]
    """What Inductor asks of a GPU."""
    properties = staticmethod(lambda device=None: HOPPER)
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(types.SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))
    answers: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "_lazy_init": lambda: None,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "get_device_properties": lambda device=None: HOPPER,
            "get_device_capability": lambda device=None: (9, 0),
        },
        CudaInterface: {
            "get_device_properties": properties,
            "get_compute_capability": staticmethod(lambda device=None: 90),
            "is_available": staticmethod(lambda: True),
            "is_bf16_supported": staticmethod(lambda including_emulation=False: True),
            "is_triton_capable": staticmethod(lambda device=None: True),
            "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
        },
        CudaInterface.Worker: {"get_device_properties": properties},
        torch.utils._triton: {"triton_hash_with_backend": lambda: ""},
    }
    with contextlib.ExitStack() as stack:
        for where, names in answers.items():
            stack.enter_context(mock.patch.multiple(where, **names))
        stack.enter_context(config.patch(compile_threads=1, force_disable_caches=True))
        yield


def on_gpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return GPU
    if not isinstance(value, Tensor):
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)


def moved(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same graph for the GPU."""
    graph, new = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for node in module.graph.nodes:
        copied = new[node] = graph.node_copy(node, new.__getitem__)
        copied.args, copied.kwargs = torch.fx.node.map_aggregate((copied.args, copied.kwargs), on_gpu)  # type: ignore[assignment]
        copied.meta = {k: v for k, v in node.meta.items() if k not in ("tensor_meta", "example_value")}
        if "val" in node.meta:
            copied.meta["val"] = pytree.tree_map(on_gpu, node.meta["val"])
    return torch.fx.GraphModule(module, graph)


def written(step: Any, *args: Any) -> list[str]:
    """The code of all graphs of a step, which returns a loss."""
    codes: list[str] = []

    def write(self: GraphLowering) -> Any:
        codes.append(self.codegen()[0].value)
        raise Written

    def inner(module: torch.fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        count = len(codes)
        try:
            compile_fx.compile_fx_inner(moved(module), [on_gpu(t) for t in inputs], **settings)
        except Exception:
            if len(codes) == count:
                raise
        run = lambda args: module(*args)  # noqa: E731
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(module: Any, inputs: Any) -> Any:
        return compile_fx.compile_fx(module, inputs, inner_compile=inner)

    with as_if_on_a_gpu(), mock.patch.object(GraphLowering, "compile_to_module", write):
        torch.compile(step, backend=backend, fullgraph=True)(*args).backward()
    return codes


class Layer(nn.Module):
    """Pre-norm; values that are gated stand for attention, whose kernel is not Inductor's."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        v, h = (Slice(n, 0.5, parts=parts) for n in (WIDTH, HIDDEN))
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.q, self.v = (snn.Linear(WIDTH, WIDTH, bias=False, out_slice=v) for _ in range(2))
        self.o = snn.Linear(WIDTH, WIDTH, in_slice=v)
        self.up, self.down = snn.Linear(WIDTH, HIDDEN, out_slice=h), snn.Linear(HIDDEN, WIDTH, in_slice=h)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.o(torch.sigmoid(self.q(y)) * self.v(y))
        return x + self.down(F.relu(self.up(self.norms[1](x))))


def code_of(parts: int) -> list[str]:
    """Of forward and backward, by bfloat16 autocast."""
    torch._dynamo.reset()
    model = Layer(parts).train()
    sliceout.draw_(model)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    for m in model.modules():
        for name, p in m._parameters.items():
            m._parameters[name] = None if p is None else nn.Parameter(fake.from_tensor(p.data))

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x.sin()).square().mean()

    with fake:
        return written(step, torch.randn(BATCH, TIME, WIDTH, requires_grad=True))


def kernels(code: str) -> list[dict[str, Any]]:
    """What is known of each kernel that is run. Activations have more entries than all weights together."""
    found = []
    for name in re.findall(r"(triton_\w+)\.run\(", code):
        start = code.index(f"def {name}(")
        body = code[start : code.index("'''", start)]
        entries = 1
        for numel in re.findall(r"\w*numel = (\d+)\n", body):
            entries *= int(numel)
        stored = re.findall(r"tl\.store\(.*, (tmp\d+), ", body)
        found.append({
            "name": name,
            "activations": entries >= BATCH * TIME * WIDTH // 2,
            "copies": not re.search(r"tmp\d+ = (?!tl\.load|tl\.broadcast_to|tmp\d+\.to\()", body),
            "stores twice": len(stored) > len(set(stored)),
        })  # fmt: skip
    return found


if __name__ == "__main__":
    json.dump({parts: [kernels(code) for code in code_of(parts)] for parts in (1, 8)}, sys.stdout)

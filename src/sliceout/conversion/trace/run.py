"""How the dry run is executed: on a copy without data, knowing which module is at work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode


def meta_copy(model: nn.Module) -> nn.Module:
    """``model`` with its parameters and buffers on the meta device; no data is copied, and nothing is shared."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _held(vars(module)):
            if id(tensor) not in memo:
                empty = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


def _held(values: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among some attributes, also those in lists and dicts."""
    for value in values.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _held(value)
        elif isinstance(value, (list, tuple)):
            yield from (t for t in value if isinstance(t, Tensor))


class Where:
    """The path of modules that is being executed, as a context."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {m: name for name, m in model.named_modules()}
        self.stack: list[str] = []
        self.failed: str | None = None
        self.on_call: list[Callable[[str, nn.Module, Any, Any], None]] = []

    @property
    def here(self) -> str:
        return self.stack[-1] if self.stack else ""

    def __enter__(self) -> Where:
        def enter(module: nn.Module, args: Any) -> None:
            if module in self.names:
                self.stack.append(self.names[module])
                self.failed = self.names[module]

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if module in self.names and self.stack:
                name = self.stack.pop()
                self.failed = self.here
                for call in self.on_call:
                    call(name, module, args, output)

        self._handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        return self

    def __exit__(self, *exc: Any) -> None:
        for handle in self._handles:
            handle.remove()


class Guesses(TorchDispatchMode):
    """Answers a question about data that the meta device does not have: yes, or 0.

    Code asks such questions to choose a path, mostly whether a mask is all ones. Both traces take the same path.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return args[0].dtype == torch.bool or 0
        return func(*args, **(kwargs or {}))

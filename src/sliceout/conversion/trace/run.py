"""How the dry run is executed: on a copy without data, knowing which module is at work."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def meta_copy(model: nn.Module) -> nn.Module:
    """``model`` with its parameters and buffers on the meta device; no data is copied, and nothing is shared."""
    memo: dict[int, Any] = {}
    for tensor in (t for module in model.modules() for t in tree_leaves(vars(module))):
        if isinstance(tensor, Tensor) and id(tensor) not in memo:
            empty = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def watch_modules(
    model: nn.Module, stack: list[str], on_return: Callable[[str, nn.Module, Any, Any], None]
) -> Iterator[None]:
    """Keep the names of the modules of ``model`` that are at work in ``stack``, and call back when one returns."""
    names = {m: name for name, m in model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        if module in names:
            stack.append(names[module])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if module in names and stack:
            on_return(stack.pop(), module, args, output)

    with register_module_forward_pre_hook(enter), register_module_forward_hook(leave):
        yield


class MetaScalars(TorchDispatchMode):
    """Lets code read numbers from meta tensors, which have none: true for a boolean, else 0.

    Code reads them to choose a path, mostly to ask whether a mask is all ones. Both traces take the same path.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return args[0].dtype == torch.bool or 0
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fixed_randomness() -> Iterator[None]:
    """Code that draws random numbers (to skip layers, say) takes the same path in every trace; states are restored."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        torch.default_generator.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(state)

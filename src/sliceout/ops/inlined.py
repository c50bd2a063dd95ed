"""Which compiled graphs call our operations, and which have them as code that Inductor generates (``lowerings``).

An operation is called through Python, which takes the host longer than to launch several kernels of Inductor's: 84 such
calls made a step of Wide ResNet 28-10 take 26.8 ms, 10.4 at the floor (H200, default mode, batch 128). So they are
inlined, unless a CUDA graph replays the step: there launches cost nothing, and our kernels, which move entries side by
side, are faster. Readings of both are in ``results/tried``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

DEVICES: tuple[str, ...] = ("cuda",)
"""Where they are inlined: on the CPU copies are faster."""
_for_graphs = False
_lowerings = hashlib.sha256(pkgutil.get_data(__package__, "lowerings.py") or b"").hexdigest()[:16]
torch.compiler.config.cache_key_tag += f"sliceout {_lowerings} "  # not to find on disk what other ones of ours made


@contextlib.contextmanager
def for_graphs() -> Iterator[None]:
    """Around code that may be compiled, and is captured in a CUDA graph after that."""
    global _for_graphs
    before, _for_graphs = _for_graphs, True
    config: Any = torch.compiler.config
    try:
        with config.patch(cache_key_tag=config.cache_key_tag + "captured"):  # not to be found by others
            yield
    finally:
        _for_graphs = before


def tell_inductor() -> None:
    """Called whenever an operation is traced. Inductor takes a second to import: only where somebody has done so."""
    if "torch._inductor.lowering" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    from .lowerings import INLINE

    for name, inline in INLINE.items():
        op = getattr(torch.ops.sliceout, name).default
        constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
        lowering.make_fallback(op, layout_constraint=constraint, warn=False)  # as Inductor does it by itself
        lowering.lowerings[op] = functools.partial(_either, inline, lowering.lowerings[op])


def _either(inline: Callable[..., Any], call: Callable[..., Any], first: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor import config

    wanted = first.get_device().type in DEVICES and not config.triton.cudagraphs and not _for_graphs
    return (inline if wanted else call)(first, *args, **kwargs)

"""take and put as code that Inductor generates: the index arithmetic of ``reference``, entry by entry.

An operation that is called costs the host more than several kernels of Inductor's (84 calls made a step of Wide ResNet
28-10 take 26.8 ms, 10.4 at the floor: H200, default mode, batch 128). So in compiled code for a GPU the ops are
inlined: an entry is computed where it is needed, and Inductor fuses it with what is around it (``lowerings``).

Inductor's inner interfaces move. Where they are not what we know, a warning is logged and the ops are called: slower,
and right.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import torch

DEVICES: tuple[str, ...] = ("cuda",)
"""Where ops are inlined: on the CPU copies are faster."""
_log = logging.getLogger(__name__)


def register_lowerings() -> None:
    """Called whenever an op is traced. Inductor takes a second to import: only where somebody has done so."""
    if "torch._inductor.lowering" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    try:
        from torch._inductor import lowering
        from torch._library.utils import get_layout_constraint_tag

        from .lowerings import INLINE

        for name, inline in INLINE.items():
            op = getattr(torch.ops.sliceout, name).default
            constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
            lowering.make_fallback(op, layout_constraint=constraint, warn=False)  # as Inductor does it by itself
            lowering.lowerings[op] = functools.partial(_either, inline, lowering.lowerings[op])
        config: Any = torch.compiler.config
        config.cache_key_tag += f"sliceout {source_hash()} "  # not to find on disk what another version of ours made
    except (ImportError, AttributeError, TypeError) as error:
        _log.warning(
            "Inductor %s is not as expected (%s): take and put are called, not inlined", torch.__version__, error
        )


def source_hash() -> str:
    """Of the code that makes code."""
    return hashlib.sha256(pkgutil.get_data(__package__, "lowerings.py") or b"").hexdigest()[:16]


def _either(inline: Callable[..., Any], call: Callable[..., Any], first: Any, *args: Any, **kwargs: Any) -> Any:
    return (inline if first.get_device().type in DEVICES else call)(first, *args, **kwargs)

"""Floating-point operations of a training step, counted by torch."""

from __future__ import annotations

from typing import Any

import torch

from sliceout.cli.measure import release
from sliceout.cli.work import Work


def count_flops(work: Work) -> int | None:
    """Of forward and backward of one step; counted on two samples, since every product here is linear in the batch."""
    from torch.utils.flop_counter import FlopCounterMode

    size = min(2, work.case.batch)
    x, y = work.batch(size)
    try:
        with FlopCounterMode(display=False, custom_mapping=_attention_on_cpu()) as counter, work.casting():
            work.loss(work.net(x), y).backward()
    except Exception as error:  # a counter that cannot follow a network is no reason not to time it
        print(f"FLOPs were not counted: {type(error).__name__}: {error}")
        return None
    finally:
        release(work)  # cuBLAS would keep workspaces for this pass, and they would count as the step's
    return counter.get_total_flops() * work.case.batch // size


def _attention_on_cpu() -> dict[Any, Any]:
    """torch counts the GPU's attention kernels, but not the CPU's."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    def forward(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return sdpa_flop_count(q, k, v)

    def backward(g: Any, q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return sdpa_backward_flop_count(g, q, k, v)

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }

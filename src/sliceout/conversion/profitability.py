"""Does a slice save time here? Answers from measurements, never from rules of thumb.

``profitability.json`` holds what ``benchmarks/payoff.py`` measured: forward and backward of two layers with sliced
units between them, in percent of the full pair, for several sizes, batches and rates on each kind of device. Where
nothing comparable was measured, nothing is claimed.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .groups import Group
from .reasons import Reason, Skip

log = logging.getLogger(__name__)

TABLE = Path(__file__).with_name("profitability.json")
NEAR = 2.0
"""Sizes up to this factor apart are taken to behave alike."""
MANY = 4096
"""The more rows, the better a slice pays: from so many on, what does not pay pays at no batch."""

_NAMES = {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float32: "tf32"}


def default_align(size: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> int:
    """The alignment for widths and starts of a layer of ``size`` units on a kind of device.

    The smallest one that was measured to be about as fast as any, as far as it divides the size and leaves sixteen
    steps in it, so that rates are met and draws differ. Never below what :class:`~sliceout.Slice` takes by itself: a
    model that is converted on a CPU may be trained elsewhere.

    Example:
        >>> default_align(12), default_align(1001)
        (1, 1)
    """
    if size < 64:
        return 1
    found = [e["align"] for e in _entries(torch.device(device), dtype) if e["align"] is not None]
    align = math.gcd(size, max([8, *found]))
    while align > 8 and align * 16 > size:
        align //= 2
    return align


def cannot_pay(
    kind: str, size: int, width: int, device: torch.device | str, dtype: torch.dtype | None = None
) -> str | None:
    """Why slicing ``size`` units down to ``width`` was measured not to save time; ``None`` if it may.

    The batch that suits slices best counts, if a large one was measured: what does not pay there pays nowhere. ``kind``
    is as in :func:`_kind_of`; ``dtype`` is that of the products, and without it any of those measured may pay.
    """
    best: tuple[float, str] | None = None
    for entry in _entries(torch.device(device), dtype):
        ratios = _comparable(entry["pays"], kind, size, 1 - width / size)
        if max(ratios, default=0) < MANY:
            return None
        ratio = min(ratios.values())
        where = f"{entry['machine']} (measured: {ratio:.0%} of the full layers' time; {entry['file']})"
        if best is None or ratio < best[0]:
            best = ratio, where
    return f"{size} units: a slice of {width} cannot pay on {best[1]}" if best and best[0] >= 1 else None


def not_profitable(
    group: Group, width: int, modules: dict[str, nn.Module], device: torch.device, dtype: torch.dtype | None
) -> Reason | None:
    """What was measured against slicing this group; ``None`` if anything was for it, or nothing was measured."""
    if device.type != "cuda":
        return None
    kinds = {_kind_of(modules[m.module]) for m in group.members if m.role != "unit"}
    if "depthwise" in kinds:  # it was measured between the two that it stands between
        kinds = {"depthwise"}
    times = max((m.blocks * m.inner for m in group.members if m.role == "out"), default=1)  # heads have units each
    reasons = [cannot_pay(kind, group.size * times, width * times, device, dtype) for kind in sorted(kinds)]
    if not reasons or None in reasons:
        return None
    log.info("left out as not profitable: %s: %s", group.name, reasons[0])
    return Skip.NOT_PROFITABLE(str(reasons[0]))


def _kind_of(layer: Any) -> str:
    """As the measurements call it; ``depthwise`` stands between two 1x1 convolutions, ``conv3`` has a wider kernel."""
    if not hasattr(layer, "in_channels"):
        return "linear"
    if layer.groups > 1:
        return "depthwise" if layer.groups == layer.in_channels else "grouped"
    return "conv1" if set(layer.kernel_size) == {1} else "conv3"


def device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype | None]:
    """Where the model is, and the dtype of its products as far as it is known: autocast may be yet to come."""
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None:
        return torch.device("cpu"), None
    kind = first.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        return first.device, torch.get_autocast_dtype(kind)
    return first.device, None if first.dtype is torch.float32 else first.dtype


def _comparable(measured: list[Any], kind: str, size: int, rate: float) -> dict[int, float]:
    """For each batch that was measured, the ratio at the nearest size and at this rate.

    Between two rates that were measured the better one counts: the nearer may cut tiles in two. Above all of them
    nothing is known, since more may be saved there.
    """
    found: dict[int, dict[int, list[tuple[float, float]]]] = {}
    for its_kind, its_size, its_rows, its_rate, ratio in measured:
        if its_kind == kind and 1 / NEAR <= its_size / size <= NEAR:
            found.setdefault(its_rows, {}).setdefault(its_size, []).append((its_rate, ratio))
    ratios = {}
    for its_rows, sizes in found.items():
        pairs = sorted(sizes[min(sizes, key=lambda s: abs(math.log(s / size)))])
        above = next((i for i, (its_rate, _) in enumerate(pairs) if its_rate > rate - 1e-6), None)
        if above is not None:
            exact = above == 0 or pairs[above][0] < rate + 1e-6
            ratios[its_rows] = min(ratio for _, ratio in pairs[above if exact else above - 1 : above + 1])
    return ratios


def _entries(device: torch.device, dtype: torch.dtype | None) -> list[dict[str, Any]]:
    """What was measured on this kind of device; of GPUs, on this model of them and in the precision ``dtype`` means."""
    found = _table().get(device.type, [])
    if device.type != "cuda":
        return found
    wanted = set(_NAMES.values()) if dtype is None else {_NAMES.get(dtype)}
    return [e for e in found if e["machine"] == _gpu(device) and e["dtype"] in wanted]


def _gpu(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else None


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text()) if TABLE.is_file() else {}

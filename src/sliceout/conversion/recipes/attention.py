"""Attention: heads are sliced inside (the paper) or as a whole, and the code around them is told the new numbers.

The trace finds two kinds of groups in an attention layer: the units *inside* every head (for queries and keys they
are contracted against each other; for values they reach the output projection), and the heads themselves. What it
cannot see are the numbers that attention code computes with: ``self.head_dim`` in a view, ``self.scale`` as the
softmax temperature. Those become properties that follow the slice, so the model's own forward runs unchanged.
"""

from __future__ import annotations

import math
from itertools import product

from torch import nn

from ...nn.base import Sliced
from ...nn.foreign import WidthPower, follow_width_, slice_rotary_values_
from ...slices import Slice
from ..groups import Group, Member
from ..reasons import CONFLICT, Reason, Skip
from ..trace import Trace

INSIDE = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_kv", "key_value_proj_dim", "attn_head_dim",
          "dim_per_head", "d_head", "per_head_dim", "hidden_size_per_attention_head")  # fmt: skip
HEADS = ("num_heads", "n_heads", "n_head", "heads", "nhead", "num_attention_heads", "num_key_value_heads",
         "num_kv_heads", "n_kv_heads", "num_q_heads")  # fmt: skip
TOTAL = ("attn_dim", "all_head_size", "inner_dim", "split_size", "kv_dim", "d_attn", "q_dim", "key_dim", "value_dim")
SCALES = ("scale", "scaling", "softmax_scale", "attn_scale", "scale_factor", "norm_factor", "inv_norm_factor",
          "scale_attn", "qk_scale", "attention_scale", "normalize_fact")  # fmt: skip

FUSED_VALUES = "queries, keys and values come out of one projection: the values cannot be sliced alone"


def arrange(model: nn.Module, groups: list[Group], trace: Trace, attention: str) -> None:
    """Sort the groups of attention layers by what they hold, and leave alone those of the other mode.

    A group inside an attention layer holds queries and keys (contracted against each other), heads (each multiplied
    by itself) or values (neither). A fused projection may make queries, keys and values one group.
    """
    groups += _multihead(model, trace, attention)
    modules = dict(model.named_modules())
    homes = {name for g in groups for name in (*g.contracted, *g.batched)}
    for group in groups:
        layers = [m.module for m in group.members]
        if group.kind == "mlp" and any(n.startswith(h + ".") for n in layers for h in homes if h):
            group.kind = "attention"
        if group.kind != "attention":
            continue
        multihead = isinstance(modules.get(group.members[0].module), nn.MultiheadAttention)
        mode = "heads" if group.batched and not group.contracted else "dims"
        if attention == "off":
            group.reason = Skip.ATTENTION_OFF("attention='off'")
        elif multihead:
            continue
        elif mode != ("dims" if attention == "values" else attention):
            group.reason = Skip.CONFLICT(f"{CONFLICT}: attention={attention!r}")
        elif attention == "values" and group.partner is not None:
            group.reason = group.reason or Skip.FUSED_VALUES(FUSED_VALUES)
        elif attention == "values" and group.contracted:
            group.reason = Skip.CONFLICT(f"{CONFLICT}: attention={attention!r}")
        elif group.contracted and group.reason is not None and group.reason.code is Skip.CONCATENATED:
            group.reason = Skip.ROTARY("queries and keys are rotated in pairs of dims (rotary embedding): left whole")
        elif group.contracted and group.reason is None:
            missing = [n for n in group.contracted if not _temperatures(trace, n, group.size)]
            if missing:
                why = f"no softmax temperature found in {missing[0]} that could follow the slice"
                group.reason = Skip.TEMPERATURE(why)


def _multihead(model: nn.Module, trace: Trace, attention: str) -> list[Group]:
    """torch's own attention, which the trace cannot look into: its numbers are local variables."""
    found: list[Group] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or name not in trace.calls:
            continue
        reason = None
        if module.bias_k is not None or module.add_zero_attn:
            reason = Skip.NO_SLICED_FORM("add_bias_kv and add_zero_attn have no sliced form")
        elif type(module) is not nn.MultiheadAttention:
            reason = Skip.NO_SLICED_FORM(f"{type(module).__name__} is a class of its own")
        heads, dims = module.num_heads, module.head_dim
        if attention == "heads":
            members = [Member(name, "heads", 1, dims)]
            found.append(Group(name, heads, members, batched=[name], kind="attention", reason=reason))
        else:
            for role in ("v",) if attention == "values" else ("qk", "v"):
                members = [Member(name, role, heads, 1)]
                found.append(Group(f"{name}.{role}", dims, members, kind="attention", reason=reason))
    return found


def _temperatures(trace: Trace, module: str, size: int) -> list[float]:
    """Exponents of the head size among the numbers that a module multiplies or divides by."""
    return [
        e for e in (-0.5, 0.5, -0.25, 0.25)
        if any(math.isclose(value, size**e, rel_tol=1e-5) for value in trace.scalars.get(module, ()))
    ]  # fmt: skip


def objection(group: Group, width: int, before: Trace, after: Trace) -> Reason | None:
    """Queries and keys: the temperature must have become that of the sliced width."""
    for name in group.contracted:
        if _temperatures(before, name, group.size) != _temperatures(after, name, width):
            return Skip.TEMPERATURE(f"the softmax temperature of {name} does not follow the slice")
    return None


def adapt(model: nn.Module, made: dict[Group, Slice]) -> None:
    """Let the numbers of each attention module follow its slices; torch's own is sliced by then and has none."""
    modules = dict(model.named_modules())
    for group, s in made.items():
        for name in group.contracted or group.batched:
            numbers = _numbers(modules[name], s.size, bool(group.contracted))
            if numbers and not isinstance(modules[name], Sliced):
                follow_width_(modules[name], s, numbers)
    for group, s in made.items():
        if group.kind == "attention" and not group.contracted and not group.batched and group.partner is None:
            home, _, projection = group.name.rpartition(".")
            if not isinstance(modules[home], Sliced):
                slice_rotary_values_(modules[home], projection, s)


def _numbers(module: nn.Module, size: int, inside: bool) -> dict[str, WidthPower]:
    """The attributes of an attention module that depend on the width of a slice of ``size`` units, and how."""
    own = vars(module)
    out = {name: WidthPower() for name in (INSIDE if inside else HEADS) if own.get(name) == size}
    for name in TOTAL:
        if isinstance(own.get(name), int) and own[name] % size == 0:
            out[name] = WidthPower(times=own[name] // size)
    for name, exponent in product(SCALES if inside else (), (-0.5, 0.5)):
        if isinstance(own.get(name), float) and math.isclose(own[name], size**exponent, rel_tol=1e-6):
            out[name] = WidthPower(exponent=exponent)
    return out

"""The dry run: a copy of the model runs its own code without data, first traced, then tried with slices.

What it is called with are the user's example inputs, or a guess from what the model says about itself.
"""

from __future__ import annotations

import copy
import logging
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..nn.base import Sliced
from ..nn.factory import plain_
from ..slices import Slice
from .groups import Group, misaligned, skip_partners
from .reasons import Skip
from .recipes.attention import objection
from .trace import RuleError, Trace, identify, meta_copy, trace

log = logging.getLogger(__name__)

Call = tuple[tuple[Any, ...], dict[str, Any]]
Apply = Callable[[nn.Module, list[Group]], dict[Group, Slice]]
_RETRIES = 8


class Failure(NamedTuple):
    """The module in which the code of a sliced copy failed (``""``: the model itself), and the message."""

    module: str
    message: str


class DryRun:
    """A forward pass of a copy of the model, on the meta device if the code allows it."""

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.model = model
        errors: list[str] = []
        calls = guesses(model) if example_inputs is None else [_as_call(example_inputs)]
        for call in calls:
            for device in ("meta", "cpu"):
                self.device = device
                self.call: Call = tree_map_only(Tensor, operator.methodcaller("to", device), call)
                tried = f"{_shapes(call)} on {device}"
                found = self.run()
                if isinstance(found, Trace):
                    self.trace = found
                    shapes = [str(list(t.shape)) for t in tree_leaves(call) if isinstance(t, Tensor)]
                    self.inputs = ", ".join(shapes) + (" (guessed)" if example_inputs is None else "")
                    log.info("traced %s with %s on %s", type(model).__name__, self.inputs, device)
                    return
                errors.append(f"{tried}: {found.message}")
        raise ValueError(
            f"could not run {type(model).__name__} to see how its layers are connected; pass example_inputs=. Tried: "
            + ("; ".join(errors[:4]) or "nothing, for no input could be guessed")
        )

    def shadow(self) -> nn.Module:
        """A copy in training mode that shares nothing with the model."""
        copied = meta_copy(self.model) if self.device == "meta" else copy.deepcopy(self.model).cpu()
        return copied.train()

    def run(self, apply: Callable[[nn.Module], Any] = lambda shadow: None, flow: bool = False) -> Trace | Failure:
        """Trace a copy after ``apply``, with its ``flow`` if asked for.

        To copy and to run it is the modules' own code, which may raise anything.
        """
        try:
            shadow = self.shadow()
        except Exception as error:
            return self._failure("", error)
        apply(shadow)
        stack = [""]
        try:
            return trace(shadow, *self.call, stack, flow)
        except RuleError:
            raise
        except Exception as error:
            return self._failure(stack[-1], error)

    def finish(self, apply: Callable[[nn.Module], Any]) -> Any:
        """Do to the model what was tried on copies of it; if that fails, the model is as it was before."""
        try:
            return apply(self.model)
        except BaseException:
            all_plain_(self.model)
            raise

    def _failure(self, module: str, error: Exception) -> Failure:
        log.debug("%s on %s failed in %r", _shapes(self.call), self.device, module, exc_info=error)
        first_line = str(error).strip().partition("\n")[0]
        return Failure(module, type(error).__name__ + (f": {first_line[:160]}" if first_line else ""))

    def working_groups(self, groups: list[Group], apply: Apply) -> tuple[list[Group], Trace]:
        """The groups with which the model's own code computes what it should, and the trace that shows it.

        The others get the reason why not. Where a module fails that holds several groups, all of them are dropped and
        then tried again one kind at a time: usually only one of them is to blame.
        """
        chosen, tried = [g for g in groups if g.reason is None], self.trace
        suspects: dict[Any, list[Group]] = {}
        done = False
        while chosen and not done:
            tried = self._try_sliced(chosen, apply, suspects)
            left = [g for g in chosen if g.reason is None]
            chosen, done = left, len(left) == len(chosen)
        for same_kind in list(suspects.values())[:_RETRIES]:
            again = list(dict.fromkeys([*same_kind, *(g.partner for g in same_kind if g.partner is not None)]))
            if all(g in chosen for g in again):
                continue
            more = [*chosen, *again]
            reasons = {g: g.reason for g in more}
            for group in again:
                group.reason = None
            second = self._try_sliced(more, apply, {})
            if all(g.reason is None for g in more):
                chosen, tried = more, second
                log.debug("sliced after all: %s", ", ".join(g.name for g in again))
            else:
                for group, reason in reasons.items():
                    group.reason = reason
        return chosen, tried

    def _try_sliced(self, chosen: list[Group], apply: Apply, suspects: dict[Any, list[Group]]) -> Trace:
        """Trace a copy in which these groups are sliced. What fails gets a reason, and is suspect if not alone."""
        made: dict[Group, Slice] = {}
        tried = self.run(lambda shadow: made.update(apply(shadow, chosen)))
        if isinstance(tried, Failure):
            near = _nearest(chosen, tried.module)
            kinds = {_kind(g) for g in near}
            for group in chosen:
                if group in near or (_kind(group) in kinds and tried.module):  # the same code with the same sizes
                    group.reason = Skip.FAILED(f"{tried.module or 'the model'} cannot take it: {tried.message}")
                    if len(kinds) > 1:
                        suspects.setdefault(_kind(group), []).append(group)
        else:
            for one, other, _ in tried.adds:
                identify(one, other)
            for group in chosen:
                width = made[group].width
                group.reason = misaligned(self.model, group, width, tried)
                group.reason = group.reason or objection(group, width, self.trace, tried)
        skip_partners(chosen)
        for group in (g for g in chosen if g.reason is not None):
            log.debug("dropped after a trial: %s: %s", group.name, group.reason)
        return tried if isinstance(tried, Trace) else self.trace


def all_plain_(model: nn.Module) -> nn.Module:
    """Take the slices of all its modules away, in place."""
    for module in [m for m in model.modules() if isinstance(m, Sliced)]:
        plain_(module)  # type: ignore[arg-type]
    return model


def _kind(group: Group) -> Any:
    """Equal for groups that differ in layer numbers only."""
    return group.size, tuple((re.sub(r"\d+", "*", m.module), m.role, m.blocks, m.inner) for m in group.members)


def _nearest(groups: list[Group], failed: str) -> list[Group]:
    """The groups whose layers lie in the module that failed, or in the closest module around it."""
    path = failed.split(".") if failed else []
    for end in range(len(path), 0, -1):
        around = ".".join(path[:end]) + "."
        if near := [g for g in groups if any(f"{m.module}.".startswith(around) for m in g.members)]:
            return near
    return groups[:1]


def _shapes(call: Call) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tree_leaves(call) if isinstance(t, Tensor)) or "no tensors"


# -- example inputs ----------------------------------------------------------------------------------------------------


def _as_call(example: Any) -> Call:
    """A tensor, a tuple of positional or a dict of keyword inputs, as ``(args, kwargs)``."""
    if isinstance(example, dict) or hasattr(example, "keys"):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


def guesses(model: nn.Module) -> Iterator[Call]:
    """Inputs the model might take, likeliest first, in the dtype of its parameters."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    for call in chain(_transformers(model), _timm(model), _from_first_layer(model)):
        yield tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, call)


def _transformers(model: Any) -> Iterator[Call]:
    if not hasattr(model, "config") or not hasattr(model, "main_input_name"):
        return
    config, main = model.config, model.main_input_name
    ids = torch.ones(2, 16, dtype=torch.int64)
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size, channels = getattr(vision, "image_size", 64), getattr(vision, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        yield _as_call({"pixel_values": torch.zeros(2, channels, height, width)})
    elif main == "input_values":
        yield _as_call({"input_values": torch.zeros(2, 16000)})
    elif main == "input_features":
        features = torch.zeros(2, getattr(config, "num_mel_bins", 80), 3000)
        yield _as_call({"input_features": features, "decoder_input_ids": ids})
    else:
        names = ("input_ids", "decoder_input_ids") if getattr(config, "is_encoder_decoder", False) else ("input_ids",)
        yield _as_call({**dict.fromkeys(names, ids), "use_cache": False})
        yield _as_call(dict.fromkeys(names, ids))
    dummy = getattr(model, "dummy_inputs", None)
    if dummy:
        yield _as_call(dummy)


def _timm(model: Any) -> Iterator[Call]:
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    shape = config.get("input_size") if isinstance(config, dict) else None
    if shape:
        yield _as_call(torch.zeros(2, *shape))
        built_for = next((m.img_size for m in model.modules() if getattr(m, "img_size", None)), None)
        if isinstance(built_for, (int, tuple)):
            yield _as_call(torch.zeros(2, shape[0], *((built_for,) * 2 if isinstance(built_for, int) else built_for)))


def _from_first_layer(model: nn.Module) -> Iterator[Call]:
    """The first layer with weights takes the input: its kind says what kind of tensor that is."""
    for module in model.modules():
        for kinds, examples in _FIRST_LAYERS:
            if isinstance(module, kinds):
                yield from map(_as_call, examples(module))
                return


def _sequences(module: nn.Module) -> list[Any]:
    sequence = torch.zeros(2, 16, next(p for p in module.parameters() if p.dim() == 2).shape[1])
    return [sequence, (sequence,) * 3]


def _sides(stem: Any) -> list[int]:
    """A stem that leaves out pixels was made for large images."""
    return sorted((32, 224, 64, 128, 256, 299, 384), key=lambda n: n != 224 if max(stem.stride) > 1 else 0)


_FIRST_LAYERS: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (nn.Linear, lambda m: [torch.zeros(2, m.in_features), torch.zeros(2, 16, m.in_features)]),
    (nn.Embedding, lambda m: [torch.zeros(2, 16, dtype=torch.int64)]),
    (nn.BatchNorm1d, lambda m: [torch.zeros(2, m.num_features)]),
    (nn.BatchNorm2d, lambda m: [torch.zeros(2, m.num_features, 32, 32)]),
    (nn.LayerNorm, lambda m: [torch.zeros(2, 16, *m.normalized_shape)]),
    ((nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention), _sequences),
    (nn.Conv1d, lambda m: (torch.zeros(2, m.in_channels, n) for n in _sides(m))),
    (nn.Conv2d, lambda m: (torch.zeros(2, m.in_channels, n, n) for n in _sides(m))),
    (nn.Conv3d, lambda m: (torch.zeros(2, m.in_channels, n, n, n) for n in (32, 64))),
)
"""What they may be given, likeliest first."""

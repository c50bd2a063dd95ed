"""The dry run: a copy of the model runs its own code without data, first traced, then tried with slices."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from . import inputs, recipes
from .groups import Group, misaligned, part_together
from .trace import Trace, Where, identify, meta_copy, trace

Apply = Callable[[nn.Module, list[Group]], Any]
Width = Callable[[Group], int]


class DryRun:
    """A forward pass of a copy of the model, on the meta device if the code allows it."""

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.model = model
        errors: list[str] = []
        calls = inputs.guesses(model) if example_inputs is None else [inputs.as_call(example_inputs)]
        for call in calls:
            for device in ("meta", "cpu"):
                self.device = device
                self.call = inputs.to_device(call, device)
                try:
                    self.trace = trace(self.shadow(), *self.call)
                    return
                except Exception as error:
                    errors.append(f"{_shapes(call)} on {device}: {_first_line(error)}")
        raise ValueError(
            f"could not run {type(model).__name__} to see how its layers are connected; pass example_inputs=. Tried: "
            + ("; ".join(errors[:4]) or "nothing, for no input could be guessed")
        )

    def shadow(self) -> nn.Module:
        """A copy in training mode that shares nothing with the model."""
        copied = meta_copy(self.model) if self.device == "meta" else copy.deepcopy(self.model).cpu()
        return copied.train()

    def attempt(self, groups: list[Group], apply: Apply) -> tuple[Trace | None, str, str]:
        """Trace a copy in which ``groups`` are sliced; if its code fails: the module in which, and the message."""
        shadow = self.shadow()
        where = Where(shadow)
        try:
            apply(shadow, groups)
            tried = trace(shadow, *self.call, where=where)
            for one, other, _ in tried.adds:
                identify(one, other)
            return tried, "", ""
        except Exception as error:
            return None, where.failed or "", _first_line(error)

    def settle(self, groups: list[Group], apply: Apply, width: Width) -> tuple[list[Group], Trace]:
        """The groups with which the model's own code computes what it should, and the trace that shows it.

        The others get the reason why not. Where a module fails that holds several groups, all of them are dropped and
        then tried again one kind at a time: usually only one of them is to blame.
        """
        chosen = [g for g in groups if g.reason is None]
        chosen, tried, suspects = self._reduce(chosen, apply, width)
        for kind in suspects[:_RETRIES]:
            kind = list(dict.fromkeys([*kind, *(g.partner for g in kind if g.partner is not None)]))
            if all(g in chosen for g in kind):
                continue
            reasons = [g.reason for g in kind]
            for group in kind:
                group.reason = None
            more, second, _ = self._reduce([*chosen, *kind], apply, width, give_up=True)
            if len(more) == len(chosen) + len(kind):
                chosen, tried = more, second
            else:
                for group in chosen:
                    group.reason = None
                for group, reason in zip(kind, reasons, strict=True):
                    group.reason = reason
        return chosen, tried

    def _reduce(
        self, chosen: list[Group], apply: Apply, width: Width, give_up: bool = False
    ) -> tuple[list[Group], Trace, list[list[Group]]]:
        """Drop what fails until nothing does; also the kinds of groups that fell with others. Or stop at a failure."""
        model = self.shadow()
        suspects: dict[Any, list[Group]] = {}
        tried: Trace | None = self.trace
        while chosen:
            tried, failed, message = self.attempt(chosen, apply)
            if tried is None:
                near = _nearest(chosen, failed)
                kinds = {_kind(g) for g in near}
                for group in chosen:
                    if group in near or (_kind(group) in kinds and failed):  # the same code with the same sizes
                        group.reason = f"{failed or 'the model'} cannot take it: {message}"
                        if len(kinds) > 1:
                            suspects.setdefault(_kind(group), []).append(group)
            else:
                for group in chosen:
                    group.reason = misaligned(model, group, width(group), tried)
                    group.reason = group.reason or recipes.refuses(group, width(group), self.trace, tried)
            part_together(chosen)
            left = [g for g in chosen if g.reason is None]
            if len(left) == len(chosen) and tried is not None:
                break
            if give_up:
                return [], self.trace, []
            chosen = left
        return chosen, tried or self.trace, list(suspects.values())


_RETRIES = 8


def _kind(group: Group) -> Any:
    """Equal for groups that differ in layer numbers only."""
    return group.size, tuple((re.sub(r"\d+", "*", m.module), m.role, m.blocks, m.inner) for m in group.members)


def _nearest(groups: list[Group], failed: str) -> list[Group]:
    """The groups whose layers lie in the module that failed, or in the closest module around it."""
    path = failed.split(".") if failed else []
    while True:
        prefix = ".".join(path)
        near = [g for g in groups if any((m.module + ".").startswith(prefix + ".") or not prefix for m in g.members)]
        if near or not path:
            return near[:1] if not prefix else near
        path = path[:-1]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def _shapes(call: inputs.Call) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tree_leaves(call) if isinstance(t, Tensor)) or "no tensors"

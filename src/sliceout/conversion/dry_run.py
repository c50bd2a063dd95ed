"""The dry run: a copy of the model runs its own code without data, first traced, then tried with slices."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from . import inputs, recipes
from .groups import Group, misaligned, skip_partners
from .reasons import Skip
from .trace import CurrentModule, RuleError, Trace, identify, meta_copy, trace

log = logging.getLogger(__name__)

Apply = Callable[[nn.Module, list[Group]], Any]
Width = Callable[[Group], int]
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
        calls = inputs.guesses(model) if example_inputs is None else [inputs.as_call(example_inputs)]
        for call in calls:
            for device in ("meta", "cpu"):
                self.device, self.call = device, inputs.to_device(call, device)
                tried = f"{_shapes(call)} on {device}"
                found = self._run()
                if isinstance(found, Trace):
                    self.trace = found
                    log.info(
                        "traced %s with %s%s", type(model).__name__, tried, " (guessed)" * (example_inputs is None)
                    )
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

    def _run(self, apply: Callable[[nn.Module], Any] = lambda shadow: None) -> Trace | Failure:
        """Trace a copy. To copy and to run it is the modules' own code, which may raise anything; the rest is ours."""
        try:
            shadow = self.shadow()
        except Exception as error:
            return self._failure("", error)
        apply(shadow)
        current = CurrentModule(shadow)
        try:
            return trace(shadow, *self.call, current)
        except RuleError:
            raise
        except Exception as error:
            return self._failure(current.last or "", error)

    def _failure(self, module: str, error: Exception) -> Failure:
        log.debug("%s on %s failed in %r", _shapes(self.call), self.device, module, exc_info=error)
        return Failure(module, _first_line(error))

    def try_sliced(self, groups: list[Group], apply: Apply) -> Trace | Failure:
        """Trace a copy in which ``groups`` are sliced."""
        tried = self._run(lambda shadow: apply(shadow, groups))
        if isinstance(tried, Trace):
            for one, other, _ in tried.adds:
                identify(one, other)
        return tried

    def working_groups(self, groups: list[Group], apply: Apply, width: Width) -> tuple[list[Group], Trace]:
        """The groups with which the model's own code computes what it should, and the trace that shows it.

        The others get the reason why not. Where a module fails that holds several groups, all of them are dropped and
        then tried again one kind at a time: usually only one of them is to blame.
        """
        chosen = [g for g in groups if g.reason is None]
        chosen, tried, suspects = self._drop_failing(chosen, apply, width)
        for same_kind in suspects[:_RETRIES]:
            again = list(dict.fromkeys([*same_kind, *(g.partner for g in same_kind if g.partner is not None)]))
            if all(g in chosen for g in again):
                continue
            reasons = [g.reason for g in again]
            for group in again:
                group.reason = None
            more, second, _ = self._drop_failing([*chosen, *again], apply, width, give_up=True)
            if len(more) == len(chosen) + len(again):
                chosen, tried = more, second
                log.debug("sliced after all: %s", ", ".join(g.name for g in again))
            else:
                for group in chosen:
                    group.reason = None
                for group, reason in zip(again, reasons, strict=True):
                    group.reason = reason
        return chosen, tried

    def _drop_failing(
        self, chosen: list[Group], apply: Apply, width: Width, give_up: bool = False
    ) -> tuple[list[Group], Trace, list[list[Group]]]:
        """Drop what fails until nothing does; also the kinds of groups that fell with others. Or stop at a failure."""
        suspects: dict[Any, list[Group]] = {}
        tried: Trace | Failure = self.trace
        while chosen:
            tried = self.try_sliced(chosen, apply)
            if isinstance(tried, Failure):
                near = _nearest(chosen, tried.module)
                kinds = {_kind(g) for g in near}
                for group in chosen:
                    if group in near or (_kind(group) in kinds and tried.module):  # the same code with the same sizes
                        group.reason = Skip.FAILED(f"{tried.module or 'the model'} cannot take it: {tried.message}")
                        if len(kinds) > 1:
                            suspects.setdefault(_kind(group), []).append(group)
            else:
                for group in chosen:
                    group.reason = misaligned(self.model, group, width(group), tried)
                    group.reason = group.reason or recipes.objection(group, width(group), self.trace, tried)
            skip_partners(chosen)
            left = [g for g in chosen if g.reason is None]
            for group in (g for g in chosen if g.reason is not None):
                log.debug("dropped after a trial: %s: %s", group.name, group.reason)
            if len(left) == len(chosen) and isinstance(tried, Trace):
                break
            if give_up:
                return [], self.trace, []
            chosen = left
        return chosen, tried if isinstance(tried, Trace) else self.trace, list(suspects.values())


def _kind(group: Group) -> Any:
    """Equal for groups that differ in layer numbers only."""
    return group.size, tuple((re.sub(r"\d+", "*", m.module), m.role, m.blocks, m.inner) for m in group.members)


def _nearest(groups: list[Group], failed: str) -> list[Group]:
    """The groups whose layers lie in the module that failed, or in the closest module around it."""
    path = failed.split(".") if failed else []
    while path:
        prefix = ".".join(path) + "."
        near = [g for g in groups if any((m.module + ".").startswith(prefix) for m in g.members)]
        if near:
            return near
        path.pop()
    return groups[:1]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def _shapes(call: inputs.Call) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tree_leaves(call) if isinstance(t, Tensor)) or "no tensors"

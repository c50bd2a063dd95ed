"""The dry run: a copy of the model runs its own code without data, first traced, then tried with slices."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..nn.base import Sliced
from ..nn.factory import plain_
from ..slices import Slice
from . import inputs, recipes
from .groups import Group, misaligned, skip_partners
from .reasons import Skip
from .trace import RuleError, Trace, identify, meta_copy, trace

log = logging.getLogger(__name__)

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
        calls = inputs.guesses(model) if example_inputs is None else [inputs.as_call(example_inputs)]
        for call in calls:
            for device in ("meta", "cpu"):
                self.device, self.call = device, inputs.to_device(call, device)
                tried = f"{_shapes(call)} on {device}"
                found = self.run()
                if isinstance(found, Trace):
                    self.trace = found
                    guessed = " (guessed)" if example_inputs is None else ""
                    log.info("traced %s with %s%s", type(model).__name__, tried, guessed)
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

    def run(self, apply: Callable[[nn.Module], Any] = lambda shadow: None) -> Trace | Failure:
        """Trace a copy after ``apply``. To copy and to run it is the modules' own code, which may raise anything."""
        try:
            shadow = self.shadow()
        except Exception as error:
            return self._failure("", error)
        apply(shadow)
        stack = [""]
        try:
            return trace(shadow, *self.call, stack)
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
        return Failure(module, _first_line(error))

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
                group.reason = group.reason or recipes.objection(group, width, self.trace, tried)
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

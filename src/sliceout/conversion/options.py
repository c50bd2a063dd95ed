"""What ``convert_`` is asked for: checks before anything is touched, and how rates and filters are read."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..nn.base import Sliced
from ..schemes import SCHEMES
from ..slices import Slice, as_float, check_choice

Rate = float | Mapping[str, float] | Callable[[str], float | None] | None
Filter = str | Iterable[str] | Callable[[nn.Module, str], bool] | None

ATTENTION = ("dims", "values", "heads", "off")
DECAYS = ("linear",)
_WAY_OUT = {
    "parts": "a batch has parts with scheme='sliceout' alone",
    "ranks": "ranks are spread with scheme='sliceout' and parts= alone",
    "grads": "compact gradients go with scheme='sliceout'",
    "seed": "its masks come from torch's random state, call torch.manual_seed",
    "decay": "rates rise over depth with scheme='samples' or 'droppath' alone",
    "attention": "attention is about units, choose blocks with filter=",
    "stages": "stages is about units, choose blocks with filter=",
    "paper_exclusions": "paper_exclusions is about units, choose blocks with filter=",
}
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule"}


def check_model(model: nn.Module) -> None:
    if type(model).__name__ == "OptimizedModule":  # by name: its class would import the compiler
        raise ValueError("this model is compiled: convert the original module first, then compile it")
    for name, m in model.named_modules():
        wrapper = next((c.__name__ for c in type(m).__mro__ if c.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise ValueError(f"{name or 'the model'} is wrapped in {wrapper}: convert_ first, wrap it afterwards")
        if isinstance(m, Sliced):
            raise ValueError(f"{name or 'the model'} is sliced already: call sliceout.revert_(model) first")
        if isinstance(m, torch.jit.ScriptModule):
            raise ValueError(f"{name or 'the model'} is a TorchScript module, whose classes cannot be changed")


def check_options(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse unknown values, and options that have no effect with this scheme; their default values do no harm."""
    scheme = given["scheme"]
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r}: expected one of {', '.join(map(repr, SCHEMES))}")
    check_choice("attention", given["attention"], ATTENTION)
    if given["decay"] is not None:
        check_choice("decay", given["decay"], DECAYS)
        if SCHEMES[scheme].place == "branches" and not isinstance(given["rate"], (int, float)):
            raise ValueError(
                f"decay={given['decay']!r} goes with a number as rate, the highest one, not with {given['rate']!r}"
            )
    if given["stages"] is not None and given["stages"] < 1:
        raise ValueError(f"stages={given['stages']}: expected at least 1, or None for all")
    settings = {name: given[name] for name in ("sampling", "norm", "fold", "grads", "seed", "parts", "ranks")}
    Slice(8, 0.5, **settings | ({"seed": 0} if given["seed"] is None else {}))  # knows the names
    if scheme == "sliceout" and given["ranks"] != defaults["ranks"] and given["parts"] == 1:
        raise ValueError(f"ranks={given['ranks']!r} has no effect with parts=1: all ranks slice alike")
    for name in SCHEMES[scheme].no_effect:
        if given[name] != defaults[name]:
            raise ValueError(
                f"{name}={given[name]!r} has no effect with scheme={scheme!r}: {_WAY_OUT.get(name, 'leave it out')}"
            )


def checked_rate(rate: Any) -> Rate:
    """The rate that was asked for, with plain floats for numbers of any kind."""
    if rate is None or callable(rate):
        return rate
    if isinstance(rate, Mapping):
        return {pattern: _fraction(f"rate[{pattern!r}]", value) for pattern, value in rate.items()}
    return _fraction("rate", rate)


def _fraction(name: str, value: Any) -> float:
    number = as_float(name, value)
    if not 0 <= number < 1:
        raise ValueError(f"{name}={number}: expected 0 <= rate < 1")
    return number


def check_patterns(rate: Rate, layers: Iterable[str]) -> None:
    """Refuse names in a dict of rates that match none of these layers: those of the groups that were found."""
    known = list(dict.fromkeys(layers))
    if not isinstance(rate, Mapping) or not known:
        return
    for pattern in rate:
        if not fnmatch.filter(known, pattern):
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4) or known[:3]
            raise ValueError(
                f"rate[{pattern!r}] matches no layer of what could be sliced with this scheme. "
                f"Such layers are {', '.join(near)}: correct the name, or leave it out (patterns are fnmatch's)"
            )


def rate_of(rate: Rate, name: str, layers: Iterable[str], dropouts: Iterable[float]) -> float | None:
    """The rate of the group ``name`` with these layers and rates of dropout; ``None`` if it has none."""
    if rate is None:
        return max(dropouts, default=None) or None
    if callable(rate):
        value = rate(name)
        return None if value is None else _fraction(f"rate({name!r})", value)
    if isinstance(rate, Mapping):
        names = set(layers)
        return next((r for pattern, r in rate.items() if fnmatch.filter(names, pattern)), None)
    return rate


def matches(filter: Filter, layers: Mapping[str, nn.Module]) -> bool:
    """Whether all these layers, by name, match."""
    if filter is None:
        return True
    if callable(filter):
        return all(filter(module, name) for name, module in layers.items())
    patterns = [filter] if isinstance(filter, str) else list(filter)
    return all(any(fnmatch.fnmatch(name, p) for p in patterns) for name in layers)

"""A scheme and its settings: what is possible, what is left out where it does not matter, and how it is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sliceout.cli import UserError

from .experiment_file import LATER, ROW, SCHEME, near

SLICED = ("sliceout", "controlled", "patch")  # schemes whose networks are smaller
_ALLOWED = {
    "sampling": ("circular", "window", "prefix"),
    "norm": ("probabilistic", "flow"),
    "attention": ("dims", "values", "heads", "off"),
}


def whole(default: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A whole scheme: what is given, else the default; what a scheme does not have is ``None``.

    The settings in ``LATER`` are there only if they are set to something else than their default.
    """
    from sliceout.schemes import SCHEMES

    out = {
        **dict.fromkeys(SCHEME),
        **default,
        **{k: v for k, v in given.items() if v is not None and k not in ROW},
    }
    later = {key: out.pop(key, None) for key in LATER}
    scheme, rate = out["scheme"], out["rate"]
    if scheme not in SCHEMES:
        raise UserError(f"scheme {scheme!r}: expected one of {', '.join(SCHEMES)}{near(scheme, SCHEMES)}")
    out["grads"] = out["grads"] or "dense"
    for key, allowed in _ALLOWED.items():
        out[key] = out[key] or (allowed[0] if key != "attention" else None)  # whose default was never written down
        if out[key] not in (*allowed, None):
            raise UserError(f"--{key} {out[key]}: expected {' or '.join(allowed)}{near(str(out[key]), allowed)}")
    if out["attention"] == "dims":
        out["attention"] = None
    if scheme == "sliceout":
        later = _checked(later, given.get("rate"), out["grads"])
        rate = later["grow"][0][1] if "grow" in later else rate
    else:
        later = {}
    if scheme == "none":
        rate = 0.0
    elif rate is None or not 0 < rate < 1:
        raise UserError(f"--rate {rate}: expected 0 < rate < 1 (no dropout at all is --scheme none)")
    out["rate"] = float(rate)
    if scheme != "sliceout":
        out |= {"sampling": None, "exclusions": None}
    if scheme not in ("sliceout", "patch"):
        out["norm"] = None
    if scheme == "patch":
        out |= {"stages": None, "attention": None}
    if scheme not in SLICED:
        out |= {"align": None, "grads": "dense"}
        if scheme == "none" or out["attention"] == "values":
            out["attention"] = None  # dropout lies where values are read, never on queries and keys
    if out["sampling"] == "circular":
        out["norm"] = "probabilistic"  # where both norms coincide
    return {**out, **later}


def _checked(later: Mapping[str, Any], rate: float | None, grads: str) -> dict[str, Any]:
    """Those of the settings in ``LATER`` that differ from their default, if they are possible."""
    out: dict[str, Any] = {}
    parts, grow = later["parts"], later["grow"]
    if parts is not None and parts < 1:
        raise UserError(f"--parts {parts}: expected at least 1")
    if parts is not None and parts > 1:
        if grads == "compact":
            raise UserError(
                f"--parts {parts} --grads compact: together the parts reach every unit; use dense gradients"
            )
        out["parts"] = parts
    if grow:
        out["grow"] = growth_of(grow)
        if rate is not None and rate != out["grow"][0][1]:
            raise UserError(f"rate {rate} beside grow = {grow}: leave out the rate, or let grow begin with it")
    return out


def growth_of(pairs: Any) -> list[list[float]]:
    """Rates by progress, ``[[0, 0.5], [0.5, 0.25], [0.75, 0]]``, checked."""
    numbers = all(len(p) == 2 and all(isinstance(n, int | float) for n in p) for p in pairs)
    if not numbers:
        raise UserError(f"grow = {pairs}: expected pairs of progress and rate such as [[0, 0.5], [0.5, 0]]")
    at, rates = [float(p[0]) for p in pairs], [float(p[1]) for p in pairs]
    if at[0] != 0 or at != sorted(set(at)) or at[-1] >= 1:
        raise UserError(f"grow = {pairs}: expected progress that begins with 0 and rises, each below 1")
    if rates != sorted(set(rates), reverse=True) or not 0 <= rates[-1] < rates[0] < 1:
        raise UserError(f"grow = {pairs}: expected rates that fall, from below 1 to 0 or more: the network grows")
    return [list(pair) for pair in zip(at, rates, strict=True)]


def is_growth(key: str, value: Any) -> bool:
    """Whether a list is one growth, a list of pairs, and no list of several."""
    return key == "grow" and not any(isinstance(part, list) for pair in value for part in pair)


# -- in words --------------------------------------------------------------------------------------------------------


def label(config: Mapping[str, Any]) -> str:
    """The scheme of a run, for people.

    Example:
        >>> label({"scheme": "sliceout", "rate": 0.5, "sampling": "window", "norm": "flow"})
        'sliceout 0.5 window flow'
    """
    words = [config["scheme"], config.get("rate") or None, config.get("sampling")]
    if config.get("sampling") == "window" or config["scheme"] == "patch":
        words.append(config.get("norm"))
    words += additions(config)
    return " ".join(str(w) for w in words if w is not None)


def additions(config: Mapping[str, Any]) -> list[str]:
    """What a run has beyond the paper's schemes, in words.

    Example:
        >>> additions({"parts": 8, "attention": "values", "grow": [[0.0, 0.5], [0.75, 0.0]]})
        ['8 parts', 'attention values', 'growing (rate 0.5, 0 from 75 %)']
    """
    network = config.get("model_settings") or {}
    growth = [
        f"{rate:g}" + (f" from {at:.0%}".replace("%", " %") if at else "") for at, rate in config.get("grow") or ()
    ]
    return [
        *([f"{config['parts']} parts"] if config.get("parts", 1) > 1 else []),
        *([f"attention {config['attention']}"] if config.get("attention") else []),
        *([f"growing (rate {', '.join(growth)})"] if growth else []),
        *([f"narrow {network['keep']:g}"] if network.get("keep", 1) < 1 else []),
        *([f"residual dropout {network['residual_dropout']:g}"] if network.get("residual_dropout") else []),
    ]


def labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A label for each: with the epochs and the learning rate, where they are not the same in all."""
    return [", ".join([label(c), *told]) for c, told in zip(configs, differences(configs), strict=True)]


def differences(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """For each the epochs and the learning rate in words, as far as they are not the same in all."""

    def settings(config: Mapping[str, Any]) -> tuple[str, str]:
        lr = (config.get("optimizer") or {}).get("lr")
        return f"{config.get('epochs')} epochs", f"lr {lr:g}" if lr is not None else "lr unknown"

    found = [settings(c) for c in configs]
    differ = [i for i in range(2) if len({f[i] for f in found}) > 1]
    return [[f[i] for i in differ] for f in found]

"""Experiment files: TOML, checked by msgspec, one extending another; mistakes are named with their key and the way out.

The structs below only check. What is used is the file's own content, since the id of a run is a hash of it.
"""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from sliceout.cli import UserError

FOLDER = Path(__file__).parent / "experiments"
Mode = Literal["eager", "compiled", "captured"]
Precision = Literal["fp32", "tf32", "bf16"]
MODES, PRECISIONS = get_args(Mode), get_args(Precision)

Number = int | float


def _struct(name: str, /, **fields: Any) -> type[msgspec.Struct]:
    """A part of a file: every key may be missing, and no other may be there."""
    optional = [(key, kind | msgspec.UnsetType, msgspec.UNSET) for key, kind in fields.items()]
    return msgspec.defstruct(name, optional, forbid_unknown_fields=True)


SCHEME: dict[str, Any] = {
    "scheme": str, "rate": Number, "sampling": str, "norm": str, "align": int, "stages": int, "exclusions": bool,
    "attention": str, "grads": str,
}  # fmt: skip
"""A scheme and its settings: every one of them is in the config of a run."""
LATER: dict[str, Any] = {"parts": int, "grow": list[list[Any]]}
"""Settings of a scheme that came later: a run has them in its config only where they are set, so ids stay the same."""
ROW: dict[str, Any] = {"epochs": int, "lr": Number, "model_settings": dict[str, Any]}
"""What a row may change besides its scheme."""
_SECTIONS: dict[str, Any] = {
    "scheme": _struct("Scheme", **SCHEME, **LATER),
    "inputs": _struct("Inputs", augment=str, normalise=str, flatten=bool, sequence=int, size=int),
    "optimizer": _struct(
        "Optimizer", name=str, lr=Number, betas=list[Number], eps=Number, momentum=Number, dampening=Number,
        nesterov=bool, weight_decay=Number, alpha=Number,
    ),
    "schedule": _struct(
        "Schedule", name=str, at=list[Number], factor=Number, every=Number, of=Number, warmup=Number, tail_lr=Number
    ),
    "model_settings": dict[str, Any],  # what the network's class takes: it checks them itself
}  # fmt: skip
_several = {key: kind | list[kind] for key, kind in (SCHEME | ROW | {"parts": int}).items()}  # type: ignore[valid-type]
_Row = _struct("Row", **_several, grow=LATER["grow"])
_ENTRIES: dict[str, Any] = {
    "title": str, "stands_in": str, "data": str, "samples": int, "model": str, "epochs": int, "epoch_steps": int,
    "batch": int, "tail": Number, "recalibrate": bool, "precision": Precision, "mode": Mode, "seeds": list[int],
    "rows": list[_Row],  # type: ignore[valid-type]
    **_SECTIONS,
}  # fmt: skip
_Quick = _struct("Quick", **_ENTRIES, width=int, subset=int)
_File = _struct("File", **_ENTRIES, table=str, quick=_Quick)
_NEEDED = ("title", "table", "data", "model", "epochs", "batch", "optimizer", "scheme")


def names() -> list[str]:
    """All experiments of the package."""
    return sorted(p.stem for p in FOLDER.glob("*.toml"))


def near(name: str, known: Iterable[str]) -> str:
    """A question that may help."""
    close = difflib.get_close_matches(name, list(known), n=2)
    return f": did you mean {' or '.join(close)}?" if close else ""


def read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The content of a file, with what it extends below it; not checked yet."""
    try:
        raw = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not valid TOML ({error})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    base = raw.pop("extends", None)
    if base is None:
        return raw
    places = [folder / f"{base}.toml" for folder in (path.parent, FOLDER)]
    parent = next((p for p in places if p.is_file() and p not in (*seen, path)), None)
    if parent is None:
        raise UserError(f"{path}: extends {base!r}, which is no experiment{near(str(base), names())}")
    return merge(read(parent, (*seen, path)), raw)


def merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``below`` with the entries of ``above``, section by section; a section that names another thing starts anew."""
    out = copy.deepcopy(below)
    for key, value in above.items():
        old = out.get(key)
        same = isinstance(old, dict) and isinstance(value, Mapping) and value.get("name") in (None, old.get("name"))
        mixes = same and key in _SECTIONS and key != "model_settings"  # which are of one model, and not of the next
        out[key] = merge(old, value) if mixes else copy.deepcopy(value)  # type: ignore[arg-type]
    return out


def check(raw: dict[str, Any], path: Path) -> None:
    """Find unknown keys, values of wrong types and missing entries.

    Raises:
        UserError: naming the key, the value and what was expected.
    """
    try:
        msgspec.convert(raw, _File)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {_explain(str(error), raw)}") from error
    missing = [key for key in _NEEDED if key not in raw]
    if missing:
        raise UserError(f"{path}: {missing[0]} is missing")


# -- msgspec's errors in our words -------------------------------------------------------------------------------------

_ERROR = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<where>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_EXPECTED = re.compile(r"Expected `(.*)`, got `.*`")
_KINDS = {"object": "a table", "array": "a list"}


def _explain(message: str, raw: dict[str, Any]) -> str:
    """What msgspec found, as a text that names the key, the value and what was expected."""
    found = _ERROR.fullmatch(message)
    assert found is not None
    what, where = found["what"], found["where"] or ""
    if unknown := _UNKNOWN.fullmatch(what):
        key = unknown[1]
        return f"unknown key {where}{'.' if where else ''}{key}{near(key, _fields(where))}"
    value: Any = raw
    for part in re.findall(r"[^.\[\]]+", where):
        value = value[int(part)] if part.isdigit() else value[part]
    if expected := _EXPECTED.fullmatch(what):
        kinds = (_KINDS.get(kind, kind) for kind in expected[1].split(" | "))
        return f"{where} = {value!r}: expected {' or '.join(kinds)}"
    allowed = {"mode": MODES, "precision": PRECISIONS}.get(where.rpartition(".")[2])
    return f"{where} = {value!r}: expected one of {', '.join(allowed)}" if allowed else f"{where} = {value!r}: {what}"


def _fields(where: str) -> tuple[str, ...]:
    """The keys that may stand in this part of a file."""
    last = re.sub(r"\[.*", "", where.rpartition(".")[2])
    return {"": _File, "quick": _Quick, "rows": _Row, **_SECTIONS}[last].__struct_fields__

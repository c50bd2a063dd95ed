"""Models by name: ``timm:NAME``, ``torchvision:NAME``, ``hf:TYPE`` or ``package.module:factory``.

To be inspected they are built without weights on the meta device, so a model of any size takes a second or two: only
the shapes count.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import UserError

_kept: list[Any] = []


def find_model(spec: str, device: str = "meta") -> nn.Module:
    """The model that ``spec`` names, with random or no weights."""
    return find_model_and_inputs(spec, device)[0]


def find_model_and_inputs(spec: str, device: str = "meta") -> tuple[nn.Module, Any]:
    """:func:`find_model`, and what it is called with if its factory returns ``(model, inputs)``; else ``None``."""
    kind, colon, name = spec.partition(":")
    if not colon or not name:
        raise UserError(
            f"{spec}: expected timm:efficientnet_b0, torchvision:resnet18, hf:gpt2 or package.module:factory"
        )
    build: dict[str, Callable[[str], nn.Module]] = {"timm": _timm, "torchvision": _torchvision, "hf": _transformers}
    try:
        with torch.device(device):
            return (build[kind](name), None) if kind in build else _factory(kind, name)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{spec}: could not be built ({type(error).__name__}: {error})") from error


def _timm(name: str) -> nn.Module:
    timm = _package("timm")
    if name not in timm.list_models():
        raise UserError(f"timm has no model {name!r}{_like(name, timm.list_models())}")
    return timm.create_model(name, pretrained=False)


def _torchvision(name: str) -> nn.Module:
    models = _package("torchvision").models
    if name not in models.list_models():
        raise UserError(f"torchvision has no model {name!r}{_like(name, models.list_models())}")
    return _built(models.get_model_builder(name))


def _transformers(name: str) -> nn.Module:
    transformers = _package("transformers")
    known = list(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    if name not in known:
        raise UserError(f"transformers has no model type {name!r}{_like(name, known)}. Types, not checkpoints: hf:gpt2")
    config = transformers.AutoConfig.for_model(name)
    for head in ("CausalLM", "MaskedLM", "Seq2SeqLM", "ImageClassification", None):
        auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
    raise UserError(f"transformers' {name} is not a model that AutoModel can build")


def _factory(module: str, name: str) -> tuple[nn.Module, Any]:
    sys.path.insert(0, str(Path.cwd()))  # as python -m does: the user's own file is found
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{module}:{name}: there is no module {error.name!r}") from error
    finally:
        sys.path.pop(0)
    factory = getattr(found, name, None)
    if factory is None:
        raise UserError(f"{module} has no {name!r}{_like(name, vars(found))}")
    made = _built(factory)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UserError(f"{module}:{name} returned a {type(made).__name__}, not an nn.Module or (model, inputs)")
    return model, inputs


def _built(factory: Any) -> Any:
    """What a factory makes, without weights: torchvision's detection networks would fetch those of their backbones."""
    if isinstance(factory, nn.Module):
        return factory
    try:
        known = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        known = {}  # type: ignore[assignment]
    return factory(**dict.fromkeys(known.keys() & {"weights", "weights_backbone"}))


def _package(name: str) -> Any:
    try:
        make_torchvision_importable()
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install {error.name}") from error


def make_torchvision_importable() -> None:
    """PyPI's torchvision is built for CUDA; beside a CPU torch it stops at an operator that only needs a name."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for module in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
            del sys.modules[module]
        library = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)  # the operators live as long as this does
        importlib.import_module("torchvision")


def _like(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3)
    return f": did you mean {' or '.join(near)}?" if near else ""

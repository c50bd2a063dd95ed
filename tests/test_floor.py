"""The floor: cut down to what it keeps, a network computes in float64 exactly what the sliced one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sliceout
from sliceout.cli.floor import narrow_
from sliceout.cli.floor_attention import NarrowAttention
from sliceout.cli.models import make_torchvision_importable
from sliceout.cli.work import kept_weights, logits
from sliceout.nn.base import Sliced


def gpt2() -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    rest = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=50, n_positions=32, use_cache=False, **rest
    )
    return transformers.GPT2LMHeadModel(config), torch.randint(50, (3, 16))


def llama() -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), torch.randint(50, (3, 16))


def vit() -> tuple[nn.Module, Tensor]:
    make_torchvision_importable()
    timm = pytest.importorskip("timm")
    return timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=5), torch.randn(3, 3, 32, 32)


def encoder(dropout: float = 0.0) -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(3, 7, 64)


def converted(build: Any, attention: str, rate: float = 0.5) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = build()
    model = model.double().train()
    x = x.double() if x.is_floating_point() else x
    # without its normalisation, what the sliced network computes is what the kept weights compute
    sliceout.convert_(model, rate, norm="none", attention=attention, example_inputs=x[:2])
    for _ in range(3):  # starts other than 0
        sliceout.draw_(model)
    return model, x


@pytest.mark.parametrize("attention", ["dims", "heads"])
@pytest.mark.parametrize("build", [gpt2, llama, vit, encoder])
def test_the_floor_of_attention_computes_what_the_sliced_network_does(build: Any, attention: str) -> None:
    model, x = converted(build, attention)
    assert any(s.start for s in sliceout.slices(model))
    sizes = [p.numel() for p in model.parameters()]
    with torch.no_grad():
        sliced, kept = logits(model(x)), kept_weights(model)
        narrow_(model)
        floor = logits(model(x))
    assert not any(isinstance(m, Sliced) for m in model.modules())
    torch.testing.assert_close(floor, sliced, rtol=1e-12, atol=1e-12)
    assert sum(p.numel() for p in model.parameters()) < sum(sizes)
    assert kept_weights(model) == 0 < kept < sum(sizes)
    logits(model(x)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_kept_weights_are_those_of_the_floor() -> None:
    model, _ = converted(encoder, "dims", rate=0.25)
    kept = kept_weights(model)
    narrow_(model)
    assert kept == sum(p.numel() for p in model.parameters() if p.dim() > 1)


@pytest.mark.parametrize("weights", [False, True])
def test_masks_of_narrow_attention(weights: bool) -> None:
    plain = nn.MultiheadAttention(32, 4, batch_first=True).double()
    inside = {role: sliceout.Slice(8, 0.5, norm="none").axis(blocks=4) for role in ("qk_slice", "v_slice")}
    sliceout.nn.slice_(plain, **inside)
    x, hidden = torch.randn(2, 5, 32).double(), torch.ones(5, 5).triu(1).bool()
    given = {"attn_mask": hidden, "need_weights": weights}
    with torch.no_grad():
        before = [plain(x, x, x, **given), plain(x, x, x, **{**given, "attn_mask": torch.zeros(5, 5).double()})]
        narrow_(plain)
        assert type(plain) is NarrowAttention
        after = [plain(x, x, x, **given), plain(x, x, x, **{**given, "attn_mask": torch.zeros(5, 5).double()})]
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    with pytest.raises(NotImplementedError, match="without padding"):
        plain(x, x, x, key_padding_mask=torch.zeros(2, 5).bool())

"""Converted models of every kind compute what their masked full selves compute, outputs and gradients, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import sliceout
from models import MODELS, build, call
from sliceout_lab.oracle import masked_dense_, quiet_, randomise_


def in_float64(x):
    return tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, x)


def pair(name: str, **settings):
    """A full model, its converted copy, and an input, after a draw."""
    model, x = build(name)
    full = randomise_(quiet_(model).double()).train()
    if hasattr(full, "config"):
        for key in [k for k, v in vars(full.config).items() if "drop" in k and isinstance(v, float)]:
            setattr(full.config, key, 0.0)
    sliced = copy.deepcopy(full)
    x = in_float64(x)
    given = None if hasattr(full, "config") else x
    report = sliceout.convert_(sliced, 0.5, seed=5, example_inputs=given, **settings)
    sliceout.draw_(sliced)
    return full, sliced, report, x


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    largest = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * largest)


LOOSE = {"llama": 1e-5}  # its norms compute in float32


GROUPS = {
    "mlp": 2, "two branches": 2, "chunked": 1, "vgg": 3, "group norms": 2, "depthwise separable": 1, "wide resnet": 7,
    "basic block": 7, "bottleneck": 14, "resnext": 14, "torchvision resnet": 11, "timm efficientnet": 4,
    "efficientnet with group norms": 4,
    "torchvision efficientnet": 5, "torchvision mobilenet v2": 16, "torchvision mobilenet v3": 11, "convnext": 9,
    "vit": 6, "swin": 9, "gpt2": 6, "bert": 6, "llama": 4, "transformer encoder": 6,
}  # fmt: skip
"""How many groups each model has at least: skipping what is difficult would satisfy any oracle."""


@pytest.mark.parametrize("name", MODELS)
def test_training_forward_is_that_of_the_masked_network(name):
    full, sliced, report, x = pair(name)
    assert report.converted >= GROUPS[name], str(report)
    masked = masked_dense_(copy.deepcopy(full), report)
    expected = call(masked, x)
    close(call(sliced, x), expected, LOOSE.get(name, 1e-10))
    assert not torch.allclose(expected, call(full, x), rtol=1e-3), "the mask changed nothing: the test would be vacuous"


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling": "window"},
        {"sampling": "window", "norm": "flow"},
        {"sampling": "window", "fold": "producer"},
        {"sampling": "prefix", "norm": "none"},
        {"align": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mlp", "vgg", "timm efficientnet", "vit"])
def test_it_holds_for_every_setting(name, settings):
    full, sliced, report, x = pair(name, **settings)
    close(call(sliced, x), call(masked_dense_(copy.deepcopy(full), report), x))


@pytest.mark.parametrize("name", ["vit", "gpt2", "bert", "llama", "transformer encoder"])
def test_it_holds_for_whole_heads(name):
    full, sliced, report, x = pair(name, attention="heads")
    assert any(r.group.kind == "attention" for r in report.rows if r.slice is not None)
    close(call(sliced, x), call(masked_dense_(copy.deepcopy(full), report), x), LOOSE.get(name, 1e-10))


@pytest.mark.parametrize("name", ["mlp", "two branches", "vgg", "bottleneck", "resnext", "timm efficientnet", "gpt2"])
def test_gradients_are_those_of_the_masked_network(name):
    """Where a weight was multiplied by a mask, its gradient is multiplied by it too."""
    full, sliced, report, x = pair(name)
    masked = masked_dense_(copy.deepcopy(full), report)
    for model in (sliced, masked):
        call(model, x).square().sum().backward()
    inside = {m.module for r in report.rows if r.slice is not None for m in r.group.members if m.role == "unit"}
    own, of_masked = dict(full.named_parameters()), dict(masked.named_parameters())
    compared = 0
    for key, p in sliced.named_parameters():
        module = key.rpartition(".")[0]
        if module in inside and not isinstance(masked.get_submodule(module), nn.modules.batchnorm._BatchNorm):
            continue  # the oracle's norms hold copies of their parameters
        factor = (of_masked[key] / own[key]).detach()
        assert p.grad is not None, key
        close(p.grad, of_masked[key].grad * factor, 1e-8)
        compared += 1
    assert compared > 3


def test_statistics_of_batch_norms_are_those_of_the_masked_network():
    full, sliced, report, x = pair("basic block")
    masked = masked_dense_(copy.deepcopy(full), report)
    call(masked, x), call(sliced, x)
    before = dict(full.named_buffers())
    kept = {m.module: (r.slice, m) for r in report.rows if r.slice is not None for m in r.group.members}
    for key, buffer in sliced.named_buffers():
        expected = dict(masked.named_buffers())[key].clone()
        module = key.rpartition(".")[0]
        if module in kept and buffer.dim() == 1:
            s, member = kept[module]
            dropped = torch.ones(len(buffer), dtype=torch.bool)
            dropped[s.axis(member.blocks, member.inner).kept] = False
            expected[dropped] = before[key][dropped]
        torch.testing.assert_close(buffer, expected, msg=key)

"""The report: plain data, totals that are those of real narrow networks, and a page that fits on a screen."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sliceout
from models import build, images
from sliceout.conversion.report import pattern
from sliceout_lab.models.wide_resnet import WideResNet


def flops(model: nn.Module, x: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops()


def mlp(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, a), nn.ReLU(), nn.Linear(a, b), nn.ReLU(), nn.Linear(b, 3))


def outputs_of_layers(model: nn.Module, x: torch.Tensor) -> int:
    total = [0]
    for m in model.modules():
        if not list(m.children()):
            m.register_forward_hook(lambda module, args, y: total.__setitem__(0, total[0] + y.numel()))
    model(x)
    return total[0]


def test_totals_of_an_mlp_are_those_of_the_narrow_network():
    x = torch.zeros(5, 6)
    report = sliceout.convert_(mlp(64, 48), 0.5, example_inputs=x)
    assert report.before.flops.total() == flops(mlp(64, 48), x)
    assert report.after.flops.total() == flops(mlp(32, 24), x)
    assert report.before.activations.total() == outputs_of_layers(mlp(64, 48), x)
    assert report.after.activations.total() == outputs_of_layers(mlp(32, 24), x)
    assert report.flop_saving == pytest.approx(1 - flops(mlp(32, 24), x) / flops(mlp(64, 48), x))


def test_totals_of_a_wide_resnet_are_those_of_the_sliced_network_as_it_runs():
    x = images(32)
    model = WideResNet(10, 2).train()
    full = flops(model, x)
    report = sliceout.convert_(model, 0.5, example_inputs=x)
    assert report.before.flops.total() == full
    assert report.after.flops.total() == flops(model, x) < full


def test_the_products_of_attention_are_counted():
    """torch's counter knows no formula for the fused attention of the CPU and says 0."""
    model, _ = build("vit")
    x = torch.zeros(2, 3, 64, 64)
    report = sliceout.convert_(model, 0.5, example_inputs=x)
    tokens, heads, dims, layers = 4 * 4 + 1, 4, 16, 2
    products = layers * 2 * heads * (2 * tokens * tokens * dims) * 2  # batch of 2; queries by keys, weights by values
    without = flops(build("vit")[0].eval(), x)
    assert report.before.flops.total() in (without + products, without)
    attention = sum(n for name, n in report.before.flops.items() if name.endswith("attn"))
    assert attention == products
    assert sum(n for name, n in report.after.flops.items() if name.endswith("attn")) == products // 2


def test_savings_of_the_groups_add_up_to_that_of_the_model():
    model, x = build("vgg")
    report = sliceout.convert_(model, 0.5, example_inputs=x)
    saved = [report.saving_of(r) for r in report.rows]
    assert sum(s[0] for s in saved) == pytest.approx(report.flop_saving)
    assert sum(s[1] for s in saved) == pytest.approx(report.activation_saving, rel=0.02)


def test_it_is_plain_data():
    model, x = build("timm efficientnet")
    report = sliceout.convert_(model, 0.5, example_inputs=x)
    data = json.loads(json.dumps(report.as_dict()))
    assert data["model"] == "EfficientNet"
    assert len(data["groups"]) == len(report.rows)
    for group in data["groups"]:
        assert (group["width"] is None) == (group["reason"] is not None)
        assert group["members"]
        assert set(group["members"][0]) >= {"module", "role", "blocks", "inner"}
    sliced = [g for g in data["groups"] if g["width"] is not None]
    assert all(g["sampling"] == "circular" and g["norm"] == "probabilistic" for g in sliced)
    assert data["flops"]["sliced"] < data["flops"]["full"]


@pytest.mark.parametrize("name", ["efficientnet_b0", "resnet50", "vit_small_patch16_224", "densenet121"])
def test_it_fits_on_a_screen(name):
    import timm

    with torch.device("meta"):
        model = timm.create_model(name)
    lines = str(sliceout.convert_(model, 0.5)).splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 160


def test_it_says_what_was_sliced_what_it_saves_and_what_was_left_alone():
    model, x = build("bottleneck")
    text = str(sliceout.convert_(model, 0.5, example_inputs=x))
    assert text.startswith("SliceOut: ResNet, ")
    for words in ("layer1.*.conv1 x2", "8 of 16", "read by", "circular", "whole model: FLOPs -", "left alone:",
                  "shared by a residual stream"):  # fmt: skip
        assert words in text, f"{words!r} is missing in\n{text}"


def test_groups_that_save_next_to_nothing_are_left_out():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 4096), nn.ReLU(),
                        nn.Linear(4096, 3))  # fmt: skip
    report = sliceout.convert_(net, 0.5)
    assert {r.name: str(r.reason) for r in report.skipped} == {
        "0": "saves less than 0.1 % of the model's FLOPs and activations"
    }
    asked = sliceout.convert_(sliceout.revert_(net), {"*": 0.5})
    assert asked.converted == 3


def test_layer_numbers_become_stars_and_other_numbers_stay() -> None:
    text = "blocks.1.0.conv_pw: rate 0.5 keeps a single one of 2 units in layer1.0"
    assert pattern(text) == "blocks.*.*.conv_pw: rate 0.5 keeps a single one of 2 units in layer1.*"

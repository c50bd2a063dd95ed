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


class Block(nn.Module):
    """The same arithmetic, written in place or not, by modules or by functions, with a layer that does nothing."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.up, self.act, self.idle, self.flat = nn.Conv2d(3, 32, 3), nn.ReLU(inplace), nn.Identity(), nn.Flatten()
        self.down = nn.Linear(32 * 36, 5)
        self.inplace = inplace

    def forward(self, x):
        h = self.up(x)
        return self.down(self.flat(self.idle(self.act(h))) if self.inplace else h.relu_().flatten(1))


def test_memory_that_is_written_once_counts_once() -> None:
    """In place, viewed or handed on: however it is written, the network is the same."""
    reports = [sliceout.convert_(Block(how), 0.5, example_inputs=torch.zeros(2, 3, 8, 8)) for how in (True, False)]
    assert [r.before.activations.total() for r in reports] == [2 * 32 * 36 + 2 * 5] * 2
    assert reports[0].activation_saving == reports[1].activation_saving > 0.4


def test_resnets_of_timm_and_torchvision_save_the_same() -> None:
    timm, torchvision = pytest.importorskip("timm"), pytest.importorskip("torchvision")
    made = (timm.create_model("resnet18"), torchvision.models.resnet18())
    one, other = (sliceout.convert_(net, 0.5) for net in made)
    assert one.inputs == other.inputs == "[2, 3, 224, 224] (guessed)"
    assert one.activation_saving == other.activation_saving
    assert one.flop_saving == other.flop_saving


def test_recurrent_layers_are_named_with_their_share() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.up, self.down = nn.GRU(32, 64, batch_first=True), nn.Linear(64, 128), nn.Linear(128, 5)

        def forward(self, x):
            return self.down(self.up(self.rnn(x)[0]).relu())

    report = sliceout.convert_(Net(), 0.5, example_inputs=torch.zeros(2, 7, 32))
    whole = 3 * 64 * (32 + 64)
    share = 100 * whole / (whole + 64 * 128 + 128 * 5)
    row = next(r for r in report.skipped if r.name == "rnn")
    assert str(row.reason) == f"GRU (recurrent) has no sliced form: {share:.1f} % of the FLOPs"
    assert str(row.reason) in str(report)


@pytest.mark.parametrize("how", ["grouped_mm", "batched_mm", "eager"])
def test_fused_experts_are_counted_and_named(how: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, vocab_size=96, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    config._experts_implementation = how
    report = sliceout.convert_(transformers.MixtralForCausalLM(config), 0.5)
    tokens, chosen = 2 * 16, 2
    experts = report.before.flops["model.layers.0.mlp.experts"]
    assert experts == 2 * tokens * chosen * 3 * 64 * 128 or how == "eager"  # which depends on the routing
    assert 0.02 < report.flop_saving < 0.08
    assert any("MixtralExperts (fused experts) has no sliced form" in str(r.reason) for r in report.skipped)

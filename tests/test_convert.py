"""What convert_ takes and does: rates, filters, options, switching off, reverting, example inputs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import sliceout
from models import build, call, images
from networks import assert_same_state
from sliceout_lab.models.wide_resnet import WideResNet


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.5), nn.Linear(48, 3)
    )


def widths(report) -> dict[str, int]:
    return {r.name: r.slice.width for r in report.rows if r.slice is not None}


# -- rates -------------------------------------------------------------------------------------------------------------


def test_a_number_is_the_rate_of_all_groups():
    assert widths(sliceout.convert_(mlp(), 0.25)) == {"0": 48, "3": 36}


def test_a_dict_gives_rates_by_name_patterns():
    report = sliceout.convert_(mlp(), {"0": 0.5})
    assert widths(report) == {"0": 32}
    assert [str(r.reason) for r in report.skipped] == ["no rate was given for it"]
    assert widths(sliceout.convert_(mlp(), {"0": 0.5, "*": 0.25})) == {"0": 32, "3": 36}


def test_a_function_gives_rates_by_name():
    assert widths(sliceout.convert_(mlp(), {"0": 0.5}.get)) == {"0": 32}


def test_without_a_rate_those_of_the_dropouts_are_taken_over():
    assert widths(sliceout.convert_(mlp())) == {"0": 48, "3": 24}


def test_without_a_rate_and_without_dropout_nothing_is_sliced():
    with pytest.raises(ValueError, match=r"no nn\.Dropout lies inside it, and no rate was given"):
        sliceout.convert_(nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)))


@pytest.mark.parametrize("rate", [1.0, -0.1, {"0": 2.0}])
def test_rates_out_of_range_are_refused(rate):
    net = mlp()
    with pytest.raises(ValueError, match="expected 0 <= rate < 1"):
        sliceout.convert_(net, rate)
    assert type(net[0]) is nn.Linear


def test_dropouts_inside_a_group_rest_while_it_is_sliced_and_work_after_off():
    net = mlp().train()
    sliceout.convert_(net)
    x = torch.ones(200, 64)
    assert torch.equal(net[2](x), x)
    sliceout.off_(net)
    assert 0.1 < float((net[2](x) == 0).float().mean()) < 0.4
    sliceout.on_(net)
    assert torch.equal(net[2](x), x)
    sliceout.revert_(net)
    assert type(net[2]) is nn.Dropout
    assert not torch.equal(net[2](x), x)


def test_a_rate_that_leaves_one_unit_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match="keeps a single one of 8 units: choose a lower rate"):
        sliceout.convert_(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), 0.9)


# -- filters and settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filter", ["[03]", ["0", "3"], lambda module, name: name in ("0", "3")], ids=["pattern", "patterns", "function"]
)
def test_filter_keeps_groups_all_of_whose_layers_match(filter):
    report = sliceout.convert_(mlp(), 0.5, filter=filter)
    assert widths(report) == {"0": 32}
    assert [str(r.reason) for r in report.skipped] == ["left out by filter"]


def test_settings_reach_the_slices():
    report = sliceout.convert_(mlp(), 0.5, sampling="window", norm="flow", fold="producer", align=16, seed=7)
    for s in report.slices:
        assert (s.sampling, s.norm, s.fold, s.align, s.seed) == ("window", "flow", "producer", 16, 7)
    assert widths(report) == {"0": 32, "3": 32}


@pytest.mark.parametrize(
    "settings", [{"sampling": "ring"}, {"norm": "l2"}, {"fold": "both"}, {"attention": "tails"}, {"stages": 0}], ids=str
)
def test_unknown_settings_are_refused_and_named(settings):
    (name, value) = next(iter(settings.items()))
    model, x = build("timm efficientnet")
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        sliceout.convert_(model, 0.5, example_inputs=x, **settings)
    assert not any(isinstance(m, sliceout.nn.Sliced) for m in model.modules())


def test_seeds_make_different_draws_and_equal_seeds_equal_ones():
    def starts(seed):
        net = mlp()
        report = sliceout.convert_(net, 0.5, seed=seed)
        out = []
        for _ in range(8):
            sliceout.draw_(net)
            out.append([s.start_on_host for s in report.slices])
        return out

    assert starts(1) == starts(1) != starts(2)


def test_stages_limits_inverted_bottlenecks_to_the_first():
    import timm

    model = timm.create_model("efficientnet_b0")
    report = sliceout.convert_(model, 0.5, stages=3)
    assert {".".join(n.split(".")[:2]) for n in widths(report)} == {"blocks.1", "blocks.2", "blocks.3"}
    assert "not in the first 3 stages" in {str(r.reason) for r in report.skipped}


def test_stages_are_told_by_their_widths_where_blocks_are_numbered_through():
    import torchvision

    report = sliceout.convert_(torchvision.models.mobilenet_v2(), 0.5, stages=3)
    assert {n.split(".")[1] for n in widths(report)} == {str(i) for i in range(2, 11)}  # 2 + 3 + 4 blocks


def test_paper_exclusions_leave_out_the_first_block_and_the_last_of_each_stage():
    report = sliceout.convert_(WideResNet(28, 1), 0.5, paper_exclusions=True)
    reasons = [r.reason for r in report.skipped]
    assert sum(str(r).endswith("(paper_exclusions)") for r in reasons) == 4
    assert report.converted == 12 - 4
    full = sliceout.convert_(WideResNet(28, 1), 0.5)
    left_out = sorted(set(widths(full)) - set(widths(report)))
    blocks = [name.rpartition(".")[0] for name in left_out]
    assert blocks[0].endswith("0.0")
    assert [b[-1] for b in blocks[1:]] == ["3", "3", "3"]


@pytest.mark.parametrize("attention", ["dims", "heads", "off"])
def test_attention_is_sliced_inside_heads_by_heads_or_not(attention):
    model, x = build("vit")
    report = sliceout.convert_(model, 0.5, attention=attention)
    sizes = {r.slice.size for r in report.rows if r.slice is not None and r.group.kind == "attention"}
    assert sizes == {"dims": {16}, "heads": {4}, "off": set()}[attention]
    assert call(model.train(), x).shape == (2, 5)


# -- in place and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "bottleneck", "timm efficientnet", "vit", "gpt2", "llama"])
def test_conversion_keeps_parameters_keys_and_eval_and_can_be_undone(name):
    model, x = build(name)
    classes = {n: type(m) for n, m in model.named_modules()}
    attributes = {n: set(vars(m)) for n, m in model.named_modules()}
    parameters = dict(model.named_parameters())
    keys = list(model.state_dict())
    before = call(model.eval(), x)
    sliceout.convert_(model, 0.5)
    assert dict(model.named_parameters()) == parameters
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert list(model.state_dict()) == keys
    assert torch.equal(call(model.eval(), x), before)
    for n, m in model.named_modules():
        assert isinstance(m, classes[n])
    sliceout.revert_(model)
    assert {n: type(m) for n, m in model.named_modules()} == classes
    leftovers = {n: set(vars(m)) - attributes[n] for n, m in model.named_modules()}
    assert not any(leftovers.values()), {n: v for n, v in leftovers.items() if v}
    assert torch.equal(call(model.eval(), x), before)


def test_revert_without_slices_is_an_error():
    with pytest.raises(ValueError, match="nothing to revert"):
        sliceout.revert_(mlp())


def test_the_dry_run_leaves_statistics_random_state_and_mode_alone():
    model, x = build("basic block")
    model.train()
    model.layer1[0].eval()
    modes = {n: m.training for n, m in model.named_modules()}
    before, random_state = copy.deepcopy(model), torch.get_rng_state()
    sliceout.convert_(model, 0.5, example_inputs=x)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same_state(model, before)
    assert {n: m.training for n, m in model.named_modules()} == modes


def test_example_inputs_may_be_a_tensor_a_tuple_or_a_dict():
    for example in (images(32), (images(32),), {"x": images(32)}):
        assert sliceout.convert_(build("basic block")[0], 0.5, example_inputs=example).converted > 4


def test_example_inputs_that_do_not_fit_are_told():
    net = mlp()
    with pytest.raises(ValueError, match=r"could not run Sequential .* pass example_inputs=.*\(2, 7\)"):
        sliceout.convert_(net, 0.5, example_inputs=torch.zeros(2, 7))
    assert type(net[0]) is nn.Linear


def test_a_model_without_guessable_inputs_asks_for_them():
    class Odd(nn.Module):
        def forward(self, x, y):
            return x @ y

    with pytest.raises(ValueError, match=r"pass example_inputs=.*no input could be guessed"):
        sliceout.convert_(Odd(), 0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_guessed_inputs_have_the_dtype_of_the_model(dtype):
    assert sliceout.convert_(mlp().to(dtype), 0.5).converted == 2


@pytest.mark.parametrize("name", ["timm efficientnet", "vit", "gpt2", "llama"])
def test_copies_and_pickles_of_a_converted_model_go_on_alike(name):
    model, x = build(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    sliceout.convert_(model, 0.5)
    model.train()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for one in (model, other):
            one.load_state_dict(model.state_dict())
        sliceout.draw_(other)
        step = sliceout.slices(model).step
        sliceout.draw_(model)
        assert sliceout.slices(other).step == step + 1
        torch.manual_seed(0)
        a = call(model, x)
        torch.manual_seed(0)
        torch.testing.assert_close(call(other, x), a)


def test_training_can_be_resumed_exactly():
    def train(net, x, steps):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(steps):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return net

    def fresh():
        torch.manual_seed(3)
        net = mlp()
        sliceout.convert_(net, 0.5)
        return net.train()

    x = torch.randn(8, 6)
    straight = train(fresh(), x, 6)
    halfway = train(fresh(), x, 3)
    resumed = fresh()
    resumed.load_state_dict(halfway.state_dict())
    assert_same_state(train(resumed, x, 3), straight)
    plain = mlp()
    plain.load_state_dict(straight.state_dict(), strict=True)
    assert torch.equal(plain.eval()(x), straight.eval()(x))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_the_gpu_is_converted_there():
    model, x = build("basic block")
    model.cuda()
    report = sliceout.convert_(model, 0.5)
    assert {s.start.device.type for s in report.slices} == {"cuda"}
    assert call(model.train(), x.cuda()).device.type == "cuda"


def test_a_model_can_be_converted_in_inference_mode_and_trained_after_it():
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    with torch.inference_mode():
        assert sliceout.convert_(model, 0.5).converted == 1
        assert torch.is_inference_mode_enabled()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert sliceout.slices(model).step == 2

"""What went on in silence, or failed in torch's words, is said: with the layer and the way out."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sliceout

WAY_OUT = r"call sliceout\.revert_\(model\) first"


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 3))


def sliced() -> Any:
    net = mlp()
    sliceout.convert_(net, 0.5)
    return net


# -- rates and stages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        ("0.5", "rate='0.5': expected a number"),
        (True, "rate=True: expected a number"),
        ([0.5], "rate=[0.5]: expected a number"),
        ({"0": "0.5"}, "rate['0']='0.5': expected a number"),
        ({"0": 0.5, "2": None}, "rate['2']=None: expected a number"),
        (lambda name: "0.5", "rate('0')='0.5': expected a number"),
    ],
)
def test_a_rate_that_is_no_number_is_refused(rate, message):
    net = mlp()
    with pytest.raises(TypeError) as caught:
        sliceout.convert_(net, rate)
    assert str(caught.value) == message
    assert [type(m) for m in net] == [type(m) for m in mlp()]


def test_rates_out_of_range_are_refused_wherever_they_are_given():
    with pytest.raises(ValueError, match=r"^rate=1\.0: expected 0 <= rate < 1$"):
        sliceout.convert_(mlp(), 1)
    with pytest.raises(ValueError, match=r"^rate\['2'\]=1.5: expected 0 <= rate < 1$"):
        sliceout.convert_(mlp(), {"0": 0.5, "2": 1.5})
    with pytest.raises(ValueError, match=r"^rate\('0'\)=-0.5: expected 0 <= rate < 1$"):
        sliceout.convert_(mlp(), lambda name: -0.5)


def test_numbers_of_other_kinds_are_rates():
    for rate in (torch.tensor(0.5), torch.tensor(0.5).numpy()):
        report = sliceout.convert_(mlp(), rate)
        assert [s.width for s in report.slices] == [32, 24]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.fc2(self.fc1(x).relu()).relu())


def test_a_pattern_that_matches_nothing_is_named_with_its_neighbours():
    with pytest.raises(ValueError, match=r"^rate\['fc_1'\] matches no layer .* Such layers are fc1"):
        sliceout.convert_(Named(), {"fc2": 0.5, "fc_1": 0.25})
    assert sliceout.convert_(Named(), {"fc1": 0.5, "*": 0.25}).converted == 2


def test_a_pattern_that_matches_no_block_is_named_too():
    from sliceout_lab.models.wide_resnet import WideResNet

    with pytest.raises(ValueError, match=r"^rate\['layer1\*'\] matches no layer"):
        sliceout.convert_(WideResNet(10, 1), {"layer1*": 0.5}, scheme="patch", example_inputs=torch.zeros(2, 3, 32, 32))


def test_stages_without_inverted_bottlenecks_are_refused():
    with pytest.raises(ValueError, match=r"stages=2: it counts stages of inverted bottlenecks .* Leave stages out"):
        sliceout.convert_(mlp(), 0.5, stages=2)


# -- the model's own dropout -------------------------------------------------------------------------------------------


class Functional(nn.Module):
    """``F.dropout`` inside the group of ``fc1``, and none inside that of ``fc2``."""

    def __init__(self, drop: Any = F.dropout, p: float = 0.25) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 64), nn.Linear(64, 48), nn.Linear(48, 3)
        self.drop, self.p = drop, p

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.fc1(x).relu(), self.p, self.training)
        return self.fc3(self.fc2(x).relu())


@pytest.mark.parametrize("drop", [F.dropout, F.alpha_dropout])
def test_functional_dropout_inside_a_group_is_warned_of_once_and_reported(drop):
    with pytest.warns(UserWarning, match=r"fc1: F\.dropout in the model: set its p to 0, or make it an nn") as caught:
        report = sliceout.convert_(Functional(drop), 0.5)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    rows = {r.name: r.dropout for r in report.rows}
    assert rows["fc1"].startswith("F.dropout in the model")
    assert rows["fc2"] == ""
    assert "dropout that goes on:\n  fc1: F.dropout in the model" in str(report)
    assert [g["dropout"] for g in report.as_dict()["groups"]] == [rows["fc1"], ""]


@pytest.mark.parametrize("net", [Functional(p=0.0), nn.Sequential(nn.Linear(6, 64), nn.Dropout(), nn.Linear(64, 3))])
def test_dropout_that_rests_or_drops_nothing_is_no_news(net):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = sliceout.convert_(net, 0.5)
    assert "goes on" not in str(report)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


def test_dropout_of_attention_is_reported():
    report = sliceout.convert_(nn.Sequential(Attention()), 0.5, example_inputs=torch.zeros(2, 5, 32))
    assert {r.dropout for r in report.rows if r.slice} == {"attention's dropout in 0: set its p to 0, or let both act"}
    assert "dropout that goes on:" in str(report)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_without_a_rate_the_dropouts_that_were_looked_at_are_named(kind):
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=96, bos_token_id=1, eos_token_id=1)
        net, told = transformers.GPT2LMHeadModel(config), r"transformer\.h\.\*\.attn\.attn_dropout: not called"
    else:
        config = transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=96
        )
        net, told = (
            transformers.BertForMaskedLM(config),
            r"bert\.encoder\.layer\.\*\.attention\.self\.dropout: not call",
        )
    with pytest.raises(ValueError, match=r"With rate=None looked at its nn\.Dropout layers") as caught:
        sliceout.convert_(net)
    assert caught.match(told)
    assert caught.match(r"dropout: drops from units that stay whole: shared by a residual stream")
    assert caught.match(r"pass rate=, such as rate=0\.1$")


def test_without_a_rate_and_without_dropout_that_is_said():
    with pytest.raises(ValueError, match=r"it has no nn\.Dropout whose rate could be taken over"):
        sliceout.convert_(mlp())
    with pytest.raises(ValueError, match="its p is 0"):
        sliceout.convert_(nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.0), nn.Linear(64, 3)))


# -- layers that are replaced, wrapped, or never seen ------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_sliced_layer_cannot_be_replaced_by_a_plain_one(at):
    net = sliced()
    plain = mlp()[at]
    with pytest.raises(RuntimeError, match=rf"^{at} \(Linear\), '{at}' of Sequential, is sliced .*{WAY_OUT}"):
        net[at] = plain
    sliceout.revert_(net)
    net[at] = plain
    sliceout.convert_(net, 0.5)
    assert net(torch.zeros(2, 6)).shape == (2, 3)


def test_layers_may_be_wrapped_replaced_by_sliced_ones_and_blocks_replaced_whole():
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    net = sliced()
    net[0] = Wrapper(net[0])
    net[2] = torch.compile(net[2], backend="eager")
    assert net(torch.zeros(2, 6)).shape == (2, 3)
    net = sliced()
    net[2] = copy.deepcopy(net[2])
    both = nn.Sequential(nn.Linear(3, 6), sliced())
    both[1] = mlp()
    assert both(torch.zeros(2, 3)).shape == (2, 3)


def test_statistics_cannot_be_synchronised_behind_the_back_of_slices():
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3))
    sliceout.convert_(net, 0.5, example_inputs=torch.zeros(2, 3, 9, 9))
    with pytest.raises(RuntimeError, match=rf"replaced by a SyncBatchNorm that is not: {WAY_OUT}"):
        nn.SyncBatchNorm.convert_sync_batchnorm(net)


def test_adapters_come_before_the_conversion():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0", "2"], r=4)
    with pytest.raises(RuntimeError, match=rf"wrapped in a Linear with full-sized weights of its own: {WAY_OUT}"):
        peft.get_peft_model(sliced(), config)
    adapted = peft.get_peft_model(sliceout.revert_(sliced()), config)
    assert sliceout.convert_(adapted, 0.5, example_inputs=torch.zeros(2, 6)).converted


def test_tools_that_cannot_take_sliced_layers_are_refused():
    refused = rf"^0 \(Linear\) is sliced, and {{}} cannot take it: {WAY_OUT}"
    for train in (True, False):
        with pytest.raises(RuntimeError, match=refused.format("torch.jit.script")):
            torch.jit.script(sliced().train(train))
        with pytest.raises(RuntimeError, match=refused.format("torch.fx")):
            torch.fx.symbolic_trace(sliced().train(train))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match=refused.format("torch.ao.quantization")):
            torch.ao.quantization.quantize_dynamic(sliced(), {nn.Linear}, dtype=torch.qint8)
        plain = sliceout.revert_(sliced())
        quantised = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
        torch.jit.script(plain)
    torch.fx.symbolic_trace(plain)
    assert ".quantized." in type(quantised[0]).__module__


class Branches(nn.Module):
    """``other`` is read only if it is asked for, and then ``cut`` units of what ``down`` usually reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(6, 64), nn.Linear(64, 3), nn.Linear(64, 2)

    def forward(self, x: Tensor, other: bool = False, cut: int | None = None) -> Tensor:
        h = self.up(x).relu()
        return self.other(h) if other else self.down(h[..., :cut])


def test_a_layer_that_the_dry_run_never_called_is_named():
    net, x = Branches(), torch.zeros(2, 6)
    sliceout.convert_(net, 0.5, example_inputs=x)
    with pytest.raises(RuntimeError, match=rf"^other \(Linear.* was given 32 units and takes 64\. .*{WAY_OUT}"):
        net(x, other=True)
    assert net.eval()(x, other=True).shape == (2, 2)
    assert sliceout.revert_(net).train()(x, other=True).shape == (2, 2)
    assert not net.other._forward_pre_hooks


def test_an_input_that_is_neither_full_nor_sliced_is_refused_by_name():
    net, x = Branches(), torch.zeros(2, 6)
    sliceout.convert_(net, 0.5, example_inputs=x)
    assert net(x).shape == (2, 3)
    message = rf"^down \(Linear\) was given 20 units: it takes all 64, or the 32 that are kept\. .*{WAY_OUT}"
    with pytest.raises(RuntimeError, match=message):
        net(x, cut=20)
    assert "_path" not in vars(sliceout.revert_(net).down)


def test_a_norm_that_gets_other_channels_is_refused_by_name():
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3))
    sliceout.convert_(net, 0.5, example_inputs=torch.zeros(2, 3, 9, 9))
    with pytest.raises(RuntimeError, match=r"^1 \(BatchNorm2d\) was given 8 units: it takes all 32, or the 16"):
        net[1](torch.zeros(2, 8, 5, 5))


# -- seeds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"scheme": "controlled"}])
def test_slices_follow_the_seed_of_torch_and_leave_its_state_alone(options):
    def kept(of_torch: int, **more: Any) -> tuple[list[list[int]], int]:
        torch.manual_seed(of_torch)
        net = mlp()
        before = torch.get_rng_state()
        report = sliceout.convert_(net, 0.5, **options, **more)
        assert torch.equal(torch.get_rng_state(), before)
        sliceout.draw_(net)
        return [s.kept.tolist() for s in report.slices], report.slices.members[0].seed

    assert kept(1) == kept(1)
    assert kept(1) != kept(2)
    assert kept(1)[1] == 1
    assert kept(1, seed=7) == kept(2, seed=7)
    assert kept(1, seed=2) == kept(2)


def test_a_checkpoint_keeps_the_seed_that_was_taken_from_torch():
    torch.manual_seed(3)
    net, other = sliced(), None
    state = net.state_dict()
    torch.manual_seed(4)
    other = sliced()
    other.load_state_dict(state)
    for model in (net, other):
        for _ in range(3):
            sliceout.draw_(model)
    assert [s.start_on_host for s in sliceout.slices(net)] == [s.start_on_host for s in sliceout.slices(other)]


def test_a_slice_by_hand_has_seed_0():
    torch.manual_seed(5)
    assert sliceout.Slice(64).seed == 0

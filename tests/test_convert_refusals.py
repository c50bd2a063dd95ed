"""Models that cannot be converted, or only in part: a clear error or a skip with a reason, and the model as it was."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import sliceout
import sliceout.conversion.convert as convert
from models import build, call
from networks import assert_same_state
from sliceout.conversion import other_schemes


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 3))


def fingerprint(model: nn.Module):
    """Everything a failed conversion might leave behind."""
    return {
        name: (type(m), sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks), m.training)
        for name, m in model.named_modules()
    }


# -- failing half way --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "timm efficientnet", "vit", "llama"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_conversion_that_fails_half_way_leaves_the_model_as_it_was(monkeypatch, name, nth):
    model, x = build(name)
    before, state = fingerprint(model), copy.deepcopy(model)
    calls = {"n": 0}
    real = convert.give_slices_

    def failing(module, *args):
        weight = next(module.parameters(), None)
        if weight is not None and weight.device.type != "meta":  # the dry run works; the model itself fails
            calls["n"] += 1
            if calls["n"] == nth:
                raise RuntimeError("injected")
        return real(module, *args)

    monkeypatch.setattr(convert, "give_slices_", failing)
    with pytest.raises(RuntimeError, match="injected"):
        sliceout.convert_(model, 0.5)
    assert fingerprint(model) == before
    assert_same_state(model, state)
    monkeypatch.undo()
    assert sliceout.convert_(model, 0.5).converted
    call(model.train(), x)


def test_a_conversion_that_fails_at_the_attention_modules_leaves_the_model_as_it_was(monkeypatch):
    model, _ = build("vit")
    before = fingerprint(model)
    real = convert.heads.adapt

    def failing(shadow, *args):
        real(shadow, *args)
        if shadow is model:
            raise RuntimeError("injected")

    monkeypatch.setattr(convert.heads, "adapt", failing)
    with pytest.raises(RuntimeError, match="injected"):
        sliceout.convert_(model, 0.5)
    assert fingerprint(model) == before


@pytest.mark.parametrize(("scheme", "name"), [("patch", "patch_"), ("standard", "adopt")])
def test_a_scheme_that_fails_half_way_leaves_the_model_as_it_was(monkeypatch, scheme, name):
    model, x = build("basic block")
    before, calls = fingerprint(model), []
    real = getattr(other_schemes, name)

    def failing(module, *args):
        if next(module.parameters()).device.type != "meta":
            calls.append(module)
            if len(calls) == 2:
                raise RuntimeError("injected")
        return real(module, *args)

    monkeypatch.setattr(other_schemes, name, failing)
    with pytest.raises(RuntimeError, match="injected"):
        sliceout.convert_(model, 0.5, scheme=scheme, example_inputs=x)
    assert fingerprint(model) == before
    monkeypatch.undo()
    assert sliceout.convert_(model, 0.5, scheme=scheme, example_inputs=x).converted > 1


# -- what cannot be converted ------------------------------------------------------------------------------------------


def test_converting_twice_is_an_error_that_names_the_way_out():
    net = mlp()
    sliceout.convert_(net, 0.5)
    with pytest.raises(ValueError, match=r"sliced already: call sliceout\.revert_\(model\) first"):
        sliceout.convert_(net, 0.5)
    sliceout.revert_(net)
    assert sliceout.convert_(net, 0.5).converted == 2


def test_a_compiled_model_is_to_be_converted_first():
    net = mlp()
    for compiled in (torch.compile(net), nn.Sequential(torch.compile(net))):
        with pytest.raises(ValueError, match=r"compiled|OptimizedModule"):
            sliceout.convert_(compiled, 0.5)


def test_data_parallel_models_are_to_be_converted_before_wrapping():
    with pytest.raises(ValueError, match="wrapped in DataParallel: convert_ first, wrap it afterwards"):
        sliceout.convert_(nn.DataParallel(mlp()), 0.5)


def test_ddp_and_fsdp_models_are_to_be_converted_before_wrapping(tmp_path):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="wrapped in DistributedDataParallel"):
            sliceout.convert_(DistributedDataParallel(mlp()), 0.5)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        with pytest.raises(ValueError, match="wrapped in FSDPModule"):
            sliceout.convert_(fully_shard(mlp(), mesh=mesh), 0.5)
    finally:
        torch.distributed.destroy_process_group()


def test_a_scripted_model_is_refused():
    with pytest.raises(ValueError, match="TorchScript"):
        sliceout.convert_(torch.jit.script(mlp()), 0.5)


def test_nothing_to_convert_says_what_was_looked_for():
    with pytest.raises(ValueError, match=r"nothing to slice in Linear: looked for layers \(linear, convolution"):
        sliceout.convert_(nn.Linear(4, 4), 0.5)


def test_dynamically_quantised_layers_are_skipped_with_a_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match="0 is quantised: convert_ comes before quantisation"):
        sliceout.convert_(quantised, 0.5, example_inputs=torch.zeros(2, 6))


class Int8(Tensor):
    """A weight stored in another way, as quantisation libraries have it."""

    @staticmethod
    def __new__(cls, full: Tensor) -> Int8:
        return Tensor._make_subclass(cls, full.detach(), False)


def test_weights_of_a_tensor_subclass_are_skipped_with_a_reason():
    net = mlp()
    net[2].weight = nn.Parameter(Int8(net[2].weight), requires_grad=False)
    with pytest.raises(ValueError, match=r"2\.weight is stored as .* as quantised weights are"):
        sliceout.convert_(net, 0.5)


# -- frozen, tied, LoRA ------------------------------------------------------------------------------------------------


def test_frozen_groups_are_left_alone_and_half_frozen_ones_are_sliced():
    net = nn.Sequential(mlp(), nn.ReLU(), nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2))
    net[0].requires_grad_(False)
    report = sliceout.convert_(net, 0.5)
    assert {r.name: str(r.reason) for r in report.skipped}["0.0"] == "all its parameters are frozen"
    assert {r.name for r in report.rows if r.slice is not None} == {"0.4", "2"}  # layer 2 reads 0.4 and trains
    half = mlp()
    half[0].requires_grad_(False)
    assert sliceout.convert_(half, 0.5).converted == 2
    half(torch.randn(4, 6)).sum().backward()
    assert half[0].weight.grad is None
    assert half[2].weight.grad is not None


def test_a_wholly_frozen_model_has_nothing_to_convert():
    with pytest.raises(ValueError, match="all its parameters are frozen"):
        sliceout.convert_(mlp().requires_grad_(False), 0.5)


def test_tied_embeddings_do_not_disturb_the_rest():
    model, x = build("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    report = sliceout.convert_(model, 0.5)
    assert report.converted >= 4
    assert model.lm_head.weight is model.transformer.wte.weight
    assert call(model.train(), x).isfinite().all()


def test_lora_layers_are_sliced_with_the_layers_they_adapt():
    """The adapter writes beside its layer into the same units: both keep the same ones, as the oracle confirms."""
    peft = pytest.importorskip("peft")
    from sliceout_lab.oracle import masked_dense_, quiet_, randomise_

    net = peft.get_peft_model(mlp(), peft.LoraConfig(target_modules=["0", "2"], r=4))
    full = randomise_(quiet_(net).double()).train()
    sliced = copy.deepcopy(full)
    report = sliceout.convert_(sliced, 0.5, example_inputs=torch.zeros(2, 6).double())
    for row in report.skipped:
        if row.group.size == 4:
            assert "LoRA" in str(row.reason)
    assert {r.slice.size for r in report.rows if r.slice is not None} == {64, 48}
    sliceout.draw_(sliced)
    x = torch.randn(3, 6).double()
    torch.testing.assert_close(sliced(x), masked_dense_(copy.deepcopy(full), report)(x), rtol=1e-10, atol=1e-10)

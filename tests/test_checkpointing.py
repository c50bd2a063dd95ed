"""Saving, loading, copying and moving a sliced model: the same keys as ever, and draws that go on where they were."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import sliceout
from networks import (
    ALL,
    assert_same_state,
    build,
    convnet,
    data,
    gradients,
    loss_of,
    mlp,
    slices_in,
    starts,
    starts_due,
    step_of,
    train_step,
)
from sliceout import nn as snn


def through_file(saved: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, **options)


def plain(name: str) -> nn.Module:
    """The same network before anybody sliced it."""
    return sliceout.revert_(build(name))


# -- state dicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_keys_are_those_of_the_plain_model_and_load_strictly_both_ways(name):
    sliced, unsliced = build(name, seed=1), plain(name)
    assert list(sliced.state_dict()) == list(unsliced.state_dict())
    sliced.load_state_dict(unsliced.state_dict(), strict=True)
    assert_same_state(sliced, unsliced)
    sliced = build(name, seed=2)
    train_step(sliced, data(name), SGD(sliced.parameters(), lr=0.1))
    unsliced.load_state_dict(sliced.state_dict(), strict=True)
    assert_same_state(sliced, unsliced)
    assert torch.equal(sliced.eval()(data(name)), unsliced.eval()(data(name)))


def position_in_state_dict(model: nn.Module, fresh: nn.Module) -> None:
    fresh.load_state_dict(through_file(model.state_dict(), weights_only=True))


def position_by_slices(model: nn.Module, fresh: nn.Module) -> None:
    """The way for formats that keep tensors only."""
    weights = through_file(dict(model.state_dict()), weights_only=True)
    draws = through_file(sliceout.slices(model).state_dict(), weights_only=True)
    assert not hasattr(weights, "_metadata")
    fresh.load_state_dict(weights)
    sliceout.slices(fresh).load_state_dict(draws)


def position_in_json(model: nn.Module, fresh: nn.Module) -> None:
    import json

    fresh.load_state_dict(dict(model.state_dict()))
    sliceout.slices(fresh).load_state_dict(json.loads(json.dumps(sliceout.slices(model).state_dict())))


def whole_model(model: nn.Module, fresh: nn.Module) -> nn.Module:
    return through_file(model, weights_only=False)


def pickled(model: nn.Module, fresh: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def copied(model: nn.Module, fresh: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


WAYS = [position_in_state_dict, position_by_slices, position_in_json, whole_model, pickled, copied]


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ALL)
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(name, way):
    model, x = build(name, sampling="window"), data(name)
    optimizer = Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        train_step(model, x, optimizer)
    fresh = build(name, seed=5, sampling="window")
    fresh = way(model, fresh) or fresh
    resumed = Adam(fresh.parameters(), lr=0.01)
    resumed.load_state_dict(through_file(optimizer.state_dict(), weights_only=True))
    assert starts(fresh) == starts(model)
    for step in range(4, 8):
        train_step(model, x, optimizer)
        train_step(fresh, x, resumed)
        assert starts(fresh) == starts(model) == starts_due(model, step)
    assert step_of(fresh) == 7
    assert_same_state(fresh, model)


@pytest.mark.parametrize("order", [(0, 2, 4), (4, 2, 0)], ids=["in order", "backwards"])
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_resumes_exactly_whatever_order_the_optimizer_held_the_layers_in(way, order):
    """Slices made by hand are joined by whoever sees them first; the order must not decide who gets which draws."""
    model, x = build("mlp"), data("mlp")
    optimizer = SGD([p for i in order for p in model[i].parameters()], lr=0.1)
    for _ in range(2):
        train_step(model, x, optimizer)
    fresh = build("mlp", seed=5)
    fresh = way(model, fresh) or fresh
    resumed = SGD(fresh.parameters(), lr=0.1)
    for _ in range(4):
        train_step(model, x, optimizer)
        train_step(fresh, x, resumed)
        assert starts(fresh) == starts(model)
    assert_same_state(fresh, model)


def test_seed_is_resumed_too():
    model, x = mlp(seed=3), data("mlp")
    train_step(model, x, SGD(model.parameters(), lr=0.1))
    fresh = mlp(seed=0)
    fresh.load_state_dict(model.state_dict())
    assert [starts_due(fresh, i) for i in range(9)] == [starts_due(model, i) for i in range(9)]


def test_checkpoint_without_a_position_loads_and_draws_from_where_the_model_is():
    model, x = build("mlp"), data("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train_step(model, x, optimizer)
    before = starts(model)
    model.load_state_dict(plain("mlp").state_dict())  # metadata, but nothing of ours in it
    assert (step_of(model), starts(model)) == (3, before)
    model.load_state_dict({k: v.clone() for k, v in plain("mlp").state_dict().items()})  # none at all
    assert (step_of(model), starts(model)) == (3, before)
    train_step(model, x, optimizer)
    assert step_of(model) == 4


def test_safetensors_round_trip(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, fresh, x = build("convnet"), build("convnet", seed=5), data("convnet")
    train_step(model, x, SGD(model.parameters(), lr=0.1))
    safetensors.save_model(model, tmp_path / "model.safetensors")
    safetensors.load_model(fresh, tmp_path / "model.safetensors")
    assert_same_state(model, fresh)
    assert step_of(fresh) == 0
    sliceout.slices(fresh).load_state_dict(sliceout.slices(model).state_dict())
    assert starts(fresh) == starts(model)


def test_saved_draws_of_another_architecture_are_refused():
    saved = sliceout.slices(mlp()).state_dict()
    other = convnet()
    before = starts(other)
    with pytest.raises(ValueError, match="convert it alike first"):
        sliceout.slices(other).load_state_dict(saved)
    assert starts(other) == before


def test_part_of_a_checkpoint_may_be_missing():
    model, x = build("mlp"), data("mlp")
    train_step(model, x, SGD(model.parameters(), lr=0.1))
    saved = model.state_dict()
    del saved["4.weight"], saved["4.bias"]
    fresh = build("mlp", seed=5)
    keys = fresh.load_state_dict(saved, strict=False)
    assert keys.missing_keys == ["4.weight", "4.bias"]
    assert starts(fresh) == starts(model)


def test_loading_with_assign_keeps_slices_and_optimizer_working():
    model, x = build("mlp"), data("mlp")
    train_step(model, x, SGD(model.parameters(), lr=0.1))
    fresh = build("mlp", seed=5)
    fresh.load_state_dict(model.state_dict(), assign=True)
    assert fresh[0].weight.data_ptr() == model[0].weight.data_ptr()
    optimizer = SGD(fresh.parameters(), lr=0.1)
    train_step(fresh, x, optimizer)
    assert step_of(fresh) == 2


@pytest.mark.parametrize("name", ALL)
def test_model_rewound_to_its_beginning_draws_the_same_again(name):
    """As in learning-rate search or lottery tickets; slices made by hand were not joined when this was saved."""
    model, x = build(name), data(name)
    beginning = copy.deepcopy(model.state_dict())
    runs = []
    for _ in range(2):
        model.load_state_dict(beginning)
        optimizer = SGD(model.parameters(), lr=0.1)
        runs.append([])
        for _ in range(5):
            runs[-1].append(starts(model))
            train_step(model, x, optimizer)
    assert runs[0] == runs[1]


def test_streams_that_a_partial_checkpoint_makes_collide_are_told_apart():
    donor, model, x = build("mlp"), build("mlp"), data("mlp")
    for net in (donor, model):
        sliceout.slices(net)
    streams = [s.stream for s in slices_in(model)]
    part = donor.state_dict()
    part._metadata["2"]["sliceout"]["out"] = part._metadata["0"]["sliceout"]["out"]
    part._metadata["4"].pop("sliceout")
    model.load_state_dict(part)
    assert len({s.stream for s in slices_in(model)}) == 1
    train_step(model, x, SGD(model.parameters(), lr=0.1))
    assert [s.stream for s in slices_in(model)] == streams
    assert starts(model) == starts_due(model, 1)


def test_saved_state_dict_does_not_move_with_the_model():
    model, x = build("mlp"), data("mlp")
    saved = copy.deepcopy(model.state_dict())
    train_step(model, x, SGD(model.parameters(), lr=0.1))
    model.load_state_dict(saved)
    assert step_of(model) == 0
    assert starts(model) == starts_due(model, 0)


# -- copies and pickles ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [whole_model, pickled, copied], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ALL)
def test_copies_keep_layers_aligned_and_are_watched(name, way, float64):
    model, x = build(name), data(name)
    twin = way(model, model)
    assert [len(m.slices) for m in twin.modules() if isinstance(m, snn.Sliced)] == [
        len(m.slices) for m in model.modules() if isinstance(m, snn.Sliced)
    ]
    assert len(slices_in(twin)) == len(slices_in(model))
    optimizer, of_twin = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    for step in range(1, 4):
        train_step(twin, x, of_twin)
        assert (step_of(twin), step_of(model)) == (step, 0)
    for _ in range(3):
        train_step(model, x, optimizer)
    assert_same_state(model, twin)


def test_class_made_on_the_fly_is_pickled():
    hidden = sliceout.Slice(16)
    model = nn.Sequential(
        snn.slice_(Special(6, 16), out_slice=hidden),
        snn.slice_(nn.Linear(16, 3), in_slice=hidden),
    )
    twin = pickle.loads(pickle.dumps(model))
    assert isinstance(twin[0], Special)
    assert type(twin[0]) is type(model[0])
    assert len(slices_in(twin)) == 1
    assert torch.equal(twin(data("mlp")), model(data("mlp")))


class Special(nn.Linear):
    """A user's own layer."""


# -- devices, dtypes, meta ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_built_on_meta_and_materialised(name):
    with torch.device("meta"):
        model = build(name, sampling="window")
    assert all(p.is_meta for p in model.parameters())
    expected = build(name, sampling="window")
    assert starts(model) == starts(expected)
    model.to_empty(device="cpu")
    model.load_state_dict(expected.state_dict())
    x = data(name)
    optimizer = SGD(model.parameters(), lr=0.1), SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        train_step(model, x, optimizer[0])
        train_step(expected, x, optimizer[1])
    assert step_of(model) == 3
    assert_same_state(model, expected)


def test_meta_model_takes_weights_by_assignment():
    with torch.device("meta"):
        model = build("mlp")
    model.load_state_dict(build("mlp").state_dict(), assign=True)
    train_step(model, data("mlp"), SGD(model.parameters(), lr=0.1))
    assert step_of(model) == 1


def test_forward_on_meta_gives_shapes():
    with torch.device("meta"):
        model = build("convnet")
        assert model(torch.empty(2, 3, 8, 8)).shape == (2, 5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("sampling", ["window", "circular"])
def test_dtype_of_the_model_may_change(name, dtype, sampling):
    model = build(name, sampling=sampling).to(dtype)
    x = data(name).to(dtype)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(1, 3):
        out = model(x)
        assert out.dtype == dtype
        out.float().square().mean().backward()
        assert all(grad.dtype == dtype for _, grad in gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        assert step_of(model) == step
        assert starts(model) == starts_due(model, step)
    assert all(s.start.dtype == torch.int64 for s in slices_in(model))


# -- other ways to call and to keep a model ----------------------------------------------------------------------------


def replaced(model: nn.Module, scale: float) -> dict[str, Tensor]:
    return {k: scale * v.detach() for k, v in model.named_parameters()}


@pytest.mark.parametrize("name", ALL)
def test_functional_call_uses_the_parameters_given(name, float64):
    model, twin, x = build(name), build(name), data(name)
    params = replaced(model, 0.5)
    twin.load_state_dict(params, strict=False)
    out = torch.func.functional_call(model, params, (x,))
    assert torch.equal(out, twin(x))
    assert not torch.equal(out, model(x))


@pytest.mark.parametrize("sampling", ["window", "circular"])
@pytest.mark.parametrize("name", [name for name in ALL if name != "controlled"])  # registered ops know no torch.func
def test_func_grad_equals_backward(name, sampling, float64):
    model, x = build(name, sampling=sampling), data(name)
    sliceout.draw_(model)
    params = {k: v.detach() for k, v in model.named_parameters()}
    buffers = {k: v.clone() for k, v in model.named_buffers()}

    def loss(p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, (p, b), (x,)).square().mean()

    ours = torch.func.grad(loss)(params, buffers)
    loss_of(model, x).backward()
    for key, grad in gradients(model):
        torch.testing.assert_close(ours[key], grad, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("sampling", ["window", "circular"])
@pytest.mark.parametrize("name", ["mlp", "norms", "attention"])
def test_gradients_per_sample(name, sampling, float64):
    model, x = build(name, sampling=sampling), data(name)
    params = {k: v.detach() for k, v in model.named_parameters()}
    for _ in range(4):
        sliceout.draw_(model)

        def loss(p: dict[str, Tensor], sample: Tensor) -> Tensor:
            return torch.func.functional_call(model, p, (sample[None],)).square().mean()

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
        for i, sample in enumerate(x):
            model.zero_grad()
            loss_of(model, sample[None]).backward()
            for key, grad in gradients(model):
                torch.testing.assert_close(each[key][i], grad, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("sampling", ["window", "circular"])
def test_ensemble_of_weights_by_vmap(sampling, float64):
    models, x = [build("mlp", seed=i, sampling=sampling) for i in range(3)], data("mlp")
    for model in models:
        sliceout.slices(model)
    params, _ = torch.func.stack_module_state(models)
    for _ in range(4):
        for model in models:
            sliceout.draw_(model)
        together = torch.func.vmap(lambda p: torch.func.functional_call(models[0], p, (x,)))(params)
        torch.testing.assert_close(together, torch.stack([m(x) for m in models]))


def test_moving_average_of_a_sliced_model():
    model, x = build("convnet"), data("convnet")
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )
    optimizer = SGD(model.parameters(), lr=0.1)
    mean = {k: v.clone() for k, v in model.state_dict().items()}
    for step in range(1, 4):
        train_step(model, x, optimizer)
        average.update_parameters(model)
        if step == 1:
            mean = {k: v.clone() for k, v in model.state_dict().items()}
        else:
            mean = {k: v.lerp(model.state_dict()[k], 0.5) if v.is_floating_point() else v for k, v in mean.items()}
        assert (step_of(model), step_of(average)) == (step, 0)
    for key, value in average.module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, mean[key])
    whole = plain("convnet")
    whole.load_state_dict(average.module.state_dict())
    assert torch.equal(average.eval()(x), whole.eval()(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ALL)
def test_training_forward_without_gradients(name, mode, float64):
    model, twin, x = build(name), build(name), data(name)
    expected = twin(x).detach()
    with mode():
        assert torch.equal(model(x), expected)
    assert_same_state(model, twin)  # running statistics included
    optimizer = SGD(model.parameters(), lr=0.1)
    train_step(model, x, optimizer)  # and it trains afterwards
    assert step_of(model) == 1


def test_parameters_shared_with_another_process_view_stay_drawn():
    model = build("mlp").share_memory()
    train_step(model, data("mlp"), SGD(model.parameters(), lr=0.1))
    assert step_of(model) == 1

"""Compact gradients out of compiled graphs: what eager code computes, in one graph, and all that hangs on it."""

from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import sliceout
from networks import NETWORKS, build, data, loss_of, train_step
from oracle import exactly
from sliceout.compact import gradient_leaves
from sliceout.compact.gradient import SlicedGrad
from sliceout.drawing import owner_of
from sliceout.nn.base import Sliced
from sliceout.takes import Take

pytestmark = pytest.mark.slow


def compiled(model: nn.Module, backend: str = "aot_eager") -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[return-value]


def kinds(model: nn.Module) -> dict[str, type]:
    return {name: type(p.grad) for name, p in model.named_parameters()}


def dense(grad):
    return grad.dense() if isinstance(grad, SlicedGrad) else grad


def same_gradients(model: nn.Module, expected: nn.Module) -> None:
    for (key, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        exactly(dense(p.grad), dense(q.grad), key)


def pair(name: str = "mlp", **settings) -> tuple[nn.Module, nn.Module]:
    model = build(name, grads="compact", **settings)
    return model, copy.deepcopy(model)


MODES = [(name, sampling, "aot_eager") for name in NETWORKS for sampling in ("circular", "window")]


@pytest.mark.parametrize(("name", "sampling", "backend"), [*MODES, ("convnet", "window", "inductor")])
def test_training_equals_eager_compact_training(name, sampling, backend, float64):
    """The scales of window slices differ from unit to unit."""
    model, eager = pair(name, sampling=sampling)
    run = compiled(model, backend)
    for net, call in ((model, run), (eager, eager)):
        optimizer = AdamW(net.parameters(), lr=0.01)
        for _ in range(4):
            train_step(call, data(name), optimizer)
        loss_of(call, data(name)).backward()
    assert kinds(model) == kinds(eager)
    assert SlicedGrad in kinds(model).values()
    same_gradients(model, eager)
    for (key, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        exactly(p.detach(), q.detach(), key)


def test_one_graph_for_all_draws(float64):
    model, _ = pair("convnet")
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    torch._dynamo.reset()
    run = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(5):
        train_step(run, data("convnet"), optimizer)
    assert len(seen) == 1


def test_no_gradient_of_full_size_is_made(float64):
    """Nowhere in the backward graph is there a tensor of the shape of a sliced weight."""
    from torch._dynamo.backends.common import aot_autograd

    shapes: list[tuple[int, ...]] = []

    def note(graph, inputs):
        shapes.extend(tuple(n.meta["val"].shape) for n in graph.graph.nodes if hasattr(n.meta.get("val"), "shape"))
        return graph

    for grads, expected in (("compact", False), ("dense", True)):
        shapes.clear()
        model = build("mlp", grads=grads)
        run = compiled(model, aot_autograd(fw_compiler=lambda g, _: g, bw_compiler=note))
        loss_of(run, data("mlp")).backward()
        assert (tuple(model[2].weight.shape) in shapes) is expected


def test_every_parameter_of_a_sliced_layer_has_its_leaf_in_the_graph(float64):
    from torch._dynamo.backends.common import aot_autograd

    ops: list[str] = []

    def note(graph, inputs):
        ops.extend(str(n.target) for n in graph.graph.nodes if "sliceout" in str(n.target))
        return graph

    model = build("convnet", grads="compact")
    loss_of(compiled(model, aot_autograd(fw_compiler=note, bw_compiler=note)), data("convnet")).backward()
    counts = {name: sum(f"sliceout.{name}." in op for op in ops) for name in ("take", "put")}
    assert counts == {"take": 9, "put": 0}, "each gradient goes to a leaf, and none is put into a full tensor"


def test_gradients_add_up_and_hooks_run(float64):
    """Parameters with hooks get dense gradients."""
    model, eager = pair()
    calls: dict[str, list[str]] = {"compiled": [], "eager": []}
    for net, call, name in ((model, compiled(model), "compiled"), (eager, eager, "eager")):
        net[0].weight.register_hook(lambda g, name=name: calls[name].append("grad") or g * 2)
        net[2].weight.register_post_accumulate_grad_hook(lambda p, name=name: calls[name].append(type(p.grad).__name__))
        net.train()
        for _ in range(3):
            loss_of(call, data("mlp")).backward()
    assert sorted(calls["compiled"]) == ["Tensor"] * 3 + ["grad"] * 3
    assert sorted(calls["eager"]) == ["SlicedGrad"] * 3 + ["grad"] * 3
    assert [name for name, kind in kinds(model).items() if kind is SlicedGrad] == ["0.bias", "2.bias", "4.weight"]
    same_gradients(model, eager)


@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_the_graph_does_not_know_of_raises(how, float64):
    """Autograd would call it with no gradient, or twice."""
    model, _ = pair()
    run = compiled(model)
    loss_of(run, data("mlp")).backward()
    getattr(model[2].weight, how)(lambda _: None)
    with pytest.raises(RuntimeError, match="has got a hook"):
        loss_of(run, data("mlp")).backward()
    model.train()
    model.zero_grad()
    loss_of(run, data("mlp")).backward()
    assert kinds(model)["2.weight"] is torch.Tensor


def test_gradients_of_two_draws_add_up(float64):
    model, eager = pair()
    for net, call in ((model, compiled(model)), (eager, eager)):
        for _ in range(2):
            loss_of(call, data("mlp")).backward()
            sliceout.draw_(net)
    same_gradients(model, eager)


def test_a_draw_between_forward_and_backward_raises(float64):
    model, _ = pair()
    loss = loss_of(compiled(model), data("mlp"))
    sliceout.draw_(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_schedule_of_rates(float64):
    """Stand-ins follow the widths."""
    model, eager = pair()
    run = compiled(model)
    for net, call in ((model, run), (eager, eager)):
        schedule = sliceout.WarmUp(net, until=0.5, steps=2, tail=0.25)
        optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
        for step in range(8):
            schedule.step(step, 8)
            loss_of(call, data("mlp")).backward()
            assert (kinds(net)["2.weight"] is SlicedGrad) == (step < 6)
            optimizer.step()
            optimizer.zero_grad()
    for (key, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        exactly(p.detach(), q.detach(), key)


class Doubled(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def test_layers_with_a_forward_of_their_own(float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), Doubled(16), nn.Linear(16, 3))
    sliceout.convert_(model, 0.5, grads="compact", example_inputs=torch.zeros(2, 6))
    eager = copy.deepcopy(model)
    for call in (compiled(model), eager):
        loss_of(call, data("mlp")).backward()
    assert kinds(model) == kinds(eager)
    assert kinds(model)["1.weight"] is SlicedGrad
    same_gradients(model, eager)


def test_one_slice_off_gives_dense_gradients(float64):
    """The leaf is that of the layer with all its slices; anything else is right, and dense."""
    model, eager = pair()
    for net in (model, eager):
        net[0].axes["out"].slice.on = False
    for call in (compiled(model), eager):
        loss_of(call, data("mlp")).backward()
    assert kinds(model)["2.weight"] is torch.Tensor
    assert kinds(model)["4.weight"] is SlicedGrad
    same_gradients(model, eager)


def test_frozen_parameters_and_passes_without_gradients(float64):
    model, _ = pair()
    model[2].weight.requires_grad_(False)
    run = compiled(model)
    with torch.no_grad():
        expected = model(data("mlp"))
        exactly(run(data("mlp")), expected, "no_grad")
    loss_of(run, data("mlp")).backward()
    assert model[2].weight.grad is None
    assert kinds(model)["0.weight"] is SlicedGrad


def test_other_tensors_in_the_place_of_parameters_get_dense_gradients(float64):
    model, plain = pair()
    run = compiled(model)
    others = {k: p.detach().clone().requires_grad_() for k, p in plain.named_parameters()}
    inside = {f"_orig_mod.{k}": p for k, p in others.items()}
    torch.func.functional_call(run, inside, (data("mlp"),)).square().mean().backward()
    loss_of(plain, data("mlp")).backward()
    for key, p in plain.named_parameters():
        exactly(others[key].grad, dense(p.grad), key)
    assert all(p.grad is None for p in model.parameters())


def test_exported_programs_know_of_no_leaves(float64):
    model, _ = pair()
    program = torch.export.export(model, (data("mlp"),))
    ops = {str(node.target) for node in program.graph.nodes}
    assert "sliceout.take.default" in ops
    assert "sliceout.take_for.default" not in ops


def test_autocast_and_channels_last():
    model, eager = (m.to(memory_format=torch.channels_last) for m in pair("convnet"))
    x = data("convnet").float().to(memory_format=torch.channels_last)
    truth = copy.deepcopy(eager).double()
    loss_of(truth, x.double()).backward()
    for call in (compiled(model), eager):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(call, x)
        loss.backward()
    for (key, p), q, t in zip(model.named_parameters(), eager.parameters(), truth.parameters(), strict=True):
        right = dense(t.grad)
        errors = [float((dense(g).double() - right).norm() / right.norm()) for g in (p.grad, q.grad)]
        assert dense(p.grad).dtype == torch.float32
        assert errors[0] < 1.5 * errors[1] + 0.01, (key, errors)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "double", "load", "assign"])
def test_a_model_that_was_copied_moved_or_loaded(how, float64):
    model, eager = pair()
    if how == "deepcopy":
        model = copy.deepcopy(model)
    elif how == "pickle":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        model = torch.load(buffer, weights_only=False)
    elif how == "double":
        model = model.float().double()
        eager = eager.float().double()
    else:
        model.load_state_dict(copy.deepcopy(eager).state_dict(), assign=how == "assign")
    for call in (compiled(model), eager):
        loss_of(call, data("mlp")).backward()
    assert kinds(model) == kinds(eager)
    same_gradients(model, eager)


def test_reverted_models_keep_nothing(float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    sliceout.convert_(model, 0.5, grads="compact", example_inputs=torch.zeros(2, 6))
    assert model[0]._gradient_leaves.keys() == {"weight", "bias"}
    sliceout.revert_(model)
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before


def test_leaves_share_their_memory_and_are_not_of_the_model(float64):
    model, _ = pair("convnet")
    leaves = [leaf for m in model.modules() for _, leaf, _ in getattr(m, "_gradient_leaves", {}).values()]
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) <= 2  # it may have grown once
    assert not {id(leaf) for leaf in leaves} & {id(t) for t in (*model.parameters(), *model.buffers())}
    assert not any("stand" in key for key in model.state_dict())


def test_a_layer_that_is_gone_takes_its_gradient_along(float64):
    hidden = sliceout.Slice(8, grads="compact")
    layer = sliceout.nn.Linear(4, 8, out_slice=hidden)
    _, leaf, _ = layer._gradient_leaves["weight"]
    del layer
    leaf.grad = torch.ones_like(leaf)
    for hook in leaf._post_accumulate_grad_hooks.values():
        hook(leaf)
    assert leaf.grad is None


def test_another_slice_of_the_same_width_gets_another_leaf(float64):
    first, second = sliceout.Slice(8, grads="compact"), sliceout.Slice(8, grads="compact", seed=1)
    layer = sliceout.nn.Linear(4, 8, out_slice=first)
    _, leaf, _ = layer._gradient_leaves["weight"]
    layer.train()
    assert layer._gradient_leaves["weight"][1] is leaf
    layer.axes = {"out": second.axis()}
    layer.train()
    owner_of(second).seek_(1)
    compiled(layer)(torch.ones(2, 4)).sum().backward()
    assert layer.weight.grad.at.rows.start == second.start_on_host != first.start_on_host


def test_a_replaced_parameter_is_not_kept_alive(float64):
    """As by FSDP2, which puts a shard in its place."""
    model, _ = pair()
    before = weakref.ref(model[2].weight)
    model[2].weight = nn.Parameter(torch.zeros(12, 16))
    assert before() is None


def test_parametrized_layers_may_be_refused(float64):
    """What DDP does with layers whose gradients it averages itself."""
    model, _ = pair()
    nn.utils.parametrizations.weight_norm(model[2])
    bias = model[2].bias
    gradient_leaves.exclude(model, {bias})
    assert {name: list(m._gradient_leaves) for name, m in model.named_children() if hasattr(m, "_gradient_leaves")} == {
        "0": [], "2": ["bias"], "4": []
    }  # fmt: skip


def test_gradient_leaves_made_in_inference_mode_can_be_trained(float64):
    model, eager = pair()
    for layer in model:
        vars(layer).pop("_gradient_leaves", None)
    with torch.inference_mode():
        for layer in model:
            if isinstance(layer, Sliced):
                gradient_leaves.refresh(layer)
    for call in (compiled(model), eager):
        loss_of(call, data("mlp")).backward()
    assert kinds(model) == kinds(eager)
    same_gradients(model, eager)


def test_gradient_leaves_take_no_memory():
    leaves = [
        leaf
        for m in build("convnet", grads="compact").modules()
        for _, leaf, _ in getattr(m, "_gradient_leaves", {}).values()
    ]
    assert len(leaves) > 4
    assert all(leaf.numel() and not leaf.untyped_storage().nbytes() for leaf in leaves)


def test_dense_slices_have_none():
    assert not any(getattr(m, "_gradient_leaves", None) for m in build("mlp").modules())
    assert Take(sliceout.Slice(8).axis()).compact is False


@pytest.mark.parametrize("copied", [False, True])
def test_no_layer_is_guarded_by_what_another_one_has(copied):
    """Two that share a dict, as a class's, are compared in Python before every call."""
    model = build("mlp")
    model = copy.deepcopy(model) if copied else model
    for layer in model.modules():
        if isinstance(layer, Sliced):
            assert "_gradient_leaves" in layer.__dict__


def test_compiled_autograd(float64):
    """Compiles backward passes as a whole, and with them whatever Python runs there."""
    model, eager = pair()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda x: loss_of(model, x).backward(), backend="aot_eager")(data("mlp"))
    loss_of(eager, data("mlp")).backward()
    same_gradients(model, eager)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "captured"])
@pytest.mark.parametrize("name", NETWORKS)
def test_training_on_a_gpu_equals_eager_compact_training(name, mode):
    model, eager = (m.cuda() for m in pair(name, sampling="window"))
    x = data(name).float().cuda()
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, mode=None if mode == "captured" else mode)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        for net, call in ((model, run), (eager, eager)):
            optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
            if net is model and mode == "captured":
                target = torch.zeros_like(eager(x))
                step = sliceout.capture(run, lambda y, t: (y - t).square().mean(), optimizer, (x, target))
                for _ in range(5):
                    step(x, target)
            else:
                for _ in range(5):
                    train_step(call, x, optimizer)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    for (key, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}")

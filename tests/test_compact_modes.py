"""Compact gradients in every way of training: the tail, schedules, checkpoints, compilers, other people's loops."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lazy
import sliceout
from networks import Attention, build, data, loss_of, train_step
from oracle import exactly
from sliceout.compact.gradient import SlicedGrad
from test_compact import prepared, sample, train_and_compare
from test_trainers import Samples, assert_drawn, lightning_trainer


def same_parameters(a, b):
    for (key, p), q in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), key


def kinds(model):
    return {name: isinstance(p.grad, SlicedGrad) for name, p in model.named_parameters()}


# -- on, off, eval, schedules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
def test_tail_and_back(optimizer, float64):
    """After off_ all entries are updated, with the state they have; after on_ only the slices again."""
    model, stock, reference = prepared("convnet", optimizer)
    x = sample("convnet")
    train_and_compare(model, stock, reference, x, 3)
    sliceout.off_(model)
    train_and_compare(model, stock, reference, x, 2)
    loss_of(model, x).backward()
    assert not any(kinds(model).values())
    model.zero_grad()
    sliceout.on_(model)
    train_and_compare(model, stock, reference, x, 3)


def test_revert_leaves_an_ordinary_model_and_optimizer(float64):
    model, stock, reference = prepared("converted mlp", "adamw")
    train_and_compare(model, stock, reference, sample(), 3)
    sliceout.revert_(model)
    sliceout.revert_(reference.model)
    loss_of(model, sample()).backward()
    assert not any(kinds(model).values())
    reference.model.zero_grad()
    loss_of(reference.model, sample()).backward()
    grads = {k: p.grad for k, p in reference.model.named_parameters()}
    stock.step()
    reference.update(grads)
    reference.check(model, stock)


def test_evaluation_between_steps_changes_nothing(float64):
    runs = []
    for evaluate in (False, True):
        model, stock, _ = prepared("convnet", "adamw")
        for _ in range(3):
            train_step(model, sample("convnet"), stock)
            if evaluate:
                model.eval()
                with torch.inference_mode():
                    model(sample("convnet"))
                loss_of(model, sample("convnet")).backward()  # of the full network
                assert not any(kinds(model).values())
                model.zero_grad()
                model.train()
        runs.append(model)
    same_parameters(*runs)


def test_rate_that_changes_midway(float64):
    """Slices grow and shrink between steps, as under a schedule; the state is full-size and stays valid."""
    model, stock, reference = prepared("mlp", "adamw")
    for rate in (0.5, 0.25, 0.75, 0.0, 0.5):
        for family in (sliceout.slices(model), sliceout.slices(reference.model)):
            for s in family:
                s.rerate_(rate)
        train_and_compare(model, stock, reference, sample(), 2)


def test_tail_as_a_schedule(float64):
    model, stock, _ = prepared("mlp", "sgd")
    tail = sliceout.Tail(model, 0.5)
    before = []
    for step in range(4):
        tail.step(step / 4)
        loss_of(model, sample()).backward()
        before.append(any(kinds(model).values()))
        stock.step()
        stock.zero_grad()
    assert before == [True, True, False, False]


# -- recomputation, transforms, compilers ------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant, float64):
    runs = []
    for recompute in (False, True):
        model, stock, _ = prepared("mlp", "adamw")
        for _ in range(4):
            x = sample().requires_grad_()
            out = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
            out.square().mean().backward()
            assert isinstance(model[2].weight.grad, SlicedGrad)
            stock.step()
            stock.zero_grad()
        runs.append(model)
    same_parameters(*runs)


def test_function_transforms_have_dense_gradients(float64):
    model = build("mlp", grads="compact")
    dense = build("mlp")
    parameters = {k: p.detach() for k, p in model.named_parameters()}

    def loss(ps, x, net):
        return torch.func.functional_call(net, ps, (x,)).square().mean()

    got, expected = (torch.func.grad(loss)(parameters, data("mlp"), net) for net in (model, dense))
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, None))(parameters, data("mlp")[:, None], model)
    for key, value in expected.items():
        assert type(got[key]) is torch.Tensor
        exactly(got[key], value, key)
        exactly(each[key].mean(0), value, key)


def trained(grads, wrap, name="mlp", steps=4, make=AdamW):
    model = build(name, grads=grads)
    run = wrap(model)
    optimizer = make(model.parameters(), lr=0.1)
    for _ in range(steps):
        train_step(run, data(name), optimizer)
    return model


@pytest.mark.slow
def test_eager_model_with_a_compiled_optimizer_step(float64):
    """The compiled step sees whole gradients: it must do what the dense mode does, or what slices do; nothing else."""
    torch._dynamo.reset()
    runs = {}
    for grads in ("dense", "compact"):
        model = build("mlp", grads=grads)
        optimizer = SGD(model.parameters(), lr=0.1)
        step = torch.compile(lambda optimizer=optimizer: optimizer.step(), backend="aot_eager")
        for _ in range(3):
            loss_of(model, data("mlp")).backward()
            step()
            optimizer.zero_grad()
        runs[grads] = model
    for (key, p), q in zip(runs["dense"].named_parameters(), runs["compact"].parameters(), strict=True):
        exactly(q.detach(), p.detach(), key)  # plain SGD without decay: dense and slice-only updates are the same


def test_plain_sgd_equals_the_dense_mode(float64):
    """Without state or decay a zero gradient changes nothing, so both modes are one."""
    plain = trained("dense", lambda m: m, make=SGD)
    for (key, p), q in zip(
        plain.named_parameters(), trained("compact", lambda m: m, make=SGD).parameters(), strict=True
    ):
        exactly(q.detach(), p.detach(), key)


def test_fused_projections_stay_dense_and_right(float64):
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(3, 5, 16)
    sliceout.convert_(model, 0.5, example_inputs=x, grads="compact")
    dense = copy.deepcopy(model)
    for s in sliceout.slices(dense):
        s.grads = "dense"
    for net in (model, dense):
        loss_of(net, x).backward()
    assert kinds(model)["fc1.weight"]
    assert not kinds(model)["qkv.weight"]
    for (key, p), q in zip(dense.named_parameters(), model.parameters(), strict=True):
        exactly(q.grad.dense() if isinstance(q.grad, SlicedGrad) else q.grad, p.grad, key)


def test_saved_and_resumed_midway(float64):
    """The model's and the optimizer's state dicts are all that is needed."""
    model, stock, reference = prepared("mlp", "adamw")
    train_and_compare(model, stock, reference, sample(), 3)
    fresh, other, _ = prepared("mlp", "adamw")
    fresh.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(copy.deepcopy(stock.state_dict()))
    for _ in range(3):
        train_step(model, sample(), stock)
        train_step(fresh, sample(), other)
    same_parameters(model, fresh)


def test_report_says_so():
    for grads in ("dense", "compact"):
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        report = sliceout.convert_(model, 0.5, grads=grads)
        assert ("compact gradients" in str(report)) == (grads == "compact")
        assert report.as_dict()["groups"][0]["grads"] == grads
        assert ("grads=compact" in repr(model)) == (grads == "compact")


def test_frozen_parameters(float64):
    model, stock, _ = prepared("mlp", "momentum")
    model[2].weight.requires_grad_(False)
    frozen = model[2].weight.clone()
    loss_of(model, sample()).backward()
    stock.step()
    assert torch.equal(model[2].weight, frozen)
    assert model[2].weight.grad is None


# -- other people's loops ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}], ids=str)
def test_lightning(tmp_path, options):
    lightning = pytest.importorskip("lightning")
    seen = set()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = build("mlp", grads="compact")

        def training_step(self, batch, index):
            return loss_of(self.net, batch[0])

        def on_before_optimizer_step(self, optimizer):
            seen.update(kinds(self).items())

        def configure_optimizers(self):
            return AdamW(self.parameters(), lr=0.01)

    module = Module()
    trainer = lightning_trainer(tmp_path, max_epochs=2, enable_checkpointing=False, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "sliceout")
        trainer.fit(module, DataLoader(TensorDataset(data("mlp", 32)), 8))
    assert ("net.2.weight", True) in seen
    assert ("net.2.weight", False) not in seen

    plain = build("mlp", grads="compact")
    optimizer = AdamW(plain.parameters(), lr=0.01)
    micro = options.get("accumulate_grad_batches", 1)
    for i, x in enumerate(data("mlp", 32).chunk(4) * 2):
        (loss_of(plain, x) / micro).backward()
        if (i + 1) % micro == 0:
            if options:
                nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(plain.parameters(), module.net.parameters(), strict=True):
        torch.testing.assert_close(q, p)


class CompactWithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build("mlp", grads="compact")
        self.seen = []

    def forward(self, x):
        from networks import starts

        self.seen.append(tuple(starts(self.net)))
        return {"loss": self.net(x).square().mean()}


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_transformers_trainer(tmp_path, optim):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = CompactWithLoss()
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, optim=optim, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, max_grad_norm=0.5,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Samples(32))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "sliceout")
        before = {k: p.detach().clone() for k, p in model.net.named_parameters()}
        live = lazy.live_entries(model.net)
        trainer.create_optimizer_and_scheduler(4)
        kept = trainer.optimizer.register_step_post_hook(
            lambda *_: untouched.append(
                all(torch.equal(p[~live[k]], before[k][~live[k]]) for k, p in model.net.named_parameters())
            )
        )
        untouched: list[bool] = []
        trainer.train()
        kept.remove()
    assert_drawn(model, 4, per_step=2)
    assert untouched[0]  # AdamW's decay and moments would have moved them in dense mode
    assert not untouched[-1]

"""Tail, warm-up, learning rates and recalibration."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sliceout
from sliceout import Schedule, Tail, WarmUp, convert_, recalibrate_
from sliceout_lab.models import TransformerLM, WideResNet


def net(rate=0.5, **settings):
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2))
    return model, convert_(model, rate, **settings).slices


@pytest.mark.parametrize(("fraction", "last"), [(0.1, 90), (0.01, 99), (0.5, 50), (0.0, 100), (1.0, 0)])
def test_the_tail_is_the_full_network(fraction, last):
    model, slices = net()
    tail = Tail(model, fraction)
    on = []
    for step in range(100):
        tail.step(step, 100)
        on.append(all(s.on for s in slices))
        assert model(torch.zeros(1, 4)).shape == (1, 2)
    assert on == [True] * last + [False] * (100 - last)
    tail.step(0.0)
    assert all(s.on for s in slices) == (last > 0)  # back to the start, as after loading an early checkpoint


def test_rates_follow_progress_and_the_groups_own_rates():
    model, slices = net({"0": 0.5, "2": 0.25})
    schedule = Schedule(model, {0.0: 0.5, 0.2: 1.0, 0.9: 0.0})
    seen = []
    for step in (0, 19, 20, 89, 90, 50):
        schedule.step(step, 100)
        seen.append([(s.width, s.on) for s in slices])
    assert seen == [
        [(48, True), (112, True)], [(48, True), (112, True)], [(32, True), (96, True)], [(32, True), (96, True)],
        [(32, False), (96, False)], [(32, True), (96, True)],
    ]  # fmt: skip


@pytest.mark.parametrize("sampling", ["window", "circular"])
def test_a_changed_rate_equals_a_conversion_at_that_rate(sampling):
    model, slices = net(0.5, sampling=sampling)
    other = sliceout.revert_(copy.deepcopy(model))
    convert_(other, 0.25, sampling=sampling)
    for _ in range(3):
        sliceout.draw_(model), sliceout.draw_(other)
    Schedule(model, {0.0: 0.5}).step(0.0)
    for a, b in zip(slices, sliceout.slices(other), strict=True):
        assert (a.width, a.rule, a.gain, a.start_on_host) == (b.width, b.rule, b.gain, b.start_on_host)
        if a.scale is not None:
            torch.testing.assert_close(a.scale, b.scale)
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), other(x))


@pytest.mark.parametrize("scheme", ["sliceout", "controlled", "standard", "patch"])
def test_every_scheme_changes_its_rate(scheme):
    model = WideResNet(10, 1)
    slices = convert_(model, 0.5, scheme=scheme).slices
    before = [(s.start.data_ptr(), s.width) for s in slices]
    schedule = Schedule(model, {0.0: 0.2})
    schedule.step(0.0)
    assert all(abs(s.rate - 0.1) < 1e-9 for s in slices)
    assert [p for p, _ in before] == [s.start.data_ptr() for s in slices]  # graphs of other rates still read them
    if scheme != "standard":
        assert all(s.width > w for (_, w), s in zip(before, slices, strict=True))
    model(torch.randn(2, 3, 32, 32)).sum().backward()


def test_attention_follows_a_changed_rate():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=20, n_positions=32)
    tokens = torch.randint(20, (1, 5))
    for model in (transformers.GPT2LMHeadModel(config), TransformerLM(32, layers=1, vocabulary=20, context=32)):
        model.train()
        report = convert_(model, 0.5)
        width = {s: s.width for s in report.slices}
        Schedule(model, {0.0: 0.5}).step(0.0)
        assert all(s.width > w for s, w in width.items())
        model(tokens)


def test_a_warm_up_in_a_few_steps():
    model, slices = net(0.6, align=1)
    schedule = WarmUp(model, until=0.3, steps=3, tail=0.1)
    rates = []
    for step in range(100):
        schedule.step(step, 100)
        rates.append(round(next(iter(slices)).rate, 6) if next(iter(slices)).on else 0.0)
    assert rates == [0.2] * 15 + [0.4] * 15 + [0.6] * 60 + [0.0] * 10
    assert len({s.width for s in slices}) == 2


def test_compiled_graphs_are_one_per_rate():
    model, _ = net()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled, x = torch.compile(model, backend=backend, fullgraph=True), torch.randn(2, 4)
    schedule = Schedule(model, {0.0: 0.5, 0.3: 1.0, 0.6: 0.0})
    for progress in (0.0, 0.1, 0.3, 0.4, 0.7, 0.8, 0.1, 0.5):
        schedule.step(progress)
        sliceout.draw_(model)
        torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 3


@pytest.mark.parametrize(("make", "message"), [
    (lambda m: Tail(m, 1.5), "fraction=1.5: expected 0 to 1"),
    (lambda m: Schedule(m, {1.5: 1.0}), "progress 1.5: expected 0 to 1"),
    (lambda m: Schedule(m, {0.0: -1.0}), r"factor -1.0 at progress 0.0: expected 0 \(off\)"),
    (lambda m: Schedule(m, {0.0: 2.0}), "would raise a rate to 1: expected rates below 1"),
    (lambda m: WarmUp(m, 0.5, steps=1), "steps=1: expected at least 2"),
    (lambda m: WarmUp(m, 0.95, tail=0.1), "until=0.95, tail=0.1: expected"),
    (lambda m: Tail(m).step(3, 0), "total=0: expected the number of steps"),
    (lambda m: Tail(nn.Linear(2, 2)), "no sliced layer"),
])  # fmt: skip
def test_bad_schedules(make, message):
    with pytest.raises(ValueError, match=message):
        make(net()[0])


# -- recalibration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["sliceout", "standard", "patch"])
def test_recalibration_gives_the_statistics_of_the_full_network(scheme):
    model = WideResNet(10, 1, dropout=0.5)
    loader = [(torch.randn(8, 3, 32, 32), torch.zeros(8)) for _ in range(3)]
    plain = copy.deepcopy(model)
    for m in plain.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    torch.optim.swa_utils.update_bn(loader, plain)
    convert_(model, 0.5, scheme=scheme)
    for x, _ in loader:
        model.train()(x)
    model.eval()
    model.bn.train()  # a mixture of modes must come back
    modes = [m.training for m in model.modules()]
    weights = [p.clone() for p in model.parameters()]
    starts = [s.start.clone() for s in sliceout.slices(model)]
    assert recalibrate_(model, loader) is model
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, plain.get_buffer(name), msg=name)
    assert [m.training for m in model.modules()] == modes
    assert all(s.on for s in sliceout.slices(model))
    assert all(torch.equal(a, s.start) for a, s in zip(starts, sliceout.slices(model), strict=True))
    assert all(torch.equal(a, p) for a, p in zip(weights, model.parameters(), strict=True))
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.5}


def test_recalibration_leaves_what_was_off_and_restores_after_an_error():
    model = WideResNet(10, 1)
    convert_(model, 0.5)
    sliceout.off_(model)
    recalibrate_(model, [torch.randn(4, 3, 32, 32)])
    assert not any(s.on for s in sliceout.slices(model))
    sliceout.on_(model)
    model.eval()
    with pytest.raises(RuntimeError):
        recalibrate_(model, [torch.randn(4, 5, 32, 32)])
    assert all(s.on for s in sliceout.slices(model))
    assert not any(m.training for m in model.modules())
    recalibrate_(sliceout.revert_(model), [torch.randn(4, 3, 32, 32)])


# -- callbacks ---------------------------------------------------------------------------------------------------------


def test_the_lightning_callback(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from sliceout.callbacks.lightning import ScheduleCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.on = net()[0], []

        def training_step(self, batch, _):
            self.on.append(all(s.on for s in sliceout.slices(self.net)))
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(10, 4)), batch_size=2)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[ScheduleCallback(lambda m: Tail(m, 0.2))],
        default_root_dir=tmp_path,
        **quiet,
    )
    trainer.fit(module, data)
    assert module.on == [True] * 8 + [False] * 2


def test_the_transformers_callback(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from sliceout.callbacks.transformers import ScheduleCallback

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.on = net()[0], []

        def forward(self, x, labels=None):
            self.on.append(all(s.on for s in sliceout.slices(self.net)))
            return {"loss": self.net(x).square().mean()}

    model = Model()
    data = [{"x": torch.randn(4), "labels": torch.zeros(1)} for _ in range(20)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=10, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[ScheduleCallback()])
    trainer.train()
    assert model.on == [True] * 9 + [False]

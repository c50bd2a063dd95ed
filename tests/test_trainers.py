"""Other people's training loops drive the optimizer; the draws follow it without a callback."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

import sliceout
from networks import build, data, loss_of, slices_in, starts, starts_due, step_of

pytestmark = pytest.mark.slow


class Remembering(nn.Module):
    """Keeps the starts that every training forward saw."""

    def __init__(self, name: str = "mlp") -> None:
        super().__init__()
        self.net = build(name)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append(tuple(starts(self.net)))
        return self.net(x)


def assert_drawn(model: Remembering, steps: int, per_step: int = 1) -> None:
    assert step_of(model) == steps
    assert starts(model) == starts_due(model, steps)
    assert len(model.seen) == steps * per_step
    for step in range(1, steps):  # before the first, slices made by hand were not yet told apart
        assert set(model.seen[step * per_step : (step + 1) * per_step]) == {tuple(starts_due(model, step))}


# -- Lightning ---------------------------------------------------------------------------------------------------------


def lightning_module(optimizers):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Remembering()

        def training_step(self, batch, index):
            return loss_of(self.model, batch[0])

        def validation_step(self, batch, index):
            self.model(batch[0])

        def configure_optimizers(self):
            return optimizers(self.model)

    return Module()


def lightning_trainer(tmp_path, **options):
    import lightning

    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}], ids=str)
def test_lightning_draws_once_per_step(tmp_path, options):
    pytest.importorskip("lightning")
    module = lightning_module(lambda model: AdamW(model.parameters()))
    trainer = lightning_trainer(tmp_path, max_epochs=2, enable_checkpointing=False, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "sliceout")
        trainer.fit(module, DataLoader(TensorDataset(data("mlp", 48)), 8), DataLoader(TensorDataset(data("mlp")), 8))
    per_step = options.get("accumulate_grad_batches", 1)
    assert trainer.global_step == 12 // per_step
    assert_drawn(module.model, trainer.global_step, per_step)


def test_lightning_resumes_the_draws_from_its_checkpoint(tmp_path):
    lightning = pytest.importorskip("lightning")
    loader = DataLoader(TensorDataset(data("mlp", 24)), 8)
    whole = lightning_module(lambda model: SGD(model.parameters(), lr=0.1))
    saver = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    lightning_trainer(tmp_path, max_epochs=3, callbacks=[saver]).fit(whole, loader)
    rest = lightning_module(lambda model: SGD(model.parameters(), lr=0.1))
    trainer = lightning_trainer(tmp_path, max_epochs=3, enable_checkpointing=False)
    trainer.fit(rest, loader, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert rest.model.seen == whole.model.seen[3:]
    assert step_of(rest) == step_of(whole) == 9
    for a, b in zip(whole.parameters(), rest.parameters(), strict=True):
        assert torch.equal(a, b)


# -- accelerate and transformers ---------------------------------------------------------------------------------------


def test_accelerate_draws_once_per_step():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Remembering()
    optimizer = AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(TensorDataset(data("mlp", 48)), 8)
    prepared, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for (x,) in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_of(prepared, x))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert_drawn(model, 3, per_step=2)


class Samples(torch.utils.data.Dataset):
    def __init__(self, n: int) -> None:
        self.x = data("mlp", n)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[i]}


class WithLoss(Remembering):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(x).square().mean()}


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_transformers_trainer_draws_once_per_step(tmp_path, optim):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = WithLoss()
    arguments = transformers.TrainingArguments(
        tmp_path,
        max_steps=5,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        optim=optim,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "sliceout")
        transformers.Trainer(model, arguments, train_dataset=Samples(40)).train()
    assert_drawn(model, 5, per_step=2)
    assert len(slices_in(model)) == len(sliceout.slices(model)) == 2


# -- widths that grow --------------------------------------------------------------------------------------------------


class Growing(nn.Module):
    """Keeps the widths that every training forward saw."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build("mlp", sampling="prefix")
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append([s.width if s.on else s.size for s in slices_in(self)])
        return {"loss": loss_of(self.net, x)}


def grow(model: nn.Module) -> sliceout.Grow:
    return sliceout.Grow(model, {0: 0.5, 0.5: 0.25, 0.75: 0.0})


WIDTHS = [[8, 6]] * 8 + [[12, 9]] * 4 + [[16, 12]] * 4
"""Of 16 forward passes: 8 steps of two batches each, so changes at steps 4 and 6."""


def assert_grown(model: Growing) -> None:
    assert model.seen == WIDTHS
    assert [s.entered for s in slices_in(model)] == [((8, 0), (12, 4), (16, 6)), ((6, 0), (9, 4), (12, 6))]


def test_lightning_grows_at_the_right_optimizer_step(tmp_path):
    lightning = pytest.importorskip("lightning")
    from sliceout.callbacks.lightning import ScheduleCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Growing()

        def training_step(self, batch, index):
            return self.model(batch[0])["loss"]

        def configure_optimizers(self):
            return AdamW(self.parameters())

    module = Module()
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "enable_checkpointing": False}
    trainer = lightning_trainer(tmp_path, callbacks=[ScheduleCallback(grow)], **options)
    trainer.fit(module, DataLoader(TensorDataset(data("mlp", 64)), 8))
    assert_grown(module.model)


def test_transformers_trainer_grows_at_the_right_optimizer_step(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from sliceout.callbacks.transformers import ScheduleCallback

    model = Growing()
    options = {"max_steps": 8, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    quiet = {"report_to": [], "use_cpu": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(tmp_path, **options, **quiet)
    transformers.Trainer(model, arguments, train_dataset=Samples(64), callbacks=[ScheduleCallback(grow)]).train()
    assert_grown(model)

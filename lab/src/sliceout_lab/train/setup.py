"""From the config of a run to what is trained: data, network with its scheme, optimizer, learning rate, tail."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from sliceout import Grow, Tail, convert_
from sliceout.cli import UserError
from sliceout.cli.work import set_precision
from sliceout.schemes import SCHEMES

from .. import data, models
from ..experiment import Job
from ..experiment_file import near
from .distributed import Ranks
from .modes import Step
from .rates import learning_rate


class Training:
    """Everything that is trained and what it is fed with."""

    def __init__(self, job: Job, ranks: Ranks, folder: Path | None) -> None:
        config = job.config
        self.job, self.config, self.ranks, self.device = job, config, ranks, ranks.device
        if config["batch"] % ranks.world:
            raise UserError(f"--batch {config['batch']}: does not divide among {ranks.world} processes")
        set_precision(config["precision"])
        torch.backends.cudnn.benchmark = self.device.type == "cuda" and config["model"] != "mlp"
        loaded = data.load(config["data"], folder, subset=config["subset"])
        _, valid, test = getattr(loaded, "words", (0, 0, 0))
        self.words = {"valid": valid, "test": test}
        self.text = hasattr(loaded, "vocabulary")
        self.splits = ("test", "valid") if len(getattr(loaded, "valid", ())) else ("test",)
        maps = not self.text and not config["flatten"]
        self.feed = _feed(loaded, config, ranks, channels_last=maps and self.device.type == "cuda")
        self.steps = config["epoch_steps"] or self.feed.steps
        self.total = self.steps * config["epochs"]
        torch.manual_seed(job.seed)
        self.model = _network(config, loaded)
        _convert(self.model, config, self.feed, job.seed)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.model.to(self.device)
        if maps and self.device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = _optimizer(config["optimizer"], self.model, self.device)
        self.learner = ranks.wrap(self.model)
        """The model, or what keeps the processes' copies of it equal."""
        torch.manual_seed(job.seed + 1_000_003 * (1 + ranks.rank))  # of dropout: every process drops other units
        self.slicing = _schedule(self.model, config)
        """What changes the rates of slices, if anything does."""
        self.sliced_at: Any = None
        """What it said last."""
        self._rate_at = learning_rate(config["optimizer"]["lr"], config["schedule"], config["tail"])
        self.lr = math.nan
        self.step: Step | None = None

    def set_rate(self, progress: float) -> None:
        """The learning rate of the next step; nothing happens unless it changes."""
        lr = self._rate_at(progress)
        if lr != self.lr:
            self.lr = lr
            for group in self.optimizer.param_groups:
                group["lr"] = lr

    def batches(self, first: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """So many batches from step ``first`` of the whole run on, wherever passes over the data begin and end."""
        while count:
            epoch, start = divmod(first, self.feed.steps)
            some = min(count, self.feed.steps - start)
            batches = self.feed.epoch(self.job.seed, epoch, start)
            for _ in range(some):
                yield next(batches)
            first, count = first + some, count - some


def _feed(loaded: Any, config: dict[str, Any], ranks: Ranks, channels_last: bool) -> Any:
    settings: dict[str, Any] = {key: config[key] for key in ("sequence", "size") if config[key]}
    batch = config["batch"] // ranks.world
    feed = data.feed(
        loaded, batch, ranks.device, augment=config["augment"], flatten=config["flatten"],
        normalise=config["normalise"], channels_last=channels_last, rank=ranks.rank, world=ranks.world, **settings,
    )  # fmt: skip
    side = config["size"]
    resize = side and isinstance(loaded, data.Images) and loaded.train.shape[-1] != side
    return Resized(feed, side) if resize else feed


class Resized:
    """Images of a small set at another size (fine-tuning at the size that the weights were trained at)."""

    def __init__(self, feed: Any, side: int) -> None:
        self.feed, self.side, self.steps, self.batch = feed, side, feed.steps, feed.batch

    def epoch(self, seed: int, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.feed.epoch(seed, epoch, start):
            yield self._resized(x), y

    def test(self, split: Literal["test", "valid"] = "test") -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.feed.test(split):
            for part, labels in zip(x.split(self.batch), y.split(self.batch), strict=True):
                yield self._resized(part), labels

    def inputs_like(self) -> tuple[Tensor, Tensor]:
        x, y = self.feed.inputs_like()
        return self._resized(x), y

    def _resized(self, x: Tensor) -> Tensor:
        small = self.side < x.shape[-1]
        return F.interpolate(x, size=(self.side, self.side), mode="bicubic", antialias=small, align_corners=False)


def _network(config: dict[str, Any], loaded: Any) -> nn.Module:
    settings = dict(config["model_settings"])
    if config["model"] == "mlp":
        pixels = math.prod(loaded.train.shape[1:])
        return models.build("mlp", widths=(pixels, *settings.pop("hidden"), loaded.classes), **settings)
    if hasattr(loaded, "vocabulary"):
        return models.build(config["model"], vocabulary=loaded.vocabulary, context=config["sequence"] or 64, **settings)
    try:
        return models.build(config["model"], classes=loaded.classes, **settings)
    except (OSError, RuntimeError) as error:
        if not settings.get("pretrained"):
            raise
        raise UserError(f"{config['model']}: its pre-trained weights are not available ({error})") from error


def _convert(model: nn.Module, config: dict[str, Any], feed: Any, seed: int) -> None:
    scheme = config["scheme"]
    if scheme == "none":
        return
    x = feed.inputs_like()[0][:2].cpu().contiguous()
    settings: dict[str, Any] = {"scheme": scheme, "example_inputs": x, "align": config["align"]}
    ours = {"seed": seed}
    settings |= {k: v for k, v in ours.items() if k not in SCHEMES[scheme].no_effect}
    settings |= {k: config[k] for k in ("sampling", "norm", "stages", "attention") if config[k] is not None}
    if "parts" in config:
        settings["parts"] = config["parts"]
    if config["exclusions"]:
        settings["paper_exclusions"] = True
    if config["grads"] != "dense":
        settings["grads"] = config["grads"]
    try:
        convert_(model, config["rate"], **settings)
    except ValueError as error:
        raise UserError(f"--scheme {scheme} --rate {config['rate']}: {error}") from error


def _schedule(model: nn.Module, config: dict[str, Any]) -> Any:
    if "grow" in config:
        return Grow(model, dict(config["grow"]))
    return Tail(model, config["tail"]) if config["tail"] else None


_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "adamw": AdamW, "sgd": SGD, "rmsprop": RMSprop}


def _optimizer(settings: dict[str, Any], model: nn.Module, device: torch.device) -> Optimizer:
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items() if k != "name"}
    if settings["name"] not in _OPTIMIZERS:
        known = ", ".join(_OPTIMIZERS)
        raise UserError(f"optimizer {settings['name']!r}: expected one of {known}{near(settings['name'], _OPTIMIZERS)}")
    if device.type == "cuda" and settings["name"] != "rmsprop":
        given["fused"] = True
    return _OPTIMIZERS[settings["name"]](model.parameters(), **given)

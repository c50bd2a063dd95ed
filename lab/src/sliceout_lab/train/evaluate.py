"""How good the full network is, on test and validation data, and with batch-norm statistics estimated anew."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from sliceout import recalibrate_

from .modes import autocast, forget_unused
from .setup import Training

RECALIBRATION_BATCHES = 100


@torch.no_grad()
def evaluate(t: Training) -> dict[str, float]:
    """Loss and accuracy, or perplexity, of the full network; of text also on the validation split, if it has one.

    Perplexity is by token; ``word_perplexity`` is by word, as papers have it. Each split is read from the device once.
    """
    found = {split: _totals(t, split) for split in t.splits}
    forget_unused(t.device)
    loss, right, count = found["test"]
    mean = loss / count
    if not t.text:
        return {"test_loss": mean, "accuracy": right / count}
    out = {"test_loss": mean}
    for split, (loss, _, count) in found.items():
        prefix = "" if split == "test" else f"{split}_"
        out[f"{prefix}perplexity"] = _exp(loss / count)
        if t.words[split]:
            out[f"{prefix}word_perplexity"] = _exp(loss / t.words[split])
    return out


def _totals(t: Training, split: Any) -> tuple[float, float, int]:
    """Sum of the losses, right answers, and how many were asked for."""
    t.model.eval()
    sums, count = torch.zeros(2, device=t.device), 0
    for x, y in t.feed.test(split):
        with autocast(t.config["precision"], t.device):
            output = t.model(x).flatten(0, -2)
        target = y.flatten()
        sums[0] += F.cross_entropy(output.float(), target, reduction="sum")
        sums[1] += (output.argmax(-1) == target).sum()
        count += len(target)
    loss, right = sums.tolist()
    return loss, right, count


def _exp(loss: float) -> float:
    return math.exp(min(loss, 80.0))


def beside(epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is reported beside the score of a run: see :func:`chosen` and :func:`recalibrated`."""
    last = epochs[-1]
    return chosen(epochs) | ({"recalibrated": last["recalibrated"]} if "recalibrated" in last else {})


def chosen(epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of text: what the test split says at the epoch that is best on the validation split, the rule of a fair report.

    Example:
        >>> epochs = [{"epoch": 1, "valid_word_perplexity": 9.0, "word_perplexity": 8.0, "valid_perplexity": 3.0}]
        >>> epochs += [{"epoch": 2, "valid_word_perplexity": 9.5, "word_perplexity": 7.0, "valid_perplexity": 4.0}]
        >>> chosen(epochs)
        {'chosen': {'epoch': 1, 'word_perplexity': 8.0, 'valid_word_perplexity': 9.0}}
    """
    with_words = [e for e in epochs if "valid_word_perplexity" in e and "word_perplexity" in e]
    if not with_words:
        return {}
    best = min(with_words, key=lambda e: e["valid_word_perplexity"])
    return {"chosen": {key: best[key] for key in ("epoch", "word_perplexity", "valid_word_perplexity")}}


def recalibrated(t: Training) -> dict[str, float]:
    """The same of the full network with batch-norm statistics of its own; leaves the network as it was.

    Sub-networks have other statistics than the whole. The batches are training batches of an epoch that was not run.
    """
    kept = {m: [b.clone() for b in m.buffers(recurse=False)] for m in t.model.modules() if isinstance(m, _BatchNorm)}
    batches = t.feed.epoch(t.job.seed, t.config["epochs"])
    try:
        with torch.no_grad(), autocast(t.config["precision"], t.device):
            recalibrate_(t.model, itertools.islice(batches, RECALIBRATION_BATCHES))
        return evaluate(t)
    finally:
        for module, buffers in kept.items():
            for held, before in zip(module.buffers(recurse=False), buffers, strict=True):
                held.copy_(before)

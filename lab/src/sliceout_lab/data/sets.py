"""What a loaded data set is: images in memory, a stream of tokens, or a folder of images too large for memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Images:
    """A labelled image data set in memory: uint8 ``[n, height, width]`` or ``[n, channels, height, width]``.

    Labels are integers ``[n]``, from 0 to ``classes - 1``.
    """

    name: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: int = 10

    def first(self, n: int) -> Images:
        """The same data with ``n`` training images only, as many of each class as possible; all test images."""
        rows = balanced(self.train_labels, n)
        return replace(self, train=self.train[rows], train_labels=self.train_labels[rows])


@dataclass(frozen=True)
class Tokens:
    """Text as numbers from 0 to ``vocabulary - 1``: one stream ``[n]`` of integers per split, possibly empty.

    ``words`` counts the words and ends of line of each split, so that a loss per token can be told per word, as papers
    do: ``exp(total loss / words)``.
    """

    name: str
    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: int
    words: tuple[int, int, int] = (0, 0, 0)

    def first(self, n: int) -> Tokens:
        """The same data with the first ``n`` training tokens only."""
        return replace(self, train=self.train[:n])


@dataclass(frozen=True)
class ImageFolder:
    """Labelled image files on disk, decoded while they are fed."""

    name: str
    train: tuple[Path, ...]
    train_labels: Tensor
    test: tuple[Path, ...]
    test_labels: Tensor
    classes: int = 1000

    def first(self, n: int) -> ImageFolder:
        """The same data with ``n`` training images only, as many of each class as possible; all test images."""
        rows = balanced(self.train_labels, n)
        return replace(self, train=tuple(self.train[i] for i in rows.tolist()), train_labels=self.train_labels[rows])


def balanced(labels: Tensor, n: int) -> Tensor:
    """Rows, in ascending order, of ``n`` entries: the first ones of every class, each class as often as the others.

    Example:
        >>> balanced(torch.tensor([0, 0, 0, 1, 0, 1]), 4)
        tensor([0, 1, 3, 5])
    """
    by_class = labels.long().argsort(stable=True)
    counts = labels.long().bincount()
    starts = counts.cumsum(0) - counts
    rank = torch.empty_like(by_class)  # how many of its own class come before it
    rank[by_class] = torch.arange(len(labels)) - starts[labels.long()[by_class]]
    return rank.argsort(stable=True)[:n].sort().values

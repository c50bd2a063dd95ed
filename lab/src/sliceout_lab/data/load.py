"""Any data set by its name, as one call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .bpe import VOCABULARY
from .catalogue import BUNDLED, DATASETS, NAMES, Dataset, Loaded
from .fashion import fashion_mnist
from .files import DataError
from .text import own_text, tokens

LEAST, MOST = 300, 1_000_000
"""Sizes of a vocabulary: all bytes are in it."""


def load(
    name: str, folder: Path | str | None = None, *, subset: int | None = None, vocabulary: str | None = None
) -> Loaded:
    """Load a data set by name.

    Args:
        name: one of ``NAMES``; or ``text:PATH`` for text of one's own, a file or a folder with ``train.txt``,
            ``valid.txt`` and ``test.txt``. Tiny ImageNet also at another size: ``tiny-imagenet-100@32``; a text of
            ``NAMES`` also with another vocabulary than 32,000 tokens: ``wikitext-2@8192``.
        folder: where to look; ``None`` looks in ``$SLICEOUT_DATA``, ``./data`` and ``~/.cache/sliceout``.
        subset: only so many training samples: of images, the first ones of every class alike; of text, the first
            tokens. The test data stays whole.
        vocabulary: the name of another text whose vocabulary is to be used: a model that was trained on
            ``english-books`` can be tested on ``load("lm1b-slice", vocabulary="english-books")``.

    Raises:
        DataError: if the data set is unknown, not there or damaged.

    Example:
        >>> len(load("fashion-mnist-8k", subset=1000).train)
        1000
    """
    where = None if folder is None else Path(folder)
    base, _, size = name.partition("@")
    if name.startswith("text:"):
        loaded: Loaded = own_text(Path(name.removeprefix("text:")))
    elif name == BUNDLED:
        loaded = fashion_mnist()
    elif base not in DATASETS:
        raise DataError(f"unknown data set {name!r}; known: {', '.join(NAMES)}, text:PATH")
    elif DATASETS[base].corpus is not None:
        loaded = _text(DATASETS[base], where, vocabulary, size)
    else:
        loaded = _images(DATASETS[base], where, size)
    loaded = replace(loaded, name=name)
    if subset is None:
        return loaded
    if not 1 <= subset <= len(loaded.train):
        raise DataError(f"subset={subset}: expected 1 to {len(loaded.train)}, the training samples of {name}")
    return loaded.first(subset)


def _images(dataset: Dataset, where: Path | None, size: str) -> Loaded:
    assert dataset.read is not None
    if not size:
        return dataset.read(dataset.require(where))
    if not dataset.sized or not size.isdigit() or not 1 <= int(size) <= 512:
        raise DataError(f"{dataset.name}@{size}: only Tiny ImageNet has other sizes, from @1 to @512")
    return dataset.read(dataset.require(where), int(size))


def _text(dataset: Dataset, where: Path | None, vocabulary: str | None, size: str) -> Loaded:
    assert dataset.corpus is not None
    if size and (not size.isdigit() or not LEAST <= int(size) <= MOST):
        raise DataError(f"{dataset.name}@{size}: expected a vocabulary of {LEAST} to {MOST:,} tokens")
    other = None
    if vocabulary is not None:
        known = DATASETS.get(vocabulary)
        if known is None or known.corpus is None:
            raise DataError(f"vocabulary={vocabulary!r}: is no text; expected one of {', '.join(_texts())}")
        other = known.corpus(known.require(where))
    folder = dataset.require(where)
    return tokens(dataset.name, dataset.corpus(folder), folder, other, int(size or VOCABULARY))


def _texts() -> list[str]:
    return [name for name, dataset in DATASETS.items() if dataset.corpus is not None]

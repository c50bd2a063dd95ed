"""Language modelling data: WikiText, the One Billion Word benchmark, and any text of one's own.

All of it is encoded with a byte-pair encoding that is learnt from its own training split, of 32,000 tokens unless the
name of the data says otherwise (``wikitext-2@8192``). Losses per
token are therefore not those of papers, which count words: ``Tokens.words`` has the number of words (ends of lines
included, as usual for WikiText), so that ``exp(total loss / words)`` is the perplexity per word.
"""

from __future__ import annotations

import os
from pathlib import Path

from .bpe import VOCABULARY, Corpus, encode
from .files import PACKED, DataError, may_write, present, read_text
from .sets import Tokens

LM1B_TRAIN, LM1B_HELD_OUT = "training-monolingual.tokenized.shuffled", "heldout-monolingual.tokenized.shuffled"
LM1B_SHARDS = tuple(f"news.en-{i:05}-of-00100" for i in range(1, 100))
LM1B_TEST, LM1B_VALID = "news.en.heldout-00000-of-00050", "news.en.heldout-00001-of-00050"


def wikitext(folder: Path) -> Corpus:
    """``wiki.{train,valid,test}.tokens`` (or the ``.raw`` ones), packed or not."""
    end = "tokens" if present(folder, "wiki.train.tokens") else "raw"
    return Corpus(*((_file(folder, f"wiki.{split}.{end}"),) for split in ("train", "valid", "test")))


def lm1b(folder: Path) -> Corpus:
    """Training shards 1 to 99 (as many as are there); of the held-out ones, the first is for test, the second valid."""
    train = tuple(p for s in LM1B_SHARDS if (p := present(folder / LM1B_TRAIN, s)))
    if not train:
        raise DataError(f"{folder / LM1B_TRAIN}: holds no {LM1B_SHARDS[0]}")
    held_out = folder / LM1B_HELD_OUT
    return Corpus(train, (_file(held_out, LM1B_VALID),), (_file(held_out, LM1B_TEST),))


def lm1b_slice(folder: Path) -> Corpus:
    """24,000 held-out sentences of LM1B: ``dev.tokens`` and ``test.tokens``. There is nothing to train on."""
    return Corpus((), (_file(folder, "dev.tokens"),), (_file(folder, "test.tokens"),))


def splits(folder: Path) -> Corpus:
    """``train.txt``, ``valid.txt`` and ``test.txt``, packed or not."""
    return Corpus(*((_file(folder, f"{split}.txt"),) for split in ("train", "valid", "test")))


def tokens(
    name: str, corpus: Corpus, folder: Path, vocabulary_of: Corpus | None = None, size: int = VOCABULARY
) -> Tokens:
    """Encode a corpus with a vocabulary of ``size``; ``folder`` is where the result is kept."""
    streams, words, vocabulary = encode(corpus, folder, vocabulary_of, size)
    (train, valid, test), (a, b, c) = streams, words
    return Tokens(name, train, valid, test, vocabulary, (a, b, c))


def own_text(path: Path) -> Tokens:
    """Text of one's own: a folder with ``train.txt``, ``valid.txt`` and ``test.txt``, or one file.

    Of a single file, the last twentieth of the lines is the test set and the twentieth before it the valid set.
    """
    if path.is_dir():
        return tokens(f"text:{path}", splits(path), path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file or folder of text")
    lines = read_text(path).removesuffix("\n").split("\n")
    if len(lines) < 20:
        raise DataError(f"{path}: holds {len(lines)} lines, at least 20 are needed to split it into three parts")
    folder = _scratch(path)
    cut = len(lines) // 20
    parts = {"train": lines[: -2 * cut], "valid": lines[-2 * cut : -cut], "test": lines[-cut:]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, some in parts.items():
            part = folder / f"{split}.txt.{os.getpid()}"
            part.write_text("\n".join(some) + "\n", encoding="utf-8")
            os.replace(part, folder / f"{split}.txt")
    except OSError as error:
        raise DataError(f"{folder}: cannot write there ({error.strerror})") from error
    return tokens(f"text:{path}", splits(folder), folder)


def _scratch(path: Path) -> Path:
    """Where the three parts of a single file go: beside it if that can be written to."""
    beside = path.parent / ".sliceout" / path.name
    return beside if may_write(path.parent) else Path.home() / ".cache" / "sliceout" / "tokens" / path.name


def _file(folder: Path, name: str) -> Path:
    found = present(folder, name)
    if found is None:
        raise DataError(f"{folder}: holds no {name} ({', '.join(f'{name}{end}' for end in PACKED)})")
    return found

"""Text as tokens: a byte-pair encoding is trained once on the training text, and both it and the tokens are kept.

What is kept is named after a checksum of its sources: other texts make other files, and nothing stale is ever read. It
lies beside the text (in ``.sliceout``), or in ``~/.cache/sliceout/tokens`` where the text is read-only; it is written
to another name first and renamed when whole, and its own checksum is verified when it is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import DataError, digest, may_write, read_text

VOCABULARY = 32_000
END, UNKNOWN = "<eos>", "<unk>"
"""The end of a line, and what WikiText writes for rare words; both are one token."""
FORMAT = 1
TRAINING_BYTES = 2**29
"""A byte-pair encoding is learnt from no more text than this: more changes little and needs much memory."""
LINES_AT_ONCE = 20_000
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Corpus:
    """The text files of each split, in order. Every line of them is a document."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...]
    test: tuple[Path, ...]

    def vocabulary_from(self) -> tuple[Path, ...]:
        return self.train or self.valid or self.test


def encode(
    corpus: Corpus, folder: Path, vocabulary_of: Corpus | None = None, size: int = VOCABULARY
) -> tuple[list[Tensor], list[int], int]:
    """The tokens of the three splits, the words in each (ends of lines count as words), and the size of the vocabulary.

    Args:
        corpus: what to encode.
        folder: beside which the results are kept.
        vocabulary_of: learn the byte-pair encoding from this text instead of the corpus's own training text.
        size: tokens of the vocabulary.
    """
    source = _fingerprint((vocabulary_of or corpus).vocabulary_from(), f"bpe {FORMAT} {size}")
    key = _fingerprint([*corpus.train, Path("|"), *corpus.valid, Path("|"), *corpus.test], source)
    cache = _cache_folder(folder)
    index = cache / f"tokens-{key[:16]}.json"
    with _alone(cache):
        known = _read_index(index)
        if known is None:
            encoder = _encoder(cache, source, (vocabulary_of or corpus).vocabulary_from(), size)
            known = _encode_all(corpus, encoder, cache, key)
            _write(index, json.dumps(known, indent=1).encode())
    tensors = []
    for split in SPLITS:
        part = known["splits"][split]
        file = cache / part["file"]
        count = int(part["count"])
        tensors.append(torch.from_file(str(file), size=count, dtype=torch.int32) if count else torch.empty(0).int())
    return tensors, [int(known["splits"][s]["words"]) for s in SPLITS], int(known["vocabulary"])


def _encode_all(corpus: Corpus, encoder: Any, cache: Path, key: str) -> dict[str, Any]:
    end = encoder.token_to_id(END)
    splits = {}
    for split in SPLITS:
        name = f"tokens-{key[:16]}-{split}.bin"
        part, count, words, checksum = cache / f"{name}.{os.getpid()}.part", 0, 0, hashlib.sha256()
        try:
            with part.open("wb") as out:
                lines = _lines(getattr(corpus, split))
                while some := list(islice(lines, LINES_AT_ONCE)):
                    words += sum(len(line.split()) + 1 for line in some)
                    ids = [i for e in encoder.encode_batch_fast(some) for i in (*e.ids, end)]
                    raw = torch.tensor(ids, dtype=torch.int32).numpy().tobytes()
                    out.write(raw)
                    checksum.update(raw)
                    count += len(ids)
            os.replace(part, cache / name)
        except OSError as error:
            raise DataError(f"{cache / name}: cannot be written ({error.strerror})") from error
        finally:
            part.unlink(missing_ok=True)
        splits[split] = {"file": name, "count": count, "words": words, "sha256": checksum.hexdigest()}
    return {"format": FORMAT, "vocabulary": encoder.get_vocab_size(), "splits": splits}


def _read_index(index: Path) -> dict[str, Any] | None:
    """What was encoded earlier, if all of it is there and undamaged."""
    try:
        known: dict[str, Any] = json.loads(index.read_bytes())
        sound = all(
            digest(index.parent / part["file"], "sha256") == part["sha256"] for part in known["splits"].values()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError):
        sound = False
    return known if sound else None


def _encoder(cache: Path, source: str, texts: Sequence[Path], size: int) -> Any:
    """The byte-pair encoding of these texts, from its file or trained now."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path = cache / f"bpe-{size}-{source[:16]}.json"
    if path.is_file():
        try:
            kept = json.loads(path.read_bytes())
            if kept["sha256"] == hashlib.sha256(kept["tokenizer"].encode()).hexdigest():
                return Tokenizer.from_str(kept["tokenizer"])
        except (ValueError, KeyError, TypeError):
            pass
        print(f"sliceout-lab: {path} is damaged and is made again", file=sys.stderr)
    what = ", ".join(str(t) for t in texts[:2]) + (f" and {len(texts) - 2} more files" if len(texts) > 2 else "")
    print(f"sliceout-lab: learning a {size:,}-token vocabulary from {what}; this is done once", file=sys.stderr)
    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator(_capped(_lines(texts)), trainer)
    text = encoder.to_str()
    kept = {"source": source, "sha256": hashlib.sha256(text.encode()).hexdigest(), "tokenizer": text}
    _write(path, json.dumps(kept).encode())
    return encoder


def _lines(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        text = read_text(path)
        if not text.strip():
            raise DataError(f"{path}: holds no text")
        yield from text.removesuffix("\n").split("\n")


def _capped(lines: Iterator[str]) -> Iterator[str]:
    left = TRAINING_BYTES
    for line in lines:
        left -= len(line)
        if left < 0:
            return
        yield line


def _fingerprint(paths: Sequence[Path], salt: str) -> str:
    """A checksum of the contents and their order; ``|`` stands for itself."""
    parts = [salt, *("|" if str(p) == "|" else digest(p, "sha256") for p in paths)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _cache_folder(folder: Path) -> Path:
    """``folder/.sliceout``, or a folder in the user's cache if that cannot be written to."""
    refused = "no leave to write"
    for place in (folder / ".sliceout", Path.home() / ".cache" / "sliceout" / "tokens"):
        if not may_write(place):
            continue
        try:
            place.mkdir(parents=True, exist_ok=True)
            return place
        except OSError as error:
            refused = error.strerror or refused
    raise DataError(f"{place}: cannot write there ({refused}), nor beside the text in {folder}")


@contextlib.contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """One process at a time: of several that train together, one does the work and the others find it done."""
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        part.unlink(missing_ok=True)

"""CIFAR-10 and CIFAR-100, in both of their official forms.

The binary version is a row of bytes per image: its label (CIFAR-100: the coarse label, then the fine one), then 32x32
red, green and blue values. The python version is a pickled dictionary. A pickle can run any code when it is read, so
it is read by an unpickler that knows nothing but what these files hold: numpy arrays of bytes.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import DataError, read
from .sets import Images

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))


def cifar_10(folder: Path) -> Images:
    """CIFAR-10 from a folder with ``data_batch_1`` .. ``5`` and ``test_batch``, of either version."""
    return _images("CIFAR-10", folder, BATCHES, "test_batch", 10, b"labels", label_bytes=1)


def cifar_100(folder: Path) -> Images:
    """CIFAR-100, with its fine labels, from a folder with ``train`` and ``test``, of either version."""
    return _images("CIFAR-100", folder, ("train",), "test", 100, b"fine_labels", label_bytes=2)


def _images(
    name: str, folder: Path, train: tuple[str, ...], test: str, classes: int, key: bytes, label_bytes: int
) -> Images:
    def part(file: str) -> tuple[Tensor, Tensor]:
        path = folder / f"{file}.bin"
        images, labels = read_binary(path, label_bytes) if path.is_file() else read_pickle(folder / file, key)
        path = path if path.is_file() else folder / file
        if labels.max() >= classes:
            raise DataError(f"{path}: holds the label {int(labels.max())}, expected 0 to {classes - 1}")
        return images, labels

    parts = [part(file) for file in train]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Images(name, images, labels, *part(test), classes)


def read_binary(path: Path, label_bytes: int) -> tuple[Tensor, Tensor]:
    """Images ``[n, 3, 32, 32]`` and labels (the last of the label bytes) of a file of the binary version."""
    raw, record = read(path), label_bytes + PIXELS
    if not raw or len(raw) % record:
        raise DataError(f"{path}: holds {len(raw)} bytes, expected a multiple of {record} (a label and an image)")
    rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, record)
    return rows[:, label_bytes:].reshape(-1, *SHAPE), rows[:, label_bytes - 1].clone()


def read_pickle(path: Path, key: bytes) -> tuple[Tensor, Tensor]:
    """Images ``[n, 3, 32, 32]`` and labels of a file of the python version."""
    import numpy as np

    raw = read(path)
    try:
        content = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle may raise anything at all
        raise DataError(f"{path}: damaged pickle ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds a {type(content).__name__}, expected a dictionary")
    content = {k.encode() if isinstance(k, str) else k: v for k, v in content.items()}
    for needed in (b"data", key):
        if needed not in content:
            raise DataError(f"{path}: holds no {needed.decode()!r}")
    data, labels = content[b"data"], content[key]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (PIXELS,) or not len(data):
        found = f"{data.dtype} {list(data.shape)}" if isinstance(data, np.ndarray) else type(data).__name__
        raise DataError(f"{path}: its data are {found}, expected uint8 [n, {PIXELS}]")
    if not isinstance(labels, list) or not all(isinstance(x, int) and 0 <= x < 256 for x in labels):
        raise DataError(f"{path}: its labels are not a list of small numbers")
    if len(labels) != len(data):
        raise DataError(f"{path}: holds {len(labels)} labels for {len(data)} images")
    return torch.from_numpy(data.copy()).view(-1, *SHAPE), torch.tensor(labels, dtype=torch.uint8)


class _Unpickler(pickle.Unpickler):
    """Makes numpy arrays, and refuses every other name that a pickle asks for."""

    def find_class(self, module: str, name: str) -> Any:
        import codecs

        import numpy as np
        from numpy._core.multiarray import _reconstruct  # type: ignore[attr-defined]

        allowed = {
            ("multiarray", "_reconstruct"): _reconstruct,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): codecs.encode,  # how pickles of Python 3 in protocol 2 spell bytes
            ("__builtin__", "bytes"): bytes,  # and an empty one
        }
        try:
            return allowed[module.rpartition(".")[2], name]
        except KeyError:
            raise DataError(f"asks for {module}.{name}, which no CIFAR file does; it was not opened further") from None

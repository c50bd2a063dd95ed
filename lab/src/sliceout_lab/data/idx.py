"""The IDX format of MNIST and FashionMNIST, checked byte for byte: a damaged file must not become a bad accuracy.

An IDX file is two zero bytes, one byte for the type of the entries, one for the number of dimensions, each dimension
as a big-endian 32-bit number, then the entries. Images and labels both hold unsigned bytes.
"""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from .files import DataError, read

UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dims: int) -> Tensor:
    """Read an IDX file of unsigned bytes, plain or gzipped (known by its first bytes, not by its name).

    Args:
        path: the file.
        dims: how many dimensions it must have: 3 for images, 1 for labels.

    Returns:
        A uint8 tensor with the shape that the header gives.

    Raises:
        DataError: if the file cannot be read, has another magic number, or is longer or shorter than its header says.
    """
    raw = read(path)
    magic = bytes((0, 0, UNSIGNED_BYTE, dims))
    if raw[:4] != magic:
        raise DataError(
            f"{path}: starts with 0x{raw[:4].hex()}, expected 0x{magic.hex()} (IDX, unsigned bytes, {dims}-d)"
        )
    header = 4 + 4 * dims
    if len(raw) < header:
        raise DataError(f"{path}: ends inside its header ({len(raw)} of {header} bytes)")
    shape = struct.unpack(f">{dims}I", raw[4:header])
    expected = math.prod(shape)
    if len(raw) - header != expected:
        raise DataError(f"{path}: holds {len(raw) - header} bytes of data, but its header {shape} promises {expected}")
    if expected == 0:
        raise DataError(f"{path}: is empty, its header says {shape}")
    return torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8).view(shape)


def write_idx(path: Path, data: Tensor) -> None:
    """Write a uint8 tensor as gzipped IDX; the same tensor always gives the same bytes."""
    if data.dtype != torch.uint8:
        raise TypeError(f"dtype={data.dtype}: expected torch.uint8")
    header = bytes((0, 0, UNSIGNED_BYTE, data.dim())) + struct.pack(f">{data.dim()}I", *data.shape)
    path.write_bytes(gzip.compress(header + data.contiguous().numpy().tobytes(), compresslevel=9, mtime=0))

"""Data files: read exactly, and refused with their name when anything is wrong with them."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from sliceout_lab.data import DataError, fashion, fashion_mnist, read_folder, read_idx, write_idx


def idx(shape: tuple[int, ...], payload: bytes, magic: bytes | None = None) -> bytes:
    """An IDX file by hand, independent of ``write_idx``."""
    magic = bytes((0, 0, 8, len(shape))) if magic is None else magic
    return magic + struct.pack(f">{len(shape)}I", *shape) + payload


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny data set in the official files: 6 training and 4 test images of 3x2."""
    generator = torch.Generator().manual_seed(0)
    for name, n in (("train", 6), ("t10k", 4)):
        write_idx(tmp_path / f"{name}-images-idx3-ubyte.gz", torch.randint(256, (n, 3, 2), generator=generator).byte())
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte.gz", torch.arange(n).byte())
    return tmp_path


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
def test_entries_come_in_row_order(tmp_path: Path, pack) -> None:
    path = tmp_path / "images"
    path.write_bytes(pack(idx((2, 2, 3), bytes(range(12)))))
    assert read_idx(path, 3).tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]


def test_writing_and_reading_is_the_identity(tmp_path: Path) -> None:
    data = torch.randint(256, (5, 4, 3)).byte()
    write_idx(tmp_path / "a.gz", data.transpose(1, 2))
    assert torch.equal(read_idx(tmp_path / "a.gz", 3), data.transpose(1, 2))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (idx((2, 2), b"abcd", magic=b"\0\0\x08\x01"), "holds 8 bytes of data, but its header"),
        (idx((4,), b"abcd", magic=b"\0\0\x0d\x01"), "starts with 0x00000d01, expected 0x00000801"),
        (idx((4, 1, 1), b"abcd"), "starts with 0x00000803, expected 0x00000801"),
        (idx((5,), b"abcd"), "holds 4 bytes of data, but its header (5,) promises 5"),
        (idx((3,), b"abcd"), "holds 4 bytes of data, but its header (3,) promises 3"),
        (idx((0,), b""), "is empty"),
        (b"\0\0\x08\x01\0\0", "ends inside its header"),
        (b"", "starts with 0x, expected"),
        (b"<html>404</html>", "starts with 0x3c68746d"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "labels"
    for pack in (bytes, gzip.compress):
        path.write_bytes(pack(content))
        with pytest.raises(DataError) as caught:
            read_idx(path, 1)
        assert str(caught.value).startswith(str(path))
        assert complaint in str(caught.value)


def test_no_truncated_gzip_file_is_accepted(folder: Path) -> None:
    path = folder / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="train-images"):
            read_idx(path, 3)


def test_no_single_flipped_bit_of_the_pixels_passes_unnoticed(folder: Path) -> None:
    path = folder / "train-images-idx3-ubyte.gz"
    whole, expected = path.read_bytes(), read_idx(path, 3)
    for position in range(10, len(whole)):  # the first ten bytes are gzip's own: time, system, flags
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            assert torch.equal(read_idx(path, 3), expected)
        except DataError as error:
            assert "damaged gzip file" in str(error)  # noqa: PT017


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path / "nothing", 1)
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path, 1)


def test_files_that_do_not_fit_each_other_are_refused(folder: Path) -> None:
    labels = folder / "t10k-labels-idx1-ubyte.gz"
    write_idx(labels, torch.arange(3).byte())
    with pytest.raises(DataError, match="3 labels for 4 images"):
        read_folder(folder, "tiny")
    write_idx(labels, torch.tensor([0, 1, 2, 10]).byte())
    with pytest.raises(DataError, match="label 10, expected 0 to 9"):
        read_folder(folder, "tiny")
    write_idx(labels, torch.arange(4).byte())
    write_idx(folder / "t10k-images-idx3-ubyte.gz", torch.zeros(4, 2, 3).byte())
    with pytest.raises(DataError, match=r"training images are \[3, 2\], test images \[2, 3\]"):
        read_folder(folder, "tiny")


def test_the_subset_is_balanced_and_whole() -> None:
    data = fashion_mnist()
    assert data.train.shape == (6000, 28, 28)
    assert data.test.shape == (2000, 28, 28)
    assert data.train_labels.bincount().tolist() == [600] * 10
    assert data.test_labels.bincount().tolist() == [200] * 10
    assert data.train_labels[:5].tolist() == [9, 0, 0, 3, 0]  # as the official file begins
    assert sum(f.stat().st_size for f in fashion.SUBSET.iterdir()) < 5_000_000


@pytest.mark.parametrize("inside", [".", "fashion-mnist"])
@pytest.mark.parametrize("packed", [True, False])
def test_the_whole_data_set_is_found_where_it_is_said_to_be(folder, tmp_path_factory, inside, packed) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / inside).mkdir(exist_ok=True)
    for path in folder.iterdir():
        raw = path.read_bytes()
        (root / inside / (path.name if packed else path.stem)).write_bytes(raw if packed else gzip.decompress(raw))
    assert fashion_mnist(full=True, folder=root).train_labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_whole_data_set_is_looked_for_in_the_cache_then_in_debians_folder(folder, tmp_path_factory, monkeypatch):
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.chdir(home)
    monkeypatch.setattr(fashion, "DEBIAN", folder)
    assert len(fashion_mnist(full=True).test) == 4
    cache = home / ".cache/sliceout/fashion-mnist"
    cache.mkdir(parents=True)
    for path in folder.iterdir():
        (cache / path.name).write_bytes(path.read_bytes())
    write_idx(cache / "t10k-images-idx3-ubyte.gz", torch.zeros(2, 3, 2).byte())
    write_idx(cache / "t10k-labels-idx1-ubyte.gz", torch.zeros(2).byte())
    assert len(fashion_mnist(full=True).test) == 2


def test_a_missing_data_set_says_which_files_go_where(folder: Path) -> None:
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError) as caught:
        fashion_mnist(full=True, folder=folder)
    for name in fashion.FILES:
        assert f"{name}.gz" in str(caught.value)
    assert str(folder / "fashion-mnist") in str(caught.value)

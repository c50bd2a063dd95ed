"""CIFAR, Tiny ImageNet, ImageNet folders and texts in their official forms, and what is said of damaged ones."""

from __future__ import annotations

import io
import json
import lzma
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sliceout.cli import UserError
from sliceout_lab import data
from sliceout_lab.data import DataError, bpe, cifar, text
from sliceout_lab.data.sets import balanced

CIFAR_10 = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of this machine is found, nothing is left on it."""
    path = tmp_path_factory.mktemp("home")
    monkeypatch.setattr(Path, "home", lambda: path)
    monkeypatch.delenv("SLICEOUT_DATA", raising=False)
    monkeypatch.chdir(path)
    return path


def pixels(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 3072), dtype=np.uint8)


def write_cifar(root: Path, classes: int, version: str, n: int = 4) -> Path:
    names = CIFAR_10 if classes == 10 else ["train", "test"]
    folder = root / {
        (10, "bin"): "cifar-10-batches-bin", (10, "py"): "cifar-10-batches-py",
        (100, "bin"): "cifar-100-binary", (100, "py"): "cifar-100-python",
    }[classes, version]  # fmt: skip
    folder.mkdir()
    for i, name in enumerate(names):
        images, labels = pixels(n, i), [(7 * i + j) % classes for j in range(n)]
        if version == "bin":
            coarse = [] if classes == 10 else [np.full((n, 1), 19, np.uint8)]
            rows = np.concatenate([*coarse, np.array(labels, np.uint8)[:, None], images], axis=1)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            key = b"labels" if classes == 10 else b"fine_labels"
            content = {b"batch_label": b"x", key: labels, b"data": images, b"filenames": [b"a.png"] * n}
            (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return folder


@pytest.mark.parametrize("classes", [10, 100])
def test_both_versions_of_cifar_hold_the_same(tmp_path: Path, classes: int) -> None:
    loaded = []
    for version in ("bin", "py"):
        (tmp_path / version).mkdir()
        write_cifar(tmp_path / version, classes, version)
        loaded.append(data.load(f"cifar-{classes}", tmp_path / version))
    batches = 5 if classes == 10 else 1
    for images in loaded:
        assert images.train.shape == (4 * batches, 3, 32, 32)
        assert images.test.shape == (4, 3, 32, 32)
        assert images.train.dtype == torch.uint8
        assert images.classes == classes
        assert images.test[2, 1, 0, 5] == pixels(4, batches)[2, 1024 + 5]  # planes of red, green, blue, row by row
        assert images.train_labels.tolist() == [(7 * i + j) % classes for i in range(batches) for j in range(4)]
    for field in ("train", "train_labels", "test", "test_labels"):
        assert torch.equal(getattr(loaded[0], field), getattr(loaded[1], field))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda raw: raw[:-1], "expected a multiple of 3073"),
        (lambda raw: b"", "holds 0 bytes"),
        (lambda raw: b"\x0a" + raw[1:], "holds the label 10, expected 0 to 9"),
        (lambda raw: b"\x1f\x8b" + raw, "damaged gzip"),
    ],
)
def test_damaged_binary_cifar_files_are_refused(tmp_path: Path, damage, complaint: str) -> None:
    path = write_cifar(tmp_path, 10, "bin") / "data_batch_3.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=complaint) as caught:
        data.load("cifar-10", tmp_path)
    assert str(path) in str(caught.value)


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def array(n: int = 4, width: int = 3072, dtype: type = np.uint8) -> np.ndarray:
    return np.zeros((n, width), dtype)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (Evil(), "system, which no CIFAR file does"),
        ({b"labels": [0] * 4, b"data": Evil()}, "system, which no CIFAR file does"),
        ([1], "holds a list, expected a dictionary"),
        ({b"data": array()}, "holds no 'labels'"),
        ({b"labels": [0] * 4}, "holds no 'data'"),
        ({b"labels": [0] * 4, b"data": array(width=3071)}, r"uint8 \[4, 3071\], expected uint8 \[n, 3072\]"),
        ({b"labels": [0] * 4, b"data": array(dtype=np.float32)}, "float32"),
        ({b"labels": [0] * 4, b"data": [1]}, "its data are list"),
        ({b"labels": [0] * 3, b"data": array()}, "3 labels for 4 images"),
        ({b"labels": [0, 1, 2, 10], b"data": array()}, "holds the label 10"),
        ({b"labels": [0, 1, 2, -1], b"data": array()}, "not a list of small numbers"),
        ({b"labels": "abcd", b"data": array()}, "not a list of small numbers"),
        ({b"labels": [], b"data": array(0)}, r"uint8 \[0, 3072\]"),
    ],
)
def test_wrong_pickles_are_refused_and_run_nothing(tmp_path: Path, content: object, complaint: str) -> None:
    path = write_cifar(tmp_path, 10, "py") / "test_batch"
    path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=complaint) as caught:
        data.load("cifar-10", tmp_path)
    assert str(path) in str(caught.value)
    assert not Path("pwned").exists()


def test_no_truncated_pickle_is_accepted(tmp_path: Path) -> None:
    path = write_cifar(tmp_path, 100, "py", n=1) / "train"
    whole = path.read_bytes()
    for length in [*range(60), *range(60, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="train"):
            cifar.read_pickle(path, b"fine_labels")


def test_fashion_mnist_is_not_taken_for_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    from sliceout_lab.data import catalogue, fashion, write_idx

    for name, n in (("train", 6), ("t10k", 4)):
        write_idx(tmp_path / f"{name}-images-idx3-ubyte.gz", torch.zeros(n, 3, 2).byte())
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte.gz", torch.arange(n).byte())
    assert len(data.load("mnist", tmp_path).train) == 6
    raw = bytes((0, 0, 8, 1, 0, 0, 0, 6, *range(6)))
    sums = {fashion.FILES[1]: ("sha256", hashlib.sha256(raw).hexdigest())}
    monkeypatch.setitem(catalogue.CONTENTS, "fashion-mnist", sums)
    with pytest.raises(DataError, match="is a file of fashion-mnist, not of mnist"):
        data.load("mnist", tmp_path)


def jpeg(colour: tuple[int, int, int], width: int = 64, height: int = 64) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "JPEG", quality=95)
    return out.getvalue()


RED, GREEN, BLUE = (250, 5, 5), (5, 250, 5), (5, 5, 250)


def colour_of(image: torch.Tensor) -> int:
    return int(image.float().mean((-1, -2)).argmax())


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """The packed form with three classes: red, green, blue."""
    folder = tmp_path / "tiny-imagenet-100"
    folder.mkdir()
    splits = {}
    for name, labels in (("train-0", [0, 1, 2]), ("train-1", [2, 1]), ("val", [1, 0])):
        images = [jpeg((RED, GREEN, BLUE)[label]) for label in labels]
        (folder / f"{name}.bin").write_bytes(b"".join(images))
        splits[name] = {"sizes": [len(i) for i in images], "labels": labels}
    index = {"classes": [{"wnid": f"n{i}", "name": str(i)} for i in range(3)], "image": "JPEG", "splits": splits}
    (folder / "index.json").write_text(json.dumps(index))
    return tmp_path


def test_packed_tiny_imagenet(packed: Path) -> None:
    images = data.load("tiny-imagenet-100", packed)
    assert images.train.shape == (5, 3, 64, 64)
    assert [colour_of(x) for x in images.train] == images.train_labels.tolist() == [0, 1, 2, 2, 1]
    assert [colour_of(x) for x in images.test] == images.test_labels.tolist() == [1, 0]
    small = data.load("tiny-imagenet-100@32", packed)
    assert small.train.shape == (5, 3, 32, 32)
    assert [colour_of(x) for x in small.train] == [0, 1, 2, 2, 1]
    with pytest.raises(DataError, match="only Tiny ImageNet has other sizes"):
        data.load("cifar-10@16", packed)


@pytest.mark.parametrize(
    ("file", "damage", "complaint"),
    [
        ("train-1.bin", lambda raw: raw[:-10], "train-1.bin: holds .* bytes, but the index promises"),
        ("train-1.bin", lambda raw: b"\0" * len(raw), "train-1.bin, image 0: damaged image"),
        ("val.bin", lambda raw: raw[: len(raw) // 2 + 9] + b"\0" * (len(raw) - len(raw) // 2 - 9), "val.bin, image 1"),
        ("index.json", lambda raw: raw[:-1], "index.json: is not the index"),
        ("index.json", lambda raw: b"{}", "index.json: is not the index"),
        (
            "index.json",
            lambda raw: raw.replace(b'"labels": [1, 0]', b'"labels": [1, 3]'),
            "labels 1 to 3, expected 0 to 2",
        ),
        ("index.json", lambda raw: raw.replace(b'"labels": [1, 0]', b'"labels": [1]'), "2 sizes and 1 labels"),
    ],
)
def test_damaged_packed_images_are_refused(packed: Path, file: str, damage, complaint: str) -> None:
    path = packed / "tiny-imagenet-100" / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=complaint):
        data.load("tiny-imagenet-100", packed)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The official layout with two classes."""
    folder = tmp_path / "tiny-imagenet-200"
    for wnid, colour in (("n02", GREEN), ("n01", RED)):
        (folder / "train" / wnid / "images").mkdir(parents=True)
        for i in range(2):
            (folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG").write_bytes(jpeg(colour))
    (folder / "wnids.txt").write_text("n02\nn01\n")
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "val" / "images" / "val_0.JPEG").write_bytes(jpeg(GREEN))
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t5\t5\n")
    return tmp_path


def test_official_tiny_imagenet(tiny: Path) -> None:
    images = data.load("tiny-imagenet", tiny)
    assert images.classes == 2
    assert [colour_of(x) for x in images.train] == images.train_labels.tolist() == [0, 0, 1, 1]
    assert [colour_of(x) for x in images.test] == images.test_labels.tolist() == [1]


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("val/val_annotations.txt", b"val_0.JPEG\tn09\n", "line 1 names no image and known class"),
        ("val/val_annotations.txt", b"", "val_annotations.txt: is empty"),
        ("val/images/val_0.JPEG", jpeg(RED)[:200], "val_0.JPEG: damaged image"),
        ("train/n01/images/n01_1.JPEG", jpeg(RED, 32, 32), "n01_1.JPEG: is 32x32, expected 64x64"),
        ("wnids.txt", b"n01\nn01\n", "no list of different classes"),
        ("wnids.txt", b"n01\nn02\nn03\n", "n03/images: holds no .JPEG"),
    ],
)
def test_damaged_official_tiny_imagenet_is_refused(tiny: Path, file: str, content: bytes, complaint: str) -> None:
    (tiny / "tiny-imagenet-200" / file).write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        data.load("tiny-imagenet", tiny)


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """Two classes; wide and tall images, the left half of each is black."""
    for split, n in (("train", 6), ("val", 3)):
        for wnid, colour in (("n01", RED), ("n02", GREEN)):
            folder = tmp_path / "imagenet" / split / wnid
            folder.mkdir(parents=True)
            for i in range(n):
                image = Image.new("RGB", (200, 100) if i % 2 else (100, 160), colour)
                image.paste((0, 0, 0), (0, 0, image.width // 2, image.height))
                image.save(folder / f"{i}.JPEG", quality=95)
    return tmp_path


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_imagenet_folders_are_decoded_cropped_and_labelled(imagenet: Path, workers: int) -> None:
    images = data.load("imagenet", imagenet)
    assert (len(images.train), len(images.test), images.classes) == (12, 6, 2)
    feed = data.feed(images, 4, "cpu", augment="imagenet", normalise="none", size=32, workers=workers)
    state = torch.random.get_rng_state()
    batches = list(feed.epoch(0, 0))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(batches) == feed.steps == 3
    for x, y in batches:
        assert x.shape == feed.inputs_like()[0].shape == (4, 3, 32, 32)
        assert x.stride() == feed.inputs_like()[0].stride()
        for image, label in zip(x, y, strict=True):
            assert image.max() < 20 or colour_of(image) == label  # a crop may show the black half alone
    assert torch.cat([y for _, y in batches]).bincount().tolist() == [6, 6]
    for (a, la), (b, lb) in zip(batches[1:], feed.epoch(0, 0, start=1), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(la, lb)
    alone, parts = (
        feed,
        [
            data.feed(images, 2, "cpu", augment="imagenet", normalise="none", size=32, workers=0, rank=r, world=2)
            for r in range(2)
        ],
    )
    for (x, _), (a, _), (b, _) in zip(alone.epoch(1, 1), parts[0].epoch(1, 1), parts[1].epoch(1, 1), strict=True):
        torch.testing.assert_close(x, torch.cat((a, b)))


def test_the_middle_of_a_test_image_is_shown_undistorted(imagenet: Path) -> None:
    images = data.load("imagenet", imagenet)
    feed = data.feed(images, 4, "cpu", normalise="none", size=32, workers=0)
    batches = list(feed.test())
    assert [len(y) for _, y in batches] == [4, 2]
    assert torch.cat([y for _, y in batches]).tolist() == [0, 0, 0, 1, 1, 1]
    for x, y in batches:
        for image, label in zip(x, y, strict=True):
            assert image[label, :, 20:].min() > 200  # the border between black and colour is in the middle
            assert image[label, :, :12].max() < 50


def test_a_damaged_image_stops_the_feed_with_its_name(imagenet: Path) -> None:
    path = imagenet / "imagenet" / "val" / "n02" / "1.JPEG"
    path.write_bytes(path.read_bytes()[:400])
    for workers in (0, 1):
        feed = data.feed(data.load("imagenet", imagenet), 3, "cpu", size=32, workers=workers)
        with pytest.raises(DataError, match=r"n02/1\.JPEG: damaged image"):
            list(feed.test())


def test_imagenet_folders_that_do_not_fit_are_refused(imagenet: Path) -> None:
    root = imagenet / "imagenet"
    (root / "val" / "n02").rename(root / "val" / "n03")
    with pytest.raises(DataError, match=r"its classes are not those of train: n02, n03"):
        data.load("imagenet", imagenet)
    (root / "train" / "n02").rename(root / "train" / "n03")
    for file in (root / "train" / "n03").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"train/n03: holds no images"):
        data.load("imagenet", imagenet)


LINES = [f" word{i % 7} and word{i % 11} <unk> runs , {i} \n" for i in range(200)]


@pytest.fixture
def wiki(tmp_path: Path) -> Path:
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for split, lines in (("train", LINES), ("valid", [*LINES[:9], " \n"]), ("test", LINES[5:16])):
        (folder / f"wiki.{split}.tokens.xz").write_bytes(lzma.compress("".join(lines).encode()))
    return tmp_path


def test_text_becomes_tokens_and_back(wiki: Path) -> None:
    from tokenizers import Tokenizer

    tokens = data.load("wikitext-2", wiki)
    assert tokens.words == (
        200 * 8,
        9 * 8 + 1,
        11 * 8,
    )  # seven words and the end of the line; an empty line has its end
    kept = next((wiki / "wikitext-2" / ".sliceout").glob("bpe-*.json"))
    encoder = Tokenizer.from_str(json.loads(kept.read_text())["tokenizer"])
    end, unknown = encoder.token_to_id("<eos>"), encoder.token_to_id("<unk>")
    assert tokens.vocabulary == encoder.get_vocab_size()
    for stream, lines in ((tokens.train, LINES), (tokens.test, LINES[5:16])):
        assert int((stream == end).sum()) == len(lines)
        assert int((stream == unknown).sum()) == len(lines)
        assert encoder.decode(stream.tolist(), skip_special_tokens=False).split() == (
            "".join(lines).replace("\n", "<eos>").replace("<eos>", " <eos> ").split()
        )


def test_what_was_learnt_is_kept_and_made_again_when_damaged_or_stale(wiki: Path, capsys) -> None:
    first = data.load("wikitext-2", wiki).train.clone()
    assert "learning a 32,000-token vocabulary" in capsys.readouterr().err
    cache = wiki / "wikitext-2" / ".sliceout"
    times = {p: p.stat().st_mtime_ns for p in cache.glob("*.[jb]*")}
    assert torch.equal(data.load("wikitext-2", wiki).train, first)
    assert capsys.readouterr().err == ""
    assert times == {p: p.stat().st_mtime_ns for p in cache.glob("*.[jb]*")}
    for path in times:  # each file in turn: cut off, or changed
        whole = path.read_bytes()
        for damaged in (whole[: len(whole) // 2], whole[:-9] + b"x" * 9, b""):
            path.write_bytes(damaged)
            assert torch.equal(data.load("wikitext-2", wiki).train, first)
    train = wiki / "wikitext-2" / "wiki.train.tokens.xz"
    train.write_bytes(lzma.compress("".join(LINES[:100]).encode()))
    assert len(data.load("wikitext-2", wiki).train) < len(first)


def test_a_read_only_folder_of_text_is_left_alone(wiki: Path, home: Path) -> None:
    folder = wiki / "wikitext-2"
    folder.chmod(0o555)
    try:
        assert len(data.load("wikitext-2", wiki).train) > 0
        assert not (folder / ".sliceout").exists()
        assert any((home / ".cache/sliceout/tokens").glob("tokens-*.json"))
        (home / ".cache/sliceout/tokens").chmod(0o555)
        with pytest.raises(DataError, match="cannot write there"):
            data.load("wikitext-2", wiki)
    finally:
        folder.chmod(0o755)
        (home / ".cache/sliceout/tokens").chmod(0o755)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (lzma.compress(b"a b c\n" * 99)[:-20], "wiki.test.tokens.xz: damaged xz file"),
        (b"\xff\xfe\0 not utf8", "wiki.test.tokens.xz: is not UTF-8 text"),
        (b" \n", "wiki.test.tokens.xz: holds no text"),
    ],
)
def test_damaged_text_is_refused(wiki: Path, content: bytes, complaint: str) -> None:
    (wiki / "wikitext-2" / "wiki.test.tokens.xz").write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        data.load("wikitext-2", wiki)
    assert not list((wiki / "wikitext-2" / ".sliceout").glob("*.part"))


def test_lm1b_shards(tmp_path: Path) -> None:
    folder = tmp_path / "1-billion-word-language-modeling-benchmark-r13output"
    train, held_out = folder / text.LM1B_TRAIN, folder / text.LM1B_HELD_OUT
    train.mkdir(parents=True)
    held_out.mkdir()
    for i in (1, 2, 99):
        (train / f"news.en-{i:05}-of-00100").write_text("".join(LINES[i : i + 40]))
    for i in (0, 1, 2):
        (held_out / f"news.en.heldout-{i:05}-of-00050").write_text("".join(LINES[: 5 + i]))
    tokens = data.load("lm1b", tmp_path)
    assert tokens.words == (3 * 40 * 8, 6 * 8, 5 * 8)
    (held_out / text.LM1B_TEST).unlink()
    with pytest.raises(DataError, match=r"LM1B is not in(.|\n)*news.en.heldout-00000-of-00050"):
        data.load("lm1b", tmp_path)


def test_text_for_evaluation_takes_the_vocabulary_of_another(wiki: Path) -> None:
    (wiki / "lm1b-slice").mkdir()
    for split in ("dev", "test"):
        (wiki / "lm1b-slice" / f"{split}.tokens").write_text("".join(LINES[:20]) + "something quite different\n")
    own, other = data.load("lm1b-slice", wiki), data.load("lm1b-slice", wiki, vocabulary="wikitext-2")
    assert len(own.train) == 0
    assert other.vocabulary == data.load("wikitext-2", wiki).vocabulary
    assert len(other.test) > len(own.test)  # words that the other text does not have take more tokens
    feed = data.feed(own, 2, "cpu", sequence=8)
    assert feed.steps == 0
    assert sum(y.numel() for _, y in feed.test()) == len(own.test) - 1
    with pytest.raises(UserError, match="evaluation only"):
        next(feed.epoch(0, 0))
    with pytest.raises(DataError, match="vocabulary='mnist': is no text"):
        data.load("lm1b-slice", wiki, vocabulary="mnist")


def test_text_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(LINES))
    tokens = data.load(f"text:{tmp_path / 'book.txt'}")
    assert tokens.words == (180 * 8, 10 * 8, 10 * 8)
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("".join(LINES[:30]))
    assert data.load(f"text:{tmp_path}").words == (240, 240, 240)
    with pytest.raises(DataError, match="no such file or folder of text"):
        data.load(f"text:{tmp_path / 'nothing'}")
    (tmp_path / "short.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match="holds 2 lines, at least 20"):
        data.load(f"text:{tmp_path / 'short.txt'}")


def test_what_is_learnt_from_is_bounded(wiki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "TRAINING_BYTES", 100)
    lines = iter(["x" * 60, "y" * 60, "z"])
    assert list(bpe._capped(lines)) == ["x" * 60]


def test_subsets_are_balanced_and_keep_their_order() -> None:
    labels = torch.tensor([1, 1, 1, 0, 0, 2, 0, 1, 2, 2])
    for n in range(1, 11):
        rows = balanced(labels, n)
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert len(rows) == n
        counts = labels[rows].bincount(minlength=3)
        if n <= 9:
            assert counts.max() - counts.min() <= 1
    assert balanced(labels, 3).tolist() == [0, 3, 5]
    images = data.load("fashion-mnist-8k", subset=100)
    assert images.train_labels.bincount().tolist() == [10] * 10
    assert len(images.test) == 2000
    for wrong in (0, -1, 6001):
        with pytest.raises(DataError, match=f"subset={wrong}: expected 1 to 6000"):
            data.load("fashion-mnist-8k", subset=wrong)


def test_places_in_their_order(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"named": home / "named", "here": home / "data", "cache": home / ".cache/sliceout"}
    for n, place in enumerate(places.values(), 1):
        place.mkdir(parents=True)
        write_cifar(place, 10, "bin", n=n)
    assert len(data.load("cifar-10").test) == 2
    monkeypatch.setenv("SLICEOUT_DATA", str(places["named"]))
    assert len(data.load("cifar-10").test) == 1
    assert len(data.load("cifar-10", places["cache"]).test) == 3
    with pytest.raises(DataError, match="unknown data set 'cifar'; known: fashion-mnist-8k, mnist"):
        data.load("cifar")
    with pytest.raises(DataError, match=r"CIFAR-10 is not in .*nowhere(.|\n)*data_batch_1.bin(.|\n)*--data DIR"):
        data.load("cifar-10", tmp_path / "nowhere")

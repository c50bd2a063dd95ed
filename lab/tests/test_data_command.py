"""``sliceout-lab data``: what is here, downloads that break off, wrong checksums, full disks; a local server."""

from __future__ import annotations

import errno
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from sliceout_lab import cli
from sliceout_lab.data import catalogue, check, download, fashion, official, write_idx
from sliceout_lab.data.files import DataError
from sliceout_lab.data.official import DOWNLOADS, Download
from test_data_formats import write_cifar


class Handler(BaseHTTPRequestHandler):
    """Serves ``files``; knows ranges; breaks off once after ``stop`` bytes if that is set."""

    files: dict[str, bytes]
    stop: int | None
    ranges: bool
    seen: list[str]

    def do_GET(self) -> None:
        content = self.files.get(self.path.lstrip("/"))
        asked = self.headers.get("Range")
        type(self).seen.append(f"{self.path} {asked}")
        if content is None:
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        if start >= len(content) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = len(content) if type(self).stop is None else start + type(self).stop
        type(self).stop = None
        self.wfile.write(content[start:end])

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing if whoever asked breaks off: stderr is what is tested."""


@pytest.fixture
def server() -> Iterator[type[Handler]]:
    handler = type("H", (Handler,), {"files": {}, "stop": None, "ranges": True, "seen": []})
    with Server(("127.0.0.1", 0), handler) as running:
        handler.base = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield handler
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("home")
    monkeypatch.setattr(Path, "home", lambda: path)
    monkeypatch.delenv("SLICEOUT_DATA", raising=False)
    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    debian = replace(catalogue.DATASETS["fashion-mnist"], elsewhere=(path / "debian",))
    monkeypatch.setitem(catalogue.DATASETS, "fashion-mnist", debian)
    monkeypatch.chdir(path)
    return path


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def cifar(server: type[Handler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Download:
    """A small CIFAR-10 as the archive that the server has, with checksums to match."""
    folder = write_cifar(tmp_path, 10, "bin", n=60)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        tar.add(folder, "cifar-10-batches-bin")
    server.files["cifar-10-binary.tar.gz"] = out.getvalue()
    sums = {p.name: ("sha1", hashlib.sha1(p.read_bytes()).hexdigest()) for p in folder.iterdir()}
    monkeypatch.setitem(official.CONTENTS, "cifar-10", sums)
    made = Download(f"{server.base}/cifar-10-binary.tar.gz", "md5", md5(out.getvalue()))
    monkeypatch.setitem(DOWNLOADS, "cifar-10", (made,))
    return made


def sliceout(*arguments: object) -> int:
    return cli.main([str(a) for a in arguments])


def test_a_data_set_is_fetched_checked_and_listed(cifar: Download, server, home: Path, capsys) -> None:
    assert sliceout("data", "get", "cifar-10", "--to", home / "here") == 0
    assert "6 files have their official checksums" in capsys.readouterr().out
    assert sorted(p.name for p in (home / "here").iterdir()) == ["cifar-10-batches-bin"]  # and no scratch
    assert sliceout("data", "check", "cifar-10", "--data", home / "here") == 0
    server.seen.clear()
    assert sliceout("data", "get", "cifar-10", "--to", home / "here") == 0
    assert "already" in capsys.readouterr().out
    assert server.seen == []
    assert sliceout("data", "list", "--data", home / "here") == 0
    said = capsys.readouterr().out
    assert "1.1 MB" in next(line for line in said.splitlines() if "cifar-10 " in line)
    assert "sliceout-lab data get wikitext-2" in said


def test_without_a_folder_it_goes_into_the_users_cache_or_the_named_one(cifar, home: Path, monkeypatch) -> None:
    assert sliceout("data", "get", "cifar-10") == 0
    assert (home / ".cache/sliceout/cifar-10-batches-bin/test_batch.bin").is_file()
    monkeypatch.setenv("SLICEOUT_DATA", str(home / "named"))
    (home / ".cache").rename(home / "gone")
    assert sliceout("data", "get", "cifar-10") == 0
    assert (home / "named/cifar-10-batches-bin/test_batch.bin").is_file()


def test_a_download_that_broke_off_goes_on_where_it_stopped(cifar, server, home: Path, capsys) -> None:
    server.stop = 300_000
    assert sliceout("data", "get", "cifar-10", "--to", home) == 1
    assert "broke off" in capsys.readouterr().err
    part = home / ".downloads" / "cifar-10-binary.tar.gz.part"
    assert part.stat().st_size == 300_000
    assert not (home / "cifar-10-batches-bin").exists()
    assert sliceout("data", "get", "cifar-10", "--to", home) == 0
    assert server.seen[-1].endswith("bytes=300000-")
    assert not part.exists()


@pytest.mark.parametrize("ranges", [True, False])
def test_rubbish_of_an_earlier_attempt_is_fetched_again(cifar, server, home: Path, ranges: bool) -> None:
    server.ranges = ranges
    part = home / ".downloads" / "cifar-10-binary.tar.gz.part"
    part.parent.mkdir()
    for rubbish in (b"x" * 1000, b"x" * 5_000_000, server.files["cifar-10-binary.tar.gz"]):
        part.write_bytes(rubbish)
        assert sliceout("data", "get", "cifar-10", "--to", home) == 0
        (home / "cifar-10-batches-bin").rename(home / f"seen{len(rubbish)}")
        part.parent.mkdir(exist_ok=True)


def test_a_server_that_cannot_go_on_sends_everything_again_once(cifar, server, home: Path) -> None:
    server.ranges = False
    part = home / ".downloads" / "cifar-10-binary.tar.gz.part"
    part.parent.mkdir()
    part.write_bytes(server.files["cifar-10-binary.tar.gz"][:1000])
    assert sliceout("data", "get", "cifar-10", "--to", home) == 0
    assert len(server.seen) == 1


def test_a_wrong_checksum_puts_nothing_in_place(cifar, server, home: Path, capsys) -> None:
    server.files["cifar-10-binary.tar.gz"] = b"<html>moved</html>"
    assert sliceout("data", "get", "cifar-10", "--to", home) == 1
    said = capsys.readouterr().err
    assert "wrong checksum: md5" in said
    assert "Traceback" not in said
    assert not (home / "cifar-10-batches-bin").exists()
    assert not (home / ".downloads" / "cifar-10-binary.tar.gz.part").exists()


def test_a_file_that_is_not_the_official_one_is_named(cifar, home: Path, capsys) -> None:
    assert sliceout("data", "get", "cifar-10", "--to", home) == 0
    path = home / "cifar-10-batches-bin" / "data_batch_2.bin"
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    capsys.readouterr()
    for command in (("check", "cifar-10", "--data", home), ("get", "cifar-10", "--to", home)):
        assert sliceout("data", *command) == 1
        assert f"{path}: wrong checksum: sha1" in capsys.readouterr().err
    assert path.read_bytes() == raw
    path.unlink()  # as the message says
    mine = home / "cifar-10-batches-bin" / "notes.txt"
    mine.write_text("mine")
    assert sliceout("data", "get", "cifar-10", "--to", home) == 0
    assert (home / "cifar-10-batches-bin.old" / "notes.txt").read_text() == "mine"  # nothing is written over


def test_single_files_are_fetched_one_by_one(server, home: Path, monkeypatch, capsys) -> None:
    files = {}
    for name, n in (("train", 6), ("t10k", 4)):
        for kind, tensor in (("images-idx3", torch.zeros(n, 3, 2).byte()), ("labels-idx1", torch.arange(n).byte())):
            path = home / f"{name}-{kind}-ubyte.gz"
            write_idx(path, tensor)
            files[path.name] = path.read_bytes()
            path.unlink()
    server.files.update(files)
    made = tuple(Download(f"{server.base}/{n}", "md5", md5(raw), "mnist") for n, raw in files.items())
    monkeypatch.setitem(DOWNLOADS, "mnist", made)
    sums = {n.removesuffix(".gz"): ("sha256", hashlib.sha256(check.read(_put(home / n, raw))).hexdigest())
            for n, raw in files.items()}  # fmt: skip
    monkeypatch.setitem(official.CONTENTS, "mnist", sums)
    missing = server.files.pop("t10k-labels-idx1-ubyte.gz")
    assert sliceout("data", "get", "mnist", "--to", home / "d") == 1
    said = capsys.readouterr().err
    assert "the server answers 404" in said
    assert len(list((home / "d" / "mnist").iterdir())) == 3
    server.files["t10k-labels-idx1-ubyte.gz"] = missing
    server.seen.clear()
    assert sliceout("data", "get", "mnist", "--to", home / "d") == 0
    assert len(server.seen) == 1


def _put(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    "name", ["mnist", "fashion-mnist", "cifar-10", "cifar-100", "tiny-imagenet", "wikitext-2", "lm1b"]
)
def test_without_internet_it_says_which_files_go_where(name: str, home: Path, monkeypatch, capsys) -> None:
    nowhere = tuple(replace(d, url=f"http://127.0.0.1:9/{d.name}") for d in DOWNLOADS[name])
    monkeypatch.setitem(DOWNLOADS, name, nowhere)
    assert sliceout("data", "get", name, "--to", home / "d") == 1
    said = capsys.readouterr().err
    assert "cannot be reached" in said
    for d in nowhere:
        assert f"{d.name}  {d.algorithm} {d.checksum}" in said
    layout = catalogue.DATASETS[name].layouts[0]
    for file in layout.files:
        assert str(home / "d" / layout.folders[0] / file) in said
    assert "Traceback" not in said
    if name == "fashion-mnist":
        assert "apt-get install dataset-fashion-mnist" in said


@pytest.mark.parametrize("name", ["imagenet", "tiny-imagenet-100", "lm1b-slice", "english-books"])
def test_what_cannot_be_downloaded_says_so(name: str, home: Path, capsys) -> None:
    assert sliceout("data", "get", name, "--to", home / "d") == 1
    said = capsys.readouterr().err
    assert f"{name} cannot be downloaded" in said
    assert str(home / "d" / name) in said


def test_debians_package_is_found(home: Path, monkeypatch, capsys) -> None:
    (home / "debian").mkdir()
    sums = {}
    for file in fashion.FILES:
        tensor = torch.zeros(4, 3, 2).byte() if "images" in file else torch.arange(4).byte()
        write_idx(home / "debian" / f"{file}.gz", tensor)
        sums[file] = ("sha256", hashlib.sha256(check.read(home / "debian" / f"{file}.gz")).hexdigest())
    monkeypatch.setitem(official.CONTENTS, "fashion-mnist", sums)
    assert sliceout("data", "get", "fashion-mnist") == 0
    assert f"is in {home / 'debian'} already" in capsys.readouterr().out.replace("/.", "")


def test_a_read_only_folder(cifar, home: Path, capsys) -> None:
    (home / "locked").mkdir(mode=0o555)
    for to in (home / "locked", home / "locked" / "deeper"):
        assert sliceout("data", "get", "cifar-10", "--to", to) == 1
        said = capsys.readouterr().err
        assert f"{to}: cannot write there (read-only); choose another folder with --to DIR" in said
    (home / "file").write_text("")
    assert sliceout("data", "get", "cifar-10", "--to", home / "file") == 1
    assert "cannot write there" in capsys.readouterr().err


def test_a_full_disk(cifar, home: Path, monkeypatch, capsys) -> None:
    class Usage:
        free = 1000

    with monkeypatch.context() as patch:
        patch.setattr(download.shutil, "disk_usage", lambda _: Usage)
        assert sliceout("data", "get", "cifar-10", "--to", home) == 1
        said = capsys.readouterr().err
        assert "the disk is full" in said
        assert "1,000 are free" in said

    class Full(io.BytesIO):
        def write(self, piece: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    real = Path.open
    with monkeypatch.context() as patch:  # another process takes what was free
        patch.setattr(Path, "open", lambda self, mode="r", *a: Full() if mode in ("wb", "ab") else real(self, mode, *a))
        assert sliceout("data", "get", "cifar-10", "--to", home) == 1
        said = capsys.readouterr().err
        assert "the disk is full (No space left on device)" in said
        assert "Traceback" not in said
    assert sliceout("data", "get", "cifar-10", "--to", home) == 0


def test_archives_cannot_write_outside_of_the_folder(server, home: Path) -> None:
    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w:gz") as tar:
        member = tarfile.TarInfo("../../evil")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"evil"))
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("../../evil", "evil")
    for name, content in (("a.tar.gz", evil.getvalue()), ("a.zip", zipped.getvalue()), ("b.zip", b"no zip")):
        server.files[name] = content
        try:
            download.fetch(Download(f"{server.base}/{name}", "md5", md5(content)), home / "x" / "data")
        except DataError as error:
            assert "damaged archive" in str(error)  # noqa: PT017
        assert not (home / "evil").exists()
        assert not (home / "x" / "evil").exists()


def test_unknown_and_missing_data_sets(home: Path, capsys) -> None:
    for command in ("get", "check"):
        assert sliceout("data", command, "imagnet") == 1
        assert "unknown data set 'imagnet'; known: mnist, fashion-mnist" in capsys.readouterr().err
        assert sliceout("data", command, "fashion-mnist-8k") == 1
        assert "comes with the package" in capsys.readouterr().err
    assert sliceout("data", "check", "wikitext-2") == 1
    assert f"{home}/.cache/sliceout/wikitext-2/wiki.train.tokens" in capsys.readouterr().err


def test_texts_and_images_without_checksums_are_read(home: Path, capsys) -> None:
    (home / "data" / "english-books").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (home / "data" / "english-books" / f"{split}.txt").write_text("a b c\n")
    assert sliceout("data", "check", "english-books") == 0
    assert "3 files are whole" in capsys.readouterr().out
    (home / "data" / "english-books" / "valid.txt").write_bytes(b"\x1f\x8bgarbage")
    assert sliceout("data", "check", "english-books") == 1
    assert "valid.txt: damaged gzip file" in capsys.readouterr().err
    write_cifar(home / "data", 100, "bin")
    assert sliceout("data", "check", "cifar-100") == 0
    assert "4 training and 4 test images are whole" in capsys.readouterr().out


def test_checksums_are_well_formed_and_cover_whole_forms() -> None:
    length = {"md5": 32, "sha1": 40, "sha256": 64}
    for downloads in (*DOWNLOADS.values(), *official.OTHER_ARCHIVES.values()):
        for d in downloads:
            assert len(d.checksum) == length[d.algorithm]
            assert int(d.checksum, 16)
    for name, files in official.CONTENTS.items():
        assert all(len(sum_) == length[algorithm] for algorithm, sum_ in files.values())
        known = [layout for layout in catalogue.DATASETS[name].layouts if set(layout.files) <= set(files)]
        assert known
    assert set(DOWNLOADS) | set(official.BY_HAND) == set(catalogue.DATASETS)

"""Results are appended whole or not at all, by several processes at once, and no good line is ever lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sliceout.cli import UserError
from sliceout_lab import results

RECORD = {"id": "a", "final": {"accuracy": 0.5}}


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    results.append(path, RECORD)
    results.append(path, {**RECORD, "id": "b"})
    assert [r["id"] for r in results.read(path)] == ["a", "b"]
    assert results.read(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("cut", [1, 10, 20])
def test_a_torn_line_is_skipped_with_a_word_and_kept_aside(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "results.jsonl"
    results.append(path, RECORD)
    torn = json.dumps({**RECORD, "id": "torn"})[:cut]
    with path.open("a") as file:
        file.write(torn)
    said: list[str] = []
    assert [r["id"] for r in results.read(path, said.append)] == ["a"]
    assert len(said) == 1
    assert f"{path}:2" in said[0]
    results.append(path, {**RECORD, "id": "b"})
    said.clear()
    assert [r["id"] for r in results.read(path, said.append)] == ["a", "b"]
    assert said == []
    assert (tmp_path / "results.jsonl.torn").read_text() == torn + "\n"


def test_a_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(RECORD))
    results.append(path, {**RECORD, "id": "b"})
    assert [r["id"] for r in results.read(path)] == ["a", "b"]


def test_damage_in_the_middle_costs_one_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"id": "a"}\n{"id"\n\x00\xff\n[1]\n{"id": "b"}\n')
    said: list[str] = []
    assert [r["id"] for r in results.read(path, said.append)] == ["a", "b"]
    assert len(said) == 3


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    results.append(path, RECORD)
    before = path.read_bytes()
    write = os.pwrite

    def half(handle: int, data: bytes, at: int) -> int:
        return write(handle, data[: len(data) // 2], at)

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(UserError, match="the disk is full"):
        results.append(path, {**RECORD, "id": "b"})
    assert path.read_bytes() == before

    def none(handle: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", none)
    with pytest.raises(UserError, match=r"results.jsonl: the disk is full \(No space left on device\)"):
        results.append(path, {**RECORD, "id": "b"})
    assert path.read_bytes() == before


def test_a_line_without_a_result_does_not_count_as_one() -> None:
    done = {"id": "a", "final": {"accuracy": 0.5}, "epochs": [{}]}
    assert results.by_id(
        [{**done, "seed": 1}, {**done, "seed": 2}, {"id": "b"}, {**done, "id": "c", "epochs": []}]
    ) == {"a": {**done, "seed": 2}}


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").mkdir()
    with pytest.raises(UserError, match=r"results.jsonl: cannot be read \(Is a directory\)"):
        results.read(tmp_path / "results.jsonl")


def test_nan_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        results.append(tmp_path / "results.jsonl", {"loss": float("nan")})


@pytest.mark.slow
def test_processes_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    code = (
        "import sys; from pathlib import Path; from sliceout_lab import results\n"
        "for i in range(20): results.append(Path(sys.argv[1]), {'id': f'{sys.argv[2]}-{i}', 'long': 'x' * 20000})"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)]) for n in range(2)]
    assert [p.wait(120) for p in running] == [0, 0]
    said: list[Any] = []
    assert len({r["id"] for r in results.read(path, said.append)}) == 40
    assert said == []


def test_the_revision_is_known_in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    results.revision.cache_clear()
    monkeypatch.setenv("SLICEOUT_REVISION", "abc-dirty")
    assert results.revision() == ("abc", True)
    results.revision.cache_clear()

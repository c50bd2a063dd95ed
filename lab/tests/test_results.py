"""Results are written whole or not at all, by several processes at once, and no good one is ever lost."""

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
from sliceout_lab import machine, results

RECORD = {"id": "a", "final": {"accuracy": 0.5}}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "results"
    results.write(folder, RECORD)
    results.write(folder, {**RECORD, "id": "b"})
    assert [r["id"] for r in results.read(folder)] == ["a", "b"]
    assert {p.name for p in folder.iterdir()} == {"a.json", "b.json"}
    assert results.read(tmp_path / "none") == []


def test_a_run_that_was_trained_anew_keeps_its_earlier_results(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        results.write(tmp_path, {**RECORD, "epochs": [{}], "seed": seed})
    found = results.read(tmp_path)
    assert [r["seed"] for r in found] == [1, 2, 3]
    assert results.by_id(found)["a"]["seed"] == 3


def test_records_come_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    for id, day in (("a", 3), ("b", 1), ("c", 2)):
        results.write(tmp_path, {**RECORD, "id": id, "machine": {"date": f"2026-01-0{day}T00:00:00+00:00"}})
    assert [r["id"] for r in results.read(tmp_path)] == ["b", "c", "a"]


@pytest.mark.parametrize("text", [json.dumps(RECORD)[:1], json.dumps(RECORD)[:20], "\x00\xff", "[1]"])
def test_a_damaged_file_is_skipped_with_a_word_and_costs_no_other(tmp_path: Path, text: str) -> None:
    results.write(tmp_path, RECORD)
    (tmp_path / "torn.json").write_text(text)
    said: list[str] = []
    assert [r["id"] for r in results.read(tmp_path, said.append)] == ["a"]
    assert len(said) == 1
    assert f"{tmp_path / 'torn.json'}: not a whole result" in said[0]
    results.write(tmp_path, {**RECORD, "id": "torn"})
    assert [r["id"] for r in results.read(tmp_path, said.append)] == ["a", "torn"]


def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results.write(tmp_path, RECORD)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for id in ("a", "b"):
        with pytest.raises(UserError, match=rf"{id}\.json: the disk is full \(No space left on device\); no result"):
            results.write(tmp_path, {**RECORD, "id": id, "seed": 1})
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_record_without_a_result_does_not_count_as_one() -> None:
    done = {"id": "a", "final": {"accuracy": 0.5}, "epochs": [{}]}
    assert results.by_id(
        [{**done, "seed": 1}, {**done, "seed": 2}, {"id": "b"}, {**done, "id": "c", "epochs": []}]
    ) == {"a": {**done, "seed": 2}}


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(UserError, match=r"a\.json: cannot be read \(Is a directory\)"):
        results.read(tmp_path)


def test_nan_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        results.write(tmp_path, {"id": "a", "loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_processes_do_not_tear_each_others_files(tmp_path: Path) -> None:
    """Neither those of other runs nor, should it happen, of the same one."""
    code = (
        "import sys; from pathlib import Path; from sliceout_lab import results\n"
        "for i in range(20):\n"
        "    for id in (f'{sys.argv[2]}-{i}', f'both-{i}'):\n"
        "        results.write(Path(sys.argv[1]), {'id': id, 'long': 'x' * 20000})"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(n)]) for n in range(2)]
    assert [p.wait(120) for p in running] == [0, 0]
    said: list[Any] = []
    records = results.read(tmp_path, said.append)
    assert len({r["id"] for r in records}) == 60
    assert all(len(r["long"]) == 20000 for r in records)
    assert said == []
    assert all(p.suffix == ".json" for p in tmp_path.iterdir())


def test_the_revision_is_known_in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    machine.revision.cache_clear()
    monkeypatch.setenv("SLICEOUT_REVISION", "abc-dirty")
    assert machine.revision() == ("abc", True)
    machine.revision.cache_clear()

"""docs/architecture.md is true: its code runs and prints what it shows, and its list of files is the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "sliceout"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LISTED = ("callbacks", "cli")
"""Rooms that have one line for all of their files."""


def blocks() -> list[tuple[str, str]]:
    """Every Python block and the output that follows it."""
    return re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)


def tree() -> set[str]:
    """Paths of the list of rooms, relative to the library: indentation says what lies in what."""
    (listing,) = re.findall(r"```\nsrc/sliceout/\n(.*?)```", PAGE, flags=re.DOTALL)
    found, above = set(), {0: ""}
    for line in listing.splitlines():
        depth, name = len(line) - len(line.lstrip()), line.split()[0]
        if depth == 0:
            break
        path = above[depth - 2] + name
        above[depth] = path
        if not name.endswith("/"):
            found.add(path)
    return found


def test_code_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(blocks()) == PAGE.count("```python") == 2
    scope: dict[str, object] = {"__name__": "architecture"}
    for code, shown in blocks():
        exec(code, scope)
        assert capsys.readouterr().out == shown


def test_every_module_has_its_line() -> None:
    files = {str(f.relative_to(LIBRARY)) for f in LIBRARY.rglob("*.py")}
    assert tree() == {f for f in files if f.partition("/")[0] not in LISTED}
    assert all(f"  {room}/ " in PAGE for room in LISTED)


def test_files_that_are_named_exist() -> None:
    paths = set(re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|json|md))`", PAGE))
    assert paths
    assert {p for p in paths if not (ROOT / p).exists() and not (LIBRARY / p).exists()} == set()


def test_names_that_are_named_exist() -> None:
    """`module.name` and `module.Class.name` in the text of the page."""
    files = {f.stem: f.read_text() for f in LIBRARY.rglob("*.py") if f.stem not in ("__init__", "kernels")}
    missing = [
        f"{module}.{name}"
        for module, name in re.findall(r"`(\w+)\.(\w+)`", PAGE)
        if module in files and name != "py" and not re.search(rf"\b{name}\b", files[module])
    ]
    assert missing == []


def test_the_page_stays_short() -> None:
    assert len(PAGE.splitlines()) <= 275

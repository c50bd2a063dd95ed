"""The rules of the house: how large rooms and files may grow, what importing the library costs, what is private.

Who may import whom is checked by import-linter (``.importlinter``, part of ``make lint``).
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sliceout

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "sliceout"
PACKAGES = {"sliceout": LIBRARY, "sliceout_lab": ROOT / "lab" / "src" / "sliceout_lab"}
READING_PATH = ("slices.py", "takes.py", "ops/reference.py", "ops/views.py", "nn/mixing.py")


def lines(files: Any) -> dict[str, int]:
    """Lines of each file, by its path in the repository."""
    return {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in files}


def core() -> list[Path]:
    """The library without its command line."""
    return [f for f in sorted(LIBRARY.rglob("*.py")) if "cli" not in f.relative_to(LIBRARY).parts]


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_at_most_seven_modules_at_the_root() -> None:
    modules = {f.stem for f in LIBRARY.glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= 7, sorted(modules)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_is_longer_than_400_lines(package: str) -> None:
    found = lines(PACKAGES[package].rglob("*.py"))
    assert found
    assert {path: n for path, n in found.items() if n > 400} == {}


def test_the_core_stays_small() -> None:
    """8,500 lines without parts, growth and samples, which added two thousand; refusals 350."""
    found = lines(core())
    rooms: dict[str, int] = {}
    for path, n in found.items():
        room = Path(path).relative_to(LIBRARY.relative_to(ROOT)).parts[0]
        rooms[room] = rooms.get(room, 0) + n
    assert sum(found.values()) <= 10950, dict(sorted(rooms.items(), key=lambda item: -item[1]))


def test_the_method_can_be_read_in_a_thousand_lines() -> None:
    found = lines(LIBRARY / path for path in READING_PATH)
    assert sum(found.values()) <= 1000, found


# -- importing ---------------------------------------------------------------------------------------------------------

IMPORT = """
import json, logging, sys, time, warnings
import torch
from torch.compiler import config

def settings():
    return {
        "cache_key_tag": config.cache_key_tag,
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": [torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32],
        "random state": torch.get_rng_state().sum().item(),
        "initial seed": torch.initial_seed(),
        "warnings": [str(f) for f in warnings.filters],
        "log handlers": len(logging.getLogger().handlers) + len(logging.getLogger("sliceout").handlers),
        "cuda": torch.cuda.is_initialized(),
    }

torch.manual_seed(0)
before, loaded = settings(), set(sys.modules)
start = time.perf_counter()
import sliceout
seconds = time.perf_counter() - start
after = settings()
heavy = ("torch._dynamo", "torch._inductor.lowering", "triton", "numpy", "typer", "rich", "sliceout_lab")
print(json.dumps({
    "seconds": seconds,
    "changed": {k: [before[k], after[k]] for k in before if before[k] != after[k]},
    "imported": [m for m in heavy if m in sys.modules and m not in loaded],
}))
"""


@pytest.fixture(scope="module")
def imports() -> list[dict[str, Any]]:
    """What three fresh processes say of ``import sliceout``."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(LIBRARY.parent), os.environ.get("PYTHONPATH", "")])}
    runs = [subprocess.run([sys.executable, "-c", IMPORT], env=env, capture_output=True, text=True) for _ in range(3)]
    assert [run.stderr for run in runs if run.returncode] == []
    return [json.loads(run.stdout) for run in runs]


def test_importing_takes_at_most_0_3_seconds_beyond_torch(imports: list[dict[str, Any]]) -> None:
    assert min(run["seconds"] for run in imports) <= 0.3


def test_importing_changes_no_setting_of_torch(imports: list[dict[str, Any]]) -> None:
    assert [run["changed"] for run in imports] == [{}] * 3


def test_importing_leaves_the_compiler_and_other_libraries_alone(imports: list[dict[str, Any]]) -> None:
    assert [run["imported"] for run in imports] == [[]] * 3


# -- the public surface ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [sliceout, sliceout.nn], ids=lambda m: m.__name__)
def test_public_names_exist_and_have_docstrings(module: Any) -> None:
    assert len(set(module.__all__)) == len(module.__all__)
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert missing == []
    bare = [name for name in module.__all__ if not inspect.getdoc(vars(module)[name])]
    assert bare == []


def test_public_names_are_all_that_the_surface_imports() -> None:
    """What is imported in ``__init__.py`` is there to be used: nothing is public by accident."""
    imported = {
        alias.asname or alias.name
        for node in ast.parse((LIBRARY / "__init__.py").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == set(sliceout.__all__)


# -- private names -----------------------------------------------------------------------------------------------------


def modules() -> Iterator[tuple[str, str, Path]]:
    """Name, package and file of every module of ours."""
    for top, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = (top, *file.relative_to(folder).with_suffix("").parts)
            if parts[-1] == "__init__":
                yield ".".join(parts[:-1]), ".".join(parts[:-1]), file
            else:
                yield ".".join(parts), ".".join(parts[:-1]), file


OURS = {name: package for name, package, _ in modules()}


def imported_from(node: ast.ImportFrom, package: str) -> str:
    """The module that names are imported from, in full."""
    if not node.level:
        return node.module or ""
    base = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def private_uses(package: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names with a leading underscore that a module takes from another package of ours, with their lines.

    Imported by name, or as an attribute of an imported module: ``drawing._changed``.
    """
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = imported_from(node, package)
            for alias in node.names:
                target = f"{source}.{alias.name}"
                if target in OURS:
                    known[alias.asname or alias.name] = target
                private = alias.name.startswith("_") and not alias.name.startswith("__")
                if private and source in OURS and OURS[source] != package:
                    yield node.lineno, target
        elif isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname and alias.name in OURS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            target = known[node.value.id]
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            if private and OURS[target] != package:
                yield node.lineno, f"{target}.{node.attr}"


def test_no_package_uses_private_names_of_another() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line} {target}"
        for _, package, file in modules()
        for line, target in private_uses(package, ast.parse(file.read_text()))
    ]
    assert found == []


def test_private_uses_are_found() -> None:
    text = "from ..drawing import _Ahead\nfrom . import base\nfrom .. import drawing as d\nd._changed()\nbase._axes()\n"
    assert list(private_uses("sliceout.nn", ast.parse(text))) == [
        (1, "sliceout.drawing._Ahead"), (4, "sliceout.drawing._changed"),
    ]  # fmt: skip

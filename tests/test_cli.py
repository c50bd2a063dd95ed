"""The command line of the library: help, mistakes, what it needs, and that the library does without it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sliceout.cli import app as cli


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)


def test_help_lists_commands_and_options(capsys) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "inspect" in text
    assert "bench" in text
    assert cli.main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--batch", "--rates", "--schemes", "--modes", "--precision", "--out", "--device"):
        assert option in text


def test_without_arguments_the_help_is_shown_and_nothing_is_complained_about(capsys) -> None:
    assert cli.main([]) == 2
    said = capsys.readouterr()
    assert "inspect" in said.out
    assert "sliceout: " not in said.err


def test_unknown_command(capsys) -> None:
    assert cli.main(["dmeo"]) == 2
    assert capsys.readouterr().err.startswith("sliceout: No such command 'dmeo'")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_cli_extra_one_line_says_so(missing: str) -> None:
    arguments = "sys.argv[1:] = ['bench', 'torch.nn:ReLU']"
    done = python(f"import sys; sys.modules[{missing!r}] = None; {arguments}; import sliceout.__main__ as m; m.main()")
    assert done.returncode == 1
    assert done.stderr == f"sliceout: the command line needs {missing}, which is missing: pip install 'sliceout[cli]'\n"


def test_the_core_does_not_import_the_lab() -> None:
    names = ("sliceout_lab", "sliceout.cli", "typer", "rich", "matplotlib")
    code = f"import sys, sliceout; print([m for m in {names} if m in sys.modules])"
    assert python(code).stdout == "[]\n"


def test_importing_the_library_does_not_import_the_compiler_or_the_lab() -> None:
    code = "import sys, sliceout; print([m for m in ('torch._dynamo', 'sliceout_lab') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

"""The Triton kernels: through the interpreter wherever triton is installed, natively where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

HERE = Path(__file__).parent


@pytest.mark.slow
def test_kernels_agree_with_the_definition_through_the_interpreter():
    """The same Python that Triton compiles, run on the CPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
    paths = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*command, "kernel_checks.py"],
        cwd=HERE,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if run.returncode:
        pytest.fail(f"{run.stdout[-8000:]}\n{run.stderr[-4000:]}", pytrace=False)
    assert " passed" in run.stdout


if torch.cuda.is_available():
    from kernel_checks import *  # noqa: F403  # collected here too, and compiled for the GPU

    pytestmark = pytest.mark.cuda

"""Options that several commands check alike."""

from __future__ import annotations

from pathlib import Path

from .. import LabError


def find_device(name: str) -> str:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise LabError(f"--device {name}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise LabError("--device cuda: this machine has no CUDA device that torch can use; try --device cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def make_folder(path: Path, option: str = "--out") -> None:
    """Before anything is trained: a result that cannot be saved is found out early."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".writable").touch()
        (path / ".writable").unlink()
    except OSError as error:
        raise LabError(f"{option} {path}: cannot write there ({error.strerror})") from error

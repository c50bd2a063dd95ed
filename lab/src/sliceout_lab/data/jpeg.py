"""JPEG images as tensors of one size, by Pillow; damage is reported with the name of the image."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import DataError


def decode(raw: bytes | Path, size: int | None, name: str) -> tuple[Tensor, float]:
    """An image as uint8 ``[3, size, size]``, squeezed to a square, and the width by height that it had.

    Nothing of the image is cut off: whoever crops it later takes the ratio into account. ``size=None`` leaves it as
    it is.

    Raises:
        DataError: naming the image, if it is damaged or cut off.
    """
    pillow = _pillow()
    try:
        with pillow.open(io.BytesIO(raw) if isinstance(raw, bytes) else raw) as image:
            width, height = image.size
            if size is not None and image.format == "JPEG":
                image.draft("RGB", (size, size))  # decode no more than is needed: JPEG can halve and quarter
            picture = image.convert("RGB")
            if size is not None and picture.size != (size, size):
                picture = picture.resize(
                    (size, size), pillow.Resampling.BOX if size < 64 else pillow.Resampling.BICUBIC
                )
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise DataError(f"{name}: damaged image ({error})") from error
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width, 3)
    return pixels.permute(2, 0, 1), width / height


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise DataError("reading images needs Pillow, which is missing: pip install pillow") from error
    return Image

"""Carry CIFAR-10 in little space: lossless WebP, about 100 MB instead of 184, in three files that each stand alone.

    python tools/pack_cifar.py pack data/cifar-10-batches-bin data/packed
    python tools/pack_cifar.py unpack data/packed data            # writes data/cifar-10-batches-bin

Unpacking needs Pillow and numpy. It writes every batch that a piece at hand holds, and only if its SHA-1 is that of
the official file: pieces may arrive one at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

SHA1 = {  # of the official batches of the binary version
    "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c",
}
PIECES = (("data_batch_1.bin", "data_batch_2.bin"), ("data_batch_3.bin", "data_batch_4.bin"))
PIECES += (("data_batch_5.bin", "test_batch.bin"),)
STACK = 500  # images one above the other in a picture: WebP ends at 16,383 lines


def pack(source: Path, dest: Path) -> None:
    dest.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        for number, names in enumerate(PIECES):
            piece = dest / f"cifar-10-{number}.zip"
            with zipfile.ZipFile(piece, "w", zipfile.ZIP_STORED) as archive:
                for name in names:
                    raw = (source / name).read_bytes()
                    check(name, raw)
                    rows = np.frombuffer(raw, np.uint8).reshape(-1, 3073)
                    archive.writestr(f"{name}/labels", rows[:, 0].tobytes())
                    pixels = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
                    stacks = [pixels[i : i + STACK].reshape(-1, 32, 3) for i in range(0, len(pixels), STACK)]
                    for i, webp in enumerate(pool.map(encode, stacks)):
                        archive.writestr(f"{name}/{i:03}.webp", webp)
            print(f"{piece}  {piece.stat().st_size / 1e6:.1f} MB")


def unpack(source: Path, dest: Path) -> None:
    dest = dest / "cifar-10-batches-bin"
    dest.mkdir(parents=True, exist_ok=True)
    pieces = sorted(source.glob("cifar-10-*.zip"))
    if not pieces:
        sys.exit(f"{source}: holds no cifar-10-*.zip")
    with ThreadPoolExecutor() as pool:
        for piece in pieces:
            with zipfile.ZipFile(piece) as archive:
                for name in sorted({Path(n).parts[0] for n in archive.namelist()}):
                    stacks = sorted(n for n in archive.namelist() if n.startswith(f"{name}/") and n.endswith(".webp"))
                    labels = np.frombuffer(archive.read(f"{name}/labels"), np.uint8)
                    pixels = np.concatenate(list(pool.map(decode, [archive.read(n) for n in stacks])))
                    planes = pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2).reshape(-1, 3072)
                    raw = np.concatenate([labels[:, None], planes], axis=1).tobytes()
                    check(name, raw)
                    part = dest / f"{name}.part"
                    part.write_bytes(raw)
                    os.replace(part, dest / name)
                    print(f"{dest / name}  verified")


def check(name: str, raw: bytes) -> None:
    if (got := hashlib.sha1(raw).hexdigest()) != SHA1[name]:
        sys.exit(f"{name}: SHA-1 {got}, the official file has {SHA1[name]}; not written")


def encode(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(out, "WEBP", lossless=True, method=4, quality=75, exact=True)
    return out.getvalue()


def decode(webp: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(webp)).convert("RGB"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["pack", "unpack"])
    parser.add_argument("source", type=Path)
    parser.add_argument("dest", type=Path)
    args = parser.parse_args()
    (pack if args.action == "pack" else unpack)(args.source, args.dest)


if __name__ == "__main__":
    main()

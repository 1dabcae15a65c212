"""Encoded pictures for tests."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def picture(
    width: int, height: int, color: str = "red", *, format: str = "PNG", **options: object
) -> bytes:
    """A picture of one colour."""
    encoded = io.BytesIO()
    Image.new("RGB", (width, height), color).save(encoded, format, **options)
    return encoded.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that announces a size and has no pixels: decoding it fails, reading its header does
    not.
    """

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def picture_rows(folder: Path, count: int) -> Path:
    """A JSONL file of questions in verl's columns, each about a picture of its own, 56 pixels wide
    and high.
    """
    for i in range(count):
        noise = np.random.default_rng(i).integers(0, 256, (56, 56, 3), np.uint8)
        Image.fromarray(noise).save(folder / f"{i}.png")
    rows = [
        {
            "id": f"picture-{i}",
            "prompt": [{"role": "user", "content": f"<image>What is shown in picture {i}?"}],
            "images": [f"{i}.png"],
        }
        for i in range(count)
    ]
    data = folder / "pictures.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return data

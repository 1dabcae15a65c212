"""Encoded pictures for tests."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image


def picture(width: int, height: int, color: str = "red", *, format: str = "PNG", **options: object) -> bytes:
    """A picture of one colour."""
    encoded = io.BytesIO()
    Image.new("RGB", (width, height), color).save(encoded, format, **options)
    return encoded.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that announces a size and has no pixels: decoding it fails, reading its header does not."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")

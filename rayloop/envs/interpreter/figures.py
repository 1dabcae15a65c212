"""Pictures that code answers with: a PNG's pixels and nothing beside them, whose decoding costs what the pixels cost."""

from __future__ import annotations

import struct

_BEGIN = b"\x89PNG\r\n\x1a\n"
_OF_PIXELS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))
_MOST_CHUNKS = 4096
"""Pillow writes 64 KiB into each."""


def bare(png: bytes) -> bytes:
    """Without profiles, texts and the like: a megabyte of them can keep a decoder busy for half a minute.

    Raises ValueError when it is no PNG, or has more chunks than Pillow writes.
    """
    if not png.startswith(_BEGIN):
        raise ValueError("it is no PNG")
    kept, at = [_BEGIN], len(_BEGIN)
    for _ in range(_MOST_CHUNKS):
        if at + 12 > len(png):
            raise ValueError("it is cut")
        length, kind = struct.unpack_from(">I4s", png, at)
        end = at + 12 + length
        if kind in _OF_PIXELS:
            kept.append(png[at:end])
        if kind == b"IEND":
            return b"".join(kept)
        at = end
    raise ValueError(f"it has more than {_MOST_CHUNKS} chunks")

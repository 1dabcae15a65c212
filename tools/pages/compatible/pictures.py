"""Pictures in every form in which a PNG keeps its pixels, and what the policy is shown of each."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np

from rayloop.data.images import decode

WHITE, BLACK = (255, 255, 255), (0, 0, 0)
GREY, COLOUR, PALETTE, GREY_ALPHA, COLOUR_ALPHA = 0, 2, 3, 4, 6
"""The colour types of a PNG's header."""


def png_of(
    depth: int, kind: int, row: bytes, width: int, transparent: bytes = b"", palette: bytes = b""
) -> bytes:
    """A PNG of one row of pixels, by chunks: PIL writes only some of the forms that it reads."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    made = b"\x89PNG\r\n\x1a\n" + chunk(
        b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, kind, 0, 0, 0)
    )
    made += chunk(b"PLTE", palette) if palette else b""
    made += chunk(b"tRNS", transparent) if transparent else b""
    return made + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")


def words(*values: int) -> bytes:
    return struct.pack(f">{len(values)}H", *values)


PNGS = {
    "1 bit": (png_of(1, GREY, b"\x80", 2), [WHITE, BLACK]),
    "1 bit, black is transparent": (png_of(1, GREY, b"\x80", 2, words(0)), [WHITE, WHITE]),
    "1 bit, white is transparent": (png_of(1, GREY, b"\x80", 2, words(1)), [WHITE, BLACK]),
    "2 bits, 1 is transparent": (png_of(2, GREY, b"\x10", 2, words(1)), [BLACK, WHITE]),
    "4 bits, 1 is transparent": (png_of(4, GREY, b"\x12", 2, words(1)), [WHITE, (34, 34, 34)]),
    "8 bits, 7 is transparent": (png_of(8, GREY, b"\x07\x08", 2, words(7)), [WHITE, (8, 8, 8)]),
    "16 bits": (png_of(16, GREY, words(257, 32896), 2), [(1, 1, 1), (128, 128, 128)]),
    "16 bits, 1000 is transparent": (
        png_of(16, GREY, words(1000, 1028), 2, words(1000)),
        [WHITE, (4, 4, 4)],
    ),
    "48 bits": (png_of(16, COLOUR, words(257, 514, 771), 1), [(1, 2, 3)]),
    "48 bits with a transparent colour": (
        png_of(16, COLOUR, words(257, 514, 771), 1, words(257, 514, 771)),
        [WHITE],
    ),
    "24 bits with a transparent colour": (
        png_of(8, COLOUR, b"\1\2\3\4\5\6", 2, words(1, 2, 3)),
        [WHITE, (4, 5, 6)],
    ),
    "grey with alpha": (png_of(8, GREY_ALPHA, b"\0\0\0\xff", 2), [WHITE, BLACK]),
    "16 bits of grey with alpha": (
        png_of(16, GREY_ALPHA, words(0, 0, 0, 65535), 2),
        [WHITE, BLACK],
    ),
    "colour with alpha, one half transparent": (
        png_of(8, COLOUR_ALPHA, b"\0\0\0\0\0\0\0\x80", 2),
        [WHITE, (127, 127, 127)],
    ),
    "64 bits": (png_of(16, COLOUR_ALPHA, words(0, 0, 0, 0, 0, 0, 0, 65535), 2), [WHITE, BLACK]),
    "palette": (png_of(8, PALETTE, b"\0\1", 2, palette=b"\1\2\3\4\5\6"), [(1, 2, 3), (4, 5, 6)]),
    "palette with a transparent entry": (
        png_of(8, PALETTE, b"\0\1", 2, b"\0", b"\1\2\3\4\5\6"),
        [WHITE, (4, 5, 6)],
    ),
    "palette with half transparent entries": (
        png_of(8, PALETTE, b"\0\1", 2, b"\x80\xff", bytes(6)),
        [(127, 127, 127), BLACK],
    ),
}


HEADER = """## Pictures

Each form in which a PNG keeps its pixels: the colours that the policy is shown, one after the
other. Transparent ones get the white background of vLLM and qwen-vl-utils; 16 bits become the
nearest of 8.

| PNG | colours shown |
|---|---|"""


def section() -> Iterator[str]:
    """The lines of the section."""
    yield HEADER
    for name, (data, _) in PNGS.items():
        yield f"| {name} | {', '.join(shown(data))} |"


def shown(data: bytes) -> list[str]:
    """The colours of a picture's first row of pixels, as ``#rrggbb``."""
    first_row = np.asarray(decode(data))[0]
    return ["#" + bytes(pixel).hex() for pixel in first_row]

"""What a picture of an answer may hold beside its pixels: nothing."""

from __future__ import annotations

import io
import struct
import time
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from rayloop.core.types import ImageSource
from rayloop.data.images import probe
from rayloop.envs.interpreter.environment import bare

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 40, 4), np.uint8)


def encoded(mode: str = "RGBA", kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunks(*chunks: bytes) -> bytes:
    """Behind the header, where a decoder reads them before it knows of any pixel."""
    return (png := encoded())[:33] + b"".join(chunks) + png[33:]


@pytest.mark.parametrize("mode", ["RGBA", "RGB", "L", "P", "1", "LA", "I;16"])
def test_pixels_stay_as_they_are(mode: str) -> None:
    said = PngImagePlugin.PngInfo()
    said.add_text("Software", "Matplotlib")
    png = encoded(mode, pnginfo=said, dpi=(100, 100), icc_profile=b"x" * 99)
    with Image.open(io.BytesIO(png)) as before, Image.open(io.BytesIO(bare(png))) as after:
        assert np.array_equal(before.convert("RGBA"), after.convert("RGBA"))
        assert before.info
        assert not after.info.keys() - {"transparency"}


def test_what_is_no_png_is_refused_before_it_is_decoded() -> None:
    for kind in ("JPEG", "WEBP", "GIF"):
        with pytest.raises(ValueError, match="not a PNG"):
            bare(encoded("RGB", kind))
    for broken in (
        b"",
        b"no",
        encoded()[:20],
        encoded()[:-12],
        struct.pack(">8sI4s", encoded()[:8], 2**32 - 1, b"IDAT"),
    ):
        with pytest.raises(ValueError, match=r"it is (not a PNG|cut)"):
            bare(broken)


@pytest.mark.parametrize(
    "many",
    [
        with_chunks(*[chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(1 << 20), 9))] * 2000),
        with_chunks(*[chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(1 << 16), 9))] * 4000),
        with_chunks(*[chunk(b"tEXt", b"x\0y")] * 200_000),
        with_chunks(*[chunk(b"IDAT", b"")] * 200_000),
    ],
    ids=["profiles", "compressed texts", "texts", "empty parts"],
)
def test_what_costs_more_than_its_pixels_is_not_decoded(many: bytes) -> None:
    began = time.thread_time()
    with suppress(ValueError):  # or nothing is left of them
        probe(ImageSource(data=bare(many)))
    assert time.thread_time() - began < 0.5

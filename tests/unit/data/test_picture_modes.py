"""What the policy is shown of a picture, for each way in which its file keeps pixels."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rayloop.core.failures import DataFailure
from rayloop.data.images import decode, portable
from rayloop.data.published.prepare import Pictures
from rayloop.sandbox.cells import Video
from rayloop.sandbox.pictures import rgb

WHITE, BLACK = (255, 255, 255), (0, 0, 0)
GREY, COLOUR, PALETTE, GREY_ALPHA, COLOUR_ALPHA = 0, 2, 3, 4, 6
"""The colour types of a PNG's header."""


def png_of(depth: int, kind: int, row: bytes, width: int, transparent: bytes = b"", palette: bytes = b"") -> bytes:
    """A PNG of one row of pixels, chunk by chunk: PIL writes only some of the forms that it reads."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    made = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, kind, 0, 0, 0))
    made += chunk(b"PLTE", palette) if palette else b""
    made += chunk(b"tRNS", transparent) if transparent else b""
    return made + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


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
    "16 bits, 1000 is transparent": (png_of(16, GREY, words(1000, 1028), 2, words(1000)), [WHITE, (4, 4, 4)]),
    "48 bits": (png_of(16, COLOUR, words(257, 514, 771), 1), [(1, 2, 3)]),
    "48 bits with a transparent colour": (png_of(16, COLOUR, words(257, 514, 771), 1, words(257, 514, 771)), [WHITE]),
    "24 bits with a transparent colour": (png_of(8, COLOUR, b"\1\2\3\4\5\6", 2, words(1, 2, 3)), [WHITE, (4, 5, 6)]),
    "grey with alpha": (png_of(8, GREY_ALPHA, b"\0\0\0\xff", 2), [WHITE, BLACK]),
    "16 bits of grey with alpha": (png_of(16, GREY_ALPHA, words(0, 0, 0, 65535), 2), [WHITE, BLACK]),
    "colour with alpha, one half transparent": (png_of(8, COLOUR_ALPHA, b"\0\0\0\0\0\0\0\x80", 2), [WHITE, (127, 127, 127)]),
    "64 bits": (png_of(16, COLOUR_ALPHA, words(0, 0, 0, 0, 0, 0, 0, 65535), 2), [WHITE, BLACK]),
    "palette": (png_of(8, PALETTE, b"\0\1", 2, palette=b"\1\2\3\4\5\6"), [(1, 2, 3), (4, 5, 6)]),
    "palette with a transparent entry": (png_of(8, PALETTE, b"\0\1", 2, b"\0", b"\1\2\3\4\5\6"), [WHITE, (4, 5, 6)]),
    "palette with half transparent entries": (png_of(8, PALETTE, b"\0\1", 2, b"\x80\xff", bytes(6)), [(127, 127, 127), BLACK]),
}


@pytest.mark.parametrize("name", PNGS)
def test_a_png_shows_what_its_header_says(name: str) -> None:
    data, shown = PNGS[name]
    assert [tuple(pixel) for pixel in np.asarray(decode(data))[0].tolist()] == shown


def test_a_ramp_of_16_bits_is_shown_from_black_to_white() -> None:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    shown = np.asarray(decode(saved(Image.fromarray(ramp), "PNG")))
    assert np.array_equal(shown[..., 0], np.rint(ramp / 257).astype(np.uint8))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparent_pixels_are_blended_with_white_as_vllm_and_qwen_vl_utils_do(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 4), np.uint8)
    data = saved(Image.fromarray(noise), kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    theirs = Image.new("RGB", (16, 16), WHITE)
    theirs.paste(Image.fromarray(noise), mask=Image.fromarray(noise).split()[3])
    assert np.array_equal(np.asarray(decode(data)), np.asarray(theirs))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_unknown_range_are_refused_when_a_data_set_is_prepared(mode: str, tmp_path: Path) -> None:
    (tmp_path / "depth.tiff").write_bytes(saved(Image.new(mode, (4, 4)), "TIFF"))
    with pytest.raises(DataFailure, match=rf"numbers of 32 bits \(mode {mode}\) of unknown range. Save it with 8 or 16 bits"):
        Pictures(tmp_path / "out", tmp_path, ()).keep("depth.tiff", str(tmp_path), "row 1")


def test_a_picture_that_is_converted_for_a_data_set_shows_the_same(tmp_path: Path) -> None:
    clear = Image.new("LA", (2, 1), (0, 0))
    clear.putpixel((1, 0), (0, 255))
    (tmp_path / "icon.tiff").write_bytes(saved(clear, "TIFF"))
    (tmp_path / "depth.tiff").write_bytes(saved(Image.fromarray(np.array([[0, 32896]], np.uint16)), "TIFF"))
    pictures = Pictures(tmp_path / "out", tmp_path, ())
    shown = {}
    for name in ("icon", "depth"):
        path, _, _ = pictures.keep(f"{name}.tiff", str(tmp_path), "row 1")
        shown[name] = np.asarray(decode((tmp_path / "out" / path).read_bytes()))[0, :, 0].tolist()
    assert shown == {"icon": [255, 0], "depth": [0, 128]}


def test_code_in_the_sandbox_finds_the_pixels_that_the_policy_is_shown() -> None:
    data, _ = PNGS["colour with alpha, one half transparent"]
    assert np.asarray(rgb(Image.open(io.BytesIO(data)))).tolist() == np.asarray(decode(data)).tolist()
    assert np.asarray(Video([data], 1.0)[0]).tolist() == np.asarray(decode(data)).tolist()


def test_a_program_that_decodes_by_itself_is_sent_what_the_policy_is_shown() -> None:
    plain = saved(Image.new("RGB", (4, 4), (1, 2, 3)), "JPEG")
    assert portable(plain) == plain
    turned = Image.Exif()
    turned[0x0112] = 6
    for data in (PNGS["16 bits"][0], PNGS["grey with alpha"][0], saved(Image.new("RGB", (4, 2)), "JPEG", exif=turned)):
        sent = portable(data)
        with Image.open(io.BytesIO(sent)) as opened:
            assert opened.mode == "RGB"
            assert np.array_equal(np.asarray(opened), np.asarray(decode(data)))

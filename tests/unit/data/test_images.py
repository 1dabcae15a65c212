"""Images are checked before they are decoded, and sized as the processor sizes them."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rayloop.core.failures import DataFailure, ImageRefused
from rayloop.core.types import ImageSource
from rayloop.data.images import (
    MAX_ANSWER_COST_PIXELS,
    ImageGeometry,
    PromptImages,
    decode,
    decoding,
    image_ref,
    looked_at,
    probe,
    tinted,
)
from rayloop.data.resizing import smart_resize
from tests.support.pictures import picture, png_header

LIMIT = 50_000_000
SIDES = st.integers(min_value=1, max_value=4000)


@given(
    height=SIDES,
    width=SIDES,
    pixels=st.tuples(st.integers(784, 50_000), st.integers(50_000, 2_000_000)),
)
@settings(max_examples=300)
def test_smart_resize_equals_the_processors(
    height: int, width: int, pixels: tuple[int, int]
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as original

    if max(height, width) > 200 * min(height, width):
        return
    assert smart_resize(height, width, 28, *pixels) == original(height, width, 28, *pixels)


@given(
    height=SIDES,
    width=SIDES,
    pixels=st.tuples(st.integers(784, 50_000), st.integers(50_000, 2_000_000)),
)
@settings(max_examples=300)
def test_sides_below_a_token_are_enlarged_as_the_processor_of_glm_does(
    height: int, width: int, pixels: tuple[int, int]
) -> None:
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as original

    if max(height, width) > 100 * min(height, width):
        return
    _, rows, columns = ImageGeometry(14, 2, *pixels, enlarges=True).grid(height, width)
    assert (14 * rows, 14 * columns) == original(
        2, height, width, 2, 28, 2 * pixels[0], 2 * pixels[1]
    )


@given(height=SIDES, width=SIDES, most=st.integers(1, 12))
@settings(max_examples=300)
def test_tiles_are_those_of_the_processor_of_internvl(height: int, width: int, most: int) -> None:
    from transformers import GotOcr2ImageProcessorPil

    geometry = ImageGeometry(14, 2, 1, most * 448 * 448, tile=448)
    processor = GotOcr2ImageProcessorPil(
        crop_to_patches=True, max_patches=most, size={"height": 448, "width": 448}
    )
    assert geometry.grid(height, width) == (
        processor.get_number_of_image_patches(height, width),
        32,
        32,
    )


@pytest.mark.parametrize(
    ("width", "height"), [(160, 210), (28, 28), (10, 1500), (1920, 1080), (5, 5)]
)
def test_a_reference_has_the_processors_grid(width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    data = picture(width, height)
    ref = image_ref(data, width, height, ImageGeometry(14, 2, 784, 200_000))
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 784, "longest_edge": 200_000})
    grid = processor(images=[decode(data)], return_tensors="pt")["image_grid_thw"][0]
    assert ref.grid == tuple(grid.tolist())
    assert ref.tokens == grid.prod().item() // 4
    assert ref.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_an_intact_image_is_returned_with_its_size(format: str, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(picture(40, 30, format=format))
    assert probe(ImageSource(path=str(path)), LIMIT) == (path.read_bytes(), 40, 30)


@pytest.mark.parametrize("side", [8000, 12_000, 30_000])
def test_a_bomb_is_refused_by_its_header(side: int) -> None:
    before = Image.MAX_IMAGE_PIXELS
    with pytest.raises(ImageRefused, match="limit is 50000000"):
        probe(ImageSource(data=png_header(side, side)), LIMIT)
    assert before == Image.MAX_IMAGE_PIXELS


def test_an_extreme_aspect_ratio_is_refused() -> None:
    assert probe(ImageSource(data=picture(2000, 10)), LIMIT)[1:] == (2000, 10)
    with pytest.raises(ImageRefused, match="aspect ratio"):
        probe(ImageSource(data=picture(2010, 10)), LIMIT)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9])
def test_a_truncated_file_is_found(format: str, kept: float, tmp_path: Path) -> None:
    noise = Image.effect_noise((200, 200), 90).convert("RGB")
    path = tmp_path / "cut.img"
    noise.save(path, format)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(DataFailure, match=r"cut\.img"):
        probe(ImageSource(path=str(path)), LIMIT)


@pytest.mark.parametrize("format", ["GIF", "BMP", "TIFF"])
def test_an_image_of_another_format_is_named(format: str) -> None:
    with pytest.raises(
        DataFailure, match=f"not a readable PNG/JPEG/WEBP image: it is a {format}; convert it$"
    ):
        probe(ImageSource(data=picture(40, 30, format=format)), LIMIT)


@pytest.mark.parametrize(
    "content", [b"", b"not an image", b"GIF89a" + bytes(40), png_header(10, 10)]
)
def test_what_is_no_image_is_a_data_failure(content: bytes) -> None:
    with pytest.raises(DataFailure):
        probe(ImageSource(data=content), LIMIT)


@pytest.mark.parametrize("name", ["missing.png", "", "a\0b", "x" * 5000])
def test_a_file_that_cannot_be_read_is_a_data_failure(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataFailure) as failure:
        probe(ImageSource(path=f"{tmp_path}/{name}"), LIMIT)
    assert failure.value.path == f"{tmp_path}/{name}"


def test_orientation_turns_size_and_pixels_alike() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = picture(40, 30, format="JPEG", exif=exif)
    assert probe(ImageSource(data=data), LIMIT)[1:] == (30, 40)
    assert decode(data).size == (30, 40)


def test_a_tint_shows_position_and_keeps_the_page() -> None:
    file = io.BytesIO()
    Image.new("RGB", (5, 3), (100, 100, 100)).save(file, "PNG")
    pixels = decode(tinted(file.getvalue(), 0.5)).load()
    assert pixels[0, 0] == (50, 50, 50)
    assert pixels[4, 0] == (178, 50, 50)
    assert pixels[0, 2] == (50, 50, 178)


def test_what_decoding_takes_is_known_by_the_header() -> None:
    deep = Image.new("I;16", (100, 100))
    encoded = io.BytesIO()
    deep.save(encoded, "PNG")
    interlaced = bytearray(picture(100, 100))
    interlaced[28] = 1
    interlaced[29:33] = struct.pack(">I", zlib.crc32(interlaced[12:29]))
    assert decoding(picture(100, 100)) == 10_000
    assert decoding(encoded.getvalue()) == 10_000, "16 bits of grey are less than 24"
    assert decoding(bytes(interlaced)) == 20_000
    assert (
        decoding(picture(100, 100, format="JPEG"))
        == decoding(picture(100, 100, format="WEBP"))
        == 10_000
    )
    assert decoding(picture(100, 100, format="JPEG") + b"\xff\xda" * 500) == 500_000, (
        "as many scans as it says"
    )
    assert decoding(png_header(4000, 4000)) == 16_000_000
    assert decoding(b"") is decoding(b"\x89PNG\r\n\x1a\n") is None


def test_pictures_of_an_answer_share_a_budget_and_are_decoded_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    decoded: list[int] = []

    def counted(data: bytes) -> Image.Image:
        decoded.append(len(data))
        return decode(data)

    monkeypatch.setattr("rayloop.data.images.decode", counted)
    small, broken, forged = picture(56, 28), picture(56, 56)[:-9], png_header(7000, 7000)
    file = tmp_path / "gone.png"
    given = [ImageSource(data=data) for data in (small, broken, forged, forged, small)] + [
        ImageSource(path=str(file))
    ]
    first, *none, last, path = looked_at(given)
    assert none == [None, None, None]
    assert first == last == ImageSource(data=small)
    assert path == ImageSource(path=str(file)), "a file is not the policy's"
    assert len(decoded) == 3, (
        "the second of the large ones is not looked at: both are more than an answer may have"
    )
    images = PromptImages(ImageGeometry(14, 2, 784, 50_000))
    assert first is not None
    assert images.of(first, keep_file=False).ref.width == 56
    assert len(decoded) == 3
    with pytest.raises(ImageRefused):
        PromptImages(ImageGeometry(14, 2, 784, 50_000), max_pixels=100).of(first, keep_file=False)
    assert looked_at([ImageSource(data=small)], until=0.0) == [None], "its turn came too late"
    assert MAX_ANSWER_COST_PIXELS < 2 * 7000 * 7000

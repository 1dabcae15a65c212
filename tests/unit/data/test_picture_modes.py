"""What the policy is shown of a picture, for each way in which its file keeps pixels."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rayloop.core.failures import DataFailure
from rayloop.data.images import decode, portable
from rayloop.data.published.pictures import Pictures
from rayloop.sandbox.cells import Video
from rayloop.sandbox.pictures import rgb
from tools.pages.compatible.pictures import PNGS, WHITE


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


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
    data = saved(
        Image.fromarray(noise),
        kind,
        **({"lossless": True, "exact": True} if kind == "WEBP" else {}),
    )
    theirs = Image.new("RGB", (16, 16), WHITE)
    theirs.paste(Image.fromarray(noise), mask=Image.fromarray(noise).split()[3])
    assert np.array_equal(np.asarray(decode(data)), np.asarray(theirs))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_unknown_range_are_refused_when_a_data_set_is_prepared(
    mode: str, tmp_path: Path
) -> None:
    (tmp_path / "depth.tiff").write_bytes(saved(Image.new(mode, (4, 4)), "TIFF"))
    with pytest.raises(
        DataFailure,
        match=rf"numbers of 32 bits \(mode {mode}\) of unknown range. Save it with 8 or 16 bits",
    ):
        Pictures(tmp_path / "out", tmp_path, ()).keep("depth.tiff", str(tmp_path), "row 1")


def test_a_picture_that_is_converted_for_a_data_set_shows_the_same(tmp_path: Path) -> None:
    clear = Image.new("LA", (2, 1), (0, 0))
    clear.putpixel((1, 0), (0, 255))
    (tmp_path / "icon.tiff").write_bytes(saved(clear, "TIFF"))
    (tmp_path / "depth.tiff").write_bytes(
        saved(Image.fromarray(np.array([[0, 32896]], np.uint16)), "TIFF")
    )
    pictures = Pictures(tmp_path / "out", tmp_path, ())
    shown = {}
    for name in ("icon", "depth"):
        path, _, _ = pictures.keep(f"{name}.tiff", str(tmp_path), "row 1")
        shown[name] = np.asarray(decode((tmp_path / "out" / path).read_bytes()))[0, :, 0].tolist()
    assert shown == {"icon": [255, 0], "depth": [0, 128]}


def test_code_in_the_sandbox_finds_the_pixels_that_the_policy_is_shown() -> None:
    data, _ = PNGS["colour with alpha, one half transparent"]
    assert (
        np.asarray(rgb(Image.open(io.BytesIO(data)))).tolist() == np.asarray(decode(data)).tolist()
    )
    assert np.asarray(Video([data], 1.0)[0]).tolist() == np.asarray(decode(data)).tolist()


def test_a_program_that_decodes_by_itself_is_sent_what_the_policy_is_shown() -> None:
    plain = saved(Image.new("RGB", (4, 4), (1, 2, 3)), "JPEG")
    assert portable(plain) == plain
    turned = Image.Exif()
    turned[0x0112] = 6
    for data in (
        PNGS["16 bits"][0],
        PNGS["grey with alpha"][0],
        saved(Image.new("RGB", (4, 2)), "JPEG", exif=turned),
    ):
        sent = portable(data)
        with Image.open(io.BytesIO(sent)) as opened:
            assert opened.mode == "RGB"
            assert np.array_equal(np.asarray(opened), np.asarray(decode(data)))

"""Images as prompts name them: looked at once per file and per content, again when the file
changed, and within a limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayloop.core.failures import DataFailure
from rayloop.core.types import ImageSource
from rayloop.data import images as prompt_images
from rayloop.data.images import (
    CACHED_NAME_BYTES,
    ImageGeometry,
    PromptImages,
    image_ref,
    probe,
    tinted,
)
from tests.support.pictures import picture

GEOMETRY = ImageGeometry(14, 2, 784, 200_000)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ImageSource]]:
    """What was really looked at."""
    found: list[ImageSource] = []

    def counted(source: ImageSource, limit: int) -> tuple[bytes, int, int]:
        found.append(source)
        return probe(source, limit)

    monkeypatch.setattr(prompt_images, "probe", counted)
    return found


def saved(folder: Path, data: bytes, name: str = "page.png") -> ImageSource:
    (folder / name).write_bytes(data)
    return ImageSource(path=str(folder / name))


def test_a_file_is_looked_at_once_until_it_changes(
    looks: list[ImageSource], tmp_path: Path
) -> None:
    images, first, second = PromptImages(GEOMETRY), picture(40, 30), picture(56, 84)
    source = saved(tmp_path, first)
    for _ in range(3):
        named = images.of(source, keep_file=True)
        assert (named.ref.path, named.data, named.ref.width) == (source.path, None, 40)
    assert len(looks) == 1
    assert saved(tmp_path, second) == source
    changed = images.of(source, keep_file=True)
    assert (changed.ref.width, len(looks)) == (56, 2)
    os.utime(str(source.path), ns=(1, 1))
    assert images.of(source, keep_file=True) == changed
    assert len(looks) == 3


def test_a_file_that_the_engine_does_not_read_comes_with_its_bytes(
    looks: list[ImageSource], tmp_path: Path
) -> None:
    images, data = PromptImages(GEOMETRY), picture(40, 30)
    source = saved(tmp_path, data)
    assert images.of(source, keep_file=True).data is None
    for _ in range(2):
        given = images.of(source, keep_file=False)
        assert (given.data, given.ref) == (data, image_ref(data, 40, 30, GEOMETRY))
    assert len(looks) == 2, "once by name, once with its bytes"


def test_equal_bytes_are_looked_at_once_and_not_kept(looks: list[ImageSource]) -> None:
    images, data = PromptImages(GEOMETRY, kept=CACHED_NAME_BYTES), picture(40, 30)
    for _ in range(3):
        copied = bytes(bytearray(data))
        found = images.of(ImageSource(data=copied), keep_file=True)
        assert found.data is copied
        assert found.ref == image_ref(data, 40, 30, GEOMETRY)
    assert len(looks) == 1


def test_a_tinted_image_is_made_once(looks: list[ImageSource], tmp_path: Path) -> None:
    images, data = PromptImages(GEOMETRY, tint=0.3), picture(40, 30)
    expected = tinted(data, 0.3)
    source = saved(tmp_path, data)
    for shown in (source, ImageSource(data=data)):
        for _ in range(2):
            found = images.of(shown, keep_file=True)
            assert (found.data, found.ref) == (expected, image_ref(expected, 40, 30, GEOMETRY))
    assert looks == [source, ImageSource(data=data)]


def test_what_is_kept_has_a_limit(looks: list[ImageSource], tmp_path: Path) -> None:
    pictures = [picture(20 + n, 30) for n in range(4)]
    sources = [saved(tmp_path, data, f"{n}.png") for n, data in enumerate(pictures)]
    room = 2 * CACHED_NAME_BYTES + sum(map(len, pictures[:2]))
    images = PromptImages(GEOMETRY, kept=room)
    for source in (*sources[:2], *sources[:2]):
        images.of(source, keep_file=False)
    assert looks == sources[:2]
    for source in (*sources[2:], sources[0]):
        images.of(source, keep_file=False)
    assert looks == [*sources, sources[0]], "the first had to go"


def test_a_bad_image_stays_bad_until_it_is_mended(looks: list[ImageSource], tmp_path: Path) -> None:
    images, source = PromptImages(GEOMETRY), saved(tmp_path, picture(40, 30)[:50])
    for _ in range(2):
        with pytest.raises(DataFailure, match=r"page\.png"):
            images.of(source, keep_file=True)
    saved(tmp_path, picture(40, 30))
    assert images.of(source, keep_file=True).ref.width == 40
    with pytest.raises(DataFailure, match="cannot be read"):
        images.of(ImageSource(path=str(tmp_path / "none.png")), keep_file=True)
    with pytest.raises(DataFailure, match="neither a path nor bytes"):
        images.of(ImageSource(), keep_file=True)

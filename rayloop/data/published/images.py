"""The images and videos of published rows, as files beside ours: each picture once, by its content."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from rayloop.core.failures import DataFailure
from rayloop.data.dataset import image_entry
from rayloop.data.images import FORMATS, probe
from rayloop.data.images import read as read_image

FRAMES = (".png", ".jpg", ".jpeg", ".webp")
ANIMATED = (".gif", ".webp")
_SUFFIX = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp"}
NAME = 20
"""Hexadecimal digits of a file's name."""


class Pictures:
    """Writes below ``out/images``.

    Paths are looked for below ``folders`` of the data set's ``root``, and beside the row's file.
    """

    def __init__(self, out: Path, root: Path, folders: Sequence[str]) -> None:
        self._out, self._root, self._folders = out, root, folders
        self._sizes: dict[str, tuple[int, int]] = {}

    def keep(self, entry: Any, beside: str, where: str) -> tuple[str, int, int]:
        """The image's path relative to ``out``, its width and height in pixels; other formats than ours become PNG.

        Raises DataFailure.
        """
        data = _plain(self._bytes(entry, beside, where), where)
        name = hashlib.sha256(data).hexdigest()[:NAME]
        with Image.open(io.BytesIO(data)) as image:
            path = f"images/{name}.{_SUFFIX[str(image.format)]}"
        if path not in self._sizes:
            _, width, height = probe(image_entry({"bytes": data}, where, self._root))
            file = self._out / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            self._sizes[path] = width, height
        return path, *self._sizes[path]

    def frames(self, entry: Any, beside: str, where: str) -> list[Any]:
        """A video as the interpreter reads it: the path of an animated picture, or those of its frames in the folder of its name.

        Raises DataFailure for a film (mp4, webm): nothing here takes one apart.
        """
        found: list[Any] = []
        for one in entry if isinstance(entry, list | tuple) else (entry,):
            path = self._found(str(one), beside, where, or_folder=True)
            folder = path if path.is_dir() else path.with_suffix("")
            if path.suffix.lower() in ANIMATED and path.is_file():
                found.append(str(path.resolve()))
            elif folder.is_dir() and (shots := sorted(p for p in folder.iterdir() if p.suffix.lower() in FRAMES)):
                found.append([str(shot.resolve()) for shot in shots])
            else:
                made = f"mkdir {folder}; ffmpeg -i {path} -vf fps=2 {folder}/%05d.jpg"
                raise DataFailure(where, f"{path} is a film; take it apart first, for example: {made}")
        return found

    def _bytes(self, entry: Any, beside: str, where: str) -> bytes:
        value = entry
        if isinstance(entry, Mapping) and entry.get("bytes") is None:
            value = entry.get("path") or entry.get("image")
        if isinstance(value, str) and (encoded := _base64(value)) is not None:
            return encoded
        if isinstance(value, str) and not value.startswith("data:"):
            return self._found(value, beside, where).read_bytes()
        return read_image(image_entry(value, where, self._root))

    def _found(self, name: str, beside: str, where: str, or_folder: bool = False) -> Path:
        places = [*(self._root / folder / name for folder in self._folders), Path(beside) / name]
        for place in places:
            if place.is_file() or (or_folder and (place.is_dir() or place.with_suffix("").is_dir())):
                return place
        raise DataFailure(where, f"no file {name}; looked for {', '.join(str(place) for place in dict.fromkeys(places))}")


def _base64(text: str) -> bytes | None:
    """The picture that a text encodes; None for a path."""
    if len(text) < 100:
        return None
    try:
        data = base64.b64decode(text, validate=True)
        Image.open(io.BytesIO(data)).close()
    except (binascii.Error, ValueError, OSError):
        return None
    return data


def _plain(data: bytes, where: str) -> bytes:
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.format in FORMATS:
                return data
            file = io.BytesIO()
            image.convert("RGB").save(file, "PNG")
            return file.getvalue()
    except (OSError, ValueError, SyntaxError) as error:
        raise DataFailure(where, f"no readable image: {error}") from error


def fractions(box: Any, kind: str, width: int, height: int, where: str) -> list[float]:
    """Corners [x1, y1, x2, y2] as fractions of an image of ``width`` x ``height`` pixels. Raises DataFailure when they are none.

    ``kind``: as ``ColumnMap.boxes`` says. Nothing is guessed, and nothing moved into the image.
    """
    try:
        a, b, c, d = (float(value) for value in _numbers(box))
    except (TypeError, ValueError) as error:
        raise DataFailure(where, f"a box has four numbers, not {box!r:.100}") from error
    if kind == "pixels_and_size":
        c, d = a + c, b + d
    if kind != "fractions":
        a, b, c, d = a / width, b / height, c / width, d / height
    if not (0 <= a < c <= 1 and 0 <= b < d <= 1):
        raise DataFailure(where, f"the box {box} ({kind}) lies outside the image of {width} x {height} pixels, or is empty")
    return [a, b, c, d]


def _numbers(box: Any) -> Iterable[Any]:
    return box if isinstance(box, Iterable) and not isinstance(box, str) else ()

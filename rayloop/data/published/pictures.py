"""The images and videos of a published data set as files of the prepared one."""

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from rayloop.core.failures import DataFailure, ImageRefused
from rayloop.core.types import ImageSource
from rayloop.data.images import FOREIGN, FORMATS, MAX_PIXELS, probe
from rayloop.data.images import frame as read_frame
from rayloop.data.images import read as read_image
from rayloop.data.messages import image_entry
from rayloop.data.published.video import FRAMES_PER_SECOND, extract_frames
from rayloop.sandbox.pictures import rgb

FRAME_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
ANIMATED_SUFFIXES = (".gif", ".webp")
READ = (*FORMATS, *FOREIGN)
_SUFFIX = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp"}
_NAME_DIGITS = 20
"""Hexadecimal digits of a file's name."""
_MIN_BASE64_CHARACTERS = 100
"""Characters of a text that may be a picture; a shorter one is a path."""


class Pictures:
    """Writes images below ``out/images`` and frames of videos below ``out/frames``.

    Paths are read below ``folders`` of the data set's ``root``, next to the row's file, and by
    their longest end below ``elsewhere``.
    """

    def __init__(
        self,
        out: Path,
        root: Path,
        folders: Sequence[str],
        elsewhere: Path | None = None,
        *,
        fps: float = FRAMES_PER_SECOND,
    ) -> None:
        self._out = out
        self._root = root
        self._folders = folders
        self._elsewhere = elsewhere
        self._fps = fps
        self._sizes: dict[str, tuple[int, int]] = {}

    def keep(self, entry: Any, beside: str, where: str) -> tuple[str, int, int]:
        """The image's path relative to ``out``, its width and its height in pixels.

        Other formats become PNG. Raises DataFailure.
        """
        data = _in_supported_format(self._bytes(entry, beside, where), where)
        name = hashlib.sha256(data).hexdigest()[:_NAME_DIGITS]
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            path = f"images/{name}.{_SUFFIX[str(image.format)]}"
        if path not in self._sizes:
            _, width, height = probe(image_entry({"bytes": data}, where, self._root))
            file = self._out / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            self._sizes[path] = width, height
        return path, *self._sizes[path]

    def frames(self, entry: Any, beside: str, where: str) -> tuple[list[Any], list[float]]:
        """The paths of each video relative to ``out``, and its frames per second.

        An animated picture has one path, any other video a list of its frames' paths; a video is
        taken apart into frames. The rate is 0 except for a video. Raises DataFailure.
        """
        videos: list[Any] = []
        rates: list[float] = []
        for name in entry if isinstance(entry, list | tuple) else (entry,):
            path = self._file(str(name), beside, where, or_folder=True)
            rate = 0.0
            shots = _frame_files(path)
            if path.suffix.lower() in ANIMATED_SUFFIXES and path.is_file():
                videos.append(self._relative(path, alone=True))
            elif shots:
                videos.append([self._relative(shot) for shot in shots])
            else:
                frames, rate = extract_frames(path, self._out / "frames", self._fps, where)
                videos.append([self._relative(frame) for frame in frames])
            rates.append(rate)
        return videos, rates

    def _relative(self, file: Path, alone: bool = False) -> str:
        """The path relative to ``out`` of a picture of a video; ``alone``: of the whole video.

        A picture outside of ``out`` is copied there. Raises DataFailure for any other file.
        """
        out = self._out.resolve()
        file = file.resolve()
        if not file.is_relative_to(out):
            digest = hashlib.sha256(str(file.parent).encode()).hexdigest()[:8]
            copy = out / "frames" / f"{file.parent.name}-{digest}" / file.name
            if not copy.is_file() or copy.stat().st_size != file.stat().st_size:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(read_frame(ImageSource(path=str(file)), alone))
            file = copy
        return str(file.relative_to(out))

    def _bytes(self, entry: Any, beside: str, where: str) -> bytes:
        value = entry
        if isinstance(entry, Mapping) and entry.get("bytes") is None:
            value = entry.get("path") or entry.get("image")
        if isinstance(value, str):
            encoded = _base64(value)
            if encoded is not None:
                return encoded
            if not value.startswith("data:"):
                return read_image(ImageSource(path=str(self._file(value, beside, where))))
        return read_image(image_entry(value, where, self._root))

    def _file(self, name: str, beside: str, where: str, or_folder: bool = False) -> Path:
        """The file (``or_folder``: or the folder of frames) that a row names.

        Raises DataFailure for one that is missing, or outside of the data set.
        """
        places = self._places(name, beside)
        for place in filter(self._inside, places):
            if place.is_file() or (or_folder and _is_folder_of_frames(place)):
                return place
        if any(place.is_file() for place in places):
            raise DataFailure(
                where,
                f"{name} lies outside the data set; --images-root FOLDER says where its files"
                " may be",
            )
        hint = ""
        if Path(name).is_absolute() and not self._elsewhere:
            hint = "; --images-root FOLDER says where such files are here"
        paths = ", ".join(map(str, dict.fromkeys(places)))
        raise DataFailure(where, f"no file {name}; looked for {paths}{hint}")

    def _places(self, name: str, beside: str) -> list[Path]:
        """The paths that a name may stand for, the preferred one first."""
        places = [self._root / folder / name for folder in self._folders]
        places.append(Path(beside) / name)
        if self._elsewhere is not None:
            parts = [part for part in re.split(r"[/\\]", name) if part not in ("", ".", "..")]
            places += [self._elsewhere.joinpath(*parts[start:]) for start in range(len(parts))]
        return places

    def _inside(self, place: Path) -> bool:
        """Whether a place is in the data set, or in the folder of its images, links followed.

        The data set's rows and links may name any file of this machine.
        """
        roots = [self._root]
        if self._elsewhere:
            roots.append(self._elsewhere)
        if self._root.parent.name == "snapshots":  # the Hub's cache, whose files are links
            roots.append(self._root.parent.parent / "blobs")
        target = place.resolve()
        return any(target.is_relative_to(root.resolve()) for root in roots)


def _is_folder_of_frames(place: Path) -> bool:
    """Whether a place is a folder, or there is one of the same name without the suffix."""
    return place.is_dir() or place.with_suffix("").is_dir()


def _frame_files(path: Path) -> list[Path]:
    """The pictures in the folder of a video, sorted; empty without a folder."""
    folder = path if path.is_dir() else path.with_suffix("")
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in FRAME_SUFFIXES)


def _base64(text: str) -> bytes | None:
    """The picture that a text encodes; None for a path."""
    if len(text) < _MIN_BASE64_CHARACTERS:
        return None
    try:
        data = base64.b64decode(text, validate=True)
        Image.open(io.BytesIO(data), formats=READ).close()
    except (binascii.Error, ValueError, OSError):
        return None
    return data


def _in_supported_format(data: bytes, where: str) -> bytes:
    """The picture itself in one of ``FORMATS``, a picture of another format as PNG."""
    try:
        with Image.open(io.BytesIO(data), formats=READ) as image:
            if image.format in FORMATS:
                return data
            if image.width * image.height > MAX_PIXELS:
                raise ImageRefused(
                    where, f"{image.width}x{image.height} pixels, the limit is {MAX_PIXELS} pixels"
                )
            file = io.BytesIO()
            rgb(image).save(file, "PNG")
            return file.getvalue()
    except (OSError, ValueError, SyntaxError) as error:
        raise DataFailure(where, f"no readable image: {error}") from error

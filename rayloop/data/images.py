"""Images: checking a file before it is decoded, the processor's resize rule, and references by
content. PIL and numpy only.
"""

import base64
import errno
import hashlib
import io
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from rayloop.core.failures import DataFailure, ImageRefused, InfrastructureFailure
from rayloop.core.files import NO_CONTENT, content
from rayloop.core.model_families import family
from rayloop.core.threads import Cache
from rayloop.core.types import ImageRef, ImageSource, PromptImage
from rayloop.sandbox.pictures import rgb

FORMATS = ("PNG", "JPEG", "WEBP")
"""The formats that are read. Pillow knows others, some of which start programs (EPS)."""
ANIMATED = ("GIF",)
"""Formats that are read besides ``FORMATS`` where one file may be a whole video."""
FOREIGN = ("GIF", "BMP", "TIFF")
"""Formats that are read besides ``FORMATS`` where a data set is prepared."""
_OTHERS = {b"GI": "GIF", b"BM": "BMP", b"II": "TIFF", b"MM": "TIFF", b"%P": "PDF", b"<s": "SVG"}
"""What files of other formats begin with -> the format.

PIL's own message names the buffer that it read.
"""
MAX_ASPECT = 200
"""Qwen2-VL's processor refuses images with a side longer than this many times the other."""

ORIENTATION = 0x0112
"""The EXIF tag that says how an image is turned; 1: not at all."""

MAX_PIXELS = 50_000_000
"""The most pixels of an image before it is resized.

A larger one is refused before it is decoded (image bombs): 50 million pixels take 150 MB.
"""

MOST_BYTES = 4 * MAX_PIXELS
"""The most bytes of an image's file: a picture of ``MAX_PIXELS`` has fewer in each format that is
read.
"""


def encoding(data: bytes) -> str:
    """``png``, ``webp`` or ``jpeg``: how the bytes of an image are encoded."""
    return "png" if data.startswith(b"\x89PNG") else "webp" if data[8:12] == b"WEBP" else "jpeg"


def data_url(data: bytes) -> str:
    """The bytes of an image as a ``data:`` URL."""
    return f"data:image/{encoding(data)};base64,{base64.b64encode(data).decode()}"


_FILE_AT_FAULT = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    *NO_CONTENT,
)


@dataclass(frozen=True, slots=True)
class ImageGeometry:
    """How a model cuts images: ``patch`` pixels per patch side, ``merge`` x ``merge`` patches per
    image token. ``tile``: pixels of the side of the squares that it cuts an image into, 0: none.
    ``enlarges``: it first enlarges sides below an image token's.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    tile: int = 0
    enlarges: bool = False

    @property
    def factor(self) -> int:
        """Pixels of the side of an image token."""
        return self.patch * self.merge

    @property
    def tiles(self) -> int:
        """The most squares of an image, its thumbnail not counted."""
        return max(1, self.max_pixels // max(1, self.tile**2))

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """(t, h, w) in patches of an image of this size in pixels; t is the number of squares, or
        1.
        """
        if self.tile:
            squares = best_tiles(height, width, self.tile, self.tiles)
            return squares + (squares > 1), self.tile // self.patch, self.tile // self.patch
        if self.enlarges and (scale := self.factor / min(height, width)) > 1:
            height, width = int(height * scale), int(width * scale)
        rows, columns = smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)
        return 1, rows // self.patch, columns // self.patch


def image_geometry(config: Mapping[str, Any], min_pixels: int, max_pixels: int) -> ImageGeometry:
    """Of a model by its config.json. Raises KeyError for a setting that is missing."""
    vision, known = config["vision_config"], family(config.get("model_type", ""))
    if known.images == "tiles":
        patch, tile = (int(np.ravel(vision[name])[0]) for name in ("patch_size", "image_size"))
        return ImageGeometry(
            patch, round(1 / config["downsample_ratio"]), min_pixels, max_pixels, tile
        )
    return ImageGeometry(
        vision["patch_size"],
        vision["spatial_merge_size"],
        min_pixels,
        max_pixels,
        enlarges=known.frames > 1,
    )


def probe(source: ImageSource, limit_pixels: int = MAX_PIXELS) -> tuple[bytes, int, int]:
    """The encoded bytes of an intact image, its width and height (EXIF applied).

    Raises DataFailure (missing, corrupt, other format), ImageRefused (too many pixels, aspect ratio
    above 200), InfrastructureFailure (the file system failed).
    """
    name = source.path or "image bytes"
    data = read(source)
    # ``looked_at`` has decoded it, and these bytes cannot have changed since.
    if source.data is not None and source.size is not None:
        _fits(name, *source.size, limit_pixels)
        return data, *source.size
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageRefused(name, f"{error}; the limit is {limit_pixels} pixels") from error
    except _BROKEN as error:
        reason = "" if isinstance(error, UnidentifiedImageError) else str(error)
        other = _OTHERS.get(data[:2])
        if other is not None:
            reason = f"it is a {other}; convert it"
        raise DataFailure(
            name, f"not a readable {'/'.join(FORMATS)} image" + (f": {reason}" if reason else "")
        ) from error

    # The header is compared before anything is decoded: an image bomb has a small file.
    _fits(name, width, height, limit_pixels)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            # verify() checks what decoding skips, and leaves
            # the image unusable, so it is opened twice.
            image.verify()
        width, height = decode(data).size
    except _BROKEN as error:
        raise DataFailure(name, f"truncated or corrupt image: {error}") from error
    return data, width, height


def _fits(name: str, width: int, height: int, limit_pixels: int) -> None:
    """Raises ImageRefused."""
    if width * height > limit_pixels:
        raise ImageRefused(name, f"{width}x{height} pixels, the limit is {limit_pixels} pixels")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageRefused(name, f"{width}x{height} pixels: the aspect ratio exceeds {MAX_ASPECT}")


ANSWERED = 64_000_000
"""The most that decoding all pictures of one answer to the policy may take, in pixels of 8-bit RGB
(``decoding``): some seconds of a busy core.
"""
NOT_SHOWN = "(image: cannot be shown)"
"""Stands where a picture would be that is broken, too large, or one too many."""
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""PNG's colour types -> their channels; a palette (3) has one."""


def looked_at(
    sources: Sequence[ImageSource], most: int = MAX_PIXELS, until: float = math.inf
) -> list[ImageSource | None]:
    """The pictures that an action of the policy led to.

    Each is decoded once, here. None stands for a picture that is broken or has more than ``most``
    pixels, for one with which all would cost more than ``ANSWERED``, and for those that come after
    ``until`` on the monotonic clock. Files are left as they are, since the policy cannot make them.
    """
    left = ANSWERED
    found: list[ImageSource | None] = []
    for source in sources:
        if not isinstance(source, ImageSource) or source.data is None:
            found.append(source if isinstance(source, ImageSource) else None)
            continue
        costs = decoding(source.data)
        shown = None
        if costs is not None and costs <= left and time.monotonic() < until:
            left -= costs
            with suppress(Exception):  # whatever a forged one makes of its decoder
                _, width, height = probe(source, most)
                shown = replace(source, size=(width, height))
        found.append(shown)
    return found


def pictures(sources: Sequence[ImageSource]) -> list[str | ImageSource]:
    """``looked_at``, with ``NOT_SHOWN`` in the place of a picture that cannot be shown."""
    return [NOT_SHOWN if shown is None else shown for shown in looked_at(sources)]


def decoding(data: bytes) -> int | None:
    """What decoding takes, in pixels of 8-bit RGB, by the header alone: deeper and interlaced PNGs,
    and JPEGs of many scans, count more. None for bytes that are not an image.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            pixels = image.width * image.height
    except Exception:  # whatever a forged one makes of its decoder
        return None
    if encoding(data) == "png":
        depth, colour, interlaced = (
            data[24],
            data[25],
            data[28],
        )  # places in the first chunk, which every PNG has
        bits = _CHANNELS.get(colour, 4) * depth
        return max(pixels, pixels * bits // 24) * (2 if interlaced else 1)
    if encoding(data) == "jpeg":
        # Scans are counted in all bytes, also where they
        # are data by chance: too many is the safe side.
        scans = data.count(_START_OF_SCAN)
        return pixels * max(1, scans // USUAL_SCANS)
    return pixels


USUAL_SCANS = 10
"""Scans of a usual progressive JPEG. Each scan goes over the whole picture."""
_START_OF_SCAN = b"\xff\xda"


def read(source: ImageSource) -> bytes:
    """The encoded bytes, unchecked.

    Raises DataFailure for an unreadable file, InfrastructureFailure when the file system fails.
    """
    if source.data is not None:
        return source.data
    if source.path is None:
        raise DataFailure("image", "neither a path nor bytes are given")
    try:
        return content(source.path, MOST_BYTES)
    except ValueError as error:
        raise DataFailure(source.path, f"not a file name: {error}") from error
    except OSError as error:
        # Other numbers are the file system's, and another node may read the file.
        if error.errno in _FILE_AT_FAULT:
            raise DataFailure(source.path, f"cannot be read: {error.strerror}") from error
        raise InfrastructureFailure(f"{source.path}: the file system failed: {error}") from error


def frame(source: ImageSource, alone: bool) -> bytes:
    """The encoded bytes of a picture of a video, by its header; ``alone``: it may be the whole
    video, as an animated picture. Raises DataFailure for any other file, and as ``read``.
    """
    name = source.path or "image bytes"
    data = read(source)
    try:
        with Image.open(
            io.BytesIO(data), formats=(*FORMATS, *ANIMATED) if alone else FORMATS
        ) as image:
            width, height = image.size
    except _BROKEN as error:
        raise DataFailure(name, f"no picture of a video: {error}") from error
    if width * height > MAX_PIXELS:
        raise ImageRefused(name, f"{width}x{height} pixels, the limit is {MAX_PIXELS} pixels")
    return data


def decode(data: bytes) -> Image.Image:
    """The image as RGB, EXIF orientation applied: the one way from bytes to pixels for prompt,
    engine and trainer.
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        shown: Image.Image = rgb(image)
        return shown


def portable(data: bytes) -> bytes:
    """The image for a program that decodes it itself: the bytes, or a PNG where decoders disagree
    (16 bits, transparency, EXIF).
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        alike = (
            image.mode in ("RGB", "L")
            and not image.has_transparency_data
            and image.getexif().get(ORIENTATION, 1) == 1
        )
    return data if alike else png(decode(data))


def tinted(data: bytes, strength: float) -> bytes:
    """The image as a PNG that shows position: ``1 - strength`` of it, plus red from left to right,
    blue from top to bottom.
    """
    pixels = np.asarray(decode(data), np.float32) * (1 - strength)
    return png(
        Image.fromarray(
            (pixels + _tint(pixels.shape[0], pixels.shape[1], strength)).round().astype(np.uint8)
        )
    )


def untinted(image: Image.Image, strength: float) -> Image.Image:
    """A tinted image as it was before, but for rounding."""
    pixels = np.asarray(image, np.float32)
    before = (pixels - _tint(pixels.shape[0], pixels.shape[1], strength)) / (1 - strength)
    return Image.fromarray(before.round().clip(0, 255).astype(np.uint8))


def _tint(height: int, width: int, strength: float) -> npt.NDArray[np.float32]:
    added: npt.NDArray[np.float32] = np.zeros((height, width, 3), np.float32)
    added[..., 0] = 255 * strength * np.linspace(0, 1, width, dtype=np.float32)
    added[..., 2] = 255 * strength * np.linspace(0, 1, height, dtype=np.float32)[:, None]
    return added


def png(image: Image.Image) -> bytes:
    """The image as a PNG, compressed little: it is decoded again soon."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def smart_resize(
    height: int,
    width: int,
    factor: int = 28,
    min_pixels: int = 56 * 56,
    max_pixels: int = 14 * 14 * 4 * 1280,
) -> tuple[int, int]:
    """(height, width) as of transformers' Qwen2-VL: multiples of ``factor``, area in the range.

    A test compares them.
    """
    # Python rounds halves to even, as the original does; floor or ceil would give other grids.
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows = max(factor, math.floor(height / scale / factor) * factor)
        columns = max(factor, math.floor(width / scale / factor) * factor)
    elif rows * columns < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * scale / factor) * factor
        columns = math.ceil(width * scale / factor) * factor
    return rows, columns


def best_tiles(height: int, width: int, side: int, most: int) -> int:
    """Into how many squares transformers' InternVL cuts an image: rows x columns of the closest
    aspect ratio, at most ``most``; of equal ones the last that the image fills by half. A test
    compares them.
    """
    # sorted() is stable and equal areas stay in this order, which decides between equal ratios.
    shapes = sorted(
        ((w, h) for w in range(1, most + 1) for h in range(1, most // w + 1)), key=math.prod
    )
    best, least = 1, math.inf
    for columns, rows in shapes:
        distance = abs(width / height - columns / rows)
        if distance < least or (
            distance == least and height * width > side * side * rows * columns / 2
        ):
            best, least = rows * columns, distance
    return best


def image_ref(
    data: bytes, width: int, height: int, geometry: ImageGeometry, sha256: str | None = None
) -> ImageRef:
    """The reference of an image of ``width`` x ``height`` pixels: grid in patches, tokens =
    grid.prod() / merge^2.
    """
    grid = geometry.grid(height, width)
    return ImageRef(
        sha256 or hashlib.sha256(data).hexdigest(),
        width,
        height,
        grid,
        math.prod(grid) // geometry.merge**2,
    )


_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    TypeError,
    Image.DecompressionBombError,
)
"""What PIL raises on malformed files, depending on where they break."""


KEPT = 128 << 20
"""Bytes of images that are kept: tinted ones, and those of observations that are files.

Of others only the reference is kept.
"""
NAME = 1 << 10
"""Bytes that an image without its content is taken to need."""


_File = tuple[str, int, int, int]
"""Path, inode, time of change and size of a file: equal ones have equal content."""


class PromptImages:
    """The images of prompts for one model: probed, tinted and hashed once.

    Thread-safe. ``kept``: bytes that the cache holds.
    """

    def __init__(
        self,
        geometry: ImageGeometry,
        tint: float = 0.0,
        max_pixels: int = MAX_PIXELS,
        kept: int = KEPT,
    ) -> None:
        self._geometry, self._tint, self._max_pixels = geometry, tint, max_pixels
        self._seen: Cache[tuple[_File | str, bool], PromptImage] = Cache(
            kept, lambda image: NAME + len(image.data or b"")
        )

    def of(self, source: ImageSource, *, keep_file: bool) -> PromptImage:
        """The image; without its bytes for an untinted file that the engine reads itself
        (``keep_file``). Raises as ``probe``.
        """
        keep_file = keep_file and source.data is None and not self._tint
        sha256 = None if source.data is None else hashlib.sha256(source.data).hexdigest()
        what = sha256 or _file(source.path)

        def look() -> PromptImage:
            return self._look(source, sha256, keep=source.data is None and not keep_file)

        seen = look() if what is None else self._seen.made((what, keep_file), look)
        if keep_file:
            return replace(seen, ref=replace(seen.ref, path=source.path))
        return seen if seen.data is not None else replace(seen, data=source.data)

    def _look(self, source: ImageSource, sha256: str | None, *, keep: bool) -> PromptImage:
        """``keep`` its bytes too, because nobody else does; nobody has those of a tinted one."""
        data, width, height = probe(source, self._max_pixels)
        if self._tint:
            data, sha256, keep = tinted(data, self._tint), None, True
        return PromptImage(
            image_ref(data, width, height, self._geometry, sha256), data if keep else None
        )


def _file(path: str | None) -> _File | None:
    """None for what cannot be looked at: ``probe`` says why."""
    try:
        found = os.stat(path or "")
    except (OSError, ValueError):
        return None
    return path or "", found.st_ino, found.st_mtime_ns, found.st_size

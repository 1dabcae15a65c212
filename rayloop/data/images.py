"""Images: the check of a file before it is decoded, a model's geometry, references by content.

Only PIL and numpy are used.
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
from rayloop.data.resizing import best_tiles, smart_resize
from rayloop.sandbox.pictures import rgb

FORMATS = ("PNG", "JPEG", "WEBP")
"""The formats that are read.

Pillow knows others, some of which start programs (EPS).
"""
ANIMATED = ("GIF",)
"""Formats that are read besides ``FORMATS`` where one file may be a whole video."""
FOREIGN = ("GIF", "BMP", "TIFF")
"""Formats that are read besides ``FORMATS`` where a data set is prepared."""
_OTHER_FORMATS = {
    b"GI": "GIF",
    b"BM": "BMP",
    b"II": "TIFF",
    b"MM": "TIFF",
    b"%P": "PDF",
    b"<s": "SVG",
}
"""First bytes of files of other formats -> the format.

PIL's message names only the buffer that it read.
"""
MAX_ASPECT = 200
"""Qwen2-VL's processor refuses images with a side longer than this many times the other."""

ORIENTATION_TAG = 0x0112
"""The EXIF tag that says how an image is turned; 1: not at all."""

MAX_PIXELS = 50_000_000
"""The most pixels of an image before it is resized.

A larger one is refused before it is decoded (image bombs): 50 million pixels take 150 MB.
"""

MOST_BYTES = 4 * MAX_PIXELS
"""The most bytes of an image's file.

A picture of ``MAX_PIXELS`` has fewer in each format that is read.
"""


def encoding(data: bytes) -> str:
    """``png``, ``webp`` or ``jpeg``: how the bytes of an image are encoded."""
    if data.startswith(b"\x89PNG"):
        return "png"
    return "webp" if data[8:12] == b"WEBP" else "jpeg"


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


@dataclass(frozen=True)
class ImageGeometry:
    """How a model cuts images into patches, image tokens and tiles."""

    patch: int
    """Pixels of the side of a patch."""
    merge: int
    """``merge`` x ``merge`` patches are an image token."""
    min_pixels: int
    max_pixels: int
    tile: int = 0
    """Pixels of the side of the squares that an image is cut into; 0: none."""
    enlarges: bool = False
    """Whether an image with a side below an image token's is enlarged first."""

    @property
    def factor(self) -> int:
        """Pixels of the side of an image token."""
        return self.patch * self.merge

    @property
    def tiles(self) -> int:
        """The most squares of an image, its thumbnail not counted."""
        return max(1, self.max_pixels // max(1, self.tile**2))

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """(t, h, w) of an image of this size in pixels: h and w are patches, t counts squares.

        t is 1 for an image that is not cut into squares.
        """
        if self.tile:
            squares = best_tiles(height, width, self.tile, self.tiles)
            side = self.tile // self.patch
            # An image of several squares has a thumbnail too.
            return squares + (squares > 1), side, side
        if self.enlarges:
            scale = max(1.0, self.factor / min(height, width))
            height = int(height * scale)
            width = int(width * scale)
        rows, columns = smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)
        return 1, rows // self.patch, columns // self.patch


def image_geometry(config: Mapping[str, Any], min_pixels: int, max_pixels: int) -> ImageGeometry:
    """The geometry of a model by its config.json. Raises KeyError for a missing setting."""
    vision = config["vision_config"]
    model_family = family(config.get("model_type", ""))
    if model_family.images == "tiles":
        patch, tile = (int(np.ravel(vision[name])[0]) for name in ("patch_size", "image_size"))
        merge = round(1 / config["downsample_ratio"])
        return ImageGeometry(patch, merge, min_pixels, max_pixels, tile)
    return ImageGeometry(
        vision["patch_size"],
        vision["spatial_merge_size"],
        min_pixels,
        max_pixels,
        enlarges=model_family.frames > 1,
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
        _check_size(name, *source.size, limit_pixels)
        return data, *source.size
    # The header is compared before anything is decoded: an image bomb has a small file.
    width, height = _size_in_header(data, name, limit_pixels)
    _check_size(name, width, height, limit_pixels)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            # verify() checks what decoding skips, and leaves
            # the image unusable, so it is opened twice.
            image.verify()
        width, height = decode(data).size
    except _BROKEN as error:
        raise DataFailure(name, f"truncated or corrupt image: {error}") from error
    return data, width, height


def _size_in_header(data: bytes, name: str, limit_pixels: int) -> tuple[int, int]:
    """Width and height by the image's header. Raises ImageRefused, DataFailure."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageRefused(name, f"{error}; the limit is {limit_pixels} pixels") from error
    except _BROKEN as error:
        reason = "" if isinstance(error, UnidentifiedImageError) else str(error)
        other_format = _OTHER_FORMATS.get(data[:2])
        if other_format is not None:
            reason = f"it is a {other_format}; convert it"
        suffix = f": {reason}" if reason else ""
        raise DataFailure(name, f"not a readable {'/'.join(FORMATS)} image{suffix}") from error


def _check_size(name: str, width: int, height: int, limit_pixels: int) -> None:
    """Raises ImageRefused for too many pixels, and for a side much longer than the other."""
    if width * height > limit_pixels:
        raise ImageRefused(name, f"{width}x{height} pixels, the limit is {limit_pixels} pixels")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageRefused(name, f"{width}x{height} pixels: the aspect ratio exceeds {MAX_ASPECT}")


MASKED_SIDE_PIXELS = 14
"""Pixels of a side of the squares that ``masked`` draws."""
MASKED_SHARE = 0.6
"""The share of them that is black."""
MAX_ANSWER_COST_PIXELS = 64_000_000
"""The most that decoding all pictures of one answer to the policy may cost (``decoding``).

The unit is a pixel of 8-bit RGB; this many take some seconds of a busy core.
"""
NOT_SHOWN = "(image: cannot be shown)"
"""The text in place of a picture that is broken, too large, or one too many."""
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""PNG's colour types -> their channels; a palette (3) has one."""


def looked_at(
    sources: Sequence[ImageSource], most: int = MAX_PIXELS, until: float = math.inf
) -> list[ImageSource | None]:
    """The pictures that an action of the policy led to.

    Each is decoded once, here. None stands for a picture that is broken or has more than ``most``
    pixels, for one with which all would cost more than ``MAX_ANSWER_COST_PIXELS``, and for the ones
    that come after ``until`` on the monotonic clock. Files are left as they are, since the policy
    cannot make them.
    """
    budget = MAX_ANSWER_COST_PIXELS
    result: list[ImageSource | None] = []
    for source in sources:
        if not isinstance(source, ImageSource) or source.data is None:
            result.append(source if isinstance(source, ImageSource) else None)
            continue
        cost = decoding(source.data)
        picture = None
        if cost is not None and cost <= budget and time.monotonic() < until:
            budget -= cost
            with suppress(Exception):  # a forged picture may raise anything in its decoder
                _, width, height = probe(source, most)
                picture = replace(source, size=(width, height))
        result.append(picture)
    return result


def pictures(sources: Sequence[ImageSource]) -> list[str | ImageSource]:
    """``looked_at``, with ``NOT_SHOWN`` in the place of a picture that cannot be shown."""
    return [NOT_SHOWN if picture is None else picture for picture in looked_at(sources)]


def decoding(data: bytes) -> int | None:
    """The cost of decoding by the header alone, in pixels of 8-bit RGB.

    Deeper and interlaced PNGs, and JPEGs of many scans, count more. None for bytes that are not an
    image.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            pixels = image.width * image.height
    except Exception:  # a forged picture may raise anything in its decoder
        return None
    if encoding(data) == "png":
        # These are places in the first chunk, which every PNG has.
        depth = data[24]
        colour = data[25]
        interlaced = data[28]
        bits = _CHANNELS.get(colour, 4) * depth
        return max(pixels, pixels * bits // 24) * (2 if interlaced else 1)
    if encoding(data) == "jpeg":
        # Scans are counted in all bytes, also where they
        # are data by chance: too many is the safe side.
        scans = data.count(_START_OF_SCAN)
        return pixels * max(1, scans // USUAL_SCANS)
    return pixels


USUAL_SCANS = 10
"""Scans of a usual progressive JPEG; each scan covers the whole picture."""
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
    """The encoded bytes of a picture of a video, checked by its header.

    ``alone``: it may be the whole video, as an animated picture. Raises DataFailure for any other
    file, and as ``read``.
    """
    name = source.path or "image bytes"
    data = read(source)
    formats = (*FORMATS, *ANIMATED) if alone else FORMATS
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            width, height = image.size
    except _BROKEN as error:
        raise DataFailure(name, f"not a picture of a video: {error}") from error
    if width * height > MAX_PIXELS:
        raise ImageRefused(name, f"{width}x{height} pixels, the limit is {MAX_PIXELS} pixels")
    return data


def decode(data: bytes) -> Image.Image:
    """The image as RGB, EXIF orientation applied.

    Prompt, engine and trainer all turn bytes into pixels here.
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        converted: Image.Image = rgb(image)
        return converted


def portable(data: bytes) -> bytes:
    """The image for a program that decodes it itself.

    The bytes are returned as they are, or as PNG where decoders disagree (16 bits, transparency,
    EXIF).
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        decoders_agree = (
            image.mode in ("RGB", "L")
            and not image.has_transparency_data
            and image.getexif().get(ORIENTATION_TAG, 1) == 1
        )
    return data if decoders_agree else png(decode(data))


def tinted(data: bytes, strength: float) -> bytes:
    """The image as a PNG that shows position.

    It is ``1 - strength`` of the image, plus red from left to right, blue from top to bottom.
    """
    pixels = np.asarray(decode(data), np.float32) * (1 - strength)
    height, width, _ = pixels.shape
    tinted_pixels = pixels + _tint(height, width, strength)
    return png(Image.fromarray(tinted_pixels.round().astype(np.uint8)))


def untinted(image: Image.Image, strength: float) -> Image.Image:
    """The original of a tinted image, except for rounding."""
    pixels = np.asarray(image, np.float32)
    height, width, _ = pixels.shape
    original = (pixels - _tint(height, width, strength)) / (1 - strength)
    return Image.fromarray(original.round().clip(0, 255).astype(np.uint8))


def _tint(height: int, width: int, strength: float) -> npt.NDArray[np.float32]:
    """The added colour, [height, width, 3]."""
    tint: npt.NDArray[np.float32] = np.zeros((height, width, 3), np.float32)
    tint[..., 0] = 255 * strength * np.linspace(0, 1, width, dtype=np.float32)
    tint[..., 2] = 255 * strength * np.linspace(0, 1, height, dtype=np.float32)[:, None]
    return tint


def masked(image: Image.Image, seed: int) -> Image.Image:
    """The image with squares of ``MASKED_SIDE_PIXELS`` of black, ``MASKED_SHARE`` of all.

    Each is black with that probability (PAPO, arXiv:2507.06448, and its public code).
    """
    rows = math.ceil(image.height / MASKED_SIDE_PIXELS)
    columns = math.ceil(image.width / MASKED_SIDE_PIXELS)
    is_black = np.random.default_rng(seed).random((rows, columns)) < MASKED_SHARE
    of_rows = is_black.repeat(MASKED_SIDE_PIXELS, axis=0)
    of_pixels = of_rows.repeat(MASKED_SIDE_PIXELS, axis=1)
    pixels = np.array(image)
    pixels[of_pixels[: image.height, : image.width]] = 0
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    """The image as a PNG, compressed little: it is decoded again soon."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def image_ref(
    data: bytes, width: int, height: int, geometry: ImageGeometry, sha256: str | None = None
) -> ImageRef:
    """The reference of an image of ``width`` x ``height`` pixels.

    Its grid is in patches, and its tokens are grid.prod() / merge^2.
    """
    grid = geometry.grid(height, width)
    tokens = math.prod(grid) // geometry.merge**2
    return ImageRef(sha256 or hashlib.sha256(data).hexdigest(), width, height, grid, tokens)


_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    TypeError,
    Image.DecompressionBombError,
)
"""The exceptions of PIL for malformed files, depending on where they break."""


IMAGE_CACHE_BYTES = 128 << 20
"""Bytes of the cached images: tinted ones, and files that observations show.

The cache has only the reference of any other image.
"""
CACHED_NAME_BYTES = 1 << 10
"""Bytes that a cached image without its content is taken to need."""


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
        kept: int = IMAGE_CACHE_BYTES,
    ) -> None:
        self._geometry = geometry
        self._tint = tint
        self._max_pixels = max_pixels
        self._cache: Cache[tuple[_File | str, bool], PromptImage] = Cache(
            kept, lambda image: CACHED_NAME_BYTES + len(image.data or b"")
        )

    def of(self, source: ImageSource, *, keep_file: bool) -> PromptImage:
        """The image, without its bytes for an untinted file that the engine reads (``keep_file``).

        Raises as ``probe``.
        """
        keep_file = keep_file and source.data is None and not self._tint
        sha256 = None if source.data is None else hashlib.sha256(source.data).hexdigest()
        key = sha256 or _file(source.path)

        def load() -> PromptImage:
            return self._load(source, sha256, keep=source.data is None and not keep_file)

        image = load() if key is None else self._cache.made((key, keep_file), load)
        if keep_file:
            return replace(image, ref=replace(image.ref, path=source.path))
        return image if image.data is not None else replace(image, data=source.data)

    def _load(self, source: ImageSource, sha256: str | None, *, keep: bool) -> PromptImage:
        """The image, with its bytes where nobody else has them (``keep``) or it is tinted."""
        data, width, height = probe(source, self._max_pixels)
        if self._tint:
            data = tinted(data, self._tint)
            sha256 = None
            keep = True
        ref = image_ref(data, width, height, self._geometry, sha256)
        return PromptImage(ref, data if keep else None)


def _file(path: str | None) -> _File | None:
    """The identity of a file's content; None where the file cannot be examined.

    ``probe`` raises the reason.
    """
    try:
        stat = os.stat(path or "")
    except (OSError, ValueError):
        return None
    return path or "", stat.st_ino, stat.st_mtime_ns, stat.st_size

"""Images as a prompt names them: each file and each content is probed, tinted and hashed once, whoever shows it how often."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace

from rayloop.core.threads import Cache
from rayloop.core.types import ImageSource, PromptImage
from rayloop.data.images import MAX_PIXELS, ImageGeometry, image_ref, probe, tinted

KEPT = 128 << 20
"""Bytes of images that are kept: tinted ones, and those of observations that are files. Others are named only, their bytes stay
with whoever has them."""
NAME = 1 << 10
"""Bytes that an image without its content is taken to need."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it was: what is read later from one of the same time and size is the same."""

    path: str
    inode: int
    modified: int
    bytes: int


class PromptImages:
    """For one model, whose ``geometry`` and ``tint`` (``model.position_tint``) it has. Safe to use from many threads.

    ``kept``: bytes beyond which the least recently shown are looked at again.
    """

    def __init__(self, geometry: ImageGeometry, tint: float = 0.0, max_pixels: int = MAX_PIXELS, kept: int = KEPT) -> None:
        self._geometry, self._tint, self._max_pixels = geometry, tint, max_pixels
        self._seen: Cache[tuple[_File | str, bool], PromptImage] = Cache(kept, _size)

    def of(self, source: ImageSource, *, keep_file: bool) -> PromptImage:
        """With its bytes; without them for a file that the engine may read itself (``keep_file``), unless it is tinted.

        Raises as ``rayloop.data.images.probe`` does.
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
        return PromptImage(image_ref(data, width, height, self._geometry, sha256), data if keep else None)


def _file(path: str | None) -> _File | None:
    """None for what cannot be looked at: ``probe`` says why."""
    try:
        found = os.stat(path or "")
    except (OSError, ValueError):
        return None
    return _File(path or "", found.st_ino, found.st_mtime_ns, found.st_size)


def _size(image: PromptImage) -> int:
    return NAME + len(image.data or b"")

"""Takes films apart into frames, with PyAV (``pip install "rayloop[video]"``)."""

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from rayloop.core.failures import ConfigError, DataFailure

FRAMES_PER_SECOND = 2.0
"""Of the frames that are kept, unless ``data prepare`` asks for others."""
SAFE = {
    "protocol_whitelist": "file",
    "format_whitelist": (
        "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,ogg,asf,gif,m4v,h264,hevc,mjpeg,ivf"
    ),
}
"""Demuxers that read one file: playlists name others, and addresses on the network."""
QUALITY = 90
"""Of the JPEG files, in Pillow's scale."""


def taken_apart(film: Path, out: Path, per_second: float, where: str) -> tuple[list[Path], float]:
    """The film's frames as files in a folder of its own below ``out``, and how many are a second;
    ``per_second`` 0 keeps every one. Raises DataFailure for what is no film, ConfigError where PyAV
    is not installed, OSError where a frame cannot be written.
    """
    try:
        av = importlib.import_module("av")
    except ImportError as error:
        raise ConfigError(
            f'{film} is a film, which PyAV takes apart: pip install "rayloop[video]"'
        ) from error
    folder = (
        out
        / f"{film.stem}-{hashlib.sha256(f'{film.resolve()} {per_second}'.encode()).hexdigest()[:8]}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    kept: list[Path] = []
    own = per_second
    for own, picture in _pictures(av, film, per_second, where):  # noqa: B007 (read after the loop)
        kept.append(folder / f"{len(kept):05d}.jpg")
        picture.save(kept[-1], quality=QUALITY)
    if not kept:
        raise DataFailure(where, f"{film} has no frame")
    return kept, min(per_second, own) if per_second else own


def _pictures(
    av: Any, film: Path, per_second: float, where: str
) -> Iterator[tuple[float, Image.Image]]:
    """The film's own frames per second with each picture that is kept. Raises DataFailure."""
    kept = 0
    try:
        with av.open(str(film), options=SAFE) as opened:
            stream = opened.streams.video[0]
            own = float(stream.average_rate or per_second or FRAMES_PER_SECOND)
            for index, frame in enumerate(opened.decode(stream)):
                # Frames are counted from the beginning, so that
                # rounding does not add up over a long film.
                if not per_second or index >= kept * own / per_second:
                    kept += 1
                    yield own, frame.to_image()
    except (av.error.FFmpegError, IndexError, OSError) as error:
        raise DataFailure(where, f"{film} cannot be read as a film: {error}") from error

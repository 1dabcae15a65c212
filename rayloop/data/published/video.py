"""Takes videos apart into frames, with PyAV (``pip install "rayloop[video]"``)."""

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from rayloop.core.failures import ConfigError, DataFailure

FRAMES_PER_SECOND = 2.0
"""Rate of the frames that are kept, unless ``data prepare`` asks for another."""
OPEN_OPTIONS = {
    "protocol_whitelist": "file",
    "format_whitelist": (
        "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,ogg,asf,gif,m4v,h264,hevc,mjpeg,ivf"
    ),
}
"""Demuxers that read one file: playlists name others, and addresses on the network."""
JPEG_QUALITY = 90
"""Quality of the JPEG files, in Pillow's scale."""


def extract_frames(
    video: Path, out: Path, per_second: float, where: str
) -> tuple[list[Path], float]:
    """The video's frames as files in their own folder below ``out``, and the frames per second.

    ``per_second`` 0 keeps every frame. Raises DataFailure for a file that is not a video,
    ConfigError where PyAV is not installed, OSError where a frame cannot be written.
    """
    try:
        av = importlib.import_module("av")
    except ImportError as error:
        raise ConfigError(
            f'{video} is a video, which PyAV takes apart: pip install "rayloop[video]"'
        ) from error
    digest = hashlib.sha256(f"{video.resolve()} {per_second}".encode()).hexdigest()
    folder = out / f"{video.stem}-{digest[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    video_rate = per_second
    for rate, picture in _pictures(av, video, per_second, where):
        video_rate = rate
        files.append(folder / f"{len(files):05d}.jpg")
        picture.save(files[-1], quality=JPEG_QUALITY)
    if not files:
        raise DataFailure(where, f"{video} has no frame")
    return files, min(per_second, video_rate) if per_second else video_rate


def _pictures(
    av: Any, video: Path, per_second: float, where: str
) -> Iterator[tuple[float, Image.Image]]:
    """The video's frames per second with each picture that is kept. Raises DataFailure."""
    count = 0
    try:
        with av.open(str(video), options=OPEN_OPTIONS) as container:
            stream = container.streams.video[0]
            video_rate = float(stream.average_rate or per_second or FRAMES_PER_SECOND)
            for index, frame in enumerate(container.decode(stream)):
                # Frames are counted from the beginning, so that
                # rounding does not add up over a long video.
                if not per_second or index >= count * video_rate / per_second:
                    count += 1
                    yield video_rate, frame.to_image()
    except (av.error.FFmpegError, IndexError, OSError) as error:
        raise DataFailure(where, f"{video} cannot be read as a video: {error}") from error

"""Takes films apart into frames, with PyAV (``pip install "rayloop[video]"``)."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path

from rayloop.core.failures import DataFailure

FRAMES_PER_SECOND = 2.0
"""Of the frames that are kept, unless ``data prepare`` asks for others."""
QUALITY = 90
"""Of the JPEG files, in Pillow's scale."""


def taken_apart(film: Path, out: Path, per_second: float, where: str) -> tuple[list[Path], float]:
    """The film's frames as files in a folder of its own below ``out``, and how many are a second; ``per_second`` 0 keeps every one.
    Raises DataFailure for what is no film, and where PyAV is not installed."""
    try:
        av = importlib.import_module("av")
    except ImportError as error:
        raise DataFailure(where, f'{film} is a film, which PyAV takes apart: pip install "rayloop[video]"') from error
    folder = out / f"{film.stem}-{hashlib.sha256(f'{film.resolve()} {per_second}'.encode()).hexdigest()[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    kept: list[Path] = []
    try:
        with av.open(str(film)) as opened:
            stream = opened.streams.video[0]
            own = float(stream.average_rate or per_second or FRAMES_PER_SECOND)
            for index, frame in enumerate(opened.decode(stream)):
                if per_second and index < len(kept) * own / per_second:
                    continue
                kept.append(folder / f"{len(kept):05d}.jpg")
                frame.to_image().save(kept[-1], quality=QUALITY)
    except (av.error.FFmpegError, IndexError, OSError) as error:
        raise DataFailure(where, f"{film} cannot be read as a film: {error}") from error
    if not kept:
        raise DataFailure(where, f"{film} has no frame")
    return kept, min(per_second, own) if per_second else own

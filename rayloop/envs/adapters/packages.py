"""What the adapters share: a package that may be missing, functions that a configuration names, and pictures made of arrays."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image

from rayloop.core.types import ImageSource


def needs(package: str, extra: str) -> None:
    """Raises ValueError, which the check of a configuration shows, when the package of an ``extra`` is not installed."""
    if find_spec(package) is None:
        raise ValueError(f'the package {package} is not installed: pip install "rayloop[{extra}]"')


def function(use: str) -> Callable[..., Any]:
    """``module:name``. Raises ValueError when there is none."""
    module, _, name = use.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{use}: {error}; a function is named module:name") from error
    if not callable(found):
        raise ValueError(f"{use} is no function")
    named: Callable[..., Any] = found
    return named


def picture(pixels: Any) -> ImageSource:
    """A PNG of an array [H, W, 3] or [H, W] of integers from 0 to 255. Raises ValueError for another."""
    array = np.asarray(pixels)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)) or 0 in array.shape:
        raise ValueError(f"no picture: an array of shape {array.shape}, expected [height, width, 3]")
    if array.dtype != np.uint8:
        if not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() > 255:
            raise ValueError(f"no picture: {array.dtype} values, expected integers from 0 to 255")
        array = array.astype(np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(array).save(encoded, "PNG", compress_level=1)
    return ImageSource(data=encoded.getvalue())

"""Shared by the adapters: packages that may be missing, functions that a configuration names, pictures of arrays, and rewards."""

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
from PIL import Image

from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message
from rayloop.data.images import png


class RewardedSteps:
    """The base of environments that reward each step; ``evaluate`` returns the sum of the rewards or the last one (``result``)."""

    def __init__(self, result: Literal["sum", "last"]) -> None:
        self._result = result
        self._rewards = [0.0]
        self._last_shown: tuple[str | ImageSource, ...] = ()

    def evaluate(self) -> float:
        """The sum of the rewards, or the last one."""
        return sum(self._rewards) if self._result == "sum" else self._rewards[-1]

    def _shown(self, *parts: str | ImageSource) -> Message:
        self._last_shown = parts
        return Message("user", parts)

    def _refused(self, why: str) -> StepResult:
        """The error, and what was shown before."""
        return StepResult(Observation((Message("user", (f"Error: {why}\n", *self._last_shown)),)), error=why)


def needs(package: str, extra: str = "") -> None:
    """Raises ValueError, which the check of a configuration shows, when the package, of an ``extra`` or not, is not installed."""
    if find_spec(package) is None:
        install = f'"rayloop[{extra}]"' if extra else package
        raise ValueError(f"the package {package} is not installed: pip install {install}")


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
    return ImageSource(data=png(Image.fromarray(array)))

"""How a model's numbers become pixels of the screen.

Models of Qwen2.5-VL's family (UI-TARS 1.5) write pixels of the image as their processor resized it, others (UI-TARS 1.0, Qwen3-VL)
thousandths of the screen. The resized image depends on the processor's own limits: with others a click lands elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.data.images import smart_resize
from rayloop.envs.grammar.actions import Action, Point

THOUSAND = 1000


class Pointing(SettingsModel):
    """Coordinates of a model's actions."""

    coordinates: Literal["absolute", "relative"] = "absolute"
    """absolute: pixels of the resized screenshot (Qwen2.5-VL, UI-TARS 1.5); relative: 0 to 1000 (UI-TARS 1.0, Qwen3-VL). What the
    model was trained on."""
    factor: int = Field(28, ge=1)
    """Sides of the resized screenshot are multiples of this many pixels: 28 for Qwen2-VL and Qwen2.5-VL, 32 for Qwen3-VL."""
    min_pixels: int = Field(784, gt=0)
    """Smaller screenshots are enlarged to this many pixels: the same number as ``model.min_pixels``, or absolute clicks miss."""
    max_pixels: int = Field(1_003_520, gt=0)
    """Larger screenshots are shrunk to this many pixels: the same number as ``model.max_pixels``, or absolute clicks miss."""

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in the model's unit, of a screen in pixels."""
        if self.coordinates == "relative":
            return THOUSAND, THOUSAND
        rows, columns = smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)
        return columns, rows

    def on(self, action: Action, width: int, height: int) -> Action:
        """The action with its points in whole pixels of a screen of ``width`` x ``height``, clamped to it."""
        columns, rows = self.size(width, height)

        def place(point: Point) -> Point:
            x, y = round(point.x * width / columns), round(point.y * height / rows)
            return Point(min(max(x, 0), width - 1), min(max(y, 0), height - 1))

        return _moved(action, place)

    def written(self, action: Action, width: int, height: int) -> Action:
        """The other way, for demonstrations: an action in pixels of the screen with its points as the model would write them."""
        columns, rows = self.size(width, height)
        return _moved(action, lambda point: Point(round(point.x * columns / width), round(point.y * rows / height)))


def _moved(action: Action, place: Callable[[Point], Point]) -> Action:
    found: dict[str, Any] = {field.name: getattr(action, field.name) for field in dataclasses.fields(action)}
    made: Callable[..., Action] = type(action)
    return made(**{name: place(it) if isinstance(it, Point) else it for name, it in found.items()})

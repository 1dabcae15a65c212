"""Tools that look at images: crop, zoom, rotate, inspect and wait, each returning an image.

Two also have DeepEyes' names.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from PIL import Image, ImageDraw
from pydantic import Field, model_validator

from rayloop.core.protocols import Tool, ToolResult
from rayloop.core.types import ImageSource, Task
from rayloop.data.images import decode, png, read
from rayloop.envs.tools import ToolCalls, ToolError

Name = Literal[
    "crop", "zoom", "rotate", "inspect", "wait", "image_zoom_in_tool", "image_rotate_tool"
]
MOST_PIXELS = 16_000_000
"""Pixels of an image that a tool gives; a larger one is reduced."""
_RIGHT_ANGLES = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}


class ImageTools(ToolCalls):
    """``ToolCalls`` with tools that look at the task's images, and at images that tools gave."""

    class Settings(ToolCalls.Settings):
        """Which tools the policy has, and what boxes may be."""

        image_tools: tuple[Name, ...] = ("crop",)
        """Which tools the policy has, in this order.

        They are crop, zoom, rotate, inspect (measures a box), wait (shows the image later), and
        image_zoom_in_tool(bbox_2d, label) and image_rotate_tool(angle), as DeepEyes calls crop and
        rotate.
        """
        coordinates: Literal["fraction", "pixel"] = "fraction"
        """The unit of boxes: fraction or pixel.

        They are fractions of width and height (Arc Vision), or pixels of the original image
        (DeepEyes).
        """
        min_side: int = Field(28, ge=1)
        """A box with a shorter side, in pixels, is refused.

        It would be enlarged from almost nothing. DeepEyes has 31.
        """
        max_aspect: float = Field(100.0, ge=1)
        """A box is refused when one side is more than this many times the other.

        Image processors refuse it too.
        """
        max_zoom: float = Field(4.0, ge=1)
        """Largest factor of ``zoom``. Raise it for screens with small writing."""
        wait_limit: float = Field(5.0, gt=0)
        """Seconds that an episode may spend in ``wait``. Keep it below ``tool_timeout``."""

        @model_validator(mode="after")
        def _waits_in_time(self) -> Self:
            if "wait" in self.image_tools and self.wait_limit >= self.tool_timeout:
                raise ValueError(
                    f"wait_limit {self.wait_limit} must be below tool_timeout {self.tool_timeout}"
                )
            return self

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._looking = settings

    def tools_for(self, task: Task) -> Sequence[Tool]:
        """Read the images, within the deadline of ``reset``, and return the tools.

        Raises DataFailure, InfrastructureFailure.
        """
        album = Album([read(image) for image in task.images], self._looking)
        image_tools = [album.tool(name) for name in self._looking.image_tools]
        return [*image_tools, *super().tools_for(task)]


@dataclass(frozen=True)
class ImageTool:
    """A function of an ``Album`` as a tool. ``parameters``: the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., ToolResult]

    def __call__(self, /, **arguments: Any) -> ToolResult:
        """Call the function. Raises ToolError for what the policy cannot have."""
        return self.function(**arguments)


class Album:
    """The images of one episode, and the functions of the tools.

    Images are numbered in the order in which the policy saw them.
    """

    def __init__(self, images: Sequence[bytes], settings: ImageTools.Settings) -> None:
        self._images = list(images)
        self._settings = settings
        self._waited = 0.0

    def tool(self, name: Name) -> Tool:
        """Return the tool of that name."""
        box = {"box": _BOXES[self._settings.coordinates]}
        max_zoom = self._settings.max_zoom
        factor = _number(
            "how many times larger to show it", 1, max_zoom, default=min(2.0, max_zoom)
        )
        angle = _number("degrees, counter-clockwise", -360, 360, examples=[90])
        seconds = _number("how long to wait", 0.1, self._settings.wait_limit, examples=[0.1])
        tools: dict[str, tuple[str, Mapping[str, Any], Callable[..., ToolResult]]] = {
            "crop": ("Cuts a box out of an image, to look closer.", box, self.crop),
            "zoom": (
                "Cuts a box out of an image and enlarges it.",
                {**box, "factor": factor},
                self.zoom,
            ),
            "rotate": ("Turns an image.", {"angle": angle}, self.rotate),
            "inspect": (
                "Measures a box of an image (size, place, colours) and marks it.",
                box,
                self.inspect,
            ),
            "wait": ("Waits, then shows the image again.", {"seconds": seconds}, self.wait),
            "image_zoom_in_tool": (
                "Cuts a box out of an image.",
                {"bbox_2d": box["box"], "label": _LABEL},
                self.image_zoom_in_tool,
            ),
            "image_rotate_tool": ("Turns an image.", {"angle": angle}, self.rotate),
        }
        description, properties, function = tools[name]
        parameters = {
            "type": "object",
            "properties": {**properties, "image": _IMAGE},
            "required": [next(iter(properties))],
        }
        return ImageTool(name, description, parameters, function)

    def crop(self, box: Any, image: int = 0) -> ToolResult:
        """Return a part of an image, in the image's resolution. Raises ToolError."""
        source = self._image(image)
        return self._shown(source.crop(self._edges(box, source)))

    def image_zoom_in_tool(self, bbox_2d: Any, label: str = "", image: int = 0) -> ToolResult:
        """Return ``crop``; ``label`` is for the policy's thoughts. Raises ToolError."""
        return self.crop(bbox_2d, image)

    def zoom(self, box: Any, factor: float | None = None, image: int = 0) -> ToolResult:
        """Return a part of an image, ``factor`` times as wide and high. Raises ToolError."""
        max_zoom = self._settings.max_zoom
        factor = min(2.0, max_zoom) if factor is None else factor
        if not 1 <= factor <= max_zoom:
            raise ToolError(f"factor {factor} must be from 1 to {max_zoom:g}")
        source = self._image(image)
        edges = self._edges(box, source)
        left, top, right, bottom = edges
        size = _fitting(round((right - left) * factor), round((bottom - top) * factor), MOST_PIXELS)
        return self._shown(source.resize(size, Image.Resampling.BICUBIC, edges))

    def rotate(self, angle: float, image: int = 0) -> ToolResult:
        """Return the whole image, turned, with white corners. Raises ToolError."""
        if not -360 <= angle <= 360:
            raise ToolError(f"angle {angle} must be from -360 to 360")
        source = self._image(image)
        angle %= 360
        if angle in _RIGHT_ANGLES:
            return self._shown(source.transpose(_RIGHT_ANGLES[int(angle)]))
        # The pixels of the picture turned by 45 degrees, with its corners.
        max_turned_pixels = (source.width + source.height) ** 2 // 2
        if max_turned_pixels > MOST_PIXELS:
            pixels = source.width * source.height * MOST_PIXELS // max_turned_pixels
            source = source.resize(_fitting(*source.size, pixels))
        return self._shown(
            source.rotate(angle, Image.Resampling.BICUBIC, expand=True, fillcolor="white")
        )

    def inspect(self, box: Any, image: int = 0) -> ToolResult:
        """Return the whole image with the box marked, and a text that measures the box.

        It has size, place, mean colour and contrast (WCAG 2, 1 to 21). Raises ToolError.
        """
        source = self._image(image)
        edges = self._edges(box, source)
        left, top, right, bottom = edges
        pixels = np.asarray(source.crop(edges), np.float64)
        red, green, blue = (round(mean) for mean in pixels.mean((0, 1)))
        luminance = _luminance(pixels)
        contrast = (luminance.max() + 0.05) / (luminance.min() + 0.05)
        share = (right - left) * (bottom - top) / (source.width * source.height)
        text = (
            f"{right - left}x{bottom - top} pixels at ({left}, {top}), {share:.1%} of the image;"
            f" mean colour #{red:02x}{green:02x}{blue:02x}, contrast {contrast:.1f}"
        )
        copy = source.copy()
        width = max(2, min(source.size) // 200)
        upper_left = max(left - width, 0), max(top - width, 0)
        lower_right = (
            min(right + width, source.width) - 1,
            min(bottom + width, source.height) - 1,
        )
        ImageDraw.Draw(copy).rectangle((upper_left, lower_right), outline="red", width=width)
        return self._shown(copy, text)

    def wait(self, seconds: float, image: int = 0) -> ToolResult:
        """Return the same image, later: a picture of a screen does not change.

        Raises ToolError beyond ``wait_limit``.
        """
        source = self._image(image)
        seconds_left = self._settings.wait_limit - self._waited
        if not 0 < seconds <= seconds_left:
            raise ToolError(
                f"{seconds} seconds are not between 0 and the {seconds_left:g} that are"
                " left to wait"
            )
        self._waited += seconds
        time.sleep(seconds)
        return self._shown(source, f"{seconds:g} seconds later nothing has changed")

    def _image(self, index: int) -> Image.Image:
        if not 0 <= index < len(self._images):
            raise ToolError(
                f"no image {index}, so far there are {len(self._images)}, the first is 0"
            )
        return decode(self._images[index])

    def _edges(self, box: Any, image: Image.Image) -> tuple[int, int, int, int]:
        """Return left, top, right and bottom in pixels, clamped to the image. Raises ToolError."""
        if len(box) != 4 or not all(map(_is_finite_number, box)):
            raise ToolError("box must be [x1, y1, x2, y2], four numbers")
        x_unit, y_unit = image.size if self._settings.coordinates == "fraction" else (1, 1)
        left, right = (round(min(max(x * x_unit, 0), image.width)) for x in (box[0], box[2]))
        top, bottom = (round(min(max(y * y_unit, 0), image.height)) for y in (box[1], box[3]))
        width = right - left
        height = bottom - top
        min_side = self._settings.min_side
        if width <= 0 or height <= 0:
            raise ToolError(
                f"box {box} must have x1 < x2 and y1 < y2 within the image"
                f" ({image.width}x{image.height} pixels)"
            )
        if min(width, height) < min_side:
            raise ToolError(f"the box covers {width}x{height} pixels, each side needs {min_side}")
        if max(width, height) > self._settings.max_aspect * min(width, height):
            raise ToolError(
                f"the box covers {width}x{height} pixels: one side is too long for the other"
            )
        return left, top, right, bottom

    def _shown(self, image: Image.Image, text: str = "") -> ToolResult:
        """Return the image, as the next of the album."""
        encoded = png(image)
        self._images.append(encoded)
        number = f"image {len(self._images) - 1}: {image.width}x{image.height} pixels"
        return ToolResult(f"{text}; {number}" if text else number, (ImageSource(data=encoded),))


def _is_finite_number(value: Any) -> bool:
    return type(value) in (int, float) and -math.inf < value < math.inf


def _fitting(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Return the size, reduced to at most ``max_pixels`` pixels."""
    scale = min(1.0, math.sqrt(max_pixels / (width * height)))
    return max(1, int(width * scale)), max(1, int(height * scale))


def _luminance(
    pixels: np.ndarray[Any, np.dtype[np.float64]],
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the relative luminance 0..1 of RGB pixels 0..255 [..., 3] (WCAG 2, contrast ratio)."""
    share = pixels / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def _number(description: str, minimum: float, maximum: float, **more: Any) -> dict[str, Any]:
    return {
        "type": "number",
        "description": description,
        "minimum": minimum,
        "maximum": maximum,
        **more,
    }


_LABEL = {"type": "string", "description": "what is in the box (optional)"}
_WHICH = "which image: 0 is the first, and each result is the next one"
_IMAGE = {"type": "integer", "minimum": 0, "default": 0, "description": _WHICH}
_FOUR: dict[str, Any] = {"type": "array", "minItems": 4, "maxItems": 4}
_BOXES: Mapping[str, dict[str, Any]] = {
    "fraction": {
        **_FOUR,
        "items": {"type": "number", "minimum": 0, "maximum": 1},
        "description": "x1, y1, x2, y2 as fractions of the image's width and height",
        "examples": [[0.25, 0.25, 0.75, 0.75]],
    },
    "pixel": {
        **_FOUR,
        "items": {"type": "number", "minimum": 0},
        "description": "x1, y1, x2, y2 in pixels of the original image",
        "examples": [[100, 100, 300, 200]],
    },
}

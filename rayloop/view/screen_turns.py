"""A turn on a screen: how it is read, and a picture of where it acts."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

from PIL import Image, ImageDraw

from rayloop.envs.grammar.actions import Action, Mistake, Point
from rayloop.envs.grammar.arpo import Broken, ScreenSize, acts
from rayloop.envs.grammar.language import spoken_format
from rayloop.envs.grammar.rules import Extent
from rayloop.envs.grammar.screens import ScreenSettings

Size = tuple[int, int]
"""Width and height of a screen, in pixels."""
MARK_RADIUS_PIXELS = 8
"""Pixels from a mark's middle to its edge."""
MARK_COLOUR = (255, 0, 80)


def actions_of(text: str, settings: ScreenSettings, size: Size) -> Sequence[Action] | Mistake:
    """The actions of a turn, points in pixels of the screen, or why it is not a turn."""
    pointing = settings.pointing
    unit = pointing.size(*size)
    if settings.variant == "original":
        try:
            return list(chain.from_iterable(acts(text, ScreenSize(unit, size))))
        except Broken as error:
            return Mistake(str(error), 0, text[:20])
    turn = spoken_format(settings.language).read(text, Extent(*unit))
    if isinstance(turn, Mistake):
        return turn
    return [pointing.on(action, *size) for action in turn.actions]


def mark(action: Action) -> dict[str, Any] | None:
    """The action's label with its point, or its two points; None for an action without a place."""
    values = [getattr(action, field.name) for field in fields(action) if field.name != "unit"]
    points = [value for value in values if isinstance(value, Point)]
    if not points:
        return None
    texts = [value for value in values if isinstance(value, str)]
    coordinates: list[float] = []
    for point in points:
        coordinates += [point.x, point.y]
    return {
        "kind": "drag" if len(points) > 1 else "click",
        "label": " ".join([type(action).__name__.lower(), *map(str, texts)]),
        "at": coordinates,
    }


def drawn(picture: Image.Image, actions: Sequence[Action]) -> Image.Image | None:
    """The picture with a ring and a label for each action that has a place; None without any."""
    marks = [found for found in map(mark, actions) if found is not None]
    if not marks:
        return None
    copy = picture.convert("RGB")
    draw = ImageDraw.Draw(copy)
    for one in marks:
        x, y = one["at"][:2]
        radius = MARK_RADIUS_PIXELS
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=MARK_COLOUR, width=2)
        draw.text((x + radius + 2, y - radius), one["label"], MARK_COLOUR)
    return copy

"""A picture in a terminal: two pixels in each character, as the upper and the lower half of a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from PIL import Image

Colours = Literal["true", "256"]
HALF = "▀"
RESET = "\x1b[0m"
STEPS = (0, 95, 135, 175, 215, 255)
"""Of each colour in the cube of 6 x 6 x 6 that terminals of 256 colours have, from number 16 on."""


def colours(environment: Mapping[str, str], terminal: bool) -> Colours | None:
    """What can be shown, from the environment's variables: None where output is no terminal, or one without colours
    (https://no-color.org too)."""
    kind = environment.get("TERM", "")
    if not terminal or environment.get("NO_COLOR") or kind in ("", "dumb"):
        return None
    if environment.get("COLORTERM") in ("truecolor", "24bit") or kind.endswith("-direct"):
        return "true"
    return "256" if "256" in kind else None


def blocks(picture: Image.Image, columns: int, kind: Colours = "true") -> str:
    """The picture as lines of text, at most ``columns`` characters and its own width wide; a character is twice as high as wide."""
    width = max(1, min(columns, picture.width))
    height = max(2, 2 * round(picture.height * width / picture.width / 2))
    small = picture.convert("RGB").resize((width, height), Image.Resampling.BOX)
    raw = small.tobytes()  # row by row
    pixels = [(raw[at], raw[at + 1], raw[at + 2]) for at in range(0, len(raw), 3)]
    colour = _true if kind == "true" else _cube
    lines = []
    for top in range(0, height, 2):
        pairs = zip(pixels[top * width : (top + 1) * width], pixels[(top + 1) * width : (top + 2) * width], strict=True)
        lines.append(_line([(colour(upper), colour(lower)) for upper, lower in pairs]))
    return "\n".join(lines)


def _line(cells: list[tuple[str, str]]) -> str:
    """Colours are written where they change."""
    text, before = "", ("", "")
    for cell in cells:
        if cell != before:
            text += f"\x1b[38;{cell[0]};48;{cell[1]}m"
        text += HALF
        before = cell
    return text + RESET


def _true(colour: tuple[int, int, int]) -> str:
    return "2;" + ";".join(map(str, colour))


def _cube(colour: tuple[int, int, int]) -> str:
    red, green, blue = (min(range(6), key=lambda step: abs(STEPS[step] - value)) for value in colour)
    return f"5;{16 + 36 * red + 6 * green + blue}"

"""Pictures in a terminal: which colours, and which characters."""

from __future__ import annotations

import re

import pytest
from PIL import Image

from rayloop.view.pictures import blocks, colours


@pytest.mark.parametrize(
    ("environment", "terminal", "expected"),
    [
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, True, "true"),
        ({"TERM": "xterm-256color"}, True, "256"),
        ({"TERM": "xterm-direct"}, True, "true"),
        ({"TERM": "xterm"}, True, None),
        ({"TERM": "dumb", "COLORTERM": "truecolor"}, True, None),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, True, None),
        ({"TERM": "xterm-256color"}, False, None),
        ({}, True, None),
    ],
)
def test_a_picture_is_shown_only_where_there_are_colours(
    environment: dict[str, str], terminal: bool, expected: str | None
) -> None:
    assert colours(environment, terminal) == expected


def test_a_character_shows_two_pixels() -> None:
    picture = Image.new("RGB", (2, 2), "red")
    picture.putpixel((1, 1), (0, 0, 255))
    assert (
        blocks(picture, 80)
        == "\x1b[38;2;255;0;0;48;2;255;0;0m▀\x1b[0m\x1b[38;2;255;0;0;48;2;0;0;255m▀\x1b[0m"
    )
    assert (
        blocks(picture, 80, "256")
        == "\x1b[38;5;196;48;5;196m▀\x1b[0m\x1b[38;5;196;48;5;21m▀\x1b[0m"
    )


@pytest.mark.parametrize(
    ("size", "columns", "shown"),
    [((160, 210), 80, (80, 52)), ((20, 10), 80, (20, 5)), ((900, 1), 9, (9, 1))],
)
def test_a_picture_fits_and_keeps_its_shape(
    size: tuple[int, int], columns: int, shown: tuple[int, int]
) -> None:
    lines = re.sub(r"\x1b\[[\d;]*m", "", blocks(Image.new("RGB", size), columns)).split("\n")
    assert (len(lines[0]), len(lines)) == shown

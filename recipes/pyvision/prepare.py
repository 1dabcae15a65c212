"""Draws the scenes.

``python -m rayloop data prepare pyvision --out DIR`` makes train, val and test.jsonl, and images,
in DIR.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from rayloop.core.types import derive
from rayloop.recipes import preparer, write_rows

PAGE_SIDE_PIXELS = 896
"""Pixels of the page's side."""
CARD_SIDE_PIXELS = 240
"""Pixels of a card's side."""
PLACES = ("top left", "top right", "bottom left", "bottom right")
CARDS = {
    "red": (235, 110, 110),
    "green": (110, 205, 110),
    "blue": (130, 150, 245),
    "yellow": (240, 225, 100),
}
DOTS = {
    "black": (0, 0, 0),
    "white": (255, 255, 255),
    "cyan": (0, 255, 255),
    "magenta": (255, 0, 255),
}
KINDS = ("count", "dot")
QUESTIONS = {
    "count": "How many dots are on the card at the {}?",
    "dot": "Which colour has the dot at the {}?",
}
"""Kind -> its question about a place."""
NEAR = {"count": 28, "dot": 10}
"""Pixels from the middle of a card to the edge of the box that holds its dots."""
MAX_DOTS = 5
"""Dots on a card."""
COUNTED_DOT_PIXELS = 4
"""Pixels of the side of a dot that is counted."""
COLOURED_DOT_PIXELS = 6
"""Pixels of the side of a dot whose colour is asked for."""


@dataclass(frozen=True)
class Scene:
    """``box``: left, top, right and bottom of the dots on the card in question, in pixels."""

    kind: str
    question: str
    answer: str
    box: tuple[int, int, int, int]
    image: Image.Image


def scene(kind: str, seed: int) -> Scene:
    """Equal arguments, equal scene."""
    rng = random.Random(derive(seed, "scene", kind))
    shade = rng.randint(225, 250)
    image = Image.new("RGB", (PAGE_SIDE_PIXELS, PAGE_SIDE_PIXELS), (shade, shade, shade))
    draw = ImageDraw.Draw(image)
    target = rng.randrange(len(PLACES))
    answers = []
    for place, colour in enumerate(rng.sample(list(CARDS), len(PLACES))):
        x, y = middle(place)
        half = CARD_SIDE_PIXELS // 2
        draw.rectangle((x - half, y - half, x + half - 1, y + half - 1), fill=CARDS[colour])
        answers.append(_dots(draw, rng, x, y) if kind == "count" else _dot(draw, rng, x, y))
    question = QUESTIONS[kind].format(PLACES[target])
    return Scene(kind, question, answers[target], box(kind, target), image)


def middle(place: int) -> tuple[int, int]:
    """The middle of the card in that quarter of the page, in reading order."""
    row, column = divmod(place, 2)
    return (
        PAGE_SIDE_PIXELS // 4 + column * PAGE_SIDE_PIXELS // 2,
        PAGE_SIDE_PIXELS // 4 + row * PAGE_SIDE_PIXELS // 2,
    )


def box(kind: str, place: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of the area on a card where dots can be."""
    x, y = middle(place)
    near = NEAR[kind]
    return x - near, y - near, x + near, y + near


def _dots(draw: ImageDraw.ImageDraw, rng: random.Random, x: int, y: int) -> str:
    number = rng.randint(1, MAX_DOTS)
    for cell in rng.sample(range(25), number):
        row, column = divmod(cell, 5)
        left = x - 22 + column * 10
        top = y - 22 + row * 10
        draw.rectangle(
            (left, top, left + COUNTED_DOT_PIXELS - 1, top + COUNTED_DOT_PIXELS - 1), fill="black"
        )
    return str(number)


def _dot(draw: ImageDraw.ImageDraw, rng: random.Random, x: int, y: int) -> str:
    colour = rng.choice(list(DOTS))
    left = x + rng.randint(-6, 0)
    top = y + rng.randint(-6, 0)
    draw.rectangle(
        (left, top, left + COLOURED_DOT_PIXELS - 1, top + COLOURED_DOT_PIXELS - 1),
        fill=DOTS[colour],
    )
    return colour


ROWS = {"train": 1000, "val": 64, "test": 128}
FIRST = {"train": 0, "val": 100_000, "test": 200_000, "demos": 300_000}
"""The first seed of each split: no scene is in two of them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the splits. Returns exit code 0; raises RayloopError."""
    parser = preparer("pyvision", __doc__)
    options = parser.parse_args(arguments)
    for split, count in ROWS.items():
        write_rows(options.out, split, drawn(options.out, split, count))
    return 0


def drawn(out: Path, split: str, count: int) -> Iterator[dict[str, Any]]:
    """Rows {id, image, question, answer, kind, box}; their images are written below ``out``."""
    (out / "images").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        example = scene(kind, FIRST[split] + number)
        image = f"images/{split}-{number}.png"
        example.image.save(out / image, compress_level=1)
        yield {
            "id": f"{split}-{number}",
            "image": image,
            "question": example.question,
            "answer": example.answer,
            "kind": kind,
            "box": example.box,
        }

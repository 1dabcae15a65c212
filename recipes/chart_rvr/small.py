"""Charts for a tiny model that cannot read letters: three items that are colours, values from 1 to 9, 84 x 84 pixels.

Every column of 28 pixels, one image token, holds one item. The rows have the form of ``charts.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from PIL import Image, ImageDraw

from rayloop.core.types import derive
from rayloop.recipes.chart_rvr.charts import Chart

KINDS = ("bar", "line")
COLUMN, SIDE = 28, 84
"""Pixels of an item's place, and of the chart."""
UNIT = 9
"""Height of the value 1 in pixels."""
MOST = 9
COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (50, 70, 220), "yellow": (235, 200, 30), "black": (20, 20, 20)}
PAGE, INK = (240, 240, 240), (120, 120, 120)
COLUMNS = ("Colour", "Value")


def small(kind: str, seed: int, split: str, index: int) -> Chart:
    """The chart of this place in a split. Equal arguments, equal charts. Raises ValueError for another kind."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of small chart; there are {', '.join(KINDS)}")
    draw = random.Random(derive(seed, "small charts", kind, split, index))
    items = draw.sample(list(COLOURS), SIDE // COLUMN)
    values = draw.sample(range(1, MOST + 1), len(items))
    question, answer, step = draw.choice((_value, _highest, _lowest))(draw, items, values)
    rows = tuple(zip(items, map(str, values), strict=True))
    return Chart(kind, "", COLUMNS, rows, question, answer, (f"The question asks for {asked(question)}.", step))


def asked(question: str) -> str:
    """The subject of a question: ``red``, ``highest`` or ``lowest``."""
    return question.rstrip("?").rpartition(" ")[2]


Question = tuple[str, str, str]


def _value(draw: random.Random, items: Sequence[str], values: Sequence[int]) -> Question:
    i = draw.randrange(len(items))
    return f"What is the value of {items[i]}?", str(values[i]), f"The value of {items[i]} is {values[i]}."


def _extreme(draw: random.Random, items: Sequence[str], values: Sequence[int], word: str, pick: Callable[..., int]) -> Question:
    value = pick(values)
    item = items[values.index(value)]
    return f"Which colour is the {word}?", item, f"The {word} is {value}, that of {item}."


_highest, _lowest = partial(_extreme, word="highest", pick=max), partial(_extreme, word="lowest", pick=min)


def drawn(about: Chart) -> Image.Image:
    """SIDE x SIDE pixels, the items from left to right."""
    image = Image.new("RGB", (SIDE, SIDE), PAGE)
    _DRAWN[about.kind](ImageDraw.Draw(image), [row[0] for row in about.rows], about.column(1))
    return image


def save(about: Chart, path: Path) -> None:
    """Write the chart as PNG."""
    drawn(about).save(path, compress_level=9)


def _bars(draw: ImageDraw.ImageDraw, items: Sequence[str], values: Sequence[int]) -> None:
    for i, (item, value) in enumerate(zip(items, values, strict=True)):
        left = COLUMN * i + 5
        draw.rectangle((left, SIDE - UNIT * value, left + COLUMN - 11, SIDE - 1), fill=COLOURS[item])


def _line(draw: ImageDraw.ImageDraw, items: Sequence[str], values: Sequence[int]) -> None:
    """The middle of a mark is the top of a bar of its value, half a unit lower."""
    points = [(COLUMN * i + COLUMN // 2, SIDE - UNIT * value + UNIT // 2) for i, value in enumerate(values)]
    draw.line(points, fill=INK, width=2)
    for (x, y), item in zip(points, items, strict=True):
        draw.ellipse((x - 5, y - 5, x + 5, y + 5), fill=COLOURS[item])


_DRAWN: dict[str, Callable[[ImageDraw.ImageDraw, Sequence[str], Sequence[int]], None]] = {"bar": _bars, "line": _line}

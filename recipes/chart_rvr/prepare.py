"""Draws charts that the tiny model of quickstart.yaml can see.

``python -m rayloop data prepare chart_rvr --out DIR`` writes them. ``--warm N`` adds warm.jsonl,
for the stage that made the model.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from rayloop.core.failures import ConfigError
from rayloop.core.types import derive
from rayloop.recipes import write_rows

KINDS = ("bar", "line")
COLUMN_PIXELS = 28
"""Pixels of an item's place."""
CHART_SIDE_PIXELS = 84
"""Pixels of the chart's side."""
UNIT_HEIGHT_PIXELS = 9
"""Height of the value 1 in pixels."""
MAX_VALUE = 9
COLOURS = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (50, 70, 220),
    "yellow": (235, 200, 30),
    "black": (20, 20, 20),
}
PAGE_COLOUR = (240, 240, 240)
INK_COLOUR = (120, 120, 120)
COLUMNS = ("Colour", "Value")


@dataclass(frozen=True)
class Chart:
    """A chart with its question and answer.

    ``rows``: the name of each item, then its value in each of ``columns[1:]``, as whole numbers.
    """

    kind: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    question: str
    answer: str
    steps: tuple[str, ...]

    @property
    def table(self) -> dict[str, Any]:
        """The chart's data as ``{columns, rows}``."""
        return {"columns": list(self.columns), "rows": [list(row) for row in self.rows]}

    @property
    def reasoning(self) -> str:
        """The steps as the policy should write them."""
        return "\n".join(f"<step-{i}>: {step}" for i, step in enumerate(self.steps, start=1))

    def column(self, index: int) -> list[int]:
        """The numbers of one column."""
        return [int(row[index]) for row in self.rows]


def small(kind: str, seed: int, split: str, index: int) -> Chart:
    """The chart of this place in a split.

    Equal arguments, equal charts. Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of small chart; there are {', '.join(KINDS)}")
    draw = random.Random(derive(seed, "small charts", kind, split, index))
    items = draw.sample(list(COLOURS), CHART_SIDE_PIXELS // COLUMN_PIXELS)
    values = draw.sample(range(1, MAX_VALUE + 1), len(items))
    question, answer, step = draw.choice((_value, _highest, _lowest))(draw, items, values)
    return Chart(
        kind=kind,
        title="",
        columns=COLUMNS,
        rows=tuple(zip(items, map(str, values), strict=True)),
        question=question,
        answer=answer,
        steps=(f"The question asks for {asked(question)}.", step),
    )


def asked(question: str) -> str:
    """The subject of a question: ``red``, ``highest`` or ``lowest``."""
    return question.rstrip("?").rpartition(" ")[2]


Question = tuple[str, str, str]


def _value(draw: random.Random, items: Sequence[str], values: Sequence[int]) -> Question:
    i = draw.randrange(len(items))
    return (
        f"What is the value of {items[i]}?",
        str(values[i]),
        f"The value of {items[i]} is {values[i]}.",
    )


def _extreme(
    draw: random.Random,
    items: Sequence[str],
    values: Sequence[int],
    word: str,
    pick: Callable[..., int],
) -> Question:
    value = pick(values)
    item = items[values.index(value)]
    return f"Which colour is the {word}?", item, f"The {word} is {value}, that of {item}."


_highest = partial(_extreme, word="highest", pick=max)
_lowest = partial(_extreme, word="lowest", pick=min)


def drawn(about: Chart) -> Image.Image:
    """CHART_SIDE_PIXELS squared, the items from left to right."""
    image = Image.new("RGB", (CHART_SIDE_PIXELS, CHART_SIDE_PIXELS), PAGE_COLOUR)
    _DRAWN[about.kind](ImageDraw.Draw(image), [row[0] for row in about.rows], about.column(1))
    return image


def save(about: Chart, path: Path) -> None:
    """Write the chart as PNG."""
    drawn(about).save(path, compress_level=9)


def _bars(draw: ImageDraw.ImageDraw, items: Sequence[str], values: Sequence[int]) -> None:
    for i, (item, value) in enumerate(zip(items, values, strict=True)):
        left = COLUMN_PIXELS * i + 5
        bar = (
            left,
            CHART_SIDE_PIXELS - UNIT_HEIGHT_PIXELS * value,
            left + COLUMN_PIXELS - 11,
            CHART_SIDE_PIXELS - 1,
        )
        draw.rectangle(bar, fill=COLOURS[item])


def _line(draw: ImageDraw.ImageDraw, items: Sequence[str], values: Sequence[int]) -> None:
    """The middle of a mark is the top of a bar of its value, half a unit lower."""
    points = [
        (
            COLUMN_PIXELS * i + COLUMN_PIXELS // 2,
            CHART_SIDE_PIXELS - UNIT_HEIGHT_PIXELS * value + UNIT_HEIGHT_PIXELS // 2,
        )
        for i, value in enumerate(values)
    ]
    draw.line(points, fill=INK_COLOUR, width=2)
    for (x, y), item in zip(points, items, strict=True):
        draw.ellipse((x - 5, y - 5, x + 5, y + 5), fill=COLOURS[item])


_DRAWN: dict[str, Callable[[ImageDraw.ImageDraw, Sequence[str], Sequence[int]], None]] = {
    "bar": _bars,
    "line": _line,
}


@dataclass(frozen=True)
class Made:
    """Charts of one size.

    ``kinds`` and the ``rows`` of each split are defaults. ``drawn`` makes the chart of a kind, a
    seed, a split and its place there; ``saved`` writes it.
    """

    kinds: Sequence[str]
    rows: Mapping[str, int]
    drawn: Callable[[str, int, str, int], Chart]
    saved: Callable[[Chart, Path], None]


MADE = Made(KINDS, {"train": 1000, "val": 64, "test": 192, "warm": 0}, small, save)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write each split's rows and images. Returns exit code 0; raises ConfigError."""
    return make_rows("python -m rayloop data prepare chart_rvr", MADE, arguments)


def make_rows(command: str, made: Made, arguments: Sequence[str] | None) -> int:
    """Parse the options of ``command``, and write the splits.

    Returns exit code 0; raises ConfigError.
    """
    parser = argparse.ArgumentParser(prog=command)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    for split, count in made.rows.items():
        parser.add_argument(
            f"--{split}", type=int, default=count, help="rows of the split (default: %(default)s)"
        )
    parser.add_argument(
        "--kinds",
        default=",".join(made.kinds),
        help="kinds of chart, in turn (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of all charts; equal seeds, equal rows"
    )
    options = parser.parse_args(arguments)
    kinds = [kind.strip() for kind in options.kinds.split(",")]
    unknown = sorted(set(kinds) - set(made.kinds))
    if unknown:
        raise ConfigError(
            f"--kinds: no such chart: {', '.join(unknown)}; there are {', '.join(made.kinds)}"
        )
    seen: set[tuple[Any, ...]] = set()
    for split in made.rows:
        count = getattr(options, split)
        if count:
            drawings = list(charts(made, count, kinds, options.seed, split, seen))
            write(options.out, split, drawings, made.saved)
    return 0


def charts(
    made: Made, count: int, kinds: Sequence[str], seed: int, split: str, seen: set[tuple[Any, ...]]
) -> Iterator[Chart]:
    """``count`` charts, the kinds in turn, whose tables are not in ``seen``.

    Their tables are added to ``seen``, so that splits share no chart.
    """
    number = 0
    index = 0
    while number < count:
        chart = made.drawn(kinds[number % len(kinds)], seed, split, index)
        index += 1
        key = (chart.kind, chart.columns, chart.rows)
        if key not in seen:
            seen.add(key)
            number += 1
            yield chart


def write(
    out: Path, split: str, made: Sequence[Chart], save: Callable[[Chart, Path], None]
) -> Path:
    """Write ``SPLIT.jsonl``, and one image for each row below ``images/SPLIT``."""
    (out / "images" / split).mkdir(parents=True, exist_ok=True)
    rows = []
    for i, chart in enumerate(made):
        image = f"images/{split}/{i:06d}.png"
        save(chart, out / image)
        rows.append(
            {
                "id": f"{split}-{i}",
                "image": image,
                "query": chart.question,
                "label": chart.answer,
                "table": chart.table,
                "chart_type": chart.kind,
                "reasoning": chart.reasoning,
                "data_source": f"generated {chart.kind}",
            }
        )
    return write_rows(out, split, rows)

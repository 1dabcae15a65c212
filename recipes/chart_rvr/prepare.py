"""Draws charts with exact tables, questions and steps: ``python -m rayloop data prepare chart_rvr --out DIR``. ``--small``: charts
that the tiny model of quickstart.yaml can see; ``--warm N`` adds warm.jsonl, for the stage that made it."""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from rayloop.core.failures import ConfigError
from rayloop.core.types import derive
from rayloop.recipes import write_rows
from rayloop.recipes.chart_rvr import charts as large
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


Making = Callable[[str, int, str, int], Chart]
ROWS = {"train": 600, "val": 60, "test": 120, "warm": 0}
SMALL = {"train": 1000, "val": 64, "test": 192, "warm": 0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write each split's rows and images. Returns exit code 0; raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m rayloop data prepare chart_rvr", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--small", action="store_true", help="of 84 x 84 pixels with three colours, for the quickstart")
    for split, count in ROWS.items():
        what = f"rows of the split (default: {count}, small: {SMALL[split]})"
        parser.add_argument(f"--{split}", type=int, help=what)
    parser.add_argument("--kinds", help=f"kinds of chart, in turn (default: {','.join(large.KINDS)})")
    parser.add_argument("--seed", type=int, default=0, help="of all charts; equal seeds, equal rows")
    chosen = parser.parse_args(arguments)
    known, make, store = (KINDS, small, save) if chosen.small else (large.KINDS, large.chart, large.save)
    kinds = [kind.strip() for kind in chosen.kinds.split(",")] if chosen.kinds else known
    if unknown := sorted(set(kinds) - set(known)):
        raise ConfigError(f"--kinds: no such chart: {', '.join(unknown)}; there are {', '.join(known)}")
    seen: set[tuple[Any, ...]] = set()
    for split, count in (SMALL if chosen.small else ROWS).items():
        if count := count if getattr(chosen, split) is None else getattr(chosen, split):
            made = list(charts(count, kinds, chosen.seed, split, seen, make))
            write(chosen.out, split, made, store)
    return 0


def charts(
    count: int, kinds: Sequence[str], seed: int, split: str, seen: set[tuple[Any, ...]], make: Making = large.chart
) -> Iterator[Chart]:
    """``count`` charts, the kinds in turn; none whose table is in ``seen``, to which theirs are added: splits share no chart."""
    made = index = 0
    while made < count:
        found = make(kinds[made % len(kinds)], seed, split, index)
        index += 1
        key = (found.kind, found.columns, found.rows)
        if key not in seen:
            seen.add(key)
            made += 1
            yield found


def write(out: Path, split: str, made: Sequence[Chart], save: Callable[[Chart, Path], None] = large.save) -> Path:
    """Write ``SPLIT.jsonl``, and one image for each row below ``images/SPLIT``."""
    (out / "images" / split).mkdir(parents=True, exist_ok=True)
    images = [f"images/{split}/{i:06d}.png" for i in range(len(made))]
    for one, image in zip(made, images, strict=True):
        save(one, out / image)
    rows = [
        {
            "id": f"{split}-{i}", "image": image, "query": one.question, "label": one.answer, "table": one.table,
            "chart_type": one.kind, "reasoning": one.reasoning, "data_source": f"generated {one.kind}",
        }
        for i, (one, image) in enumerate(zip(made, images, strict=True))
    ]  # fmt: skip
    return write_rows(out, split, rows)

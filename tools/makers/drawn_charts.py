"""Draws charts of six kinds as large as Chart-RVR's, with exact tables, questions and steps, as
rows of its recipe: ``python -m tools.makers.drawn_charts --out DIR``. Equal seeds draw equal
charts.
"""

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rayloop.core.types import derive
from rayloop.recipes.chart_rvr.prepare import Chart, Made, make_rows

KINDS = ("bar", "line", "pie", "stacked bar", "scatterplot", "area")
"""As the prompt calls them."""
WIDTH, HEIGHT = 560, 448
"""Pixels: 320 patches of 28 x 28, the size that Chart-RVR trains at, so nothing is resized."""
DOTS_PER_INCH = 100
_SUBJECTS = (
    ("Sales", "million dollars"),
    ("Visitors", "thousands"),
    ("Exports", "thousand tons"),
    ("Rainfall", "mm"),
    ("Output", "units"),
    ("Members", "people"),
    ("Revenue", "million euros"),
    ("Trips", "thousands"),
)
_CATEGORIES = {
    "City": ("Lagos", "Lima", "Oslo", "Quito", "Rome", "Seoul", "Tunis", "Vienna"),
    "Product": ("Bikes", "Boats", "Cars", "Lamps", "Radios", "Tables", "Tents", "Toys"),
    "Country": ("Chile", "Egypt", "Ghana", "India", "Japan", "Kenya", "Norway", "Peru"),
    "Crop": ("Barley", "Beans", "Corn", "Oats", "Onions", "Potatoes", "Rice", "Wheat"),
}
_GROUPS = ("North", "South", "East", "West")
_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")


def chart(kind: str, seed: int, split: str, index: int) -> Chart:
    """The chart of this place in a split.

    Equal arguments, equal charts. Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of chart; there are {', '.join(KINDS)}")
    draw = random.Random(derive(seed, "charts", kind, split, index))
    subject, unit = draw.choice(_SUBJECTS)
    columns, rows = _DATA[kind](draw, subject)
    title = f"{subject} by {columns[0].lower()} ({'%' if kind == 'pie' else unit})"
    question, answer, steps = draw.choice(_questions(kind))(
        draw, Chart(kind, title, columns, rows, "", "", ())
    )
    opening = f"The chart is a {kind} chart of {subject.lower()} by {columns[0].lower()}."
    return Chart(kind, title, columns, rows, question, answer, (opening, *steps))


Data = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]
Question = tuple[str, str, tuple[str, ...]]
Asking = Callable[[random.Random, Chart], Question]


def _categories(draw: random.Random, subject: str) -> Data:
    name, items = draw.choice(list(_CATEGORIES.items()))
    chosen = sorted(draw.sample(items, draw.randint(3, 6)))
    return (name, subject), tuple(
        zip(chosen, map(str, draw.sample(range(5, 100), len(chosen))), strict=True)
    )


def _years(draw: random.Random, subject: str) -> Data:
    count = draw.randint(4, 7)
    first = draw.randint(1990, 2020)
    values = draw.sample(range(5, 100), count)
    return ("Year", subject), tuple((str(first + i), str(value)) for i, value in enumerate(values))


def _shares(draw: random.Random, subject: str) -> Data:
    """Whole per cents, all different, that are 100 together."""
    name, items = draw.choice(list(_CATEGORIES.items()))
    chosen = sorted(draw.sample(items, draw.randint(3, 5)))
    while True:
        cuts = sorted(draw.sample(range(5, 96), len(chosen) - 1))
        parts = [b - a for a, b in zip([0, *cuts], [*cuts, 100], strict=True)]
        if len(set(parts)) == len(parts) and min(parts) >= 5:
            return (name, subject), tuple(zip(chosen, map(str, parts), strict=True))


def _stacks(draw: random.Random, subject: str) -> Data:
    columns, rows = _categories(draw, subject)
    groups = _GROUPS[: draw.randint(2, 3)]
    return (columns[0], *groups), tuple(
        (row[0], *(str(draw.randint(8, 60)) for _ in groups)) for row in rows[:5]
    )


def _points(draw: random.Random, subject: str) -> Data:
    """Places on the horizontal axis are the items."""
    count = draw.randint(4, 8)
    places = sorted(draw.sample(range(1, 20), count))
    return ("Week", subject), tuple(
        (str(place), str(value))
        for place, value in zip(places, draw.sample(range(5, 100), count), strict=True)
    )


_DATA: dict[str, Callable[[random.Random, str], Data]] = {
    "bar": _categories,
    "line": _years,
    "pie": _shares,
    "stacked bar": _stacks,
    "scatterplot": _points,
    "area": _years,
}


def _questions(kind: str) -> Sequence[Asking]:
    highest, lowest = (
        partial(_extreme, word=word, pick=pick)
        for word, pick in (("highest", max), ("lowest", min))
    )
    return (_value, highest, lowest, _difference, _sum, _larger) + (
        (_total,) if kind == "stacked bar" else ()
    )


def _series(draw: random.Random, about: Chart) -> tuple[int, str, list[int]]:
    """One of the columns of numbers: its place, its name, its values."""
    index = draw.randrange(1, len(about.columns))
    return index, about.columns[index], about.column(index)


def _value(draw: random.Random, about: Chart) -> Question:
    _, name, values = _series(draw, about)
    i = draw.randrange(len(values))
    item = about.rows[i][0]
    steps = (f"The question asks for {name} of {item}.", f"The chart shows {values[i]} for {item}.")
    return (
        f"What is the value of {name} for {about.columns[0].lower()} {item}?",
        str(values[i]),
        steps,
    )


def _extreme(
    draw: random.Random, about: Chart, word: str, pick: Callable[[Sequence[int]], int]
) -> Question:
    index, name, values = _series(draw, about)
    found = pick(values)
    listed = ", ".join(f"{row[0]}: {row[index]}" for row in about.rows)
    if values.count(found) > 1:
        return _value(draw, about)
    item = about.rows[values.index(found)][0]
    steps = (
        f"The values of {name} are {listed}.",
        f"The {word} of them is {found}, which is that of {item}.",
    )
    return f"Which {about.columns[0].lower()} has the {word} value of {name}?", item, steps


def _pair(draw: random.Random, about: Chart) -> tuple[str, tuple[str, str], tuple[int, int], str]:
    """Two items of a series: the series' name, the items, their values, and the step that reads
    them.
    """
    _, name, values = _series(draw, about)
    i, j = draw.sample(range(len(values)), 2)
    (a, *_), (b, *_), x, y = about.rows[i], about.rows[j], values[i], values[j]
    return name, (a, b), (x, y), f"{name} is {x} for {a} and {y} for {b}."


def _difference(draw: random.Random, about: Chart) -> Question:
    name, (a, b), values, read = _pair(draw, about)
    high, low = max(values), min(values)
    steps = (read, f"The difference is {high} - {low} = {high - low}.")
    return f"What is the difference in {name} between {a} and {b}?", str(high - low), steps


def _sum(draw: random.Random, about: Chart) -> Question:
    name, (a, b), (x, y), read = _pair(draw, about)
    return (
        f"What is the sum of {name} for {a} and {b}?",
        str(x + y),
        (read, f"The sum is {x} + {y} = {x + y}."),
    )


def _larger(draw: random.Random, about: Chart) -> Question:
    name, (a, b), (x, y), read = _pair(draw, about)
    steps = (read, f"{x} {'is' if x > y else 'is not'} larger than {y}.")
    return f"Is the value of {name} for {a} larger than for {b}?", "Yes" if x > y else "No", steps


def _total(draw: random.Random, about: Chart) -> Question:
    i = draw.randrange(len(about.rows))
    item, *parts = about.rows[i]
    total = sum(map(int, parts))
    steps = (
        f"The parts of {item} are {', '.join(parts)}.",
        f"Together they are {' + '.join(parts)} = {total}.",
    )
    return f"What is the total for {about.columns[0].lower()} {item}?", str(total), steps


def figure(about: Chart) -> Any:
    """The chart as a matplotlib figure of WIDTH x HEIGHT pixels, every value written beside its
    mark.
    """
    from matplotlib.figure import Figure

    drawn = Figure(
        figsize=(WIDTH / DOTS_PER_INCH, HEIGHT / DOTS_PER_INCH),
        dpi=DOTS_PER_INCH,
        layout="constrained",
    )
    axes = drawn.subplots()
    axes.set_title(about.title)
    _DRAWN[about.kind](axes, about)
    if about.kind != "pie":
        axes.set_xlabel(about.columns[0])
        axes.set_ylabel(about.columns[1] if len(about.columns) == 2 else "")
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0)
    return drawn


def save(about: Chart, path: Path) -> None:
    """As PNG without the date or the release of matplotlib in it."""
    figure(about).savefig(path, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})


def _bar(axes: Any, about: Chart) -> None:
    axes.bar_label(axes.bar([row[0] for row in about.rows], about.column(1), color=_COLOURS[0]))


def _line(axes: Any, about: Chart) -> None:
    axes.plot([row[0] for row in about.rows], about.column(1), marker="o", color=_COLOURS[1])
    _written(axes, [row[0] for row in about.rows], about.column(1))


def _area(axes: Any, about: Chart) -> None:
    axes.fill_between([row[0] for row in about.rows], about.column(1), color=_COLOURS[2], alpha=0.6)
    _written(axes, [row[0] for row in about.rows], about.column(1))


def _points_drawn(axes: Any, about: Chart) -> None:
    places = about.column(0)
    axes.scatter(places, about.column(1), color=_COLOURS[3])
    axes.set_xticks(places)
    _written(axes, places, about.column(1))


def _written(axes: Any, places: Sequence[Any], values: Sequence[int]) -> None:
    for place, value in zip(places, values, strict=True):
        axes.annotate(
            str(value), (place, value), textcoords="offset points", xytext=(0, 6), ha="center"
        )


def _pie(axes: Any, about: Chart) -> None:
    labels = [f"{name}: {value}%" for name, value in about.rows]
    axes.pie(about.column(1), labels=labels, colors=_COLOURS, startangle=90, counterclock=False)


def _stacked(axes: Any, about: Chart) -> None:
    names, below = [row[0] for row in about.rows], [0] * len(about.rows)
    for index, name in enumerate(about.columns[1:], start=1):
        values = about.column(index)
        bars = axes.bar(names, values, bottom=below, label=name, color=_COLOURS[index - 1])
        axes.bar_label(
            bars, labels=[str(value) for value in values], label_type="center", color="white"
        )
        below = [a + b for a, b in zip(below, values, strict=True)]
    axes.legend()


_DRAWN: dict[str, Callable[[Any, Chart], None]] = {
    "bar": _bar,
    "line": _line,
    "pie": _pie,
    "stacked bar": _stacked,
    "scatterplot": _points_drawn,
    "area": _area,
}


MADE = Made(KINDS, {"train": 600, "val": 60, "test": 120}, chart, save)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write each split's rows and images. Returns exit code 0; raises ConfigError."""
    return make_rows("python -m tools.makers.drawn_charts", MADE, arguments)


if __name__ == "__main__":
    sys.exit(main())

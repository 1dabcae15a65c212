"""The curves of a run as points of SVG drawings, with the axes that matplotlib would choose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from rayloop.core.files import yaml_data
from rayloop.view.reader import Record, matching, series

HELD_OUT = ("val_sampled/reward/mean", "val/reward/mean")
CHARTS = tuple(
    (title, *names) for title, names in yaml_data(Path(__file__).with_name("charts.yaml")).items()
)
"""The title of each chart, followed by its metrics."""
COUNTS = (
    "filtered/",
    "excluded/",
    "stale/",
    "surplus/",
    "cancelled/",
    "end_reason/",
    "flag/",
    "lost/",
)
"""Metrics that are absent where they would be 0."""
LEFT_EDGE = 58
RIGHT_EDGE = 352
TOP_EDGE = 16
BOTTOM_EDGE = 146
"""Edges of the axes in a drawing of 360 x 176."""
CHART_COLUMNS = 120
"""A line has the lowest and the highest of its points in each of this many columns.

A chart is 294 pixels wide.
"""
LEAST_RANGE = 1e-6
"""A smaller range, as a share of the values, is rounding.

It is drawn as if it were a tenth of the values.
"""

Place = tuple[float, float]
"""Pixels from the left and from the top of the drawing."""
Points = Sequence[tuple[int, float | None]]
"""(step, value) pairs; None for a value that was not finite."""


def charts(metrics: Sequence[Record], evaluations: Sequence[Record]) -> list[Record]:
    """Title and lines of each chart that has data.

    Held-out scores come from ``evaluations``, which has step 0 too.
    """
    lines = {name: v for name, v in series(metrics).items() if not name.startswith("val/")}
    lines |= series(evaluations)
    steps = [record["step"] for record in metrics]
    for name in lines:
        if name.startswith(COUNTS):
            values = dict(lines[name])
            lines[name] = [(step, values.get(step, 0.0)) for step in steps]
    drawings: list[Record] = []
    for title, *patterns in CHARTS:
        names = matching(lines, patterns)
        if names:
            named_lines = [{"name": name, "points": lines[name]} for name in names]
            drawings.append({"title": title, "lines": named_lines})
    if drawings and drawings[0]["title"] == CHARTS[0][0]:
        for line in drawings[0]["lines"]:
            _add_interval(line, lines)
    return drawings


def _add_interval(line: Record, lines: Mapping[str, Points]) -> None:
    """Add the value at the start, and the bounds of the interval, to a held-out line."""
    metric = line["name"].removesuffix("mean")
    line["start"] = line["points"][0][1]
    line["low"] = lines.get(f"{metric}low", [])
    line["high"] = lines.get(f"{metric}high", [])


def is_constant(chart: Record) -> bool:
    """Whether each line of the chart has one value at several steps: it is named, and not drawn."""
    return all(_has_one_value(line["points"]) for line in chart["lines"])


def _has_one_value(points: Points) -> bool:
    return len(points) > 1 and len({value for _, value in points}) == 1


@dataclass(frozen=True)
class _Axis:
    """An axis from ``begin`` to ``end``, in the values that it shows."""

    begin: float
    end: float
    ticks: list[tuple[float, str]]
    """(value, label) of each tick."""
    unit: str
    """The factor of all labels, such as ``1e-8``."""

    def scaled(self, value: float, start: int, stop: int) -> float:
        """The pixel of a value on an axis drawn from pixel ``start`` to pixel ``stop``."""
        share = (value - self.begin) / (self.end - self.begin)
        return round(start + share * (stop - start), 1)


@dataclass(frozen=True)
class _Axes:
    steps: _Axis
    values: _Axis

    def x(self, step: float) -> float:
        """The pixel of a step, from the left."""
        return self.steps.scaled(step, LEFT_EDGE, RIGHT_EDGE)

    def y(self, value: float) -> float:
        """The pixel of a value, from the top."""
        return self.values.scaled(value, BOTTOM_EDGE, TOP_EDGE)

    def path(self, points: Points) -> list[Place]:
        """The places of the finite points, downsampled."""
        places = [(self.x(step), self.y(value)) for step, value in points if value is not None]
        return _downsampled(places)


def drawn(chart: Record) -> Record:
    """The chart as places in its drawing.

    ``x`` and ``y`` are (place, label) of each tick, ``unit`` belongs to all labels of y; of each
    line ``path`` [steps], ``area`` between its bounds, ``start`` and the ``last`` value.
    """
    axes = _axes(chart["lines"])
    return {
        "title": chart["title"],
        "lines": [_drawn_line(line, axes) for line in chart["lines"]],
        "unit": axes.values.unit,
        "x": [(axes.x(step), label) for step, label in axes.steps.ticks],
        "y": [(axes.y(value), label) for value, label in axes.values.ticks],
    }


def _drawn_line(line: Record, axes: _Axes) -> Record:
    finite = [value for _, value in line["points"] if value is not None]
    start = line.get("start")
    lower_bound = axes.path(line.get("low", ()))
    upper_bound = axes.path(line.get("high", ()))
    return {
        "name": line["name"],
        "path": axes.path(line["points"]),
        "last": finite[-1] if finite else None,
        "area": [*lower_bound, *reversed(upper_bound)],
        "start": None if start is None else axes.y(start),
    }


def _downsampled(places: list[Place]) -> list[Place]:
    """The lowest and the highest place of each of ``CHART_COLUMNS``; a short line stays whole."""
    count = len(places)
    if count <= 2 * CHART_COLUMNS:
        return places
    result: list[Place] = []
    for column in range(CHART_COLUMNS):
        part = places[column * count // CHART_COLUMNS : (column + 1) * count // CHART_COLUMNS]
        height = itemgetter(1)
        result += sorted({min(part, key=height), max(part, key=height)})
    return result


def _axes(lines: Sequence[Record]) -> _Axes:
    """Axes that hold every finite point of the lines and of their intervals."""
    steps: list[int] = []
    values: list[float] = []
    for line in lines:
        for step, value in chain(line["points"], line.get("low", ()), line.get("high", ())):
            if value is not None:
                steps.append(step)
                values.append(value)
    low, high = _value_range(values or [0.0])
    return _Axes(
        _labelled_axis(min(steps, default=0), max(steps, default=0), whole=True),
        _labelled_axis(low, high, whole=False),
    )


def _value_range(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value, moved apart where they differ by rounding only."""
    low = min(values)
    high = max(values)
    if high - low > LEAST_RANGE * max(abs(low), abs(high)):
        return low, high
    return low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)


def _labelled_axis(low: float, high: float, *, whole: bool) -> _Axis:
    """The axis that matplotlib would choose for these values, with the labels of its ticks.

    With ``whole`` ticks are whole numbers, and the axis ends at the values, not at a tick.
    """
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    if low == high:
        low -= 1
        high += 1
    formatter: Any = ScalarFormatter(useOffset=False)
    formatter.create_dummy_axis()
    ticks = [float(tick) for tick in MaxNLocator(4, integer=whole).tick_values(low, high)]
    formatter.axis.set_view_interval(ticks[0], ticks[-1])
    labels = formatter.format_ticks(ticks)
    if not whole:
        low = ticks[0]
        high = ticks[-1]
    labelled = [
        (tick, label) for tick, label in zip(ticks, labels, strict=True) if low <= tick <= high
    ]
    return _Axis(low, high, labelled, formatter.get_offset())

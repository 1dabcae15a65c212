"""The curves of a run as points of SVG drawings, with the axes that matplotlib would choose."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rayloop.view.reader import Record, matching, series

HELD_OUT = ("val_sampled/reward/mean", "val/reward/mean")
_TABLE = yaml.safe_load(Path(__file__).with_name("charts.yaml").read_text(encoding="utf-8"))
CHARTS = tuple((title, *names) for title, names in _TABLE.items())
"""A title, and the metrics below it."""
COUNTS = ("filtered/", "excluded/", "stale/", "surplus/", "cancelled/", "end_reason/", "flag/")
"""Metrics that are absent where they would be 0."""
LEFT, RIGHT, TOP, BOTTOM = 58, 352, 16, 146
"""Edges of the axes in a drawing of 360 x 176."""
COLUMNS = 120
"""A line has the lowest and the highest of its points in each of so many columns; a chart is 294
pixels wide.
"""
LEAST = 1e-6
"""A smaller range, as a share of the values, is drawn as if it were a tenth of them: it is
rounding.
"""


def charts(metrics: Sequence[Record], evaluations: Sequence[Record]) -> list[Record]:
    """Title and lines of each chart that has data; held-out scores come from ``evaluations``, which
    has step 0 too.
    """
    lines: dict[str, Any] = {
        k: v for k, v in series(metrics).items() if not k.startswith("val/")
    } | series(evaluations)
    steps = [record["step"] for record in metrics]
    for name in lines:
        if name.startswith(COUNTS):
            values = dict(lines[name])
            lines[name] = [(step, values.get(step, 0.0)) for step in steps]
    found = ((title, matching(lines, patterns)) for title, *patterns in CHARTS)
    drawings: list[Record] = [
        {"title": t, "lines": [{"name": n, "points": lines[n]} for n in names]}
        for t, names in found
        if names
    ]
    for line in drawings[0]["lines"] if drawings and drawings[0]["title"] == CHARTS[0][0] else ():
        bounds = {
            bound: lines.get(line["name"].removesuffix("mean") + bound, [])
            for bound in ("low", "high")
        }
        line |= {"start": line["points"][0][1], **bounds}
    return drawings


def is_constant(chart: Record) -> bool:
    """Whether each line of the chart has one value at several steps: it is named, and not drawn."""
    return all(
        len(line["points"]) > 1 and len({value for _, value in line["points"]}) == 1
        for line in chart["lines"]
    )


def drawn(chart: Record) -> Record:
    """The chart as places in its drawing: ``x`` and ``y`` are (place, label) of each tick, ``unit``
    belongs to all labels of y; of each line ``path`` [steps], ``area`` between its bounds,
    ``start`` and the ``last`` value.
    """
    lines = [
        {**line, "finite": [p for p in line["points"] if p[1] is not None]}
        for line in chart["lines"]
    ]
    every = [
        p
        for line in lines
        for p in (*line["finite"], *line.get("low", ()), *line.get("high", ()))
        if p[1] is not None
    ]
    steps, values = [step for step, _ in every] or [0], [value for _, value in every] or [0.0]
    low, high = min(values), max(values)
    if high - low <= LEAST * max(abs(low), abs(high)):
        low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
    (first, last, x, _), (bottom, top, y, unit) = (
        _axis(min(steps), max(steps), True),
        _axis(low, high, False),
    )

    def place(step: float, value: float) -> tuple[float, float]:
        right, up = (step - first) / (last - first), (value - bottom) / (top - bottom)
        return round(LEFT + right * (RIGHT - LEFT), 1), round(BOTTOM - up * (BOTTOM - TOP), 1)

    def path(points: Sequence[tuple[int, float | None]]) -> list[tuple[float, float]]:
        places = [place(step, value) for step, value in points if value is not None]
        if len(places) <= 2 * COLUMNS:
            return places
        parts = [
            places[k * len(places) // COLUMNS : (k + 1) * len(places) // COLUMNS]
            for k in range(COLUMNS)
        ]
        return [
            at
            for part in parts
            for at in sorted({min(part, key=lambda at: at[1]), max(part, key=lambda at: at[1])})
        ]

    shown = [
        {
            "name": line["name"],
            "path": path(line["finite"]),
            "last": line["finite"][-1][1] if line["finite"] else None,
            "area": [*path(line.get("low", ())), *reversed(path(line.get("high", ())))],
            "start": None if line.get("start") is None else place(first, line["start"])[1],
        }
        for line in lines
    ]
    ticks = {
        "x": [(place(at, bottom)[0], text) for at, text in x],
        "y": [(place(first, at)[1], text) for at, text in y],
    }
    return {"title": chart["title"], "lines": shown, "unit": unit, **ticks}


def _axis(
    low: float, high: float, whole: bool
) -> tuple[float, float, list[tuple[float, str]], str]:
    """Where an axis begins and ends, its ticks with their labels, and what belongs to all labels,
    such as ``1e-8``.
    """
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    low, high = (low - 1, high + 1) if low == high else (low, high)
    formatter = ScalarFormatter(useOffset=False)
    formatter.create_dummy_axis()
    assert formatter.axis is not None
    ticks = [float(tick) for tick in MaxNLocator(4, integer=whole).tick_values(low, high)]
    formatter.axis.set_view_interval(ticks[0], ticks[-1])
    begin, end = (low, high) if whole else (ticks[0], ticks[-1])
    labels = formatter.format_ticks(ticks)
    return (
        begin,
        end,
        [(t, text) for t, text in zip(ticks, labels, strict=True) if begin <= t <= end],
        formatter.get_offset(),
    )

"""Draws ``curves.png`` and ``boxes.png`` at the end of a run, and pictures in a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image
from rich.color import Color, ColorSystem
from rich.style import Style

from rayloop.config.settings import Component
from rayloop.core.protocols import Box, BoxReader
from rayloop.data.images import decode
from rayloop.measure.controls import RIGHT
from rayloop.run.folder import RunFolder
from rayloop.run.records.jsonl import JsonLines
from rayloop.view.reader import Record, by_step, configuration, evenly, image_path, series, tint_note
from rayloop.view.words import gained, sampled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGES, COLUMNS = 10, 5
STYLES = {"true": ("#12874a", "-"), "before": ("#8a4fb0", ":"), "after": ("#d4480c", "--")}


def draw_or_emit(folder: RunFolder, boxes: Component | None, emit: Callable[[str], None]) -> None:
    """Draw at the end of a run, which is done and saved: an error here is emitted, and fails nothing."""
    try:
        for file in draw(folder, boxes.build() if boxes else None):
            emit(f"wrote {file}")
    except Exception as error:
        emit(f"the pictures could not be drawn: {type(error).__name__}: {error}")


def draw(folder: RunFolder, reader: BoxReader | None) -> list[Path]:
    """Draw what the run has on record into its folder, and return the files: boxes need a reader and two evaluations."""
    drawings = {"curves.png": curves(folder), "boxes.png": boxes(folder, reader) if reader else None}
    written = []
    for name, figure in drawings.items():
        if figure is not None:
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=120)
            (folder.path / name).write_bytes(file.getvalue())
            written.append(folder.path / name)
    return written


def curves(folder: RunFolder) -> Figure:
    """Training and held-out reward over the steps; held-out with 95 % intervals, and dotted where each of them began."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    config, evaluations = configuration(folder), series(by_step(folder.events, "evaluated").values())
    sampling = (config.get("rollout") or {}).get("sampling") or {}
    drawn, greedy = sampling.get("temperature", 1.0), (config.get("evaluation") or {}).get("greedy", True)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    if training := series(folder.metrics).get("reward/mean", []):
        axes.plot(*_numbers(training), "-", color="0.6", linewidth=1, label=f"training ({sampled(drawn)})")
    for prefix, temperature in (("val_sampled", drawn), ("val", 0.0 if greedy else drawn)):
        if points := evaluations.get(f"{prefix}/reward/mean", []):
            (line,) = axes.plot(*_numbers(points), "o-", label=f"held-out ({sampled(temperature)})")
            low, high = (_numbers(evaluations.get(f"{prefix}/reward/{bound}", []))[1] for bound in ("low", "high"))
            if len(low) == len(high) == len(points):
                axes.fill_between(_numbers(points)[0], low, high, color=line.get_color(), alpha=0.15)
            axes.axhline(_numbers(points)[1][0], color=line.get_color(), linestyle=":", linewidth=1)
    title = [folder.path.name, *(line for end in by_step(folder.events, "gain").values() for line in gained(end))]
    axes.set_title("\n".join(title), fontsize=8)
    axes.set(xlabel="step", ylabel="mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    return figure


def _numbers(points: Sequence[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    """Steps and values; what was not finite leaves a gap."""
    return [step for step, _ in points], [float("nan") if value is None else value for _, value in points]


def boxes(folder: RunFolder, reader: BoxReader) -> Figure | None:
    """Held-out images with the true box and those of the first and the last evaluation; None without two such evaluations."""
    from matplotlib.figure import Figure

    files = list(folder.evaluations.files().items())
    if len(files) < 2:
        return None
    (first, before), (last, after) = ((step, _answers(file)) for step, file in (files[0], files[-1]))
    common = (after[task] for task in sorted(before.keys() & after.keys()))
    chosen = evenly([r for r in common if r["images"] and r["truth"] is not None and reader.true(r["truth"])], PAGES)
    if not chosen:
        return None
    rows = -(-len(chosen) // COLUMNS)
    figure = Figure(figsize=(12, 3.4 * rows), layout="constrained")
    grid: list[Any] = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes in grid:
        axes.set_axis_off()
    for axes, record in zip(grid, chosen, strict=False):
        _page(axes, folder.evaluations.path, before[record["task"]], record, reader)
    handles = [_rectangle((0, 0, 1, 1), 1, 1, kind) for kind in STYLES]
    labels = ["true", f"before (step {first})", f"after (step {last})"]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    if note := tint_note(configuration(folder)):
        figure.suptitle(note, fontsize=8)
    return figure


def _answers(file: Path) -> dict[str, Record]:
    """Task -> its answer with the right image."""
    return {record["task"]: record for record in JsonLines(file) if record["arm"] == RIGHT and not record["sample"]}


def _page(axes: Axes, folder: Path, before: Record, after: Record, reader: BoxReader) -> None:
    picture = decode(image_path(after["images"][0], folder).read_bytes())
    axes.imshow(picture)
    found = {
        "true": reader.true(after["truth"]),
        "before": reader.answered(before["text"]),
        "after": reader.answered(after["text"]),
    }
    for kind, several in found.items():
        for box in several:
            axes.add_patch(_rectangle(box, picture.width, picture.height, kind))
    axes.set_title(f"{after['task']}\n{_reward(before)} → {_reward(after)}", fontsize=8)


def _rectangle(box: Box, width: float, height: float, kind: str) -> Any:
    from matplotlib.patches import Rectangle

    (x1, y1, x2, y2), (color, style) = box, STYLES[kind]
    corner, sides = (x1 * width, y1 * height), ((x2 - x1) * width, (y2 - y1) * height)
    return Rectangle(corner, *sides, fill=False, edgecolor=color, linestyle=style, linewidth=2)


def _reward(record: Record) -> str:
    return "no score" if record["reward"] is None else f"{record['reward']:.2f}"


Colours = Literal["true", "256"]


def colours(environment: Mapping[str, str], terminal: bool) -> Colours | None:
    """The colours that a terminal shows, from the environment's variables (https://no-color.org too); None for none."""
    kind = environment.get("TERM", "")
    if not terminal or environment.get("NO_COLOR") or kind in ("", "dumb"):
        return None
    if environment.get("COLORTERM") in ("truecolor", "24bit") or kind.endswith("-direct"):
        return "true"
    return "256" if "256" in kind else None


def blocks(picture: Image.Image, columns: int, kind: Colours = "true") -> str:
    """The picture as lines of text, at most ``columns`` characters wide; a character holds two pixels, one above the other."""
    width = max(1, min(columns, picture.width))
    height = max(2, 2 * round(picture.height * width / picture.width / 2))
    pixels = np.asarray(picture.convert("RGB").resize((width, height), Image.Resampling.BOX))
    system = ColorSystem.TRUECOLOR if kind == "true" else ColorSystem.EIGHT_BIT
    lines = []
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        both = zip(map(Color.from_rgb, *upper.T), map(Color.from_rgb, *lower.T), strict=True)
        cells = groupby(Style(color=above, bgcolor=below) for above, below in both)
        lines.append("".join(style.render("▀" * len([*same]), color_system=system) for style, same in cells))
    return "\n".join(lines)
